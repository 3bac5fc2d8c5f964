//! Answers and requests that take their time: events, large bodies, and what breaks in the middle.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::support::client::{Agent, absolute};
use crate::support::h1::{Framing, ResponseHead};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::raw::RawPort;
use crate::support::road::{Mode, Road};
use crate::support::upstream::{Exchange, Reply, Upstream};

const EVENTS: (&str, &str) = ("Content-Type", "text/event-stream");

/// A call whose answer's head has arrived, with the upstream's end of it.
async fn begin(
    hedgerow: &HedgerowProcess,
    upstream: &mut Upstream,
    fields: &[(&str, &str)],
) -> (Agent, Exchange) {
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("GET", &upstream.url("/"), &[], b"")).await;
    let mut exchange = upstream.next().await;
    exchange.start_chunks(200, fields).await;
    let head = agent.read_head().await;
    assert!(head.status == 200 && is_chunked(&head), "{head:?}");
    (agent, exchange)
}

#[tokio::test]
async fn c034_a_quiet_stream_outlives_the_bounds_on_its_head() {
    // A timeout meant for setting up cut a stream that merely had nothing to say.
    let mut upstream = Upstream::start().await;
    let policy = "defaults: { attempt_timeout: 1s, deadline: { default: 1500ms } }";
    let hedgerow = HedgerowProcess::start(policy).await;
    let (mut agent, mut exchange) = begin(&hedgerow, &mut upstream, &[EVENTS]).await;
    exchange.chunk("data: 1\n\n").await;
    assert_eq!(agent.read_chunk().await.unwrap(), b"data: 1\n\n");
    sleep(Duration::from_secs(2)).await;
    exchange.chunk("data: 2\n\n").await;
    assert_eq!(agent.read_chunk().await.unwrap(), b"data: 2\n\n");
    exchange.end().await;
    assert_eq!(agent.read_chunk().await.unwrap(), b"");
}

#[tokio::test]
async fn a_stream_that_stays_silent_too_long_is_cut_visibly() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("defaults: { stream_idle: 1s }").await;
    let (mut agent, mut exchange) = begin(&hedgerow, &mut upstream, &[EVENTS]).await;
    exchange.chunk("data: 1\n\n").await;
    let body = agent.read_body(Framing::Chunked).await;
    assert!(!body.complete && body.bytes.starts_with(b"data: 1\n\n"), "{body:?}");
    exchange.gone().await;
}

#[tokio::test]
async fn c035_each_event_leaves_as_it_comes() {
    // Small writes were gathered, and for a long time nothing arrived at all. In step with the client, the
    // upstream sends no event before the one before it has arrived: gathering would stop here for good.
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("defaults: { hedge: { after: 5s } }").await;
    let (mut agent, mut exchange) = begin(&hedgerow, &mut upstream, &[EVENTS]).await;
    for i in 0..20 {
        let event = format!("data: {i:032}\n\n");
        exchange.chunk(&event).await;
        assert_eq!(agent.read_chunk().await.unwrap(), event.as_bytes());
    }
    exchange.end().await;
    assert_eq!(agent.read_chunk().await.unwrap(), b"");
    assert_eq!(upstream.count(), 1);
}

#[tokio::test]
async fn c036_an_answer_that_breaks_in_the_middle_never_looks_whole() {
    // The client saw a clean end, and took half an answer for the answer.
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("defaults: { breaker: off }").await;
    let head = "HTTP/1.1 200 OK\r\n";
    let chunked = format!("{head}Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n");
    let counted = format!("{head}Content-Length: 8\r\n\r\nhalf");
    let in_a_chunk = format!("{head}Transfer-Encoding: chunked\r\n\r\n8\r\nhalf");
    let bad_chunk = format!("{head}Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\nxyz\r\n");
    let mut broken = 0.0;
    for answer in [chunked, counted, in_a_chunk, bad_chunk] {
        for (version, reset) in [("1.1", false), ("1.1", true), ("1.0", false)] {
            let serve = async {
                let mut upstream = port.accept().await;
                upstream.read_request().await;
                upstream.send(&answer).await;
                upstream
            };
            let ask = async {
                let mut agent = hedgerow.agent().await;
                agent
                    .send(format!("GET {} HTTP/{version}\r\nHost: {}\r\n\r\n", port.url("/"), port.address()))
                    .await;
                let head = agent.read_head().await;
                agent.expect(if is_chunked(&head) { &b"4\r\nhalf\r\n"[..] } else { b"half" }).await;
                (agent, head)
            };
            let (upstream, (mut agent, head)) = tokio::join!(serve, ask);
            if reset {
                upstream.reset()
            } else {
                drop(upstream)
            }
            let framing = match head.framing("GET").unwrap() {
                Framing::Length(_) => Framing::Length(4),
                framing => framing,
            };
            let rest = agent.read_body(framing).await;
            assert!(!rest.complete && rest.bytes.is_empty(), "{answer:?} {version} {reset}: {rest:?}");
            broken += 1.0;
        }
    }
    let incomplete = [("outcome", "incomplete"), ("code", "200")];
    let metrics = hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &incomplete) == broken).await;
    assert_eq!(metrics.value("hedgerow_requests_total", &[]), broken);
}

