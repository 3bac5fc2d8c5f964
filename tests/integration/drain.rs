//! How the process leaves (theme 24).

use std::time::Duration;

use futures_util::future::join_all;
use rustix::process::Signal;
use tokio::time::{Instant, interval};

use crate::support::client::{Agent, End, crowd};
use crate::support::h1::Framing;
use crate::support::hedgerow::HedgerowProcess;
use crate::support::upstream::{Reply, Upstream};

async fn until_draining(hedgerow: &HedgerowProcess) {
    hedgerow.until_status(|status| status["draining"] == true).await;
}

// The sidecar refused what the agent still had to do in order to finish.
#[tokio::test]
async fn c120_calls_after_sigterm_are_served_while_readiness_is_off() {
    let upstream = Upstream::answering(|_| Reply::ok("served")).await;
    let mut hedgerow = HedgerowProcess::start("drain: { quiet: 2s, max: 1m }").await;
    let mut kept = hedgerow.agent().await;
    assert_eq!(kept.get(&upstream.url("/")).await.header("connection"), None);

    hedgerow.signal(Signal::TERM);
    until_draining(&hedgerow).await;
    let ready = hedgerow.ask_admin("GET", "/readyz").await;
    assert_eq!((ready.status, ready.text()), (503, "draining"));
    assert_eq!(hedgerow.ask_admin("GET", "/livez").await.status, 200);

    // A kept connection learns from its next answer that there will be none after it.
    let last = kept.get(&upstream.url("/")).await;
    assert_eq!((last.status, last.header("connection")), (200, Some("close")));
    assert_eq!(kept.ended().await, End::Closed);
    let mut ticks = interval(Duration::from_millis(50));
    let started = Instant::now();
    let mut last_call = started;
    // Longer than the quiet time, which begins anew with each call.
    while started.elapsed() < Duration::from_secs(3) {
        ticks.tick().await;
        last_call = Instant::now();
        let answer = hedgerow.get(&upstream.url("/")).await;
        assert_eq!(
            (answer.status, answer.text(), answer.header("connection")),
            (200, "served", Some("close"))
        );
    }
    assert_eq!(hedgerow.wait().await, 0);
    let quiet = last_call.elapsed();
    let quiet_or_max = Duration::from_secs(2)..Duration::from_secs(20);
    assert!(quiet_or_max.contains(&quiet), "left {quiet:?} after the last call");
}

#[tokio::test]
async fn sigterm_with_sixty_calls_in_flight_loses_none() {
    let mut upstream = Upstream::start().await;
    let mut hedgerow =
        HedgerowProcess::start("defaults: { hedge: off }\ndrain: { quiet: 50ms, max: 20s }").await;
    let url = upstream.url("/");
    let mut agents = crowd(hedgerow.proxy, 60).await;
    let calls = tokio::spawn(async move { join_all(agents.iter_mut().map(|agent| agent.get(&url))).await });
    let mut exchanges = Vec::new();
    for _ in 0..60 {
        exchanges.push(upstream.next().await);
    }
    hedgerow.signal(Signal::TERM);
    until_draining(&hedgerow).await;
    assert_eq!(hedgerow.status().await["in_flight"], 60);
    // One half answers at once, the other in two parts, so that bodies too outlive the signal.
    for (n, mut exchange) in exchanges.into_iter().enumerate() {
        match n % 2 {
            0 => exchange.respond(200, &[], "whole").await,
            _ => {
                exchange.start_chunks(200, &[]).await;
                exchange.chunk("who").await;
                tokio::task::yield_now().await;
                exchange.chunk("le").await;
                exchange.end().await;
            }
        }
    }
    for answer in calls.await.unwrap() {
        assert_eq!((answer.status, answer.text(), answer.complete), (200, "whole", true));
        assert_eq!(answer.header("connection"), Some("close"));
    }
    assert_eq!(hedgerow.wait().await, 0);
}

