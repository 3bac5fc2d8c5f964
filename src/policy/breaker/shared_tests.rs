//! The state machine as one of a fleet, without a connection: what it tells, and what it makes of what it hears.

use proptest::prelude::*;

use super::shared::{Lease, News, Word, quorum};
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
        is_shared: true,
    }
}

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn word(state: State, since: u64, remaining: Duration) -> Word {
    Word { state: Some(state), since, remaining, reopens: 0 }
}

#[test]
fn all_of_few_pods_and_a_share_of_many_make_the_quorum() {
    let quorums = [(2, 1), (2, 2), (2, 8), (2, 400), (2, 401), (2, 10_000), (100, 10_000), (100, 30), (1, 8)];
    let expected = [1, 2, 2, 2, 3, 50, 100, 30, 1];
    assert_eq!(quorums.map(|(least, pods)| quorum(least, pods)), expected);
    assert_eq!(quorum(2, u32::MAX), config::LARGEST_QUORUM, "what the script can look through");
}

struct Bench {
    breaker: Breaker,
    cfg: config::Breaker,
    now: Instant,
}

impl Bench {
    fn new() -> Self {
        Self { breaker: Breaker::with_jitter(|| 0.5), cfg: config(), now: Instant::now() }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
    }

    fn call(&mut self, verdict: Verdict) -> Option<State> {
        let ticket = self.breaker.admit(&self.cfg, self.now).expect("it lets calls through");
        self.breaker.finish(ticket, &self.cfg, verdict, self.now)
    }

    fn trip(&mut self) {
        for _ in 0..3 {
            self.call(Verdict::Failure);
        }
    }

    fn news(&mut self) -> Option<News> {
        self.breaker.news.take()
    }

    fn hear(&mut self, state: State, since: u64, remaining: Duration) -> Option<State> {
        self.breaker.hear(word(state, since, remaining), self.now)
    }

    fn refusal(&mut self) -> Open {
        self.breaker.check(&self.cfg, self.now).expect_err("it refuses")
    }
}

#[test]
fn what_any_pod_would_have_met_is_told_and_nothing_else() {
    let mut bench = Bench::new();
    bench.trip();
    let until = bench.now + secs(30);
    assert_eq!(bench.news(), Some(News::Tripped { failures: 3, until }));

    let mut bench = Bench::new();
    for verdict in [Verdict::Failure, Verdict::Unreached, Verdict::Failure] {
        bench.call(verdict);
    }
    assert_eq!(bench.breaker.state(), State::Open, "it is this pod's own business to stop");
    assert_eq!(bench.news(), None, "two failures that others could have met are too few");

    let mut bench = Bench::new();
    bench.cfg.is_shared = false;
    bench.trip();
    assert_eq!(bench.news(), None);
}

#[test]
fn a_rate_of_failures_is_told_when_it_stands_without_the_unreached_ones() {
    for (kind, is_told) in [(Verdict::Failure, true), (Verdict::Unreached, false)] {
        let mut bench = Bench::new();
        bench.cfg.consecutive_failures = None;
        bench.cfg.failure_rate = Some(Percent::new(50.0));
        for verdict in [Verdict::Success; 5].into_iter().chain([kind; 5]) {
            bench.call(verdict);
        }
        assert_eq!(bench.breaker.state(), State::Open);
        assert_eq!(bench.news().is_some(), is_told, "{kind:?}");
    }
}

#[test]
fn the_fleet_opens_it_and_says_when_a_probe_is_due() {
    let mut bench = Bench::new();
    assert_eq!(bench.hear(State::Open, 7, secs(20)), Some(State::Open));
    let refusal = bench.refusal();
    assert_eq!((refusal.retry_at, refusal.is_due), (Some(bench.now + secs(20)), false));
    bench.pass(secs(20));
    let refusal = bench.refusal();
    assert_eq!((refusal.retry_at, refusal.is_due), (None, true), "the fleet decides who probes");
    assert_eq!(bench.news(), None);
    assert!(bench.breaker.snapshot(bench.now).is_fleets);
}

#[test]
fn old_news_changes_nothing() {
    let mut bench = Bench::new();
    bench.hear(State::Open, 9, secs(20));
    for since in [0, 8, 9] {
        assert_eq!(bench.hear(State::Closed, since, secs(0)), None);
    }
    assert_eq!(bench.breaker.state(), State::Open);
    assert_eq!(bench.hear(State::Closed, 10, secs(0)), Some(State::Closed));
}

#[test]
fn a_fleet_without_a_state_leaves_all_as_it_is() {
    let nothing = Word { state: None, since: 0, remaining: secs(0), reopens: 0 };
    let mut bench = Bench::new();
    bench.hear(State::Open, 9, secs(20));
    assert_eq!(bench.breaker.hear(nothing, bench.now), None);
    assert_eq!(bench.breaker.state(), State::Open, "what was lost there is not forgotten here");
}

