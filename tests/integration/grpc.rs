//! gRPC calls: errors where gRPC looks for them, and guards that read the status where gRPC says it.
//!
//! Over HTTP/1, which carries the same fields and trailers; what is asked and answered here does not
//! depend on the version.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::support::client::{Agent, Response, absolute};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::policy::{TOOL, named, tool};
use crate::support::upstream::{Exchange, Upstream};

const GRPC: (&str, &str) = ("Content-Type", "application/grpc+proto");
const TRAILERS: [(&str, &str); 2] = [("TE", "trailers"), ("Connection", "TE")];
/// An empty message in its frame.
const MESSAGE: &[u8] = &[0; 5];

async fn pause(ms: u64) {
    sleep_until(Instant::now() + Duration::from_millis(ms)).await;
}

async fn ask(hedgerow: &HedgerowProcess, url: &str, fields: &[(&str, &str)]) -> (Agent, ()) {
    let mut agent = hedgerow.agent().await;
    let fields = [&[GRPC], &TRAILERS[..], fields].concat();
    let sent = agent.send(absolute("POST", url, &fields, MESSAGE)).await;
    (agent, sent)
}

/// A call that hedgerow answers by itself, or the upstream by a script.
async fn call(hedgerow: &HedgerowProcess, url: &str, fields: &[(&str, &str)]) -> Response {
    let (mut agent, ()) = ask(hedgerow, url, fields).await;
    agent.read_response_to("POST").await
}

/// A call that the upstream answers with a message and these trailers.
async fn answered(hedgerow: &HedgerowProcess, upstream: &mut Upstream, trailers: &str) -> Response {
    let url = upstream.url("/");
    let answer = async {
        let mut exchange = upstream.next().await;
        begin(&mut exchange).await;
        exchange.raw(format!("0\r\n{trailers}\r\n").as_bytes()).await;
        exchange.finish().await;
    };
    tokio::join!(call(hedgerow, &url, &[]), answer).0
}

async fn begin(exchange: &mut Exchange) {
    exchange.start_chunks(200, &[GRPC, ("Trailer", "grpc-status")]).await;
    exchange.chunk(MESSAGE).await;
}

/// Status, message and push-back of an error of hedgerow's own.
#[track_caller]
fn refusal(answer: &Response) -> (&str, &str, Option<&str>) {
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/grpc")), "{answer:?}");
    assert!(answer.complete && answer.body.is_empty(), "{answer:?}");
    assert_eq!((answer.header("via"), answer.header("retry-after")), (Some("1.1 hedgerow"), None));
    let error = answer.header("proxy-status").expect("the error is named");
    assert!(error.starts_with("hedgerow; error="), "{error}");
    let field = |name| answer.header(name);
    (
        field("grpc-status").expect("a status in the head"),
        field("grpc-message").expect("words"),
        field("grpc-retry-pushback-ms"),
    )
}

#[track_caller]
fn is_open(answer: &Response) -> bool {
    answer.headers.get("proxy-status").is_some_and(|error| error.contains("destination_unavailable"))
}

async fn until_state(hedgerow: &HedgerowProcess, state: &str) {
    let labels = [TOOL, ("state", state)];
    hedgerow.until_metrics(|metrics| metrics.value("hedgerow_breaker_state", &labels) == 1.0).await;
}

