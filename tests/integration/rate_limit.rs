//! So many calls a second, whoever makes them, and none while the upstream itself asks for a pause.

use std::time::Duration;

use rustix::process::Signal;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::support::client::{self, Agent, Response, absolute};
use crate::support::hedgerow::{HedgerowProcess, Metrics};
use crate::support::policy::{TOOL, named, tool};
use crate::support::raw::RawPort;
use crate::support::road::{Mode, Road};
use crate::support::upstream::{Reply, Upstream, by_path, statuses};

/// A call from the first token on, and then no other that a test would live to see.
const ONE: &str = "rate_limit: { rate: 1/h, burst: 1 }, hedge: off, breaker: off";
/// Tokens are no matter, only the upstream's own wishes.
const MANY: &str = "rate_limit: { rate: 1000/s, max_pause: 1h }, hedge: off, breaker: off";
/// A caller that waits for nothing but the answer itself.
const HURRY: (&str, &str) = ("grpc-timeout", "1S");

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn limited(metrics: &Metrics, action: &str) -> f64 {
    metrics.value("hedgerow_rate_limited_total", &[TOOL, ("action", action)])
}

fn error_of(answer: &Response) -> Option<String> {
    let is_problem = answer.header("content-type") == Some("application/problem+json");
    is_problem.then(|| answer.json()["error"].as_str().expect("a problem names its error").to_owned())
}

fn is_refused(answer: &Response) -> bool {
    answer.status == 429 && error_of(answer).as_deref() == Some("rate_limited")
}

async fn ask(proxy: &HedgerowProcess, url: &str, headers: &[(&str, &str)]) -> Response {
    proxy.agent().await.request("GET", url, headers, b"").await
}

/// A GET on a connection of its own, running while the test does something else.
fn start(proxy: &HedgerowProcess, url: String) -> JoinHandle<Response> {
    let proxy = **proxy;
    tokio::spawn(async move { proxy.get(&url).await })
}

/// Sends a GET and leaves the answer for later.
async fn begin(proxy: &HedgerowProcess, url: &str) -> Agent {
    let mut agent = proxy.agent().await;
    agent.send(absolute("GET", url, &[], b"")).await;
    agent
}

/// Waits until so many calls have a place in the bulkhead, which those that wait for a token do.
async fn until_in_flight(proxy: &HedgerowProcess, count: usize) {
    proxy.until_metrics(|m| m.value("hedgerow_bulkhead_in_flight", &[TOOL]) == count as f64).await;
}

/// The burst at once, then one by one as the tokens come, never faster.
#[tokio::test]
async fn a_burst_passes_at_once_and_the_rest_at_the_rate() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let policy = tool(upstream.address(), "rate_limit: { rate: 10/s, burst: 3 }, hedge: off");
    let proxy = HedgerowProcess::start(&policy).await;
    let urls: Vec<_> = (0..12).map(|_| upstream.url("/")).collect();
    let began = Instant::now();
    let answers = client::get_all(proxy.proxy, &urls).await;
    assert!(answers.iter().all(|answer| answer.status == 200));
    let arrivals: Vec<_> = upstream.requests().iter().map(|seen| seen.at - began).collect();
    assert_eq!(arrivals.len(), 12);
    for (nth, at) in arrivals.iter().enumerate() {
        let tokens_to_come = nth.saturating_sub(2) as u64;
        assert!(*at >= ms(100 * tokens_to_come), "call {nth} of {arrivals:?}");
    }
    let metrics = proxy.metrics().await;
    assert_eq!(limited(&metrics, "refused"), 0.0);
    // A loaded machine may bring a call late enough for a token to be there.
    assert!((1.0..=9.0).contains(&limited(&metrics, "waited")));
    let queued = |answer: &Response| {
        let timing = answer.header("server-timing").unwrap().to_owned();
        let queue = timing.split(", ").find_map(|part| part.strip_prefix("queue;dur=")).map(str::to_owned);
        queue.map_or(0.0, |queue| queue.parse::<f64>().unwrap())
    };
    let waits: Vec<_> = answers.iter().map(queued).collect();
    assert_eq!(
        waits.iter().filter(|wait| **wait > 0.0).count() as f64,
        limited(&metrics, "waited"),
        "{waits:?}"
    );
    let line = proxy.access_log(|line| line["queue_ms"].is_number()).await;
    assert_eq!(line["status"], 200);
}

