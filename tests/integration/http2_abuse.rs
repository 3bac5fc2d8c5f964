//! Clients that use HTTP/2 against us: the connection is ended, memory stays flat, and others are served.

use std::time::Duration;

use h2::Reason;
use tokio::time::timeout;

use crate::support::footprint::Footprint;
use crate::support::hedgerow::HedgerowProcess;
use crate::support::http2::Http2Agent;
use crate::support::http2::frames::{
    END_HEADERS, END_STREAM, Frame, FramePeer, INITIAL_WINDOW_SIZE, PREFACE, get, kind, literal,
};
use crate::support::policy::tool;
use crate::support::upstream::{Reply, Upstream};
use crate::support::{at_best_within, soon};

/// An upstream that answers at once but for `/hang`, and a hedgerow in front of it.
async fn stage() -> (Upstream, HedgerowProcess) {
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/hang" => Reply::hang(),
        "/large" => Reply::ok(vec![b'x'; 1024 * 1024]),
        _ => Reply::ok("served"),
    })
    .await;
    let stages = "hedge: off, breaker: off, bulkhead: { max_concurrent: 1000 }";
    // A connection that nobody ends but this limit lives longer than any test waits.
    let policy = format!("limits: {{ header_timeout: 1m }}\n{}", tool(upstream.address(), stages));
    let hedgerow = HedgerowProcess::start(&policy).await;
    // What is made at the first request shall not count.
    assert_eq!(Http2Agent::connect(hedgerow.proxy).await.get(&upstream.url("/")).await.text(), "served");
    (upstream, hedgerow)
}

/// Sends `attack` over and over until the other side has had enough: whether it said so with GOAWAY.
async fn until_ended(hedgerow: &HedgerowProcess, mut attack: impl FnMut(u32) -> Vec<u8>) -> Option<Reason> {
    let peer = FramePeer::client(hedgerow.agent().await).await;
    let (mut read, mut write) = tokio::io::split(peer.0.into_socket());
    let writing = async {
        for round in 0..200_000 {
            let sent = tokio::io::AsyncWriteExt::write_all(&mut write, &attack(round)).await;
            if sent.is_err() {
                return;
            }
        }
        std::future::pending().await
    };
    let reading = async {
        let mut bytes = Vec::new();
        let _ = tokio::io::AsyncReadExt::read_to_end(&mut read, &mut bytes).await;
        bytes
    };
    let mut bytes = Vec::new();
    let ended = async {
        let (read, ()) = tokio::join!(reading, writing);
        bytes = read;
    };
    soon(ended).await;
    Frame::all_in(&bytes).iter().find(|frame| frame.kind == kind::GOAWAY).map(Frame::reason)
}

/// A clean connection is served at once, and nothing of the attack is left.
async fn is_well(hedgerow: &HedgerowProcess, upstream: &Upstream, before: Footprint) {
    at_best_within(Duration::from_secs(1), async || {
        let answer = Http2Agent::connect(hedgerow.proxy).await.get(&upstream.url("/")).await;
        assert_eq!((answer.status, answer.text()), (200, "served"));
    })
    .await;
    hedgerow.until_status(|status| status["in_flight"] == 0).await;
    let after = Footprint::of(hedgerow.pid());
    let grown = after.resident_kib.saturating_sub(before.resident_kib);
    assert!(grown < 16 * 1024, "{grown} KiB more");
    assert!(!hedgerow.stderr.text().contains("panick"), "{}", hedgerow.stderr.text());
}

fn open_and_reset(upstream: &Upstream, path: &str, round: u32) -> Vec<u8> {
    let stream = round * 2 + 1;
    let open = Frame::headers(stream, get(&upstream.address().to_string(), path), true).encode();
    [open, Frame::reset(stream, Reason::CANCEL).encode()].concat()
}

/// CVE-2023-44487.
#[tokio::test]
async fn a_flood_of_requests_reset_at_once_ends_the_connection() {
    let (upstream, hedgerow) = stage().await;
    let before = Footprint::of(hedgerow.pid());
    let said = until_ended(&hedgerow, |round| {
        (0..50).flat_map(|n| open_and_reset(&upstream, "/hang", round * 50 + n)).collect()
    })
    .await;
    assert!(matches!(said, Some(Reason::ENHANCE_YOUR_CALM) | None), "{said:?}");
    is_well(&hedgerow, &upstream, before).await;
    assert!(upstream.count() < 10_000, "{} requests came through", upstream.count());
}

/// CVE-2025-8671: the client makes us do the resetting.
#[tokio::test]
async fn a_flood_of_faults_that_we_have_to_reset_ends_the_connection() {
    let (upstream, hedgerow) = stage().await;
    let before = Footprint::of(hedgerow.pid());
    let authority = upstream.address().to_string();
    let said = until_ended(&hedgerow, |round| {
        let stream = round * 2 + 1;
        let open = Frame::headers(stream, get(&authority, "/hang"), true).encode();
        // A window of nothing more is a fault of the stream (RFC 9113 section 6.9).
        [open, Frame::new(kind::WINDOW_UPDATE, 0, stream, [0; 4]).encode()].concat()
    })
    .await;
    assert!(said.is_none_or(|reason| reason != Reason::NO_ERROR), "{said:?}");
    is_well(&hedgerow, &upstream, before).await;
}

