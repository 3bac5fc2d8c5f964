//! Another try for a call that failed: which calls get one, when, where it goes, what it may cost, and what the
//! layers above and below are told.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use futures_util::stream::{self, StreamExt as _};
use h2::Reason;
use rustix::process::Signal;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::support::client::{self, Agent, End, Response, absolute};
use crate::support::dns::{Answer, Dns};
use crate::support::hedgerow::{HedgerowProcess, Metrics};
use crate::support::http2::Http2Upstream;
use crate::support::http2::frames::{Frame, FramePeer, STATUS_200, kind};
use crate::support::pki::Pki;
use crate::support::policy::{TOOL, named, tool};
use crate::support::raw::RawPort;
use crate::support::road::{Mode, Road};
use crate::support::upstream::{Exchange, Reply, Seen, Upstream, pattern, statuses};

/// Retries are never short of budget where the budget is not what a test is about.
const PLENTY: &str = "extra_load: { ratio: 100%, floor: 1000/s }";
/// One more try, soon, and nothing else that could send a request.
const RETRY: &str =
    "hedge: off, breaker: off, retry: { backoff: 20ms }, extra_load: { ratio: 100%, floor: 1000/s }";

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn retries(metrics: &Metrics, result: &str) -> f64 {
    metrics.value("hedgerow_retries_total", &[TOOL, ("result", result)])
}

fn all_retries(metrics: &Metrics) -> f64 {
    metrics.value("hedgerow_retries_total", &[TOOL])
}

/// A GET on a connection of its own, running while the test serves it.
fn start(proxy: &HedgerowProcess, url: String) -> JoinHandle<Response> {
    let proxy = **proxy;
    tokio::spawn(async move { proxy.get(&url).await })
}

async fn ask(proxy: &HedgerowProcess, method: &str, url: &str, headers: &[(&str, &str)]) -> Response {
    proxy.agent().await.request(method, url, headers, b"").await
}

/// What is said about another try by the caller.
fn should_retry(answer: &Response) -> Option<&str> {
    answer.header("x-should-retry")
}

fn error_of(answer: &Response) -> String {
    answer.json()["error"].as_str().expect("a problem names its error").to_owned()
}

/// The numbers under which requests came.
fn numbers(upstream: &Upstream) -> Vec<String> {
    let number =
        |seen: &Seen| seen.header("x-hedgerow-attempt").expect("each attempt is numbered").to_owned();
    upstream.requests().iter().map(number).collect()
}

#[tokio::test]
async fn nothing_is_tried_again_unless_the_policy_has_retry() {
    let upstream = Upstream::answering(statuses(&[503, 200])).await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), "hedge: off")).await;
    let answer = proxy.get(&upstream.url("/")).await;
    assert_eq!((answer.status, answer.header("x-hedgerow-attempts")), (503, Some("1")));
    assert_eq!(should_retry(&answer), None, "another layer may well try again");
    assert_eq!((upstream.count(), all_retries(&proxy.metrics().await)), (1, 0.0));
}

/// The story that the name stands for: bad luck once, and the caller does not see it.
#[tokio::test]
async fn a_call_that_failed_is_tried_again_and_the_caller_sees_the_good_answer() {
    let upstream = Upstream::answering(statuses(&[503, 200])).await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), RETRY)).await;
    let answer = proxy.get(&upstream.url("/path?q=1")).await;
    assert_eq!((answer.status, answer.text(), answer.header("x-hedgerow-attempts")), (200, "200", Some("2")));
    assert_eq!(should_retry(&answer), None);
    let seen = upstream.requests();
    assert_eq!(seen.len(), 2);
    assert_eq!(seen[0].head.target, seen[1].head.target);
    assert_eq!(seen[0].header("x-request-deadline"), seen[1].header("x-request-deadline"));
    assert_eq!(upstream.connections(), 1, "the connection of the first answer was free again");

    let metrics = proxy.metrics().await;
    assert_eq!((retries(&metrics, "succeeded"), all_retries(&metrics)), (1.0, 1.0));
    let attempts = |kind, result| {
        metrics.value("hedgerow_upstream_attempts_total", &[TOOL, ("kind", kind), ("result", result)])
    };
    assert_eq!((attempts("primary", "status"), attempts("retry", "ok")), (1.0, 1.0));
    assert_eq!(metrics.value("hedgerow_upstream_attempts_total", &[TOOL]), 2.0);
    assert_eq!(metrics.value("hedgerow_requests_total", &[TOOL, ("code", "200")]), 1.0);
    assert_eq!(metrics.value("hedgerow_requests_total", &[TOOL]), 1.0);
    let line = proxy.access_log(|line| line["path"] == "/path").await;
    assert_eq!(
        (&line["status"], &line["attempts"], &line["source"]),
        (&200.into(), &2.into(), &"primary".into())
    );
}

#[tokio::test]
async fn it_is_the_same_in_every_mode() {
    for mode in Mode::ALL {
        let mut road = Road::start(mode, RETRY).await;
        let (mut call, exchange) = road.exchange(&[]).await;
        exchange.respond(503, &[], "no").await;
        road.upstream.next().await.respond(200, &[], "yes").await;
        let head = call.head().await;
        assert_eq!((head.status, head.get("x-hedgerow-attempts")), (200, Some("2")), "{mode:?}");
        assert_eq!(call.rest().await, b"yes", "{mode:?}");
        assert_eq!(numbers(&road.upstream), ["1", "2"], "{mode:?}");
    }
}

/// As for a hedge: the method, the route or the caller's key has to say that twice is no more than once.
#[tokio::test]
async fn only_calls_that_may_happen_twice_are_tried_again_after_an_answer() {
    // Each path is asked by one method, so the first of each fails and the second would not.
    let upstream =
        Upstream::answering(|seen| if seen.nth % 2 == 1 { Reply::status(503) } else { Reply::ok("") });
    let upstream = upstream.await;
    let routes = "routes: [{ path: \"/listed-*\", retry: { methods: [PUT, DELETE] } }, { path: \"/declared\", idempotent: true }]";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &format!("{RETRY}, {routes}"))).await;
    let key = &[("Idempotency-Key", "8e03978e")][..];
    let cases = [
        ("GET", "/get", &[][..], true),
        ("HEAD", "/head", &[], true),
        ("OPTIONS", "/options", &[], true),
        ("POST", "/post", &[], false),
        ("PATCH", "/patch", &[], false),
        ("PUT", "/put", &[], false),
        ("DELETE", "/delete", &[], false),
        ("POST", "/keyed-post", key, true),
        ("PATCH", "/keyed-patch", key, true),
        ("POST", "/declared", &[], true),
        ("PUT", "/listed-put", &[], true),
        ("DELETE", "/listed-delete", &[], true),
        ("GET", "/listed-get", &[], false),
    ];
    for (method, path, headers, is_tried) in cases {
        let answer = ask(&proxy, method, &upstream.url(path), headers).await;
        let expected = if is_tried { (200, 2) } else { (503, 1) };
        assert_eq!((answer.status, upstream.count_of(path)), expected, "{method} {path}");
        assert_eq!(should_retry(&answer), None, "{method} {path}");
    }
    let metrics = proxy.metrics().await;
    assert_eq!(retries(&metrics, "succeeded"), 8.0);
    assert_eq!((retries(&metrics, "suppressed_not_idempotent"), all_retries(&metrics)), (5.0, 13.0));
}

