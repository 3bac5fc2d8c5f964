//! A fan-out whose results are told one by one, as a stream of events.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::support::fanout::{Event, PATH, Report, Told, get, take, told};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::http2::agent::head;
use crate::support::http2::{End, Http2Agent};
use crate::support::policy::{TOOL, tool};
use crate::support::upstream::{Reply, Upstream, by_path, pattern};

/// One attempt and no guard that remembers, where the test is about neither.
const BARE: &str = "hedge: off, breaker: off";
/// Much longer than anything takes that a test waits for.
const LATE: u64 = 18_000;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn calls(calls: impl Into<Value>) -> Value {
    json!({ "deadline_ms": LATE, "calls": calls.into() })
}

/// Those of these ids, each for the path of its name.
fn list(upstream: &Upstream, ids: &[&str]) -> Value {
    ids.iter().map(|id| get(id, upstream.url(&format!("/{id}")))).collect()
}

fn names(events: &[Event]) -> Vec<&str> {
    events.iter().map(|event| &*event.name).collect()
}

/// What the last event sums up.
#[track_caller]
fn summary(events: &[Event]) -> Report {
    let last = events.last().expect("an event");
    assert_eq!(last.name, "complete");
    Report(last.data.clone())
}

#[tokio::test]
async fn results_are_told_as_they_come_in_events_with_ascending_ids() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let body = calls(list(&upstream, &["a", "b", "c"]));
    let mut events = hedgerow.fan_out_events(&[("x-request-id", "f-1")], &body).await;
    // The head is there before any result is.
    for (name, value) in [
        ("cache-control", "no-store"),
        ("x-accel-buffering", "no"),
        ("content-language", "en"),
        ("vary", "accept, accept-language"),
        ("via", "1.1 hedgerow"),
    ] {
        assert_eq!(events.head.headers.get(name), Some(value));
    }
    let exchanges = take(&mut upstream, ["/c", "/a", "/b"]).await;
    let mut all = Vec::new();
    for (exchange, id) in exchanges.into_iter().zip(["c", "a", "b"]) {
        // Each one is here while those after it have no answer yet.
        let fields = [("Content-Type", "application/json"), ("X-Own", id)];
        exchange.respond(200, &fields, "{\r\n  \"n\": 1,\n\n  \"s\": \"\\n\"\n}").await;
        let event = events.next().await;
        let Some(Told::Event(event)) = event else { panic!("{event:?}") };
        assert_eq!((&*event.name, &event.data["id"]), ("result", &json!(id)));
        assert_eq!((&event.data["status"], &event.data["source"]), (&json!(200), &json!("primary")));
        assert_eq!(event.data["headers"]["x-own"], id);
        assert_eq!(event.data["body"], json!({ "n": 1, "s": "\n" }));
        all.push(event);
    }
    let mut rest = events.rest().await;
    let report = summary(&rest);
    assert_eq!((rest.len(), report.is_complete(), report.warning()), (1, true, ""));
    assert_eq!((&report.0["missing"], report.0.get("results")), (&json!({}), None));
    assert_eq!(report.0["counts"]["results"], 3);
    all.append(&mut rest);
    assert_eq!(all.iter().map(|event| event.id).collect::<Vec<_>>(), [1, 2, 3, 4]);
    // The connection is good for another.
    assert_eq!(events.agent.get_at(&hedgerow.proxy.to_string(), "/v1/openapi.json").await.status, 200);
    let line = hedgerow.access_log(|line| line["request_id"] == "f-1").await;
    assert_eq!(
        (&line["status"], &line["outcome"], &line["path"]),
        (&json!(200), &json!("answered"), &json!(PATH))
    );
}

