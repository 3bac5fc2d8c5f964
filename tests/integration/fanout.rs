//! A list of calls and one answer by one deadline: what is sent, what comes back and in which form, what the guards
//! have to do with it, and what the deadline does to what has not come.

use std::time::Duration;

use futures_util::future::join_all;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::support::client::{Agent, deadline_in};
use crate::support::dns::{Answer, Dns};
use crate::support::fanout::{PATH, Report, get, request, take};
use crate::support::h1::Framing;
use crate::support::hedgerow::{HedgerowProcess, Metrics};
use crate::support::http2::{End, Http2Agent};
use crate::support::pki::Pki;
use crate::support::policy::{TOOL, named, tool};
use crate::support::upstream::{Reply, Upstream, by_path, pattern, statuses};

/// One attempt and no guard that remembers, where the test is about neither.
const BARE: &str = "hedge: off, breaker: off";
/// Much longer than anything takes that a test waits for.
const LATE: u64 = 18_000;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A fan-out of these calls with a deadline that is not to strike.
fn calls(calls: impl Into<Value>) -> Value {
    json!({ "deadline_ms": LATE, "calls": calls.into() })
}

/// What comes of it.
async fn run(hedgerow: &HedgerowProcess, body: &Value) -> Report {
    Report::of(&hedgerow.fan_out(body).await)
}

/// The calls of these ids, each for the path of its name.
fn list(upstream: &Upstream, ids: &[&str]) -> Value {
    ids.iter().map(|id| get(id, upstream.url(&format!("/{id}")))).collect()
}

/// Waits until the call for this path has come to its end.
async fn ended(hedgerow: &HedgerowProcess, path: &str) {
    hedgerow.access_log(|line| line["path"] == path).await;
}

fn counted(metrics: &Metrics, name: &str, result: &str) -> f64 {
    metrics.value(&format!("hedgerow_fanout_{name}_total"), &[("result", result)])
}

/// All that an answer tells, once.
#[tokio::test]
async fn results_stand_in_the_order_of_the_calls_whatever_order_they_come_in() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let ids = ["TSLA", "10", "AAPL", "9", "价格", "a \"b\"\\"];
    let list: Vec<_> = (0..ids.len()).map(|at| get(ids[at], upstream.url(&format!("/{at}")))).collect();
    let mut agent = hedgerow.ask_fan_out(&[], calls(list).to_string()).await;
    let mut exchanges = Vec::new();
    for _ in ids {
        exchanges.push(upstream.next().await);
    }
    exchanges.sort_by_key(|exchange| std::cmp::Reverse(exchange.path().to_owned()));
    for exchange in exchanges {
        let body = exchange.path().to_owned();
        exchange.respond(200, &[("Content-Type", "text/plain"), ("X-Own", "1")], body).await;
    }
    let answer = agent.read_response_to("POST").await;
    let report = Report::of(&answer);
    assert_eq!((report.results(), report.missing()), (ids.to_vec(), vec![]));
    for (at, id) in ids.into_iter().enumerate() {
        let result = report.result(id);
        assert_eq!((&result["status"], &result["source"]), (&json!(200), &json!("primary")));
        assert_eq!((&result["body"], &result["headers"]["x-own"]), (&json!(format!("/{at}")), &json!("1")));
        assert!(result["elapsed_ms"].as_u64() <= report.0["elapsed_ms"].as_u64(), "{}", report.0);
        assert_eq!(result.get("truncated"), None);
    }
    assert!(report.is_complete());
    assert_eq!((&report.0["warning"], report.0.get("system_prompt")), (&Value::Null, None));
    let counts = json!({
        "calls": 6, "results": 6, "missing": 0, "hedge": 0, "backup": 0, "cache": 0, "stale": 0, "degraded": 0
    });
    assert_eq!(report.0["counts"], counts);
    for (name, value) in [
        ("cache-control", "no-store"),
        ("via", "1.1 hedgerow"),
        ("content-language", "en"),
        ("vary", "accept, accept-language"),
    ] {
        assert_eq!(answer.header(name), Some(value));
    }
    // The summary comes first: a reader that cuts the answer short has read the warning.
    let keys: Vec<_> = report.0.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["complete", "warning", "elapsed_ms", "counts", "missing", "results"]);
    // And the connection is good for another.
    agent.send(request(hedgerow.proxy, &[], calls([get("a", upstream.url("/a"))]).to_string())).await;
    let [a] = take(&mut upstream, ["/a"]).await;
    a.respond(204, &[], "").await;
    let report = Report::of(&agent.read_response_to("POST").await);
    assert_eq!((&report.result("a")["status"], &report.result("a")["body"]), (&json!(204), &Value::Null));
}

