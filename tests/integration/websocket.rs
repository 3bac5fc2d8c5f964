//! WebSockets in every mode: whatever the agent's way to hedgerow, the upstream sees one upgrade, and bytes
//! pass both ways until both ends have had enough.

use std::time::Duration;

use rustix::process::Signal;

use crate::support::client::End;
use crate::support::hedgerow::HedgerowProcess;
use crate::support::pki::Pki;
use crate::support::road::{Call, Mode, Road};
use crate::support::upstream::{Exchange, Upstream};

/// What the upstream's 101 is to the agent.
fn switched(mode: Mode) -> u16 {
    if mode.is_http2() { 200 } else { 101 }
}

/// An upgrade that the upstream has taken, and both of its ends.
async fn open(road: &mut Road) -> (Call, Exchange) {
    let mut call = road.upgrade("/chat").await;
    let mut exchange = road.upstream.next().await;
    exchange.accept_web_socket(&[]).await;
    assert_eq!(call.head().await.status, switched(road.mode), "{:?}", road.mode);
    (call, exchange)
}

/// RFC 8441 has no 101: its client would speak frames into what is the answer to another question.
#[tokio::test]
async fn an_upstream_that_answers_an_extended_connect_like_a_get_has_not_taken_it() {
    let mut road = Road::start(Mode::ForwardHttp2, "hedge: off, breaker: off").await;
    for (status, expected) in [(200, 502), (204, 502), (403, 403)] {
        let mut call = road.upgrade("/chat").await;
        let exchange = road.upstream.next().await;
        exchange.respond(status, &[], "").await;
        assert_eq!(call.head().await.status, expected);
    }
}

#[tokio::test]
async fn c032_a_hundred_frames_pass_each_way_in_every_mode() {
    for mode in Mode::ALL {
        let mut road = Road::start(mode, "hedge: { after: 20ms }").await;
        let mut call = road.upgrade("/chat?room=1").await;
        let mut exchange = road.upstream.next().await;
        let seen = &exchange.head;
        assert_eq!((seen.method.as_str(), seen.target.as_str()), ("GET", "/chat?room=1"), "{mode:?}");
        assert_eq!(exchange.header("upgrade"), Some("websocket"), "{mode:?}");
        assert!(exchange.header("connection").unwrap().eq_ignore_ascii_case("upgrade"), "{mode:?}");
        assert_eq!(exchange.header("sec-websocket-version"), Some("13"), "{mode:?}");
        assert!(exchange.header("sec-websocket-key").is_some_and(|key| key.len() == 24), "{mode:?}");
        assert_eq!(exchange.header("host"), Some(road.authority()), "{mode:?}");

        // The first frame may follow in the same packet.
        let accept = exchange.web_socket_accept();
        let head = format!(
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Accept: {accept}\r\nSec-WebSocket-Protocol: chat\r\n\r\nhello"
        );
        exchange.raw(head.as_bytes()).await;
        let answer = call.head().await;
        assert_eq!((answer.status, answer.get("sec-websocket-protocol")), (switched(mode), Some("chat")));
        let http1 = [("upgrade", "websocket"), ("sec-websocket-accept", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")];
        for (name, value) in http1 {
            assert_eq!(answer.get(name), Some(value).filter(|_| !mode.is_http2()), "{mode:?}: {name}");
        }
        call.expect("hello").await;
        let mut tunnel = exchange.tunnel();
        for i in 0..100 {
            let frame = format!("frame {i:03}");
            call.send(&frame).await;
            tunnel.expect(frame.as_bytes()).await;
            tunnel.send(frame.as_bytes()).await;
            call.expect(&frame).await;
        }
        assert_eq!(road.upstream.count(), 1, "{mode:?}");
    }
}

#[tokio::test]
async fn an_agents_half_close_is_passed_on_and_the_other_direction_runs_to_its_end() {
    let farewell: Vec<u8> = (0..1 << 20).map(|i: u32| (i * 7 % 253) as u8).collect();
    for mode in Mode::ALL {
        let mut road = Road::start(mode, "").await;
        let (mut call, exchange) = open(&mut road).await;
        let mut tunnel = exchange.tunnel();
        call.send("no more from me").await;
        call.half_close().await;
        assert_eq!(tunnel.rest().await.unwrap(), b"no more from me", "{mode:?}");
        let (rest, ()) = tokio::join!(call.rest(), async {
            tunnel.send(&farewell).await;
            tunnel.half_close().await;
        });
        assert!(rest == farewell, "{mode:?}: {} bytes", rest.len());
        drop((call, tunnel));
        road.hedgerow.until_status(|status| status["in_flight"] == 0).await;
    }
}

#[tokio::test]
async fn an_upstreams_half_close_is_passed_on_and_the_other_direction_runs_to_its_end() {
    for mode in Mode::ALL {
        let mut road = Road::start(mode, "").await;
        let (mut call, exchange) = open(&mut road).await;
        let mut tunnel = exchange.tunnel();
        tunnel.send(b"no more from me").await;
        tunnel.half_close().await;
        assert_eq!(call.rest().await, b"no more from me", "{mode:?}");
        let farewell = vec![b'x'; 300_000];
        let (rest, ()) = tokio::join!(tunnel.rest(), async {
            call.send(&farewell).await;
            call.half_close().await;
        });
        assert!(rest.unwrap() == farewell, "{mode:?}");
    }
}

#[tokio::test]
async fn c031_a_reset_after_the_switch_is_seen_and_nothing_is_sent_again_in_every_mode() {
    // A wrapper around the answer panicked on the switched connection. Fifty times, as it is a race between
    // the head and the reset behind it.
    for mode in Mode::ALL {
        let mut road = Road::start(mode, "hedge: { after: 20ms }").await;
        for _ in 0..50 {
            let mut call = road.upgrade("/chat").await;
            let mut exchange = road.upstream.next().await;
            exchange.accept_web_socket(&[]).await;
            exchange.reset();
            assert_eq!(call.head().await.status, switched(mode), "{mode:?}");
            if let Ok(Some(piece)) = call.try_piece().await {
                panic!("{mode:?}: {piece:?} out of nowhere");
            }
        }
        road.upstream.gets_nothing_more(Duration::from_millis(60)).await;
        assert_eq!(road.upstream.count(), 50, "{mode:?}");
        let (mut call, exchange) = road.exchange(&[]).await;
        exchange.respond(200, &[], "well").await;
        assert_eq!((call.head().await.status, &call.rest().await[..]), (200, &b"well"[..]), "{mode:?}");
        assert!(!road.hedgerow.stderr.text().contains("panick"), "{}", road.hedgerow.stderr.text());
    }
}

#[tokio::test]
async fn c033_a_refused_upgrade_is_an_answer_like_any_other_in_every_mode() {
    // The client was left hanging.
    for mode in Mode::ALL {
        let mut road = Road::start(mode, "").await;
        for _ in 0..2 {
            let mut call = road.upgrade("/chat").await;
            road.upstream.next().await.respond(403, &[("X-Why", "origin")], "not you").await;
            let head = call.head().await;
            assert_eq!((head.status, head.get("x-why")), (403, Some("origin")), "{mode:?}");
            assert_eq!(call.rest().await, b"not you", "{mode:?}");
        }
        // The upstream's connection is kept. A CONNECT dials before it is known what comes.
        let connections = if mode == Mode::PlainTunnel { 2 } else { 1 };
        assert_eq!(road.upstream.connections(), connections, "{mode:?}");
        let refused = [("code", "403")];
        road.hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &refused) == 2.0).await;
    }
}

