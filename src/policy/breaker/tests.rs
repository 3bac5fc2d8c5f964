use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::config::StatusSet;

fn config() -> config::Breaker {
    config::Breaker {
        consecutive_failures: Some(3),
        failure_rate: None,
        slow_rate: None,
        slow_after: Duration::from_secs(1),
        window: Duration::from_secs(10),
        min_requests: 10,
        open_for: Duration::from_secs(30),
        max_open_for: Duration::from_secs(300),
        half_open_probes: 1,
        failure_statuses: StatusSet::new([500, 502, 503, 504]),
        fair_chance: Duration::from_secs(1),
        is_shared: false,
    }
}

fn by_failure_rate() -> config::Breaker {
    config::Breaker { consecutive_failures: None, failure_rate: Some(Percent::new(50.0)), ..config() }
}

fn by_slow_rate() -> config::Breaker {
    config::Breaker { consecutive_failures: None, slow_rate: Some(Percent::new(50.0)), ..config() }
}

/// A breaker with a clock and without jitter, and what a call does with it.
struct Bench {
    breaker: Breaker,
    now: Instant,
}

impl Bench {
    fn new() -> Self {
        Self { breaker: Breaker::with_jitter(|| 0.5), now: Instant::now() }
    }

    fn pass(&mut self, seconds: f64) {
        self.now += Duration::from_secs_f64(seconds);
    }

    fn admit(&mut self, cfg: &config::Breaker) -> Ticket {
        self.breaker.admit(cfg, self.now).expect("it lets calls through")
    }

    fn finish(&mut self, cfg: &config::Breaker, ticket: Ticket, verdict: Verdict) -> Option<State> {
        self.breaker.finish(ticket, cfg, verdict, self.now)
    }

    fn call(&mut self, cfg: &config::Breaker, verdict: Verdict) -> Option<State> {
        let ticket = self.admit(cfg);
        self.finish(cfg, ticket, verdict)
    }

    fn is_refused(&mut self, cfg: &config::Breaker) -> bool {
        let refused = self.breaker.check(cfg, self.now).is_err();
        if refused {
            assert!(self.breaker.admit(cfg, self.now).is_err(), "check and admit agree");
        }
        refused
    }

    fn trip(&mut self, cfg: &config::Breaker) {
        for _ in 0..3 {
            self.call(cfg, Verdict::Failure);
        }
        assert_eq!(self.breaker.state(), State::Open);
    }

    /// Seconds until the next probe.
    fn wait(&mut self, cfg: &config::Breaker) -> f64 {
        let open = self.breaker.check(cfg, self.now).expect_err("it is open");
        (open.retry_at.expect("a time is known") - self.now).as_secs_f64()
    }
}

#[test]
fn failures_in_a_row_open_it_and_a_success_between_starts_over() {
    let (mut bench, cfg) = (Bench::new(), config());
    bench.call(&cfg, Verdict::Failure);
    bench.call(&cfg, Verdict::Failure);
    bench.call(&cfg, Verdict::Success);
    bench.call(&cfg, Verdict::Failure);
    assert_eq!(bench.call(&cfg, Verdict::Failure), None);
    assert_eq!(bench.call(&cfg, Verdict::Failure), Some(State::Open));
    assert!(bench.is_refused(&cfg));
    assert_eq!(bench.wait(&cfg), 30.0);
}

#[test]
fn neutral_ends_and_push_back_are_neither_failure_nor_success() {
    let (mut bench, cfg) = (Bench::new(), config());
    for _ in 0..100 {
        bench.call(&cfg, Verdict::Neutral);
        bench.call(&cfg, Verdict::PushBack { until: None });
    }
    assert_eq!(bench.breaker.state(), State::Closed);
    bench.call(&cfg, Verdict::Failure);
    bench.call(&cfg, Verdict::Failure);
    bench.call(&cfg, Verdict::Neutral);
    bench.call(&cfg, Verdict::PushBack { until: None });
    assert_eq!(bench.call(&cfg, Verdict::Failure), Some(State::Open), "they do not break the row either");
}