fn is_chunked(head: &ResponseHead) -> bool {
    matches!(head.framing("GET"), Ok(Framing::Chunked))
}

#[tokio::test]
async fn an_answer_that_ends_with_its_connection_is_whole() {
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let serve = async {
        let mut upstream = port.accept().await;
        upstream.read_request().await;
        upstream.send("HTTP/1.1 200 OK\r\n\r\nall of it").await;
    };
    let url = port.url("/");
    let (answer, ()) = tokio::join!(hedgerow.get(&url), serve);
    assert_eq!((answer.text(), answer.complete), ("all of it", true));
}

#[tokio::test]
async fn c037_a_head_goes_out_at_once_though_its_body_waits() {
    // The head was held back for the body, and a 503 made up while the upstream was well.
    let mut upstream = Upstream::start().await;
    let policy = "defaults: { attempt_timeout: 1s, breaker: { consecutive_failures: 1 } }";
    let hedgerow = HedgerowProcess::start(policy).await;
    let (mut agent, mut exchange) =
        begin(&hedgerow, &mut upstream, &[("Content-Type", "application/json")]).await;
    // `begin` has the head already, before any byte of the body exists.
    sleep(Duration::from_millis(1300)).await;
    exchange.chunk("{}").await;
    exchange.end().await;
    let body = agent.read_body(Framing::Chunked).await;
    assert!(body.complete && body.bytes == b"{}");
    let metrics = hedgerow.metrics().await;
    assert_eq!(metrics.value("hedgerow_breaker_state", &[("state", "closed")]), 1.0);
}

#[tokio::test]
async fn an_upload_reaches_the_upstream_while_it_is_still_being_sent() {
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("POST", &port.url("/"), &[("Transfer-Encoding", "chunked")], b"")).await;
    let mut upstream = port.accept().await;
    upstream.read_request().await;
    for i in 0..10 {
        agent.send(format!("6\r\npart {i}\r\n")).await;
        assert_eq!(upstream.read_chunk().await.unwrap(), format!("part {i}").as_bytes());
    }
    agent.send("0\r\n\r\n").await;
    assert_eq!(upstream.read_chunk().await.unwrap(), b"");
    upstream.expect(b"\r\n").await;
    upstream.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    assert_eq!(agent.read_response().await.status, 200);
}

#[tokio::test]
async fn a_client_that_does_not_read_stops_the_upstream_instead_of_filling_memory() {
    const OFFERED: usize = 256 << 20;
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("GET", &port.url("/"), &[], b"")).await;
    let mut upstream = port.accept().await;
    upstream.read_request().await;
    upstream.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {OFFERED}\r\n\r\n")).await;
    assert_eq!(agent.read_head().await.status, 200);
    let before = hedgerow.resident_kib();
    let (piece, mut taken) = (vec![b'x'; 1 << 20], 0);
    // Blocked for so long, it is blocked for good.
    while tokio::time::timeout(Duration::from_millis(300), upstream.send(&piece)).await.is_ok() {
        taken += piece.len();
        assert!(taken < OFFERED, "everything was taken while nobody read");
    }
    // What was taken lies in the kernel's buffers of four sockets.
    let after = hedgerow.resident_kib();
    assert!(after < before + (16 << 10), "{before} KiB before, {after} KiB after");
}

#[tokio::test]
async fn an_upstream_that_does_not_read_stops_the_client() {
    const OFFERED: usize = 256 << 20;
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("POST", &port.url("/"), &[("Content-Length", &OFFERED.to_string())], b"")).await;
    let mut upstream = port.accept().await;
    upstream.read_request().await;
    let before = hedgerow.resident_kib();
    let (piece, mut taken) = (vec![b'x'; 1 << 20], 0);
    while tokio::time::timeout(Duration::from_millis(300), agent.send(&piece)).await.is_ok() {
        taken += piece.len();
        assert!(taken < OFFERED, "everything was taken while nobody read");
    }
    let after = hedgerow.resident_kib();
    assert!(after < before + (16 << 10), "{before} KiB before, {after} KiB after");
}

