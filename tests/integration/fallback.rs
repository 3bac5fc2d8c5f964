//! What is answered when there is no acceptable answer: when it is looked for, in which order, and what the
//! caller is told of it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tokio::time::Instant;

use crate::support::client::{Agent, Response, absolute};
use crate::support::dns::{Answer, Dns};
use crate::support::hedgerow::{HedgerowProcess, Metrics};
use crate::support::http2::Http2Agent;
use crate::support::pki::Pki;
use crate::support::policy::{TOOL, named, tool};
use crate::support::raw::RawPort;
use crate::support::road::{Mode, Road};
use crate::support::upstream::{Reply, Upstream, by_path, statuses};

/// One attempt and no guard that remembers, where the test is about neither.
const BARE: &str = "hedge: off, breaker: off";
/// What always answers.
const FIXED: &str = "fallback: [{ degraded: { status: 200 } }]";

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn stand_ins(metrics: &Metrics, kind: &str) -> f64 {
    metrics.value("hedgerow_fallbacks_total", &[TOOL, ("kind", kind)])
}

/// What stands in for the answer, and what was tried before.
#[track_caller]
fn marks(answer: &Response) -> (Option<&str>, Option<&str>) {
    (answer.header("x-hedgerow-degraded"), answer.header("x-hedgerow-tried"))
}

fn in_time(left: Duration) -> String {
    let at = SystemTime::now() + left;
    at.duration_since(UNIX_EPOCH).expect("it is after 1970").as_millis().to_string()
}

/// Each of them ended the call with an error while something was there to answer with.
#[tokio::test]
async fn every_failure_that_the_agent_would_see_is_stood_in_for() {
    let (dead, _keeps_it_dead) = Upstream::dead();
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/reset" => Reply::reset(),
        "/close" => Reply::close(),
        "/hang" | "/hung" => Reply::hang(),
        path => Reply::status(path[1..].parse().expect("the path is a status")).body("its own words"),
    })
    .await;
    let (raw, mute) = (RawPort::bind().await, RawPort::bind().await);
    let stranger = Upstream::on([127, 0, 0, 1]).tls(Pki::new().server(&["127.0.0.1"])).start().await;
    let dns = Dns::start(&[("mute.test", Answer::Mute), ("broken.test", Answer::Failure)]).await;
    let routes = "routes: [{ path: /hung, attempt_timeout: 200ms }, { path: /401, unacceptable: [401] }]";
    let upstreams = [
        named("tool", upstream.address(), &format!("{BARE}, {routes}")),
        named("dead", dead, BARE),
        named("raw", raw.address(), BARE),
        named(
            "tls",
            upstream.address().to_string().replace("127.0.0.1", "localhost"),
            &format!("{BARE}, origin: https"),
        ),
        named("stranger", stranger.address(), &format!("{BARE}, origin: https")),
        named("mutetls", mute.address(), &format!("{BARE}, origin: https, connect_timeout: 400ms")),
        named("nowhere", "nowhere.test", BARE),
        named("broken", "broken.test", BARE),
        named("mute", "mute.test", BARE),
    ];
    let policy = format!(
        "dns: {{ servers: [\"{}\"], timeout: 300ms }}\ndefaults: {{ {FIXED} }}\nupstreams: {{ {} }}",
        dns.address(),
        upstreams.join(", ")
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    let local = upstream.address().to_string().replace("127.0.0.1", "localhost");
    let unreadable = async {
        let mut peer = raw.accept().await;
        peer.read_request().await;
        peer.send("HTTP/1.1 2OO OK\r\n\r\n").await;
        peer
    };
    let url = raw.url("/");
    let (answer, _peer) = tokio::join!(hedgerow.get(&url), unreadable);
    assert_eq!(marks(&answer), (Some("static"), Some("raw=upstream_invalid")));
    for (url, tried) in [
        (format!("http://{dead}/"), "dead=connect_failed"),
        (format!("http://{local}/200"), "tls=tls_failed"),
        (stranger.url("/"), "stranger=certificate_invalid"),
        (mute.url("/"), "mutetls=connect_timeout"),
        ("http://nowhere.test/".into(), "nowhere=dns_failed"),
        ("http://broken.test/".into(), "broken=dns_failed"),
        ("http://mute.test/".into(), "mute=dns_timeout"),
        (upstream.url("/reset"), "tool=upstream_reset"),
        (upstream.url("/close"), "tool=upstream_reset"),
        (upstream.url("/hung"), "tool=deadline_exceeded"),
        (upstream.url("/401"), "tool=401"),
        (upstream.url("/429"), "tool=429"),
        (upstream.url("/500"), "tool=500"),
        (upstream.url("/502"), "tool=502"),
        (upstream.url("/503"), "tool=503"),
        (upstream.url("/504"), "tool=504"),
    ] {
        let answer = hedgerow.get(&url).await;
        assert_eq!(answer.status, 200, "{url}");
        assert_eq!(marks(&answer), (Some("static"), Some(tried)), "{url}");
        let body = answer.json();
        let (name, end) = tried.split_once('=').unwrap();
        let error = if end.parse::<u16>().is_ok() { "upstream_status" } else { end };
        assert_eq!((&body["status"], &body["error"]), (&json!("degraded"), &json!(error)), "{url}");
        assert_eq!(body["message"], format!("{name} is temporarily unavailable"), "{url}");
    }
    // The deadline is the caller's here: what costs no time still comes within it.
    let end = Instant::now() + ms(8000);
    let fields = [("x-request-deadline", &*in_time(ms(2000)))];
    let answer = hedgerow.agent().await.request("GET", &upstream.url("/hang"), &fields, b"").await;
    assert_eq!((answer.status, marks(&answer)), (200, (Some("static"), Some("tool=deadline_exceeded"))));
    assert!(Instant::now() < end);
    let degraded = [TOOL, ("code", "200"), ("outcome", "degraded")];
    let metrics = hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &degraded) == 10.0).await;
    assert_eq!(stand_ins(&metrics, "static"), 10.0);
    // That something was there to answer with makes no deadline less exceeded.
    assert_eq!(metrics.value("hedgerow_deadline_exceeded_total", &[TOOL, ("stage", "head")]), 2.0);
    assert_eq!(metrics.value("hedgerow_requests_total", &[("outcome", "degraded")]), 18.0);
    assert_eq!(metrics.value("hedgerow_requests_total", &[]), 18.0);
}