#[tokio::test]
async fn each_call_is_sent_as_it_is_written() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let bytes: Vec<u8> = (0..=255).collect();
    let base64 = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7PD0+P0BBQkNERUZHSElKS0\
                  xNTk9QUVJTVFVWV1hZWltcXV5fYGFiY2RlZmdoaWprbG1ub3BxcnN0dXZ3eHl6e3x9fn+AgYKDhIWGh4iJiouMjY6PkJGSk5SVlpeY\
                  mZqbnJ2en6ChoqOkpaanqKmqq6ytrq+wsbKztLW2t7i5uru8vb6/wMHCw8TFxsfIycrLzM3Oz9DR0tPU1dbX2Nna29zd3t/g4eLj5O\
                  Xm5+jp6uvs7e7v8PHy8/T19vf4+fr7/P3+/w==";
    /// Method, type and content.
    type Sent<'a> = (&'a str, Option<&'a str>, &'a [u8]);
    // What is sent, as it is written in the list, and what arrives.
    let cases: &[(&str, Sent<'_>)] = &[
        (r#""method": null, "headers": null, "body": null"#, ("GET", None, b"")),
        (r#""method": "HEAD""#, ("HEAD", None, b"")),
        (r#""method": "post""#, ("POST", None, b"")),
        (
            r#""method": "POST", "body": { "b":1e400,"a" : [ 12345678901234567890, 0.10 ], "a": "\u0041\ud83d" }"#,
            (
                "POST",
                Some("application/json"),
                br#"{ "b":1e400,"a" : [ 12345678901234567890, 0.10 ], "a": "\u0041\ud83d" }"#,
            ),
        ),
        (r#""method": "PUT", "body": [1,  2]"#, ("PUT", Some("application/json"), b"[1,  2]")),
        (r#""method": "PATCH", "body": 1e-7"#, ("PATCH", Some("application/json"), b"1e-7")),
        (r#""method": "POST", "body": false"#, ("POST", Some("application/json"), b"false")),
        (
            r#""method": "DELETE", "body": "l\u00e4uft \ud83d\ude00\r\n\u0000""#,
            ("DELETE", Some("text/plain; charset=utf-8"), "läuft 😀\r\n\0".as_bytes()),
        ),
        (r#""method": "POST", "body": """#, ("POST", Some("text/plain; charset=utf-8"), b"")),
        (
            r#""method": "POST", "body": "<a/>", "headers": {"content-type": "application/xml"}"#,
            ("POST", Some("application/xml"), b"<a/>"),
        ),
        (
            &format!(r#""method": "POST", "body_base64": "{base64}""#),
            ("POST", Some("application/octet-stream"), &bytes),
        ),
        (r#""method": "PURGE""#, ("PURGE", None, b"")),
        (r#""method": "GET", "body": "q""#, ("GET", Some("text/plain; charset=utf-8"), b"q")),
    ];
    let url = |at: usize| upstream.url(&format!("/{at}"));
    let list: Vec<_> = (0..cases.len())
        .map(|at| format!(r#"{{"id": "{at}", "url": "{}", {}}}"#, url(at), cases[at].0))
        .collect();
    let body = format!(r#"{{"deadline_ms": {LATE}, "calls": [{}]}}"#, list.join(","));
    let report = Report::of(&hedgerow.fan_out_with(&[], body).await);
    assert!(report.is_complete(), "{}", report.0);
    let seen = upstream.requests();
    for (at, (written, (method, kind, content))) in cases.iter().enumerate() {
        let seen = seen.iter().find(|seen| seen.path() == format!("/{at}")).expect("each was sent");
        assert_eq!(
            (&*seen.head.method, seen.header("content-type"), String::from_utf8_lossy(&seen.body)),
            (*method, *kind, String::from_utf8_lossy(content)),
            "{written}"
        );
        assert_eq!(&seen.body, content, "{written}");
        let says_nothing = content.is_empty() && !matches!(*method, "POST" | "PUT" | "PATCH");
        let length = (!says_nothing).then(|| content.len().to_string());
        assert_eq!(seen.header("content-length"), length.as_deref(), "{written}");
        assert_eq!(seen.header("transfer-encoding"), None, "{written}");
    }
}

#[tokio::test]
async fn a_calls_headers_and_target_reach_the_upstream() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let list = json!([
        { "id": "plain", "url": upstream.url("") },
        { "id": "own", "url": upstream.url("/a b/ü/%2F|?x=ü&y=a b&z=%zz#part"), "headers": {
            "X-Key": "sk-1 ~!\"",
            "x-many": ["1", "2", "1"],
            "X-None": [],
            "X-Empty": "",
            "X-Utf8": "größe",
            "User-Agent": "mine/1",
            "accept": "application/json",
            "Cookie": "a=1; b=2",
            "Authorization": "Bearer x",
        } },
    ]);
    assert!(run(&hedgerow, &calls(list)).await.is_complete());
    let seen = upstream.requests();
    let [plain, own] = ["/", "/a%20b/%C3%BC/%2F|"].map(|path| {
        seen.iter().find(|seen| seen.path() == path).unwrap_or_else(|| panic!("{path} in {seen:?}"))
    });
    assert_eq!(plain.header("user-agent"), Some(concat!("hedgerow/", env!("CARGO_PKG_VERSION"))));
    assert_eq!(plain.header("accept"), Some("*/*"));
    assert_eq!(own.head.target, "/a%20b/%C3%BC/%2F|?x=%C3%BC&y=a%20b&z=%zz");
    for (name, value) in [
        ("x-key", "sk-1 ~!\""),
        ("x-empty", ""),
        ("x-utf8", "größe"),
        ("user-agent", "mine/1"),
        ("accept", "application/json"),
        ("cookie", "a=1; b=2"),
        ("authorization", "Bearer x"),
    ] {
        assert_eq!(own.header(name), Some(value));
    }
    assert_eq!(own.head.headers.all("x-many"), ["1", "2", "1"]);
    assert_eq!(own.header("x-none"), None);
    for seen in [plain, own] {
        assert_eq!(seen.header("host"), Some(upstream.address().to_string().as_str()));
    }
}

/// Programs copy whole sets of fields from elsewhere; these say nothing of the call.
#[tokio::test]
async fn fields_of_the_connection_are_left_out_without_a_word() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let list = json!([{ "id": "a", "url": upstream.url("/"), "method": "POST", "body": "four", "headers": {
        "Host": "other.example",
        "Content-Length": "1",
        "Connection": "close, x-own",
        "Keep-Alive": "timeout=1",
        "Proxy-Connection": "close",
        "Transfer-Encoding": "chunked",
        "TE": "trailers",
        "Trailer": "x-sum",
        "Upgrade": "websocket",
        "Expect": "100-continue",
        "Via": "1.1 loop",
        "Accept-Encoding": "gzip, br",
        "X-Own": "1",
    } }]);
    let report = run(&hedgerow, &calls(list)).await;
    assert_eq!(report.result("a")["status"], 200);
    let seen = &upstream.requests()[0];
    assert_eq!(seen.body, b"four");
    for (name, value) in [
        ("host", Some(&*upstream.address().to_string())),
        ("content-length", Some("4")),
        ("accept-encoding", Some("identity")),
        ("x-own", Some("1")),
        ("connection", None),
        ("keep-alive", None),
        ("proxy-connection", None),
        ("transfer-encoding", None),
        ("te", None),
        ("trailer", None),
        ("upgrade", None),
        ("expect", None),
    ] {
        assert_eq!(seen.header(name), value, "{name}");
    }
    assert!(!seen.header("via").unwrap_or_default().contains("loop"));
}

#[tokio::test]
async fn json_stays_json_byte_for_byte() {
    let numbers = r#"{"n":1e300,"big":12345678901234567890123,"frac":0.10,"zero":-0.0,"twice":1,"twice":2}"#;
    let deep = format!("{}{}", "[".repeat(101), "]".repeat(101));
    let just = format!("{}{}", "[".repeat(100), "]".repeat(100));
    // The type, what the upstream says, and what stands in the answer.
    let cases: &[(&str, &str, String)] = &[
        ("application/json; charset=utf-8", numbers, format!("\"body\":{numbers}")),
        ("Application/Problem+JSON", "{\"a\":1}", "\"body\":{\"a\":1}".into()),
        (
            "application/json",
            "\r\n{\n  \"a\": \"x\\ny\",\r\n\t\"b\": [ ]\r}\n",
            "\"body\":{  \"a\": \"x\\ny\",\t\"b\": [ ]}".into(),
        ),
        ("application/json", " \"ü\u{2028}\" ", "\"body\": \"ü\u{2028}\" ".into()),
        ("application/json", "null", "\"body\":null".into()),
        ("application/json", &just, format!("\"body\":{just}")),
        // What not every reader would take for JSON is told as the text that it is.
        ("application/json", "[1e400]", "\"body\":\"[1e400]\"".into()),
        ("application/json", "\"\\ud83d\"", "\"body\":\"\\\"\\\\ud83d\\\"\"".into()),
        ("application/json", &deep, format!("\"body\":\"{deep}\"")),
        ("application/json", "{\"a\":", "\"body\":\"{\\\"a\\\":\"".into()),
        ("application/json", "{} {}", "\"body\":\"{} {}\"".into()),
        ("application/json", "NaN", "\"body\":\"NaN\"".into()),
        ("text/plain", "{\"a\":1}", "\"body\":\"{\\\"a\\\":1}\"".into()),
    ];
    let replies: Vec<_> =
        cases.iter().map(|(kind, body, _)| Reply::ok(*body).header("Content-Type", kind)).collect();
    let upstream = Upstream::answering(move |seen| {
        replies[seen.path()[1..].parse::<usize>().expect("a number")].clone()
    })
    .await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    for (at, (_, body, shown)) in cases.iter().enumerate() {
        let answer = hedgerow.fan_out(&calls([get("a", upstream.url(&format!("/{at}")))])).await;
        assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")));
        assert!(answer.text().ends_with(&format!("{shown}}}}}}}")), "{body:?}: {}", answer.text());
    }
}

#[tokio::test]
async fn text_stays_text_and_anything_else_is_base64_with_its_type() {
    let replies = [
        ("/plain", Reply::ok("ü\n\"\u{0}").header("Content-Type", "text/plain; charset=utf-8")),
        ("/html", Reply::ok("<p>").header("Content-Type", "TEXT/HTML")),
        ("/untold", Reply::ok("some text")),
        ("/untold-bytes", Reply::ok(b"\xff\x00".to_vec())),
        (
            "/latin",
            Reply::ok(b"gr\xf6\xdfe".to_vec()).header("Content-Type", "text/plain; charset=iso-8859-1"),
        ),
        ("/png", Reply::ok(b"\x89PNG".to_vec()).header("Content-Type", "image/png")),
        ("/pdf", Reply::ok("%PDF-1.7").header("Content-Type", "application/pdf")),
        (
            "/zip",
            Reply::ok("{}").header("Content-Type", "application/json").header("Content-Encoding", "gzip"),
        ),
        ("/empty", Reply::ok("").header("Content-Type", "application/json")),
        ("/gone", Reply::status(304).header("ETag", "\"1\"")),
    ];
    let upstream = Upstream::answering(by_path(&replies)).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let list: Vec<_> = replies.iter().map(|(path, _)| get(path, upstream.url(path))).collect();
    let report = run(&hedgerow, &calls(list)).await;
    for (path, text) in [("/plain", "ü\n\"\u{0}"), ("/html", "<p>"), ("/untold", "some text")] {
        assert_eq!(report.result(path)["body"], text, "{path}");
        assert_eq!(report.result(path).get("body_base64"), None, "{path}");
    }
    for (path, base64, kind) in [
        ("/untold-bytes", "/wA=", Value::Null),
        ("/latin", "Z3L232U=", json!("text/plain; charset=iso-8859-1")),
        ("/png", "iVBORw==", json!("image/png")),
        ("/pdf", "JVBERi0xLjc=", json!("application/pdf")),
        ("/zip", "e30=", json!("application/json")),
    ] {
        let result = report.result(path);
        assert_eq!((&result["body_base64"], &result["content_type"]), (&json!(base64), &kind), "{path}");
        assert_eq!(result.get("body"), None, "{path}");
    }
    assert_eq!(report.result("/zip")["headers"]["content-encoding"], "gzip");
    for path in ["/empty", "/gone"] {
        assert_eq!(report.result(path)["body"], Value::Null, "{path}");
    }
}

#[tokio::test]
async fn a_header_that_came_more_than_once_is_a_list() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let mut agent = hedgerow.ask_fan_out(&[], calls([get("a", upstream.url("/"))]).to_string()).await;
    let fields = [
        ("Set-Cookie", "a=1; Expires=Wed, 21 Oct 2026 07:28:00 GMT"),
        ("Set-Cookie", "b=2"),
        ("X-One", "only"),
        ("Connection", "x-hop"),
        ("X-Hop", "1"),
    ];
    upstream.next().await.respond(200, &fields, "").await;
    let report = Report::of(&agent.read_response_to("POST").await);
    let headers = &report.result("a")["headers"];
    assert_eq!(headers["set-cookie"], json!(["a=1; Expires=Wed, 21 Oct 2026 07:28:00 GMT", "b=2"]));
    assert_eq!((&headers["x-one"], headers.get("x-hop")), (&json!("only"), None));
}

/// An answer that says that there is nothing is an answer; one that says that there is no answer is none.
#[tokio::test]
async fn a_404_is_a_result_and_a_503_is_missing() {
    let upstream = Upstream::answering(|seen| {
        let status = seen.path()[1..].parse().expect("the path is a status");
        Reply::status(status)
            .body("its own words")
            .header("Location", "/elsewhere")
            .header("Retry-After", "7")
    })
    .await;
    let upstreams = [
        named("tool", upstream.address(), BARE),
        named(
            "shared",
            upstream.address().to_string().replace("127.0.0.1", "localhost"),
            "breaker: off, coalesce: true",
        ),
    ];
    let hedgerow = HedgerowProcess::start(&format!("upstreams: {{ {} }}", upstreams.join(", "))).await;
    for host in ["127.0.0.1", "localhost"] {
        let url = |status: &str| upstream.url(&format!("/{status}")).replace("127.0.0.1", host);
        let list: Vec<_> = ["200", "302", "400", "401", "404", "410", "429", "500", "502", "503", "504"]
            .into_iter()
            .map(|status| get(status, url(status)))
            .collect();
        let report = run(&hedgerow, &calls(list)).await;
        assert_eq!(report.results(), ["200", "302", "400", "401", "404", "410"], "{host}");
        assert_eq!(report.missing(), ["429", "500", "502", "503", "504"], "{host}");
        for status in report.results() {
            let result = report.result(status);
            assert_eq!(result["status"].to_string(), status);
            assert_eq!(
                (&result["body"], &result["headers"]["location"]),
                (&json!("its own words"), &json!("/elsewhere"))
            );
        }
        for status in report.missing() {
            assert_eq!(report.why(status), "upstream_status");
            assert_eq!(report.0["missing"][status]["status"].to_string(), status);
            assert_eq!(report.0["missing"][status]["retry_after_ms"], 7000);
        }
        assert!(!report.is_complete());
        let warning = "Warning: 429, 500, 502, 503, 504 unavailable (upstream status); 400 answered 400; 401 answered 401; \
             404 answered 404; 410 answered 410. Analysis based on 6/11 sources.";
        assert!(report.warning().starts_with(warning), "{}", report.warning());
    }
}

/// The host that refused took all others' results with it.
#[tokio::test]
async fn c105_a_host_that_refuses_costs_its_own_call_alone() {
    let (dead, _keeps_it_dead) = Upstream::dead();
    let upstream = Upstream::answering(|seen| Reply::ok(seen.path().to_owned())).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let list = json!([
        get("a", upstream.url("/a")),
        get("b", upstream.url("/b")),
        get("dead", format!("http://{dead}/")),
        get("c", upstream.url("/c")),
        get("d", upstream.url("/d")),
    ]);
    let report = run(&hedgerow, &calls(list)).await;
    assert_eq!((report.results(), report.missing()), (vec!["a", "b", "c", "d"], vec!["dead"]));
    for id in ["a", "b", "c", "d"] {
        assert_eq!(report.result(id)["body"], format!("/{id}"));
    }
    assert_eq!(report.why("dead"), "connect_failed");
    let warning = "Warning: dead unavailable (connect failed). Analysis based on 4/5 sources. \
                   Do not estimate what is missing.";
    assert_eq!((report.is_complete(), report.warning()), (false, warning));
    assert_eq!(report.0["counts"]["missing"], 1);
}

/// The one that hung held up the rest.
#[tokio::test]
async fn c106_what_has_come_is_answered_at_the_deadline_and_the_hung_call_is_cancelled() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let body = json!({ "deadline_ms": 2000, "calls": list(&upstream, &["a", "b", "hung", "c", "d"]) });
    let began = Instant::now();
    let mut agent = hedgerow.ask_fan_out(&[], body.to_string()).await;
    let [a, b, c, d, hung] = take(&mut upstream, ["/a", "/b", "/c", "/d", "/hung"]).await;
    for exchange in [a, b, c, d] {
        exchange.respond(200, &[], "ok").await;
    }
    let (answer, gone) = tokio::join!(agent.read_response_to("POST"), hung.gone());
    let took = began.elapsed();
    // A part of the time is kept back to deliver the answer; without a deadline of its own it had 30 s.
    assert!(took >= ms(1900) && took < ms(10_000), "{took:?}");
    assert!(gone - began >= ms(1900) && gone - began < ms(10_000), "{:?}", gone - began);
    let report = Report::of(&answer);
    assert_eq!((report.results(), report.missing()), (vec!["a", "b", "c", "d"], vec!["hung"]));
    assert_eq!(report.why("hung"), "deadline");
    assert!(report.0["elapsed_ms"].as_u64().is_some_and(|elapsed| elapsed >= 1900), "{}", report.0);
    let warning = "Warning: hung unavailable (deadline 2000 ms). Analysis based on 4/5 sources. \
                   Do not estimate what is missing.";
    assert_eq!((report.is_complete(), report.warning()), (false, warning));
    let line = hedgerow.access_log(|line| line["path"] == "/hung").await;
    assert_eq!((&line["outcome"], &line["error"]), (&json!("error"), &json!("deadline_exceeded")));
}

/// Half an answer is none, whoever ends it and whatever the policy's deadline covers.
#[tokio::test]
async fn a_body_that_does_not_come_to_its_end_is_missing() {
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/cut" => Reply::ok("0123456789").cut(5),
        _ => Reply::ok("0123456789").drip(2, ms(LATE)),
    })
    .await;
    let routes = "routes: [{ path: /head, deadline: { covers: head } }, { path: /off, deadline: off }]";
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), &format!("{BARE}, {routes}"))).await;
    let list = list(&upstream, &["cut", "stalls", "head", "off"]);
    let began = Instant::now();
    let report = run(&hedgerow, &json!({ "deadline_ms": 1500, "calls": list })).await;
    assert!(began.elapsed() < ms(LATE / 2), "{:?}", began.elapsed());
    assert_eq!(report.missing(), ["cut", "stalls", "head", "off"]);
    assert_eq!(report.why("cut"), "upstream_incomplete");
    for id in ["stalls", "head", "off"] {
        assert_eq!(report.why(id), "deadline");
    }
    upstream.until(|tally| tally.aborted == 3).await;
    // The client was there all the time.
    let metrics = hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &[TOOL]) == 4.0).await;
    assert_eq!(metrics.value("hedgerow_requests_total", &[TOOL, ("outcome", "client_left")]), 0.0);
}

/// An empty list of results looks like a success to a model that is not told otherwise.
#[tokio::test]
async fn c107_when_all_are_down_each_is_missing_with_its_reason() {
    let (dead, _keeps_it_dead) = Upstream::dead();
    let upstream = Upstream::answering(|_| Reply::close()).await;
    let dns = Dns::start(&[("down.test", Answer::addresses(&["127.0.0.1"]))]).await;
    let policy = format!("dns: {{ servers: [\"{}\"] }}\ndefaults: {{ {BARE} }}", dns.address());
    let hedgerow = HedgerowProcess::start(&policy).await;
    let list = json!([
        get("refused", format!("http://down.test:{}/", dead.port())),
        get("unknown", "http://nowhere.test/"),
        get("cut", upstream.url("/")),
    ]);
    let report = run(&hedgerow, &calls(list)).await;
    assert_eq!((report.results(), report.missing()), (vec![], vec!["refused", "unknown", "cut"]));
    for (id, why) in [("refused", "connect_failed"), ("unknown", "dns_failed"), ("cut", "upstream_reset")] {
        assert_eq!(report.why(id), why);
    }
    assert!(!report.is_complete());
    let warning = "Warning: refused unavailable (connect failed); unknown unavailable (dns failed); \
                   cut unavailable (upstream reset). Analysis based on 0/3 sources. Do not estimate what is missing.";
    assert_eq!(report.warning(), warning);
    // Addresses are for the log alone.
    let message = report.0["missing"]["refused"]["message"].as_str().unwrap();
    assert!(message.contains("down.test") && !message.contains("127.0.0.1"), "{message}");
}

#[tokio::test]
async fn an_https_url_leaves_in_tls_without_interception_or_any_policy_for_it() {
    let pki = Pki::new();
    let dns = Dns::start(&[("a.test", Answer::addresses(&["127.0.0.1"]))]).await;
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&["a.test"])).answering(|_| Reply::ok("in TLS")).await;
    let stranger =
        Upstream::on([127, 0, 0, 1]).tls(Pki::new().server(&["a.test"])).answering(|_| Reply::ok("")).await;
    let policy = format!(
        "dns: {{ servers: [\"{}\"] }}\ntls: {{ ca_file: \"{}\" }}",
        dns.address(),
        pki.ca_file().display()
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    let authority = format!("a.test:{}", upstream.address().port());
    let list = json!([
        get("good", format!("https://{authority}/x")),
        get("stranger", format!("https://a.test:{}/x", stranger.address().port())),
        get("clear", format!("http://{authority}/x")),
    ]);
    let report = run(&hedgerow, &calls(list)).await;
    assert_eq!(report.result("good")["body"], "in TLS");
    assert_eq!(report.why("stranger"), "certificate_invalid");
    assert_eq!(report.missing(), ["stranger", "clear"]);
    assert_eq!(upstream.requests()[0].header("host"), Some(&*authority));
    assert_eq!((upstream.count(), stranger.count()), (1, 0));
}

/// Who reads the results sees what they are worth.
#[tokio::test]
async fn a_result_says_where_it_comes_from() {
    let hedged = Upstream::answering(|seen| match seen.nth {
        1 => Reply::hang(),
        _ => Reply::ok("overtaken"),
    })
    .await;
    let kept = Upstream::answering(|_| Reply::ok("kept").header("Cache-Control", "max-age=60")).await;
    let old = Upstream::answering(|seen| match seen.nth {
        1 => Reply::ok("old").header("Cache-Control", "max-age=60").header("Age", "100"),
        _ => Reply::status(503),
    })
    .await;
    let down = Upstream::answering(|_| Reply::status(503)).await;
    let spare = Upstream::answering(|_| Reply::ok("spare")).await;
    let at = |host: &str, upstream: &Upstream| upstream.address().to_string().replace("127.0.0.1", host);
    let upstreams = [
        named(
            "hedged",
            hedged.address(),
            "hedge: { after: 50ms }, extra_load: { ratio: 100%, floor: 100/s }",
        ),
        named("kept", kept.address(), "cache: true"),
        named("old", old.address(), &format!("{BARE}, cache: true, fallback: [{{ stale: 5m }}]")),
        named("fixed", down.address(), &format!("{BARE}, fallback: [{{ degraded: {{ status: 200 }} }}]")),
        named("backed", at("localhost", &down), &format!("{BARE}, fallback: [{{ upstream: spare }}]")),
        format!("spare: {{ endpoint: \"http://{}\" }}", spare.address()),
    ];
    let hedgerow = HedgerowProcess::start(&format!("upstreams: {{ {} }}", upstreams.join(", "))).await;
    let list = json!([
        get("hedged", hedged.url("/")),
        get("kept", kept.url("/")),
        get("old", old.url("/")),
        get("fixed", down.url("/")),
        get("backed", down.url("/").replace("127.0.0.1", "localhost")),
    ]);
    let report = run(&hedgerow, &calls(list.clone())).await;
    let sources = |report: &Report| {
        let of = |id: &str| report.result(id)["source"].as_str().expect("a word").to_owned();
        report.results().into_iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(sources(&report), ["hedge", "primary", "primary", "degraded", "backup"]);
    let again = run(&hedgerow, &calls(list)).await;
    assert_eq!(sources(&again)[1..], ["cache", "stale", "degraded", "backup"]);
    for (report, [hedge, cache, stale]) in [(&report, [1, 0, 0]), (&again, [0, 1, 1])] {
        let counts = json!({
            "calls": 5, "results": 5, "missing": 0,
            "hedge": hedge, "backup": 1, "cache": cache, "stale": stale, "degraded": 1
        });
        assert_eq!(report.0["counts"], counts);
        // All have a result, but not all of them are sources.
        assert!(report.is_complete());
    }
    assert_eq!(report.result("hedged")["body"], "overtaken");
    assert_eq!(
        again.result("kept")["headers"]["cache-status"].as_str().map(|hit| &hit[..13]),
        Some("hedgerow; hit")
    );
    assert_eq!(again.result("old")["headers"]["x-hedgerow-degraded"], "stale");
    assert_eq!(again.result("fixed")["body"]["status"], "degraded");
    assert_eq!(again.result("backed")["body"], "spare");
    let warning = "Warning: old out of date (kept answers); fixed replaced by a placeholder. \
                   Analysis based on 4/5 sources. Do not estimate what is missing.";
    assert_eq!(again.warning(), warning);
}

/// A list may name one call twice, and an upstream that is asked twice at once may be asked once.
#[tokio::test]
async fn equal_calls_share_an_answer_where_the_policy_lets_them() {
    let mut upstream = Upstream::start().await;
    let policy = format!("threads: 1\n{}", tool(upstream.address(), "hedge: off, coalesce: true"));
    let hedgerow = HedgerowProcess::start(&policy).await;
    let list = json!([get("a", upstream.url("/")), get("b", upstream.url("/"))]);
    let mut agent = hedgerow.ask_fan_out(&[], calls(list).to_string()).await;
    let exchange = upstream.next().await;
    hedgerow.until_in_flight(3).await;
    exchange.respond(200, &[], "one").await;
    let report = Report::of(&agent.read_response_to("POST").await);
    for (id, source) in [("a", "primary"), ("b", "collapsed")] {
        assert_eq!(
            (&report.result(id)["source"], &report.result(id)["body"]),
            (&json!(source), &json!("one"))
        );
    }
    assert_eq!(upstream.count(), 1);
}

#[tokio::test]
async fn a_calls_own_backup_is_asked_when_it_has_failed() {
    let (dead, _keeps_it_dead) = Upstream::dead();
    let down = Upstream::answering(|_| Reply::status(503)).await;
    let spare = Upstream::answering(|seen| match seen.path() {
        "/down" => Reply::status(500),
        path => Reply::ok(format!("{} {path} {:?}", seen.head.method, String::from_utf8_lossy(&seen.body))),
    })
    .await;
    let hedgerow = HedgerowProcess::start(&format!("defaults: {{ {BARE} }}")).await;
    let dead = format!("http://{dead}/");
    let list = json!([
        { "id": "status", "url": down.url("/a"), "backup": spare.url("/a?x") },
        { "id": "refused", "url": &dead, "backup": spare.url("/b") },
        { "id": "posted", "url": down.url("/c"), "method": "POST", "body": [1], "backup": spare.url("/c") },
        { "id": "unneeded", "url": spare.url("/d"), "backup": spare.url("/never") },
        { "id": "both", "url": down.url("/e"), "backup": &dead },
        { "id": "both-ways", "url": &dead, "backup": spare.url("/down") },
        { "id": "own", "url": down.url("/f"), "backup": hedgerow_url(&hedgerow) },
    ]);
    let report = run(&hedgerow, &calls(list)).await;
    assert_eq!(report.results(), ["status", "refused", "posted", "unneeded"]);
    for (id, source, body) in [
        ("status", "backup", "GET /a \"\""),
        ("refused", "backup", "GET /b \"\""),
        ("posted", "backup", "POST /c \"[1]\""),
        ("unneeded", "primary", "GET /d \"\""),
    ] {
        assert_eq!(
            (&report.result(id)["source"], &report.result(id)["body"]),
            (&json!(source), &json!(body))
        );
    }
    // When there is no result, the call's own place says why.
    for (id, why) in
        [("both", "upstream_status"), ("both-ways", "connect_failed"), ("own", "upstream_status")]
    {
        assert_eq!(report.why(id), why);
    }
    assert_eq!((&report.0["counts"]["backup"], spare.count_of("/never")), (&json!(3), 0));
}

fn hedgerow_url(hedgerow: &HedgerowProcess) -> String {
    format!("http://{}/", hedgerow.proxy)
}

/// A call that hangs until the deadline would leave no time for another.
#[tokio::test]
async fn a_calls_own_backup_is_asked_when_half_of_the_time_is_gone() {
    let (mut hung, mut spare) = (Upstream::start().await, Upstream::start().await);
    let hedgerow = HedgerowProcess::start(&format!("defaults: {{ {BARE} }}")).await;
    let list = json!([{ "id": "a", "url": hung.url("/"), "backup": spare.url("/") }]);
    let body = json!({ "deadline_ms": 4000, "calls": list }).to_string();
    for is_backup_better in [true, false] {
        let began = Instant::now();
        let mut agent = hedgerow.ask_fan_out(&[], &body).await;
        let (first, second) = (hung.next().await, spare.next().await);
        // Half of what is left when the reserve has been taken off.
        assert!(second.at - began >= ms(1900), "{:?}", second.at - began);
        let (winner, loser) = if is_backup_better { (second, first) } else { (first, second) };
        winner.respond(200, &[], "won").await;
        loser.gone().await;
        let report = Report::of(&agent.read_response_to("POST").await);
        let source = if is_backup_better { "backup" } else { "primary" };
        assert_eq!(
            (&report.result("a")["source"], &report.result("a")["body"]),
            (&json!(source), &json!("won"))
        );
    }
    // Nobody had left whom the loser was for.
    let not_awaited = [("outcome", "not_awaited")];
    hedgerow.until_metrics(|metrics| metrics.value("hedgerow_requests_total", &not_awaited) == 2.0).await;
    assert_eq!(hedgerow.metrics().await.value("hedgerow_requests_total", &[("outcome", "client_left")]), 0.0);
}

/// What may not happen twice is asked for elsewhere only when it has failed, and not when there is no time left.
#[tokio::test]
async fn a_post_that_hangs_is_not_sent_to_its_backup() {
    let hung = Upstream::answering(|_| Reply::hang()).await;
    let spare = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&format!("defaults: {{ {BARE} }}")).await;
    // Connections that lie ready make sending a matter of no time.
    let ready: Vec<_> = (0..20).map(|at| get(&at.to_string(), spare.url("/ready"))).collect();
    assert!(run(&hedgerow, &calls(ready)).await.is_complete());
    let posts: Vec<_> = (0..20)
        .map(|at| {
            json!({ "id": at.to_string(), "url": hung.url("/"), "method": "POST", "backup": spare.url("/twice") })
        })
        .collect();
    let report = run(&hedgerow, &json!({ "deadline_ms": 1500, "calls": posts })).await;
    assert_eq!((report.missing().len(), report.why("0")), (20, "deadline"));
    hung.until(|tally| tally.aborted == 20).await;
    assert!(run(&hedgerow, &calls([get("after", spare.url("/after"))])).await.is_complete());
    assert_eq!(spare.count_of("/twice"), 0);
}

/// Late calls of a fan-out are late calls: who hangs is found out, though each of its callers stops waiting first.
#[tokio::test]
async fn an_upstream_that_hangs_through_fan_outs_opens_its_breaker() {
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/good" => Reply::ok(""),
        _ => Reply::hang(),
    })
    .await;
    let good = upstream.address().to_string().replace("127.0.0.1", "localhost");
    let breaker = "hedge: off, breaker: { consecutive_failures: 3, fair_chance: 100ms, open_for: 60s }";
    let policy = format!(
        "upstreams: {{ {}, {} }}",
        named("tool", upstream.address(), breaker),
        named("good", good, breaker)
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    let list = json!([
        get("good", upstream.url("/good").replace("127.0.0.1", "localhost")),
        get("a", upstream.url("/a")),
        get("b", upstream.url("/b")),
        get("c", upstream.url("/c")),
    ]);
    let report = run(&hedgerow, &json!({ "deadline_ms": 1500, "calls": &list })).await;
    assert_eq!((report.results(), report.why("a")), (vec!["good"], "deadline"));
    upstream.until(|tally| tally.aborted == 3).await;

    let began = Instant::now();
    let report = run(&hedgerow, &calls(list)).await;
    assert!(began.elapsed() < ms(LATE / 2), "refused at once: {:?}", began.elapsed());
    assert_eq!((report.results(), report.missing()), (vec!["good"], vec!["a", "b", "c"]));
    for id in report.missing() {
        assert_eq!(report.why(id), "circuit_open");
        let wait = report.0["missing"][id]["retry_after_ms"].as_u64().expect("it is known when");
        assert!((20_000..=70_000).contains(&wait), "{wait}");
    }
    assert!(report.warning().contains("a, b, c unavailable (circuit open)"), "{}", report.warning());
    assert_eq!(["/a", "/b", "/c"].map(|path| upstream.count_of(path)), [1, 1, 1]);
}