#[tokio::test]
async fn trailers_of_an_answer_pass_when_the_client_asks_for_them() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("GET", &upstream.url("/"), &[("TE", "trailers"), ("Connection", "TE")], b"")).await;
    let mut exchange = upstream.next().await;
    assert_eq!(exchange.header("te"), Some("trailers"));
    exchange.start_chunks(200, &[("Trailer", "grpc-status")]).await;
    exchange.chunk("body").await;
    exchange.raw(b"0\r\ngrpc-status: 0\r\n\r\n").await;
    exchange.finish().await;
    let answer = agent.read_response().await;
    assert_eq!((answer.text(), answer.trailers.get("grpc-status")), ("body", Some("0")));
    // The answer used to count as one whose client left, and its connection was thrown away.
    let answered = [("outcome", "answered"), ("code", "200")];
    hedgerow.until_metrics(|metrics| metrics.value("hedgerow_requests_total", &answered) == 1.0).await;
    agent.send(absolute("GET", &upstream.url("/"), &[], b"")).await;
    upstream.next().await.respond(200, &[], b"").await;
    assert_eq!((agent.read_response().await.status, upstream.connections()), (200, 1));
}

#[tokio::test]
async fn many_streams_at_once_do_not_hold_each_other_up() {
    let upstream = Upstream::answering(|_| {
        Reply::ok(vec![b'x'; 20]).header(EVENTS.0, EVENTS.1).drip(5, Duration::from_millis(250))
    })
    .await;
    let hedgerow = HedgerowProcess::start("defaults: { hedge: off }").await;
    let urls = vec![upstream.url("/"); 60];
    let begin = Instant::now();
    let answers = crate::support::client::get_all(hedgerow.proxy, &urls).await;
    assert!(answers.iter().all(|answer| answer.complete && answer.body.len() == 20));
    // One after the other they would take more than a minute.
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
}

#[tokio::test]
async fn events_are_passed_on_one_by_one_in_every_mode() {
    // In step with the agent, as above: what is held back anywhere stops it for good.
    for mode in Mode::ALL {
        let mut road = Road::start(mode, "hedge: off").await;
        let (mut call, mut exchange) = road.exchange(&[("Accept", EVENTS.1)]).await;
        exchange.start_chunks(200, &[EVENTS]).await;
        let head = call.head().await;
        assert_eq!((head.status, head.get("content-type")), (200, Some(EVENTS.1)), "{mode:?}");
        for i in 0..20 {
            let event = format!("data: {i}\n\n");
            exchange.chunk(&event).await;
            call.expect(&event).await;
        }
        exchange.end().await;
        assert_eq!(call.rest().await, b"", "{mode:?}");
    }
}

#[tokio::test]
async fn an_upload_is_passed_on_piece_by_piece_in_every_mode() {
    for mode in Mode::ALL {
        let mut road = Road::start(mode, "hedge: off").await;
        let mut call = road.call("POST", "/", &[("Transfer-Encoding", "chunked")]).await;
        let mut exchange = road.upstream.next().await;
        for i in 0..20 {
            let part = format!("part {i}");
            call.send(&part).await;
            assert_eq!(exchange.next_chunk().await, part.as_bytes(), "{mode:?}");
        }
        call.finish().await;
        assert_eq!(exchange.next_chunk().await, b"", "{mode:?}");
        exchange.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
        assert_eq!(call.head().await.status, 200, "{mode:?}");
    }
}

#[tokio::test]
async fn trailers_pass_in_every_mode() {
    for mode in Mode::ALL {
        let mut road = Road::start(mode, "hedge: off").await;
        let (mut call, mut exchange) = road.exchange(&[("TE", "trailers"), ("Connection", "TE")]).await;
        assert_eq!(exchange.header("te"), Some("trailers"), "{mode:?}");
        exchange.start_chunks(200, &[("Trailer", "x-sum")]).await;
        exchange.chunk("body").await;
        exchange.raw(b"0\r\nx-sum: 42\r\n\r\n").await;
        exchange.finish().await;
        assert_eq!(call.head().await.status, 200, "{mode:?}");
        assert_eq!(call.rest().await, b"body", "{mode:?}");
        assert_eq!(call.trailer("x-sum").await.as_deref(), Some("42"), "{mode:?}");
    }
}