/// Over any time, what passes is the burst and what the rate brought. (Nothing from outside can move the clock of
/// the system; that it would make no difference is seen where time is an argument.)
#[tokio::test]
async fn c100_the_rate_holds_over_time_whatever_comes() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let policy = tool(upstream.address(), "rate_limit: { rate: 5/s, burst: 2 }, hedge: off");
    let proxy = HedgerowProcess::start(&policy).await;
    let mut agent = proxy.agent().await;
    let began = Instant::now();
    let (mut passed, mut refused) = (0_u32, 0_u32);
    while began.elapsed() < ms(3000) {
        // Too little time for any token that is not there.
        let answer = agent.request("GET", &upstream.url("/"), &[("grpc-timeout", "20m")], b"").await;
        match answer.status {
            200 => passed += 1,
            429 => refused += 1,
            // On a loaded machine the answer may be late.
            504 => {}
            status => panic!("{status}"),
        }
    }
    let due = 2.0 + 5.0 * began.elapsed().as_secs_f64();
    assert!(upstream.count() as f64 <= due, "{} of {due}", upstream.count());
    assert!(passed >= 8 && refused > passed, "{passed} passed, {refused} refused");
}

/// Who would wait in vain is told at once, with all that a client needs in order to come back at the right time.
#[tokio::test]
async fn a_token_that_comes_too_late_is_not_waited_for() {
    let upstream = Upstream::answering(|_| Reply::ok("").header("RateLimit", "\"theirs\";r=7;t=9")).await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), ONE)).await;
    let answer = proxy.get(&upstream.url("/")).await;
    // The upstream's own fields are its own word, and not ours to add to.
    assert_eq!((answer.status, answer.header("ratelimit")), (200, Some("\"theirs\";r=7;t=9")));
    assert_eq!(answer.header("ratelimit-policy"), None);

    let began = Instant::now();
    let refused = proxy.get(&upstream.url("/second")).await;
    assert!(began.elapsed() < ms(15_000), "{:?}", began.elapsed());
    assert!(is_refused(&refused), "{refused:?}");
    assert_eq!(refused.header("ratelimit-policy"), Some("\"hedgerow\";q=1;w=3600"));
    let left = refused.header("ratelimit").unwrap().strip_prefix("\"hedgerow\";r=0;t=").unwrap();
    assert!((3500..=3600).contains(&left.parse::<u32>().unwrap()), "{left}");
    let problem = refused.json();
    let wait = problem["retry_after_ms"].as_u64().unwrap();
    assert!((3_500_000..=3_600_000).contains(&wait), "{wait}");
    assert_eq!((&problem["title"], &problem["status"]), (&"rate limited".into(), &429.into()));
    assert_eq!((&problem["retryable"], &problem["upstream"]), (&true.into(), &"tool".into()));
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.starts_with("the rate limit of tool allows the next call in 3"), "{detail}");
    // Never more than the caller has left of its 30 s.
    let seconds: u32 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=29).contains(&seconds), "{seconds}");
    assert!(
        refused.header("proxy-status").unwrap().starts_with("hedgerow; error=http_request_error; details=")
    );
    assert_eq!(refused.header("x-should-retry"), None);
    assert_eq!(refused.header("cache-control"), Some("no-store"));

    assert_eq!(upstream.count(), 1);
    let metrics = proxy.metrics().await;
    assert_eq!((limited(&metrics, "refused"), limited(&metrics, "waited")), (1.0, 0.0));
    let count = [TOOL, ("code", "429"), ("outcome", "error")];
    assert_eq!(metrics.value("hedgerow_requests_total", &count), 1.0);
    assert_eq!(metrics.value("hedgerow_upstream_attempts_total", &[TOOL]), 1.0);
    let line = proxy.access_log(|line| line["path"] == "/second").await;
    assert_eq!((&line["error"], &line["attempts"]), (&"rate_limited".into(), &0.into()));
}

/// The header is at least 1 (openai-js would spin on 0), and who waits as long as it says gets through.
#[tokio::test]
async fn c101_who_comes_back_when_told_succeeds() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let stages = "rate_limit: { rate: 15/m, burst: 1 }, hedge: off, deadline: { default: 3s }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    assert_eq!(proxy.get(&upstream.url("/")).await.status, 200);
    let refused = proxy.get(&upstream.url("/")).await;
    assert!(is_refused(&refused), "{refused:?}");
    let told: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert_eq!(told, 2, "what the caller has left, in whole seconds");
    sleep_until(Instant::now() + ms(told * 1000)).await;
    assert_eq!(proxy.get(&upstream.url("/")).await.status, 200);
    assert_eq!(upstream.count(), 2);
    // A caller that has no second left is told none.
    let refused = ask(&proxy, &upstream.url("/"), &[("grpc-timeout", "500m")]).await;
    assert!(is_refused(&refused) && refused.header("retry-after").is_none(), "{refused:?}");
}

