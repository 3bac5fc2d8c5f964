//! Large bodies in every mode: they pass at the pace of whoever is slower, through memory that stays flat.

use std::time::Duration;

use tokio::time::timeout;

use crate::support::hedgerow::HedgerowProcess;
use crate::support::pki::Pki;
use crate::support::road::{Call, Mode, Road};
use crate::support::upstream::{Exchange, Upstream, is_pattern, pattern};

const SIZE: u64 = 100 << 20;
/// Sent at once, and a multiple of the pattern's period, so that all pieces are the same.
const PIECE: usize = 251 * 256;
/// What may come on top of a process that has warmed up.
const GROWTH_KIB: usize = 8 << 10;

/// Sends an answer's body of so many bytes, as fast as it is taken.
async fn pour(exchange: &mut Exchange, size: u64) {
    let piece = pattern(0, PIECE);
    let mut left = size;
    while left > 0 {
        let part = left.min(PIECE as u64);
        exchange.raw(&piece[..part as usize]).await;
        left -= part;
    }
}

/// Reads a body of so many bytes. Looks at the memory of the process every MiB: the most it ever was.
async fn drain(call: &mut Call, size: u64, hedgerow: &HedgerowProcess) -> usize {
    let (mut at, mut most, mut looked) = (0, 0, 0);
    while let Some(piece) = call.try_piece().await.expect("the body is not cut") {
        assert!(is_pattern(&piece, at), "after {at} bytes");
        at += piece.len() as u64;
        if at >= looked + (1 << 20) {
            looked = at;
            most = most.max(hedgerow.resident_kib());
        }
    }
    assert_eq!(at, size);
    most
}

async fn download(road: &mut Road, size: u64) -> usize {
    let (mut call, mut exchange) = road.exchange(&[]).await;
    exchange.head_only(200, &[("Content-Length", &size.to_string())]).await;
    assert_eq!(call.head().await.status, 200);
    let (most, ()) = tokio::join!(drain(&mut call, size, &road.hedgerow), async {
        pour(&mut exchange, size).await;
        exchange.finish().await;
    });
    most
}

async fn upload(road: &mut Road, size: u64) -> usize {
    let mut call = road.call("POST", "/", &[("Content-Length", &size.to_string())]).await;
    let mut exchange = road.upstream.next().await;
    let piece = pattern(0, PIECE);
    let send = async {
        let (mut left, mut most) = (size, 0);
        while left > 0 {
            let part = left.min(PIECE as u64);
            call.send(&piece[..part as usize]).await;
            left -= part;
            if left % (1 << 20) < PIECE as u64 {
                most = most.max(road.hedgerow.resident_kib());
            }
        }
        call.finish().await;
        most
    };
    let (most, (count, is_right)) = tokio::join!(send, exchange.count_body());
    assert!(count == size && is_right, "{count} of {size} bytes");
    exchange.respond(200, &[], "all of it").await;
    assert_eq!(call.head().await.status, 200);
    most
}

/// One body to warm up, and then what a much larger one adds.
#[track_caller]
fn check_growth(mode: Mode, before: usize, most: usize) {
    assert!(most < before + GROWTH_KIB, "{mode:?}: {before} KiB before, {most} KiB at most");
}

#[tokio::test]
async fn a_large_answer_passes_through_flat_memory_in_every_mode() {
    for mode in Mode::ALL {
        let mut road = Road::start(mode, "hedge: off").await;
        let before = download(&mut road, 2 << 20).await;
        let most = download(&mut road, SIZE).await;
        check_growth(mode, before, most);
    }
}

#[tokio::test]
async fn a_large_upload_passes_through_flat_memory_in_every_mode() {
    for mode in Mode::ALL {
        let mut road = Road::start(mode, "hedge: off").await;
        let before = upload(&mut road, 2 << 20).await;
        let most = upload(&mut road, SIZE).await;
        check_growth(mode, before, most);
    }
}