/// One notion of an answer that is not good enough, with the hedge and the fallback.
#[tokio::test]
async fn the_unacceptable_statuses_are_tried_again_and_no_others() {
    let upstream = Upstream::answering(|seen| {
        let status: u16 = seen.path().rsplit('/').next().unwrap().parse().unwrap();
        if seen.nth == 1 { Reply::status(status) } else { Reply::ok("") }
    })
    .await;
    let routes = "routes: [{ path: \"/own/**\", unacceptable: [401] }]";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &format!("{RETRY}, {routes}"))).await;
    for status in [429, 500, 502, 503, 504] {
        let path = format!("/{status}");
        assert_eq!(proxy.get(&upstream.url(&path)).await.status, 200, "{path}");
        assert_eq!(upstream.count_of(&path), 2, "{path}");
    }
    for status in [201, 204, 301, 400, 401, 403, 404, 501] {
        let path = format!("/{status}");
        assert_eq!(proxy.get(&upstream.url(&path)).await.status, status, "{path}");
        assert_eq!(upstream.count_of(&path), 1, "{path}");
    }
    for (status, count) in [(401, 2), (503, 1)] {
        let path = format!("/own/{status}");
        proxy.get(&upstream.url(&path)).await;
        assert_eq!(upstream.count_of(&path), count, "{path}");
    }
}

/// What has read a request may have acted on it.
#[tokio::test]
async fn a_reset_is_tried_again_for_a_get_and_not_for_a_post() {
    let upstream = Upstream::answering(|seen| match (seen.path(), seen.nth) {
        ("/reset", 1) => Reply::reset(),
        ("/close", 1) => Reply::close(),
        ("/post", _) => Reply::reset(),
        _ => Reply::ok("good").header("Connection", "close"),
    })
    .await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), RETRY)).await;
    for path in ["/reset", "/close"] {
        let answer = proxy.get(&upstream.url(path)).await;
        assert_eq!((answer.text(), answer.header("x-hedgerow-attempts")), ("good", Some("2")), "{path}");
    }
    let answer = proxy.agent().await.request("POST", &upstream.url("/post"), &[], b"order").await;
    assert_eq!((answer.status, error_of(&answer).as_str()), (502, "upstream_reset"));
    assert_eq!((upstream.count_of("/post"), should_retry(&answer)), (1, None));
    assert_eq!(retries(&proxy.metrics().await, "suppressed_not_idempotent"), 1.0);
}

/// A kept connection that its peer closes before answering proves nothing about a POST.
#[tokio::test]
async fn a_post_on_a_kept_connection_that_closes_unanswered_is_not_tried_again() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), RETRY)).await;
    let (url, mut agent) = (upstream.url("/"), proxy.agent().await);
    let (warm, ()) =
        tokio::join!(agent.get(&url), async { upstream.next().await.respond(200, &[], "").await });
    assert_eq!(warm.status, 200);
    let post = agent.request("POST", &url, &[], b"order");
    let (answer, ()) = tokio::join!(post, async {
        let mut exchange = upstream.next().await;
        assert_eq!((exchange.connection, exchange.body().await), (1, b"order".to_vec()));
        exchange.close().await;
    });
    assert_eq!((answer.status, error_of(&answer).as_str(), upstream.count()), (502, "upstream_reset", 2));
}

/// Nothing of it left, so whatever it is it may be sent.
#[tokio::test]
async fn a_post_that_found_no_open_port_is_tried_again_and_arrives_once() {
    // Nobody else is given this port of the other address while it is taken here.
    let holder = Upstream::start().await;
    let port = holder.address().port();
    let stages = "hedge: off, breaker: off, retry: { max_attempts: 10, backoff: 2s, max_backoff: 2s }";
    let host = format!("127.0.0.5:{port}");
    let proxy = HedgerowProcess::start(&tool(&host, &format!("{stages}, {PLENTY}"))).await;
    // Larger than what is kept: none of it has been read when the connection fails.
    let body = pattern(0, 300 << 10);
    let call = {
        let (body, url, proxy) = (body.clone(), format!("http://{host}/order"), *proxy);
        tokio::spawn(async move { proxy.agent().await.request("POST", &url, &[], &body).await })
    };
    let refused = [TOOL, ("kind", "primary"), ("result", "connect")];
    proxy.until_metrics(|m| m.value("hedgerow_upstream_attempts_total", &refused) == 1.0).await;
    let upstream = Upstream::on([127, 0, 0, 5]).port(port).answering(|_| Reply::ok("taken")).await;
    let answer = call.await.unwrap();
    assert_eq!((answer.status, answer.text(), should_retry(&answer)), (200, "taken", None));
    assert_eq!(upstream.count(), 1);
    assert!(upstream.requests()[0].body == body, "the body came whole");
    assert_eq!((retries(&proxy.metrics().await, "succeeded"), holder.count()), (1.0, 0));
}

/// A handshake that fails comes before the request.
#[tokio::test]
async fn a_post_whose_tls_handshake_broke_is_tried_again() {
    let pki = Pki::new();
    let port = RawPort::bind().await;
    let stages = format!("origin: https, tls: {{ ca_file: \"{}\" }}, {RETRY}", pki.ca_file().display());
    let proxy = HedgerowProcess::start(&tool(port.address(), &stages)).await;
    let url = port.url("/order");
    let post = async { proxy.agent().await.request("POST", &url, &[], b"order").await };
    let (answer, ()) = tokio::join!(post, async {
        port.accept().await.reset();
        let mut peer = port.accept().await.accept_tls(&pki.server(&["127.0.0.1"])).await;
        assert_eq!(peer.read_request().await.headers.get("x-hedgerow-attempt"), Some("2"));
        assert_eq!(peer.read_exactly(5).await, b"order");
        peer.send("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\ntaken").await;
    });
    assert_eq!((answer.status, answer.text()), (200, "taken"));
}

/// A certificate does not get better by asking again.
#[tokio::test]
async fn a_certificate_that_does_not_verify_is_not_tried_again() {
    let upstream = Upstream::on([127, 0, 0, 1]).tls(Pki::new().server(&["127.0.0.1"])).start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &format!("origin: https, {RETRY}"))).await;
    let answer = proxy.get(&upstream.url("/")).await;
    assert_eq!((answer.status, error_of(&answer).as_str()), (502, "certificate_invalid"));
    assert_eq!(upstream.connections(), 1);
}

/// A call that was sent once with an effect is not sent again because its head was late; one without is.
#[tokio::test]
async fn c059_a_post_whose_head_is_late_is_not_tried_again_but_a_get_is() {
    let upstream = Upstream::answering(|seen| match (seen.path(), seen.nth) {
        ("/look", 2) => Reply::ok("in time"),
        _ => Reply::hang(),
    })
    .await;
    let policy = tool(upstream.address(), &format!("attempt_timeout: 1s, {RETRY}"));
    let proxy = HedgerowProcess::start(&policy).await;
    let answer = proxy.agent().await.request("POST", &upstream.url("/order"), &[], b"order").await;
    assert_eq!((answer.status, error_of(&answer).as_str()), (504, "deadline_exceeded"));
    // Its caller has half a minute left, and knows whether the order may be made twice.
    assert_eq!(should_retry(&answer), None);
    upstream.until(|tally| tally.aborted == 1).await;
    assert_eq!((upstream.count(), &*upstream.requests()[0].body), (1, &b"order"[..]));
    assert_eq!(retries(&proxy.metrics().await, "suppressed_not_idempotent"), 1.0);

    let answer = proxy.get(&upstream.url("/look")).await;
    assert_eq!((answer.status, answer.text()), (200, "in time"));
    upstream.until(|tally| tally.aborted == 2).await;
    assert_eq!(upstream.count_of("/look"), 2);
    // Late each time: as many tries as the policy has, and the layer above is told so.
    let answer = proxy.get(&upstream.url("/late")).await;
    assert_eq!((answer.status, should_retry(&answer)), (504, Some("false")));
    assert_eq!(upstream.count_of("/late"), 2);
}