#[tokio::test]
async fn it_is_the_same_in_every_mode() {
    for mode in Mode::ALL {
        let mut road = Road::start(mode, ONE).await;
        let (mut call, exchange) = road.exchange(&[]).await;
        exchange.respond(200, &[], "").await;
        assert_eq!(call.head().await.status, 200, "{mode:?}");
        let head = road.call("GET", "/", &[]).await.head().await;
        assert_eq!(
            (head.status, head.get("ratelimit-policy")),
            (429, Some("\"hedgerow\";q=1;w=3600")),
            "{mode:?}"
        );
        assert!(head.get("retry-after").is_some(), "{mode:?}");
        assert_eq!(road.upstream.count(), 1, "{mode:?}");
    }
}

/// A gRPC client finds the refusal where it looks for one.
#[tokio::test]
async fn a_grpc_call_is_told_in_its_own_words() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), ONE)).await;
    assert_eq!(proxy.get(&upstream.url("/")).await.status, 200);
    let fields = [("Content-Type", "application/grpc"), ("TE", "trailers"), ("Connection", "TE")];
    let refused = proxy.agent().await.request("POST", &upstream.url("/"), &fields, &[0; 5]).await;
    assert_eq!((refused.status, refused.header("grpc-status")), (200, Some("8")));
    let wait: u64 = refused.header("grpc-retry-pushback-ms").unwrap().parse().unwrap();
    assert!((3_500_000..=3_600_000).contains(&wait), "{wait}");
}

/// First come, first served.
#[tokio::test]
async fn tokens_are_given_in_the_order_of_arrival() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let policy = tool(upstream.address(), "rate_limit: { rate: 5/s, burst: 1 }, hedge: off");
    let proxy = HedgerowProcess::start(&policy).await;
    let mut waiting = Vec::new();
    let paths: Vec<_> = (0..6).map(|nth| format!("/{nth}")).collect();
    let first = start(&proxy, upstream.url("/first"));
    upstream.until(|tally| tally.requests == 1).await;
    assert_eq!(first.await.unwrap().status, 200);
    for (nth, path) in paths.iter().enumerate() {
        waiting.push(begin(&proxy, &upstream.url(path)).await);
        // Those before it may have been served meanwhile.
        let came = || upstream.count() - 1;
        proxy
            .until_metrics(|m| {
                m.value("hedgerow_bulkhead_in_flight", &[TOOL]) as usize + came() > nth || came() > nth
            })
            .await;
    }
    for agent in &mut waiting {
        assert_eq!(agent.read_response().await.status, 200);
    }
    let seen: Vec<_> = upstream.requests()[1..].iter().map(|seen| seen.path().to_owned()).collect();
    assert_eq!(seen, paths);
}

/// What it would have taken is there for the next.
#[tokio::test]
async fn a_client_that_leaves_while_it_waits_takes_no_token() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let policy = tool(upstream.address(), "rate_limit: { rate: 30/m, burst: 1 }, hedge: off");
    let proxy = HedgerowProcess::start(&policy).await;
    assert_eq!(proxy.get(&upstream.url("/first")).await.status, 200);
    // A line of them: who stands behind moves up.
    for nth in 0..5 {
        let leaving = begin(&proxy, &upstream.url(&format!("/left-{nth}"))).await;
        until_in_flight(&proxy, 1).await;
        drop(leaving);
        until_in_flight(&proxy, 0).await;
    }
    // The next token comes within two seconds. The one after it would be too late.
    let answer = ask(&proxy, &upstream.url("/next"), &[("grpc-timeout", "3S")]).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(upstream.count(), 2);
    let line = proxy.access_log(|line| line["path"] == "/left-0").await;
    assert_eq!((&line["outcome"], &line["attempts"]), (&"client_left".into(), &0.into()));
}

/// Every attempt is a call to the upstream, whatever it is called here. A hedge takes what is free and never waits.
#[tokio::test]
async fn a_hedge_takes_a_token_and_does_without_when_none_is_free() {
    let upstream = Upstream::answering(|_| Reply::ok("").after(ms(500))).await;
    let hedge = "hedge: { after: 80ms }, extra_load: { ratio: 100%, floor: 100/s }";
    let policy = |burst: u32| {
        tool(upstream.address(), &format!("{hedge}, rate_limit: {{ rate: 1/h, burst: {burst} }}"))
    };
    let hedges =
        |metrics: &Metrics, outcome| metrics.value("hedgerow_hedges_total", &[TOOL, ("outcome", outcome)]);
    let proxy = HedgerowProcess::start(&policy(1)).await;
    assert_eq!(proxy.get(&upstream.url("/alone")).await.status, 200);
    let metrics = proxy.metrics().await;
    assert_eq!((upstream.count(), hedges(&metrics, "suppressed_rate")), (1, 1.0));
    assert_eq!((limited(&metrics, "waited"), limited(&metrics, "refused")), (0.0, 0.0));

    let proxy = HedgerowProcess::start(&policy(2)).await;
    assert_eq!(proxy.get(&upstream.url("/hedged")).await.status, 200);
    assert_eq!(upstream.count_of("/hedged"), 2);
    assert!(is_refused(&proxy.get(&upstream.url("/third")).await), "both tokens are gone");
}

