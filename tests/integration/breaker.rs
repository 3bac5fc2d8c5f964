//! When calls to a failing upstream stop, and how they begin again.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::Value;
use tokio::time::{Instant, sleep_until};

use crate::support::client::{self, Response, absolute};
use crate::support::dns::{Answer, Dns};
use crate::support::hedgerow::{HedgerowProcess, Metrics};
use crate::support::policy::{TOOL, named, tool};
use crate::support::upstream::{Reply, Upstream, by_path, statuses};

/// Opens at the second failure for long enough to be seen open. The wait is spread by a tenth either way.
const TWO: &str = "hedge: off, breaker: { consecutive_failures: 2, open_for: 1500ms }";
/// Longer than that wait can be.
const OVER: Duration = ms(1700);

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

async fn pause(length: Duration) {
    sleep_until(Instant::now() + length).await;
}

/// The word of hedgerow's own error, or none for an upstream's answer.
fn error_of(response: &Response) -> Option<String> {
    let is_problem = response.header("content-type") == Some("application/problem+json");
    is_problem.then(|| response.json()["error"].as_str().expect("a problem names its error").to_owned())
}

fn is_open(response: &Response) -> bool {
    response.status == 503 && error_of(response).as_deref() == Some("circuit_open")
}

async fn breaker(proxy: &HedgerowProcess, upstream: &Upstream) -> Value {
    proxy.status().await["upstreams"]["tool"][upstream.address().to_string()]["breaker"].clone()
}

async fn until_state(proxy: &HedgerowProcess, upstream: &Upstream, state: &str) {
    let host = upstream.address().to_string();
    proxy.until_status(|status| status["upstreams"]["tool"][&host]["breaker"]["state"] == state).await;
}

fn moves(metrics: &Metrics, to: &str) -> f64 {
    metrics.value("hedgerow_breaker_transitions_total", &[TOOL, ("to", to)])
}

/// What opens a breaker by calls that fail in a row, and that an open one keeps everything away.
#[tokio::test]
async fn failures_in_a_row_open_it_and_then_nothing_is_sent() {
    let (dead, _keeps_it_dead) = Upstream::dead();
    let upstream = Upstream::answering(|seen| match seen.path() {
        // Not kept: a reset on a reused connection is sent once more.
        "/status" => Reply::status(502).header("Connection", "close"),
        "/reset" => Reply::reset(),
        "/close" => Reply::close(),
        "/cut" => Reply::ok("0123456789").cut(4),
        other => panic!("{other}"),
    })
    .await;
    let routes: Vec<_> = ["status", "reset", "close", "cut"]
        .iter()
        .map(|name| format!("{{ name: {name}, path: \"/{name}\", breaker: {{ consecutive_failures: 3 }} }}"))
        .collect();
    let stages = format!("hedge: off, routes: [{}]", routes.join(", "));
    let policy = format!(
        "upstreams: {{ {}, {} }}",
        named("tool", upstream.address(), &stages),
        named("dead", dead, "hedge: off, breaker: { consecutive_failures: 3 }"),
    );
    let proxy = HedgerowProcess::start(&policy).await;
    for path in ["/status", "/reset", "/close", "/cut"] {
        for _ in 0..3 {
            assert!(!is_open(&proxy.get(&upstream.url(path)).await), "{path}");
        }
        let refused = proxy.get(&upstream.url(path)).await;
        assert!(is_open(&refused), "{path}: {refused:?}");
        let problem = refused.json();
        assert_eq!((&problem["upstream"], &problem["retryable"]), (&"tool".into(), &false.into()));
        let wait = problem["retry_after_ms"].as_u64().expect("the wait is told");
        assert!((20_000..=33_000).contains(&wait), "{wait}");
        let seconds: u64 = refused.header("retry-after").expect("the wait is told").parse().unwrap();
        // Never more than the caller has left of its 30 s.
        assert!((1..=30).contains(&seconds), "{seconds}");
        assert!(refused.header("proxy-status").unwrap().contains("error=destination_unavailable"));
        assert_eq!(upstream.count_of(path), 3);
    }
    for _ in 0..3 {
        assert_eq!(error_of(&proxy.get(&format!("http://{dead}/")).await).as_deref(), Some("connect_failed"));
    }
    assert!(is_open(&proxy.get(&format!("http://{dead}/")).await));
    let metrics = proxy.metrics().await;
    assert_eq!(moves(&metrics, "open"), 4.0);
    assert_eq!(metrics.value("hedgerow_breaker_state", &[TOOL, ("state", "open")]), 4.0);
}