/// What is not waited for any more has done nothing wrong.
#[tokio::test]
async fn enough_results_end_the_wait_and_blame_nobody() {
    let mut upstream = Upstream::start().await;
    let stages = "hedge: off, breaker: { consecutive_failures: 1, fair_chance: 0s }";
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    for grace in [0, 400] {
        let list = list(&upstream, &["hung", "a", "stalls", "b"]);
        let body = json!({ "deadline_ms": LATE, "min_results": 2, "grace_ms": grace, "calls": list });
        let mut agent = hedgerow.ask_fan_out(&[], body.to_string()).await;
        let [hung, a, mut stalls, b] = take(&mut upstream, ["/hung", "/a", "/stalls", "/b"]).await;
        stalls.start_chunks(200, &[]).await;
        stalls.chunk("some").await;
        let began = Instant::now();
        a.respond(200, &[], "").await;
        b.respond(404, &[], "").await;
        let report = Report::of(&agent.read_response_to("POST").await);
        assert!(began.elapsed() >= ms(grace) && began.elapsed() < ms(LATE / 2), "{:?}", began.elapsed());
        assert_eq!((report.results(), report.missing()), (vec!["a", "b"], vec!["hung", "stalls"]));
        assert_eq!((report.why("hung"), report.why("stalls")), ("not_awaited", "not_awaited"));
        assert!(report.warning().contains("hung, stalls unavailable (not awaited)"), "{}", report.warning());
        assert!(!report.is_complete());
        hung.gone().await;
        stalls.gone().await;
    }
    let not_awaited = [TOOL, ("outcome", "not_awaited")];
    let metrics = hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &not_awaited) == 4.0).await;
    assert_eq!(metrics.value("hedgerow_requests_total", &[TOOL, ("outcome", "client_left")]), 0.0);
    assert_eq!(metrics.value("hedgerow_breaker_transitions_total", &[TOOL]), 0.0);
    assert_eq!(counted(&metrics, "calls", "not_awaited"), 4.0);
}