/// An answer of which a byte was passed on is never continued from another one.
#[tokio::test]
async fn c060_after_the_first_byte_there_is_no_other_try() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), RETRY)).await;
    // Stalled until the deadline, reset, and ended too soon.
    for end in 0..3 {
        let mut agent = proxy.agent().await;
        agent.send(absolute("GET", &upstream.url("/"), &[("grpc-timeout", "2S")], b"")).await;
        let mut exchange = upstream.next().await;
        exchange.head_only(200, &[("Content-Length", "5")]).await;
        exchange.raw(b"H").await;
        let head = agent.read_head().await;
        agent.expect(b"H").await;
        match end {
            0 => drop(exchange.gone().await),
            1 => exchange.reset(),
            _ => exchange.close().await,
        }
        assert_eq!((head.status, agent.all_that_comes_without_closing().await), (200, b"".to_vec()), "{end}");
        assert_eq!(upstream.count(), end + 1);
    }
    assert_eq!(all_retries(&proxy.metrics().await), 0.0);
}

/// The body is sent whole once more, to the other address of the name, and again on a connection that was kept.
#[tokio::test]
async fn c061_a_put_arrives_whole_at_the_address_that_did_not_fail() {
    let body = pattern(0, 10 << 10);
    let script = |seen: &Seen| match seen.header("x-hedgerow-attempt") {
        Some("1") if seen.path() == "/reset" => Reply::reset(),
        Some("1") => Reply::status(503),
        _ => Reply::ok(""),
    };
    let first = Upstream::on([127, 0, 0, 2]).answering(script).await;
    let port = first.address().port();
    let second = Upstream::on([127, 0, 0, 3]).port(port).answering(script).await;
    let dns = Dns::start(&[("two.test", Answer::addresses(&["127.0.0.2", "127.0.0.3"]))]).await;
    let stages = "hedge: off, breaker: off, retry: { backoff: 20ms, methods: [PUT] }";
    let tool = tool("two.test", &format!("{stages}, {PLENTY}"));
    let policy = format!("dns: {{ servers: [\"{}\"] }}\n{tool}", dns.address());
    let proxy = HedgerowProcess::start(&policy).await;
    for round in 1..=20 {
        // A reset first: on kept connections it would be the end of a stale one, which is another story.
        let path = if round == 1 { "/reset" } else { "/status" };
        let url = format!("http://two.test:{port}{path}");
        let answer = proxy.agent().await.request("PUT", &url, &[], &body).await;
        assert_eq!((answer.status, answer.header("x-hedgerow-attempts")), (200, Some("2")), "round {round}");
        // One went to each, whichever was first.
        assert_eq!((first.count(), second.count()), (round, round));
        for seen in [first.requests().pop().unwrap(), second.requests().pop().unwrap()] {
            assert!(seen.body == body, "{} bytes in round {round}", seen.body.len());
        }
    }
    assert!(first.connections() + second.connections() <= 4, "kept connections serve tries too");
}

/// A name whose only other address refuses is no worse off than one with one address.
#[tokio::test]
async fn a_try_whose_other_address_is_dead_goes_to_the_first_again() {
    let upstream = Upstream::answering(statuses(&[503, 200])).await;
    let host = format!("two.test:{}", upstream.address().port());
    let dns = Dns::start(&[("two.test", Answer::addresses(&["127.0.0.1", "127.0.0.9"]))]).await;
    let policy = format!("dns: {{ servers: [\"{}\"] }}\n{}", dns.address(), tool(&host, RETRY));
    let proxy = HedgerowProcess::start(&policy).await;
    assert_eq!(proxy.get(&format!("http://{host}/")).await.text(), "200");
    assert_eq!(upstream.count(), 2);
}

/// Names move. Each try is checked where it is about to go.
#[tokio::test]
async fn a_try_does_not_follow_a_name_to_a_forbidden_address() {
    let mut allowed = Upstream::on([127, 0, 0, 2]).start().await;
    let port = allowed.address().port();
    let forbidden = Upstream::on([127, 0, 0, 3]).port(port).answering(|_| Reply::ok("secrets")).await;
    let to = |address: &str| Answer::Addresses(vec![address.parse().unwrap()], 0);
    let dns = Dns::start(&[("moving.test", to("127.0.0.2"))]).await;
    let policy = format!(
        "dns: {{ servers: [\"{}\"] }}\negress: {{ deny: [127.0.0.3] }}\n{}",
        dns.address(),
        tool("moving.test", RETRY)
    );
    let proxy = HedgerowProcess::start(&policy).await;
    let call = start(&proxy, format!("http://moving.test:{port}/"));
    let exchange = allowed.next().await;
    dns.set("moving.test", to("127.0.0.3"));
    exchange.respond(503, &[("Connection", "close"), ("retry-after-ms", "100")], "no").await;
    let answer = call.await.unwrap();
    assert_eq!((answer.status, answer.text()), (503, "no"));
    assert_eq!((forbidden.connections(), allowed.count()), (0, 1));
    assert_eq!(retries(&proxy.metrics().await, "failed"), 1.0);
}

/// Two hundred fail together. Those that wait for their second try are paid for already.
#[tokio::test]
async fn c062_tries_in_back_off_count_against_the_budget() {
    const CALLS: usize = 200;
    let upstream = Upstream::answering(|_| Reply::status(503)).await;
    let stages = "hedge: off, breaker: off, retry: { backoff: 300ms }, extra_load: { ratio: 20%, floor: 1/s }, \
                  bulkhead: { max_concurrent: 1000 }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    let urls: Vec<_> = (0..CALLS).map(|_| upstream.url("/")).collect();
    let began = Instant::now();
    let answers = client::get_all(proxy.proxy, &urls).await;
    assert!(answers.iter().all(|answer| answer.status == 503));
    // The first second's floor is there from the start; then one each second.
    let floor = 1 + began.elapsed().as_secs() as usize + 1;
    let extra = upstream.count() - CALLS;
    assert!((CALLS / 10..=CALLS / 5 + floor).contains(&extra), "{extra} tries more");
    let metrics = proxy.metrics().await;
    assert_eq!(retries(&metrics, "failed"), extra as f64);
    assert_eq!(retries(&metrics, "suppressed_budget"), (CALLS - extra) as f64);
    // Neither who has spent his tries nor who gets none is to be tried again by the layer above.
    assert!(answers.iter().all(|answer| should_retry(answer) == Some("false")));
}

/// One purse for both, so that neither hides the other's load.
#[tokio::test]
async fn hedges_and_retries_spend_one_budget() {
    const CALLS: usize = 60;
    let upstream = Upstream::answering(|_| Reply::status(503).after(ms(400))).await;
    let stages = "hedge: { after: 50ms }, breaker: off, retry: { backoff: 20ms, max_attempts: 3 }, \
                  extra_load: { ratio: 20%, floor: 1/s }, bulkhead: { max_concurrent: 1000 }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    let urls: Vec<_> = (0..CALLS).map(|_| upstream.url("/")).collect();
    let began = Instant::now();
    client::get_all(proxy.proxy, &urls).await;
    let floor = 1 + began.elapsed().as_secs() as usize + 1;
    let extra = upstream.count() - CALLS;
    assert!((6..=CALLS / 5 + floor).contains(&extra), "{extra} attempts more");
    let metrics = proxy.metrics().await;
    let hedges = metrics.value("hedgerow_hedges_total", &[TOOL, ("outcome", "failed")]);
    assert_eq!(hedges + retries(&metrics, "failed"), extra as f64);
}

