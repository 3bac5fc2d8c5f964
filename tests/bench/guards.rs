//! What the guards cost each request, uncontended. Each must stay below 200 ns, so that all of them
//! together disappear beside one system call. Only the percentile may take up to a microsecond: a plan
//! is kept for 100 ms, and `plan, record` shows what that makes for each call.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use hedgerow::config::{Breaker, Bulkhead, ExtraLoad, Hedge, HedgeAfter, RateLimit, StatusSet};
use hedgerow::policy::breaker::{BreakerCell, Verdict};
use hedgerow::policy::budget::ExtraLoadBudget;
use hedgerow::policy::hedge::{HedgeState, LatencyWindow};
use hedgerow::policy::identity::Credential;
use hedgerow::policy::rate_limit::{RateLimiter, Whom};
use hedgerow::units::{Percent, Rate};
use tokio::time::Instant;

fn breaker_config(slow_rate: Option<Percent>) -> Breaker {
    Breaker {
        consecutive_failures: Some(5),
        failure_rate: Some(Percent::new(50.0)),
        slow_rate,
        slow_after: Duration::from_secs(2),
        window: Duration::from_secs(60),
        min_requests: 20,
        open_for: Duration::from_secs(30),
        max_open_for: Duration::from_secs(300),
        half_open_probes: 1,
        failure_statuses: StatusSet::new([500, 502, 503, 504]),
        fair_chance: Duration::from_secs(1),
    }
}

fn hedge_config() -> Hedge {
    Hedge {
        after: HedgeAfter::Percentile(Percent::new(90.0)),
        initial: Duration::from_millis(800),
        min: Duration::from_millis(1),
        max: Duration::from_millis(1_200),
        max_extra: 1,
        methods: Vec::new(),
        to: None,
    }
}

fn breaker(c: &mut Criterion) {
    for (name, slow_rate) in [("breaker", None), ("breaker with slow_rate", Some(Percent::new(50.0)))] {
        let (cell, cfg) = (BreakerCell::new(), breaker_config(slow_rate));
        let now = Instant::now();
        c.bench_function(&format!("{name}: check, admit, finish"), |b| {
            b.iter(|| {
                cell.check(&cfg, now).expect("closed");
                let admission = cell.admit(&cfg, now).expect("closed");
                admission.finish(&cfg, black_box(Verdict::Success), now)
            });
        });
    }
}

fn budget(c: &mut Criterion) {
    let budget = ExtraLoadBudget::default();
    let cfg = ExtraLoad { ratio: Percent::new(10.0), floor: Rate::per_second(1.0) };
    let mut now = Instant::now();
    c.bench_function("budget: deposit, withdraw", |b| {
        b.iter(|| {
            now += Duration::from_micros(50);
            budget.deposit(&cfg, now);
            budget.withdraw(&cfg, now)
        });
    });
}

fn hedge(c: &mut Criterion) {
    let cfg = hedge_config();
    let mut random = fastrand::Rng::with_seed(1);
    let times: Vec<_> = (0..1024).map(|_| Duration::from_micros(random.u64(10_000..300_000))).collect();
    let mut next = times.iter().cycle();
    let mut time = || *next.next().expect("endless");

    let state = HedgeState::new();
    let mut now = Instant::now();
    c.bench_function("hedge: plan, record at 1,000 calls a second", |b| {
        b.iter(|| {
            now += Duration::from_millis(1);
            let plan = state.plan(&cfg, Percent::new(10.0), now);
            state.record(time(), now);
            plan
        });
    });
    c.bench_function("hedge: plan from the cache", |b| {
        b.iter(|| state.plan(&cfg, black_box(Percent::new(10.0)), now));
    });

    let mut window = LatencyWindow::default();
    c.bench_function("latency window: record", |b| b.iter(|| window.record(time(), now)));
    c.bench_function("latency window: quantile", |b| b.iter(|| window.quantile(black_box(0.9), now)));
}

fn bulkhead(c: &mut Criterion) {
    let bulkhead = hedgerow::policy::bulkhead::Bulkhead::new();
    let cfg = Bulkhead { max_concurrent: 100, max_queue: 100 };
    c.bench_function("bulkhead: acquire, release", |b| {
        b.iter(|| drop(bulkhead.try_acquire(&cfg).expect("free")));
    });
}

fn rate_limit(c: &mut Criterion) {
    let cfg = RateLimit { rate: Rate::per_second(200.0), burst: 50, max_pause: Duration::from_secs(60) };
    let who = |key: &'static str| {
        let field = (http::header::AUTHORIZATION, http::HeaderValue::from_static(key));
        Credential::of(&http::HeaderMap::from_iter([field]))
    };
    let (one, other) = (who("Bearer one"), who("Bearer other"));
    let limiter = RateLimiter::default();
    let mut now = Instant::now();
    c.bench_function("rate limit: token", |b| {
        b.iter(|| {
            now += Duration::from_millis(5);
            assert!(limiter.try_acquire(&cfg, black_box(one), now));
        });
    });
    c.bench_function("rate limit: no token", |b| {
        while limiter.try_acquire(&cfg, one, now) {}
        b.iter(|| limiter.try_acquire(&cfg, black_box(one), now));
    });
    let without_end = RateLimit { max_pause: Duration::MAX, ..cfg };
    limiter.pause(&without_end, Whom::Credential(other), now + Duration::from_secs(1 << 30), now);
    c.bench_function("rate limit: token, another credential paused", |b| {
        b.iter(|| {
            now += Duration::from_millis(5);
            assert!(limiter.try_acquire(&cfg, black_box(one), now));
        });
    });
}

criterion_group!(guards, breaker, budget, hedge, bulkhead, rate_limit);
criterion_main!(guards);
