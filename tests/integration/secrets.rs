//! What callers and policies trust us with shows nowhere but at the upstream.

use std::time::Duration;

use crate::support::client::{Response, absolute};
use crate::support::dns::{Answer, Dns};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::upstream::{Reply, Upstream, by_path};

/// Part of every secret here. Lower case, and valid in each of the places.
const CANARY: &str = "canary";

/// A request with a canary wherever a caller may have a secret.
fn laden(method: &str, url: &str) -> Vec<u8> {
    let fields = [
        ("Authorization", "Bearer canary-authorization"),
        ("Cookie", "session=canary-cookie"),
        ("X-Api-Key", "canary-key"),
        ("Proxy-Authorization", "Basic canary-proxy"),
        ("Idempotency-Key", "canary-idempotency"),
        ("Referer", "http://canary-referer.test/"),
        ("x-request-id", "canary with blanks is no id"),
    ];
    absolute(method, &format!("{url}?token=canary-query#canary-fragment"), &fields, b"canary-body")
}

#[track_caller]
fn assert_silent(what: &str, text: &str) {
    let line = text.lines().find(|line| line.to_ascii_lowercase().contains(CANARY));
    assert!(line.is_none(), "{what} tells a secret: {line:?}");
}

/// An answer of hedgerow's own says nothing of what it was sent.
#[track_caller]
fn assert_answer_silent(what: &str, answer: &Response) {
    let body = String::from_utf8_lossy(&answer.body);
    assert_silent(what, &format!("{} {:?} {body}", answer.reason, answer.headers).to_string());
}

#[tokio::test]
async fn no_error_log_metric_or_status_tells_what_callers_sent() {
    let upstream = Upstream::answering(by_path(&[
        ("/ok", Reply::ok("fine")),
        ("/500", Reply::status(500)),
        ("/hang", Reply::hang()),
        ("/reset", Reply::reset()),
        ("/cut", Reply::ok("0123456789").cut(3)),
    ]))
    .await;
    let (dead, _held) = Upstream::dead();
    let dns = Dns::start(&[("mute.test", Answer::Mute)]).await;
    let policy = format!(
        "dns: {{ servers: [\"{}\"], timeout: 500ms }}\n\
         upstreams: {{ u: {{ hosts: [\"{}\"], hedge: {{ after: 50ms }}, deadline: {{ default: 1s }} }}, \
                      open: {{ hosts: [open.test], breaker: {{ consecutive_failures: 1 }} }} }}",
        dns.address(),
        upstream.address(),
    );
    let hedgerow = HedgerowProcess::with(&policy).argument("--log-level=trace").start().await;
    let address = upstream.address();
    let admin = hedgerow.admin;
    let urls = [
        (upstream.url("/ok"), 200),
        (upstream.url("/500"), 500),
        (upstream.url("/hang"), 504),
        (upstream.url("/reset"), 502),
        (upstream.url("/cut"), 200),
        (format!("http://{dead}/x"), 502),
        ("http://open.test/x".to_owned(), 502),
        ("http://open.test/x".to_owned(), 503),
        ("http://mute.test/x".to_owned(), 504),
        ("http://169.254.169.254/x".to_owned(), 403),
        (format!("http://{admin}/status"), 404),
        (format!("https://{address}/x"), 502),
        ("http://127.1/x".to_owned(), 400),
        ("ftp://a.test/x".to_owned(), 400),
        (format!("http://canary-user:canary-password@{address}/x"), 400),
    ];
    for (url, status) in &urls {
        for method in ["GET", "POST"] {
            let mut agent = hedgerow.agent().await;
            agent.send(laden(method, url)).await;
            let answer = agent.read_response().await;
            assert!(answer.status == *status || answer.status == 503, "{method} {url}: {}", answer.status);
            assert_answer_silent(url, &answer);
        }
    }
    for head in [
        "GET http://a.test/?canary-query HTTP/1.1\r\nHost: canary host\r\nAuthorization: canary\r\n\r\n"
            .to_owned(),
        "GET http://a.test/?canary-query HTTP/1.1\r\nAuthorization: canary\0\r\n\r\n".to_owned(),
        format!(
            "GET {} HTTP/1.1\r\nHost: {address}\r\nx-request-deadline: canary\r\n\r\n",
            upstream.url("/ok?canary")
        ),
        format!(
            "GET {} HTTP/1.1\r\nHost: {address}\r\nContent-Length: canary\r\n\r\n",
            upstream.url("/ok?canary")
        ),
        format!(
            "GET {} HTTP/1.1\r\nHost: {address}\r\nX: {}\r\n\r\n",
            upstream.url("/ok"),
            "canary".repeat(20_000)
        ),
        format!(
            "GET {} HTTP/1.1\r\nHost: {address}\r\n\r\n",
            upstream.url(&format!("/ok?{}", "canary".repeat(5_000)))
        ),
        format!("CONNECT {dead} HTTP/1.1\r\nHost: {dead}\r\nAuthorization: canary\r\n\r\n"),
        "canary garbage\r\n\r\n".to_owned(),
    ] {
        let mut agent = hedgerow.agent().await;
        agent.send(&head).await;
        let answer = agent.read_response().await;
        assert!(answer.status >= 400);
        assert_answer_silent(head.get(..60).unwrap_or(&head), &answer);
    }
    // What was sent to the upstream did arrive there, so that the test tests something.
    let seen = upstream.requests();
    let arrived = seen.iter().find(|seen| seen.path() == "/ok").unwrap();
    assert!(arrived.head.target.contains("canary-query"));
    assert_eq!(arrived.header("authorization"), Some("Bearer canary-authorization"));
    assert_eq!(arrived.header("proxy-authorization"), None);

    hedgerow.access_log(|line| line["method"] == "CONNECT").await;
    hedgerow.until_status(|status| status["in_flight"] == 0).await;
    assert_silent("the access log", &hedgerow.stdout.text());
    assert_silent("the log", &hedgerow.stderr.text());
    for path in ["/metrics", "/status", "/config", "/"] {
        assert_silent(path, hedgerow.ask_admin("GET", path).await.text());
    }
}