#[tokio::test]
async fn a_raw_tunnel_carries_bulk_both_ways_at_once() {
    let pki = Pki::new();
    let mut upstream = Upstream::on([127, 0, 0, 1]).tls(pki.server(&["127.0.0.1"])).start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let authority = upstream.address().to_string();
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&authority).await.status, 200);
    let mut agent = agent.tls(&pki.connector(), "127.0.0.1").await.unwrap();
    agent.send(format!("POST / HTTP/1.1\r\nHost: {authority}\r\nContent-Length: {SIZE}\r\n\r\n")).await;
    let mut exchange = upstream.next().await;
    let before = hedgerow.resident_kib();
    let piece = pattern(0, PIECE);
    let send = async {
        let mut left = SIZE;
        while left > 0 {
            let part = left.min(PIECE as u64);
            agent.send(&piece[..part as usize]).await;
            left -= part;
        }
    };
    let ((), (count, is_right)) = tokio::join!(send, exchange.count_body());
    assert!(count == SIZE && is_right, "{count} bytes");
    exchange.head_only(200, &[("Content-Length", &SIZE.to_string())]).await;
    assert_eq!(agent.read_head().await.status, 200);
    let read = async {
        let mut at = 0;
        while at < SIZE {
            let bytes = agent.read_exactly(PIECE.min((SIZE - at) as usize)).await;
            assert!(is_pattern(&bytes, at), "after {at} bytes");
            at += bytes.len() as u64;
        }
        hedgerow.resident_kib()
    };
    let (after, ()) = tokio::join!(read, pour(&mut exchange, SIZE));
    assert!(after < before + GROWTH_KIB, "{before} KiB before, {after} KiB after");
}

#[tokio::test]
async fn an_agent_that_does_not_read_holds_back_its_own_upstream_only_in_every_mode() {
    const OFFERED: u64 = 256 << 20;
    for mode in Mode::ALL {
        let mut road = Road::start(mode, "hedge: off").await;
        let before = download(&mut road, 1 << 20).await;
        let (mut slow, mut exchange) = road.exchange(&[]).await;
        exchange.head_only(200, &[("Content-Length", &OFFERED.to_string())]).await;
        assert_eq!(slow.head().await.status, 200);
        let piece = pattern(0, PIECE);
        let mut taken = 0;
        // Blocked for so long, it is blocked for good.
        while timeout(Duration::from_millis(200), exchange.raw(&piece)).await.is_ok() {
            taken += piece.len() as u64;
            assert!(taken < OFFERED / 2, "{mode:?}: everything was taken while nobody read");
        }
        // Whoever is held back is so for good, as nobody reads meanwhile.
        for _ in 0..5 {
            let (mut quick, answer) = road.exchange(&[]).await;
            answer.respond(200, &[], "quick").await;
            assert_eq!((quick.head().await.status, &quick.rest().await[..]), (200, &b"quick"[..]));
        }
        let after = road.hedgerow.resident_kib();
        check_growth(mode, before, after);
        drop(slow);
        exchange.gone().await;
    }
}

#[tokio::test]
async fn an_upstream_that_does_not_read_holds_back_its_own_agent_only_in_every_mode() {
    const OFFERED: u64 = 256 << 20;
    for mode in Mode::ALL {
        let mut road = Road::start(mode, "hedge: off").await;
        let before = upload(&mut road, 1 << 20).await;
        let mut slow = road.call("POST", "/", &[("Content-Length", &OFFERED.to_string())]).await;
        let exchange = road.upstream.next().await;
        let piece = pattern(0, PIECE);
        let mut taken = 0;
        while timeout(Duration::from_millis(200), slow.send(&piece)).await.is_ok() {
            taken += piece.len() as u64;
            assert!(taken < OFFERED / 2, "{mode:?}: everything was taken while nobody read");
        }
        let (mut quick, answer) = road.exchange(&[]).await;
        answer.respond(200, &[], "quick").await;
        assert_eq!((quick.head().await.status, &quick.rest().await[..]), (200, &b"quick"[..]));
        check_growth(mode, before, road.hedgerow.resident_kib());
        drop(slow);
        exchange.gone().await;
    }
}
