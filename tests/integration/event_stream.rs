//! Event streams that are cut: several clients read them line by line and take any end for the end, so
//! the cut is told in the stream's own words before the message ends incomplete.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::support::client::{Agent, absolute};
use crate::support::h1::{Framing, ResponseHead};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::policy::{TOOL, tool};
use crate::support::upstream::{Exchange, Upstream};

const EVENTS: (&str, &str) = ("Content-Type", "Text/Event-Stream; charset=utf-8");
const ID: (&str, &str) = ("x-request-id", "asked-for-1");
const WHOLE: &str = "data: 1\n\n";

/// A call whose answer has begun with `first`, with the upstream's end of it.
async fn begin(
    hedgerow: &HedgerowProcess,
    upstream: &mut Upstream,
    asked: &[(&str, &str)],
    answered: &[(&str, &str)],
    first: &str,
) -> (Agent, Exchange) {
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("GET", &upstream.url("/"), asked, b"")).await;
    let mut exchange = upstream.next().await;
    exchange.start_chunks(200, answered).await;
    exchange.chunk(first).await;
    let head = agent.read_head().await;
    assert!(head.status == 200 && is_chunked(&head), "{head:?}");
    // What has arrived is not lost when the upstream resets.
    assert_eq!(agent.read_chunk().await.as_deref(), Some(first.as_bytes()));
    (agent, exchange)
}

fn is_chunked(head: &ResponseHead) -> bool {
    matches!(head.framing("GET"), Ok(Framing::Chunked))
}

/// The rest of a chunked body, which must be cut.
async fn cut_rest(mut agent: Agent) -> String {
    let body = agent.read_body(Framing::Chunked).await;
    let text = String::from_utf8(body.bytes).expect("the stream is text");
    assert!(!body.complete, "the cut stream looks whole: {text:?}");
    text
}

/// The problem of an `error` event that begins where a line does.
#[track_caller]
fn problem(event: &str) -> Value {
    let data = event.strip_prefix("event: error\ndata: ").and_then(|rest| rest.strip_suffix("\n\n"));
    let data = data.unwrap_or_else(|| panic!("no error event: {event:?}"));
    assert!(!data.contains('\n'), "{data:?}");
    serde_json::from_str(data).expect("a problem is JSON")
}

#[tokio::test]
async fn a_stream_that_breaks_ends_in_an_error_event() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "")).await;
    let (agent, exchange) = begin(&hedgerow, &mut upstream, &[ID], &[EVENTS], WHOLE).await;
    exchange.reset();
    let event = cut_rest(agent).await;
    let expected = serde_json::json!({
        "type": "about:blank",
        "title": "upstream answer incomplete",
        "status": 502,
        "detail": "the answer of tool ended before it was complete",
        "error": "upstream_incomplete",
        "upstream": "tool",
        "retryable": true,
        "request_id": ID.1,
    });
    assert_eq!(problem(&event), expected);
    let line = hedgerow.access_log(|line| line["request_id"] == ID.1).await;
    assert_eq!((&line["outcome"], &line["error"]), (&"incomplete".into(), &"upstream_incomplete".into()));
    assert_eq!(line["bytes_out"], WHOLE.len() + event.len());
    let incomplete = [TOOL, ("outcome", "incomplete"), ("code", "200")];
    assert_eq!(hedgerow.metrics().await.value("hedgerow_requests_total", &incomplete), 1.0);
}

#[tokio::test]
async fn half_an_event_is_ended_as_the_error() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    for (half, line_end) in [("data: 1\n\nevent: delta\ndata: {\"a", "\n"), ("data: {\"a\":1}\r\n", "")] {
        let (agent, exchange) = begin(&hedgerow, &mut upstream, &[], &[EVENTS], half).await;
        exchange.close().await;
        let rest = cut_rest(agent).await;
        let event = rest.strip_prefix(line_end).unwrap_or_else(|| panic!("the line goes on: {rest:?}"));
        assert_eq!(problem(event)["error"], "upstream_incomplete");
    }
}

// Ending it would move the client's place beyond it, and resuming there would lose the event for good.
#[tokio::test]
async fn half_an_event_with_an_id_is_left_as_it_is() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let half = "id: 7\ndata: 1\n\nid: 8\ndata: ha";
    let (agent, exchange) = begin(&hedgerow, &mut upstream, &[], &[EVENTS], half).await;
    exchange.close().await;
    assert_eq!(cut_rest(agent).await, "");
}

#[tokio::test]
async fn a_deadline_within_a_stream_is_told() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let (agent, exchange) =
        begin(&hedgerow, &mut upstream, &[("grpc-timeout", "1500m")], &[EVENTS], WHOLE).await;
    let problem = problem(&cut_rest(agent).await);
    assert_eq!((&problem["error"], &problem["status"]), (&"deadline_exceeded".into(), &504.into()));
    assert_eq!(problem["detail"], "grpc-timeout struck before the end of the body");
    exchange.gone().await;
}

#[tokio::test]
async fn a_deadline_is_told_though_events_never_pause() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let (agent, mut exchange) =
        begin(&hedgerow, &mut upstream, &[("grpc-timeout", "1500m")], &[EVENTS], WHOLE).await;
    let chatter = tokio::spawn(async move {
        // Ends when the other side is gone and the socket's buffers are full of what nobody reads.
        loop {
            exchange.chunk(WHOLE).await;
            tokio::task::yield_now().await;
        }
    });
    let rest = cut_rest(agent).await;
    chatter.abort();
    let event = rest.trim_start_matches(WHOLE);
    assert_eq!(problem(event)["error"], "deadline_exceeded");
}