#[test]
fn while_another_pod_probes_this_one_waits_for_it() {
    let mut bench = Bench::new();
    bench.hear(State::Open, 1, secs(0));
    assert!(bench.refusal().is_due);
    assert_eq!(bench.hear(State::HalfOpen, 2, secs(10)), None, "it was open before");
    let refusal = bench.refusal();
    assert_eq!((refusal.retry_at, refusal.is_due), (Some(bench.now + secs(10)), false));
    bench.pass(secs(10));
    assert!(bench.refusal().is_due, "the other one has vanished");
}

#[test]
fn the_pod_that_may_probe_tells_what_came_of_it() {
    for (verdict, state) in [(Verdict::Success, State::Closed), (Verdict::Failure, State::Open)] {
        let mut bench = Bench::new();
        bench.breaker.hear(Word { reopens: 1, ..word(State::Open, 1, secs(0)) }, bench.now);
        bench.breaker.take_lease(Lease { until: bench.now + secs(10), since: 2 }, 0);
        assert_eq!(bench.breaker.state(), State::HalfOpen);
        assert_eq!(bench.call(verdict), Some(state));
        let expected = match state {
            State::Closed => News::Closed { since: 2 },
            _ => News::Reopened { since: 2, until: bench.now + secs(120), reopens: 2 },
        };
        assert_eq!(bench.news(), Some(expected));
    }
}

#[test]
fn a_probe_that_decides_nothing_is_handed_back() {
    let mut bench = Bench::new();
    bench.hear(State::Open, 1, secs(0));
    bench.breaker.take_lease(Lease { until: bench.now + secs(10), since: 2 }, 0);
    let ticket = bench.breaker.admit(&bench.cfg, bench.now).unwrap();
    bench.breaker.abandon(ticket, bench.now);
    assert_eq!(bench.news(), Some(News::HandedBack { since: 2, until: bench.now, succeeded: 0 }));
    assert!(bench.refusal().is_due, "this pod has to ask again as well");

    bench.breaker.take_lease(Lease { until: bench.now + secs(10), since: 3 }, 0);
    let until = bench.now + secs(7);
    bench.call(Verdict::PushBack { until: Some(until) });
    assert_eq!(bench.news(), Some(News::HandedBack { since: 3, until, succeeded: 0 }));
    assert_eq!(bench.refusal().retry_at, Some(until));
}

#[test]
fn probes_of_several_pods_add_up() {
    let mut bench = Bench::new();
    bench.cfg.half_open_probes = 3;
    bench.hear(State::Open, 1, secs(0));
    bench.breaker.take_lease(Lease { until: bench.now + secs(10), since: 2 }, 1);
    assert_eq!(bench.call(Verdict::Success), Some(State::Open));
    assert_eq!(bench.news(), Some(News::HandedBack { since: 2, until: bench.now, succeeded: 2 }));
    bench.breaker.take_lease(Lease { until: bench.now + secs(10), since: 3 }, 2);
    assert_eq!(bench.call(Verdict::Success), Some(State::Closed));
    assert_eq!(bench.news(), Some(News::Closed { since: 3 }));
}

#[test]
fn a_lease_that_nobody_used_ends_by_itself() {
    let mut bench = Bench::new();
    bench.hear(State::Open, 1, secs(0));
    bench.breaker.take_lease(Lease { until: bench.now + secs(10), since: 2 }, 0);
    bench.pass(secs(10));
    assert!(bench.refusal().is_due);
}

#[test]
fn a_lease_that_comes_too_late_is_not_taken() {
    let mut bench = Bench::new();
    bench.hear(State::Open, 1, secs(0));
    bench.hear(State::Closed, 5, secs(0));
    bench.breaker.take_lease(Lease { until: bench.now + secs(10), since: 2 }, 0);
    assert_eq!(bench.breaker.state(), State::Closed);
}

#[test]
fn without_an_answer_it_probes_by_itself() {
    let mut bench = Bench::new();
    bench.hear(State::Open, 1, secs(0));
    bench.breaker.stand_alone();
    assert_eq!(bench.call(Verdict::Success), Some(State::Closed));
    assert_eq!(bench.news(), None, "there was no leave to give back, and no failure to take back");
}

#[test]
fn what_was_told_is_taken_back_when_it_is_over() {
    let mut bench = Bench::new();
    bench.trip();
    bench.news();
    bench.pass(secs(30));
    bench.call(Verdict::Success);
    assert_eq!(bench.news(), Some(News::Recanted));

    let mut bench = Bench::new();
    bench.trip();
    bench.news();
    bench.hear(State::Open, 1, secs(20));
    bench.hear(State::Closed, 2, secs(0));
    assert_eq!(bench.news(), None, "with the fleet's own state it was over");
}