/// Never sooner than told, in whichever form.
#[tokio::test]
async fn a_retry_after_that_fits_the_deadline_is_waited_for() {
    let told = SystemTime::now() + ms(2500);
    let date = httpdate::fmt_http_date(told);
    let upstream = Upstream::answering(move |seen| match (seen.nth, seen.path()) {
        (1, "/seconds") => Reply::status(503).header("Retry-After", "1"),
        (1, "/date") => Reply::status(429).header("Retry-After", &date),
        (1, "/millis") => Reply::status(503).header("Retry-After", "30").header("retry-after-ms", "700"),
        (1, "/grpc") => Reply::status(500).header("grpc-retry-pushback-ms", "600"),
        _ => Reply::ok("at last"),
    })
    .await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), RETRY)).await;
    let paths = [("/seconds", ms(1000)), ("/date", ms(0)), ("/millis", ms(700)), ("/grpc", ms(600))];
    let urls: Vec<_> = paths.iter().map(|(path, _)| upstream.url(path)).collect();
    let answers = client::get_all(proxy.proxy, &urls).await;
    assert!(answers.iter().all(|answer| answer.text() == "at last"), "{answers:?}");
    assert!(SystemTime::now() >= told - ms(1000), "a date is exact to the second");
    for (path, least) in paths {
        let at: Vec<_> = upstream.requests().iter().filter(|s| s.path() == path).map(|s| s.at).collect();
        assert_eq!(at.len(), 2, "{path}");
        assert!(at[1] - at[0] >= least, "{path} came after {:?}", at[1] - at[0]);
    }
}

/// Who cannot wait so long is better told now than by a timeout later.
#[tokio::test]
async fn c063_a_retry_after_beyond_the_deadline_goes_back_at_once_with_its_field() {
    let upstream =
        Upstream::answering(|seen| Reply::status(429).header("Retry-After", &seen.path()[1..]).body("later"))
            .await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), RETRY)).await;
    for (told, headers) in [
        ("90", &[][..]),
        ("25", &[("grpc-timeout", "20S")]),
        // As a number it is a wait, however long.
        ("99999999999999999999999", &[]),
    ] {
        let began = Instant::now();
        let answer = ask(&proxy, "GET", &upstream.url(&format!("/{told}")), headers).await;
        assert_eq!((answer.status, answer.header("retry-after"), answer.text()), (429, Some(told), "later"));
        assert!(began.elapsed() < ms(15_000), "{:?}", began.elapsed());
        assert_eq!(should_retry(&answer), None, "the caller may wait");
    }
    assert_eq!(upstream.count(), 3);
    assert_eq!(retries(&proxy.metrics().await, "suppressed_push_back"), 3.0);
}

/// A `Retry-After` that nobody can read is none: the policy's own back-off counts.
#[tokio::test]
async fn c064_an_unusable_retry_after_leaves_the_policys_back_off() {
    const UNUSABLE: [&str; 8] = [
        "Wed, 01 Jan 9999999 00:00:00 GMT",
        "abc",
        "-1",
        "1e400",
        "",
        "1, 2",
        "Mon, 31 Feb 2026 25:61:61 GMT",
        "Thu, 01 Jan 1970 00:00:00 GMT",
    ];
    let upstream = Upstream::answering(|seen| {
        let nth: usize = seen.path()[1..].parse().expect("the path is an index");
        Reply::status(503).header("Retry-After", UNUSABLE[nth])
    })
    .await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), RETRY)).await;
    let began = Instant::now();
    for (nth, value) in UNUSABLE.into_iter().enumerate() {
        let path = format!("/{nth}");
        let answer = proxy.get(&upstream.url(&path)).await;
        assert_eq!((answer.status, answer.header("retry-after")), (503, Some(value)));
        assert_eq!(upstream.count_of(&path), 2, "{value:?}");
    }
    assert!(began.elapsed() < ms(15_000), "{:?}", began.elapsed());
}

/// The last word of an upstream is obeyed, and passed on for the layer above to obey.
#[tokio::test]
async fn an_upstream_that_asks_for_no_other_try_gets_none() {
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/sdk" => Reply::status(503).header("x-should-retry", "false"),
        "/grpc" => Reply::status(503).header("grpc-retry-pushback-ms", "-1"),
        _ => Reply::status(503).header("x-should-retry", "true"),
    })
    .await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), RETRY)).await;
    for (path, count, told) in [("/sdk", 1, Some("false")), ("/grpc", 1, None), ("/true", 2, Some("false"))] {
        let answer = proxy.get(&upstream.url(path)).await;
        assert_eq!((upstream.count_of(path), should_retry(&answer)), (count, told), "{path}");
    }
    assert_eq!(retries(&proxy.metrics().await, "suppressed_push_back"), 2.0);
}

/// Push-back on any attempt disarms the hedge of the whole request: the second try waited because it was asked to,
/// and must not come in double then.
#[tokio::test]
async fn a_try_after_push_back_is_not_hedged() {
    let mut upstream = Upstream::start().await;
    let stages = "hedge: { after: 300ms }, breaker: off, retry: { backoff: 20ms }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &format!("{stages}, {PLENTY}"))).await;
    for (told, attempts) in [(&[("retry-after-ms", "50"), ("Retry-After", "1")][..], 2), (&[], 3)] {
        let before = upstream.count();
        let call = start(&proxy, upstream.url("/"));
        upstream.next().await.respond(503, told, "").await;
        let second = upstream.next().await;
        if attempts == 3 {
            // Without push-back it is hedged as any try.
            upstream.next().await.respond(200, &[], "").await;
            second.gone().await;
        } else {
            upstream.gets_nothing_more(ms(900)).await;
            second.respond(200, &[], "").await;
        }
        assert_eq!((call.await.unwrap().status, upstream.count() - before), (200, attempts));
    }
}

/// The answer to HEAD is complete without the bytes that its length speaks of, a bad one too.
#[tokio::test]
async fn c065_a_length_in_the_answer_to_head_promises_nothing() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), RETRY)).await;
    let mut agent = proxy.agent().await;
    for sequence in [&[200][..], &[503, 200], &[503, 0]] {
        agent.send(absolute("HEAD", &upstream.url("/"), &[], b"")).await;
        for status in sequence {
            let mut exchange = upstream.next().await;
            match status {
                0 => {
                    // On a kept connection it is sent once more by itself.
                    exchange.reset();
                    upstream.next().await.reset();
                }
                _ => {
                    exchange.head_only(*status, &[("Content-Length", "5000")]).await;
                    exchange.finish().await;
                }
            }
        }
        let answer = agent.read_response_to("HEAD").await;
        let expected = if sequence.ends_with(&[0]) { 503 } else { 200 };
        assert_eq!(
            (answer.status, answer.header("content-length")),
            (expected, Some("5000")),
            "{sequence:?}"
        );
    }
    assert_eq!(upstream.count(), 1 + 2 + 3);
}

/// What the upstream did is better told than that a second try came to nothing.
#[tokio::test]
async fn the_first_answer_comes_with_its_body_when_the_second_try_has_none() {
    let upstream = Upstream::answering(|seen| match seen.nth {
        1 => {
            Reply::status(503).body("sorry, overloaded").header("x-own", "kept").header("Connection", "close")
        }
        _ => Reply::reset(),
    })
    .await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), RETRY)).await;
    let answer = proxy.get(&upstream.url("/")).await;
    assert_eq!(
        (answer.status, answer.text(), answer.header("x-own")),
        (503, "sorry, overloaded", Some("kept"))
    );
    assert_eq!((answer.header("x-hedgerow-attempts"), should_retry(&answer)), (Some("2"), Some("false")));
    assert_eq!(answer.headers.all("via"), ["1.1 hedgerow"]);
    let line = proxy.access_log(|line| line["path"] == "/").await;
    assert_eq!(
        (&line["status"], &line["attempts"], &line["bytes_out"]),
        (&503.into(), &2.into(), &17.into())
    );
    assert_eq!(retries(&proxy.metrics().await, "failed"), 1.0);
}