/// A row is broken by any success, a 4xx included.
#[tokio::test]
async fn a_success_in_between_begins_the_row_anew() {
    let upstream = Upstream::answering(statuses(&[500, 503, 404, 500, 503, 200, 500, 504, 503])).await;
    let proxy =
        HedgerowProcess::start(&tool(upstream.address(), "hedge: off, breaker: { consecutive_failures: 3 }"))
            .await;
    for _ in 0..9 {
        assert!(!is_open(&proxy.get(&upstream.url("/")).await));
    }
    assert!(is_open(&proxy.get(&upstream.url("/")).await));
    assert_eq!(upstream.count(), 9);
}

/// A 429 is back-pressure: it neither counts in the row nor breaks it.
#[tokio::test]
async fn a_429_is_neither_failure_nor_success() {
    let upstream = Upstream::answering(statuses(&[500, 429, 429, 429, 429, 500])).await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), TWO)).await;
    for _ in 0..6 {
        assert!(!is_open(&proxy.get(&upstream.url("/")).await));
    }
    assert!(is_open(&proxy.get(&upstream.url("/")).await));
}

/// The host that fails every second call never fails twice in a row; the rate sees it, with enough calls.
#[tokio::test]
async fn a_failure_rate_opens_it_once_there_are_enough_calls() {
    let upstream = Upstream::answering(|seen| Reply::status(if seen.nth % 2 == 0 { 500 } else { 200 })).await;
    let stages = "hedge: off, breaker: { consecutive_failures: off, failure_rate: 50%, min_requests: 10 }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    for nth in 1..=10 {
        assert!(!is_open(&proxy.get(&upstream.url("/")).await), "call {nth}");
    }
    assert!(is_open(&proxy.get(&upstream.url("/")).await));
    assert_eq!(upstream.count(), 10);
}

/// A hung upstream must not be news when its calls end: the mark counts.
#[tokio::test]
async fn slow_calls_open_it_while_they_still_run() {
    let upstream = Upstream::answering(|_| Reply::hang()).await;
    let stages = "hedge: off, breaker: { consecutive_failures: off, slow_rate: 50%, slow_after: 150ms, min_requests: 4 }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    let mut waiting = client::crowd(proxy.proxy, 4).await;
    for agent in &mut waiting {
        agent.send(absolute("GET", &upstream.url("/"), &[], b"")).await;
    }
    upstream.until(|tally| tally.in_flight == 4).await;
    pause(ms(200)).await;
    assert!(is_open(&proxy.get(&upstream.url("/")).await));
    assert_eq!((upstream.count(), upstream.aborted()), (4, 0));
}

/// Fast calls are not slow ones, whatever their number.
#[tokio::test]
async fn fast_calls_do_not_trip_the_slow_rule() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let stages = "hedge: off, breaker: { slow_rate: 20%, slow_after: 5s, min_requests: 4 }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    for _ in 0..20 {
        assert_eq!(proxy.get(&upstream.url("/")).await.status, 200);
    }
    assert_eq!(breaker(&proxy, &upstream).await["slow_rate"], "0%");
}

/// A deadline speaks against the upstream only when that had its fair chance; an attempt timeout too.
#[tokio::test]
async fn c070_deadlines_count_only_after_a_fair_chance() {
    let upstream = Upstream::answering(|_| Reply::hang()).await;
    let stages = "hedge: off, breaker: { consecutive_failures: 2, fair_chance: 1s }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    let call = async |timeout: &str| {
        proxy.agent().await.request("GET", &upstream.url("/"), &[("grpc-timeout", timeout)], b"").await
    };
    for answer in join_all((0..50).map(|_| call("40m"))).await {
        assert_eq!(answer.status, 504);
    }
    assert_eq!(breaker(&proxy, &upstream).await["failures_in_row"], 0);
    for answer in join_all((0..2).map(|_| call("2500m"))).await {
        assert_eq!(answer.status, 504);
    }
    assert!(is_open(&call("2500m").await));
}