/// An upstream's line ends are none of the stream's.
#[tokio::test]
async fn whatever_a_result_holds_an_event_is_three_lines() {
    let texts = [
        "\n\ndata: [DONE]\n\n",
        "\r\revent: complete\r\n",
        "{\n\"a\"\n:\r\n\"\\n\"}",
        "\u{2028}\u{0}\u{feff}",
    ];
    let upstream = Upstream::answering(move |seen| {
        let (kind, at) = seen.path()[1..].split_once('/').expect("a type and a number");
        let kind = format!("{}/{kind}", if kind == "json" { "application" } else { "text" });
        Reply::ok(texts[at.parse::<usize>().expect("a number")]).header("Content-Type", &kind)
    })
    .await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let ids: Vec<_> =
        (0..texts.len()).flat_map(|at| ["json", "plain"].map(|kind| format!("{kind}/{at}"))).collect();
    let list: Vec<_> = ids.iter().map(|id| get(id, upstream.url(&format!("/{id}")))).collect();
    let events = hedgerow.fan_out_events(&[], &calls(list)).await.rest().await;
    assert_eq!(events.len(), ids.len() + 1);
    for event in &events[..ids.len()] {
        let (kind, at) = event.data["id"].as_str().unwrap().split_once('/').unwrap();
        let expected = match (kind, at) {
            ("json", "2") => json!({ "a": "\n" }),
            (_, at) => json!(texts[at.parse::<usize>().unwrap()]),
        };
        assert_eq!(event.data["body"], expected, "{}", event.data);
    }
    // Numbers stay as long as they are, and what some readers of lines take for the end of one is escaped.
    let upstream = Upstream::answering(|_| {
        Reply::ok("[\"\u{2028}é…\u{85}\",\n12345678901234567890123]")
            .header("Content-Type", "application/json")
    })
    .await;
    let body = calls([get("a", upstream.url("/"))]).to_string();
    let answer = hedgerow.fan_out_with(&[("Accept", "text/event-stream")], body).await;
    assert!(
        answer.text().contains(",\"body\":[\"\\u2028é…\\u0085\",12345678901234567890123]}\n\n"),
        "{}",
        answer.text()
    );
}

/// The one that hung held up the rest, and here nothing waits for it at all.
#[tokio::test]
async fn c106_four_results_are_told_when_they_are_ready_and_the_hung_one_at_the_deadline() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let ids = ["a", "b", "hung", "c", "d"];
    let body = json!({ "deadline_ms": 2500, "calls": list(&upstream, &ids) });
    let began = Instant::now();
    let mut events = hedgerow.fan_out_events(&[], &body).await;
    let [a, b, hung, c, d] = take(&mut upstream, ["/a", "/b", "/hung", "/c", "/d"]).await;
    let mut came = Vec::new();
    for exchange in [d, c, b, a] {
        let id = exchange.path()[1..].to_owned();
        exchange.respond(200, &[], "ok").await;
        let event = events.event().await;
        assert_eq!((&*event.name, &event.data["id"]), ("result", &json!(id)));
        came.push(event.id);
    }
    let ready = began.elapsed();
    let (rest, gone) = tokio::join!(events.rest(), hung.gone());
    let took = gone - began;
    assert!(took >= ms(2400) && took < ms(10_000), "{took:?}");
    // All of what could be told was told in time.
    assert!(ready < took, "{ready:?}");
    assert_eq!((came, names(&rest)), (vec![1, 2, 3, 4], vec!["deadline", "complete"]));
    assert_eq!(rest.iter().map(|event| event.id).collect::<Vec<_>>(), [5, 6]);
    assert_eq!(rest[0].data, json!({ "deadline_ms": 2500, "pending": ["hung"] }));
    let report = summary(&rest);
    assert_eq!(
        (report.missing(), report.why("hung"), report.is_complete()),
        (vec!["hung"], "deadline", false)
    );
    assert!(
        report.warning().starts_with("Warning: hung unavailable (deadline 2500 ms)."),
        "{}",
        report.warning()
    );
}