/// Most answers of hedgerow's own come from its guards; nobody wants to see those either.
#[tokio::test]
async fn what_a_guard_refuses_is_stood_in_for() {
    let mut upstream = Upstream::start().await;
    let routes = "routes: [\
         { name: full, path: /full, bulkhead: { max_concurrent: 1, max_queue: 0 } },\
         { name: open, path: /open, breaker: { consecutive_failures: 1, open_for: 40s } },\
         { name: spent, path: /spent, rate_limit: { rate: 1/h, burst: 1 } }]";
    let policy = tool(upstream.address(), &format!("hedge: off, {FIXED}, {routes}"));
    let hedgerow = HedgerowProcess::start(&policy).await;
    let at = upstream.address();
    let ask = async |path: &str| {
        let mut agent = hedgerow.agent().await;
        agent.send(absolute("GET", &format!("http://{at}{path}"), &[], b"")).await;
        agent
    };

    let mut held = ask("/full").await;
    let full = upstream.next().await;
    let answer = hedgerow.get(&upstream.url("/full")).await;
    assert_eq!(marks(&answer), (Some("static"), Some("tool=bulkhead_full")));
    // Not kept: a reset on a reused connection is sent again.
    full.respond(200, &[("Connection", "close")], "held").await;
    assert_eq!(held.read_response().await.text(), "held");

    let mut first = ask("/open").await;
    upstream.next().await.reset();
    assert_eq!(marks(&first.read_response().await), (Some("static"), Some("tool=upstream_reset")));
    let answer = hedgerow.get(&upstream.url("/open")).await;
    assert_eq!(marks(&answer), (Some("static"), Some("tool=circuit_open")));
    let wait = answer.json()["retry_after_ms"].as_u64().expect("the wait is known");
    assert!((16_000..=44_000).contains(&wait), "{wait}");

    let mut first = ask("/spent").await;
    upstream.next().await.respond(200, &[], "paid").await;
    assert_eq!(first.read_response().await.text(), "paid");
    let answer = hedgerow.get(&upstream.url("/spent")).await;
    assert_eq!(marks(&answer), (Some("static"), Some("tool=rate_limited")));
    assert!(answer.json()["retry_after_ms"].as_u64().expect("the wait is known") > 1_000_000);
    assert_eq!(upstream.count(), 3);
}