/// A retry takes one too, and waits for it where it comes in time. Where it does not, the upstream's answer says more
/// than that there was no token.
#[tokio::test]
async fn a_retry_takes_a_token_and_waits_for_it_if_it_comes_in_time() {
    let retry =
        "hedge: off, breaker: off, retry: { backoff: 20ms }, extra_load: { ratio: 100%, floor: 100/s }";
    let launch = async |limit: &str| {
        let upstream = Upstream::answering(statuses(&[503, 200])).await;
        let policy = tool(upstream.address(), &format!("{retry}, rate_limit: {{ {limit} }}"));
        (HedgerowProcess::start(&policy).await, upstream)
    };
    let (proxy, upstream) = launch("rate: 1/h, burst: 1").await;
    let began = Instant::now();
    let answer = proxy.get(&upstream.url("/")).await;
    assert_eq!((answer.status, answer.text(), upstream.count()), (503, "503", 1));
    assert!(began.elapsed() < ms(15_000));
    assert_eq!(limited(&proxy.metrics().await, "refused"), 1.0);

    let (proxy, upstream) = launch("rate: 1/h, burst: 2").await;
    assert_eq!(proxy.get(&upstream.url("/")).await.text(), "200");
    assert!(is_refused(&proxy.get(&upstream.url("/")).await), "both tokens are gone");

    let (proxy, upstream) = launch("rate: 1/s, burst: 1").await;
    let began = Instant::now();
    assert_eq!(proxy.get(&upstream.url("/")).await.text(), "200");
    let seen = upstream.requests();
    assert!(seen[1].at - began >= ms(1000), "{:?}", seen[1].at - began);
    assert_eq!(limited(&proxy.metrics().await, "waited"), 1.0);
}

/// A provider counts by key: whose is used up waits, and nobody else.
#[tokio::test]
async fn a_429_pauses_its_credential_and_no_other() {
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/limited" => Reply::status(429).header("Retry-After", "3"),
        _ => Reply::ok(""),
    })
    .await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), MANY)).await;
    for field in ["authorization", "x-api-key", "cookie", "api-key"] {
        let (limited, other) = ((field, "limited=1"), (field, "other=1"));
        let began = Instant::now();
        let answer = ask(&proxy, &upstream.url("/limited"), &[limited]).await;
        assert_eq!((answer.status, answer.header("retry-after")), (429, Some("3")));
        assert_eq!(error_of(&answer), None, "the upstream's own answer");
        // At once, without asking it again.
        let before = upstream.count();
        let refused = ask(&proxy, &upstream.url("/"), &[limited, HURRY]).await;
        assert!(is_refused(&refused), "{field}: {refused:?}");
        assert_eq!(upstream.count(), before);
        for headers in [&[other, HURRY][..], &[HURRY]] {
            let answer = ask(&proxy, &upstream.url("/"), headers).await;
            assert_eq!(answer.status, 200, "{field}: {headers:?}");
        }
        if field == "authorization" {
            // Who has the time waits for the end of it.
            assert_eq!(ask(&proxy, &upstream.url("/"), &[limited]).await.status, 200);
            assert!(began.elapsed() >= ms(3000), "{:?}", began.elapsed());
            assert_eq!(ask(&proxy, &upstream.url("/"), &[limited, HURRY]).await.status, 200, "it is over");
        }
    }
    let metrics = proxy.metrics().await;
    assert_eq!((limited(&metrics, "paused"), limited(&metrics, "refused")), (4.0, 4.0));
}

/// Those who show no credential are one group.
#[tokio::test]
async fn a_429_without_a_credential_pauses_those_without() {
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/limited" => Reply::status(429).header("retry-after-ms", "20000"),
        _ => Reply::ok(""),
    })
    .await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), MANY)).await;
    assert_eq!(proxy.get(&upstream.url("/limited")).await.status, 429);
    assert!(is_refused(&ask(&proxy, &upstream.url("/"), &[HURRY]).await));
    assert_eq!(ask(&proxy, &upstream.url("/"), &[HURRY, ("authorization", "Bearer a")]).await.status, 200);
}

/// An upstream that has too much to do has it whoever asks.
#[tokio::test]
async fn a_503_with_retry_after_pauses_everyone() {
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/busy" => Reply::status(503).header("Retry-After", "3"),
        _ => Reply::ok(""),
    })
    .await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), MANY)).await;
    let (one, other) = (("authorization", "Bearer one"), ("authorization", "Bearer other"));
    let began = Instant::now();
    assert_eq!(ask(&proxy, &upstream.url("/busy"), &[one]).await.status, 503);
    for headers in [&[one, HURRY][..], &[other, HURRY], &[HURRY]] {
        assert!(is_refused(&ask(&proxy, &upstream.url("/"), headers).await), "{headers:?}");
    }
    assert_eq!(upstream.count(), 1);
    assert_eq!(ask(&proxy, &upstream.url("/"), &[other]).await.status, 200);
    assert!(began.elapsed() >= ms(3000), "{:?}", began.elapsed());
    assert_eq!(limited(&proxy.metrics().await, "paused"), 1.0);
}