/// What comes during the back-off is kept with it, as far as that has a bound. Half an answer is none.
#[tokio::test]
async fn a_first_answer_in_pieces_is_kept_whole_or_not_at_all() {
    let upstream = Upstream::answering(|seen| match (seen.path(), seen.nth) {
        ("/pieces", 1) => Reply::status(503).body("sorry").header("Retry-After", "1").drip(5, ms(50)),
        ("/large", 1) => Reply::status(503).body(pattern(0, 300 << 10)).header("Connection", "close"),
        _ => Reply::reset(),
    })
    .await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), RETRY)).await;
    let answer = proxy.get(&upstream.url("/pieces")).await;
    assert_eq!((answer.status, answer.text(), answer.complete), (503, "sorry", true));
    let answer = proxy.get(&upstream.url("/large")).await;
    assert_eq!((answer.status, error_of(&answer).as_str()), (502, "upstream_reset"));
}

/// Of two answers the later one is the present state of things.
#[tokio::test]
async fn of_two_bad_answers_the_last_is_passed_on() {
    let upstream = Upstream::answering(statuses(&[503, 500])).await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), RETRY)).await;
    let answer = proxy.get(&upstream.url("/")).await;
    assert_eq!((answer.status, answer.text(), should_retry(&answer)), (500, "500", Some("false")));
}

/// A guard that closes between two tries says less than the upstream did.
#[tokio::test]
async fn what_the_upstream_did_is_told_when_a_guard_stops_the_second_try() {
    let upstream = Upstream::answering(|seen| match seen.path() {
        // Not kept: a reset on a reused connection is sent once more by itself.
        "/status" => Reply::status(503).body("first").header("Connection", "close"),
        _ => Reply::reset(),
    })
    .await;
    let stages = "hedge: off, breaker: { consecutive_failures: 1 }, retry: { backoff: 20ms }";
    let routes =
        "routes: [{ path: \"/status\", name: a, breaker: {} }, { path: \"/reset\", name: b, breaker: {} }]";
    let proxy =
        HedgerowProcess::start(&tool(upstream.address(), &format!("{stages}, {PLENTY}, {routes}"))).await;
    let answer = proxy.get(&upstream.url("/status")).await;
    assert_eq!((answer.status, answer.text()), (503, "first"));
    let answer = proxy.get(&upstream.url("/reset")).await;
    assert_eq!((answer.status, error_of(&answer).as_str()), (502, "upstream_reset"));
    assert_eq!(upstream.count(), 2, "the open breaker let no try through");
    // Those who come later hear of the guard.
    assert_eq!(error_of(&proxy.get(&upstream.url("/status")).await), "circuit_open");
}

/// An answer that has no end is not waited for: its connection is closed when the next try is due.
#[tokio::test]
async fn a_refusal_whose_body_never_ends_is_given_up_for_the_next_try() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), RETRY)).await;
    let call = start(&proxy, upstream.url("/"));
    let mut first = upstream.next().await;
    first.head_only(503, &[("Content-Length", "1000")]).await;
    first.raw(b"some").await;
    let second = upstream.next().await;
    assert_ne!(first.connection, second.connection);
    first.gone().await;
    second.respond(200, &[], "whole").await;
    assert_eq!(call.await.unwrap().text(), "whole");
    let metrics = proxy.until_metrics(|m| m.value("hedgerow_bulkhead_in_flight", &[TOOL]) == 0.0).await;
    let labels = [TOOL, ("kind", "primary"), ("result", "status")];
    assert_eq!(metrics.value("hedgerow_upstream_attempts_total", &labels), 1.0);
}

/// As many as the policy says, and no more.
#[tokio::test]
async fn there_are_at_most_max_attempts() {
    let upstream = Upstream::answering(|_| Reply::status(503)).await;
    let routes = "routes: [{ path: \"/five\", retry: { max_attempts: 5, max_backoff: 40ms } }, { path: \"/off\", retry: off }]";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &format!("{RETRY}, {routes}"))).await;
    for (path, count) in [("/", 2), ("/five", 5), ("/off", 1)] {
        let answer = proxy.get(&upstream.url(path)).await;
        assert_eq!((answer.status, upstream.count_of(path)), (503, count), "{path}");
        assert_eq!(answer.header("x-hedgerow-attempts"), Some(&*count.to_string()));
        assert_eq!(should_retry(&answer), (count > 1).then_some("false"), "{path}");
    }
    assert_eq!(numbers(&upstream)[2..7], ["1", "2", "3", "4", "5"]);
    assert_eq!(retries(&proxy.metrics().await, "failed"), 1.0 + 4.0);
}

/// All waits and attempts fit into the one deadline, which each attempt is told unchanged.
#[tokio::test]
async fn c085_tries_and_waits_fit_into_the_deadline() {
    let upstream = Upstream::answering(|_| Reply::reset().after(ms(400))).await;
    let stages = "hedge: off, breaker: off, retry: { max_attempts: 5, backoff: 300ms }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &format!("{stages}, {PLENTY}"))).await;
    let deadline = SystemTime::now() + ms(1500);
    let since_epoch = deadline.duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let field = format!("{}.{:09}", since_epoch.as_secs(), since_epoch.subsec_nanos());
    let end = Instant::now() + ms(1500);
    let answer = ask(&proxy, "GET", &upstream.url("/"), &[("x-request-deadline", &field)]).await;
    assert!(matches!(answer.status, 502 | 504), "{answer:?}");
    assert!(Instant::now() < end + ms(5000), "{:?} late", end.elapsed());
    let seen = upstream.requests();
    // Three of 400 ms are all that fit; the first is certain.
    assert!((1..=4).contains(&seen.len()), "{}", seen.len());
    assert!(seen.iter().all(|seen| seen.at < end && seen.header("x-request-deadline") == Some(&field)));
    upstream.gets_nothing_more(ms(500)).await;
    assert_eq!(upstream.until(|tally| tally.in_flight == 0).await.requests, seen.len());
}

/// A try that runs when the deadline strikes ends there. The answer from before is still the best there is.
#[tokio::test]
async fn a_second_try_ends_with_the_deadline() {
    let upstream = Upstream::answering(|seen| match (seen.path(), seen.nth) {
        ("/status", 1) => Reply::status(503).body("first"),
        ("/reset", 1) => Reply::reset(),
        _ => Reply::hang(),
    })
    .await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), RETRY)).await;
    let bound = [("grpc-timeout", "1S")];
    let answer = ask(&proxy, "GET", &upstream.url("/reset"), &bound).await;
    assert_eq!((answer.status, error_of(&answer).as_str()), (504, "deadline_exceeded"));
    assert_eq!(should_retry(&answer), Some("false"));
    upstream.until(|tally| tally.aborted == 1).await;
    let answer = ask(&proxy, "GET", &upstream.url("/status"), &bound).await;
    assert_eq!((answer.status, answer.text()), (503, "first"));
    assert_eq!(should_retry(&answer), Some("false"), "the caller has no time left either");
    upstream.until(|tally| tally.aborted == 2).await;
}

/// A wait that would leave no time is not begun.
#[tokio::test]
async fn a_back_off_that_does_not_fit_ends_the_call_at_once() {
    let upstream = Upstream::answering(|_| Reply::status(503).body("no")).await;
    // Drawn evenly from ten hours, a wait below half a minute is one in twelve hundred.
    let stages = "hedge: off, breaker: off, retry: { backoff: 10h, max_backoff: 10h }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &format!("{stages}, {PLENTY}"))).await;
    let began = Instant::now();
    let answer = proxy.get(&upstream.url("/")).await;
    assert_eq!((answer.status, answer.text(), should_retry(&answer)), (503, "no", None));
    assert!(began.elapsed() < ms(15_000));
    assert_eq!((upstream.count(), retries(&proxy.metrics().await, "suppressed_deadline")), (1, 1.0));
}

