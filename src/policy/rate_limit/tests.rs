use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use http::header::{self, HeaderMap};
use proptest::prelude::*;
use tokio::task::JoinHandle;

use super::*;
use crate::units::Rate;

fn config(per_second: f64, burst: u32) -> RateLimit {
    RateLimit {
        rate: Rate::per_second(per_second),
        burst,
        max_pause: Duration::from_secs(60),
        is_shared: false,
    }
}

fn credential(n: usize) -> Option<Credential> {
    let mut headers = HeaderMap::new();
    headers.insert(header::AUTHORIZATION, format!("Bearer {n}").parse().unwrap());
    Credential::of(&headers)
}

fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// When the call got its token, from `start` on.
fn spawn(
    limiter: &Arc<RateLimiter>,
    cfg: RateLimit,
    who: Option<Credential>,
    deadline: Option<Duration>,
) -> JoinHandle<Result<Duration, TooLate>> {
    let limiter = Arc::clone(limiter);
    let start = Instant::now();
    let deadline = deadline.map(|deadline| start + deadline);
    tokio::spawn(async move { limiter.acquire(&cfg, who, start, deadline).await.map(|()| start.elapsed()) })
}

/// Lets all tasks get as far as they come by themselves, in a millisecond.
async fn settle() {
    tokio::time::sleep(millis(1)).await;
}

fn take_all(limiter: &RateLimiter, cfg: &RateLimit, who: Option<Credential>) -> usize {
    std::iter::repeat_with(|| limiter.try_acquire(cfg, who, Instant::now()))
        .take_while(|is_there| *is_there)
        .count()
}

#[tokio::test(start_paused = true)]
async fn tokens_come_in_order_of_arrival_at_the_rate() {
    let limiter = Arc::new(RateLimiter::default());
    let cfg = config(200.0, 3);
    let calls: Vec<_> = (0..8).map(|_| spawn(&limiter, cfg, None, None)).collect();
    let mut waits = Vec::new();
    for call in calls {
        waits.push(call.await.unwrap().unwrap().as_millis());
    }
    assert_eq!(waits, [0, 0, 0, 5, 10, 15, 20, 25]);
}

#[tokio::test(start_paused = true)]
async fn a_token_that_would_come_too_late_is_refused_at_once_with_the_time_to_come_back() {
    let limiter = RateLimiter::default();
    let cfg = config(10.0, 1);
    let now = Instant::now();
    assert!(limiter.try_acquire(&cfg, None, now));
    let mut first = pin!(limiter.acquire(&cfg, None, now, Some(now + millis(101))));
    assert!(poll_once(first.as_mut()).is_pending());
    // One is ahead, so it is the second token that counts.
    let late = limiter.acquire(&cfg, None, now, Some(now + millis(200))).await.unwrap_err();
    assert_eq!(late, TooLate { retry_at: now + millis(200) });
    let mut second = pin!(limiter.acquire(&cfg, None, now, Some(now + millis(201))));
    assert!(poll_once(second.as_mut()).is_pending());
    assert_eq!(Instant::now(), now);
    assert_eq!(first.await, Ok(()));
    assert_eq!(second.await, Ok(()));
    assert_eq!(now.elapsed(), millis(200));
}

#[tokio::test(start_paused = true)]
async fn c101_who_comes_back_when_told_gets_a_token() {
    let limiter = Arc::new(RateLimiter::default());
    let cfg = config(10.0, 2);
    take_all(&limiter, &cfg, None);
    let ahead: Vec<_> = (0..5).map(|_| spawn(&limiter, cfg, None, None)).collect();
    settle().await;
    let now = Instant::now();
    let TooLate { retry_at } = limiter.acquire(&cfg, None, now, Some(now + millis(5))).await.unwrap_err();
    tokio::time::sleep_until(retry_at).await;
    assert!(limiter.try_acquire(&cfg, None, Instant::now()));
    assert!(ahead.iter().all(JoinHandle::is_finished));
}

