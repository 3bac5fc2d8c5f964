//! gRPC as it is spoken in the wild, HTTP/2 on both sides, and many small streams at once.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use h2::Reason;
use tokio::time::{Instant, sleep};

use crate::support::hedgerow::HedgerowProcess;
use crate::support::http2::agent::head;
use crate::support::http2::{Answer, Call, End, Http2Agent, Http2Upstream, Stream};
use crate::support::policy::{TOOL, tool};

const GRPC: [(&str, &str); 2] = [("content-type", "application/grpc+proto"), ("te", "trailers")];
const ANSWER: [(&str, &str); 1] = [("content-type", "application/grpc+proto")];

/// A message in its frame: not compressed, its length, its bytes.
fn message(text: &str) -> Bytes {
    let length = u32::try_from(text.len()).expect("a short message").to_be_bytes();
    [&[0], &length[..], text.as_bytes()].concat().into()
}

fn policy(upstream: &Http2Upstream, stages: &str) -> String {
    tool(upstream.address(), &format!("origin: h2c, {stages}"))
}

async fn call(agent: &Http2Agent, upstream: &Http2Upstream, fields: &[(&str, &str)]) -> Call {
    agent.open(head("POST", &upstream.url("/pkg.Service/Method"), &[&GRPC, fields].concat()), false).await
}

async fn unary(agent: &Http2Agent, upstream: &Http2Upstream, fields: &[(&str, &str)]) -> Answer {
    let mut call = call(agent, upstream, fields).await;
    assert!(call.send(message("ask"), true).await);
    call.answer().await
}

/// Status and message, wherever they stand.
fn verdict(answer: &Answer) -> (Option<&str>, Option<&str>) {
    let field = |name| answer.trailer(name).or(answer.header(name));
    (field("grpc-status"), field("grpc-message"))
}

async fn answer_with(mut stream: Stream, status: &'static str) {
    stream.body().await;
    stream.head(200, &ANSWER);
    stream.data(message("answer")).await;
    stream.trailers(&[("grpc-status", status), ("grpc-message", "as said")]);
}

#[tokio::test]
async fn a_unary_call_brings_its_status_in_the_trailers() {
    let upstream = Http2Upstream::serving(|stream| answer_with(stream, "0")).await;
    let hedgerow = HedgerowProcess::start(&policy(&upstream, "hedge: off")).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    for answer in join_all((0..20).map(|_| unary(&agent, &upstream, &[]))).await {
        assert_eq!((answer.status, &answer.body[..], answer.end), (200, &message("answer")[..], End::Whole));
        assert_eq!(verdict(&answer), (Some("0"), Some("as said")));
        assert_eq!(answer.header("content-type"), Some("application/grpc+proto"));
        assert_eq!(answer.header("grpc-status"), None, "in the trailers alone");
    }
    // None of them dialled for itself, though nothing was known of the upstream.
    assert!(upstream.tally().connections <= 3, "{:?}", upstream.tally());
    let seen = &upstream.requests()[0];
    assert_eq!(seen.headers["te"], "trailers");
    assert_eq!(seen.uri.path(), "/pkg.Service/Method");
}

#[tokio::test]
async fn a_trailers_only_answer_passes_as_it_is() {
    let upstream = Http2Upstream::serving(|mut stream: Stream| async move {
        stream.body().await;
        let fields = [&ANSWER[..], &[("grpc-status", "5"), ("grpc-message", "none such")]].concat();
        stream.respond(200, &fields, "").await;
    })
    .await;
    let hedgerow = HedgerowProcess::start(&policy(&upstream, "hedge: off")).await;
    let answer = unary(&Http2Agent::connect(hedgerow.proxy).await, &upstream, &[]).await;
    assert_eq!((answer.status, answer.end, answer.body.len()), (200, End::Whole, 0));
    assert_eq!(verdict(&answer), (Some("5"), Some("none such")));
}

#[tokio::test]
async fn the_messages_of_a_server_stream_come_one_by_one() {
    let mut upstream = Http2Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&policy(&upstream, "hedge: off")).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let mut call = call(&agent, &upstream, &[]).await;
    assert!(call.send(message("subscribe"), true).await);
    let mut stream = upstream.next().await;
    stream.head(200, &ANSWER);
    let mut incoming = call.head().await;
    for n in 0..50 {
        let text = message(&format!("event {n}"));
        assert!(stream.data(text.clone()).await);
        assert_eq!(incoming.chunk().await, Some(text), "before the next one is sent");
    }
    stream.trailers(&[("grpc-status", "0")]);
    let answer = incoming.rest().await;
    assert_eq!((verdict(&answer).0, answer.end), (Some("0"), End::Whole));
}