/// What is the caller's to mend, or forbidden, stays visible; a backup would hide it, or do it elsewhere.
#[tokio::test]
async fn what_is_no_failure_of_the_upstream_is_not_stood_in_for() {
    let upstream = Upstream::answering(|seen| {
        Reply::status(seen.path()[1..].parse().expect("the path is a status")).body("its own words")
    })
    .await;
    let backup = Upstream::answering(|_| Reply::ok("backup")).await;
    let chain = "fallback: [{ upstream: backup }, { degraded: {} }]";
    let policy = format!(
        "egress: {{ deny: [127.0.0.9, denied.test] }}\ndefaults: {{ {BARE}, cache: {{}}, {chain} }}\n\
         upstreams: {{ {}, {}, backup: {{ endpoint: \"http://{}\" }} }}",
        named("tool", upstream.address(), ""),
        named("inside", "127.0.0.9", ""),
        backup.address()
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    for status in [200, 204, 301, 400, 401, 403, 404, 405, 409, 410, 422, 501] {
        let answer = hedgerow.get(&upstream.url(&format!("/{status}"))).await;
        assert_eq!((answer.status, marks(&answer)), (status, (None, None)));
    }
    let url = upstream.url("/200");
    for (url, fields, error) in [
        ("http://127.0.0.9/", &[][..], "egress_denied"),
        ("http://denied.test/", &[], "egress_denied"),
        (&url, &[("x-request-deadline", "tomorrow")], "invalid_deadline"),
        (&url, &[("x-request-deadline", "1000000000")], "deadline_exceeded"),
        (&url, &[("Cache-Control", "only-if-cached")], "not_cached"),
        ("http://2130706433/", &[], "invalid_request"),
    ] {
        let answer = hedgerow.agent().await.request("GET", url, fields, b"").await;
        assert_eq!(
            (&answer.json()["error"], marks(&answer)),
            (&json!(error), (None, None)),
            "{url} {fields:?}"
        );
    }
    assert_eq!(backup.count(), 0);
    assert_eq!(hedgerow.metrics().await.value("hedgerow_fallbacks_total", &[]), 0.0);
}

/// A body that its own sender breaks off is nobody's failure, and half of one is not sent elsewhere.
#[tokio::test]
async fn a_request_that_its_client_breaks_is_not_sent_to_the_backup() {
    let mut upstream = Upstream::start().await;
    let backup = Upstream::answering(|_| Reply::ok("backup")).await;
    let chain = "fallback: [{ upstream: backup }, { degraded: {} }]";
    let policy = format!(
        "upstreams: {{ {}, backup: {{ endpoint: \"http://{}\" }} }}",
        named("tool", upstream.address(), &format!("{BARE}, {chain}")),
        backup.address()
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    let host = upstream.address();
    let head = format!("PUT http://{host}/ HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n");
    let mut agent = hedgerow.agent().await;
    agent.send(format!("{head}4\r\nhalf\r\nxyz\r\n")).await;
    upstream.next().await.gone().await;
    let answer = agent.read_response().await;
    assert_eq!((answer.status, marks(&answer)), (400, (None, None)));

    let mut agent = hedgerow.agent().await;
    agent.send(format!("{head}4\r\nhalf\r\n")).await;
    let exchange = upstream.next().await;
    drop(agent);
    exchange.gone().await;
    let left = [TOOL, ("code", "499"), ("outcome", "client_left")];
    let metrics = hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &left) == 1.0).await;
    assert_eq!((backup.count(), metrics.value("hedgerow_fallbacks_total", &[])), (0, 0.0));
}