/// Only one layer tries again. Whoever above does so says it in one of these words.
#[tokio::test]
async fn a_call_that_is_itself_a_retry_is_not_tried_again() {
    let upstream = Upstream::answering(|_| Reply::status(503)).await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), RETRY)).await;
    let marks = [
        ("x-stainless-retry-count", "0", "1"),
        ("x-envoy-attempt-count", "1", "2"),
        ("amz-sdk-request", "attempt=1; max=3", "attempt=2; max=3"),
        ("grpc-previous-rpc-attempts", "0", "1"),
        ("x-retry-attempt", "0", "1"),
        ("x-hedgerow-attempt", "1", "2"),
    ];
    for (name, first, later) in marks {
        for (value, count) in [(first, 2), (later, 1)] {
            let path = format!("/{name}-{count}");
            let answer = ask(&proxy, "GET", &upstream.url(&path), &[(name, value)]).await;
            assert_eq!((answer.status, upstream.count_of(&path)), (503, count), "{name}: {value}");
            // Whose retry it is decides whether there is another.
            assert_eq!(should_retry(&answer), (count == 2).then_some("false"), "{name}: {value}");
            let seen = upstream.requests().pop().unwrap();
            let told = seen.header("x-hedgerow-attempt");
            let is_later = count == 2 || name == "x-hedgerow-attempt";
            assert_eq!(told, Some(if is_later { "2" } else { "1" }), "{name}: {value}");
        }
    }
    let metrics = proxy.metrics().await;
    assert_eq!((retries(&metrics, "suppressed_callers_retry"), retries(&metrics, "failed")), (6.0, 6.0));
}

/// Whatever its reason, each attempt of a call has the next number, and never one below the caller's.
#[tokio::test]
async fn primary_hedge_and_retry_are_numbered_on_the_wire() {
    let mut upstream = Upstream::start().await;
    let stages = "hedge: { after: 100ms }, breaker: off, retry: { backoff: 20ms }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &format!("{stages}, {PLENTY}"))).await;
    let call = start(&proxy, upstream.url("/"));
    let (primary, hedge) = (upstream.next().await, upstream.next().await);
    primary.respond(503, &[], "").await;
    hedge.respond(503, &[], "").await;
    upstream.next().await.respond(200, &[], "").await;
    let answer = call.await.unwrap();
    assert_eq!((answer.status, answer.header("x-hedgerow-attempts")), (200, Some("3")));
    assert_eq!(numbers(&upstream), ["1", "2", "3"]);

    let url = upstream.url("/");
    for said in ["2", "7"] {
        let fields = [("x-hedgerow-attempt", said)];
        let call = ask(&proxy, "GET", &url, &fields);
        let serve = async { upstream.next().await.respond(200, &[], "").await };
        assert_eq!(tokio::join!(call, serve).0.status, 200);
        assert_eq!(upstream.requests().pop().unwrap().header("x-hedgerow-attempt"), Some(said));
    }
}

/// Three layers with three tries each make twenty-seven requests of one; a share of each layer's calls makes less,
/// and one layer that retries makes one share.
///
/// The arithmetic: of `CALLS` calls, which all fail, the layer next to the upstream may try a fifth again, and the
/// floor of its budget: one at the start and one each second. The layers above are told that more is pointless.
/// Each with a fifth of its own, three layers would send 1.2³ = 1.73 times the calls. The floor would have to bring
/// half the number of the calls to hide that, which takes longer than a call's deadline.
#[tokio::test]
async fn three_layers_send_no_more_than_the_last_ones_share() {
    const CALLS: usize = 300;
    const AT_ONCE: usize = 20;
    for way in [Reply::status(503).body("no"), Reply::reset()] {
        let upstream = Upstream::answering(move |_| way.clone()).await;
        let address = "127.0.0.1";
        let names = ["b.test", "c.test"].map(|name| (name, Answer::addresses(&[address])));
        let dns = Dns::start(&names).await;
        let stages =
            "hedge: off, breaker: off, retry: { backoff: 5ms }, extra_load: { ratio: 20%, floor: 1/s }";
        let layer = async |host: &str, to: String| {
            let tool = named("tool", host, &format!("endpoint: \"http://{to}\", {stages}"));
            let policy = format!("dns: {{ servers: [\"{}\"] }}\nupstreams: {{ {tool} }}", dns.address());
            HedgerowProcess::start(&policy).await
        };
        let began = Instant::now();
        let c = layer("c.test", upstream.address().to_string()).await;
        let b = layer("b.test", format!("c.test:{}", c.proxy.port())).await;
        let a = layer("a.test", format!("b.test:{}", b.proxy.port())).await;
        let calls = stream::iter(0..CALLS).map(|_| a.get("http://a.test/")).buffer_unordered(AT_ONCE);
        let answers: Vec<_> = calls.collect().await;
        assert!(answers.iter().all(|answer| matches!(answer.status, 502 | 503)));
        assert!(answers.iter().all(|answer| should_retry(answer) == Some("false")));
        let floor = 1 + began.elapsed().as_secs() as usize + 1;
        let count = upstream.count();
        let most = CALLS * 6 / 5 + floor;
        assert!(
            (CALLS * 11 / 10..=most).contains(&count),
            "{count} requests of {CALLS} calls, at most {most}"
        );
        for above in [&a, &b] {
            let metrics = above.metrics().await;
            assert_eq!(retries(&metrics, "suppressed_push_back"), CALLS as f64);
            assert_eq!(all_retries(&metrics), CALLS as f64);
        }
    }
}

/// The layer above may try again where this one did not, for a reason that need not hold there.
#[tokio::test]
async fn what_was_not_tried_again_for_other_reasons_is_not_called_pointless() {
    let upstream = Upstream::answering(|_| Reply::status(503)).await;
    let stages = format!("{RETRY}, replay_limit: 1KiB");
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &stages)).await;
    let large = vec![b'x'; 20 << 10];
    let key = [("Idempotency-Key", "8e03978e")];
    let mut answers = vec![
        ask(&proxy, "POST", &upstream.url("/"), &[]).await,
        ask(&proxy, "GET", &upstream.url("/"), &[("x-retry-attempt", "1")]).await,
        proxy.agent().await.request("POST", &upstream.url("/"), &key, &large).await,
    ];
    let (dead, _held) = Upstream::dead();
    // Not of this policy: nothing is tried again, and nothing is said.
    answers.push(proxy.get(&format!("http://{dead}/")).await);
    assert!(answers.iter().all(|answer| should_retry(answer).is_none()), "{answers:?}");
    assert_eq!(upstream.count(), 3);
    let metrics = proxy.metrics().await;
    for result in ["suppressed_not_idempotent", "suppressed_callers_retry", "suppressed_body"] {
        assert_eq!(retries(&metrics, result), 1.0, "{result}");
    }
    assert!(upstream.requests()[2].body == large, "it arrived whole, once");
}

/// An open circuit is pointless for who will be gone before its next probe, and for nobody else.
#[tokio::test]
async fn an_open_circuit_is_called_pointless_only_when_it_outlasts_the_caller() {
    let upstream = Upstream::answering(|_| Reply::status(503)).await;
    let stages = "hedge: off, breaker: { consecutive_failures: 1, open_for: 10s }, retry: {}";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &format!("{stages}, {PLENTY}"))).await;
    assert_eq!(proxy.get(&upstream.url("/")).await.status, 503);
    for (headers, told) in [(&[][..], None), (&[("grpc-timeout", "2S")], Some("false"))] {
        let answer = ask(&proxy, "GET", &upstream.url("/"), headers).await;
        assert_eq!((error_of(&answer).as_str(), should_retry(&answer)), ("circuit_open", told));
        let wait: u64 = answer.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=if told.is_some() { 1 } else { 11 }).contains(&wait), "{wait}");
    }
    assert_eq!(upstream.count(), 1);
}