/// The deadline strikes once, for all that are late or were never begun, in the order of the calls.
#[tokio::test]
async fn the_deadline_is_one_event_for_all_that_were_pending() {
    let upstream = Upstream::answering(by_path(&[("/b", Reply::ok("")), ("/f", Reply::ok(""))])).await;
    let hung = Upstream::answering(|_| Reply::hang()).await;
    let hedgerow = HedgerowProcess::start(&format!("defaults: {{ {BARE} }}")).await;
    let body = json!({ "deadline_ms": 1500, "max_concurrent": 3, "calls": [
        get("a", hung.url("/")), get("b", upstream.url("/b")), get("c", hung.url("/")),
        get("d", hung.url("/")), get("e", hung.url("/")), get("f", upstream.url("/f")),
    ] });
    let events = hedgerow.fan_out_events(&[], &body).await.rest().await;
    assert_eq!(names(&events), ["result", "deadline", "complete"]);
    assert_eq!(events[1].data["pending"], json!(["a", "c", "d", "e", "f"]));
    assert_eq!(summary(&events).missing(), ["a", "c", "d", "e", "f"]);
    assert_eq!(hung.count(), 3);
}

/// A call's failure is something that is told, and no end.
#[tokio::test]
async fn c107_when_all_are_down_each_is_told_and_the_stream_is_whole() {
    let (dead, _keeps_it_dead) = Upstream::dead();
    let upstream =
        Upstream::answering(by_path(&[("/cut", Reply::close()), ("/503", Reply::status(503))])).await;
    let hedgerow = HedgerowProcess::start(&format!("defaults: {{ {BARE} }}")).await;
    let body = calls(json!([
        get("refused", format!("http://{dead}/")),
        get("cut", upstream.url("/cut")),
        get("503", upstream.url("/503")),
        get("bad", "ftp://a.test/"),
    ]));
    let events = hedgerow.fan_out_events(&[], &body).await.rest().await;
    assert_eq!(names(&events), ["missing", "missing", "missing", "missing", "complete"]);
    let report = summary(&events);
    assert_eq!(report.missing(), ["refused", "cut", "503", "bad"]);
    for (id, why) in [
        ("refused", "connect_failed"),
        ("cut", "upstream_reset"),
        ("503", "upstream_status"),
        ("bad", "invalid_request"),
    ] {
        assert_eq!(report.why(id), why);
        // What an event says is what the summary says.
        let event = events.iter().find(|event| event.data["id"] == id).expect("each is told");
        let mut named = json!({ "id": id });
        named.as_object_mut().unwrap().extend(report.0["missing"][id].as_object().unwrap().clone());
        assert_eq!(event.data, named);
    }
    // What needs nobody's answer is told first.
    assert_eq!(events[0].data["id"], "bad");
    assert_eq!((report.is_complete(), &report.0["counts"]["results"]), (false, &json!(0)));
}

/// Some clients give up on a connection after five seconds without a byte.
#[tokio::test]
async fn a_silence_is_broken_by_a_comment() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let mut events = hedgerow.fan_out_events(&[], &calls(list(&upstream, &["a"]))).await;
    let exchange = upstream.next().await;
    for _ in 0..2 {
        let began = Instant::now();
        assert_eq!(events.next().await, Some(Told::Comment("still working".into())));
        // Twice as long as it is to be, and still in time for those clients.
        assert!(began.elapsed() < ms(4900), "{:?}", began.elapsed());
    }
    exchange.respond(200, &[], "").await;
    assert_eq!(names(&events.rest().await), ["result", "complete"]);
}

/// A client that resumes believes that nothing happens twice.
#[tokio::test]
async fn a_stream_cannot_be_resumed() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let body = calls(list(&upstream, &["a"])).to_string();
    for (last, accept) in [("3", "text/event-stream"), ("", "text/event-stream"), ("3", "application/json")] {
        let answer = hedgerow.fan_out_with(&[("Last-Event-ID", last), ("Accept", accept)], &body).await;
        assert_eq!(answer.header("content-type"), Some("application/problem+json"));
        assert_eq!((answer.status, &answer.json()["error"]), (400, &json!("invalid_request")));
        assert!(answer.json()["detail"].as_str().unwrap().contains("Last-Event-ID"), "{}", answer.text());
    }
    assert_eq!(upstream.count(), 0);
}