/// CVE-2024-27316 and its like: a head that never ends.
#[tokio::test]
async fn a_flood_of_continuation_frames_ends_the_connection() {
    let (upstream, hedgerow) = stage().await;
    let before = Footprint::of(hedgerow.pid());
    let said = until_ended(&hedgerow, |round| match round {
        0 => Frame::new(kind::HEADERS, END_STREAM, 1, get("a.example", "/")).encode(),
        _ => Frame::new(kind::CONTINUATION, 0, 1, literal("x-more", &"y".repeat(100)).repeat(100)).encode(),
    })
    .await;
    assert!(said.is_none_or(|reason| reason != Reason::NO_ERROR), "{said:?}");
    is_well(&hedgerow, &upstream, before).await;
    // Empty ones cost nothing but never end either.
    let said = until_ended(&hedgerow, |round| match round {
        0 => Frame::new(kind::HEADERS, END_STREAM, 1, get("a.example", "/")).encode(),
        _ => Frame::new(kind::CONTINUATION, 0, 1, "").encode().repeat(100),
    })
    .await;
    assert!(said.is_none_or(|reason| reason != Reason::NO_ERROR), "{said:?}");
    is_well(&hedgerow, &upstream, before).await;
}

#[tokio::test]
async fn a_frame_larger_than_was_agreed_ends_the_connection() {
    let (upstream, hedgerow) = stage().await;
    let before = Footprint::of(hedgerow.pid());
    for frame in [
        Frame::new(kind::DATA, 0, 1, vec![0; 16 * 1024 + 1]),
        Frame::headers(1, vec![0; 20_000], true),
        Frame::new(kind::PING, 0, 0, vec![0; 9]),
        Frame::new(kind::SETTINGS, 0, 0, vec![0; 5]),
        Frame::settings(&[(INITIAL_WINDOW_SIZE, u32::MAX)]),
        Frame::new(kind::WINDOW_UPDATE, 0, 0, [0; 4]),
        Frame::new(kind::DATA, END_STREAM, 0, "x"),
        Frame::new(kind::HEADERS, END_HEADERS | END_STREAM, 2, get("a.example", "/")),
        Frame::new(kind::HEADERS, END_HEADERS | END_STREAM, 1, vec![0xff; 40]),
        Frame::new(kind::CONTINUATION, END_HEADERS, 1, ""),
    ] {
        let mut peer = FramePeer::client(hedgerow.agent().await).await;
        peer.send(frame.clone()).await;
        let frames = peer.rest().await;
        let goaway = frames.iter().find(|frame| frame.kind == kind::GOAWAY);
        let said = goaway.unwrap_or_else(|| panic!("no GOAWAY for kind {}: {frames:?}", frame.kind));
        assert_ne!(said.reason(), Reason::NO_ERROR, "{frame:?}");
    }
    is_well(&hedgerow, &upstream, before).await;
}

#[tokio::test]
async fn a_preface_that_is_garbage_from_some_byte_on_ends_the_connection() {
    let (upstream, hedgerow) = stage().await;
    let before = Footprint::of(hedgerow.pid());
    for keep in [16, 17, 18, 20, 23] {
        let mut agent = hedgerow.agent().await;
        agent.send([&PREFACE[..keep], &[b'!'; 64]].concat()).await;
        let bytes = agent.all_that_comes_without_closing().await;
        assert!(!bytes.starts_with(b"HTTP/1"), "{:?}", String::from_utf8_lossy(&bytes));
    }
    let mut agent = hedgerow.agent().await;
    agent.send([PREFACE, &[0xff; 256]].concat()).await;
    agent.all_that_comes_without_closing().await;
    is_well(&hedgerow, &upstream, before).await;
}

/// Answers that nobody reads wait in bounded room.
#[tokio::test]
async fn a_client_that_asks_and_never_reads_holds_little() {
    let (upstream, hedgerow) = stage().await;
    let before = Footprint::of(hedgerow.pid());
    let mut peers = Vec::new();
    for _ in 0..5 {
        let mut peer = FramePeer::client(hedgerow.agent().await).await;
        for n in 0..50 {
            let large = get(&upstream.address().to_string(), "/large");
            peer.send(Frame::headers(n * 2 + 1, large, true)).await;
        }
        peers.push(peer);
    }
    upstream.until(|tally| tally.requests >= 251).await;
    is_flat(&hedgerow, before, 64 * 1024).await;
    drop(peers);
    hedgerow.until_status(|status| status["in_flight"] == 0).await;
}

#[track_caller]
fn is_flat(hedgerow: &HedgerowProcess, before: Footprint, limit_kib: u64) -> impl Future<Output = ()> {
    let grown = Footprint::of(hedgerow.pid()).resident_kib.saturating_sub(before.resident_kib);
    assert!(grown < limit_kib, "{grown} KiB more");
    std::future::ready(())
}

/// Pings and settings ask for an answer each: they are answered, or the connection is ended, but they are not
/// heaped up.
#[tokio::test]
async fn floods_of_pings_and_settings_heap_nothing_up() {
    let (upstream, hedgerow) = stage().await;
    for frame in [Frame::new(kind::PING, 0, 0, [0; 8]), Frame::settings(&[(INITIAL_WINDOW_SIZE, 1000)])] {
        let before = Footprint::of(hedgerow.pid());
        let mut peer = FramePeer::client(hedgerow.agent().await).await;
        let burst = frame.encode().repeat(1000);
        // Until what was written fills every buffer, since nothing is read here; or all of it.
        for _ in 0..200 {
            if timeout(Duration::from_millis(300), peer.0.send(&burst)).await.is_err() {
                break;
            }
        }
        is_flat(&hedgerow, before, 16 * 1024).await;
        drop(peer);
        is_well(&hedgerow, &upstream, before).await;
    }
}