/// Real resets still count after hundreds of cancellations of our own.
#[tokio::test]
async fn c070_real_resets_open_it_after_any_number_of_own_cancellations() {
    let upstream =
        Upstream::answering(by_path(&[("/hang", Reply::hang()), ("/reset", Reply::reset())])).await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), "hedge: off")).await;
    for _ in 0..5 {
        let mut leaving = client::crowd(proxy.proxy, 20).await;
        let before = upstream.count();
        for agent in &mut leaving {
            agent.send(absolute("GET", &upstream.url("/hang"), &[], b"")).await;
        }
        upstream.until(|tally| tally.requests == before + 20).await;
        drop(leaving);
        upstream.until(|tally| tally.aborted == before + 20).await;
    }
    assert_eq!(breaker(&proxy, &upstream).await["failures_in_row"], 0);
    for nth in 1..=5 {
        assert_eq!(
            error_of(&proxy.get(&upstream.url("/reset")).await).as_deref(),
            Some("upstream_reset"),
            "reset {nth}"
        );
    }
    assert!(is_open(&proxy.get(&upstream.url("/reset")).await));
}

/// A probe that is answered 404 shows that the host is there, and gives its place back.
#[tokio::test]
async fn c066_a_404_on_the_probe_closes_it() {
    let upstream = Upstream::answering(statuses(&[500, 500, 404, 200])).await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), TWO)).await;
    for status in [500, 500] {
        assert_eq!(proxy.get(&upstream.url("/")).await.status, status);
    }
    assert!(is_open(&proxy.get(&upstream.url("/")).await));
    pause(OVER).await;
    assert_eq!(proxy.get(&upstream.url("/")).await.status, 404);
    let urls = vec![upstream.url("/"); 5];
    assert!(client::get_all(proxy.proxy, &urls).await.iter().all(|answer| answer.status == 200));
    let metrics = proxy.metrics().await;
    assert_eq!(
        (moves(&metrics, "open"), moves(&metrics, "half_open"), moves(&metrics, "closed")),
        (1.0, 1.0, 1.0)
    );
    let probes = [TOOL, ("kind", "probe")];
    assert_eq!(metrics.value("hedgerow_upstream_attempts_total", &probes), 1.0);
}

/// Clients that lose patience say nothing about the upstream.
#[tokio::test]
async fn c067_clients_that_leave_are_neutral_and_have_an_outcome_of_their_own() {
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/slow" => Reply::ok("").after(ms(5000)),
        _ => Reply::ok(""),
    })
    .await;
    let proxy =
        HedgerowProcess::start(&tool(upstream.address(), "hedge: off, breaker: { consecutive_failures: 3 }"))
            .await;
    let mut leaving = client::crowd(proxy.proxy, 50).await;
    for agent in &mut leaving {
        agent.send(absolute("GET", &upstream.url("/slow"), &[], b"")).await;
    }
    upstream.until(|tally| tally.requests == 50).await;
    drop(leaving);
    upstream.until(|tally| tally.aborted == 50).await;
    assert_eq!(proxy.get(&upstream.url("/")).await.status, 200);
    let left = [TOOL, ("code", "499"), ("outcome", "client_left")];
    let metrics =
        proxy.until_metrics(|metrics| metrics.value("hedgerow_requests_total", &left) == 50.0).await;
    let cancelled = [TOOL, ("result", "cancelled")];
    assert_eq!(metrics.value("hedgerow_upstream_attempts_total", &cancelled), 50.0);
    assert_eq!(moves(&metrics, "open"), 0.0);
    let now = breaker(&proxy, &upstream).await;
    assert_eq!(
        (&now["state"], &now["failures_in_row"], &now["requests"]),
        (&"closed".into(), &0.into(), &1.into())
    );
}