/// Both directions at once: an answer does not wait for the end of its request.
#[tokio::test]
async fn a_bidirectional_stream_echoes_while_the_request_is_still_open() {
    let mut upstream = Http2Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&policy(&upstream, "")).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let call = call(&agent, &upstream, &[]).await;
    let mut stream = upstream.next().await;
    // The head comes before the first message of either side.
    stream.head(200, &ANSWER);
    let mut incoming = call.head().await;
    for n in 0..100 {
        let text = message(&format!("message {n}"));
        incoming.send(text.clone(), false);
        assert_eq!(stream.chunk().await, Some(text.clone()));
        assert!(stream.data(text.clone()).await);
        assert_eq!(incoming.chunk().await, Some(text));
    }
    incoming.send("", true);
    assert_eq!(stream.chunk().await, None, "the end of the request arrives");
    assert!(stream.data(message("bye")).await);
    stream.trailers(&[("grpc-status", "0")]);
    let answer = incoming.rest().await;
    assert_eq!((&answer.body[..], verdict(&answer).0), (&message("bye")[..], Some("0")));
}

#[tokio::test]
async fn a_client_stream_of_many_messages_arrives_whole_and_in_order() {
    let upstream = Http2Upstream::serving(|mut stream: Stream| async move {
        let (body, _) = stream.body().await;
        stream.head(200, &ANSWER);
        stream.data(Bytes::from(body)).await;
        stream.trailers(&[("grpc-status", "0")]);
    })
    .await;
    let hedgerow = HedgerowProcess::start(&policy(&upstream, "hedge: off")).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let mut call = call(&agent, &upstream, &[]).await;
    let mut sent = Vec::new();
    for n in 0..500 {
        let text = message(&format!("message {n}"));
        sent.extend_from_slice(&text);
        assert!(call.send(text, n == 499).await);
    }
    let answer = call.answer().await;
    assert!(answer.body == sent, "{} of {} bytes: {answer:?}", answer.body.len(), sent.len());
    assert_eq!(verdict(&answer).0, Some("0"));
}

#[tokio::test]
async fn a_timeout_is_told_shrunk_and_ends_in_deadline_exceeded() {
    let mut upstream = Http2Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&policy(&upstream, "hedge: off")).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let began = Instant::now();
    let mut call = call(&agent, &upstream, &[("grpc-timeout", "1500m")]).await;
    assert!(call.send(message("ask"), true).await);
    let stream = upstream.next().await;
    let told = stream.values("grpc-timeout")[0].to_owned();
    let (digits, unit) = told.split_at(told.len() - 1);
    let micros = digits.parse::<u64>().unwrap()
        * match unit {
            "m" => 1000,
            "u" => 1,
            other => panic!("{other}"),
        };
    assert!((1..1_500_000).contains(&micros), "{told}");
    let (answer, (reason, _)) = tokio::join!(call.answer(), stream.cancelled());
    assert_eq!(reason, Some(Reason::CANCEL));
    // And not after the policy's half a minute.
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    assert_eq!((answer.status, answer.end), (200, End::Whole));
    assert_eq!(verdict(&answer).0, Some("4"));
    assert_eq!(answer.header("content-type"), Some("application/grpc"));
}

/// The HTTP status is 200 throughout: what fails stands in the trailers.
#[tokio::test]
async fn statuses_in_trailers_open_the_breaker_which_answers_unavailable() {
    let upstream = Http2Upstream::serving(|stream| answer_with(stream, "14")).await;
    let stages = "hedge: off, breaker: { consecutive_failures: 3, open_for: 30s }";
    let hedgerow = HedgerowProcess::start(&policy(&upstream, stages)).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    for _ in 0..3 {
        assert_eq!(verdict(&unary(&agent, &upstream, &[]).await), (Some("14"), Some("as said")));
    }
    let open = [TOOL, ("state", "open")];
    hedgerow.until_metrics(|metrics| metrics.value("hedgerow_breaker_state", &open) == 1.0).await;
    let refused = unary(&agent, &upstream, &[]).await;
    assert_eq!((refused.status, verdict(&refused).0, refused.end), (200, Some("14"), End::Whole));
    assert!(refused.header("proxy-status").unwrap().starts_with("hedgerow; error="), "{refused:?}");
    assert_eq!(upstream.tally().requests, 3);
}