/// What comes within the grace is taken along, and when nothing is left to wait for nobody waits.
#[tokio::test]
async fn results_that_come_within_the_grace_are_taken_along() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let list = list(&upstream, &["a", "b"]);
    let body = json!({ "deadline_ms": LATE, "min_results": 1, "grace_ms": LATE, "calls": list });
    let began = Instant::now();
    let mut agent = hedgerow.ask_fan_out(&[], body.to_string()).await;
    let [a, b] = take(&mut upstream, ["/a", "/b"]).await;
    b.respond(200, &[], "").await;
    ended(&hedgerow, "/b").await;
    a.respond(200, &[], "").await;
    let report = Report::of(&agent.read_response_to("POST").await);
    assert_eq!((report.results(), report.is_complete()), (vec!["a", "b"], true));
    assert!(began.elapsed() < ms(LATE / 2), "{:?}", began.elapsed());
}

/// A grace that is longer than the time that is left ends with it: then the rest is late, and judged as late.
#[tokio::test]
async fn a_grace_beyond_the_deadline_ends_with_it() {
    let hung = Upstream::answering(|_| Reply::hang()).await;
    let good = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&tool(
        hung.address(),
        "hedge: off, coalesce: true, breaker: { fair_chance: 100ms }",
    ))
    .await;
    let ids: Vec<_> = (0..80).map(|at| at.to_string()).collect();
    let mut list: Vec<_> = ids.iter().map(|id| get(id, hung.url(&format!("/{id}")))).collect();
    list.push(get("good", good.url("/")));
    let body = json!({ "deadline_ms": 2000, "min_results": 1, "grace_ms": LATE, "calls": list });
    let report = run(&hedgerow, &body).await;
    assert_eq!((report.results(), report.missing().len()), (vec!["good"], 80));
    let reasons: Vec<_> = ids.iter().map(|id| report.why(id)).collect();
    assert_eq!(reasons, ["deadline"; 80]);
    let open = [TOOL, ("state", "open")];
    hedgerow.until_metrics(|metrics| metrics.value("hedgerow_breaker_state", &open) == 1.0).await;
}