/// A probe whose client leaves decides nothing, and its place is free for the next caller.
#[tokio::test]
async fn c068_a_client_that_leaves_during_the_probe_frees_its_place() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(
        upstream.address(),
        "hedge: off, breaker: { consecutive_failures: 1, open_for: 50ms }",
    ))
    .await;
    let url = upstream.url("/");
    let (failed, ()) =
        tokio::join!(proxy.get(&url), async { upstream.next().await.respond(500, &[], "").await });
    assert_eq!(failed.status, 500);
    pause(ms(80)).await;
    for nth in 0..50 {
        let mut agent = proxy.agent().await;
        agent.send(absolute("GET", &url, &[], b"")).await;
        let probe = upstream.next().await;
        assert_eq!(breaker(&proxy, &upstream).await["state"], "half_open", "probe {nth}");
        if nth % 2 == 0 {
            drop(agent);
        } else {
            agent.reset();
        }
        probe.gone().await;
        // The upstream may see the close a moment before the place is free.
        let left = [TOOL, ("outcome", "client_left")];
        let gone = f64::from(nth + 1);
        proxy.until_metrics(|metrics| metrics.value("hedgerow_requests_total", &left) == gone).await;
    }
    let (answer, ()) =
        tokio::join!(proxy.get(&url), async { upstream.next().await.respond(200, &[], "").await });
    assert_eq!(answer.status, 200);
    assert_eq!(breaker(&proxy, &upstream).await["state"], "closed");
}

/// The moment after the wait is no gate that flies open: as many probes as configured, all others refused at once.
#[tokio::test]
async fn c069_no_more_calls_than_probes_go_out_while_half_open() {
    for probes in [1, 3] {
        let upstream = Upstream::answering(|seen| match seen.path() {
            "/fail" => Reply::status(500),
            _ => Reply::hang(),
        })
        .await;
        let stages = format!(
            "hedge: off, breaker: {{ consecutive_failures: 1, open_for: 100ms, half_open_probes: {probes} }}"
        );
        let proxy = HedgerowProcess::start(&tool(upstream.address(), &stages)).await;
        assert_eq!(proxy.get(&upstream.url("/fail")).await.status, 500);
        pause(ms(150)).await;
        let mut crowd = client::crowd(proxy.proxy, 100).await;
        for agent in &mut crowd {
            agent.send(absolute("GET", &upstream.url("/hang"), &[], b"")).await;
        }
        let refused = [TOOL, ("code", "503"), ("outcome", "error")];
        let all = 100.0 - f64::from(probes);
        proxy.until_metrics(|metrics| metrics.value("hedgerow_requests_total", &refused) == all).await;
        upstream.until(|tally| tally.requests > probes as usize).await;
        upstream.gets_nothing_more(ms(50)).await;
        assert_eq!(upstream.count_of("/hang"), probes as usize);
    }
}

/// With several probes all must succeed, and one failure is enough to open it again.
#[tokio::test]
async fn several_probes_must_all_succeed() {
    let stages = "hedge: off, breaker: { consecutive_failures: 1, open_for: 700ms, half_open_probes: 2 }";
    let upstream = Upstream::answering(statuses(&[500, 200, 500, 200, 200])).await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    assert_eq!(proxy.get(&upstream.url("/")).await.status, 500);
    pause(ms(800)).await;
    assert_eq!(proxy.get(&upstream.url("/")).await.status, 200);
    assert_eq!(breaker(&proxy, &upstream).await["state"], "half_open");
    assert_eq!(proxy.get(&upstream.url("/")).await.status, 500);
    assert!(is_open(&proxy.get(&upstream.url("/")).await));
    // The second wait is twice the first.
    pause(ms(1600)).await;
    for state in ["half_open", "closed"] {
        assert_eq!(proxy.get(&upstream.url("/")).await.status, 200);
        assert_eq!(breaker(&proxy, &upstream).await["state"], state);
    }
}