#[test]
fn failure_rate_needs_enough_requests_within_the_window() {
    let (mut bench, cfg) = (Bench::new(), by_failure_rate());
    for _ in 0..9 {
        assert_eq!(bench.call(&cfg, Verdict::Failure), None);
    }
    bench.pass(11.0);
    for _ in 0..5 {
        assert_eq!(bench.call(&cfg, Verdict::Success), None);
    }
    for _ in 0..4 {
        assert_eq!(bench.call(&cfg, Verdict::Failure), None);
    }
    assert_eq!(bench.call(&cfg, Verdict::Failure), Some(State::Open), "the tenth makes exactly a half");
}

#[test]
fn a_burst_and_a_spread_give_the_same_decision() {
    for gap in [0.0, 0.5] {
        let (mut bench, cfg) = (Bench::new(), by_failure_rate());
        let mut opened_at = None;
        for call in 0..16 {
            let verdict = if call % 2 == 0 { Verdict::Success } else { Verdict::Failure };
            if bench.call(&cfg, verdict).is_some() {
                opened_at = Some(call);
                break;
            }
            bench.pass(gap);
        }
        assert_eq!(opened_at, Some(9), "with gaps of {gap} s");
    }
}

#[test]
fn a_call_is_slow_when_it_passes_the_mark_not_when_it_ends() {
    let (mut bench, cfg) = (Bench::new(), by_slow_rate());
    let running: Vec<_> = (0..10).map(|_| bench.admit(&cfg)).collect();
    bench.pass(0.999);
    assert!(bench.breaker.check(&cfg, bench.now).is_ok());
    bench.pass(0.001);
    let open = bench.breaker.check(&cfg, bench.now).expect_err("ten calls hang");
    assert_eq!(open.moved, Some(State::Open));
    for ticket in running {
        assert_eq!(bench.finish(&cfg, ticket, Verdict::Success), None);
    }
    assert_eq!(bench.breaker.state(), State::Open);
}

#[test]
fn a_slow_call_is_counted_once() {
    let (mut bench, cfg) = (Bench::new(), by_slow_rate());
    for _ in 0..5 {
        bench.call(&cfg, Verdict::Success);
    }
    let slow: Vec<_> = (0..4).map(|_| bench.admit(&cfg)).collect();
    bench.pass(2.0);
    for ticket in slow {
        bench.finish(&cfg, ticket, Verdict::Success);
    }
    let counts = bench.breaker.window.sum();
    assert_eq!((counts.judged, counts.timed, counts.slow), (9, 9, 4));
    assert_eq!(bench.breaker.state(), State::Closed);
}

#[test]
fn hedging_does_not_hide_slow_calls() {
    let cfg = by_slow_rate();
    let cell = BreakerCell::new();
    let long_ago = Instant::now() - Duration::from_secs(2);
    for _ in 0..10 {
        drop(cell.admit(&cfg, long_ago).unwrap());
    }
    let open = cell.check(&cfg, Instant::now()).expect_err("ten losers were slow");
    assert_eq!(open.moved, Some(State::Open));
}

#[test]
fn quick_cancellations_are_not_counted() {
    let cfg = config::Breaker { slow_rate: Some(Percent::new(1.0)), ..config() };
    let cell = BreakerCell::new();
    for _ in 0..100 {
        drop(cell.admit(&cfg, Instant::now()).unwrap());
    }
    let snapshot = cell.snapshot(Instant::now());
    assert_eq!((snapshot.state, snapshot.requests, snapshot.slow_rate), (State::Closed, 0, None));
}

#[test]
fn what_runs_is_all_that_is_remembered() {
    let (mut bench, cfg) = (Bench::new(), by_slow_rate());
    let hung = bench.admit(&cfg);
    for _ in 0..1_000 {
        bench.call(&cfg, Verdict::Success);
    }
    assert_eq!(bench.breaker.running.len(), 1);
    bench.breaker.abandon(hung, bench.now);
    assert_eq!(bench.breaker.running.len(), 0);
    bench.admit(&cfg);
    bench.breaker.check(&config(), bench.now).unwrap();
    assert_eq!(bench.breaker.running.len(), 0, "with the rule off nothing is kept");
}

