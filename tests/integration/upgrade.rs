//! Upgrades: WebSocket and the like, which turn a request's connection into a tunnel.

use std::time::Duration;

use crate::support::client::{Agent, End};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::upstream::{Reply, Upstream};

const ACCEPTED: &[(&str, &str)] = &[
    ("Connection", "Upgrade"),
    ("Upgrade", "websocket"),
    ("Sec-WebSocket-Accept", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="),
];

/// Asks for a WebSocket as a browser does.
async fn ask(agent: &mut Agent, upstream: &Upstream) {
    let address = upstream.address();
    agent
        .send(format!(
            "GET http://{address}/chat HTTP/1.1\r\nHost: {address}\r\nConnection: keep-alive, Upgrade\r\n\
             Upgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        ))
        .await;
}

#[tokio::test]
async fn c031_a_reset_after_101_is_seen_and_nothing_is_sent_again() {
    // A wrapper around the answer panicked on the switched connection. No stage may touch it after the 101.
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("defaults: { hedge: { after: 20ms } }").await;
    let mut agent = hedgerow.agent().await;
    ask(&mut agent, &upstream).await;
    let mut exchange = upstream.next().await;
    exchange.head_only(101, ACCEPTED).await;
    assert_eq!(agent.read_head().await.status, 101);
    exchange.reset();
    assert!(matches!(agent.ended().await, End::Closed | End::Reset));
    upstream.gets_nothing_more(Duration::from_millis(60)).await;
    assert_eq!(upstream.count(), 1);

    let url = upstream.url("/");
    let (answer, ()) =
        tokio::join!(hedgerow.get(&url), async { upstream.next().await.respond(200, &[], "").await });
    assert_eq!(answer.status, 200);
    assert!(!hedgerow.stderr.text().contains("panick"), "{}", hedgerow.stderr.text());
}

#[tokio::test]
async fn c032_the_101_keeps_its_upgrade_fields_and_frames_pass_both_ways() {
    // They are hop-by-hop on every other answer; taken from this one the client refuses it.
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    ask(&mut agent, &upstream).await;
    let mut exchange = upstream.next().await;
    assert_eq!(exchange.header("upgrade"), Some("websocket"));
    assert!(exchange.header("connection").unwrap().eq_ignore_ascii_case("upgrade"));
    assert_eq!(exchange.header("sec-websocket-key"), Some("dGhlIHNhbXBsZSBub25jZQ=="));
    // The first frame may follow in the same packet.
    let head = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nhello";
    exchange.raw(head.as_bytes()).await;
    let switched = agent.read_head().await;
    assert_eq!((switched.status, switched.headers.get("upgrade")), (101, Some("websocket")));
    assert!(switched.headers.get("connection").unwrap().eq_ignore_ascii_case("upgrade"));
    let mut tunnel = exchange.tunnel();
    agent.expect(b"hello").await;
    for i in 0..100 {
        let frame = format!("frame {i:03}");
        agent.send(&frame).await;
        tunnel.expect(frame.as_bytes()).await;
        tunnel.send(frame.as_bytes()).await;
        agent.expect(frame.as_bytes()).await;
    }
    agent.half_close().await;
    assert_eq!(tunnel.rest().await.unwrap(), b"");
    tunnel.send(b"bye").await;
    agent.expect(b"bye").await;
}

#[tokio::test]
async fn frames_sent_before_the_101_are_not_lost() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    ask(&mut agent, &upstream).await;
    agent.send(b"too early").await;
    let mut exchange = upstream.next().await;
    exchange.head_only(101, ACCEPTED).await;
    assert_eq!(agent.read_head().await.status, 101);
    exchange.tunnel().expect(b"too early").await;
}

#[tokio::test]
async fn c033_a_refused_upgrade_is_an_answer_like_any_other() {
    // The client was left hanging.
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    for _ in 0..2 {
        ask(&mut agent, &upstream).await;
        upstream.next().await.respond(403, &[], "not you").await;
        let answer = agent.read_response().await;
        assert_eq!((answer.status, answer.text()), (403, "not you"));
    }
    assert_eq!(upstream.connections(), 1);
}

#[tokio::test]
async fn an_upgrade_inside_a_plain_tunnel_passes_too() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    let address = upstream.address();
    assert_eq!(agent.open_tunnel(&address.to_string()).await.status, 200);
    agent
        .send(format!(
            "GET /chat HTTP/1.1\r\nHost: {address}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        ))
        .await;
    let mut exchange = upstream.next().await;
    exchange.head_only(101, ACCEPTED).await;
    assert_eq!(agent.read_head().await.status, 101);
    let mut tunnel = exchange.tunnel();
    agent.send(b"ping").await;
    tunnel.expect(b"ping").await;
    tunnel.send(b"pong").await;
    agent.expect(b"pong").await;
}

#[tokio::test]
async fn an_upgrade_to_h2c_is_not_relayed() {
    // Behind it requests would pass that no policy sees.
    let upstream = Upstream::answering(|_| Reply::ok("plain")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    let fields = [
        ("Connection", "Upgrade, HTTP2-Settings"),
        ("Upgrade", "h2c"),
        ("HTTP2-Settings", "AAMAAABkAAQAAP__"),
    ];
    assert_eq!(agent.request("GET", &upstream.url("/"), &fields, b"").await.text(), "plain");
    let seen = &upstream.requests()[0];
    for name in ["upgrade", "http2-settings", "connection"] {
        assert_eq!(seen.header(name), None, "{name}");
    }
}