/// A request that nobody is to wait for is not sent any more.
#[tokio::test]
async fn no_call_begins_when_enough_have_come() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    for round in 0..20 {
        let list: Vec<_> =
            (0..5).map(|at| get(&at.to_string(), upstream.url(&format!("/{round}/{at}")))).collect();
        let body = json!({ "deadline_ms": LATE, "max_concurrent": 1, "min_results": 2, "calls": list });
        let report = run(&hedgerow, &body).await;
        assert_eq!((report.results(), report.missing()), (vec!["0", "1"], vec!["2", "3", "4"]));
        assert_eq!(report.why("4"), "not_awaited");
    }
    assert!(run(&hedgerow, &calls([get("after", upstream.url("/after"))])).await.is_complete());
    assert_eq!(upstream.count(), 41, "{:?}", upstream.requests());
}

#[tokio::test]
async fn an_optional_call_makes_nothing_incomplete_and_gets_its_grace() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let mut list = list(&upstream, &["a", "down", "quick", "hung"]);
    for at in 1..4 {
        list[at]["optional"] = json!(true);
    }
    let with_grace = |list: Value| {
        let mut body = calls(list);
        body["grace_ms"] = json!(0);
        body.to_string()
    };
    let began = Instant::now();
    let mut agent = hedgerow.ask_fan_out(&[], with_grace(list.clone())).await;
    let [a, down, quick, hung] = take(&mut upstream, ["/a", "/down", "/quick", "/hung"]).await;
    down.respond(503, &[], "").await;
    quick.respond(200, &[], "").await;
    ended(&hedgerow, "/down").await;
    ended(&hedgerow, "/quick").await;
    a.respond(200, &[], "").await;
    let report = Report::of(&agent.read_response_to("POST").await);
    hung.gone().await;
    assert!(began.elapsed() < ms(LATE / 2), "{:?}", began.elapsed());
    assert_eq!((report.results(), report.is_complete()), (vec!["a", "quick"], true));
    assert_eq!((report.why("down"), report.why("hung")), ("upstream_status", "not_awaited"));
    // That it is complete without them is no reason to be silent about them.
    let warning = "Warning: hung unavailable (not awaited); down unavailable (upstream status). \
                   Analysis based on 2/4 sources.";
    assert!(report.warning().starts_with(warning), "{}", report.warning());

    // Without the one that is not optional it is not complete.
    let mut agent = hedgerow.ask_fan_out(&[], with_grace(list)).await;
    let exchanges = take(&mut upstream, ["/quick", "/hung", "/down", "/a"]).await;
    for (exchange, status) in exchanges.into_iter().zip([200, 200, 200, 503]) {
        exchange.respond(status, &[], "").await;
    }
    let report = Report::of(&agent.read_response_to("POST").await);
    assert_eq!((report.is_complete(), report.why("a")), (false, "upstream_status"));
}

/// With nothing else to wait for they are what is waited for.
#[tokio::test]
async fn optional_calls_alone_are_waited_for_until_the_deadline() {
    let upstream =
        Upstream::answering(by_path(&[("/a", Reply::ok("a").after(ms(200))), ("/hung", Reply::hang())]))
            .await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let optional = |id: &str| json!({ "id": id, "url": upstream.url(&format!("/{id}")), "optional": true });
    let body = json!({ "deadline_ms": 2000, "calls": [optional("a"), optional("hung")] });
    let report = run(&hedgerow, &body).await;
    assert_eq!((report.results(), report.why("hung"), report.is_complete()), (vec!["a"], "deadline", true));
    let report = run(&hedgerow, &calls([optional("a")])).await;
    assert_eq!(report.results(), ["a"]);
}

#[tokio::test]
async fn the_upstream_never_sees_more_calls_at_once_than_was_said() {
    let upstream = Upstream::answering(|_| Reply::ok("").after(ms(20))).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let list: Vec<_> = (0..20).map(|at| get(&at.to_string(), upstream.url("/"))).collect();
    for most in [1, 3] {
        let before = upstream.count();
        let body = json!({ "deadline_ms": LATE, "max_concurrent": most, "calls": &list });
        let report = run(&hedgerow, &body).await;
        assert_eq!((report.results().len(), upstream.count() - before), (20, 20));
        assert!(upstream.max_in_flight() <= most, "{}", upstream.max_in_flight());
    }
}

/// Those in line are as late as those that were sent.
#[tokio::test]
async fn the_wait_for_a_place_counts() {
    let upstream = Upstream::answering(|_| Reply::hang()).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let list: Vec<_> = (0..4).map(|at| get(&at.to_string(), upstream.url("/"))).collect();
    let body = json!({ "deadline_ms": 1500, "max_concurrent": 2, "calls": list });
    let report = run(&hedgerow, &body).await;
    assert_eq!(report.missing(), ["0", "1", "2", "3"]);
    for (id, has_begun) in [("0", true), ("1", true), ("2", false), ("3", false)] {
        assert_eq!(report.why(id), "deadline");
        let message = report.0["missing"][id]["message"].as_str().unwrap();
        assert_eq!(message.contains("not begun"), !has_begun, "{message}");
    }
    assert_eq!(upstream.count(), 2);
}

#[tokio::test]
async fn no_time_at_all_is_a_deadline_too() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let list = json!([get("a", upstream.url("/")), get("b", "nothing"), get("c", upstream.url("/"))]);
    let report = run(&hedgerow, &json!({ "deadline_ms": 1e-9, "calls": list })).await;
    assert_eq!(["a", "b", "c"].map(|id| report.why(id)), ["deadline", "invalid_request", "deadline"]);
    assert!(report.warning().contains("a, c unavailable (deadline 0 ms)"), "{}", report.warning());
    assert!(run(&hedgerow, &calls([get("after", upstream.url("/after"))])).await.is_complete());
    assert_eq!(upstream.count(), 1);
}

/// One call's own bound ends that call alone, and gives its place to the next.
#[tokio::test]
async fn timeout_ms_bounds_one_call_from_its_own_start() {
    let upstream =
        Upstream::answering(by_path(&[("/hung", Reply::hang()), ("/a", Reply::ok("").after(ms(300)))])).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let bounded = |id: &str, path: &str, timeout: f64| json!({ "id": id, "url": upstream.url(path), "timeout_ms": timeout });
    let list = json!([
        bounded("first", "/hung", 700.0),
        bounded("second", "/hung", 700.5),
        bounded("third", "/a", 10_000.0),
        get("fourth", upstream.url("/a")),
    ]);
    let began = Instant::now();
    let report = run(&hedgerow, &json!({ "deadline_ms": LATE, "max_concurrent": 1, "calls": list })).await;
    assert!(began.elapsed() >= ms(1400), "{:?}", began.elapsed());
    assert!(began.elapsed() < ms(LATE / 2), "{:?}", began.elapsed());
    assert_eq!((report.results(), report.missing()), (vec!["third", "fourth"], vec!["first", "second"]));
    for id in report.missing() {
        assert_eq!(report.why(id), "deadline_exceeded");
        assert!(report.0["missing"][id]["message"].as_str().unwrap().contains("timeout_ms"), "{}", report.0);
    }
}

#[tokio::test]
async fn the_earlier_of_both_deadlines_counts() {
    let upstream = Upstream::answering(|_| Reply::hang()).await;
    let policy = format!("defaults: {{ {BARE}, deadline: {{ default: 15s, max: 20s }} }}");
    let hedgerow = HedgerowProcess::start(&policy).await;
    let list = json!([get("a", upstream.url("/"))]);
    let ask = async |field: Option<u64>, asked: Option<u64>| {
        let (now, wall) = (Instant::now(), time::OffsetDateTime::now_utc());
        let field = field.map(|left| deadline_in(ms(left)));
        let headers: Vec<_> = field.iter().map(|field| ("x-request-deadline", field.as_str())).collect();
        let body = json!({ "deadline_ms": asked, "calls": &list }).to_string();
        let report = Report::of(&hedgerow.fan_out_with(&headers, body).await);
        let took = now.elapsed();
        assert!(took >= ms(850) && took < ms(8000), "{field:?}, {asked:?}: {took:?}");
        assert_eq!(report.why("a"), "deadline");
        let told =
            upstream.requests().last().expect("it was sent").header("x-request-deadline").unwrap().to_owned();
        (field, told, wall, report)
    };
    // The caller's own instant goes on in the caller's own spelling.
    for asked in [None, Some(12_000)] {
        let (field, told, _, report) = ask(Some(1000), asked).await;
        assert_eq!(Some(told), field);
        assert!(report.warning().contains("unavailable (deadline "), "{}", report.warning());
    }
    for field in [None, Some(12_000)] {
        let (_, told, wall, report) = ask(field, Some(1000)).await;
        let format = &time::format_description::well_known::Rfc3339;
        let told = time::OffsetDateTime::parse(&told, format).expect("RFC 3339");
        assert!(told >= wall + ms(999) && told < wall + ms(8000), "{told} from {wall}");
        assert!(report.warning().contains("unavailable (deadline 1000 ms)"), "{}", report.warning());
    }
}