/// A quota that is used up is known before the first 429, and is that of the one who used it, whatever the status.
#[tokio::test]
async fn an_exhausted_quota_pauses_its_credential() {
    const EXHAUSTED: [&[(&str, &str)]; 7] = [
        &[("RateLimit", "\"default\";r=0;t=60")],
        &[("RateLimit", "\"burst\";r=7;t=1, \"day\";r=0;t=600")],
        &[("RateLimit", "limit=100, remaining=0, reset=50")],
        &[("RateLimit-Remaining", "0"), ("RateLimit-Reset", "50")],
        &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "60")],
        &[("x-ratelimit-remaining-tokens", "0"), ("x-ratelimit-reset-tokens", "6m0s")],
        &[
            ("anthropic-ratelimit-requests-remaining", "0"),
            ("anthropic-ratelimit-requests-reset", "2099-01-01T00:00:00Z"),
        ],
    ];
    const NOT: [&[(&str, &str)]; 5] = [
        &[("RateLimit", "\"default\";r=1;t=60")],
        &[("x-ratelimit-remaining", "1"), ("x-ratelimit-reset", "60")],
        // Until when is not said, or not readable.
        &[("x-ratelimit-remaining", "0")],
        &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "soon")],
        &[("x-ratelimit-limit", "0"), ("x-ratelimit-reset", "60")],
    ];
    let upstream = Upstream::answering(|seen| {
        let (status, rest) = seen.path()[1..].split_once('/').expect("status, kind and index");
        let (kind, nth) = rest.split_once('/').expect("kind and index");
        let nth: usize = nth.parse().expect("an index");
        let fields = if kind == "exhausted" { EXHAUSTED[nth] } else { NOT[nth] };
        let reply = Reply::status(status.parse().expect("a status"));
        fields.iter().fold(reply, |reply, (name, value)| reply.header(name, value))
    })
    .await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), MANY)).await;
    let mut pauses = 0.0;
    for status in [200, 429, 503] {
        for (kind, count) in [("exhausted", EXHAUSTED.len()), ("not", NOT.len())] {
            for nth in 0..count {
                let path = format!("/{status}/{kind}/{nth}");
                let key = format!("Bearer {path}");
                let own = ("authorization", &*key);
                assert_eq!(ask(&proxy, &upstream.url(&path), &[own]).await.status, status);
                let next = ask(&proxy, &upstream.url("/200/not/0"), &[own, HURRY]).await;
                assert_eq!(is_refused(&next), kind == "exhausted", "{path}: {next:?}");
                let other = ask(&proxy, &upstream.url("/200/not/0"), &[HURRY]).await;
                assert_eq!(other.status, 200, "{path}");
                pauses += f64::from(u8::from(kind == "exhausted"));
            }
        }
    }
    assert_eq!(limited(&proxy.metrics().await, "paused"), pauses);
}

/// An upstream that asks for an hour gets what the policy grants.
#[tokio::test]
async fn a_pause_is_capped_by_max_pause() {
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/busy" => Reply::status(503).header("Retry-After", "3600"),
        "/limited" => Reply::status(429).header("Retry-After", "99999999999999999999"),
        _ => Reply::ok(""),
    })
    .await;
    let stages = "rate_limit: { rate: 1000/s, max_pause: 1s }, hedge: off, breaker: off";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    for path in ["/busy", "/limited"] {
        let began = Instant::now();
        proxy.get(&upstream.url(path)).await;
        assert_eq!(proxy.get(&upstream.url("/")).await.status, 200);
        assert!((ms(1000)..ms(15_000)).contains(&began.elapsed()), "{path}: {:?}", began.elapsed());
    }
}

/// What cannot be read pauses nobody, and without `rate_limit` nothing does.
#[tokio::test]
async fn garbage_pauses_nobody_and_neither_does_an_upstream_without_the_stage() {
    let upstream = Upstream::answering(|seen| match (seen.path(), seen.nth % 2) {
        ("/plain", 1) => Reply::status(429).header("Retry-After", "600"),
        ("/zero", 1) => Reply::status(429).header("Retry-After", "0"),
        (_, 1) => Reply::status(429).header("Retry-After", "soon"),
        _ => Reply::ok(""),
    })
    .await;
    let routes = "routes: [{ path: \"/plain\", rate_limit: off }]";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &format!("{MANY}, {routes}"))).await;
    for path in ["/garbage", "/plain", "/zero", "/garbage"] {
        assert_eq!(proxy.get(&upstream.url(path)).await.status, 429, "{path}");
        assert_eq!(ask(&proxy, &upstream.url(path), &[HURRY]).await.status, 200, "{path}");
    }
    assert_eq!(limited(&proxy.metrics().await, "paused"), 0.0);
}