#[tokio::test]
async fn a_silence_that_is_too_long_is_told() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "stream_idle: 1s")).await;
    let (agent, exchange) = begin(&hedgerow, &mut upstream, &[], &[EVENTS], WHOLE).await;
    let problem = problem(&cut_rest(agent).await);
    assert_eq!(problem["detail"], "upstreams.tool.stream_idle struck before the end of the body");
    exchange.gone().await;
}

#[tokio::test]
async fn leaving_at_drain_max_is_told() {
    let mut upstream = Upstream::start().await;
    let mut hedgerow = HedgerowProcess::start("drain: { quiet: 50ms, max: 300ms }").await;
    let (agent, exchange) = begin(&hedgerow, &mut upstream, &[], &[EVENTS], WHOLE).await;
    hedgerow.signal(Signal::TERM);
    let problem = problem(&cut_rest(agent).await);
    assert_eq!((&problem["error"], &problem["status"]), (&"shutting_down".into(), &503.into()));
    exchange.gone().await;
    assert_eq!(hedgerow.wait().await, 0);
}

#[tokio::test]
async fn nothing_is_added_to_what_cannot_take_it() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let gzip = [EVENTS, ("Content-Encoding", "gzip")];
    for answered in [&gzip[..], &[("Content-Type", "text/plain")], &[]] {
        let (agent, exchange) = begin(&hedgerow, &mut upstream, &[], answered, WHOLE).await;
        exchange.close().await;
        assert_eq!(cut_rest(agent).await, "", "{answered:?}");
    }

    let mut agent = hedgerow.agent().await;
    agent.send(absolute("GET", &upstream.url("/"), &[], b"")).await;
    let mut exchange = upstream.next().await;
    exchange.head_only(200, &[EVENTS, ("Content-Length", "500")]).await;
    exchange.raw(WHOLE.as_bytes()).await;
    exchange.close().await;
    let counted = agent.read_response().await;
    assert_eq!((counted.text(), counted.complete), (WHOLE, false));

    let mut agent = hedgerow.agent().await;
    agent.send(absolute("HEAD", &upstream.url("/"), &[], b"")).await;
    let mut exchange = upstream.next().await;
    exchange.start_chunks(200, &[EVENTS]).await;
    exchange.close().await;
    assert_eq!(agent.read_response_to("HEAD").await.status, 200);
    assert_eq!(agent.all_that_comes().await, b"");
}

// In HTTP/1.0 the cut is a reset, which must not overtake the event.
#[tokio::test]
async fn a_client_without_chunks_gets_the_event_before_the_reset() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    agent.send(format!("GET {} HTTP/1.0\r\nHost: x\r\n\r\n", upstream.url("/"))).await;
    let mut exchange = upstream.next().await;
    exchange.start_chunks(200, &[EVENTS]).await;
    exchange.chunk(WHOLE).await;
    agent.read_head().await;
    agent.expect(WHOLE.as_bytes()).await;
    exchange.close().await;
    let body = agent.read_body(Framing::UntilClose).await;
    assert!(!body.complete);
    assert_eq!(problem(std::str::from_utf8(&body.bytes).unwrap())["error"], "upstream_incomplete");
}

// At the cut, what was not yet written was thrown away, and the event with it.
#[tokio::test]
async fn a_client_that_reads_late_gets_the_event_too() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let event = format!("data: {}\n\n", "x".repeat(32 << 10));
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("GET", &upstream.url("/"), &[], b"")).await;
    let mut exchange = upstream.next().await;
    exchange.start_chunks(200, &[EVENTS]).await;
    let ports = (hedgerow.proxy.port(), agent.local_address().port());
    let mut sent = 0;
    loop {
        exchange.chunk(&event).await;
        sent += event.len();
        let passed = async {
            while queued(ports) < sent {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        // Blocked for so long, it is blocked for good: a part of this event is still with hedgerow.
        if tokio::time::timeout(Duration::from_millis(300), passed).await.is_err() {
            break;
        }
    }
    exchange.close().await;
    // The permit is given back at the cut, though the client has not seen it yet.
    hedgerow.until_metrics(|metrics| metrics.value("hedgerow_bulkhead_in_flight", &[]) == 0.0).await;
    agent.read_head().await;
    let rest = cut_rest(agent).await;
    assert_eq!(problem(rest.trim_start_matches(&event))["error"], "upstream_incomplete");
}

/// Bytes on their way from the one local port to the other, in the kernel's queues on both sides.
fn queued((from, to): (u16, u16)) -> usize {
    let table = std::fs::read_to_string("/proc/net/tcp").expect("the kernel lists its sockets");
    let (from, to) = (format!(":{from:04X}"), format!(":{to:04X}"));
    let size = |digits: &str| usize::from_str_radix(digits, 16).expect("a queue's size");
    let sockets = table.lines().filter(|line| line.contains(&from) && line.contains(&to)).map(|line| {
        // Number, local address, remote address, state, both queues.
        let mut fields = line.split_whitespace().skip(1);
        let is_sender = fields.next().is_some_and(|local| local.ends_with(&from));
        let (sending, receiving) =
            fields.nth(2).and_then(|queues| queues.split_once(':')).expect("two queues");
        size(if is_sender { sending } else { receiving })
    });
    sockets.sum()
}