/// First to last, and none after the one that has an answer.
#[tokio::test]
async fn the_steps_are_taken_in_the_order_of_the_policy() {
    let upstream = Upstream::answering(|seen| match (seen.path(), seen.nth) {
        ("/kept", 1) => Reply::ok("kept").header("Cache-Control", "max-age=0"),
        _ => Reply::status(503),
    })
    .await;
    let (first, second) = (
        Upstream::answering(by_path(&[("/first", Reply::ok("first"))])),
        Upstream::answering(by_path(&[("/second", Reply::ok("second"))])),
    );
    let (first, second) = (first.await, second.await);
    let (dead, _keeps_it_dead) = Upstream::dead();
    let chain = "fallback: [{ upstream: first }, { upstream: dead }, { upstream: second }, { stale: 5m }, { degraded: {} }]";
    let stages = "hedge: off, breaker: off, unacceptable: [404, 503]";
    let policy = format!(
        "defaults: {{ {stages} }}\nupstreams: {{ {}, \
         first: {{ endpoint: \"http://{}\" }}, dead: {{ endpoint: \"http://{dead}\" }}, second: {{ endpoint: \"http://{}\" }} }}",
        named("tool", upstream.address(), &format!("cache: {{ ttl: 1h }}, {chain}")),
        first.address(),
        second.address()
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    assert_eq!(hedgerow.get(&upstream.url("/kept")).await.text(), "kept");
    let all = "tool=503, first=404, dead=connect_failed, second=404";
    for (path, mark, tried, text) in [
        ("/first", "backup", "tool=503", Some("first")),
        ("/second", "backup", "tool=503, first=404, dead=connect_failed", Some("second")),
        ("/kept", "stale", all, Some("kept")),
        ("/else", "static", all, None),
    ] {
        let answer = hedgerow.get(&upstream.url(path)).await;
        assert_eq!(marks(&answer), (Some(mark), Some(tried)), "{path}");
        match text {
            Some(text) => assert_eq!((answer.status, answer.text()), (200, text)),
            None => assert_eq!((answer.status, &answer.json()["status"]), (503, &json!("degraded"))),
        }
    }
    assert_eq!(first.requests().len(), 4);
    assert_eq!(
        second.requests().iter().map(|seen| seen.path()).collect::<Vec<_>>(),
        ["/second", "/kept", "/else"]
    );
    let metrics = hedgerow.metrics().await;
    assert_eq!(["backup", "stale", "static"].map(|kind| stand_ins(&metrics, kind)), [2.0, 1.0, 1.0]);
}

/// A stale answer before a backup where the policy says so: the order is nobody's but the policy's.
#[tokio::test]
async fn a_kept_answer_comes_before_a_backup_where_the_policy_has_it_so() {
    let upstream = Upstream::answering(|seen| match seen.nth {
        1 => Reply::ok("kept").header("Cache-Control", "max-age=0"),
        _ => Reply::status(500),
    })
    .await;
    let backup = Upstream::answering(|_| Reply::ok("backup")).await;
    let policy = format!(
        "upstreams: {{ {}, backup: {{ endpoint: \"http://{}\" }} }}",
        named(
            "tool",
            upstream.address(),
            &format!("{BARE}, cache: {{}}, fallback: [{{ stale: 5m }}, {{ upstream: backup }}]")
        ),
        backup.address()
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    assert_eq!(hedgerow.get(&upstream.url("/a")).await.text(), "kept");
    let answer = hedgerow.get(&upstream.url("/a")).await;
    assert_eq!((answer.text(), marks(&answer)), ("kept", (Some("stale"), Some("tool=500"))));
    // Nothing is kept of this one, whose first answer is taken away too.
    assert_eq!(hedgerow.get(&upstream.url("/b")).await.text(), "kept");
    let forgotten = [("Cache-Control", "no-store")];
    let answer = hedgerow.agent().await.request("GET", &upstream.url("/b"), &forgotten, b"").await;
    assert_eq!((answer.text(), marks(&answer)), ("backup", (Some("backup"), Some("tool=500"))));
}

/// Stale was given for a 5xx alone (RFC 5861 section 4 has every such failure).
#[tokio::test]
async fn c095_a_stale_answer_says_so_whatever_the_failure() {
    for failure in ["refused", "reset", "timeout", "open", "status"] {
        // On an address of its own, where no other test gets the port once nobody listens there any more.
        let mut upstream = Upstream::on([127, 0, 9, 5])
            .answering(move |seen| match (seen.nth, failure) {
                (1, _) => Reply::ok("kept")
                    .header("Cache-Control", "max-age=0, stale-if-error=60")
                    .header("Connection", "close"),
                (_, "reset") => Reply::reset(),
                (_, "timeout") => Reply::hang(),
                _ => Reply::status(500),
            })
            .await;
        let policy = tool(upstream.address(), "hedge: off, cache: {}");
        let hedgerow = HedgerowProcess::start(&policy).await;
        let url = upstream.url("/");
        assert_eq!(marks(&hedgerow.get(&url).await), (None, None));
        let mut fields = vec![];
        let deadline = in_time(ms(2000));
        let error = match failure {
            "refused" => {
                upstream.stop_listening().await;
                "connect_failed"
            }
            "open" => {
                assert_eq!(hedgerow.ask_admin("POST", "/breakers/tool/force_open").await.status, 200);
                "circuit_open"
            }
            "timeout" => {
                fields.push(("x-request-deadline", &*deadline));
                "deadline_exceeded"
            }
            "reset" => "upstream_reset",
            _ => "500",
        };
        let answer = hedgerow.agent().await.request("GET", &url, &fields, b"").await;
        assert_eq!((answer.status, answer.text()), (200, "kept"), "{failure}");
        assert_eq!(marks(&answer), (Some("stale"), Some(&*format!("tool={error}"))), "{failure}");
        assert!(answer.header("age").is_some(), "{failure}");
        assert!(
            answer.header("cache-status").is_some_and(|it| it.starts_with("hedgerow; hit; ttl=")),
            "{failure}"
        );
        let metrics = hedgerow.metrics().await;
        assert_eq!(stand_ins(&metrics, "stale"), 1.0);
        let line = hedgerow.access_log(|line| line["outcome"] == "degraded").await;
        assert_eq!(line["source"], "stale");
    }
}

/// Code that reads it relies on each word.
#[tokio::test]
async fn the_built_in_payload_is_as_documented() {
    let upstream = Upstream::answering(by_path(&[
        ("/plain", Reply::status(502)),
        ("/later", Reply::status(429).header("Retry-After", "7")),
    ]))
    .await;
    let (dead, _keeps_it_dead) = Upstream::dead();
    let policy = format!(
        "upstreams: {{ {}, backup: {{ endpoint: \"http://{dead}\" }} }}",
        named(
            "tool",
            upstream.address(),
            &format!("{BARE}, fallback: [{{ upstream: backup }}, {{ degraded: {{}} }}]")
        ),
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    for (path, status, wait) in [("/plain", 502, ""), ("/later", 429, "\"retry_after_ms\":7000,")] {
        let answer = hedgerow.get(&upstream.url(path)).await;
        let expected = format!(
            "{{\"status\":\"degraded\",\"message\":\"tool is temporarily unavailable\",\
             \"error\":\"upstream_status\",{wait}\"tried\":[\
             {{\"upstream\":\"tool\",\"status\":{status},\"error\":\"upstream_status\"}},\
             {{\"upstream\":\"backup\",\"error\":\"connect_failed\"}}]}}"
        );
        assert_eq!((answer.status, answer.text()), (503, &*expected));
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert_eq!(answer.header("cache-control"), Some("no-store"));
        assert_eq!(answer.header("via"), Some("1.1 hedgerow"));
        assert_eq!(marks(&answer), (Some("static"), Some(&*format!("tool={status}, backup=connect_failed"))));
        // Nothing of the answer that it takes the place of.
        assert_eq!(answer.header("retry-after"), None);
    }
}

/// The policy's own words, with what only the moment knows filled in.
#[tokio::test]
async fn a_payload_of_the_policy_has_its_status_fields_and_placeholders() {
    let upstream = Upstream::answering(|_| Reply::status(429).header("Retry-After", "3")).await;
    let routes = "routes: [\
         { path: /json, fallback: [{ degraded: { status: 200, headers: { x-team: quotes, x-key: \"${env:KEY}\", x-pass: \"${file:pass}\", content-type: application/vnd.quotes+json }, \
           body: '{\"quotes\": [], \"missing\": \"{upstream}: {error}\", \"again\": {retry_after_ms}, \"as_it_is\": \"{other}\"}' } }] },\
         { path: /text, fallback: [{ degraded: { body: 'sorry, no {upstream}' } }] },\
         { path: /array, fallback: [{ degraded: { status: 206, body: ' []' } }] },\
         { path: /nothing, fallback: [{ degraded: { body: '' } }] }]";
    let policy = tool(upstream.address(), &format!("{BARE}, {routes}"));
    let launch = HedgerowProcess::with("{}").env("KEY", "sesame");
    let mut hedgerow = launch.start().await;
    std::fs::write(hedgerow.policy.folder().join("pass"), "open\n").unwrap();
    hedgerow.policy.replace(&policy);
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "applied")]) == 1.0)
        .await;

    let answer = hedgerow.get(&upstream.url("/json")).await;
    let body = r#"{"quotes": [], "missing": "tool: upstream_status", "again": 3000, "as_it_is": "{other}"}"#;
    assert_eq!((answer.status, answer.text()), (200, body));
    assert_eq!(answer.header("content-type"), Some("application/vnd.quotes+json"));
    assert_eq!(
        ["x-team", "x-key", "x-pass"].map(|name| answer.header(name)),
        [Some("quotes"), Some("sesame"), Some("open")]
    );
    for (path, status, kind, body) in [
        ("/text", 503, "text/plain; charset=utf-8", "sorry, no tool"),
        ("/array", 206, "application/json", " []"),
        ("/nothing", 503, "text/plain; charset=utf-8", ""),
    ] {
        let answer = hedgerow.get(&upstream.url(path)).await;
        assert_eq!(
            (answer.status, answer.text(), marks(&answer).0),
            (status, body, Some("static")),
            "{path}"
        );
        assert_eq!(answer.header("content-type"), Some(kind), "{path}");
    }
    let shown = hedgerow.ask_admin("GET", "/config").await;
    assert!(!shown.text().contains("sesame") && shown.text().contains("x-team"), "{}", shown.text());
}