#[test]
fn half_open_lets_just_the_probes_through() {
    let mut bench = Bench::new();
    let cfg = config::Breaker { half_open_probes: 2, ..config() };
    bench.trip(&cfg);
    bench.pass(29.9);
    assert!(bench.is_refused(&cfg));
    bench.pass(0.1);
    assert!(bench.breaker.check(&cfg, bench.now).is_ok());
    assert_eq!(bench.breaker.state(), State::Open, "a question takes no place");
    let first = bench.admit(&cfg);
    let second = bench.admit(&cfg);
    assert!(first.is_probe && second.is_probe);
    let refused = bench.breaker.check(&cfg, bench.now).unwrap_err();
    assert_eq!(refused.retry_at, None);
    assert_eq!(bench.finish(&cfg, first, Verdict::Success), None);
    assert!(bench.is_refused(&cfg), "a probe that succeeded leaves no place for a third");
    assert_eq!(bench.finish(&cfg, second, Verdict::Success), Some(State::Closed));
    assert_eq!(bench.breaker.snapshot(bench.now).failures_in_row, 0);
    assert!(!bench.admit(&cfg).is_probe);
}

#[test]
fn a_failed_probe_doubles_the_wait_up_to_its_bound_and_success_starts_over() {
    let (mut bench, cfg) = (Bench::new(), config());
    bench.trip(&cfg);
    for seconds in [30.0, 60.0, 120.0, 240.0, 300.0, 300.0] {
        assert_eq!(bench.wait(&cfg), seconds);
        bench.pass(seconds);
        assert_eq!(bench.call(&cfg, Verdict::Failure), Some(State::Open));
    }
    bench.pass(300.0);
    assert_eq!(bench.call(&cfg, Verdict::Success), Some(State::Closed));
    bench.trip(&cfg);
    assert_eq!(bench.wait(&cfg), 30.0);
}

#[test]
fn jitter_spreads_the_wait_by_a_tenth() {
    for (jitter, seconds) in [(0.0, 27.0), (1.0, 33.0)] {
        let mut bench = Bench::new();
        bench.breaker = Breaker::with_jitter(if jitter == 0.0 { || 0.0 } else { || 1.0 });
        bench.trip(&config());
        assert!((bench.wait(&config()) - seconds).abs() < 1e-6);
    }
}

#[test]
fn a_cancelled_probe_frees_its_place_and_decides_nothing() {
    let (mut bench, cfg) = (Bench::new(), config());
    bench.trip(&cfg);
    bench.pass(30.0);
    for _ in 0..10 {
        let probe = bench.admit(&cfg);
        bench.breaker.abandon(probe, bench.now);
        assert_eq!(bench.breaker.state(), State::HalfOpen);
    }
    assert_eq!(bench.call(&cfg, Verdict::Neutral), None);
    assert_eq!(bench.call(&cfg, Verdict::Success), Some(State::Closed));
}

#[test]
fn a_probe_that_is_pushed_back_keeps_it_half_open_until_then() {
    let (mut bench, cfg) = (Bench::new(), config());
    bench.trip(&cfg);
    bench.pass(30.0);
    let until = Some(bench.now + Duration::from_secs(7));
    assert_eq!(bench.call(&cfg, Verdict::PushBack { until }), None);
    assert_eq!(bench.breaker.state(), State::HalfOpen);
    assert_eq!(bench.wait(&cfg), 7.0);
    bench.pass(7.0);
    assert_eq!(bench.call(&cfg, Verdict::Success), Some(State::Closed));
}

#[test]
fn a_push_back_of_a_day_holds_no_longer_than_the_longest_wait() {
    let (mut bench, cfg) = (Bench::new(), config());
    bench.trip(&cfg);
    bench.pass(30.0);
    let until = Some(bench.now + Duration::from_secs(86_400));
    bench.call(&cfg, Verdict::PushBack { until });
    assert_eq!(bench.wait(&cfg), 300.0);
}