#[tokio::test]
async fn an_error_is_a_trailers_only_answer() {
    let mut upstream = Upstream::start().await;
    let (dead, _keeps_it_dead) = Upstream::dead();
    let stages = "hedge: off, bulkhead: { max_concurrent: 1, max_queue: 0 }";
    let policy = format!(
        "egress: {{ deny: [denied.test] }}\nupstreams: {{ {}, {} }}",
        named("tool", upstream.address(), stages),
        named("dead", dead, "hedge: off, breaker: { consecutive_failures: 1, open_for: 5s }"),
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    let (url, dead) = (upstream.url("/"), format!("http://{dead}/"));

    let past = call(&hedgerow, &url, &[("x-request-deadline", "1000000000")]).await;
    let (status, message, push_back) = refusal(&past);
    assert_eq!((status, push_back), ("4", Some("-1")));
    assert!(message.starts_with("x-request-deadline had passed "), "{message}");

    let invalid = call(&hedgerow, &url, &[("grpc-timeout", "1x")]).await;
    assert_eq!(
        refusal(&invalid),
        ("3", "grpc-timeout takes up to eight digits and one of H, M, S, m, u, n", None)
    );
    // As with any bad head, nothing that follows it is trusted.
    assert_eq!(invalid.header("connection"), Some("close"));

    let denied = call(&hedgerow, "http://denied.test/", &[]).await;
    assert_eq!(refusal(&denied), ("7", "refused by egress.deny (denied.test)", Some("-1")));

    let refused = call(&hedgerow, &dead, &[]).await;
    assert_eq!(refusal(&refused), ("14", "no address of dead accepted a connection", None));

    let open = call(&hedgerow, &dead, &[]).await;
    let (status, message, push_back) = refusal(&open);
    assert_eq!(status, "14");
    assert!(message.starts_with("dead is failing; next probe in "), "{message}");
    let wait: u64 = push_back.expect("the wait is told").parse().unwrap();
    assert!((3_000..=5_500).contains(&wait), "{wait}");

    let (_agent, ()) = ask(&hedgerow, &url, &[]).await;
    let held = upstream.next().await;
    let full = call(&hedgerow, &url, &[]).await;
    assert_eq!(
        refusal(&full),
        ("14", "tool has all its permits out and no place in its queue in time", None)
    );
    held.hold();
    assert_eq!(upstream.count(), 1);

    // The accounts know the errors as what they are.
    let metrics = hedgerow.metrics().await;
    for (code, count) in [("504", 1.0), ("400", 1.0), ("403", 1.0), ("502", 1.0), ("503", 2.0), ("200", 0.0)]
    {
        assert_eq!(metrics.value("hedgerow_requests_total", &[("code", code)]), count, "{code}");
    }
    let line = hedgerow.access_log(|line| line["error"] == "bulkhead_full").await;
    assert_eq!((&line["status"], &line["outcome"]), (&503.into(), &"error".into()));
}

// A 200 would open the tunnel that was refused.
#[tokio::test]
async fn only_a_post_is_a_call() {
    let hedgerow = HedgerowProcess::start("egress: { deny: [denied.test] }").await;
    let mut agent = hedgerow.agent().await;
    let kind = format!("{}: {}", GRPC.0, GRPC.1);
    agent.send(format!("CONNECT denied.test:443 HTTP/1.1\r\nHost: denied.test:443\r\n{kind}\r\n\r\n")).await;
    assert_eq!(agent.read_response_to("CONNECT").await.status, 403);
    for (method, kind) in [("GET", GRPC.1), ("POST", "application/grpc-web"), ("POST", "application/json")] {
        let mut agent = hedgerow.agent().await;
        let answer = agent.request(method, "http://denied.test/", &[(GRPC.0, kind)], b"").await;
        assert_eq!((answer.status, answer.header("grpc-status")), (403, None), "{method} {kind}");
        assert_eq!(answer.json()["error"], "egress_denied");
    }
}

#[tokio::test]
async fn a_grpc_timeout_is_passed_on_shrunk_and_kept() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("defaults: { hedge: off }").await;
    let url = upstream.url("/");
    let began = Instant::now();
    let (answer, exchange) =
        tokio::join!(call(&hedgerow, &url, &[("grpc-timeout", "1500m")]), upstream.next());
    let told = exchange.header("grpc-timeout").expect("the upstream is told").to_owned();
    let left: u64 = told.strip_suffix('u').unwrap_or_else(|| panic!("{told}")).parse().unwrap();
    // What the way took, and a reserve of 50 ms, come off.
    let most = exchange.at - began + Duration::from_millis(51);
    assert!((1_500_000 - most.as_micros() as u64..1_500_000).contains(&left), "{told}");
    assert_eq!(refusal(&answer), ("4", "grpc-timeout struck before the response head", Some("-1")));
    exchange.gone().await;
}

#[tokio::test]
async fn failures_in_trailers_open_the_breaker() {
    for trailers in ["grpc-status: 14\r\n", "grpc-status: 13\r\n", "grpc-status: odd\r\n", ""] {
        let mut upstream = Upstream::start().await;
        let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "hedge: off")).await;
        for nth in 1..=5 {
            let answer = answered(&hedgerow, &mut upstream, trailers).await;
            assert_eq!((answer.status, &answer.body[..]), (200, MESSAGE), "call {nth}");
        }
        assert!(is_open(&call(&hedgerow, &upstream.url("/"), &[]).await), "{trailers:?}");
        assert_eq!(upstream.count(), 5);
        let failed =
            hedgerow.metrics().await.value("hedgerow_upstream_attempts_total", &[("result", "status")]);
        assert_eq!(failed, 5.0);
    }
}

/// Nor do answers about the call rather than the upstream, or the upstream's wish for fewer calls.
#[tokio::test]
async fn other_statuses_in_trailers_do_not() {
    let mut upstream = Upstream::start().await;
    let stages = "hedge: off, breaker: { consecutive_failures: 2 }";
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    for status in [0, 1, 3, 5, 5, 5, 5, 5, 7, 8, 8, 8, 8, 8, 12, 16] {
        let trailers = format!("grpc-status: {status}\r\n");
        let answer = answered(&hedgerow, &mut upstream, &trailers).await;
        assert_eq!(answer.trailers.get("grpc-status"), Some(&*status.to_string()), "{answer:?}");
    }
    // Of a failure and a push-back, the former alone counts in the row.
    answered(&hedgerow, &mut upstream, "grpc-status: 14\r\n").await;
    answered(&hedgerow, &mut upstream, "grpc-status: 8\r\n").await;
    answered(&hedgerow, &mut upstream, "grpc-status: 14\r\n").await;
    assert!(is_open(&call(&hedgerow, &upstream.url("/"), &[]).await));
}