#[test]
fn its_own_word_is_told_again_when_the_fleet_may_have_lost_it() {
    let cell = BreakerCell::new();
    let (cfg, now) = (config(), Instant::now());
    for _ in 0..3 {
        let _ = cell.admit(&cfg, now).unwrap().finish(&cfg, Verdict::Failure, now);
    }
    let told = cell.take_news();
    assert!(matches!(told, Some(News::Tripped { failures: 3, .. })));
    cell.accuse_again();
    assert_eq!(cell.take_news(), told);
    cell.hear(word(State::Open, 1, secs(20)), now);
    cell.accuse_again();
    assert_eq!(cell.take_news(), None);
}

#[test]
fn an_operators_hold_is_stronger_than_the_fleets_word() {
    let mut bench = Bench::new();
    bench.breaker.force_closed();
    assert_eq!(bench.hear(State::Open, 1, secs(20)), None);
    assert_eq!(bench.breaker.state(), State::Closed);

    let mut bench = Bench::new();
    bench.hear(State::Open, 1, secs(0));
    bench.breaker.take_lease(Lease { until: bench.now + secs(10), since: 2 }, 0);
    bench.breaker.force_open();
    assert!(matches!(bench.news(), Some(News::HandedBack { .. })), "another pod may find out");
}

#[test]
fn a_policy_that_shares_no_more_goes_by_its_own() {
    let mut bench = Bench::new();
    bench.hear(State::Open, 1, secs(20));
    bench.cfg.is_shared = false;
    assert!(!bench.refusal().is_due);
    bench.pass(secs(20));
    assert_eq!(bench.call(Verdict::Success), Some(State::Closed));
}

#[test]
fn words_are_read_as_they_were_written() {
    let (pod, id, read) = Word::parse("ab12 open 1796070921214 29932 2 [::1]:80 a route").unwrap();
    assert_eq!((pod, &*id.authority, id.route.as_deref()), ("ab12", "[::1]:80", Some("a route")));
    let expected = Word {
        state: Some(State::Open),
        since: 1_796_070_921_214,
        remaining: Duration::from_millis(29_932),
        reopens: 2,
    };
    assert_eq!(read, expected);
    let (_, id, read) = Word::parse("ab12 thawed 1 0 0 a.example:443 ").unwrap();
    assert_eq!((id.route, read.state), (None, None), "a state of another version is none");
    for odd in ["", "x", "a open", "a open x 0 0 b:1 ", "a open 1 -5 0 b:1 ", "a open 1 0 0"] {
        assert!(Word::parse(odd).is_none(), "{odd}");
    }
}

#[derive(Debug, Clone)]
enum Event {
    Call(Verdict),
    Hear(State, u64, u64),
    Lease,
    Alone,
    Wait(u64),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let verdict = prop_oneof![
        Just(Verdict::Success),
        Just(Verdict::Failure),
        Just(Verdict::Unreached),
        Just(Verdict::Neutral),
    ];
    let state = prop_oneof![Just(State::Open), Just(State::HalfOpen), Just(State::Closed)];
    let event = prop_oneof![
        6 => verdict.prop_map(Event::Call),
        3 => (state, 0u64..50, 0u64..40).prop_map(|(state, since, wait)| Event::Hear(state, since, wait)),
        1 => Just(Event::Lease),
        1 => Just(Event::Alone),
        3 => (1u64..40).prop_map(Event::Wait),
    ];
    prop::collection::vec(event, 1..120)
}

proptest! {
    /// Whatever is heard in whatever order: time and leave always lead out of open, and a pod without leave sends
    /// no probe where the fleet has opened it.
    #[test]
    fn nothing_that_is_heard_leaves_it_stuck(events in events()) {
        let mut bench = Bench::new();
        for event in events {
            match event {
                Event::Call(verdict) => {
                    let before = bench.breaker.snapshot(bench.now);
                    if let Ok(ticket) = bench.breaker.admit(&bench.cfg, bench.now) {
                        prop_assert!(!(before.is_fleets && before.state == State::Open));
                        bench.breaker.finish(ticket, &bench.cfg, verdict, bench.now);
                    }
                }
                Event::Hear(state, since, wait) => {
                    bench.hear(state, since, secs(wait));
                }
                Event::Lease => bench.breaker.take_lease(Lease { until: bench.now + secs(10), since: 0 }, 0),
                Event::Alone => bench.breaker.stand_alone(),
                Event::Wait(seconds) => bench.pass(secs(seconds)),
            }
        }
        bench.pass(secs(400));
        if let Err(refusal) = bench.breaker.check(&bench.cfg, bench.now) {
            prop_assert!(refusal.is_due);
            bench.breaker.take_lease(Lease { until: bench.now + secs(10), since: 0 }, 0);
        }
        bench.call(Verdict::Success);
        prop_assert_eq!(bench.breaker.state(), State::Closed);
    }
}
