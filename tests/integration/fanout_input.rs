//! What is no fan-out: refused as a whole where it leaves no list to work on, call by call where it does, and always
//! with the place of the fault.

use serde_json::{Value, json};

use crate::support::client::{Response, absolute};
use crate::support::fanout::{PATH, Report, get, request};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::http2::agent::head;
use crate::support::http2::{End, Http2Agent};
use crate::support::policy::tool;
use crate::support::upstream::{Reply, Upstream};

/// The word and the text of a problem.
#[track_caller]
fn problem(answer: &Response, status: u16) -> (String, String) {
    assert_eq!(
        (answer.status, answer.header("content-type"), answer.header("via")),
        (status, Some("application/problem+json"), Some("1.1 hedgerow")),
        "{}",
        String::from_utf8_lossy(&answer.body)
    );
    assert!(
        answer.header("proxy-status").is_some_and(|field| field.contains("error=http_request_error")),
        "{answer:?}"
    );
    let problem = answer.json();
    assert_eq!((&problem["status"], &problem["retryable"]), (&json!(status), &json!(false)));
    let text = |key: &str| problem[key].as_str().expect("text").to_owned();
    (text("error"), text("detail"))
}

/// One call with these keys beside its id, and its fault; nothing is sent.
async fn fault(hedgerow: &HedgerowProcess, keys: &str) -> String {
    let body = format!(r#"{{"deadline_ms": 18000, "calls": [{{"id": "a", {keys}}}]}}"#);
    let report = Report::of(&hedgerow.fan_out_with(&[], body).await);
    assert_eq!((report.why("a"), report.is_complete()), ("invalid_request", false), "{keys}");
    report.0["missing"]["a"]["message"].as_str().expect("text").to_owned()
}

#[tokio::test]
async fn what_leaves_no_list_to_work_on_is_a_400_that_names_the_place() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "")).await;
    let url = upstream.url("/");
    let good = format!(r#"{{"id": "a", "url": "{url}"}}"#);
    let with = |key: &str| format!(r#"{{{key}, "calls": [{good}]}}"#);
    let list = |calls: &str| format!(r#"{{"calls": [{calls}]}}"#);
    let call = |keys: &str| list(&format!("{good}, {{{keys}}}"));
    let many = vec![good.clone(); 10_000].join(",");
    let deep = "[".repeat(100_000);
    let closed = format!("{deep}{}", "]".repeat(100_000));
    let long = "i".repeat(201);
    // The body, and what its fault begins with.
    let cases: Vec<(String, &str)> = vec![
        (String::new(), "the body is no fan-out: EOF"),
        ("no".into(), "the body is no fan-out: "),
        ("null".into(), "the body is no fan-out: "),
        ("[]".into(), "the body is no fan-out: invalid type: sequence, expected an object"),
        (
            format!("[1500, null, null, null, null, [{good}]]"),
            "the body is no fan-out: invalid type: sequence",
        ),
        (format!("{} {{}}", list(&good)), "the body is no fan-out: trailing characters"),
        (list(&good)[..20].to_owned(), "calls"),
        (format!("\u{feff}{}", list(&good)), "the body is no fan-out: "),
        (deep.clone(), "the body is no fan-out: "),
        (closed.clone(), "the body is no fan-out: "),
        (format!(r#"{{"calls": {deep}"#), "calls[0]: "),
        (list(&closed), "calls[0]: "),
        ("{}".into(), "the body is no fan-out: missing field `calls`"),
        (list(""), "calls: expected 1 to 1000 of them; found 0"),
        (r#"{"calls": null}"#.into(), "calls: invalid type: null"),
        (r#"{"calls": {}}"#.into(), "calls: invalid type: map"),
        (list(&many), "calls: expected 1 to 1000 of them; found 10000"),
        (list(&format!("{good}, {good}")), "calls[1].id: \"a\" is the id of an earlier call too"),
        (list(&format!(r#"{good}, ["b", "{url}"]"#)), "calls[1]: invalid type: sequence, expected an object"),
        (list(&format!("{good}, null")), "calls[1]: invalid type: null"),
        (call(&format!(r#""id": "", "url": "{url}""#)), "calls[1].id: expected 1 to 200 characters"),
        (call(&format!(r#""id": "{long}", "url": "{url}""#)), "calls[1].id: expected 1 to 200 characters"),
        (call(&format!(r#""id": "b\nc", "url": "{url}""#)), "calls[1].id: expected 1 to 200 characters"),
        (call(&format!(r#""id": 7, "url": "{url}""#)), "calls[1].id: invalid type: integer `7`"),
        (call(&format!(r#""url": "{url}""#)), "calls[1]: missing field `id`"),
        (call(r#""id": "b""#), "calls[1]: missing field `url`"),
        (call(r#""id": "b", "url": null"#), "calls[1].url: invalid type: null"),
        (call(r#""id": "b", "url": ["http://a.test"]"#), "calls[1].url: invalid type: sequence"),
        (call(r#""id": "b", "id": "c""#), "calls[1]: duplicate field `id`"),
        (call(r#""id": "b", "ur": "x""#), "calls[1].ur: unknown field `ur`, expected one of `id`, `url`"),
        (list(r#"{"id": "b", "ur": "x"}"#), "calls[0].ur: unknown field `ur`"),
        (
            call(&format!(r#""id": "b", "url": "{url}", "headers": []"#)),
            "calls[1].headers: invalid type: sequence",
        ),
        (
            call(&format!(r#""id": "b", "url": "{url}", "headers": "x: y""#)),
            "calls[1].headers: invalid type: string",
        ),
        (
            call(&format!(r#""id": "b", "url": "{url}", "optional": 1"#)),
            "calls[1].optional: invalid type: integer",
        ),
        (
            call(&format!(r#""id": "b", "url": "{url}", "timeout_ms": "1""#)),
            "calls[1].timeout_ms: invalid type: string",
        ),
        (
            call(&format!(r#""id": "b", "url": "{url}", "max_body_bytes": -1"#)),
            "calls[1].max_body_bytes: invalid",
        ),
        (
            call(&format!(r#""id": "b", "url": "{url}", "max_body_bytes": 1.5"#)),
            "calls[1].max_body_bytes: invalid",
        ),
        (
            call(&format!(r#""id": "b", "url": "{url}", "body_base64": [1]"#)),
            "calls[1].body_base64: invalid type",
        ),
        (call(&format!(r#""id": "b", "url": "{url}", "body": tru"#)), "calls[1].body: "),
        (with(r#""deadline": 1500"#), "deadline: unknown field `deadline`, expected one of `deadline_ms`"),
        (
            with(r#""deadline_ms": 0"#),
            "deadline_ms: expected more than 0 to 1000000000 milliseconds; found 0",
        ),
        (with(r#""deadline_ms": -1"#), "deadline_ms: expected more than 0"),
        (with(r#""deadline_ms": -0.0"#), "deadline_ms: expected more than 0"),
        (with(r#""deadline_ms": 1e10"#), "deadline_ms: expected more than 0"),
        (with(r#""deadline_ms": 1e400"#), "deadline_ms: number out of range"),
        (with(r#""deadline_ms": NaN"#), "deadline_ms: expected"),
        (with(r#""deadline_ms": Infinity"#), "deadline_ms: expected"),
        (with(r#""deadline_ms": "1500""#), "deadline_ms: invalid type: string \"1500\", expected a number"),
        (with(r#""deadline_ms": [1500]"#), "deadline_ms: invalid type: sequence"),
        (
            with(r#""deadline_ms": 1, "deadline_ms": 2"#),
            "the body is no fan-out: duplicate field `deadline_ms`",
        ),
        (with(r#""max_concurrent": 0"#), "max_concurrent: expected 1 to 1000; found 0"),
        (with(r#""max_concurrent": 1001"#), "max_concurrent: expected 1 to 1000; found 1001"),
        (with(r#""max_concurrent": -1"#), "max_concurrent: invalid"),
        (with(r#""min_results": 0"#), "min_results: expected 1 to the number of calls, 1; found 0"),
        (with(r#""min_results": 2"#), "min_results: expected 1 to the number of calls, 1; found 2"),
        (with(r#""grace_ms": -1"#), "grace_ms: expected 0 to 1000000000 milliseconds; found -1"),
        (with(r#""system_prompt": "yes""#), "system_prompt: invalid type: string"),
    ];
    // One connection each: a 400 ends it.
    for (body, place) in &cases {
        let shown = body.get(..200).unwrap_or(body);
        let (error, detail) = problem(&hedgerow.fan_out_with(&[], body).await, 400);
        assert_eq!(error, "invalid_request", "{shown}");
        assert!(detail.starts_with(place), "{shown}: {detail}");
        assert!(detail.len() < 1000 && !detail.contains('\n'), "{shown}: {detail}");
    }
    let (_, detail) = problem(&hedgerow.fan_out_with(&[], b"{\"calls\": [\"\xff\"]}").await, 400);
    assert!(detail.starts_with("calls[0]"), "{detail}");
    // What is wrong is not repeated at any length, least of all in a header, which clients take only so much of.
    for body in [
        format!("{{\"{long}\": 1}}", long = "k".repeat(500_000)),
        with(&format!(r#""deadline_ms": "{}""#, "1".repeat(500_000))),
        call(&format!(r#""id": "b", "{}": 1"#, "ü\\r\\n".repeat(50_000))),
    ] {
        let answer = hedgerow.fan_out_with(&[], &body).await;
        let (error, detail) = problem(&answer, 400);
        assert_eq!(error, "invalid_request");
        assert!(detail.len() <= 303 && detail.ends_with("..."), "{detail}");
        assert!(answer.header("proxy-status").unwrap().len() < 500, "{answer:?}");
    }
    // It is said before any call is made, and in no stream.
    let streamed = hedgerow.fan_out_with(&[("Accept", "text/event-stream")], list("")).await;
    assert_eq!(problem(&streamed, 400).0, "invalid_request");
    assert_eq!(upstream.connections(), 0);
    let refused = [("result", "refused")];
    let metrics = hedgerow.metrics().await;
    assert_eq!(metrics.value("hedgerow_fanout_requests_total", &refused), (cases.len() + 5) as f64);
}

#[tokio::test]
async fn what_is_wrong_with_one_call_fails_that_call_and_no_other() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "")).await;
    let url = upstream.url("/");
    let good = |keys: &str| format!(r#""url": "{url}", {keys}"#);
    let long = "x".repeat(17 << 10);
    let crowd: Vec<_> = (0..101).map(|at| format!(r#""x-{at}": "1""#)).collect();
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let cases = [
        (r#""url": """#.to_owned(), "calls[0].url: expected an http or https URL; "),
        (r#""url": "/v1/quote""#.into(), "calls[0].url: expected an http or https URL; "),
        (r#""url": "a.test/x""#.into(), "calls[0].url: expected an http or https URL; "),
        (r#""url": "//a.test/x""#.into(), "calls[0].url: expected an http or https URL; "),
        (r#""url": "file:///etc/passwd""#.into(), "calls[0].url: expected an http or https URL; found file:"),
        (r#""url": "ftp://a.test/""#.into(), "calls[0].url: expected an http or https URL; found ftp:"),
        (r#""url": "ws://a.test/""#.into(), "calls[0].url: expected an http or https URL; found ws:"),
        (
            r#""url": "javascript:alert(1)""#.into(),
            "calls[0].url: expected an http or https URL; found javascript:",
        ),
        (r#""url": "http://""#.into(), "calls[0].url: expected an http or https URL; "),
        (r#""url": "http://a b.test/""#.into(), "calls[0].url: expected an http or https URL; "),
        (r#""url": "http://a.test:99999/""#.into(), "calls[0].url: expected an http or https URL; "),
        (r#""url": "http://[::1/""#.into(), "calls[0].url: expected an http or https URL; "),
        (r#""url": "http://me:secret@a.test/""#.into(), "calls[0].url: expected no user name or password"),
        (r#""url": "http://me@a.test/""#.into(), "calls[0].url: expected no user name or password"),
        (
            format!(r#""url": "{url}{long}""#),
            "calls[0].url: the path and query are longer than limits.target",
        ),
        (good(r#""backup": "/other""#), "calls[0].backup: expected an http or https URL; "),
        (good(r#""method": "CONNECT""#), "calls[0].method: \"CONNECT\" is none that a fan-out can send"),
        (good(r#""method": "TRACE""#), "calls[0].method: \"TRACE\""),
        (good(r#""method": """#), "calls[0].method: \"\""),
        (good(&format!(r#""method": "{long} y""#)), "calls[0].method: \"xxx"),
        (good(r#""method": "GET /x HTTP/1.1\r\nX: y""#), "calls[0].method: "),
        (good(r#""headers": {"x": "a\r\nY: z"}"#), "calls[0].headers[\"x\"]: no header can have this value"),
        (good(r#""headers": {"x": "a\nb"}"#), "calls[0].headers[\"x\"]: no header can have this value"),
        (good(r#""headers": {"x": "a\u0000"}"#), "calls[0].headers[\"x\"]: no header can have this value"),
        (good(r#""headers": {"x": ["a", "b\r"]}"#), "calls[0].headers[\"x\"]: no header can have this value"),
        (
            good(r#""headers": {"a: b\r\nc": "d"}"#),
            "calls[0].headers[\"a: b\\r\\nc\"]: no header has such a name",
        ),
        (good(r#""headers": {"": "d"}"#), "calls[0].headers[\"\"]: no header has such a name"),
        (good(r#""headers": {"ü": "d"}"#), "calls[0].headers[\"ü\"]: no header has such a name"),
        (good(r#""headers": {"x": 1}"#), "calls[0].headers[\"x\"]: expected text, or a list of texts"),
        (good(r#""headers": {"x": null}"#), "calls[0].headers[\"x\"]: expected text"),
        (good(r#""headers": {"x": [["a"]]}"#), "calls[0].headers[\"x\"]: expected text"),
        (good(r#""headers": {"host": 1}"#), "calls[0].headers[\"host\"]: expected text"),
        (good(&format!(r#""headers": {{{}}}"#, crowd.join(","))), "calls[0].headers: expected at most 100"),
        (good(r#""body": 1, "body_base64": "AA==""#), "calls[0].body_base64: there is a body already"),
        (good(r#""body_base64": "A""#), "calls[0].body_base64: "),
        (good(r#""body_base64": "AA== AA==""#), "calls[0].body_base64: "),
        (good(&format!(r#""body": {deep}"#)), "calls[0].body: nested too deeply"),
        (good(r#""timeout_ms": 0"#), "calls[0].timeout_ms: expected more than 0"),
        (good(r#""timeout_ms": 1e300"#), "calls[0].timeout_ms: expected more than 0"),
        (
            good(r#""max_body_bytes": 16777217"#),
            "calls[0].max_body_bytes: expected at most 16777216; found 16777217",
        ),
    ];
    for (keys, place) in &cases {
        let message = fault(&hedgerow, keys).await;
        assert!(message.starts_with(place), "{}: {message}", keys.get(..200).unwrap_or(keys));
        assert!(!message.contains("secret") && message.chars().count() <= 401, "{message}");
    }
    assert_eq!(upstream.connections(), 0);

    // Beside it the others are made, and each fault has the number of its call.
    let list = json!([
        get("a", &*url),
        { "id": "b", "url": "nothing" },
        { "id": "c", "url": &*url, "headers": { "x": "\r\n" } },
        get("d", &*url),
    ]);
    let report = Report::of(&hedgerow.fan_out(&json!({ "calls": list })).await);
    assert_eq!((report.results(), report.missing()), (vec!["a", "d"], vec!["b", "c"]));
    for (id, place) in [("b", "calls[1].url: "), ("c", "calls[2].headers[\"x\"]: ")] {
        let message = report.0["missing"][id]["message"].as_str().unwrap();
        assert!(message.starts_with(place), "{message}");
    }
    assert_eq!(upstream.count(), 2);
}

/// Some readers of URLs drop line ends in silence: none of it becomes a field or another request.
#[tokio::test]
async fn line_ends_in_a_url_are_no_line_ends_on_the_wire() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "hedge: off")).await;
    let list = json!([
        get("a", upstream.url("/x HTTP/1.1\r\nX-Own: 1\r\n\r\nGET /y")),
        get("b", upstream.url("/z%0d%0aX-Own:%201")),
    ]);
    let report = Report::of(&hedgerow.fan_out(&json!({ "calls": list })).await);
    assert_eq!((report.results(), report.why("a")), (vec!["b"], "invalid_request"));
    let targets: Vec<_> = upstream.requests().into_iter().map(|seen| seen.head.target).collect();
    assert_eq!(targets, ["/z%0d%0aX-Own:%201"]);
    assert!(upstream.requests().iter().all(|seen| seen.header("x-own").is_none()));
}

/// The largest list that is taken.
#[tokio::test]
async fn a_thousand_calls_are_a_fan_out() {
    let upstream = Upstream::answering(|seen| Reply::ok(seen.path().to_owned())).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "hedge: off, bulkhead: off")).await;
    let list: Vec<_> = (0..1000).map(|at| get(&at.to_string(), upstream.url(&format!("/{at}")))).collect();
    let report = Report::of(&hedgerow.fan_out(&json!({ "calls": list })).await);
    assert_eq!(report.results(), (0..1000).map(|at| at.to_string()).collect::<Vec<_>>());
    assert!(report.results().into_iter().all(|id| report.result(id)["body"] == format!("/{id}")));
    // A hundred at once where the list does not say how many.
    assert!(upstream.max_in_flight() <= 100, "{}", upstream.max_in_flight());
}

/// A refusal that the client cannot read is one that it meets with the same body again.
#[tokio::test]
async fn c128_a_body_that_is_too_large_gets_a_413_that_can_be_read() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "")).await;
    let call = get("a", upstream.url("/")).to_string();
    // Twice the limit, in blanks behind what would be a good list.
    let body = format!("{{\"calls\": [{call}]{}}}", " ".repeat(2 << 20));
    let chunks: String = {
        let begin =
            format!("POST {PATH} HTTP/1.1\r\nHost: {}\r\nTransfer-Encoding: chunked\r\n\r\n", hedgerow.proxy);
        let parts = body
            .as_bytes()
            .chunks(10_000)
            .map(|part| format!("{:x}\r\n{}\r\n", part.len(), std::str::from_utf8(part).expect("text")));
        begin + &parts.collect::<String>() + "0\r\n\r\n"
    };
    let counted = request(hedgerow.proxy, &[], &body);
    for round in 0..50 {
        for bytes in [&counted[..], chunks.as_bytes()] {
            let mut agent = hedgerow.agent().await;
            // All of it is sent before the answer is looked for, as most clients do.
            agent.send(bytes).await;
            let answer = agent.read_response_to("POST").await;
            let (error, _) = problem(&answer, 413);
            assert_eq!((&*error, answer.complete), ("body_too_large", true), "round {round}");
        }
    }
    // Nothing needs to be sent for it.
    let mut agent = hedgerow.agent().await;
    let length = body.len();
    let host = hedgerow.proxy;
    agent
        .send(format!(
            "POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\nExpect: 100-continue\r\n\r\n"
        ))
        .await;
    let answer = agent.read_response_to("POST").await;
    assert_eq!((problem(&answer, 413).0.as_str(), answer.interims.len()), ("body_too_large", 0));

    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let url = format!("http://{host}{PATH}");
    for fields in [&[("content-length", &*length.to_string())][..], &[]] {
        let mut call = agent.open(head("POST", &url, fields), false).await;
        call.send(body.clone(), true).await;
        let answer = call.answer().await;
        assert_eq!((answer.status, &answer.json()["error"]), (413, &json!("body_too_large")));
        assert!(matches!(answer.end, End::Whole | End::Reset(h2::Reason::NO_ERROR)), "{:?}", answer.end);
    }
    assert_eq!(upstream.connections(), 0);
}

#[tokio::test]
async fn the_limit_on_the_body_is_the_policys_to_the_byte() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("limits: { fanout_body: 1KiB }").await;
    let list = format!("{{\"calls\": [{}]}}", get("a", upstream.url("/")));
    for (size, status) in [(1024, 200), (1025, 413)] {
        let body = list.clone() + &" ".repeat(size - list.len());
        assert_eq!(hedgerow.fan_out_with(&[], &body).await.status, status);
        let mut agent = hedgerow.agent().await;
        let host = hedgerow.proxy;
        agent
            .send(format!(
                "POST {PATH} HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n{size:x}\r\n{body}\r\n0\r\n\r\n"
            ))
            .await;
        assert_eq!(agent.read_response_to("POST").await.status, status);
    }
}

/// A body that never comes is waited for no longer than the rest.
#[tokio::test]
async fn the_deadline_bounds_the_reading_of_the_list() {
    let hedgerow = HedgerowProcess::start("defaults: { deadline: { default: 800ms } }").await;
    let mut agent = hedgerow.agent().await;
    let host = hedgerow.proxy;
    agent
        .send(format!("POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n\r\n{{\"calls\""))
        .await;
    let answer = agent.read_response_to("POST").await;
    assert_eq!((answer.status, &answer.json()["error"]), (504, &json!("deadline_exceeded")));
    // And a client that leaves in it is one that left.
    let mut agent = hedgerow.agent().await;
    agent
        .send(format!(
            "POST {PATH} HTTP/1.1\r\nHost: {host}\r\nX-Request-Id: left\r\nContent-Length: 100\r\n\r\n{{"
        ))
        .await;
    hedgerow.until_status(|status| status["in_flight"] == 1).await;
    drop(agent);
    let line = hedgerow.access_log(|line| line["request_id"] == "left").await;
    assert_eq!(line["outcome"], "client_left");
}

/// A page in a browser beside the agent can send a POST here without asking, and its calls would be made.
#[tokio::test]
async fn a_web_page_is_refused() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "")).await;
    let body = json!({ "calls": [get("a", upstream.url("/"))] }).to_string();
    for origin in ["https://evil.example", "null", &format!("http://{}", hedgerow.proxy)] {
        let fields = [("Origin", origin), ("Content-Type", "text/plain")];
        let (error, detail) = problem(&hedgerow.fan_out_with(&fields, &body).await, 400);
        assert_eq!(error, "invalid_request");
        assert!(detail.contains("Origin"), "{detail}");
    }
    assert_eq!(upstream.connections(), 0);
}

#[tokio::test]
async fn other_methods_are_told_which_one_it_takes() {
    let hedgerow = HedgerowProcess::start("{}").await;
    let own = format!("http://{}", hedgerow.proxy);
    for (path, allowed, methods) in [
        (PATH, "POST", &["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"][..]),
        ("/v1/openapi.json", "GET, HEAD", &["POST", "PUT", "DELETE"]),
    ] {
        for method in methods {
            let answer = hedgerow.agent().await.request(method, &format!("{own}{path}"), &[], b"").await;
            assert_eq!((answer.status, answer.header("allow")), (405, Some(allowed)), "{method} {path}");
            if *method != "HEAD" {
                assert_eq!(problem(&answer, 405).0, "method_not_allowed");
            }
        }
    }
    for path in ["/", "/v1", "/v1/fanout/", "/v1/fanout/x", "/V1/fanout", "/v1/openapi.yaml"] {
        let answer = hedgerow.agent().await.request("POST", &format!("{own}{path}"), &[], b"{}").await;
        assert_eq!(problem(&answer, 404).0, "not_found", "{path}");
    }
}

/// It is asked as a server is and as a proxy is, under every name that it has; at others' it is theirs.
#[tokio::test]
async fn the_endpoint_is_hedgerows_own_and_shadows_nobody_elses() {
    let upstream = Upstream::answering(|seen| Reply::ok(format!("theirs {}", seen.path()))).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "")).await;
    let body = json!({ "calls": [get("a", upstream.url("/a"))] }).to_string();
    let port = hedgerow.proxy.port();
    for host in ["127.0.0.1", "localhost", "[::1]"] {
        let mut agent = hedgerow.agent().await;
        agent.send(absolute("POST", &format!("http://{host}:{port}{PATH}?x=1"), &[], body.as_bytes())).await;
        assert_eq!(Report::of(&agent.read_response_to("POST").await).results(), ["a"], "{host}");
        agent
            .send(format!(
                "POST {PATH} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            ))
            .await;
        assert_eq!(Report::of(&agent.read_response_to("POST").await).results(), ["a"], "{host}");
    }
    let answer = hedgerow.agent().await.request("POST", &upstream.url(PATH), &[], body.as_bytes()).await;
    assert_eq!(answer.text(), format!("theirs {PATH}"));
    // The admin port has none.
    assert_eq!(hedgerow.ask_admin("GET", PATH).await.status, 404);
}

#[tokio::test]
async fn the_description_is_openapi_3_1_and_knows_every_key_of_an_answer() {
    let upstream = Upstream::answering(|_| Reply::ok("{}").header("Content-Type", "application/json")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "")).await;
    let answer = hedgerow.agent().await.get_at(&hedgerow.proxy.to_string(), "/v1/openapi.json").await;
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")));
    let told = answer.json();
    assert!(
        told["openapi"].as_str().is_some_and(|version| version.starts_with("3.1.")),
        "{}",
        told["openapi"]
    );
    assert!(told["paths"][PATH]["post"]["responses"]["200"].is_object());
    let mut references = Vec::new();
    gather(&told, &mut references);
    for reference in references {
        let path = reference.strip_prefix('#').expect("a reference within the document");
        assert!(told.pointer(path).is_some(), "{reference} leads nowhere");
    }
    let mut agent = hedgerow.agent().await;
    agent.send(format!("HEAD /v1/openapi.json HTTP/1.1\r\nHost: {}\r\n\r\n", hedgerow.proxy)).await;
    assert_eq!(
        agent.read_response_to("HEAD").await.header("content-length"),
        Some(&*answer.body.len().to_string())
    );

    let list = json!([
        { "id": "a", "url": upstream.url("/"), "max_body_bytes": 1 },
        get("b", "nothing"),
    ]);
    let report = Report::of(&hedgerow.fan_out(&json!({ "system_prompt": true, "calls": list })).await).0;
    let schemas = &told["components"]["schemas"];
    let known = |schema: &str, value: &Value| {
        for key in value.as_object().expect("an object").keys() {
            assert!(schemas[schema]["properties"].get(key).is_some(), "{schema} does not know {key}");
        }
        for key in schemas[schema]["required"].as_array().expect("a list") {
            assert!(value.get(key.as_str().expect("a key")).is_some(), "{schema} promises {key}");
        }
    };
    known("Result", &report["results"]["a"]);
    known("Missing", &report["missing"]["b"]);
    let (mut summary, results) = (report.clone(), report["results"].clone());
    assert!(summary.as_object_mut().expect("an object").remove("results").is_some() && results.is_object());
    known("Summary", &summary);
    known("Problem", &hedgerow.fan_out(&json!({})).await.json());
}

/// Every `$ref` in a document.
fn gather(value: &Value, references: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            references.extend(map.get("$ref").and_then(Value::as_str).map(str::to_owned));
            map.values().for_each(|value| gather(value, references));
        }
        Value::Array(values) => values.iter().for_each(|value| gather(value, references)),
        _ => {}
    }
}