/// Those who waited for the end of a pause do not come all at once.
#[tokio::test]
async fn after_a_pause_the_surge_goes_through_the_bucket() {
    for status in [429, 503] {
        let upstream = Upstream::answering(move |seen| match seen.nth {
            1 => Reply::status(status).header("Retry-After", "1"),
            _ => Reply::ok(""),
        })
        .await;
        let stages = "rate_limit: { rate: 5/s, burst: 2 }, hedge: off, breaker: off";
        let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
        assert_eq!(proxy.get(&upstream.url("/")).await.status, status);
        let urls: Vec<_> = (0..8).map(|_| upstream.url("/")).collect();
        let answers = client::get_all(proxy.proxy, &urls).await;
        assert!(answers.iter().all(|answer| answer.status == 200), "{answers:?}");
        let seen = upstream.requests();
        // The pause begins when the answer comes, which is later than the request.
        let over = seen[0].at + ms(1000);
        for (nth, seen) in seen[1..].iter().enumerate() {
            let tokens_to_come = nth.saturating_sub(1) as u64;
            assert!(seen.at >= over + ms(200 * tokens_to_come), "{status}: call {nth}, {:?}", seen.at - over);
        }
    }
}

/// Who waits for a token when a pause comes hears at once that it will be late.
#[tokio::test]
async fn a_pause_that_comes_meanwhile_is_told_to_those_who_would_be_late() {
    let mut upstream = Upstream::start().await;
    let stages = "rate_limit: { rate: 6/m, burst: 2 }, hedge: off, breaker: off";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    let first = start(&proxy, upstream.url("/1"));
    let one = upstream.next().await;
    let second = start(&proxy, upstream.url("/2"));
    let two = upstream.next().await;
    let began = Instant::now();
    let waiting = start(&proxy, upstream.url("/3"));
    until_in_flight(&proxy, 3).await;
    one.respond(503, &[("Retry-After", "59")], "").await;
    let refused = waiting.await.unwrap();
    assert!(is_refused(&refused), "{refused:?}");
    // Its token would have come after ten seconds, and its deadline after thirty.
    assert!(began.elapsed() < ms(9_000), "{:?}", began.elapsed());
    two.respond(200, &[], "").await;
    assert_eq!((first.await.unwrap().status, second.await.unwrap().status), (503, 200));
    until_in_flight(&proxy, 0).await;
}

/// A route's own limit is its own bucket; the others share the upstream's.
#[tokio::test]
async fn a_route_with_a_rate_limit_of_its_own_neither_takes_nor_gives() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let routes = "routes: [{ name: own, path: \"/own\", rate_limit: { rate: 1/h, burst: 2 } }, \
                  { name: shared, path: \"/shared\" }, { name: free, path: \"/free\", rate_limit: off }]";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &format!("{ONE}, {routes}"))).await;
    let passes = async |path: &str| proxy.get(&upstream.url(path)).await.status == 200;
    assert!(passes("/own").await);
    assert!(passes("/shared").await, "the route's call took no token of the upstream's");
    assert!(!passes("/").await, "and the upstream has but one, for all routes without their own");
    assert!(!passes("/shared").await);
    assert!(passes("/own").await);
    assert!(!passes("/own").await);
    for _ in 0..5 {
        assert!(passes("/free").await);
    }
}

/// Each host of an upstream has its own rate, as it has its own breaker.
#[tokio::test]
async fn each_host_of_an_upstream_has_its_own_bucket() {
    let one = Upstream::answering(|_| Reply::ok("")).await;
    let other = Upstream::answering(|_| Reply::ok("")).await;
    let proxy = HedgerowProcess::start(&tool("127.0.0.1", ONE)).await;
    for upstream in [&one, &other] {
        assert_eq!(proxy.get(&upstream.url("/")).await.status, 200);
        assert!(is_refused(&proxy.get(&upstream.url("/")).await));
    }
}