/// An answer that may have no content has none, and the connection goes on behind it.
#[tokio::test]
async fn a_payload_leaves_its_body_out_where_there_is_none() {
    let upstream = Upstream::answering(|_| Reply::status(503)).await;
    let routes = "routes: [\
         { path: /204, fallback: [{ degraded: { status: 204 } }] },\
         { path: /205, fallback: [{ degraded: { status: 205 } }] },\
         { path: /304, fallback: [{ degraded: { status: 304 } }] },\
         { path: /head, fallback: [{ degraded: { status: 200, body: 'twelve bytes' } }] }]";
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), &format!("{BARE}, {routes}"))).await;
    let mut agent = hedgerow.agent().await;
    let agent2 = Http2Agent::connect(hedgerow.proxy).await;
    for status in [204, 205, 304] {
        let url = upstream.url(&format!("/{status}"));
        let answer = agent.get(&url).await;
        assert_eq!((answer.status, answer.text(), answer.complete), (status, "", true));
        assert_eq!(answer.header("content-type"), None, "{status}");
        let answer = agent2.get(&url).await;
        assert_eq!((answer.status, answer.text()), (status, ""));
    }
    let url = upstream.url("/head");
    let answer = agent.request("HEAD", &url, &[], b"").await;
    assert_eq!((answer.status, answer.text(), marks(&answer).0), (200, "", Some("static")));
    assert_eq!(answer.header("content-length"), Some("12"));
    assert_eq!(agent2.request("HEAD", &url, &[], "").await.text(), "");
    assert_eq!(agent.get(&url).await.text(), "twelve bytes");
}