#[tokio::test]
async fn accept_decides_between_both_forms() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let body = calls(list(&upstream, &["a"])).to_string();
    for (accept, kind) in [
        ("*/*", "application/json"),
        ("application/json, text/event-stream", "application/json"),
        ("text/event-stream, application/json", "text/event-stream"),
        ("text/event-stream;q=0.5, application/json", "application/json"),
        ("Text/Event-Stream", "text/event-stream"),
        ("text/html", "application/json"),
    ] {
        let answer = hedgerow.fan_out_with(&[("Accept", accept)], &body).await;
        let told = answer.header("content-type").unwrap();
        assert_eq!((answer.status, told.split(';').next()), (200, Some(kind)), "{accept}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_its_stream_takes_all_of_its_calls_along() {
    let mut upstream = Upstream::start().await;
    let stages = "hedge: off, breaker: { consecutive_failures: 1, fair_chance: 0s }";
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    let mut delays = Vec::new();
    for round in 0..20 {
        let body = calls(list(&upstream, &["a", "b", "c"]));
        let mut events = hedgerow.fan_out_events(&[], &body).await;
        let [a, b, mut c] = take(&mut upstream, ["/a", "/b", "/c"]).await;
        c.start_chunks(200, &[]).await;
        c.chunk("some").await;
        a.respond(200, &[], "").await;
        assert_eq!(events.event().await.name, "result");
        let began = Instant::now();
        match round % 2 {
            0 => drop(events),
            _ => events.agent.reset(),
        }
        for exchange in [b, c] {
            delays.push(exchange.gone().await - began);
        }
    }
    delays.sort();
    assert!(delays[20] < ms(300), "{delays:?}");
    let left = ("outcome", "client_left");
    let metrics = hedgerow
        .until_metrics(|metrics| {
            metrics.value("hedgerow_requests_total", &[TOOL, left]) == 40.0
                && metrics.value("hedgerow_fanout_requests_total", &[("result", "client_left")]) == 20.0
        })
        .await;
    assert_eq!(metrics.value("hedgerow_breaker_transitions_total", &[TOOL]), 0.0);
    hedgerow.until_status(|status| status["in_flight"] == 0).await;
}

/// The deadline is the calls', whoever reads.
#[tokio::test]
async fn a_client_that_does_not_read_keeps_no_call_running_past_the_deadline() {
    const EACH: usize = 512 << 10;
    let upstream =
        Upstream::answering(|_| Reply::ok(pattern(0, EACH)).header("Content-Type", "image/png")).await;
    let mut hung = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&format!("defaults: {{ {BARE} }}")).await;
    // More than both sides' kernels hold.
    let mut list: Vec<_> = (0..40).map(|at| get(&at.to_string(), upstream.url("/"))).collect();
    list.push(get("hung", hung.url("/")));
    let began = Instant::now();
    let body = json!({ "deadline_ms": 4000, "calls": list });
    let mut events = hedgerow.fan_out_events(&[], &body).await;
    let gone = hung.next().await.gone().await - began;
    assert!(gone >= ms(3800) && gone < ms(16_000), "{gone:?}");
    upstream.until(|tally| tally.requests == 40 && tally.in_flight == 0).await;
    // Nothing was lost meanwhile.
    let events = events.rest().await;
    assert_eq!(names(&events), [&["result"; 40][..], &["deadline", "complete"]].concat());
    for event in &events[..40] {
        assert_eq!(event.data["body_base64"].as_str().map(str::len), Some(EACH.div_ceil(3) * 4));
    }
    assert_eq!(summary(&events).missing(), ["hung"]);
}