/// The policy's default is for those that have no deadline: what is named for the whole is named for its parts.
#[tokio::test]
async fn a_named_deadline_takes_the_place_of_the_policys_default_and_is_bounded_by_its_maximum() {
    let upstream = Upstream::answering(|_| Reply::hang()).await;
    let own = upstream.address().to_string().replace("127.0.0.1", "localhost");
    let policy = format!(
        "defaults: {{ {BARE}, deadline: {{ default: 900ms, max: 2s }} }}\nupstreams: {{ {}, {} }}",
        named("plain", upstream.address(), ""),
        named("quick", own, "deadline: { default: 500ms, max: 1s }")
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    let list = json!([
        get("plain", upstream.url("/")),
        get("quick", upstream.url("/").replace("127.0.0.1", "localhost")),
    ]);
    for (body, bound, [plain, quick]) in [
        (json!({ "calls": &list }), 900, ["the fan-out's deadline", "upstreams.quick.deadline.default"]),
        (
            json!({ "deadline_ms": null, "calls": &list }),
            900,
            ["the fan-out's deadline", "upstreams.quick.deadline.default"],
        ),
        (
            json!({ "deadline_ms": 60_000, "calls": &list }),
            2000,
            ["the fan-out's deadline", "upstreams.quick.deadline.max"],
        ),
    ] {
        let began = Instant::now();
        let report = run(&hedgerow, &body).await;
        let took = began.elapsed();
        assert!(took >= ms(bound - 100) && took < ms(12_000), "{took:?}");
        assert!(report.warning().contains(&format!("(deadline {bound} ms)")), "{}", report.warning());
        for (id, why, source) in [("plain", "deadline", plain), ("quick", "deadline_exceeded", quick)] {
            assert_eq!(report.why(id), why);
            let message = report.0["missing"][id]["message"].as_str().unwrap();
            assert!(message.starts_with(&format!("{source} struck")), "{message}");
        }
    }
}

#[tokio::test]
async fn a_deadline_that_has_passed_is_a_504_and_the_upstream_sees_nothing() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let body = calls([get("a", upstream.url("/"))]).to_string();
    let past = (time::OffsetDateTime::now_utc() - ms(2000)).unix_timestamp().to_string();
    for accept in ["application/json", "text/event-stream"] {
        let headers = [("x-request-deadline", past.as_str()), ("Accept", accept)];
        let answer = hedgerow.fan_out_with(&headers, &body).await;
        assert_eq!(answer.header("content-type"), Some("application/problem+json"));
        let problem = answer.json();
        assert_eq!((answer.status, &problem["error"]), (504, &json!("deadline_exceeded")));
        assert!(problem["skew_ms"].as_u64().is_some_and(|skew| skew >= 1000), "{problem}");
    }
    let answer = hedgerow.fan_out_with(&[("x-request-deadline", "soon")], &body).await;
    assert_eq!((answer.status, &answer.json()["error"]), (400, &json!("invalid_deadline")));
    assert_eq!(upstream.connections(), 0);
}

#[tokio::test]
async fn a_body_that_is_longer_than_wanted_is_cut_and_says_so() {
    let replies = [
        ("/text", Reply::ok("12345€€").header("Content-Type", "text/plain")),
        ("/json", Reply::ok(r#"{"a":1}"#).header("Content-Type", "application/json")),
        ("/bytes", Reply::ok(pattern(0, 100_000)).header("Content-Type", "image/png")),
        (
            "/endless",
            Reply::ok("x".repeat(1 << 20)).drip(1 << 10, ms(5)).header("Content-Type", "text/plain"),
        ),
        ("/chunks", Reply::ok("12345678").drip(4, ms(1)).header("Content-Type", "text/plain")),
    ];
    let upstream = Upstream::answering(by_path(&replies)).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let cases = [
        ("/text", 11, json!({ "body": "12345€€" }), false),
        ("/text", 10, json!({ "body": "12345€" }), true),
        ("/text", 8, json!({ "body": "12345€" }), true),
        ("/text", 7, json!({ "body": "12345" }), true),
        ("/text", 5, json!({ "body": "12345" }), true),
        ("/text", 0, json!({ "body": null }), true),
        ("/json", 7, json!({ "body": { "a": 1 } }), false),
        // A part of JSON is no JSON, whatever it looks like.
        ("/json", 6, json!({ "body": "{\"a\":1" }), true),
        ("/bytes", 4, json!({ "body_base64": "AAECAw==", "content_type": "image/png" }), true),
        ("/endless", 3, json!({ "body": "xxx" }), true),
        ("/chunks", 8, json!({ "body": "12345678" }), false),
        ("/chunks", 7, json!({ "body": "1234567" }), true),
        ("/chunks", 6, json!({ "body": "123456" }), true),
    ];
    let list: Vec<_> = cases
        .iter()
        .enumerate()
        .map(|(at, (path, most, ..))| {
            json!({ "id": at.to_string(), "url": upstream.url(path), "max_body_bytes": most })
        })
        .collect();
    let report = run(&hedgerow, &calls(list)).await;
    for (at, (path, most, content, is_cut)) in cases.iter().enumerate() {
        let result = report.result(&at.to_string());
        assert_eq!(result.get("truncated"), is_cut.then_some(&json!(true)), "{path} up to {most}");
        for key in ["body", "body_base64", "content_type"] {
            assert_eq!(result.get(key), content.get(key), "{path} up to {most}");
        }
    }
    // What nobody wants is not waited for: it would take five seconds.
    assert!(report.is_complete());
    let booked = [TOOL, ("outcome", "answered"), ("code", "200")];
    let metrics = hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &booked) == 13.0).await;
    assert_eq!(metrics.value("hedgerow_requests_total", &[TOOL]), 13.0);
    upstream.until(|tally| tally.in_flight == 0).await;
}

#[tokio::test]
async fn an_answer_of_any_size_is_whole() {
    let upstream = Upstream::answering(|seen| {
        Reply::ok(vec![seen.path().as_bytes()[1]; 300 << 10]).header("Content-Type", "text/plain")
    })
    .await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let ids = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let list: Vec<_> = ids.iter().map(|id| get(id, upstream.url(&format!("/{id}")))).collect();
    let body = calls(list).to_string();
    let mut agent = hedgerow.agent().await;
    for round in ["one", "two"] {
        agent.send(request(hedgerow.proxy, &[("x-request-id", round)], &body)).await;
        let answer = agent.read_response_to("POST").await;
        assert_eq!(answer.framing, Framing::Chunked);
        let report = Report::of(&answer);
        assert_eq!(report.results(), ids);
        for id in ids {
            let body = report.result(id)["body"].as_str().unwrap();
            assert!(body.len() == 300 << 10 && body.bytes().all(|byte| byte == id.as_bytes()[0]), "{id}");
        }
        let line = hedgerow.access_log(|line| line["request_id"] == round).await;
        assert_eq!((&line["outcome"], &line["bytes_out"]), (&json!("answered"), &json!(answer.body.len())));
    }
}

#[tokio::test]
async fn the_words_for_the_model_come_in_the_language_that_is_asked_for() {
    let (dead, _keeps_it_dead) = Upstream::dead();
    let upstream = Upstream::answering(by_path(&[("/a", Reply::ok("a")), ("/hung", Reply::hang())])).await;
    let hedgerow = HedgerowProcess::start(&format!("defaults: {{ {BARE} }}")).await;
    let mut body = json!({ "deadline_ms": 1500, "system_prompt": true, "calls": [
        get("甲", upstream.url("/hung")),
        get("乙", format!("http://{dead}/")),
        get("丙", upstream.url("/a")),
    ] });
    let chinese = "警告：甲 数据缺失（截止时间 1500 毫秒）；乙 数据缺失（connect_failed）。\
                   本次分析基于 1/3 个数据源，请勿估算缺失的数据。";
    let english = "Warning: 甲 unavailable (deadline 1500 ms); 乙 unavailable (connect failed). \
                   Analysis based on 1/3 sources. Do not estimate what is missing.";
    let cases = [
        (Some("zh-CN, en;q=0.5"), "zh-Hans", chinese, "工具结果"),
        (Some("en, zh;q=0.9"), "en", english, "Tool results"),
        (Some("fr"), "en", english, "Tool results"),
        (None, "en", english, "Tool results"),
    ];
    let answers = cases.iter().map(async |(asked, ..)| {
        let headers: Vec<_> = asked.iter().map(|asked| ("Accept-Language", *asked)).collect();
        hedgerow.fan_out_with(&headers, body.to_string()).await
    });
    for (answer, (asked, tag, warning, prompt)) in join_all(answers).await.iter().zip(cases) {
        assert_eq!(answer.header("content-language"), Some(tag), "{asked:?}");
        let report = Report::of(answer);
        assert_eq!(report.warning(), warning);
        let told = report.0["system_prompt"].as_str().expect("a paragraph");
        assert!(told.starts_with(prompt) && told.contains("`missing`"), "{told}");
    }
    body["system_prompt"] = json!(false);
    assert_eq!(run(&hedgerow, &body).await.0.get("system_prompt"), None);
}

#[tokio::test]
async fn fan_outs_and_their_calls_are_counted() {
    let mut upstream = Upstream::start().await;
    let (dead, _keeps_it_dead) = Upstream::dead();
    let hedgerow = HedgerowProcess::start(&format!("defaults: {{ {BARE} }}")).await;
    let ok = |id: &str| get(id, upstream.url("/ok"));
    let refused = |id: &str| get(id, format!("http://{dead}/"));
    let serve = async |upstream: &mut Upstream, status: u16| {
        upstream.next().await.respond(status, &[], "").await;
    };
    let body = calls(json!([ok("a")]));
    tokio::join!(hedgerow.fan_out(&body), serve(&mut upstream, 200));
    let body = calls(json!([get("a", upstream.url("/")), refused("b"), refused("c")]));
    tokio::join!(hedgerow.fan_out(&body), serve(&mut upstream, 200));
    let body = calls(json!([get("a", upstream.url("/")), refused("b")]));
    tokio::join!(hedgerow.fan_out(&body), serve(&mut upstream, 503));
    assert_eq!(hedgerow.fan_out(&json!({})).await.status, 400);
    let agent = hedgerow.ask_fan_out(&[], calls([get("a", upstream.url("/"))]).to_string()).await;
    let exchange = upstream.next().await;
    drop(agent);
    exchange.gone().await;
    let body = json!({ "deadline_ms": 1500, "calls": [get("a", upstream.url("/"))] });
    let late = async {
        upstream.next().await.gone().await;
    };
    tokio::join!(hedgerow.fan_out(&body), late);

    let metrics = hedgerow.until_metrics(|metrics| counted(metrics, "requests", "client_left") == 1.0).await;
    for (result, count) in [("complete", 1.0), ("partial", 1.0), ("empty", 2.0), ("refused", 1.0)] {
        assert_eq!(counted(&metrics, "requests", result), count, "{result}");
    }
    for (result, count) in
        [("primary", 2.0), ("error", 3.0), ("upstream_status", 1.0), ("deadline", 1.0), ("backup", 0.0)]
    {
        assert_eq!(counted(&metrics, "calls", result), count, "{result}");
    }
    assert_eq!(metrics.value("hedgerow_fanout_calls_total", &[]), 7.0);
    // What was refused took no time worth telling.
    assert_eq!(metrics.value("hedgerow_fanout_duration_seconds_count", &[]), 5.0);
    // The calls are requests like any other; the fan-out itself is none to any upstream.
    assert_eq!(metrics.value("hedgerow_requests_total", &[("code", "200")]), 2.0);
    assert_eq!(metrics.value("hedgerow_requests_total", &[]), 8.0);
}