/// A gRPC client reads no JSON; it gets the error where it looks for one. A backup it can use.
#[tokio::test]
async fn a_grpc_call_gets_the_error_and_no_payload() {
    let (dead, _keeps_it_dead) = Upstream::dead();
    let policy = tool(dead, &format!("{BARE}, fallback: [{{ degraded: {{ status: 200 }} }}]"));
    let hedgerow = HedgerowProcess::start(&policy).await;
    let fields = [("Content-Type", "application/grpc")];
    let url = format!("http://{dead}/pkg.Service/Method");
    let answer = hedgerow.agent().await.request("POST", &url, &fields, &[0; 5]).await;
    assert_eq!((answer.status, answer.header("grpc-status"), answer.text()), (200, Some("14"), ""));
    assert_eq!(answer.header("grpc-message"), Some("no address of tool accepted a connection"));
    assert_eq!(marks(&answer), (None, Some("tool=connect_failed")));
    let metrics = hedgerow.metrics().await;
    assert_eq!(metrics.value("hedgerow_requests_total", &[TOOL, ("code", "502"), ("outcome", "error")]), 1.0);
    assert_eq!(stand_ins(&metrics, "static"), 0.0);
}

/// A tunnel carries what hedgerow cannot read, and so cannot answer in its place.
#[tokio::test]
async fn a_tunnel_that_cannot_be_made_is_refused_whatever_the_chain() {
    let (dead, _keeps_it_dead) = Upstream::dead();
    let hedgerow = HedgerowProcess::start(&tool(dead, &format!("{BARE}, {FIXED}"))).await;
    let answer = hedgerow.agent().await.open_tunnel(&dead.to_string()).await;
    assert_eq!(
        (answer.status, answer.reason.as_str(), marks(&answer)),
        (502, "connect_failed", (None, None))
    );
}

/// A client of RFC 8441 takes any success for its tunnel, and would speak frames into a payload.
#[tokio::test]
async fn a_websocket_that_cannot_be_had_is_not_answered_with_a_success() {
    for mode in Mode::ALL {
        let stages = format!("{BARE}, fallback: [{{ degraded: {{ status: 200, body: no }} }}]");
        let mut road = Road::start(mode, &stages).await;
        let mut call = road.upgrade("/chat").await;
        road.upstream.next().await.respond(503, &[], "full").await;
        let head = call.head().await;
        let told = (head.status, head.get("x-hedgerow-degraded"), head.get("x-hedgerow-tried"));
        // To HTTP/1.1 whatever is no 101 has not switched (RFC 9110 section 7.8).
        let expected = if mode.is_http2() { (503, None) } else { (200, Some("static")) };
        assert_eq!(told, (expected.0, expected.1, Some("tool=503")), "{mode:?}");
    }
}

/// When nothing helps, what the upstream itself has said is worth more than our words for it.
#[tokio::test]
async fn when_the_whole_chain_fails_the_upstreams_own_answer_is_passed_on() {
    let mut upstream = Upstream::start().await;
    let (dead, _keeps_it_dead) = Upstream::dead();
    let policy = format!(
        "upstreams: {{ {}, backup: {{ endpoint: \"http://{dead}\" }} }}",
        named(
            "tool",
            upstream.address(),
            &format!("{BARE}, fallback: [{{ upstream: backup }}, {{ stale: 5m }}]")
        ),
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    let url = upstream.url("/");
    let serve = async {
        let exchange = upstream.next().await;
        exchange
            .respond(
                429,
                &[("Retry-After", "90"), ("x-quota", "0"), ("Content-Type", "text/x-own")],
                "slow down",
            )
            .await;
    };
    let (answer, ()) = tokio::join!(hedgerow.get(&url), serve);
    assert_eq!((answer.status, answer.text()), (429, "slow down"));
    assert_eq!(
        ["retry-after", "x-quota", "content-type"].map(|name| answer.header(name)),
        [Some("90"), Some("0"), Some("text/x-own")]
    );
    assert_eq!(marks(&answer), (None, Some("tool=429, backup=connect_failed")));
    let metrics = hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &[TOOL]) == 1.0).await;
    assert_eq!(
        metrics.value("hedgerow_requests_total", &[TOOL, ("code", "429"), ("outcome", "answered")]),
        1.0
    );
    assert_eq!(metrics.value("hedgerow_fallbacks_total", &[]), 0.0);
    // Its connection is as good as after any answer.
    let (answer, ()) =
        tokio::join!(hedgerow.get(&url), async { upstream.next().await.respond(200, &[], "well").await });
    assert_eq!((answer.text(), marks(&answer)), ("well", (None, None)));
    assert_eq!(upstream.connections(), 1);
}

/// That answer is still there when its rest is late, as a body of an overloaded upstream may be.
#[tokio::test]
async fn the_upstreams_own_answer_may_take_longer_than_the_chain() {
    let mut upstream = Upstream::start().await;
    let mut backup = Upstream::start().await;
    let policy = format!(
        "upstreams: {{ {}, backup: {{ endpoint: \"http://{}\", {BARE} }} }}",
        named("tool", upstream.address(), &format!("{BARE}, fallback: [{{ upstream: backup }}]")),
        backup.address()
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("GET", &upstream.url("/"), &[], b"")).await;
    let mut exchange = upstream.next().await;
    exchange.head_only(429, &[("Content-Length", "9"), ("Retry-After", "90")]).await;
    backup.next().await.respond(503, &[], "no").await;
    let head = agent.read_head().await;
    assert_eq!((head.status, head.headers.get("retry-after")), (429, Some("90")));
    exchange.raw(b"slow down").await;
    agent.expect(b"slow down").await;
}