/// Each failed return doubles the wait, up to its bound.
#[tokio::test]
async fn the_wait_grows_with_each_failed_probe_up_to_its_maximum() {
    let upstream = Upstream::answering(|_| Reply::status(503)).await;
    let stages = "hedge: off, breaker: { consecutive_failures: 1, open_for: 100ms, max_open_for: 300ms }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    let mut began = Instant::now();
    assert!(!is_open(&proxy.get(&upstream.url("/")).await));
    let mut refusals = 0;
    for wait in [ms(100), ms(200), ms(300), ms(300)] {
        // What is told never exceeds the wait, and the next probe does not come before it is over, however
        // slow the machine. Each is spread by a tenth.
        loop {
            let asked = Instant::now();
            let answer = proxy.get(&upstream.url("/")).await;
            if !is_open(&answer) {
                assert!(began.elapsed() >= wait * 9 / 10, "{:?} of {wait:?}", began.elapsed());
                began = asked;
                break;
            }
            refusals += 1;
            let left = ms(answer.json()["retry_after_ms"].as_u64().expect("the wait is told"));
            assert!(left <= wait * 11 / 10, "{left:?} of {wait:?}");
            pause(left).await;
        }
    }
    assert!(refusals >= 1, "never seen open");
}

/// A head is a promise; the verdict falls at the end of the body.
#[tokio::test]
async fn c072_good_heads_with_broken_bodies_open_it() {
    let upstream = Upstream::answering(|_| Reply::ok("0123456789").cut(3)).await;
    let proxy =
        HedgerowProcess::start(&tool(upstream.address(), "hedge: off, breaker: { consecutive_failures: 3 }"))
            .await;
    for _ in 0..3 {
        let answer = proxy.get(&upstream.url("/")).await;
        assert_eq!((answer.status, answer.text(), answer.complete), (200, "012", false));
    }
    assert!(is_open(&proxy.get(&upstream.url("/")).await));
}

/// What each answer to a probe means: 401 is there; 429 and 503 with `Retry-After` are there and want time; a 503
/// alone, or with a field that nobody can read, is a failure.
#[tokio::test]
async fn c074_the_answer_to_a_probe_is_taken_at_its_word() {
    let upstream = Upstream::answering(|seen| match (seen.path(), seen.nth) {
        (_, 1) => Reply::status(500),
        ("/401", _) => Reply::status(401),
        ("/429", 2) => Reply::status(429).header("Retry-After", "3"),
        ("/patient", 2) => Reply::status(503).header("Retry-After", "3"),
        ("/429-free", 2) => Reply::status(429),
        ("/503", _) => Reply::status(503),
        ("/odd", _) => Reply::status(503).header("Retry-After", "-1"),
        _ => Reply::ok(""),
    })
    .await;
    let route = |name: &str| {
        format!(
            "{{ name: r{name}, path: \"/{name}\", breaker: {{ consecutive_failures: 1, open_for: 100ms }} }}"
        )
    };
    let names = ["401", "429", "patient", "429-free", "503", "odd"];
    let routes: Vec<_> = names.iter().map(|name| route(name)).collect();
    let proxy = HedgerowProcess::start(&tool(
        upstream.address(),
        &format!("hedge: off, routes: [{}]", routes.join(", ")),
    ))
    .await;
    let host = upstream.address().to_string();
    let state = async |name: &str| {
        let status = proxy.status().await;
        let route = &status["upstreams"]["tool"][&host]["routes"][format!("r{name}")];
        route["breaker"]["state"].as_str().unwrap_or_else(|| panic!("{status}")).to_owned()
    };
    for name in names {
        assert_eq!(proxy.get(&upstream.url(&format!("/{name}"))).await.status, 500);
        assert_eq!(state(name).await, "open");
    }
    pause(ms(150)).await;
    for (name, status, after) in [
        ("401", 401, "closed"),
        ("429", 429, "half_open"),
        ("patient", 503, "half_open"),
        ("429-free", 429, "half_open"),
        ("503", 503, "open"),
        ("odd", 503, "open"),
    ] {
        let answer = proxy.get(&upstream.url(&format!("/{name}"))).await;
        assert_eq!((answer.status, state(name).await.as_str()), (status, after), "{name}");
    }
    let told = Instant::now();
    // Told to wait, it waits; told nothing, the place is free at once.
    for name in ["429", "patient"] {
        let refused = proxy.get(&upstream.url(&format!("/{name}"))).await;
        assert!(is_open(&refused), "{name}");
        assert!((1..=3000).contains(&refused.json()["retry_after_ms"].as_u64().unwrap()));
    }
    assert_eq!(proxy.get(&upstream.url("/429-free")).await.status, 200);
    sleep_until(told + ms(3100)).await;
    for name in ["429", "patient"] {
        assert_eq!(proxy.get(&upstream.url(&format!("/{name}"))).await.status, 200, "{name}");
    }
    for name in ["429", "patient", "429-free"] {
        assert_eq!(state(name).await, "closed", "{name}");
    }
}