#[test]
fn a_slow_probe_fails_when_slowness_is_a_rule() {
    let (mut bench, cfg) = (Bench::new(), by_slow_rate());
    let running: Vec<_> = (0..10).map(|_| bench.admit(&cfg)).collect();
    bench.pass(1.0);
    drop(running);
    assert!(bench.is_refused(&cfg));
    bench.pass(30.0);
    let probe = bench.admit(&cfg);
    bench.pass(1.0);
    assert!(bench.is_refused(&cfg));
    assert_eq!(bench.breaker.state(), State::Open);
    assert_eq!(bench.wait(&cfg), 60.0);
    assert_eq!(bench.finish(&cfg, probe, Verdict::Success), None);
    assert_eq!(bench.breaker.state(), State::Open);
}

#[test]
fn late_results_of_an_earlier_state_are_dropped() {
    let (mut bench, cfg) = (Bench::new(), config());
    let before: Vec<_> = (0..6).map(|_| bench.admit(&cfg)).collect();
    bench.trip(&cfg);
    assert_eq!(bench.finish(&cfg, before[0], Verdict::Success), None);
    assert_eq!(bench.breaker.state(), State::Open, "an old success does not close it");
    bench.pass(30.0);
    let probe = bench.admit(&cfg);
    assert_eq!(bench.finish(&cfg, before[1], Verdict::Failure), None);
    bench.breaker.abandon(before[2], bench.now);
    assert_eq!(bench.breaker.snapshot(bench.now).probes, 1, "nor does it free a place that is not its own");
    assert_eq!(bench.finish(&cfg, probe, Verdict::Success), Some(State::Closed));
    for old in &before[3..] {
        assert_eq!(bench.finish(&cfg, *old, Verdict::Failure), None);
    }
    assert_eq!(bench.breaker.state(), State::Closed, "old failures do not count against the new start");
}

#[test]
fn an_operator_overrules_what_is_measured() {
    let (mut bench, cfg) = (Bench::new(), config());
    assert_eq!(bench.breaker.force_open(), Some(State::Open));
    bench.pass(86_400.0);
    assert_eq!(
        bench.breaker.check(&cfg, bench.now),
        Err(Open { retry_at: None, is_due: false, moved: None })
    );
    assert_eq!(bench.breaker.force_closed(), Some(State::Closed));
    for _ in 0..10 {
        assert_eq!(bench.call(&cfg, Verdict::Failure), None);
    }
    assert!(bench.breaker.snapshot(bench.now).is_forced);
    assert_eq!(bench.breaker.reset(), None, "closed before and after");
    bench.trip(&cfg);
    assert_eq!(bench.breaker.reset(), Some(State::Closed));
    assert_eq!(bench.breaker.snapshot(bench.now).failures_in_row, 0);
}

#[test]
fn settings_of_a_reload_hold_at_once_and_keep_the_counts() {
    let (mut bench, cfg) = (Bench::new(), config());
    bench.call(&cfg, Verdict::Failure);
    bench.call(&cfg, Verdict::Failure);
    let stricter = config::Breaker { consecutive_failures: Some(2), ..config() };
    assert!(bench.is_refused(&stricter));

    let mut bench = Bench::new();
    for _ in 0..9 {
        bench.call(&by_failure_rate(), Verdict::Failure);
    }
    bench.pass(5.0);
    let longer = config::Breaker { window: Duration::from_secs(60), ..by_failure_rate() };
    assert_eq!(bench.call(&longer, Verdict::Success), Some(State::Open), "nine of ten failed");

    let mut bench = Bench::new();
    let two = config::Breaker { half_open_probes: 2, ..config() };
    bench.trip(&two);
    bench.pass(30.0);
    bench.call(&two, Verdict::Success);
    assert_eq!(bench.breaker.state(), State::HalfOpen);
    assert!(bench.breaker.check(&config(), bench.now).is_ok(), "one probe is enough now");
    assert_eq!(bench.breaker.state(), State::Closed);
}