#[tokio::test]
async fn a_status_in_the_head_is_read_too() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "hedge: off")).await;
    let url = upstream.url("/");
    for _ in 0..5 {
        let answer = async { upstream.next().await.respond(200, &[GRPC, ("grpc-status", "14")], b"").await };
        let (answer, ()) = tokio::join!(call(&hedgerow, &url, &[]), answer);
        assert_eq!((answer.status, answer.header("grpc-status")), (200, Some("14")));
    }
    assert!(is_open(&call(&hedgerow, &url, &[]).await));
}

#[tokio::test]
async fn a_failure_in_the_head_is_not_good_enough_while_a_hedge_runs() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "hedge: { after: 20ms }")).await;
    let (mut agent, ()) = ask(&hedgerow, &upstream.url("/"), &[("Idempotency-Key", "1")]).await;
    let (primary, mut hedge) = (upstream.next().await, upstream.next().await);
    primary.respond(200, &[GRPC, ("grpc-status", "14")], b"").await;
    let failed = [("kind", "primary"), ("result", "status")];
    begin(&mut hedge).await;
    hedge.raw(b"0\r\ngrpc-status: 0\r\n\r\n").await;
    hedge.finish().await;
    let answer = agent.read_response_to("POST").await;
    assert_eq!((answer.trailers.get("grpc-status"), &answer.body[..]), (Some("0"), MESSAGE), "{answer:?}");
    hedgerow.until_metrics(|m| m.value("hedgerow_upstream_attempts_total", &failed) == 1.0).await;
}

const TWO: &str = "hedge: off, \
    breaker: { consecutive_failures: 2, open_for: 700ms, half_open_probes: 1, fair_chance: 150ms }";

/// A breaker that two failures have opened, and whose next call is a probe.
async fn half_open(upstream: &mut Upstream) -> HedgerowProcess {
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), TWO)).await;
    for _ in 0..2 {
        answered(&hedgerow, upstream, "grpc-status: 14\r\n").await;
    }
    // The wait is spread by a tenth.
    pause(800).await;
    hedgerow
}

#[tokio::test]
async fn a_probe_is_judged_by_its_trailers() {
    let mut upstream = Upstream::start().await;
    let hedgerow = half_open(&mut upstream).await;
    let failed = answered(&hedgerow, &mut upstream, "grpc-status: 14\r\n").await;
    assert_eq!(failed.trailers.get("grpc-status"), Some("14"));
    assert!(is_open(&call(&hedgerow, &upstream.url("/"), &[]).await));
    // Twice as long.
    pause(1600).await;
    answered(&hedgerow, &mut upstream, "grpc-status: 5\r\n").await;
    until_state(&hedgerow, "closed").await;
}

#[tokio::test]
async fn a_push_back_in_trailers_says_when_the_next_probe_may_come() {
    let mut upstream = Upstream::start().await;
    let hedgerow = half_open(&mut upstream).await;
    answered(&hedgerow, &mut upstream, "grpc-status: 14\r\ngrpc-retry-pushback-ms: 20000\r\n").await;
    let (url, fields) = (upstream.url("/"), [("grpc-timeout", "9M")]);
    let answer = call(&hedgerow, &url, &fields).await;
    let (status, _, push_back) = refusal(&answer);
    let wait: u64 = push_back.expect("the wait is told").parse().unwrap();
    assert!(status == "14" && (15_000..=20_000).contains(&wait), "{wait}");
}

/// Its head does not tell it from a short answer, and its trailers may never come.
#[tokio::test]
async fn a_probe_that_is_a_stream_closes_the_breaker_while_it_lasts() {
    let mut upstream = Upstream::start().await;
    let hedgerow = half_open(&mut upstream).await;
    let (mut agent, ()) = ask(&hedgerow, &upstream.url("/"), &[]).await;
    let mut exchange = upstream.next().await;
    begin(&mut exchange).await;
    assert_eq!(agent.read_head().await.status, 200);
    assert_eq!(agent.read_chunk().await.unwrap(), MESSAGE);
    until_state(&hedgerow, "closed").await;
    exchange.chunk(MESSAGE).await;
    assert_eq!(agent.read_chunk().await.unwrap(), MESSAGE);
    let probes = [("kind", "probe"), ("result", "ok")];
    assert_eq!(hedgerow.metrics().await.value("hedgerow_upstream_attempts_total", &probes), 1.0);
}