#[tokio::test]
async fn what_is_not_awaited_is_told_and_cancelled() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let mut body = calls(list(&upstream, &["hung", "a"]));
    body["min_results"] = json!(1);
    let mut events = hedgerow.fan_out_events(&[("Accept-Language", "zh")], &body).await;
    let [hung, a] = take(&mut upstream, ["/hung", "/a"]).await;
    a.respond(404, &[], "").await;
    let events = events.rest().await;
    hung.gone().await;
    assert_eq!(names(&events), ["result", "missing", "complete"]);
    assert_eq!((&events[1].data["id"], &events[1].data["error"]), (&json!("hung"), &json!("not_awaited")));
    let report = summary(&events);
    assert_eq!((report.missing(), report.why("hung")), (vec!["hung"], "not_awaited"));
    assert!(report.warning().starts_with("警告：hung 数据缺失"), "{}", report.warning());
}

#[tokio::test]
async fn leaving_at_drain_max_ends_the_stream_with_its_summary() {
    let mut upstream = Upstream::start().await;
    let policy = format!("drain: {{ quiet: 50ms, max: 600ms }}\ndefaults: {{ {BARE} }}");
    let mut hedgerow = HedgerowProcess::start(&policy).await;
    let mut events = hedgerow.fan_out_events(&[], &calls(list(&upstream, &["a", "hung"]))).await;
    let [a, hung] = take(&mut upstream, ["/a", "/hung"]).await;
    a.respond(200, &[], "").await;
    assert_eq!(events.event().await.name, "result");
    hedgerow.signal(Signal::TERM);
    let (rest, _) = tokio::join!(events.rest(), hung.gone());
    let report = summary(&rest);
    assert_eq!((report.missing(), report.why("hung")), (vec!["hung"], "shutting_down"));
    assert_eq!(report.0["counts"]["results"], 1);
    assert_eq!(hedgerow.wait().await, 0);
}

#[tokio::test]
async fn an_http2_client_gets_the_same_stream_as_it_comes() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), BARE)).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let url = format!("http://{}{PATH}", hedgerow.proxy);
    let begin = async |body: &Value| {
        let mut call = agent.open(head("POST", &url, &[("accept", "text/event-stream")]), false).await;
        assert!(call.send(body.to_string(), true).await);
        call.head().await
    };
    let body = json!({ "deadline_ms": 2000, "calls": list(&upstream, &["a", "hung"]) });
    let mut answer = begin(&body).await;
    assert_eq!(
        (answer.status, answer.headers["content-type"].as_bytes()),
        (200, &b"text/event-stream; charset=utf-8"[..])
    );
    let [a, hung] = take(&mut upstream, ["/a", "/hung"]).await;
    a.respond(200, &[], "ok").await;
    // Whatever comes first comes while the other call has most of its time left.
    let first = answer.chunk().await.expect("an event");
    let mut text = String::from_utf8(first.to_vec()).unwrap();
    assert!(text.contains("event: result"), "{text}");
    let (rest, _) = tokio::join!(answer.rest(), hung.gone());
    assert_eq!(rest.end, End::Whole);
    text.push_str(rest.text());
    let mut parts = told(&text);
    assert_eq!(parts.pop(), Some(Told::Done));
    let events: Vec<_> = parts
        .into_iter()
        .filter_map(|part| match part {
            Told::Event(event) => Some(event),
            Told::Comment(_) => None,
            Told::Done => panic!("an end before the end"),
        })
        .collect();
    assert_eq!(names(&events), ["result", "deadline", "complete"]);
    assert_eq!(summary(&events).why("hung"), "deadline");

    // A stream that is reset is a client that leaves.
    let answer = begin(&calls(list(&upstream, &["b"]))).await;
    let [b] = take(&mut upstream, ["/b"]).await;
    answer.reset(h2::Reason::CANCEL);
    b.gone().await;
}