/// A stream lasts as long as it likes; its head is enough of a probe.
#[tokio::test]
async fn a_probe_that_becomes_a_stream_is_judged_by_its_head() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(
        upstream.address(),
        "hedge: off, breaker: { consecutive_failures: 1, open_for: 50ms }",
    ))
    .await;
    let url = upstream.url("/");
    let (failed, ()) =
        tokio::join!(proxy.get(&url), async { upstream.next().await.respond(500, &[], "").await });
    assert_eq!(failed.status, 500);
    pause(ms(80)).await;
    let mut agent = proxy.agent().await;
    agent.send(absolute("GET", &url, &[], b"")).await;
    let mut stream = upstream.next().await;
    stream.start_chunks(200, &[("Content-Type", "text/event-stream")]).await;
    assert_eq!(agent.read_head().await.status, 200);
    until_state(&proxy, &upstream, "closed").await;
    let (answer, ()) =
        tokio::join!(proxy.get(&url), async { upstream.next().await.respond(200, &[], "").await });
    assert_eq!(answer.status, 200);
    stream.end().await;
}

/// Which statuses are failures is the policy's to say.
#[tokio::test]
async fn failure_statuses_are_configurable() {
    let upstream = Upstream::answering(|_| Reply::status(401)).await;
    let stages = "hedge: off, breaker: { consecutive_failures: 2, failure_statuses: [401] }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    for _ in 0..2 {
        assert_eq!(proxy.get(&upstream.url("/")).await.status, 401);
    }
    assert!(is_open(&proxy.get(&upstream.url("/")).await));
}

/// Off is off.
#[tokio::test]
async fn a_breaker_that_is_off_never_opens() {
    let upstream = Upstream::answering(|_| Reply::status(500)).await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), "hedge: off, breaker: off")).await;
    for _ in 0..20 {
        assert_eq!(proxy.get(&upstream.url("/")).await.status, 500);
    }
    assert_eq!(upstream.count(), 20);
}

/// The operator's levers: held open, held closed, and let go.
#[tokio::test]
async fn an_operator_holds_it_open_or_closed_and_lets_go_of_it() {
    let upstream =
        Upstream::answering(by_path(&[("/ok", Reply::ok("")), ("/fail", Reply::status(500))])).await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), TWO)).await;
    assert_eq!(proxy.ask_admin("POST", "/breakers/tool/force_open").await.status, 404);
    assert_eq!(proxy.get(&upstream.url("/ok")).await.status, 200);

    assert_eq!(proxy.ask_admin("POST", "/breakers/tool/force_open").await.status, 200);
    pause(OVER).await;
    // No wait ends it.
    let refused = proxy.get(&upstream.url("/ok")).await;
    assert!(is_open(&refused));
    assert_eq!((refused.header("retry-after"), refused.json().get("retry_after_ms")), (None, None));
    assert_eq!(breaker(&proxy, &upstream).await["forced"], true);

    let one = format!("/breakers/tool/{}/force_closed", upstream.address());
    assert_eq!(proxy.ask_admin("POST", &one).await.status, 200);
    for _ in 0..5 {
        assert_eq!(proxy.get(&upstream.url("/fail")).await.status, 500);
    }

    assert_eq!(proxy.ask_admin("POST", "/breakers/tool/reset").await.status, 200);
    let now = breaker(&proxy, &upstream).await;
    assert_eq!(
        (&now["state"], &now["forced"], &now["failures_in_row"]),
        (&"closed".into(), &false.into(), &0.into())
    );
    for _ in 0..2 {
        assert_eq!(proxy.get(&upstream.url("/fail")).await.status, 500);
    }
    assert!(is_open(&proxy.get(&upstream.url("/ok")).await));

    for (method, path, status) in [
        ("GET", "/breakers/tool/reset", 405),
        ("POST", "/breakers/tool/explode", 404),
        ("POST", "/breakers/nobody/reset", 404),
        ("POST", "/breakers/tool/127.0.0.1:1/reset", 404),
        ("POST", "/breakers/tool", 404),
    ] {
        assert_eq!(proxy.ask_admin(method, path).await.status, status, "{method} {path}");
    }
}