/// A tunnel is no request. One that turns out to carry some takes a token for each.
#[tokio::test]
async fn tunnels_take_no_token() {
    let port = RawPort::bind().await;
    let proxy = HedgerowProcess::start(&tool(port.address(), ONE)).await;
    let mut tunnels = Vec::new();
    for _ in 0..3 {
        let mut agent = proxy.agent().await;
        assert_eq!(agent.open_tunnel(&port.address().to_string()).await.status, 200);
        agent.send(b"\x16\x03\x01 not really TLS").await;
        let mut far_end = port.accept().await;
        far_end.expect(b"\x16\x03\x01 not really TLS").await;
        tunnels.push((agent, far_end));
    }
    let answer = async {
        let mut peer = port.accept().await;
        peer.read_request().await;
        peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
        peer
    };
    let url = port.url("/");
    let (first, _peer) = tokio::join!(proxy.get(&url), answer);
    assert_eq!(first.status, 200);
    assert!(is_refused(&proxy.get(&url).await));
    // And the refusal of requests is none of tunnels.
    let mut agent = proxy.agent().await;
    assert_eq!(agent.open_tunnel(&port.address().to_string()).await.status, 200);
    // Clear text in it is a request like any other.
    let refused = agent.get_at(&port.address().to_string(), "/").await;
    assert!(is_refused(&refused), "{refused:?}");
}

/// An edit of the policy neither fills the bucket nor empties it; a faster rate lets those in who wait.
#[tokio::test]
async fn a_reload_keeps_what_was_used_up_and_takes_up_the_new_rate() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let stages = |limit: &str| tool(upstream.address(), &format!("hedge: off, rate_limit: {{ {limit} }}"));
    let mut proxy = HedgerowProcess::start(&stages("rate: 1/h, burst: 1")).await;
    assert_eq!(proxy.get(&upstream.url("/")).await.status, 200);
    let mut reloads = 0.0;
    let mut reload = async |proxy: &mut HedgerowProcess, limit: &str| {
        proxy.policy.replace(&stages(limit));
        reloads += 1.0;
        let applied = [("result", "applied")];
        proxy.until_metrics(|m| m.value("hedgerow_config_reloads_total", &applied) == reloads).await;
    };
    for limit in ["rate: 1/h, burst: 100", "rate: 2/h, burst: 1", "rate: 6/m, burst: 5"] {
        reload(&mut proxy, limit).await;
        let refused = ask(&proxy, &upstream.url("/"), &[HURRY]).await;
        assert!(is_refused(&refused), "{limit}: {refused:?}");
    }
    // It would wait for ten seconds at the rate with which it came.
    let began = Instant::now();
    let waiting = start(&proxy, upstream.url("/waiting"));
    until_in_flight(&proxy, 1).await;
    reload(&mut proxy, "rate: 100/s, burst: 5").await;
    assert_eq!(proxy.get(&upstream.url("/")).await.status, 200);
    assert_eq!(waiting.await.unwrap().status, 200);
    assert!(began.elapsed() < ms(9_000), "{:?}", began.elapsed());
    reload(&mut proxy, "rate: 1/h, burst: 1").await;
    assert_eq!(proxy.get(&upstream.url("/")).await.status, 200, "of what is at hand the burst stays");
    assert!(is_refused(&ask(&proxy, &upstream.url("/"), &[HURRY]).await));
}

/// A pause outlives an edit too: the upstream has not changed its mind.
#[tokio::test]
async fn a_reload_keeps_pauses() {
    let upstream = Upstream::answering(by_path(&[
        ("/busy", Reply::status(503).header("Retry-After", "50")),
        ("/", Reply::ok("")),
    ]))
    .await;
    let mut proxy = HedgerowProcess::start(&tool(upstream.address(), MANY)).await;
    assert_eq!(proxy.get(&upstream.url("/busy")).await.status, 503);
    proxy.policy.replace(&tool(upstream.address(), &MANY.replace("1000/s", "2000/s")));
    let applied = [("result", "applied")];
    proxy.until_metrics(|m| m.value("hedgerow_config_reloads_total", &applied) == 1.0).await;
    assert!(is_refused(&ask(&proxy, &upstream.url("/"), &[HURRY]).await));
}

/// Who waits for a token has a permit already. So the places fill up with waiting calls, the next ones queue behind
/// them, and those beyond are refused; all that wait come through in their order, and nothing is left behind.
#[tokio::test]
async fn calls_that_wait_for_tokens_hold_places_and_those_behind_them_queue() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let stages =
        "rate_limit: { rate: 1/s, burst: 1 }, bulkhead: { max_concurrent: 2, max_queue: 2 }, hedge: off";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    let gauge = async |name: &str, value: f64| {
        proxy.until_metrics(|m| m.value(name, &[TOOL]) == value).await;
    };
    assert_eq!(proxy.get(&upstream.url("/first")).await.status, 200);
    let mut waiting = Vec::new();
    for (nth, gauge_name) in ["in_flight", "in_flight", "queued", "queued"].iter().enumerate() {
        waiting.push(begin(&proxy, &upstream.url(&format!("/{nth}"))).await);
        // Within the second in which no token comes.
        let name = format!("hedgerow_bulkhead_{gauge_name}");
        gauge(&name, (nth % 2 + 1) as f64).await;
    }
    let refused = proxy.get(&upstream.url("/beyond")).await;
    assert_eq!((refused.status, error_of(&refused).as_deref()), (503, Some("bulkhead_full")));
    for agent in &mut waiting {
        assert_eq!(agent.read_response().await.status, 200);
    }
    let paths: Vec<_> = upstream.requests().iter().map(|seen| seen.path().to_owned()).collect();
    assert_eq!(paths, ["/first", "/0", "/1", "/2", "/3"]);
    gauge("hedgerow_bulkhead_in_flight", 0.0).await;
    gauge("hedgerow_bulkhead_queued", 0.0).await;
    let metrics = proxy.metrics().await;
    assert_eq!((limited(&metrics, "waited"), limited(&metrics, "refused")), (4.0, 0.0));
}