// The process waited for streams that have no end.
#[tokio::test]
async fn c121_endless_streams_and_tunnels_are_cut_at_drain_max() {
    let mut upstream = Upstream::start().await;
    let mut hedgerow = HedgerowProcess::start("drain: { quiet: 50ms, max: 800ms }").await;

    let mut events = hedgerow.agent().await;
    events.send(format!("GET {} HTTP/1.1\r\nHost: x\r\n\r\n", upstream.url("/events"))).await;
    let mut stream = upstream.next().await;
    stream.start_chunks(200, &[("Content-Type", "text/event-stream")]).await;
    stream.chunk("data: 1\n\n").await;
    assert_eq!(events.read_head().await.status, 200);
    assert_eq!(events.read_chunk().await.unwrap(), b"data: 1\n\n");

    // In HTTP/1.0 the end of the connection is the end of the body, so a cut must be a reset.
    let mut old = hedgerow.agent().await;
    old.send(format!("GET {} HTTP/1.0\r\nHost: x\r\n\r\n", upstream.url("/old"))).await;
    let mut old_stream = upstream.next().await;
    old_stream.start_chunks(200, &[]).await;
    old_stream.chunk("part").await;
    assert_eq!(old.read_head().await.status, 200);
    old.expect(b"part").await;

    let mut tunnel = hedgerow.agent().await;
    assert_eq!(tunnel.open_tunnel(&upstream.address().to_string()).await.status, 200);

    let mut socket = hedgerow.agent().await;
    let upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
                   Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==";
    socket.send(format!("GET {} HTTP/1.1\r\nHost: x\r\n{upgrade}\r\n\r\n", upstream.url("/ws"))).await;
    let mut offer = upstream.next().await;
    offer.head_only(101, &[("Connection", "Upgrade"), ("Upgrade", "websocket")]).await;
    let mut websocket = offer.tunnel();
    assert_eq!(socket.read_head().await.status, 101);
    websocket.send(b"frame").await;
    socket.expect(b"frame").await;

    let signalled = Instant::now();
    hedgerow.signal(Signal::TERM);
    let rest = events.read_body(Framing::Chunked).await;
    // At the bound, and not when the stream has been idle for five minutes.
    let cut_after = signalled.elapsed();
    assert!(!rest.complete, "a cut stream must not look like a complete one");
    assert!((Duration::from_millis(800)..Duration::from_secs(10)).contains(&cut_after), "{cut_after:?}");
    assert!(
        !old.read_body(Framing::UntilClose).await.complete,
        "a cut body must not look like a complete one"
    );
    tunnel.ended().await;
    socket.ended().await;
    assert_eq!(hedgerow.wait().await, 0);
    stream.gone().await;
    let _ = websocket.rest().await;

    let lines: Vec<serde_json::Value> =
        hedgerow.stdout.all().iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of =
        |path: &str| lines.iter().find(|line| line["path"] == path).unwrap_or_else(|| panic!("{lines:#?}"));
    assert_eq!(of("/events")["outcome"], "incomplete");
    assert_eq!((&of("/ws")["outcome"], lines.len()), (&"tunnel".into(), 4));
}

// A client that gets no status line tries again without end.
#[tokio::test]
async fn what_still_waits_at_drain_max_is_told_that_hedgerow_leaves() {
    let mut upstream = Upstream::start().await;
    let mut hedgerow = HedgerowProcess::start(
        "defaults: { hedge: off, bulkhead: { max_concurrent: 1 } }\ndrain: { quiet: 50ms, max: 400ms }",
    )
    .await;
    let mut sent = hedgerow.agent().await;
    sent.send(format!("GET {} HTTP/1.1\r\nHost: x\r\n\r\n", upstream.url("/"))).await;
    let exchange = upstream.next().await;
    let mut queued = hedgerow.agent().await;
    let authority = upstream.address();
    queued.send(format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n")).await;
    hedgerow.until_metrics(|m| m.value("hedgerow_bulkhead_queued", &[]) == 1.0).await;

    hedgerow.signal(Signal::TERM);
    let answer = sent.read_response().await;
    assert_eq!((answer.status, &answer.json()["error"]), (503, &"shutting_down".into()));
    let refused = queued.read_response_to("CONNECT").await;
    assert_eq!((refused.status, refused.reason.as_str()), (503, "shutting_down"));
    exchange.gone().await;
    assert_eq!(hedgerow.wait().await, 0);
}

#[tokio::test]
async fn a_tunnel_can_still_be_opened_while_draining() {
    let mut upstream = Upstream::start().await;
    let mut hedgerow = HedgerowProcess::start("drain: { quiet: 2s, max: 20s }").await;
    hedgerow.signal(Signal::TERM);
    until_draining(&hedgerow).await;
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&upstream.address().to_string()).await.status, 200);
    agent.send("GET /inside HTTP/1.1\r\nHost: x\r\n\r\n").await;
    upstream.next().await.respond(200, &[], "through").await;
    assert_eq!(agent.read_response().await.text(), "through");
    drop(agent);
    assert_eq!(hedgerow.wait().await, 0);
}

#[tokio::test]
async fn an_idle_process_leaves_after_the_quiet_time() {
    let mut hedgerow = HedgerowProcess::start("drain: { quiet: 100ms, max: 1m }").await;
    let _idle = Agent::connect(hedgerow.proxy).await;
    let signalled = Instant::now();
    hedgerow.signal(Signal::TERM);
    assert_eq!(hedgerow.wait().await, 0);
    assert!(signalled.elapsed() < Duration::from_secs(15), "{:?}", signalled.elapsed());
}

#[tokio::test]
async fn sigint_drains_and_a_second_one_leaves_at_once() {
    let mut upstream = Upstream::start().await;
    let mut hedgerow = HedgerowProcess::start("drain: { quiet: 1m, max: 1m }").await;
    let mut agent = hedgerow.agent().await;
    agent.send(format!("GET {} HTTP/1.1\r\nHost: x\r\n\r\n", upstream.url("/"))).await;
    let exchange = upstream.next().await;
    hedgerow.signal(Signal::INT);
    until_draining(&hedgerow).await;
    exchange.respond(200, &[], "served").await;
    assert_eq!(agent.read_response().await.text(), "served");

    let signalled = Instant::now();
    hedgerow.signal(Signal::INT);
    assert_eq!(hedgerow.wait().await, 0);
    assert!(signalled.elapsed() < Duration::from_secs(15), "{:?}", signalled.elapsed());
}