/// Editing the policy does not make an upstream healthy: the state stays, and new settings hold at once.
#[tokio::test]
async fn its_state_lives_on_over_a_reload() {
    let upstream =
        Upstream::answering(by_path(&[("/ok", Reply::ok("")), ("/fail", Reply::status(500))])).await;
    let policy = |stages: &str| tool(upstream.address(), stages);
    let mut proxy = HedgerowProcess::start(&policy("hedge: off, breaker: { consecutive_failures: 3 }")).await;
    let applied = async |proxy: &HedgerowProcess, times: f64| {
        let label = [("result", "applied")];
        proxy.until_metrics(|metrics| metrics.value("hedgerow_config_reloads_total", &label) == times).await
    };
    for _ in 0..2 {
        assert_eq!(proxy.get(&upstream.url("/fail")).await.status, 500);
    }
    let before = proxy.metrics().await.value("hedgerow_config_reloads_total", &[("result", "applied")]);
    proxy.policy.replace(&policy("hedge: off, breaker: { consecutive_failures: 4 }"));
    applied(&proxy, before + 1.0).await;
    // Two before, two after.
    for _ in 0..2 {
        assert_eq!(proxy.get(&upstream.url("/fail")).await.status, 500);
    }
    assert!(is_open(&proxy.get(&upstream.url("/ok")).await));

    proxy.policy.replace(&policy(
        "hedge: off, breaker: { consecutive_failures: 4 }, bulkhead: { max_concurrent: 7 }",
    ));
    applied(&proxy, before + 2.0).await;
    assert!(is_open(&proxy.get(&upstream.url("/ok")).await));
    assert_eq!(moves(&proxy.metrics().await, "open"), 1.0);
}

/// A tunnel's breaker judges the connect: bytes inside are none of its business.
#[tokio::test]
async fn connects_that_fail_open_the_breaker_of_tunnels() {
    let (dead, _keeps_it_dead) = Upstream::dead();
    let proxy = HedgerowProcess::start(&tool(dead, "breaker: { consecutive_failures: 2 }")).await;
    for word in ["connect_failed", "connect_failed", "circuit_open"] {
        let refused = proxy.agent().await.open_tunnel(&dead.to_string()).await;
        assert_eq!(error_of(&refused).as_deref(), Some(word));
        assert_eq!(refused.header("connection"), Some("close"));
    }
}

/// A name that does not resolve is a failure like any other; other names have breakers of their own.
#[tokio::test]
async fn each_host_of_an_upstream_has_its_own() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let dns =
        Dns::start(&[("good.test", Answer::addresses(&["127.0.0.1"])), ("bad.test", Answer::Failure)]).await;
    let policy = format!(
        "dns: {{ servers: [\"{}\"] }}\nupstreams: {{ tool: {{ hosts: [good.test, bad.test], hedge: off, breaker: {{ consecutive_failures: 2 }} }} }}",
        dns.address()
    );
    let proxy = HedgerowProcess::start(&policy).await;
    let port = upstream.address().port();
    for word in ["dns_failed", "dns_failed", "circuit_open"] {
        let refused = proxy.get(&format!("http://bad.test:{port}/")).await;
        assert_eq!(error_of(&refused).as_deref(), Some(word));
    }
    assert_eq!(proxy.get(&format!("http://good.test:{port}/")).await.status, 200);
    let metrics = proxy.metrics().await;
    let in_state = |state| metrics.value("hedgerow_breaker_state", &[TOOL, ("state", state)]);
    assert_eq!((in_state("open"), in_state("closed")), (1.0, 1.0));
}