/// What has gone by and was not kept cannot be sent again; what has not been read yet can, however large it is.
#[tokio::test]
async fn an_upload_beyond_the_replay_limit_is_tried_again_only_while_none_of_it_was_read() {
    let mut upstream = Upstream::start().await;
    let proxy =
        HedgerowProcess::start(&tool(upstream.address(), &format!("{RETRY}, replay_limit: 1KiB"))).await;
    let upload = pattern(0, 20 << 10);
    let length = upload.len().to_string();
    let fields = [("Idempotency-Key", "8e03978e"), ("Content-Length", &*length)];
    let mut agent = proxy.agent().await;
    agent.send(absolute("POST", &upstream.url("/"), &fields, b"")).await;
    let mut first = upstream.next().await;
    first.head_only(503, &[("Content-Length", "0"), ("Connection", "close")]).await;
    let mut second = upstream.next().await;
    agent.send(&upload).await;
    assert!(second.body().await == upload, "the body came whole");
    second.respond(200, &[], "taken").await;
    assert_eq!(agent.read_response_to("POST").await.text(), "taken");
}

/// What has come of an upload by then is sent again, and the rest follows it.
#[tokio::test]
async fn an_upload_that_is_refused_half_way_arrives_whole_at_the_next_try() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), RETRY)).await;
    let upload = pattern(0, 40 << 10);
    let (half, rest) = upload.split_at(20 << 10);
    for framing in [("Content-Length", "40960"), ("Transfer-Encoding", "chunked")] {
        let mut agent = proxy.agent().await;
        let chunk = |bytes: &[u8]| match framing.0 {
            "Content-Length" => bytes.to_vec(),
            _ => [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat(),
        };
        agent
            .send(absolute("PUT", &upstream.url("/"), &[("Idempotency-Key", "8e03978e"), framing], b""))
            .await;
        agent.send(chunk(half)).await;
        let mut first = upstream.next().await;
        first.head_only(503, &[("Content-Length", "0"), ("Connection", "close")]).await;
        let mut second = upstream.next().await;
        agent.send(chunk(rest)).await;
        if framing.1 == "chunked" {
            agent.send("0\r\n\r\n").await;
        }
        assert!(second.body().await == upload, "the body came whole");
        second.respond(200, &[], "taken").await;
        assert_eq!(agent.read_response_to("PUT").await.text(), "taken");
        first.gone().await;
    }
}

/// A client that waits to be asked for its body is asked once, by whichever try is let through.
#[tokio::test]
async fn c008_a_body_that_waits_for_100_is_sent_once_to_the_try_that_asks_for_it() {
    let mut upstream = Upstream::start().await;
    let stages =
        "hedge: { after: 10s, methods: [PUT] }, breaker: off, retry: { backoff: 20ms, methods: [PUT] }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &format!("{stages}, {PLENTY}"))).await;
    let fields = [("Expect", "100-continue"), ("Content-Length", "4")];
    for is_refused_first in [false, true] {
        let before = upstream.count();
        let mut agent = proxy.agent().await;
        agent.send(absolute("PUT", &upstream.url("/"), &fields, b"")).await;
        if is_refused_first {
            let mut exchange = upstream.next().await;
            assert_eq!(exchange.header("expect"), Some("100-continue"));
            exchange.head_only(503, &[("Content-Length", "0"), ("Connection", "close")]).await;
            exchange.close().await;
        }
        let mut exchange = upstream.next().await;
        assert_eq!(exchange.header("expect"), Some("100-continue"));
        exchange.raw(b"HTTP/1.1 100 Continue\r\n\r\n").await;
        assert_eq!(agent.read_head().await.status, 100);
        agent.send("body").await;
        assert_eq!(exchange.body().await, b"body");
        exchange.respond(201, &[], "").await;
        let answer = agent.read_response().await;
        assert_eq!((answer.status, answer.interims.len()), (201, 0));
        assert_eq!(upstream.count() - before, 1 + usize::from(is_refused_first));
    }
    let bodies: usize = upstream.requests().iter().map(|seen| seen.body.len()).sum();
    assert_eq!(bodies, 2 * 4);
}

/// The connection is the client's after the 101, whatever becomes of it; before that a call is a call.
#[tokio::test]
async fn c031_after_101_nothing_is_tried_again_but_a_refused_upgrade_is() {
    let mut upstream = Upstream::start().await;
    let stages = "hedge: { after: 20ms }, breaker: off, retry: { backoff: 20ms }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &format!("{stages}, {PLENTY}"))).await;
    let fields = [
        ("Connection", "Upgrade"),
        ("Upgrade", "websocket"),
        ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ("Sec-WebSocket-Version", "13"),
    ];
    let mut agent = proxy.agent().await;
    agent.send(absolute("GET", &upstream.url("/chat"), &fields, b"")).await;
    upstream.next().await.respond(503, &[], "not now").await;
    let mut exchange = upstream.next().await;
    exchange.accept_web_socket(&[]).await;
    assert_eq!(agent.read_head().await.status, 101);
    exchange.reset();
    assert!(matches!(agent.ended().await, End::Closed | End::Reset));
    let url = upstream.url("/");
    let serve = async { upstream.next().await.respond(200, &[], "").await };
    assert_eq!(tokio::join!(proxy.get(&url), serve).0.status, 200);
    assert_eq!((upstream.count_of("/chat"), upstream.count()), (2, 3));
    assert!(!proxy.stderr.text().contains("panick"), "{}", proxy.stderr.text());
}

/// What an upstream refuses to look at goes out again at once, within the attempt; and when that is of no use either,
/// as another try, a POST too.
#[tokio::test]
async fn a_refused_stream_is_tried_again_when_sending_it_again_was_of_no_use() {
    let mut upstream = Http2Upstream::start().await;
    let policy = tool(upstream.address(), &format!("origin: h2c, {RETRY}"));
    let proxy = HedgerowProcess::start(&policy).await;
    let url = upstream.url("/order");
    let post = async { proxy.agent().await.request("POST", &url, &[], b"order").await };
    let (answer, ()) = tokio::join!(post, async {
        for _ in 0..3 {
            let stream = upstream.next().await;
            assert_eq!(stream.values("x-hedgerow-attempt"), ["1"]);
            stream.reset(Reason::REFUSED_STREAM);
        }
        let mut again = upstream.next().await;
        assert_eq!(again.values("x-hedgerow-attempt"), ["2"]);
        assert_eq!(again.body().await.0, b"order");
        again.respond(200, &[], "taken").await;
    });
    assert_eq!((answer.status, answer.text()), (200, "taken"));

    // One that refuses for ever is not asked for ever.
    let post = async { proxy.agent().await.request("POST", &url, &[], b"order").await };
    let refuse = async {
        loop {
            upstream.next().await.reset(Reason::REFUSED_STREAM);
        }
    };
    let answer = tokio::select! { answer = post => answer, () = refuse => unreachable!() };
    assert_eq!((answer.status, error_of(&answer).as_str()), (502, "upstream_reset"));
    assert_eq!(should_retry(&answer), Some("false"));
    assert_eq!(upstream.tally().requests, 3 + 1 + 6);
}

/// Any other reset comes of a request that was looked at.
#[tokio::test]
async fn a_reset_stream_is_tried_again_for_a_get_and_not_for_a_post() {
    let mut upstream = Http2Upstream::start().await;
    let policy = tool(upstream.address(), &format!("origin: h2c, {RETRY}"));
    let proxy = HedgerowProcess::start(&policy).await;
    let url = upstream.url("/");
    let post = async { proxy.agent().await.request("POST", &url, &[], b"order").await };
    let (answer, ()) = tokio::join!(post, async { upstream.next().await.reset(Reason::INTERNAL_ERROR) });
    assert_eq!((answer.status, error_of(&answer).as_str()), (502, "upstream_reset"));
    assert_eq!(upstream.tally().requests, 1);
    let (answer, ()) = tokio::join!(proxy.get(&url), async {
        upstream.next().await.reset(Reason::INTERNAL_ERROR);
        upstream.next().await.respond(200, &[], "good").await;
    });
    assert_eq!((answer.status, answer.text()), (200, "good"));
    // A connection that says goodbye below a request has not looked at it; one that breaks may have.
    let (answer, ()) = tokio::join!(proxy.get(&url), async {
        upstream.next().await.cut();
        upstream.next().await.respond(200, &[], "good").await;
    });
    assert_eq!((answer.status, answer.text()), (200, "good"));
}