#[tokio::test]
async fn an_upgrade_holds_its_permit_and_counts_once() {
    for mode in Mode::ALL {
        let mut road = Road::start(mode, "hedge: off, bulkhead: { max_concurrent: 1, max_queue: 0 }").await;
        let (mut call, exchange) = open(&mut road).await;
        let tunnel = exchange.tunnel();
        let full = match mode {
            Mode::PlainTunnel => road.hedgerow.agent().await.open_tunnel(road.authority()).await.status,
            _ => road.call("GET", "/", &[]).await.head().await.status,
        };
        assert_eq!(full, 503, "{mode:?}");
        drop(tunnel);
        assert!(!matches!(call.try_piece().await, Ok(Some(_))), "{mode:?}");
        drop(call);
        road.hedgerow.until_status(|status| status["in_flight"] == 0).await;
        let (mut call, exchange) = road.exchange(&[]).await;
        exchange.respond(200, &[], "").await;
        assert_eq!(call.head().await.status, 200, "{mode:?}");
    }
}

#[tokio::test]
async fn c121_a_process_that_leaves_cuts_what_is_still_open_at_its_bound_in_every_mode() {
    // Waited for ever.
    for mode in Mode::ALL {
        let mut road = Road::start_with(mode, "", "drain: { quiet: 50ms, max: 200ms }").await;
        let (mut call, exchange) = open(&mut road).await;
        let mut tunnel = exchange.tunnel();
        road.hedgerow.signal(Signal::TERM);
        let _ = tunnel.rest().await;
        assert!(!matches!(call.try_piece().await, Ok(Some(_))), "{mode:?}");
        assert_eq!(road.hedgerow.wait().await, 0, "{mode:?}");
    }
}

#[tokio::test]
async fn a_web_socket_in_a_raw_tunnel_is_the_two_ends_own_affair() {
    let pki = Pki::new();
    let mut upstream = Upstream::on([127, 0, 0, 1]).tls(pki.server(&["127.0.0.1"])).start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let authority = upstream.address().to_string();
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&authority).await.status, 200);
    let mut agent = agent.tls(&pki.connector(), "127.0.0.1").await.unwrap();
    agent
        .send(format!(
            "GET /chat HTTP/1.1\r\nHost: {authority}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        ))
        .await;
    let mut exchange = upstream.next().await;
    exchange.head_only(101, &[("Connection", "Upgrade"), ("Upgrade", "websocket")]).await;
    assert_eq!(agent.read_head().await.status, 101);
    let mut tunnel = exchange.tunnel();
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
    tunnel.half_close().await;
    agent.expect(b"bye").await;
    assert_eq!(agent.ended().await, End::Closed);
}
