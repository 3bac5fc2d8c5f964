//! What the guards cost each request, uncontended. Each must stay below 200 ns, so that all of them
//! together disappear beside one system call. Only the percentile may take up to a microsecond: a plan
//! is kept for 100 ms, and `plan, record` shows what that makes for each call. What is only done where the
//! policy asks for it, and may save the whole call, has up to a microsecond as well: a key, a look into the
//! cache, a flight.

use std::hint::black_box;
use std::time::{Duration, SystemTime};

use criterion::{Criterion, criterion_group, criterion_main};
use hedgerow::config::{Breaker, Bulkhead, Cache, ExtraLoad, Hedge, HedgeAfter, RateLimit, StatusSet};
use hedgerow::policy::breaker::{BreakerCell, Verdict};
use hedgerow::policy::budget::ExtraLoadBudget;
use hedgerow::policy::cache::{Asked, Candidate, Store, Times, Verdict as Kept};
use hedgerow::policy::hedge::{HedgeState, LatencyWindow};
use hedgerow::policy::identity::{Credential, Key, Passage, Place};
use hedgerow::policy::rate_limit::{RateLimiter, Whom};
use hedgerow::policy::singleflight::{Flights, Joined, Landing};
use hedgerow::units::{Percent, Rate};
use hedgerow::wire::target::Scheme;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
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
        is_shared: false,
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
    let cfg = RateLimit {
        rate: Rate::per_second(200.0),
        burst: 50,
        max_pause: Duration::from_secs(60),
        is_shared: false,
    };
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

/// As a client with a key of its own asks a tool.
fn request() -> HeaderMap {
    let fields: [(HeaderName, &str); 5] = [
        (header::HOST, "quotes.example.com"),
        (header::USER_AGENT, "agent/1.0"),
        (header::ACCEPT, "application/json"),
        (header::ACCEPT_ENCODING, "gzip, deflate"),
        (header::AUTHORIZATION, "Bearer sk-0123456789abcdef0123456789abcdef0123456789abcdef"),
    ];
    fields.into_iter().map(|(name, value)| (name, HeaderValue::from_static(value))).collect()
}

fn place(target: &PathAndQuery) -> Place<'_> {
    let authority = "quotes.example.com:443";
    Place { scheme: Scheme::Https, authority, host: b"", passage: &Passage::NONE, pinned: None, target }
}

fn identity(c: &mut Criterion) {
    let (target, headers) = (PathAndQuery::from_static("/v1/quotes/AAPL?fields=price,volume"), request());
    c.bench_function("identity: key", |b| {
        b.iter(|| Key::of(place(black_box(&target)), &Method::GET, &headers, [], None));
    });
}

fn cache(c: &mut Criterion) {
    let cfg = Cache {
        ttl: None,
        stale_if_error: Duration::ZERO,
        stale_while_revalidate: Duration::ZERO,
        max_bytes: 64 << 20,
        max_body: 1 << 20,
        vary: Vec::new(),
        is_shared: false,
    };
    let (target, headers) = (PathAndQuery::from_static("/v1/quotes/AAPL?fields=price,volume"), request());
    let asked = Asked { method: &Method::GET, place: place(&target), headers: &headers };
    let key = Key::of(asked.place, &Method::GET, &headers, [], None);
    let now = Instant::now();
    let answer: HeaderMap = [
        (header::CONTENT_TYPE, "application/json"),
        (header::CONTENT_LENGTH, "1024"),
        (header::DATE, "Sun, 29 Nov 2026 10:00:00 GMT"),
        (header::CACHE_CONTROL, "max-age=60"),
        (header::ETAG, "\"4f2a\""),
        (header::VARY, "accept-encoding"),
    ]
    .into_iter()
    .map(|(name, value)| (name, HeaderValue::from_static(value)))
    .collect();
    let store = Store::new(cfg.max_bytes);
    let entry = || {
        let times = Times { sent: now, received: now, wall: SystemTime::now() };
        let mut candidate =
            Candidate::of(asked, StatusCode::OK, &answer, &cfg, true, times, &store).expect("may be kept");
        assert!(candidate.push(&[b'x'; 1024]));
        candidate.complete()
    };
    c.bench_function("cache: keep 1 KiB", |b| b.iter(|| store.put(black_box(key), entry())));
    c.bench_function("cache: find, judge, answer 1 KiB", |b| {
        b.iter(|| {
            let entry = store.find(black_box(&key), &headers).expect("kept");
            assert_eq!(entry.judge(asked, &cfg, now), Kept::Fresh);
            entry.answer(asked, now)
        });
    });
}

fn singleflight(c: &mut Criterion) {
    let (target, headers) = (PathAndQuery::from_static("/v1/quotes/AAPL?fields=price,volume"), request());
    let key = Key::of(place(&target), &Method::GET, &headers, [], None);
    let flights = Flights::new();
    c.bench_function("singleflight: join, land alone", |b| {
        b.iter(|| {
            let Joined::Leader(member, lead) = flights.join(black_box(key)) else { panic!("somebody leads") };
            lead.land(Landing::Shared(1));
            member
        });
    });
    let Joined::Leader(_member, _lead) = flights.join(key) else { panic!("somebody leads") };
    c.bench_function("singleflight: follow, leave", |b| {
        b.iter(|| match flights.join(black_box(key)) {
            Joined::Follower(member) => drop(member),
            Joined::Leader(..) => panic!("nobody leads"),
        });
    });
}

criterion_group!(guards, breaker, budget, hedge, bulkhead, rate_limit, identity, cache, singleflight);
criterion_main!(guards);