/// Where it has said nothing, the problem tells what went wrong there and what was tried beside.
#[tokio::test]
async fn when_the_whole_chain_fails_without_an_answer_the_problem_tells_what_was_tried() {
    let (dead, _keeps_it_dead) = Upstream::dead();
    let backup = Upstream::answering(|_| Reply::status(500).body("the backup's words")).await;
    let policy = format!(
        "upstreams: {{ {}, one: {{ endpoint: \"http://{}\", {BARE} }}, two: {{ endpoint: \"http://{dead}\", {BARE} }} }}",
        named("tool", dead, &format!("{BARE}, fallback: [{{ upstream: one }}, {{ upstream: two }}]")),
        backup.address()
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    let answer = hedgerow.get(&format!("http://{dead}/")).await;
    assert_eq!((answer.status, answer.header("content-type")), (502, Some("application/problem+json")));
    assert_eq!(marks(&answer), (None, Some("tool=connect_failed, one=500, two=connect_failed")));
    let problem = answer.json();
    assert_eq!((&problem["error"], &problem["upstream"]), (&json!("connect_failed"), &json!("tool")));
    let tried = json!([
        { "upstream": "tool", "error": "connect_failed" },
        { "upstream": "one", "status": 500, "error": "upstream_status" },
        { "upstream": "two", "error": "connect_failed" },
    ]);
    assert_eq!(problem["tried"], tried);
    // A call that has no chain tells of none.
    let bare = hedgerow.get("http://nowhere.invalid/").await;
    assert_eq!((&bare.json()["tried"], marks(&bare)), (&Value::Null, (None, None)));
}

/// What is told of it is the same on every road; the answers too.
#[tokio::test]
async fn the_chain_is_the_same_on_every_road() {
    for mode in Mode::ALL {
        let backup = Upstream::answering(by_path(&[("/backup", Reply::ok("backup"))])).await;
        let others =
            format!("backup: {{ endpoint: \"http://{}\", unacceptable: [404], {BARE} }}", backup.address());
        let stages = format!(
            "{BARE}, fallback: [{{ upstream: backup }}, {{ degraded: {{ status: 200, body: 'none of {{upstream}}' }} }}]"
        );
        let mut road = Road::start_beside(mode, &stages, &others).await;
        for (path, mark, tried, text) in [
            ("/backup", "backup", "tool=503", "backup"),
            ("/static", "static", "tool=503, backup=404", "none of tool"),
        ] {
            let mut call = road.call("GET", path, &[]).await;
            road.upstream.next().await.respond(503, &[], "bad").await;
            let head = call.head().await;
            assert_eq!(
                (head.status, head.get("x-hedgerow-degraded"), head.get("x-hedgerow-tried")),
                (200, Some(mark), Some(tried)),
                "{mode:?}"
            );
            assert_eq!(String::from_utf8(call.rest().await).unwrap(), text, "{mode:?}");
        }
        let degraded = [TOOL, ("code", "200"), ("outcome", "degraded")];
        let metrics =
            road.hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &degraded) == 2.0).await;
        assert_eq!(["backup", "static"].map(|kind| stand_ins(&metrics, kind)), [1.0, 1.0]);
        for (path, source) in [("/backup", "backup"), ("/static", "degraded")] {
            let line = road.hedgerow.access_log(|line| line["path"] == path).await;
            assert_eq!(
                (&line["source"], &line["outcome"], &line["upstream"]),
                (&json!(source), &json!("degraded"), &json!("tool"))
            );
        }
    }
}

/// A route's chain takes the place of its upstream's, and the chain of a new policy that of the old one.
#[tokio::test]
async fn the_chain_is_the_routes_own_and_changes_with_the_policy() {
    let upstream = Upstream::answering(|_| Reply::status(503).body("bad")).await;
    let chain = |text: &str| {
        let routes = "routes: [{ path: /orders, fallback: [] }, { path: /off, fallback: off }, { path: /own, fallback: [{ degraded: { body: own } }] }]";
        let stages = format!("fallback: [{{ degraded: {{ status: 200, body: {text} }} }}], {routes}");
        format!(
            "defaults: {{ {BARE}, fallback: [{{ degraded: {{ body: wide }} }}] }}\n{}",
            tool(upstream.address(), &stages)
        )
    };
    let mut hedgerow = HedgerowProcess::start(&chain("one")).await;
    for (path, text) in [("/", "one"), ("/orders", "bad"), ("/off", "bad"), ("/own", "own")] {
        assert_eq!(hedgerow.get(&upstream.url(path)).await.text(), text, "{path}");
    }
    let elsewhere = Upstream::on([127, 0, 0, 2]).answering(|_| Reply::status(503)).await;
    assert_eq!(hedgerow.get(&elsewhere.url("/")).await.text(), "wide");
    hedgerow.policy.replace(&chain("two"));
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "applied")]) == 1.0)
        .await;
    assert_eq!(hedgerow.get(&upstream.url("/")).await.text(), "two");
}