#[tokio::test]
async fn the_access_log_tells_of_the_fan_out_and_of_each_of_its_calls() {
    let upstream = Upstream::answering(|_| Reply::ok("twelve bytes")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let list = json!([
        { "id": "secret-id", "url": upstream.url("/search?q=private"), "headers": { "Authorization": "hush" } },
        { "id": "b", "url": "nothing" },
        { "id": "c", "url": upstream.url("/c"), "method": "DELETE" },
    ]);
    let answer = hedgerow.fan_out_with(&[("x-request-id", "f-7")], calls(list).to_string()).await;
    assert_eq!(answer.status, 200);
    let line = hedgerow.access_log(|line| line["request_id"] == "f-7").await;
    for (key, value) in [
        ("method", json!("POST")),
        ("path", json!(PATH)),
        ("status", json!(200)),
        ("outcome", json!("answered")),
        ("bytes_out", json!(answer.body.len())),
        ("deadline_ms", json!(LATE as f64 - 50.0)),
        ("upstream", Value::Null),
        ("host", Value::Null),
        ("source", Value::Null),
    ] {
        assert_eq!(line[key], value, "{key}");
    }
    for (id, method, path) in [("f-7.0", "GET", "/search"), ("f-7.2", "DELETE", "/c")] {
        let line = hedgerow.access_log(|line| line["request_id"] == id).await;
        assert_eq!((&line["method"], &line["path"]), (&json!(method), &json!(path)));
        assert_eq!(
            (&line["upstream"], &line["status"], &line["source"]),
            (&json!("tool"), &json!(200), &json!("primary"))
        );
    }
    let refused = hedgerow.fan_out_with(&[("x-request-id", "f-8")], "no").await;
    assert_eq!((refused.status, &refused.json()["request_id"]), (400, &json!("f-8")));
    let line = hedgerow.access_log(|line| line["request_id"] == "f-8").await;
    assert_eq!(
        (&line["status"], &line["error"], &line["path"]),
        (&json!(400), &json!("invalid_request"), &json!(PATH))
    );
    assert_eq!(hedgerow.stdout.all().len(), 4);
    let all = hedgerow.stdout.text() + &hedgerow.stderr.text();
    assert!(!all.contains("private") && !all.contains("hush") && !all.contains("secret-id"), "{all}");
}

/// The list is no way around the egress guard.
#[tokio::test]
async fn the_egress_guard_looks_at_every_call() {
    let forbidden = Upstream::on([127, 0, 0, 3]).answering(|_| Reply::ok("inside")).await;
    let upstream = Upstream::answering(|_| Reply::ok("good")).await;
    let dns = Dns::start(&[("inside.test", Answer::addresses(&["127.0.0.3"]))]).await;
    let policy = format!(
        "dns: {{ servers: [\"{}\"] }}\negress: {{ deny: [127.0.0.3/32, \"*.bad.test\"] }}\ndefaults: {{ {BARE} }}",
        dns.address()
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    let port = forbidden.address().port();
    let list = json!([
        get("address", forbidden.url("/")),
        get("mapped", format!("http://[::ffff:127.0.0.3]:{port}/")),
        get("name", format!("http://inside.test:{port}/")),
        get("named", "http://a.bad.test/"),
        get("metadata", "http://169.254.169.254/latest/meta-data/"),
        { "id": "backup", "url": upstream.url("/"), "backup": forbidden.url("/") },
        { "id": "first", "url": forbidden.url("/"), "backup": upstream.url("/") },
    ]);
    let report = run(&hedgerow, &calls(list)).await;
    assert_eq!(report.results(), ["backup", "first"]);
    assert_eq!(report.missing(), ["address", "mapped", "name", "named", "metadata"]);
    for id in report.missing() {
        assert_eq!(report.why(id), "egress_denied");
    }
    assert_eq!(report.result("first")["source"], "backup");
    assert_eq!(forbidden.connections(), 0);
}

/// A fan-out in a fan-out would be called by nobody who waits for it.
#[tokio::test]
async fn a_call_to_hedgerow_itself_is_missing() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let dns = Dns::start(&[("own.test", Answer::addresses(&["127.0.0.1"]))]).await;
    let policy = format!("dns: {{ servers: [\"{}\"] }}\ndefaults: {{ {BARE} }}", dns.address());
    let hedgerow = HedgerowProcess::start(&policy).await;
    let mut list = vec![get("other", upstream.url("/"))];
    for (name, port) in [("proxy", hedgerow.proxy.port()), ("admin", hedgerow.admin.port())] {
        for host in
            ["127.0.0.1", "localhost", "LOCALHOST", "[::1]", "127.0.0.9", "[::ffff:127.0.0.1]", "0.0.0.0"]
        {
            list.push(get(&format!("{name} {host}"), format!("http://{host}:{port}{PATH}")));
        }
    }
    let report = run(&hedgerow, &calls(list)).await;
    assert_eq!((report.results(), report.missing().len()), (vec!["other"], 14));
    for (at, id) in report.missing().into_iter().enumerate() {
        assert_eq!(report.why(id), "invalid_request", "{id}");
        let message = format!("calls[{}].url: names hedgerow itself", at + 1);
        assert_eq!(report.0["missing"][id]["message"], message, "{id}");
    }
    // A name that leads here is found out when it is looked up.
    let named = get("a", format!("http://own.test:{}/status", hedgerow.admin.port()));
    let report = run(&hedgerow, &calls([named])).await;
    assert_eq!(report.why("a"), "egress_denied");
}

/// Filters read them differently than dialers.
#[tokio::test]
async fn a_host_that_is_an_odd_number_is_no_host() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&format!("defaults: {{ {BARE} }}")).await;
    let port = upstream.address().port();
    let hosts = [
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "127.1",
        "127.0.1",
        "0177.0.0.1",
        "017700000001",
        "127.0.0.01",
        "127.0.0.0x1",
        "１２７.0.0.1",
        "127。0。0。1",
        "%31%32%37.0.0.1",
    ];
    let mut list: Vec<_> = hosts.iter().map(|host| get(host, format!("http://{host}:{port}/"))).collect();
    // What stands elsewhere in the URL makes a host no plainer.
    for tail in ["/?x=127.0.0.1", "/127.0.0.1", "/#127.0.0.1", "/://127.0.0.1/"] {
        list.push(get(tail, format!("http://127.1:{port}{tail}")));
    }
    list.push(get("plain", format!("http://127.0.0.1:{port}/")));
    let report = run(&hedgerow, &calls(list)).await;
    assert_eq!(report.results(), ["plain"], "{}", report.0);
    for (at, id) in report.missing().into_iter().enumerate() {
        assert_eq!(report.why(id), "invalid_request", "{id}");
        let message = report.0["missing"][id]["message"].as_str().unwrap();
        assert!(message.starts_with(&format!("calls[{at}].url: ")), "{message}");
    }
    assert_eq!(upstream.count(), 1);
}

#[tokio::test]
async fn the_calls_join_the_trace_of_their_fan_out_unless_they_have_their_own() {
    const OURS: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    const THEIRS: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let list = json!([
        get("joins", upstream.url("/joins")),
        { "id": "own", "url": upstream.url("/own"), "headers": { "Traceparent": THEIRS } },
        { "id": "both", "url": upstream.url("/both"), "headers": { "traceparent": THEIRS, "tracestate": "z=9" } },
    ]);
    let headers = [("traceparent", OURS), ("tracestate", "a=1"), ("tracestate", "b=2"), ("baggage", "k=v")];
    assert_eq!(hedgerow.fan_out_with(&headers, calls(list).to_string()).await.status, 200);
    let seen = upstream.requests();
    for (path, parent, state) in
        [("/joins", OURS, &["a=1", "b=2"][..]), ("/own", THEIRS, &[]), ("/both", THEIRS, &["z=9"])]
    {
        let seen = seen.iter().find(|seen| seen.path() == path).expect("each was sent");
        assert_eq!(seen.header("traceparent"), Some(parent), "{path}");
        // A state is that of its parent alone.
        assert_eq!(seen.head.headers.all("tracestate"), state, "{path}");
    }
    assert_eq!(hedgerow.fan_out(&calls([get("a", upstream.url("/none"))])).await.status, 200);
    assert_eq!(upstream.requests().last().unwrap().header("traceparent"), None);
}

#[tokio::test]
async fn a_client_that_leaves_takes_all_of_its_calls_along() {
    let mut upstream = Upstream::start().await;
    let stages = "hedge: off, breaker: { consecutive_failures: 1, fair_chance: 0s }";
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    let mut delays = Vec::new();
    for round in 0..20 {
        let list: Vec<_> = (0..4).map(|at| get(&at.to_string(), upstream.url("/"))).collect();
        let body = json!({ "deadline_ms": LATE, "max_concurrent": 3, "calls": list });
        let agent = hedgerow.ask_fan_out(&[], body.to_string()).await;
        let mut exchanges = vec![upstream.next().await, upstream.next().await, upstream.next().await];
        // One in the middle of its body.
        exchanges[0].start_chunks(200, &[]).await;
        exchanges[0].chunk("some").await;
        let began = Instant::now();
        match round % 2 {
            0 => drop(agent),
            _ => agent.reset(),
        }
        for exchange in exchanges {
            delays.push(exchange.gone().await - began);
        }
    }
    delays.sort();
    assert!(delays[30] < ms(300), "{delays:?}");
    let left = [TOOL, ("code", "499"), ("outcome", "client_left")];
    let metrics = hedgerow
        .until_metrics(|metrics| {
            metrics.value("hedgerow_requests_total", &left) == 60.0
                && counted(metrics, "requests", "client_left") == 20.0
        })
        .await;
    assert_eq!((upstream.count(), metrics.value("hedgerow_breaker_transitions_total", &[TOOL])), (60, 0.0));
    hedgerow.until_status(|status| status["in_flight"] == 0).await;
}