#[tokio::test(start_paused = true)]
async fn a_hedge_takes_only_what_nobody_waits_for() {
    let limiter = Arc::new(RateLimiter::default());
    let cfg = config(100.0, 1);
    assert!(limiter.try_acquire(&cfg, None, Instant::now()));
    let call = spawn(&limiter, cfg, None, None);
    tokio::task::yield_now().await;
    // The token is there, but the clock of the one it belongs to has not rung yet.
    tokio::time::advance(millis(10)).await;
    assert_eq!(limiter.view(&cfg, Instant::now()).tokens, 1);
    assert!(!limiter.try_acquire(&cfg, None, Instant::now()));
    call.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn who_leaves_takes_nothing_and_delays_nobody() {
    let limiter = Arc::new(RateLimiter::default());
    let cfg = config(100.0, 1);
    take_all(&limiter, &cfg, None);
    let calls: Vec<_> = (0..6).map(|_| spawn(&limiter, cfg, None, None)).collect();
    tokio::task::yield_now().await;
    for leaver in [0, 1, 3] {
        calls[leaver].abort();
    }
    let mut waits = Vec::new();
    for call in calls {
        waits.extend(call.await.ok().map(|wait| wait.unwrap().as_millis()));
    }
    assert_eq!(waits, [10, 20, 30]);
}

#[tokio::test(start_paused = true)]
async fn a_pause_of_one_credential_holds_up_no_other() {
    let limiter = Arc::new(RateLimiter::default());
    let cfg = config(100.0, 1);
    let (a, b) = (credential(1), credential(2));
    take_all(&limiter, &cfg, None);
    let of_a: Vec<_> = (0..20).map(|_| spawn(&limiter, cfg, a, None)).collect();
    tokio::task::yield_now().await;
    let now = Instant::now();
    limiter.pause(&cfg, Whom::Credential(a), now + millis(500), now);
    assert_eq!(limiter.view(&cfg, now).held, 20);
    // Of the twenty that were in line before them none counts any more, nor does a newcomer of the group.
    let of_b: Vec<_> = (1..=3).map(|n| spawn(&limiter, cfg, b, Some(millis(10 * n + 1)))).collect();
    let late = spawn(&limiter, cfg, a, Some(millis(400)));
    let without = spawn(&limiter, cfg, None, None);
    let mut waits = Vec::new();
    for call in of_b.into_iter().chain([without]) {
        waits.push(call.await.unwrap().unwrap().as_millis());
    }
    assert_eq!(waits, [10, 20, 30, 40]);
    // The surge goes through the bucket, which has filled up meanwhile, in order of arrival.
    let mut waits = Vec::new();
    for call in of_a {
        waits.push(call.await.unwrap().unwrap().as_millis());
    }
    let due: Vec<_> = (0..20).map(|n| 500 + 10 * n).collect();
    assert_eq!(waits, due);
    let TooLate { retry_at } = late.await.unwrap().unwrap_err();
    assert_eq!(retry_at, now + millis(700), "after the end of the pause and those held before it");
}

#[tokio::test(start_paused = true)]
async fn calls_without_credentials_are_a_group_of_their_own() {
    let limiter = RateLimiter::default();
    let cfg = config(100.0, 10);
    let now = Instant::now();
    limiter.pause(&cfg, Whom::Credential(None), now + millis(500), now);
    assert!(!limiter.try_acquire(&cfg, None, now));
    assert!(limiter.try_acquire(&cfg, credential(1), now));
    assert!(limiter.try_acquire(&cfg, None, now + millis(500)));
}

#[tokio::test(start_paused = true)]
async fn a_pause_of_everyone_is_waited_out_in_line() {
    let limiter = Arc::new(RateLimiter::default());
    let cfg = config(100.0, 2);
    let now = Instant::now();
    limiter.pause(&cfg, Whom::Everyone, now + millis(300), now);
    assert!(!limiter.try_acquire(&cfg, None, now));
    let calls: Vec<_> = (0..4).map(|n| spawn(&limiter, cfg, credential(n), Some(millis(321)))).collect();
    tokio::task::yield_now().await;
    let late = limiter.acquire(&cfg, None, now, Some(now + millis(321))).await.unwrap_err();
    assert_eq!(late.retry_at, now + millis(330));
    let mut waits = Vec::new();
    for call in calls {
        waits.push(call.await.unwrap().unwrap().as_millis());
    }
    assert_eq!(waits, [300, 300, 310, 320]);
}

#[tokio::test(start_paused = true)]
async fn a_pause_is_capped_and_only_ever_gets_longer() {
    let limiter = RateLimiter::default();
    let cfg = config(100.0, 10);
    let now = Instant::now();
    let end = |whom| {
        let limiter = RateLimiter::default();
        for until in [5, 2, 9, 1] {
            limiter.pause(&cfg, whom, now + Duration::from_secs(until), now);
        }
        limiter.view(&cfg, now).paused_until
    };
    assert_eq!(end(Whom::Everyone), Some(now + Duration::from_secs(9)));
    assert_eq!(end(Whom::Credential(None)), Some(now + Duration::from_secs(9)));
    for whom in [Whom::Everyone, Whom::Credential(None)] {
        limiter.pause(&cfg, whom, now + Duration::from_secs(86_400), now);
        assert_eq!(limiter.view(&cfg, now).paused_until, Some(now + cfg.max_pause));
    }
    let after = now + cfg.max_pause;
    assert_eq!(limiter.view(&cfg, after).paused_until, None);
    assert!(limiter.try_acquire(&cfg, None, after));
}

#[tokio::test(start_paused = true)]
async fn who_becomes_late_through_a_pause_hears_it_at_once() {
    for whom in [Whom::Everyone, Whom::Credential(None)] {
        let limiter = Arc::new(RateLimiter::default());
        let cfg = config(1.0, 1);
        take_all(&limiter, &cfg, None);
        let in_time = spawn(&limiter, cfg, None, Some(millis(30_000)));
        let late: Vec<_> = (0..5).map(|_| spawn(&limiter, cfg, None, Some(millis(9_000)))).collect();
        settle().await;
        let now = Instant::now();
        // The second one extends the first, which all would have survived.
        for pause in [2_000, 20_000] {
            assert!(!late.iter().any(JoinHandle::is_finished));
            limiter.pause(&cfg, whom, now + millis(pause), now);
            settle().await;
        }
        for call in late {
            assert!(call.is_finished(), "{whom:?}");
            assert!(call.await.unwrap().unwrap_err().retry_at >= now + millis(20_000));
        }
        assert_eq!(in_time.await.unwrap().unwrap().as_millis(), 20_001);
    }
}

#[tokio::test(start_paused = true)]
async fn pauses_are_bounded_and_the_one_that_ends_soonest_goes() {
    let limiter = Arc::new(RateLimiter::default());
    let cfg = config(1000.0, 10);
    let now = Instant::now();
    let pause = |n: usize, seconds: u64, now| {
        limiter.pause(&cfg, Whom::Credential(credential(n)), now + Duration::from_secs(seconds), now);
    };
    for n in 0..pauses::MOST {
        pause(n, if n == 7 { 20 } else { 30 }, now);
    }
    let held = spawn(&limiter, cfg, credential(7), None);
    settle().await;
    assert_eq!(limiter.view(&cfg, now).held, 1);
    pause(5000, 10, now);
    assert!(limiter.try_acquire(&cfg, credential(5000), Instant::now()), "it would have gone itself");
    pause(5001, 25, now);
    assert!(!limiter.try_acquire(&cfg, credential(5001), Instant::now()));
    assert_eq!(limiter.view(&cfg, now).paused, pauses::MOST);
    assert_eq!(held.await.unwrap().unwrap().as_millis(), 1, "whom it held is free with it");
    // What is over makes room for all the others.
    let later = now + Duration::from_secs(26);
    pause(5002, 3, later);
    assert_eq!(limiter.view(&cfg, later).paused, pauses::MOST);
    pause(5003, 3, later + Duration::from_secs(5));
    assert_eq!(limiter.view(&cfg, later + Duration::from_secs(5)).paused, 1);
}

#[tokio::test(start_paused = true)]
async fn without_a_deadline_the_line_has_an_end_in_time() {
    let limiter = RateLimiter::default();
    let now = Instant::now();
    let slow = config(1.0 / 600.0, 1);
    assert!(limiter.try_acquire(&slow, None, now));
    let mut first = pin!(limiter.acquire(&slow, None, now, None));
    assert!(poll_once(first.as_mut()).is_pending());
    let late = limiter.acquire(&slow, None, now, None).await.unwrap_err();
    assert_eq!(late.retry_at, now + Duration::from_secs(1200));
}

#[tokio::test(start_paused = true)]
async fn the_line_has_an_end_in_number() {
    let limiter = RateLimiter::default();
    let now = Instant::now();
    let cfg = config(1000.0, 1);
    assert!(limiter.try_acquire(&cfg, None, now));
    limiter.pause(&cfg, Whom::Credential(credential(1)), now + millis(100), now);
    let mut waiting: Vec<_> =
        (0..MOST_WAITING).map(|n| Box::pin(limiter.acquire(&cfg, credential(n % 2), now, None))).collect();
    assert!(waiting.iter_mut().all(|call| poll_once(call.as_mut()).is_pending()));
    assert!(limiter.acquire(&cfg, credential(0), now, None).await.is_err());
    assert!(limiter.acquire(&cfg, credential(1), now, None).await.is_err());
    drop(waiting.pop());
    let mut one_more = pin!(limiter.acquire(&cfg, credential(0), now, None));
    assert!(poll_once(one_more.as_mut()).is_pending());
    waiting.clear();
    assert_eq!(limiter.view(&cfg, now).in_line, 1);
}

#[tokio::test(start_paused = true)]
async fn a_reload_helps_those_who_wait() {
    let limiter = Arc::new(RateLimiter::default());
    let (slow, fast) = (config(0.01, 1), config(100.0, 1));
    take_all(&limiter, &slow, None);
    let calls: Vec<_> = (0..3).map(|_| spawn(&limiter, slow, None, None)).collect();
    settle().await;
    limiter.view(&fast, Instant::now());
    let mut waits = Vec::new();
    for call in calls {
        waits.push(call.await.unwrap().unwrap().as_millis());
    }
    // The hundredth of a token that a second had brought by then is less than a tick of the timer.
    assert_eq!(waits, [11, 21, 31]);
}

#[tokio::test(start_paused = true)]
async fn nobody_is_woken_in_vain() {
    let limiter = Arc::new(RateLimiter::default());
    let cfg = config(1000.0, 1);
    let polls = Arc::new(AtomicUsize::new(0));
    let calls: Vec<_> = (0..400)
        .map(|n| {
            let (limiter, polls) = (Arc::clone(&limiter), Arc::clone(&polls));
            tokio::spawn(async move {
                let mut call = pin!(limiter.acquire(&cfg, credential(n % 2), Instant::now(), None));
                std::future::poll_fn(|cx| {
                    polls.fetch_add(1, Ordering::Relaxed);
                    call.as_mut().poll(cx)
                })
                .await
            })
        })
        .collect();
    settle().await;
    let now = Instant::now();
    limiter.pause(&cfg, Whom::Credential(credential(0)), now + millis(300), now);
    for call in calls {
        call.await.unwrap().unwrap();
    }
    let polls = polls.load(Ordering::Relaxed);
    assert!(polls <= 400 * 4, "{polls} polls of 400 calls");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn cancellations_on_all_threads_leave_nobody_behind() {
    let limiter = Arc::new(RateLimiter::default());
    let cfg = config(20_000.0, 3);
    let start = Instant::now();
    let tasks: Vec<_> = (0..64)
        .map(|seed| {
            let limiter = Arc::clone(&limiter);
            tokio::spawn(async move {
                let mut random = fastrand::Rng::with_seed(seed as u64);
                let mut taken = 0;
                for _ in 0..50 {
                    let now = Instant::now();
                    if random.u8(..20) == 0 {
                        let whom = Whom::Credential(credential(random.usize(..4)));
                        limiter.pause(&cfg, whom, now + millis(random.u64(..4)), now);
                    }
                    let patience = Duration::from_micros(random.u64(..6000));
                    let turn = limiter.acquire(&cfg, credential(seed % 4), now, None);
                    if let Ok(Ok(())) = tokio::time::timeout(patience, turn).await {
                        taken += 1;
                    }
                }
                taken
            })
        })
        .collect();
    let mut taken = 0;
    for task in tasks {
        taken += task.await.unwrap();
    }
    let most = 3.0 + start.elapsed().as_secs_f64() * 20_000.0;
    assert!(f64::from(taken) <= most, "{taken} of {most}");
    assert_eq!(limiter.state.lock().waiting, 0);
    assert_eq!(limiter.view(&cfg, Instant::now()).in_line, 0);
    // And the line still moves.
    tokio::time::sleep(millis(5)).await;
    limiter.acquire(&cfg, credential(1), Instant::now(), None).await.unwrap();
}

#[derive(Debug, Clone)]
enum Act {
    Arrive { who: usize, patience: Option<u64> },
    Hedge { who: usize },
    Leave(usize),
    Pass(u64),
    Pause { whom: Option<usize>, millis: u64 },
    Reload { per_second: f64, burst: u32 },
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        12 => (0usize..3, prop::option::of(0u64..3_000))
            .prop_map(|(who, patience)| Act::Arrive { who, patience }),
        2 => (0usize..3).prop_map(|who| Act::Hedge { who }),
        4 => (0usize..200).prop_map(Act::Leave),
        4 => (0u64..400).prop_map(Act::Pass),
        2 => (prop::option::weighted(0.8, 0usize..3), 0u64..2_000)
            .prop_map(|(whom, millis)| Act::Pause { whom, millis }),
        1 => (prop::sample::select(vec![0.5, 3.0, 30.0, 700.0, 100_000.0]), 1u32..12)
            .prop_map(|(per_second, burst)| Act::Reload { per_second, burst }),
    ];
    prop::collection::vec(act, 1..150)
}

/// What happened, in order.
#[derive(Debug, Clone, Copy)]
enum Event {
    Granted { who: usize, arrival: Option<usize>, deadline: Option<Instant> },
    Refused { deadline: Option<Instant>, retry_at: Instant },
    Paused { whom: Option<usize>, until: Instant },
    Reloaded(RateLimit),
}

type Log = Arc<Mutex<Vec<(Instant, Event)>>>;

/// Lives through the acts, and until everyone who came has been served or refused.
async fn live(acts: Vec<Act>, first: RateLimit) -> Vec<(Instant, Event)> {
    let limiter = Arc::new(RateLimiter::default());
    let log = Log::default();
    let note = |event| log.lock().push((Instant::now(), event));
    // It is full at the first question, whatever the settings were before.
    limiter.view(&first, Instant::now());
    note(Event::Reloaded(first));
    let mut cfg = first;
    let mut calls: Vec<JoinHandle<()>> = Vec::new();
    for act in acts {
        let now = Instant::now();
        match act {
            Act::Arrive { who, patience } => {
                let (limiter, log, arrival) = (Arc::clone(&limiter), Arc::clone(&log), calls.len());
                let deadline = patience.map(|patience| now + millis(patience));
                calls.push(tokio::spawn(async move {
                    let event = match limiter.acquire(&cfg, credential(who), now, deadline).await {
                        Ok(()) => Event::Granted { who, arrival: Some(arrival), deadline },
                        Err(TooLate { retry_at }) => Event::Refused { deadline, retry_at },
                    };
                    log.lock().push((Instant::now(), event));
                }));
            }
            Act::Hedge { who } => {
                if limiter.try_acquire(&cfg, credential(who), now) {
                    note(Event::Granted { who, arrival: None, deadline: None });
                }
            }
            Act::Leave(n) if !calls.is_empty() => calls[n % calls.len()].abort(),
            Act::Leave(_) => {}
            Act::Pass(time) => tokio::time::sleep(millis(time)).await,
            Act::Pause { whom, millis: time } => {
                let to = whom.map_or(Whom::Everyone, |who| Whom::Credential(credential(who)));
                limiter.pause(&cfg, to, now + millis(time), now);
                note(Event::Paused { whom, until: now + millis(time) });
            }
            Act::Reload { per_second, burst } => {
                cfg = config(per_second, burst);
                limiter.view(&cfg, now);
                note(Event::Reloaded(cfg));
            }
        }
        settle().await;
        // A token is never idle while somebody waits for it. Timers round up to a millisecond.
        let now = Instant::now();
        let view = limiter.view(&cfg, now);
        let is_open = limiter.state.lock().everyone.is_none_or(|until| until + millis(2) <= now);
        if view.in_line > 0 && is_open {
            let slack = 1.0 + cfg.rate.in_a_second() * 0.002;
            assert!(f64::from(view.tokens) <= slack, "{view:?}");
        }
    }
    for call in calls {
        // An error is a call that left.
        let _ = tokio::time::timeout(Duration::from_secs(2_000), call).await.expect("nobody waits for ever");
    }
    let view = limiter.view(&cfg, Instant::now());
    assert_eq!((view.in_line, view.held, limiter.state.lock().waiting), (0, 0, 0));
    std::mem::take(&mut *log.lock())
}

/// A bucket as one would write it down.
struct Model {
    cfg: RateLimit,
    tokens: f64,
    at: Instant,
}

impl Model {
    fn advance(&mut self, now: Instant) {
        let brought = (now - self.at).as_secs_f64() * self.cfg.rate.in_a_second();
        self.tokens = (self.tokens + brought).min(self.cfg.burst.into());
        self.at = now;
    }
}

fn judge(log: &[(Instant, Event)], first: RateLimit) {
    let start = log[0].0;
    let mut model = Model { cfg: first, tokens: first.burst.into(), at: start };
    let mut paused = [start; 3];
    let mut last_of = [None; 3];
    let mut grants = Vec::new();
    let (mut top_rate, mut top_burst) = (0.0f64, 0);
    for (now, event) in log {
        model.advance(*now);
        match *event {
            Event::Reloaded(cfg) => {
                model.cfg = cfg;
                model.advance(*now);
                (top_rate, top_burst) = (top_rate.max(cfg.rate.in_a_second()), top_burst.max(cfg.burst));
            }
            Event::Paused { whom, until } => {
                for (who, end) in paused.iter_mut().enumerate() {
                    if whom.is_none_or(|whom| whom == who) {
                        *end = until.max(*end);
                    }
                }
            }
            Event::Granted { who, arrival, deadline } => {
                model.tokens -= 1.0;
                assert!(model.tokens >= -1e-6, "{} tokens at {:?}", model.tokens, *now - start);
                assert!(paused[who] <= *now, "{who} is paused at {:?}", *now - start);
                if let Some(deadline) = deadline {
                    assert!(*now <= deadline, "late at {:?}", *now - start);
                }
                if arrival.is_some() {
                    assert!(last_of[who] < arrival, "{arrival:?} after {:?}", last_of[who]);
                    last_of[who] = arrival;
                }
                grants.push(*now);
            }
            Event::Refused { deadline, retry_at } => {
                assert!(deadline.is_none_or(|deadline| retry_at >= deadline), "it would have been in time");
            }
        }
    }
    // The promise in its plainest words.
    for (from, first) in grants.iter().enumerate() {
        for (to, last) in grants.iter().enumerate().skip(from) {
            let most = f64::from(top_burst) + top_rate * (*last - *first).as_secs_f64();
            assert!((to - from + 1) as f64 <= most + 1e-6, "{} in {:?}", to - from + 1, *last - *first);
        }
    }
}

proptest! {
    #[test]
    fn never_more_than_the_burst_and_what_the_rate_brings(
        acts in acts(),
        per_second in prop::sample::select(vec![3.0, 30.0, 700.0]),
        burst in 1u32..12,
    ) {
        let first = config(per_second, burst);
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let log = runtime.block_on(live(acts, first));
        judge(&log, first);
    }
}

/// A credential that was paused once and never came back had every call after it pay for the digest of its own.
#[tokio::test(start_paused = true)]
async fn who_asks_is_found_out_only_while_somebody_is_paused() {
    let limiter = RateLimiter::default();
    let cfg = config(100.0, 100);
    let now = Instant::now();
    let is_asked_at = |now| {
        let mut is_asked = false;
        let who = || {
            is_asked = true;
            credential(2)
        };
        assert!(limiter.try_acquire_for(&cfg, who, now));
        is_asked
    };
    assert!(!is_asked_at(now));
    limiter.pause(&cfg, Whom::Credential(credential(1)), now + millis(500), now);
    limiter.pause(&cfg, Whom::Credential(credential(3)), now + millis(900), now);
    assert!(is_asked_at(now));
    assert!(is_asked_at(now + millis(899)));
    assert!(!is_asked_at(now + millis(900)));
    assert_eq!(limiter.view(&cfg, now).paused, 0, "what is over is forgotten");
}

/// Those who waited for a pause that is over are led back into line before anybody of theirs goes ahead.
#[tokio::test(start_paused = true)]
async fn a_pause_that_somebody_waits_for_is_not_forgotten_before_they_are_led_back() {
    let limiter = RateLimiter::default();
    let cfg = config(100.0, 100);
    let now = Instant::now();
    limiter.pause(&cfg, Whom::Credential(credential(1)), now + millis(500), now);
    let mut held = pin!(limiter.acquire(&cfg, credential(1), now, None));
    assert!(poll_once(held.as_mut()).is_pending());
    let after = now + millis(600);
    assert!(limiter.try_acquire(&cfg, credential(2), after));
    assert_eq!(limiter.view(&cfg, after).held, 1);
    assert!(!limiter.try_acquire(&cfg, credential(1), after), "one of the same group is ahead");
    held.await.unwrap();
    assert!(limiter.try_acquire(&cfg, credential(1), Instant::now()));
}