#[tokio::test]
async fn what_policies_take_from_environment_and_files_is_sent_and_never_shown() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    std::fs::write(&file, "canary-of-file\n").unwrap();
    let policy = format!(
        "upstreams: {{ u: {{ hosts: [\"{}\"], rewrite: {{ headers: {{ set: \
         {{ x-env: \"key ${{env:SECRET}}\", x-file: \"${{file:{}}}\" }} }} }} }} }}",
        upstream.address(),
        file.display(),
    );
    let launch =
        HedgerowProcess::with(&policy).env("SECRET", "canary-of-environment").argument("--log-level=trace");
    let mut hedgerow = launch.start().await;
    assert_eq!(hedgerow.get(&upstream.url("/")).await.status, 200);
    let seen = &upstream.requests()[0];
    assert_eq!(seen.header("x-env"), Some("key canary-of-environment"));
    assert_eq!(seen.header("x-file"), Some("canary-of-file"));

    // A file that is refused is quoted in the message, but not what its variables stand for.
    hedgerow.policy.write_in_place(&format!("{policy}\nunknown: 1"));
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "rejected")]) >= 1.0)
        .await;
    for path in ["/metrics", "/status", "/config", "/"] {
        assert_silent(path, hedgerow.ask_admin("GET", path).await.text());
    }
    let config = hedgerow.ask_admin("GET", "/config").await;
    assert!(config.text().contains("x-env"), "{}", config.text());
    assert_silent("the access log", &hedgerow.stdout.text());
    assert_silent("the log", &hedgerow.stderr.text());
}

#[tokio::test]
async fn an_error_tells_the_caller_no_address_and_the_log_tells_it_under_the_same_id() {
    let (dead, _held) = Upstream::dead();
    let dns = Dns::start(&[("a.test", Answer::addresses(&["127.0.0.1"]))]).await;
    let policy = format!("dns: {{ servers: [\"{}\"] }}", dns.address());
    let hedgerow = HedgerowProcess::start(&policy).await;
    let answer = hedgerow.get(&format!("http://a.test:{}/secret-free?q=1", dead.port())).await;
    let problem = answer.json();
    assert_eq!((answer.status, &problem["error"]), (502, &"connect_failed".into()));
    let told = format!("{:?} {problem}", answer.headers);
    assert!(!told.contains("127.0.0.1") && !told.contains(&dead.port().to_string()), "{told}");
    let line = hedgerow.access_log(|line| line["request_id"] == problem["request_id"]).await;
    assert_eq!((&line["error"], &line["path"]), (&"connect_failed".into(), &"/secret-free".into()));
    assert!(line["cause"].as_str().unwrap().contains("127.0.0.1"), "{line}");
    // Nothing above waits; this one bounds what a hang would cost, which is half a minute.
    assert!(line["duration_ms"].as_f64().unwrap() < Duration::from_secs(15).as_millis() as f64);
}