#[tokio::test]
async fn an_http2_client_gets_the_same_answer() {
    let (dead, _keeps_it_dead) = Upstream::dead();
    let upstream =
        Upstream::answering(|_| Reply::ok(r#"{"n":1}"#).header("Content-Type", "application/json")).await;
    let large =
        Upstream::answering(|_| Reply::ok("x".repeat(400 << 10)).header("Content-Type", "text/plain")).await;
    let hedgerow = HedgerowProcess::start(&format!("defaults: {{ {BARE} }}")).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let url = format!("http://{}{PATH}", hedgerow.proxy);
    let list = json!([
        get("a", upstream.url("/")),
        get("dead", format!("http://{dead}/")),
        get("b", large.url("/"))
    ]);
    for _ in 0..2 {
        let answer = agent.request("POST", &url, &[], calls(list.clone()).to_string()).await;
        assert_eq!(
            (answer.status, answer.end, answer.header("content-type")),
            (200, End::Whole, Some("application/json"))
        );
        let report = Report(answer.json());
        assert_eq!((report.results(), report.missing()), (vec!["a", "b"], vec!["dead"]));
        assert_eq!(report.result("a")["body"], json!({ "n": 1 }));
        assert_eq!(report.result("b")["body"].as_str().map(str::len), Some(400 << 10));
    }
    // And a stream that is reset is a client that leaves.
    let hung = Upstream::answering(|_| Reply::hang()).await;
    let mut call = agent.open(crate::support::http2::agent::head("POST", &url, &[]), false).await;
    assert!(call.send(calls([get("a", hung.url("/"))]).to_string(), true).await);
    hung.until(|tally| tally.in_flight == 1).await;
    call.reset(h2::Reason::CANCEL);
    hung.until(|tally| tally.aborted == 1).await;
}

/// The rest of the answer that is there is more than an error.
#[tokio::test]
async fn leaving_at_drain_max_answers_with_what_has_come() {
    let upstream = Upstream::answering(by_path(&[("/a", Reply::ok("a")), ("/hung", Reply::hang())])).await;
    let policy = format!("drain: {{ quiet: 50ms, max: 600ms }}\ndefaults: {{ {BARE} }}");
    let mut hedgerow = HedgerowProcess::start(&policy).await;
    let list = json!([
        get("a", upstream.url("/a")),
        get("hung", upstream.url("/hung")),
        get("queued", upstream.url("/hung"))
    ]);
    let body = json!({ "deadline_ms": LATE, "max_concurrent": 1, "calls": list });
    let mut agent: Agent = hedgerow.ask_fan_out(&[], body.to_string()).await;
    upstream.until(|tally| tally.requests == 2).await;
    hedgerow.signal(Signal::TERM);
    let report = Report::of(&agent.read_response_to("POST").await);
    assert_eq!((report.results(), report.missing()), (vec!["a"], vec!["hung", "queued"]));
    assert_eq!((report.why("hung"), report.why("queued")), ("shutting_down", "shutting_down"));
    assert_eq!(hedgerow.wait().await, 0);
    assert_eq!(upstream.count(), 2);
}

/// A retry of the policy's is the call's own affair.
#[tokio::test]
async fn a_call_is_retried_as_any_other() {
    let upstream = Upstream::answering(statuses(&[503, 200])).await;
    let stages =
        "hedge: off, retry: { max_attempts: 2, backoff: 1ms }, extra_load: { ratio: 100%, floor: 100/s }";
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    let report = run(&hedgerow, &calls([get("a", upstream.url("/"))])).await;
    assert_eq!(
        (&report.result("a")["source"], &report.result("a")["body"]),
        (&json!("primary"), &json!("200"))
    );
    assert_eq!(report.result("a")["headers"]["x-hedgerow-attempts"], "2");
}

/// A stream that has begun and says no more was left to `stream_idle`, and the fan-out dropped it without a word to
/// its breaker, so that it held up every list for all of its time.
#[tokio::test]
async fn a_body_that_stops_is_judged_as_late_whatever_the_policy_bounds() {
    for stages in [
        "hedge: off, breaker: { consecutive_failures: 1, fair_chance: 100ms }, deadline: { default: 1500ms }",
        "hedge: off, breaker: { consecutive_failures: 1, fair_chance: 100ms }, deadline: { covers: head }",
        "hedge: off, breaker: { consecutive_failures: 1, fair_chance: 100ms }, deadline: off",
    ] {
        let mut upstream = Upstream::start().await;
        let policy =
            format!("defaults: {{ deadline: {{ default: 2s }} }}\n{}", tool(upstream.address(), stages));
        let hedgerow = HedgerowProcess::start(&policy).await;
        let body = json!({ "calls": [get("a", upstream.url("/a"))] }).to_string();
        let mut agent = hedgerow.ask_fan_out(&[], body).await;
        let mut exchange = upstream.next().await;
        exchange.start_chunks(200, &[("Content-Type", "text/event-stream")]).await;
        exchange.chunk("data: 1\n\n").await;
        let report = Report::of(&agent.read_response_to("POST").await);
        assert_eq!(report.why("a"), "deadline", "{stages}");
        exchange.gone().await;
        let open = [TOOL, ("state", "open")];
        hedgerow.until_metrics(|metrics| metrics.value("hedgerow_breaker_state", &open) == 1.0).await;
    }
}

/// A call's own word on its time stands before the policy's default, also where the fan-out's is shorter.
#[tokio::test]
async fn a_longer_timeout_never_gives_a_call_less_time() {
    let slow = Upstream::answering(|_| Reply::ok("slow").after(ms(1000))).await;
    let hedgerow = HedgerowProcess::start(&format!(
        "defaults: {{ deadline: {{ default: 8s }} }}\n{}",
        tool(slow.address(), "hedge: off, breaker: off, deadline: { default: 200ms }")
    ))
    .await;
    for timeout in [5_000, 20_000] {
        let mut call = get("a", slow.url("/"));
        call["timeout_ms"] = json!(timeout);
        let report = run(&hedgerow, &json!({ "calls": [call] })).await;
        assert_eq!(report.results(), ["a"], "{timeout}: {}", report.0);
    }
    // Without one, nobody has named a time, and the policy's default is meant for that.
    let report = run(&hedgerow, &json!({ "calls": [get("a", slow.url("/"))] })).await;
    assert_eq!(report.why("a"), "deadline_exceeded");
}

/// A grace is for the calls that still wait for their turn, too.
#[tokio::test]
async fn calls_that_wait_for_their_turn_have_it_within_the_grace() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let mut list = list(&upstream, &["a", "b", "c"]);
    list[1]["optional"] = json!(true);
    list[2]["optional"] = json!(true);
    let mut body = calls(list);
    body["max_concurrent"] = json!(1);
    body["grace_ms"] = json!(LATE);
    assert_eq!(run(&hedgerow, &body).await.results(), ["a", "b", "c"]);
    body["min_results"] = json!(1);
    assert_eq!(run(&hedgerow, &body).await.results(), ["a", "b", "c"]);
}

/// What is begun when there is no time left for its answer may have its effect all the same. A call that shares
/// a flight learns of its end a moment after the deadline.
#[tokio::test]
async fn no_backup_is_asked_after_the_deadline() {
    let hung = Upstream::answering(|_| Reply::hang()).await;
    let backup = Upstream::answering(|_| Reply::ok("")).await;
    let stages =
        "hedge: off, breaker: off, coalesce: true, routes: [ { methods: [POST], idempotent: true } ]";
    let hedgerow = HedgerowProcess::start(&tool(hung.address(), stages)).await;
    for round in 0..10 {
        let mut call = get("a", hung.url(&format!("/{round}")));
        call["method"] = json!("POST");
        call["body"] = json!({ "order": round });
        call["backup"] = json!(backup.url("/"));
        let report = run(&hedgerow, &json!({ "deadline_ms": 300, "calls": [call] })).await;
        assert_eq!(report.why("a"), "deadline");
    }
    backup.gets_nothing_more(ms(100)).await;
    assert_eq!(backup.count(), 0);
}

/// What a reader gives up of a body says nothing of the upstream; its head does, whoever else might have read it.
#[tokio::test]
async fn a_probe_whose_answer_is_cut_off_closes_the_breaker() {
    for stages in ["coalesce: off", "coalesce: true"] {
        let upstream = Upstream::answering(|seen| match seen.path() {
            "/bad" => Reply::status(500),
            _ => Reply::ok(vec![b'x'; 3 << 20]),
        })
        .await;
        let stages = format!("hedge: off, breaker: {{ consecutive_failures: 1, open_for: 100ms }}, {stages}");
        let hedgerow = HedgerowProcess::start(&tool(upstream.address(), &stages)).await;
        let report = run(&hedgerow, &calls([get("bad", upstream.url("/bad"))])).await;
        assert_eq!(report.why("bad"), "upstream_status");
        let mut call = get("good", upstream.url("/good"));
        call["max_body_bytes"] = json!(10);
        // Until the breaker lets a probe pass, and that closes it.
        let began = Instant::now();
        while run(&hedgerow, &calls([call.clone()])).await.results().is_empty() {
            assert!(began.elapsed() < ms(LATE), "{stages}");
        }
        let closed = [TOOL, ("state", "closed")];
        hedgerow.until_metrics(|metrics| metrics.value("hedgerow_breaker_state", &closed) == 1.0).await;
    }
}

/// Who leaves in the middle of its list has refused nothing.
#[tokio::test]
async fn a_client_that_leaves_while_it_sends_its_list_has_left() {
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    agent
        .send(format!("POST {PATH} HTTP/1.1\r\nHost: {}\r\nContent-Length: 100\r\n\r\n{{", hedgerow.proxy))
        .await;
    drop(agent);
    hedgerow.until_metrics(|metrics| counted(metrics, "requests", "client_left") == 1.0).await;
}

/// A tool that hangs cost every list half of its time, for ever, since its backup's answer was taken for its own excuse.
#[tokio::test]
async fn a_place_that_has_lost_to_its_backup_is_judged_as_late() {
    let hung = Upstream::answering(|_| Reply::hang()).await;
    let backup = Upstream::answering(|_| Reply::ok("backup")).await;
    let stages = "hedge: off, breaker: { consecutive_failures: 1, fair_chance: 100ms }";
    let hedgerow = HedgerowProcess::start(&tool(hung.address(), stages)).await;
    let mut call = get("a", hung.url("/a"));
    call["backup"] = json!(backup.url("/"));
    let body = json!({ "deadline_ms": 2000, "calls": [call] });
    assert_eq!(run(&hedgerow, &body).await.results(), ["a"]);
    let open = [TOOL, ("state", "open")];
    hedgerow.until_metrics(|metrics| metrics.value("hedgerow_breaker_state", &open) == 1.0).await;
    // From now on the backup is asked at once.
    assert_eq!(run(&hedgerow, &body).await.results(), ["a"]);
    assert_eq!((hung.count(), backup.count()), (1, 2));
}