#[tokio::test]
async fn a_client_that_waits_for_100_gets_it_from_the_upstream_in_every_mode() {
    for mode in Mode::ALL {
        let mut road = Road::start(mode, "hedge: off").await;
        let fields = [("Expect", "100-continue"), ("Content-Length", "4")];
        let mut call = road.call("PUT", "/", &fields).await;
        let mut exchange = road.upstream.next().await;
        assert_eq!(exchange.header("expect"), Some("100-continue"), "{mode:?}");
        exchange.raw(b"HTTP/1.1 100 Continue\r\n\r\n").await;
        assert_eq!(call.interim().await.status, 100, "{mode:?}");
        call.send("body").await;
        call.finish().await;
        assert_eq!(exchange.body().await, b"body", "{mode:?}");
        exchange.respond(201, &[], "made").await;
        assert_eq!((call.head().await.status, &call.rest().await[..]), (201, &b"made"[..]), "{mode:?}");
        assert_eq!(road.upstream.count(), 1, "{mode:?}");
    }
}

#[tokio::test]
async fn early_hints_pass_before_the_answer_in_every_mode() {
    for mode in Mode::ALL {
        let mut road = Road::start(mode, "hedge: off").await;
        let (mut call, mut exchange) = road.exchange(&[]).await;
        for link in ["</a.css>", "</b.css>"] {
            let early =
                format!("HTTP/1.1 103 Early Hints\r\nLink: {link}\r\nConnection: X-Hop\r\nX-Hop: 1\r\n\r\n");
            exchange.raw(early.as_bytes()).await;
            let hints = call.interim().await;
            assert_eq!(
                (hints.status, hints.get("link"), hints.get("x-hop")),
                (103, Some(link), None),
                "{mode:?}"
            );
        }
        exchange.respond(200, &[], "page").await;
        assert_eq!((call.head().await.status, &call.rest().await[..]), (200, &b"page"[..]), "{mode:?}");
    }
}

#[tokio::test]
async fn c036_a_broken_answer_never_looks_whole_in_any_mode() {
    for mode in Mode::ALL {
        for (framing, sent) in
            [("Transfer-Encoding: chunked", &b"4\r\nhalf\r\n"[..]), ("Content-Length: 8", b"half")]
        {
            for resets in [false, true] {
                let mut road = Road::start(mode, "hedge: off, breaker: off").await;
                let (mut call, mut exchange) = road.exchange(&[]).await;
                exchange.raw(format!("HTTP/1.1 200 OK\r\n{framing}\r\n\r\n").as_bytes()).await;
                assert_eq!(call.head().await.status, 200, "{mode:?}");
                exchange.raw(sent).await;
                call.expect("half").await;
                if resets {
                    exchange.reset();
                } else {
                    exchange.close().await;
                }
                let end = call.try_piece().await;
                assert!(end.is_err(), "{mode:?} {framing} {resets}: {end:?}");
                let incomplete = [("outcome", "incomplete"), ("code", "200")];
                road.hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &incomplete) == 1.0).await;
            }
        }
    }
}

#[tokio::test]
async fn an_event_stream_that_breaks_ends_in_an_event_and_a_cut_in_every_mode() {
    for mode in Mode::ALL {
        let mut road = Road::start(mode, "hedge: off").await;
        let (mut call, mut exchange) = road.exchange(&[]).await;
        exchange.start_chunks(200, &[EVENTS]).await;
        assert_eq!(call.head().await.status, 200, "{mode:?}");
        exchange.chunk("data: 1\n\n").await;
        call.expect("data: 1\n\n").await;
        exchange.reset();
        let mut said = Vec::new();
        let cut = loop {
            match call.try_piece().await {
                Ok(Some(piece)) => said.extend(piece),
                Ok(None) => break false,
                Err(_) => break true,
            }
        };
        let said = String::from_utf8(said).unwrap();
        assert!(said.starts_with("event: error\ndata: {") && said.ends_with("\n\n"), "{mode:?}: {said:?}");
        assert!(said.contains("upstream_incomplete") && cut, "{mode:?}: {said:?}, cut: {cut}");
    }
}

#[tokio::test]
async fn a_deadline_cuts_a_body_visibly_in_every_mode() {
    // At once, since all that each of them does is to wait.
    let modes = Mode::ALL.map(async |mode| {
        let mut road = Road::start(mode, "hedge: off").await;
        let at = time::OffsetDateTime::now_utc() + Duration::from_millis(1500);
        let told = (at.unix_timestamp_nanos() / 1_000_000).to_string();
        let (mut call, mut exchange) = road.exchange(&[("x-request-deadline", &told)]).await;
        assert_eq!(exchange.header("x-request-deadline"), Some(told.as_str()), "{mode:?}");
        exchange.start_chunks(200, &[]).await;
        exchange.chunk("half").await;
        assert_eq!(call.head().await.status, 200, "{mode:?}");
        call.expect("half").await;
        let end = call.try_piece().await;
        assert!(end.is_err(), "{mode:?}: {end:?}");
        exchange.gone().await;
    });
    futures_util::future::join_all(modes).await;
}