/// What stands above the last stream of a GOAWAY was not looked at. It goes out again at once, which is no try of its
/// own.
#[tokio::test]
async fn a_post_above_the_last_stream_of_a_goaway_needs_no_second_try() {
    let port = RawPort::bind().await;
    let proxy = HedgerowProcess::start(&tool(port.address(), &format!("origin: h2c, {RETRY}"))).await;
    let url = port.url("/order");
    let post = async { proxy.agent().await.request("POST", &url, &[], b"order").await };
    let (answer, _open) = tokio::join!(post, async {
        let mut first = FramePeer::server(port.accept().await, &[]).await;
        let opened = first.next(kind::HEADERS).await;
        first.send(Frame::go_away(opened.stream - 1, Reason::NO_ERROR)).await;
        let mut second = FramePeer::server(port.accept().await, &[]).await;
        let again = second.next(kind::HEADERS).await;
        while !second.next(kind::DATA).await.ends_stream() {}
        second.send(Frame::headers(again.stream, STATUS_200, true)).await;
        (first, second)
    });
    assert_eq!((answer.status, answer.header("x-hedgerow-attempts")), (200, Some("1")));
    assert_eq!(all_retries(&proxy.metrics().await), 0.0);
}

/// gRPC says both how it went and when to come back in its head, where there is nothing else.
#[tokio::test]
async fn a_grpc_call_that_may_happen_twice_is_tried_again_as_its_push_back_says() {
    const GRPC: (&str, &str) = ("Content-Type", "application/grpc");
    let upstream = Upstream::answering(|seen| match (seen.path(), seen.nth) {
        ("/x.S/Wait", 1) => unavailable().header("grpc-retry-pushback-ms", "700"),
        ("/x.S/Never", _) => unavailable().header("grpc-retry-pushback-ms", "-1"),
        ("/x.S/Unsafe", _) | (_, 1) => unavailable(),
        _ => Reply::ok("").header("Content-Type", "application/grpc").header("grpc-status", "0"),
    })
    .await;
    let routes = "routes: [{ path: \"/x.S/Unsafe\" }, { path: \"/**\", idempotent: true }]";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &format!("{RETRY}, {routes}"))).await;
    for (path, status, count) in
        [("/x.S/Go", "0", 2), ("/x.S/Wait", "0", 2), ("/x.S/Never", "14", 1), ("/x.S/Unsafe", "14", 1)]
    {
        let began = Instant::now();
        let fields = [GRPC, ("TE", "trailers"), ("Connection", "TE")];
        let answer = proxy.agent().await.request("POST", &upstream.url(path), &fields, &[0; 5]).await;
        assert_eq!((answer.header("grpc-status"), upstream.count_of(path)), (Some(status), count), "{path}");
        assert!(path != "/x.S/Wait" || began.elapsed() >= ms(700), "{:?}", began.elapsed());
    }
}

/// Trailers-Only: the status stands in the head.
fn unavailable() -> Reply {
    Reply::status(200).header("Content-Type", "application/grpc").header("grpc-status", "14")
}

/// Nobody waits for it any more.
#[tokio::test]
async fn a_client_that_leaves_during_back_off_ends_it() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), RETRY)).await;
    let mut agent = proxy.agent().await;
    agent.send(absolute("GET", &upstream.url("/left"), &[], b"")).await;
    upstream.next().await.respond(503, &[("Retry-After", "1")], "wait").await;
    let attempt = [TOOL, ("kind", "primary"), ("result", "status")];
    // Its answer has been read, and its back-off has begun.
    proxy.until_metrics(|m| m.value("hedgerow_upstream_attempts_total", &attempt) == 1.0).await;
    drop(agent);
    let line = proxy.access_log(|line| line["path"] == "/left").await;
    assert_eq!(
        (&line["status"], &line["outcome"], &line["attempts"]),
        (&499.into(), &"client_left".into(), &1.into())
    );
    upstream.gets_nothing_more(ms(1300)).await;
    assert_eq!(all_retries(&proxy.metrics().await), 0.0);
}

/// A call in back-off is a call under way: SIGTERM lets it finish, and `drain.max` does not wait for it.
#[tokio::test]
async fn back_off_goes_on_after_sigterm_and_ends_at_drain_max() {
    for (max, told) in [("20s", "1"), ("600ms", "20")] {
        let mut upstream = Upstream::start().await;
        let policy = format!("drain: {{ quiet: 50ms, max: {max} }}\n{}", tool(upstream.address(), RETRY));
        let mut proxy = HedgerowProcess::start(&policy).await;
        let call = start(&proxy, upstream.url("/"));
        upstream.next().await.respond(503, &[("Retry-After", told)], "wait").await;
        let attempt = [TOOL, ("kind", "primary"), ("result", "status")];
        proxy.until_metrics(|m| m.value("hedgerow_upstream_attempts_total", &attempt) == 1.0).await;
        proxy.signal(Signal::TERM);
        if max == "20s" {
            upstream.next().await.respond(200, &[], "served").await;
            assert_eq!(call.await.unwrap().text(), "served");
        } else {
            let answer = call.await.unwrap();
            assert_eq!((answer.status, error_of(&answer).as_str()), (503, "shutting_down"));
            assert_eq!(upstream.count(), 1);
        }
        assert_eq!(proxy.wait().await, 0);
    }
}

/// Who waits for his second try is no call at the upstream.
#[tokio::test]
async fn a_call_in_back_off_holds_no_place_in_the_bulkhead() {
    let mut upstream = Upstream::start().await;
    let stages = format!("{RETRY}, bulkhead: {{ max_concurrent: 1, max_queue: 0 }}");
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &stages)).await;
    let first = start(&proxy, upstream.url("/first"));
    upstream.next().await.respond(503, &[("Retry-After", "1")], "").await;
    proxy.until_metrics(|m| m.value("hedgerow_bulkhead_in_flight", &[TOOL]) == 0.0).await;
    let second = start(&proxy, upstream.url("/second"));
    let exchange: Exchange = upstream.next().await;
    assert_eq!(exchange.path(), "/second");
    exchange.respond(200, &[], "between").await;
    assert_eq!(second.await.unwrap().text(), "between");
    upstream.next().await.respond(200, &[], "after").await;
    assert_eq!(first.await.unwrap().text(), "after");
}

/// Many at once, half of which fail at first: each gets its own good answer, and nothing is left behind.
#[tokio::test]
async fn many_calls_with_second_tries_get_their_own_answers() {
    let failed = Arc::new(AtomicUsize::new(0));
    let count = failed.clone();
    let upstream = Upstream::answering(move |seen| {
        let is_first = seen.header("x-hedgerow-attempt") == Some("1");
        if is_first && count.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
            return Reply::status(503).body("bad");
        }
        Reply::ok(seen.path())
    })
    .await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), RETRY)).await;
    let calls = (0..10).map(async |nth| {
        let mut agent: Agent = proxy.agent().await;
        for round in 0..20 {
            let path = format!("/{nth}/{round}");
            assert_eq!(agent.get(&upstream.url(&path)).await.text(), path);
        }
    });
    join_all(calls).await;
    assert_eq!((failed.load(Ordering::Relaxed), upstream.count()), (200, 300));
    let metrics = proxy.until_metrics(|m| m.value("hedgerow_bulkhead_in_flight", &[TOOL]) == 0.0).await;
    assert_eq!((retries(&metrics, "succeeded"), all_retries(&metrics)), (100.0, 100.0));
}