#[tokio::test]
async fn a_client_that_cancels_a_stream_cancels_it_at_the_upstream() {
    let mut upstream = Http2Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&policy(&upstream, "hedge: off")).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    for _ in 0..50 {
        let mut call = call(&agent, &upstream, &[]).await;
        assert!(call.send(message("subscribe"), false).await);
        let mut stream = upstream.next().await;
        stream.head(200, &ANSWER);
        assert!(stream.data(message("event")).await);
        let mut incoming = call.head().await;
        assert!(incoming.chunk().await.is_some());
        incoming.reset(Reason::CANCEL);
        assert_eq!(stream.cancelled().await.0, Some(Reason::CANCEL));
    }
    assert_eq!(upstream.tally().connections, 1);
}

/// A hundred streams of small frames look like a flood to a careless guard, in either direction.
#[tokio::test]
async fn a_hundred_streams_of_small_events_trip_no_guard() {
    const FRAMES: usize = 50;
    const EVENT: &str = "data: 0123456789012345678901234567890\n\n";
    let upstream = Http2Upstream::serving(|mut stream: Stream| async move {
        stream.head(200, &[("content-type", "text/event-stream")]);
        for _ in 0..FRAMES {
            if !stream.data(EVENT).await {
                return;
            }
            // Each in a frame of its own.
            sleep(Duration::from_millis(1)).await;
        }
        stream.end();
    })
    .await;
    let hedgerow = HedgerowProcess::start(&policy(&upstream, "hedge: off")).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let url = upstream.url("/events");
    for answer in join_all((0..100).map(|_| agent.get(&url))).await {
        assert_eq!((answer.status, answer.end), (200, End::Whole));
        assert_eq!(answer.text(), EVENT.repeat(FRAMES));
    }
    // And as many small uploads, each piece in a frame of its own.
    let mut calls = Vec::new();
    for _ in 0..100 {
        calls.push(call(&agent, &upstream, &[]).await);
    }
    for n in 0..FRAMES {
        for call in &mut calls {
            assert!(call.send(message("small"), n + 1 == FRAMES).await, "round {n}");
        }
    }
    for answer in join_all(calls.into_iter().map(|call| call.answer())).await {
        assert_eq!((answer.status, answer.end), (200, End::Whole));
    }
    let tally = upstream.tally();
    assert!(tally.goodbyes.is_empty() && tally.connections <= 3, "{tally:?}");
    assert!(!agent.is_closed().await);
}

/// Small frames that wait for readers who do not come fill their own windows, and the connection that they
/// share goes on for the others.
#[tokio::test]
async fn event_streams_that_nobody_reads_do_not_cost_their_neighbours_the_connection() {
    const EVENT: &str = "data: 0123456789012345678901234567890\n\n";
    let upstream = Http2Upstream::serving(|mut stream: Stream| async move {
        if stream.uri.path() == "/small" {
            return stream.respond(200, &[], "small").await;
        }
        stream.head(200, &[("content-type", "text/event-stream")]);
        while stream.data(EVENT).await {}
    })
    .await;
    let hedgerow = HedgerowProcess::start(&policy(&upstream, "hedge: off")).await;
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(1024).initial_connection_window_size(1024 * 1024);
    let agent = Http2Agent::with(hedgerow.agent().await, &builder).await;
    let mut unread = Vec::new();
    for _ in 0..20 {
        unread.push(agent.open(head("GET", &upstream.url("/events"), &[]), true).await.head().await);
    }
    let url = upstream.url("/small");
    for _ in 0..20 {
        assert_eq!(agent.get(&url).await.text(), "small");
        // Time for the windows to fill up.
        sleep(Duration::from_millis(20)).await;
    }
    let tally = upstream.tally();
    assert!(tally.goodbyes.is_empty() && tally.connections == 1, "{tally:?}");
    for incoming in &mut unread {
        assert!(incoming.chunk().await.is_some());
    }
}