/// A call that is refused for want of a token gives its place back.
#[tokio::test]
async fn a_refusal_leaves_no_place_taken() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let stages = format!("{ONE}, bulkhead: {{ max_concurrent: 1, max_queue: 0 }}");
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &stages)).await;
    assert_eq!(proxy.get(&upstream.url("/")).await.status, 200);
    for _ in 0..20 {
        assert!(is_refused(&proxy.get(&upstream.url("/")).await));
    }
    until_in_flight(&proxy, 0).await;
    let status = proxy.status().await;
    let breaker = &status["upstreams"]["tool"][upstream.address().to_string()]["breaker"];
    assert!(breaker.is_null() || breaker["failures_in_row"] == 0, "{breaker}");
}

/// A local refusal says nothing about the upstream's health.
#[tokio::test]
async fn refusals_open_no_breaker_and_a_429_neither() {
    let upstream = Upstream::answering(|_| Reply::status(429).header("Retry-After", "600")).await;
    let stages = "rate_limit: { rate: 1000/s }, hedge: off, breaker: { consecutive_failures: 1 }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    assert_eq!(proxy.get(&upstream.url("/")).await.status, 429);
    let refused = client::get_all(proxy.proxy, &vec![upstream.url("/"); 20]).await;
    assert!(refused.iter().all(is_refused));
    assert_eq!(upstream.count(), 1);
    let metrics = proxy.metrics().await;
    assert_eq!(metrics.value("hedgerow_breaker_transitions_total", &[TOOL]), 0.0);
    assert_eq!(limited(&metrics, "refused"), 20.0);
}

/// An open breaker is told before a token is looked for.
#[tokio::test]
async fn an_open_breaker_costs_no_token() {
    let upstream = Upstream::answering(statuses(&[503, 200])).await;
    let stages = "rate_limit: { rate: 1/h, burst: 2 }, hedge: off, breaker: { consecutive_failures: 1 }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    assert_eq!(proxy.get(&upstream.url("/")).await.status, 503);
    for _ in 0..5 {
        let refused = proxy.get(&upstream.url("/")).await;
        assert_eq!(error_of(&refused).as_deref(), Some("circuit_open"));
    }
    assert_eq!(proxy.ask_admin("POST", "/breakers/tool/reset").await.status, 200);
    assert_eq!(proxy.get(&upstream.url("/")).await.status, 200, "the second token is still there");
}

/// What still waits at the end is told so.
#[tokio::test]
async fn a_wait_for_a_token_ends_with_the_process() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let policy = format!(
        "drain: {{ quiet: 50ms, max: 600ms }}\n{}",
        tool(upstream.address(), "rate_limit: { rate: 3/m, burst: 1 }, hedge: off")
    );
    let mut proxy = HedgerowProcess::start(&policy).await;
    assert_eq!(proxy.get(&upstream.url("/")).await.status, 200);
    let waiting = start(&proxy, upstream.url("/"));
    until_in_flight(&proxy, 1).await;
    proxy.signal(Signal::TERM);
    let answer = waiting.await.unwrap();
    assert_eq!((answer.status, error_of(&answer).as_deref()), (503, Some("shutting_down")));
    assert_eq!((proxy.wait().await, upstream.count()), (0, 1));
}

/// Two upstreams, two buckets.
#[tokio::test]
async fn one_upstreams_limit_is_not_its_neighbours() {
    let (limited, free) =
        (Upstream::answering(|_| Reply::ok("")).await, Upstream::answering(|_| Reply::ok("")).await);
    let policy = format!(
        "upstreams: {{ {}, {} }}",
        named("tool", limited.address(), ONE),
        named("free", free.address(), "hedge: off")
    );
    let proxy = HedgerowProcess::start(&policy).await;
    assert_eq!(proxy.get(&limited.url("/")).await.status, 200);
    assert!(is_refused(&proxy.get(&limited.url("/")).await));
    for _ in 0..5 {
        assert_eq!(proxy.get(&free.url("/")).await.status, 200);
    }
}