/// Otherwise each call would ask whether it may probe, from the end of what was said first until the probe is over.
#[test]
fn a_probe_that_goes_on_is_waited_for_longer() {
    let (mut bench, cfg) = (Bench::new(), config::Breaker { is_shared: true, ..config() });
    let word = |seconds| shared::Word {
        state: Some(State::HalfOpen),
        since: 7,
        remaining: Duration::from_secs(seconds),
        reopens: 0,
    };
    let is_due = |bench: &mut Bench| bench.breaker.check(&cfg, bench.now).unwrap_err().is_due;
    assert_eq!(bench.breaker.hear(word(10), bench.now), Some(State::Open));
    bench.pass(10.0);
    assert!(is_due(&mut bench));
    assert_eq!(bench.breaker.hear(word(9), bench.now), None);
    assert!(!is_due(&mut bench));
    bench.pass(9.0);
    assert!(is_due(&mut bench));
}

#[test]
fn a_dropped_admission_is_a_cancelled_one() {
    let cfg = config();
    let cell = BreakerCell::new();
    let past = Instant::now() - Duration::from_secs(60);
    for _ in 0..3 {
        cell.admit(&cfg, past).unwrap().finish(&cfg, Verdict::Failure, past);
    }
    let now = Instant::now();
    let probe = cell.admit(&cfg, now).unwrap();
    assert!(probe.is_probe());
    assert_eq!(probe.moved(), Some(State::HalfOpen));
    assert!(cell.admit(&cfg, now).is_err());
    drop(probe);
    let next = cell.admit(&cfg, now).expect("the place is free");
    assert_eq!(next.finish(&cfg, Verdict::Success, now), Some(State::Closed));
}

#[test]
fn of_many_threads_one_gets_the_probe() {
    let cfg = config();
    let cell = BreakerCell::new();
    let past = Instant::now() - Duration::from_secs(60);
    for _ in 0..3 {
        cell.admit(&cfg, past).unwrap().finish(&cfg, Verdict::Failure, past);
    }
    let barrier = std::sync::Barrier::new(8);
    let admitted: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    barrier.wait();
                    let admission = cell.admit(&cfg, Instant::now()).ok();
                    barrier.wait();
                    usize::from(admission.is_some())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(admitted, 1);
    assert_eq!(Arc::strong_count(&cell), 1);
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Call(Verdict),
    Wait(u64),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        3 => Just(Event::Call(Verdict::Success)),
        4 => Just(Event::Call(Verdict::Failure)),
        2 => Just(Event::Call(Verdict::Unreached)),
        1 => Just(Event::Call(Verdict::Neutral)),
        1 => Just(Event::Call(Verdict::PushBack { until: None })),
        3 => (1u64..100).prop_map(Event::Wait),
    ];
    prop::collection::vec(event, 1..200)
}

proptest! {
    /// The model: failures in a row when closed, the time when open, the level of back-off.
    #[test]
    fn it_agrees_with_a_ten_line_model(events in events()) {
        let (mut bench, cfg) = (Bench::new(), config());
        let (mut row, mut open_until, mut level) = (0, None, 0u32);
        let mut clock = 0u64;
        for event in events {
            match event {
                Event::Wait(seconds) => {
                    clock += seconds;
                    bench.pass(seconds as f64);
                }
                Event::Call(verdict) => {
                    let passes = open_until.is_none_or(|until| until <= clock);
                    prop_assert_eq!(!bench.is_refused(&cfg), passes);
                    if !passes {
                        continue;
                    }
                    bench.call(&cfg, verdict);
                    match (verdict, open_until) {
                        (Verdict::Success, _) => (row, open_until, level) = (0, None, 0),
                        (Verdict::Failure | Verdict::Unreached, None) => row += 1,
                        (Verdict::Failure | Verdict::Unreached, Some(_)) => level += 1,
                        (Verdict::Neutral | Verdict::PushBack { .. }, _) => {}
                    }
                    let has_failed = matches!(verdict, Verdict::Failure | Verdict::Unreached);
                    if has_failed && (row >= 3 || open_until.is_some()) {
                        open_until = Some(clock + (30 << level).min(300));
                        row = 0;
                    }
                    let is_closed = bench.breaker.state() == State::Closed;
                    prop_assert_eq!(is_closed, open_until.is_none());
                }
            }
        }
    }
}