/// A retry that helps needs nothing to stand in for it; what stands in comes after the last.
#[tokio::test]
async fn the_chain_begins_when_the_last_retry_has_failed() {
    let upstream = Upstream::answering(|seen| match (seen.path(), seen.nth) {
        ("/second", 2) => Reply::ok("second try"),
        _ => Reply::status(503),
    })
    .await;
    let stages =
        format!("{BARE}, {FIXED}, retry: {{ backoff: 1ms }}, extra_load: {{ ratio: 100%, floor: 100/s }}");
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), &stages)).await;
    let answer = hedgerow.get(&upstream.url("/second")).await;
    assert_eq!((answer.text(), marks(&answer)), ("second try", (None, None)));
    let answer = hedgerow.get(&upstream.url("/never")).await;
    assert_eq!(marks(&answer), (Some("static"), Some("tool=503")));
    assert_eq!(answer.header("x-hedgerow-attempts"), Some("2"));
    assert_eq!((upstream.count_of("/second"), upstream.count_of("/never")), (2, 2));
}

/// The flight takes the chain for all who wait for it.
#[tokio::test]
async fn those_who_wait_for_one_flight_get_one_answer_of_its_chain() {
    let mut upstream = Upstream::start().await;
    let backup = Upstream::answering(|_| Reply::ok("backup")).await;
    let policy = format!(
        "upstreams: {{ {}, backup: {{ endpoint: \"http://{}\", {BARE} }} }}",
        named(
            "tool",
            upstream.address(),
            &format!("{BARE}, coalesce: true, fallback: [{{ upstream: backup }}, {{ degraded: {{}} }}]")
        ),
        backup.address()
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    let url = upstream.url("/");
    let mut calls = Vec::new();
    for _ in 0..5 {
        calls.push(Agent::connect(hedgerow.proxy).await);
    }
    for agent in &mut calls {
        agent.send(absolute("GET", &url, &[], b"")).await;
    }
    let exchange = upstream.next().await;
    hedgerow.until_status(|status| status["in_flight"] == 5).await;
    exchange.respond(503, &[], "").await;
    for agent in &mut calls {
        let answer = agent.read_response().await;
        assert_eq!((answer.text(), marks(&answer)), ("backup", (Some("backup"), Some("tool=503"))));
    }
    assert_eq!((upstream.count(), backup.count()), (1, 1));
}

/// The deadline of one who waits for a flight is its own, and so is what stands in for the answer then.
#[tokio::test]
async fn one_who_waits_for_a_flight_past_its_deadline_is_answered_by_the_chain() {
    let mut upstream = Upstream::start().await;
    let hedgerow =
        HedgerowProcess::start(&tool(upstream.address(), &format!("{BARE}, coalesce: true, {FIXED}"))).await;
    let url = upstream.url("/");
    let mut patient = hedgerow.agent().await;
    patient.send(absolute("GET", &url, &[], b"")).await;
    let exchange = upstream.next().await;
    let hasty = hedgerow.agent().await.request("GET", &url, &[("grpc-timeout", "1S")], b"").await;
    assert_eq!((hasty.status, marks(&hasty)), (200, (Some("static"), Some("tool=deadline_exceeded"))));
    exchange.respond(200, &[], "well").await;
    assert_eq!(patient.read_response().await.text(), "well");
    assert_eq!(upstream.count(), 1);
}

/// And one with more time does not get what stood in for a hastier one's answer.
#[tokio::test]
async fn what_stands_in_for_the_leaders_answer_at_its_deadline_is_not_for_those_with_more_time() {
    let mut upstream = Upstream::start().await;
    let hedgerow =
        HedgerowProcess::start(&tool(upstream.address(), &format!("{BARE}, coalesce: true, {FIXED}"))).await;
    let url = upstream.url("/");
    let mut hasty = hedgerow.agent().await;
    hasty.send(absolute("GET", &url, &[("grpc-timeout", "2S")], b"")).await;
    let first = upstream.next().await;
    let mut patient = hedgerow.agent().await;
    patient.send(absolute("GET", &url, &[], b"")).await;
    let hasty = hasty.read_response().await;
    assert_eq!((hasty.status, marks(&hasty)), (200, (Some("static"), Some("tool=deadline_exceeded"))));
    first.gone().await;
    upstream.next().await.respond(200, &[], "well").await;
    let answer = patient.read_response().await;
    assert_eq!((answer.text(), marks(&answer)), ("well", (None, None)));
}

/// The word of the first failure is what is told of it, whatever the agent's version.
#[tokio::test]
async fn statuses_that_the_policy_accepts_are_answers() {
    let upstream = Upstream::answering(statuses(&[503])).await;
    let hedgerow =
        HedgerowProcess::start(&tool(upstream.address(), &format!("{BARE}, {FIXED}, unacceptable: [500]")))
            .await;
    let answer = hedgerow.get(&upstream.url("/")).await;
    assert_eq!((answer.status, answer.text(), marks(&answer)), (503, "503", (None, None)));
}
