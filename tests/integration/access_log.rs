//! One line a request on standard output.

use serde_json::{Value, json};

use crate::support::client::absolute;
use crate::support::hedgerow::HedgerowProcess;
use crate::support::http2::Http2Agent;
use crate::support::http2::agent::head;
use crate::support::policy::tool;
use crate::support::raw::RawPort;
use crate::support::upstream::{Reply, Upstream};

fn keys(line: &Value) -> Vec<&str> {
    line.as_object().expect("a line is an object").keys().map(String::as_str).collect()
}

fn at(path: &str) -> impl Fn(&Value) -> bool {
    move |line| line["path"] == path
}

#[tokio::test]
async fn a_line_tells_what_happened_to_a_call_in_json() {
    let upstream = Upstream::answering(|_| Reply::ok("twelve bytes")).await;
    let hedgerow = HedgerowProcess::start(
        "
        upstreams:
          tools:
            hosts: [127.0.0.1]
            routes: [{ name: search, path: /search/** }]
        ",
    )
    .await;
    let url = upstream.url("/search/now?q=private&key=secret");
    let headers = [("X-Request-Id", "call-7"), ("Authorization", "Bearer hush"), ("Cookie", "c=hush")];
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.request("GET", &url, &headers, b"").await.status, 200);
    let line = hedgerow.access_log(at("/search/now")).await;
    assert_eq!(
        keys(&line),
        [
            "ts",
            "request_id",
            "upstream",
            "route",
            "method",
            "host",
            "path",
            "status",
            "outcome",
            "duration_ms",
            "upstream_ms",
            "deadline_ms",
            "attempts",
            "source",
            "peer",
            "bytes_out"
        ],
    );
    for (key, value) in [
        ("request_id", json!("call-7")),
        ("upstream", json!("tools")),
        ("route", json!("search")),
        ("method", json!("GET")),
        ("host", json!(upstream.address().to_string())),
        ("status", json!(200)),
        ("outcome", json!("answered")),
        ("attempts", json!(1)),
        ("peer", json!("127.0.0.1")),
        ("bytes_out", json!(12)),
    ] {
        assert_eq!(line[key], value, "{key}");
    }
    // The default of 30 s, less the reserve of 50 ms.
    assert_eq!(line["deadline_ms"], 29_950.0);
    let stamp = line["ts"].as_str().unwrap();
    assert!(stamp.len() == 24 && stamp.ends_with('Z'), "{stamp}");
    assert!(line["duration_ms"].as_f64().unwrap() >= line["upstream_ms"].as_f64().unwrap());
    // No query, no header's value, in no line of either stream.
    let all = hedgerow.stdout.text() + &hedgerow.stderr.text();
    assert!(!all.contains("private") && !all.contains("secret") && !all.contains("hush"), "{all}");
    assert_eq!(hedgerow.stdout.all().len(), 1);
}

#[tokio::test]
async fn an_error_of_hedgerows_own_has_its_word_and_its_cause() {
    let (dead, _held) = Upstream::dead();
    let hedgerow = HedgerowProcess::start("{}").await;
    let answer = hedgerow.get(&format!("http://{dead}/gone?token=secret")).await;
    let line = hedgerow.access_log(at("/gone")).await;
    assert_eq!(
        (&line["status"], &line["outcome"], &line["error"]),
        (&json!(502), &json!("error"), &json!("connect_failed"))
    );
    // The address is in the log and not in the answer; the id leads from one to the other.
    assert!(line["cause"].as_str().unwrap().contains("127.0.0.1"), "{line}");
    assert!(!answer.json()["detail"].as_str().unwrap().contains("127.0.0.1"));
    assert_eq!(line["request_id"], answer.json()["request_id"]);
}

#[tokio::test]
async fn a_request_that_is_refused_before_it_has_an_upstream_has_a_line() {
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    agent.send("GET http://user:hush@a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n").await;
    assert_eq!(agent.read_response().await.status, 400);
    let line = hedgerow.access_log(|line| line["status"] == 400).await;
    assert_eq!(
        (&line["error"], &line["method"], &line["upstream"]),
        (&json!("invalid_request"), &json!("GET"), &Value::Null)
    );
    assert!(!hedgerow.stdout.text().contains("hush"));
}

// Booked as complete, though the client had left in the midst of the body.
#[tokio::test]
async fn c119_a_client_that_leaves_in_mid_body_has_an_outcome_of_its_own() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("GET", &upstream.url("/long"), &[], b"")).await;
    let mut exchange = upstream.next().await;
    exchange.start_chunks(200, &[]).await;
    exchange.chunk("first").await;
    agent.read_head().await;
    assert_eq!(agent.read_chunk().await.as_deref(), Some(&b"first"[..]));
    drop(agent);
    exchange.gone().await;
    let line = hedgerow.access_log(at("/long")).await;
    assert_eq!(
        (&line["status"], &line["outcome"], &line["bytes_out"]),
        (&json!(499), &json!("client_left"), &json!(5))
    );
    let left = [("code", "499"), ("outcome", "client_left")];
    hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &left) == 1.0).await;
}

#[tokio::test]
async fn an_upstream_that_breaks_off_is_told_from_a_client_that_leaves() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("GET", &upstream.url("/cut"), &[], b"")).await;
    let mut exchange = upstream.next().await;
    exchange.head_only(200, &[("Content-Length", "10")]).await;
    exchange.raw(b"four").await;
    assert_eq!(agent.read_head().await.status, 200);
    agent.expect(b"four").await;
    exchange.close().await;
    agent.ended().await;
    let line = hedgerow.access_log(at("/cut")).await;
    assert_eq!(
        (&line["status"], &line["outcome"], &line["error"], &line["bytes_out"]),
        (&json!(200), &json!("incomplete"), &json!("upstream_incomplete"), &json!(4)),
    );
}

#[tokio::test]
async fn a_tunnel_is_one_line_at_its_end() {
    let upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&upstream.address().to_string()).await.status, 200);
    // No HTTP, so the bytes are only carried.
    agent.send(b"\x16\x03\x01 not HTTP").await;
    assert_eq!(hedgerow.status().await["in_flight"], 1);
    assert_eq!(hedgerow.stdout.all(), Vec::<String>::new());
    drop(agent);
    let line = hedgerow.access_log(|_| true).await;
    assert_eq!(
        (&line["method"], &line["outcome"], &line["status"], &line["host"]),
        (&json!("CONNECT"), &json!("tunnel"), &json!(200), &json!(upstream.address().to_string())),
    );
}

#[tokio::test]
async fn a_tunnel_counts_its_bytes_however_it_ends() {
    // A reset, the idle limit and a stream that went with its connection all left a line that said 0.
    const GREETING: &[u8] = b"220 hello\r\n";
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start(&tool(port.address(), "tunnel_idle: 1500ms")).await;
    let authority = port.address().to_string();
    for end in ["reset", "idle"] {
        let mut agent = hedgerow.agent().await;
        agent.send(format!("CONNECT {authority} HTTP/1.1\r\nx-request-id: {end}\r\n\r\n")).await;
        let (answer, mut upstream) = tokio::join!(agent.read_response_to("CONNECT"), port.accept());
        assert_eq!(answer.status, 200);
        upstream.send(GREETING).await;
        agent.expect(GREETING).await;
        match end {
            "reset" => agent.reset(),
            _ => drop(agent.ended().await),
        }
        let line = hedgerow.access_log(|line| line["request_id"] == end).await;
        assert_eq!((&line["outcome"], &line["bytes_out"]), (&json!("tunnel"), &json!(11)), "{end}");
    }
    let http2 = Http2Agent::connect(hedgerow.proxy).await;
    let call = http2.open(head("CONNECT", &authority, &[("x-request-id", "lost")]), false).await;
    let (mut incoming, mut upstream) = tokio::join!(call.head(), port.accept());
    upstream.send(GREETING).await;
    assert_eq!(incoming.chunk().await.as_deref(), Some(GREETING));
    drop((incoming, http2));
    let line = hedgerow.access_log(|line| line["request_id"] == "lost").await;
    assert_eq!((&line["outcome"], &line["bytes_out"]), (&json!("tunnel"), &json!(11)));
}

#[tokio::test]
async fn the_form_follows_the_policy_text_json_and_off() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let mut hedgerow = HedgerowProcess::start("telemetry: { access_log: text }").await;
    let switch = async |hedgerow: &mut HedgerowProcess, form: &str, applied: f64| {
        hedgerow.policy.replace(&format!("telemetry: {{ access_log: {form} }}"));
        hedgerow
            .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "applied")]) == applied)
            .await;
    };
    hedgerow.get(&upstream.url("/in-text")).await;
    let line = hedgerow.stdout.until(|line| line.contains("/in-text")).await;
    assert!(line.starts_with("ts=20") && line.contains(" upstream=default method=GET "), "{line}");
    assert!(line.contains(" status=200 outcome=answered duration_ms="), "{line}");

    switch(&mut hedgerow, "off", 1.0).await;
    hedgerow.get(&upstream.url("/unseen")).await;
    switch(&mut hedgerow, "json", 2.0).await;
    hedgerow.get(&upstream.url("/in-json")).await;
    let line = hedgerow.stdout.until(|line| line.contains("/in-json")).await;
    assert_eq!(serde_json::from_str::<Value>(&line).unwrap()["status"], 200);
    assert!(!hedgerow.stdout.text().contains("/unseen"));
}

#[tokio::test]
async fn a_path_cannot_forge_a_second_line() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("telemetry: { access_log: text }").await;
    hedgerow.get(&upstream.url("/a%0Ats=2026-01-01T00:00:00.000Z%22%1B[2J")).await;
    hedgerow.get(&upstream.url("/end")).await;
    hedgerow.stdout.until(|line| line.contains("/end")).await;
    assert!(hedgerow.stdout.all().iter().all(|line| line.starts_with("ts=") && line.contains(" status=")));
    assert_eq!(hedgerow.stdout.all().len(), 2);
}
