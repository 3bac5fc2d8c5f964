//! Agents that speak HTTP/2: every way in, turned into what an HTTP/1.1 upstream expects, and what the
//! connection promises its client.

use std::time::Duration;

use futures_util::future::join_all;
use h2::Reason;
use h2::client::Builder;
use rustix::process::Signal;
use tokio::time::Instant;

use crate::support::client::{Agent, absolute};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::http2::agent::{head, websocket};
use crate::support::http2::frames::{
    END_STREAM, Frame, FramePeer, MAX_CONCURRENT_STREAMS, get, kind, literal,
};
use crate::support::http2::{Answer, End, Http2Agent, Http2Upstream};
use crate::support::pki::Pki;
use crate::support::policy::{TOOL, tool};
use crate::support::soon;
use crate::support::upstream::{Reply, Upstream};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A policy that intercepts `127.0.0.1`, whose certificate `pki` has made.
fn intercepting(upstream: &Upstream, pki: &Pki) -> String {
    format!(
        "tls: {{ ca_dir: ca, ca_file: \"{}\" }}\n{}",
        pki.ca_file().display(),
        tool(upstream.address(), "intercept: true, hedge: off")
    )
}

fn ca_of(hedgerow: &HedgerowProcess) -> Vec<u8> {
    std::fs::read(hedgerow.policy.folder().join("ca/ca.pem"))
        .expect("the CA is written before the port opens")
}

#[tokio::test]
async fn a_call_by_prior_knowledge_is_forwarded_and_reverse_proxied_by_its_authority() {
    let upstream = Upstream::answering(|seen| Reply::ok(seen.head.target.clone())).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let answer = agent.get(&upstream.url("/a?b=%20c")).await;
    assert_eq!((answer.status, answer.text(), answer.end), (200, "/a?b=%20c", End::Whole));
    assert_eq!(answer.header("via"), Some("1.1 hedgerow"));
    assert_eq!(answer.header("x-hedgerow-attempts"), Some("1"));
    // A frame-level client that leaves `:scheme` at http and names the upstream alone is the same.
    let mut raw = FramePeer::client(hedgerow.agent().await).await;
    raw.send(Frame::headers(1, get(&upstream.address().to_string(), "/reverse"), true)).await;
    let data = raw.next(kind::DATA).await;
    assert_eq!((data.stream, &data.payload[..]), (1, &b"/reverse"[..]));
    for seen in upstream.requests() {
        assert_eq!(seen.header("host"), Some(upstream.address().to_string().as_str()));
    }
}

#[tokio::test]
async fn a_plaintext_tunnel_may_carry_http2() {
    // Its client knows that the upstream speaks HTTP/2, or it would not.
    let upstream = Http2Upstream::serving(|stream| {
        let path = stream.uri.path().to_owned();
        stream.respond(200, &[], path)
    })
    .await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "hedge: off")).await;
    let mut tunnel = hedgerow.agent().await;
    assert_eq!(tunnel.open_tunnel(&upstream.address().to_string()).await.status, 200);
    let agent = Http2Agent::over(tunnel).await;
    let urls: Vec<String> = (0..10).map(|n| upstream.url(&format!("/{n}"))).collect();
    let answers = join_all(urls.iter().map(|url| agent.get(url))).await;
    for (n, answer) in answers.iter().enumerate() {
        assert_eq!((answer.status, answer.text()), (200, format!("/{n}").as_str()));
    }
    let answered = [TOOL, ("code", "200"), ("outcome", "answered")];
    let metrics = hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &answered) == 10.0).await;
    assert_eq!(metrics.value("hedgerow_requests_total", &[("outcome", "tunnel")]), 0.0, "looked into");
}

#[tokio::test]
async fn interception_speaks_http2_with_the_client_and_http1_with_an_upstream_that_knows_no_better() {
    let pki = Pki::new();
    let upstream = Upstream::on([127, 0, 0, 1])
        .tls(pki.server(&["127.0.0.1"]))
        .answering(|seen| Reply::ok(seen.head.target.clone()))
        .await;
    let hedgerow = HedgerowProcess::start(&intercepting(&upstream, &pki)).await;
    let authority = upstream.address().to_string();
    let agent = Http2Agent::intercepted(hedgerow.proxy, &authority, &ca_of(&hedgerow)).await;
    let url = format!("https://{authority}/inside");
    let answers = join_all((0..20).map(|_| agent.get(&url))).await;
    assert!(answers.iter().all(|answer| (answer.status, answer.text()) == (200, "/inside")), "{answers:?}");
    assert_eq!(upstream.requests()[0].header("host"), Some(authority.as_str()));
    // The tunnel was asked for under one name; another would reach another host behind the same front.
    let other = agent.get("https://other.example/").await;
    assert_eq!((other.status, &other.json()["error"]), (421, &"misdirected".into()));
    assert_eq!(agent.get(&url).await.status, 200, "and the connection goes on");
}

#[tokio::test]
async fn a_head_is_told_in_the_words_of_http1() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let fields = [
        ("cookie", "a=1"),
        ("cookie", "b=2"),
        ("cookie", "c=3"),
        ("te", "trailers"),
        ("x-many", "1"),
        ("x-many", "2"),
        ("authorization", "Bearer x"),
    ];
    assert_eq!(agent.request("GET", &upstream.url("/"), &fields, "").await.status, 200);
    let seen = &upstream.requests()[0];
    assert_eq!(seen.header("host"), Some(upstream.address().to_string().as_str()));
    assert_eq!(seen.head.headers.all("cookie"), ["a=1; b=2; c=3"]);
    assert_eq!((seen.header("te"), seen.header("connection")), (Some("trailers"), Some("te")));
    assert_eq!(seen.head.headers.all("x-many"), ["1", "2"]);
    assert_eq!(seen.header("authorization"), Some("Bearer x"));
    assert!(seen.head.headers.names().iter().all(|name| !name.starts_with(':')), "{:?}", seen.head.headers);
    assert_eq!((seen.header("transfer-encoding"), seen.header("content-length")), (None, None));
}

#[tokio::test]
async fn fields_of_one_hop_do_not_travel_back_as_http2() {
    let upstream = Upstream::answering(|_| {
        Reply::ok("x").header("Connection", "x-hop").header("X-Hop", "1").header("Keep-Alive", "timeout=5")
    })
    .await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let answer = Http2Agent::connect(hedgerow.proxy).await.get(&upstream.url("/")).await;
    assert_eq!((answer.status, answer.end), (200, End::Whole));
    for name in ["connection", "x-hop", "keep-alive", "transfer-encoding", "proxy-connection", "upgrade"] {
        assert_eq!(answer.header(name), None, "{name}");
    }
}

#[tokio::test]
async fn an_upload_of_unknown_length_is_chunked_and_trailers_pass_both_ways() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let fields = [("te", "trailers"), ("trailer", "x-sum")];
    let mut call = agent.open(head("POST", &upstream.url("/up"), &fields), false).await;
    assert!(call.send("first ", false).await);
    let mut exchange = upstream.next().await;
    assert_eq!(exchange.header("transfer-encoding"), Some("chunked"));
    assert_eq!(exchange.header("content-length"), None);
    assert!(call.send("second", false).await);
    call.trailers(&[("x-sum", "12")]);
    let body = soon(exchange.try_body()).await.unwrap();
    assert_eq!((String::from_utf8(body.bytes).unwrap().as_str(), body.complete), ("first second", true));
    assert_eq!(body.trailers.get("x-sum"), Some("12"));
    exchange.start_chunks(200, &[("Trailer", "x-check")]).await;
    exchange.chunk("down").await;
    exchange.raw(b"0\r\nx-check: 34\r\n\r\n").await;
    exchange.finish().await;
    let answer = call.answer().await;
    assert_eq!((answer.text(), answer.trailer("x-check"), answer.end), ("down", Some("34"), End::Whole));
}

#[tokio::test]
async fn an_upload_with_a_length_keeps_it() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let url = upstream.url("/");
    let (answer, ()) = tokio::join!(agent.request("POST", &url, &[("content-length", "4")], "four"), async {
        let mut exchange = upstream.next().await;
        assert_eq!(exchange.header("content-length"), Some("4"));
        assert_eq!(exchange.header("transfer-encoding"), None);
        assert_eq!(exchange.body().await, b"four");
        exchange.respond(201, &[], "").await;
    });
    assert_eq!(answer.status, 201);
}

#[tokio::test]
async fn answers_without_a_body_end_with_their_head() {
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/204" => Reply::status(204),
        "/304" => Reply::status(304).header("ETag", "\"x\""),
        "/length" => Reply::ok("12345"),
        _ => Reply::ok("to the end"),
    })
    .await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    for (method, path, status, length) in
        [("GET", "/204", 204, None), ("GET", "/304", 304, None), ("HEAD", "/length", 200, Some("5"))]
    {
        let mut call = FramePeer::client(hedgerow.agent().await).await;
        let mut block = if method == "HEAD" { literal(":method", "HEAD") } else { vec![0x82] };
        block.extend(&get(&upstream.address().to_string(), path)[1..]);
        call.send(Frame::headers(1, block, true)).await;
        let answered = call.next(kind::HEADERS).await;
        assert!(answered.ends_stream(), "{method} {path}: END_STREAM stands on the head");
        let answer = agent.request(method, &upstream.url(path), &[], "").await;
        assert_eq!(
            (answer.status, answer.header("content-length"), answer.end),
            (status, length, End::Whole)
        );
        assert!(answer.body.is_empty());
    }
}

#[tokio::test]
async fn a_refusal_of_a_head_request_ends_with_its_head() {
    // The problem that a GET is told in its body came to a HEAD too, which has none.
    let (dead, _held) = Upstream::dead();
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut raw = FramePeer::client(hedgerow.agent().await).await;
    let mut block = literal(":method", "HEAD");
    block.extend(&get(&dead.to_string(), "/")[1..]);
    raw.send(Frame::headers(1, block, true)).await;
    let head = raw.next(kind::HEADERS).await;
    assert!(head.ends_stream(), "{head:?}");
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let answer = agent.request("HEAD", &format!("http://{dead}/"), &[], "").await;
    assert_eq!((answer.status, answer.text(), answer.end), (502, "", End::Whole));
    assert_eq!(answer.header("content-type"), Some("application/problem+json"));
}

#[tokio::test]
async fn a_body_that_ends_with_the_connection_or_in_chunks_ends_in_end_stream() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("defaults: { hedge: off }").await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let url = upstream.url("/");
    for is_chunked in [false, true] {
        let call = agent.open(head("GET", &url, &[]), true).await;
        let mut exchange = upstream.next().await;
        if is_chunked {
            exchange.start_chunks(200, &[]).await;
        } else {
            exchange.raw(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nfirst ").await;
        }
        let mut incoming = call.head().await;
        if is_chunked {
            exchange.chunk("first ").await;
        }
        assert_eq!(incoming.chunk().await.as_deref(), Some(&b"first "[..]), "passed on as it comes");
        if is_chunked {
            exchange.chunk("second").await;
            exchange.end().await;
        } else {
            exchange.raw(b"second").await;
            exchange.close().await;
        }
        let answer = incoming.rest().await;
        assert_eq!((answer.text(), answer.end), ("second", End::Whole));
    }
}

#[tokio::test]
async fn an_answer_that_breaks_is_reset_and_never_ends_as_if_it_were_whole() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("defaults: { hedge: off, breaker: off }").await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let url = upstream.url("/");
    for round in 0..50 {
        let call = agent.open(head("GET", &url, &[]), true).await;
        let mut exchange = upstream.next().await;
        match round % 2 {
            0 => {
                exchange.start_chunks(200, &[]).await;
                exchange.chunk("half").await;
            }
            _ => {
                exchange.head_only(200, &[("Content-Length", "8")]).await;
                exchange.raw(b"half").await;
            }
        }
        let mut incoming = call.head().await;
        assert_eq!(incoming.chunk().await.as_deref(), Some(&b"half"[..]));
        match round % 4 {
            0 | 1 => exchange.reset(),
            _ => exchange.close().await,
        }
        let answer = incoming.rest().await;
        assert!(matches!(answer.end, End::Reset(_)), "round {round}: {answer:?}");
    }
    let agent_goes_on = agent.open(head("GET", &url, &[]), true).await;
    upstream.next().await.respond(200, &[], "well").await;
    assert_eq!(agent_goes_on.answer().await.text(), "well");
}

#[tokio::test]
async fn a_hundred_streams_run_at_once_on_one_connection() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "hedge: off")).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let url = upstream.url("/");
    let calls = join_all((0..100).map(|_| agent.open(head("GET", &url, &[]), true))).await;
    let mut exchanges = Vec::new();
    for _ in 0..100 {
        exchanges.push(upstream.next().await);
    }
    assert_eq!(upstream.until(|tally| tally.in_flight == 100).await.max_in_flight, 100);
    // Answered in the reverse order: no stream waits for another.
    for exchange in exchanges.into_iter().rev() {
        exchange.respond(200, &[], "one").await;
    }
    let answers = join_all(calls.into_iter().map(|call| call.answer())).await;
    assert!(answers.iter().all(|answer| (answer.status, answer.text()) == (200, "one")));
    let connections = [("listener", "proxy")];
    assert_eq!(hedgerow.metrics().await.value("hedgerow_connections_open", &connections), 1.0);
}

#[tokio::test]
async fn the_settings_say_how_many_streams_there_may_be_and_one_more_is_refused_unseen() {
    let mut upstream = Upstream::start().await;
    let policy = format!("limits: {{ streams: 3 }}\n{}", tool(upstream.address(), "hedge: off"));
    let hedgerow = HedgerowProcess::start(&policy).await;
    let mut raw = FramePeer::client(hedgerow.agent().await).await;
    let settings = raw.next(kind::SETTINGS).await;
    let said = settings.payload.chunks(6).find(|pair| pair[..2] == MAX_CONCURRENT_STREAMS.to_be_bytes());
    assert_eq!(said.map(|pair| &pair[2..]), Some(&3_u32.to_be_bytes()[..]));
    // The client's acknowledgement makes them binding.
    raw.next(kind::SETTINGS).await;
    let mut held = Vec::new();
    for stream in [1, 3, 5] {
        raw.send(Frame::headers(stream, get(&upstream.address().to_string(), "/held"), true)).await;
        held.push(upstream.next().await);
    }
    raw.send(Frame::headers(7, get(&upstream.address().to_string(), "/beyond"), true)).await;
    let refused = raw.next(kind::RST_STREAM).await;
    assert_eq!((refused.stream, refused.reason()), (7, Reason::REFUSED_STREAM));
    assert_eq!(upstream.count_of("/beyond"), 0);
    // The others were not touched, and a free place is given out again.
    held.pop().expect("three are held").respond(204, &[], "").await;
    assert_eq!(raw.next(kind::HEADERS).await.stream, 5);
    raw.send(Frame::headers(9, get(&upstream.address().to_string(), "/again"), true)).await;
    upstream.next().await.respond(204, &[], "").await;
    assert_eq!(raw.next(kind::HEADERS).await.stream, 9);
}

/// 64 KiB and 100 fields hold for every version of HTTP.
#[tokio::test]
async fn a_head_that_is_too_large_or_has_too_many_fields_is_answered_431() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("limits: { head: 16KiB }").await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let url = upstream.url("/");
    let large = "x".repeat(20 * 1024);
    let answer = agent.request("GET", &url, &[("x-large", &large)], "").await;
    assert_eq!(answer.status, 431);
    let names: Vec<String> = (0..101).map(|n| format!("x-{n}")).collect();
    let many: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "1")).collect();
    let answer = agent.request("GET", &url, &many, "").await;
    assert_eq!((answer.status, &answer.json()["error"]), (431, &"headers_too_large".into()));
    assert_eq!(upstream.count(), 0);
    let fits = "x".repeat(12 * 1024);
    assert_eq!(agent.request("GET", &url, &[("x-large", &fits)], "").await.status, 200);
    assert_eq!(agent.request("GET", &url, &many[..98], "").await.status, 200);
}

/// The promise is 10 ms; the bound here is for loaded machines. What is looked for once a second has a median of
/// half of one.
#[tokio::test]
async fn a_stream_that_its_client_resets_ends_at_the_upstream_at_once_and_its_neighbour_goes_on() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "hedge: off")).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let neighbour = agent.open(head("GET", &upstream.url("/neighbour"), &[]), true).await;
    let kept = upstream.next().await;
    let mut delays = Vec::new();
    for round in 0..50 {
        let call = agent.open(head("GET", &upstream.url("/"), &[]), true).await;
        let mut exchange = upstream.next().await;
        let began;
        if round % 2 == 0 {
            began = Instant::now();
            call.reset(Reason::CANCEL);
        } else {
            exchange.start_chunks(200, &[]).await;
            exchange.chunk("half").await;
            let mut incoming = call.head().await;
            incoming.chunk().await;
            began = Instant::now();
            incoming.reset(Reason::CANCEL);
        }
        delays.push(exchange.gone().await - began);
    }
    delays.sort();
    assert!(delays[25] < ms(300), "{delays:?}");
    kept.respond(200, &[], "still here").await;
    assert_eq!(neighbour.answer().await.text(), "still here");
    let left = [TOOL, ("code", "499"), ("outcome", "client_left")];
    hedgerow.until_metrics(|metrics| metrics.value("hedgerow_requests_total", &left) == 50.0).await;
    hedgerow.until_status(|status| status["in_flight"] == 0).await;
}

#[tokio::test]
async fn a_client_that_drops_its_connection_cancels_all_that_was_on_it() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "hedge: off")).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let mut calls = Vec::new();
    let mut exchanges = Vec::new();
    for _ in 0..10 {
        calls.push(agent.open(head("GET", &upstream.url("/"), &[]), true).await);
        exchanges.push(upstream.next().await);
    }
    drop((agent, calls));
    join_all(exchanges.into_iter().map(|exchange| exchange.gone())).await;
    hedgerow
        .until_metrics(|metrics| {
            metrics.value("hedgerow_requests_total", &[TOOL, ("outcome", "client_left")]) == 10.0
                && metrics.value("hedgerow_bulkhead_in_flight", &[TOOL]) == 0.0
        })
        .await;
}

#[tokio::test]
async fn a_drain_says_goaway_and_lets_the_streams_finish() {
    let mut upstream = Upstream::start().await;
    let policy = format!("drain: {{ quiet: 100ms, max: 20s }}\n{}", tool(upstream.address(), "hedge: off"));
    let mut hedgerow = HedgerowProcess::start(&policy).await;
    let mut raw = FramePeer::client(hedgerow.agent().await).await;
    raw.send(Frame::headers(1, get(&upstream.address().to_string(), "/"), true)).await;
    let mut exchange = upstream.next().await;
    exchange.start_chunks(200, &[]).await;
    exchange.chunk("before ").await;
    assert_eq!(raw.next(kind::DATA).await.payload, b"before ");
    hedgerow.signal(Signal::TERM);
    let goaway = raw.next(kind::GOAWAY).await;
    assert_eq!(goaway.reason(), Reason::NO_ERROR);
    exchange.chunk("after").await;
    exchange.end().await;
    let rest = raw.rest().await;
    let body: Vec<u8> =
        rest.iter().filter(|frame| frame.kind == kind::DATA).flat_map(|f| f.payload.clone()).collect();
    assert_eq!(body, b"after");
    assert!(rest.iter().any(|frame| frame.stream == 1 && frame.ends_stream()), "{rest:?}");
    assert!(rest.iter().all(|frame| frame.kind != kind::RST_STREAM), "{rest:?}");
    assert_eq!(hedgerow.wait().await, 0);
}

#[tokio::test]
async fn idle_connections_get_their_goaway_before_an_idle_process_leaves() {
    // Looked at once a second, most of them found the process gone.
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let policy = format!("drain: {{ quiet: 300ms, max: 20s }}\n{}", tool(upstream.address(), "hedge: off"));
    let mut hedgerow = HedgerowProcess::start(&policy).await;
    let mut peers = Vec::new();
    for _ in 0..20 {
        let mut raw = FramePeer::client(hedgerow.agent().await).await;
        raw.send(Frame::headers(1, get(&upstream.address().to_string(), "/"), true)).await;
        raw.next(kind::HEADERS).await;
        peers.push(raw);
    }
    hedgerow.signal(Signal::TERM);
    for goaway in join_all(peers.iter_mut().map(|peer| peer.next(kind::GOAWAY))).await {
        assert_eq!(goaway.reason(), Reason::NO_ERROR);
    }
    assert_eq!(hedgerow.wait().await, 0);
}

#[tokio::test]
async fn an_idle_connection_is_ended_with_goaway_after_the_keep_alive_time() {
    let upstream = Upstream::answering(|_| Reply::ok("served")).await;
    let hedgerow = HedgerowProcess::start("limits: { keep_alive: 1s, header_timeout: 30s }").await;
    let mut raw = FramePeer::client(hedgerow.agent().await).await;
    let asked = Instant::now();
    raw.send(Frame::headers(1, get(&upstream.address().to_string(), "/"), true)).await;
    while !raw.next(kind::DATA).await.ends_stream() {}
    let goaway = raw.next(kind::GOAWAY).await;
    assert_eq!(goaway.reason(), Reason::NO_ERROR);
    assert!(asked.elapsed() >= ms(1000), "{:?}", asked.elapsed());
    raw.rest().await;
    // The usual time is two minutes, and that for a head half of one.
    assert!(asked.elapsed() < ms(15_000), "{:?}", asked.elapsed());
}

#[tokio::test]
async fn a_deadline_that_strikes_before_the_head_is_an_ordinary_answer() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("defaults: { deadline: { default: 1s }, hedge: off }").await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let call = agent.open(head("GET", &upstream.url("/"), &[]), true).await;
    let exchange = upstream.next().await;
    let answer = call.answer().await;
    assert_eq!(
        (answer.status, &answer.json()["error"], answer.end),
        (504, &"deadline_exceeded".into(), End::Whole)
    );
    assert!(answer.header("proxy-status").unwrap().contains("http_response_timeout"));
    exchange.gone().await;
}

#[tokio::test]
async fn a_deadline_that_strikes_in_the_body_resets_the_stream() {
    let mut upstream = Upstream::start().await;
    let hedgerow =
        HedgerowProcess::start("defaults: { deadline: { default: 1500ms, covers: body }, hedge: off }").await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let call = agent.open(head("GET", &upstream.url("/"), &[]), true).await;
    let mut exchange = upstream.next().await;
    exchange.start_chunks(200, &[]).await;
    exchange.chunk("half").await;
    let answer = call.answer().await;
    assert_eq!((answer.status, answer.text()), (200, "half"));
    assert!(matches!(answer.end, End::Reset(_)), "{answer:?}");
    exchange.gone().await;
}

#[tokio::test]
async fn interim_answers_reach_the_client_before_the_final_one() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("defaults: { hedge: off }").await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let mut call = agent.open(head("GET", &upstream.url("/"), &[]), true).await;
    let mut exchange = upstream.next().await;
    exchange.raw(b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\nConnection: x\r\n\r\n").await;
    let early = call.interim().await;
    assert_eq!(
        (early.status().as_u16(), early.headers()["link"].to_str().unwrap()),
        (103, "</a.css>; rel=preload")
    );
    assert!(!early.headers().contains_key("connection"));
    exchange.respond(200, &[], "final").await;
    assert_eq!(call.answer().await.text(), "final");
}

/// The body is not asked for before the upstream wants it, and a refusal comes without it.
#[tokio::test]
async fn an_expectation_is_the_upstreams_to_meet() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("defaults: { hedge: off }").await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let expecting = [("expect", "100-continue"), ("content-length", "4")];
    let mut call = agent.open(head("POST", &upstream.url("/"), &expecting), false).await;
    let mut exchange = upstream.next().await;
    assert_eq!(exchange.header("expect"), Some("100-continue"));
    exchange.raw(b"HTTP/1.1 100 Continue\r\n\r\n").await;
    assert_eq!(call.interim().await.status(), 100);
    assert!(call.send("body", true).await);
    assert_eq!(exchange.body().await, b"body");
    exchange.respond(200, &[], "taken").await;
    assert_eq!(call.answer().await.text(), "taken");

    let call = agent.open(head("POST", &upstream.url("/"), &expecting), false).await;
    let mut exchange = upstream.next().await;
    exchange.raw(b"HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").await;
    exchange.close().await;
    assert_eq!(call.head().await.status, 417);
}

#[tokio::test]
async fn no_interim_answer_follows_the_final_one() {
    // The upstream answers without having asked for the body. It was asked of the client a second later all the
    // same, and what asked for it came as a second head.
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("defaults: { hedge: off }").await;
    let mut raw = FramePeer::client(hedgerow.agent().await).await;
    let mut block = literal(":method", "POST");
    block.extend(&get(&upstream.address().to_string(), "/")[1..]);
    block.extend(literal("expect", "100-continue"));
    block.extend(literal("content-length", "4"));
    raw.send(Frame::headers(1, block, false)).await;
    raw.send(Frame::new(kind::DATA, END_STREAM, 1, b"body")).await;
    let mut exchange = upstream.next().await;
    exchange.start_chunks(200, &[]).await;
    exchange.chunk("before ").await;
    raw.next(kind::HEADERS).await;
    exchange.chunk("after").await;
    exchange.end().await;
    let mut content = Vec::new();
    loop {
        let frame = soon(raw.try_next()).await.expect("the stream comes to its end");
        assert_ne!((frame.kind, frame.stream), (kind::HEADERS, 1), "a head in the middle of the content");
        if (frame.kind, frame.stream) == (kind::DATA, 1) {
            content.extend_from_slice(&frame.payload);
            if frame.ends_stream() {
                break;
            }
        }
    }
    assert_eq!(content, b"before after");
}

#[tokio::test]
async fn an_event_stream_that_is_cut_says_so_before_it_is_reset() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("defaults: { hedge: off, breaker: off }").await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    for round in 0..50 {
        let call = agent.open(head("GET", &upstream.url("/"), &[]), true).await;
        let mut exchange = upstream.next().await;
        exchange.start_chunks(200, &[("Content-Type", "text/event-stream")]).await;
        exchange.chunk("data: 1\n\n").await;
        let mut incoming = call.head().await;
        assert_eq!(incoming.chunk().await.as_deref(), Some(&b"data: 1\n\n"[..]));
        exchange.reset();
        let answer = incoming.rest().await;
        let text = answer.text();
        assert!(
            text.starts_with("event: error\ndata: ") && text.ends_with("\n\n"),
            "round {round}: {answer:?}"
        );
        assert!(text.contains("upstream_incomplete") || text.contains("upstream_reset"), "{text}");
        assert!(matches!(answer.end, End::Reset(_)), "round {round}: {answer:?}");
    }
}

/// Small windows on the client's side: its stream waits, the others and the upstream's memory do not suffer.
#[tokio::test]
async fn a_stream_that_is_not_read_holds_back_its_own_upstream_alone() {
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/large" => Reply::ok(vec![b'x'; 32 * 1024 * 1024]),
        _ => Reply::ok("small"),
    })
    .await;
    let hedgerow = HedgerowProcess::start("defaults: { hedge: off }").await;
    let mut builder = Builder::new();
    builder.initial_window_size(64 * 1024).initial_connection_window_size(16 * 1024 * 1024);
    let agent = Http2Agent::with(hedgerow.agent().await, &builder).await;
    assert_eq!(agent.get(&upstream.url("/small")).await.text(), "small");
    let before = hedgerow.resident_kib();
    let slow = agent.open(head("GET", &upstream.url("/large"), &[]), true).await.head().await;
    for _ in 0..50 {
        assert_eq!(agent.get(&upstream.url("/small")).await.text(), "small");
    }
    let grown = hedgerow.resident_kib().saturating_sub(before);
    assert!(grown < 8 * 1024, "{grown} KiB more");
    let answer: Answer = slow.rest().await;
    assert_eq!((answer.body.len(), answer.end), (32 * 1024 * 1024, End::Whole));
}

#[tokio::test]
async fn http1_and_http2_clients_share_a_port_and_an_upstream() {
    let upstream = Upstream::answering(|_| Reply::ok("both")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let second = Http2Agent::connect(hedgerow.proxy).await;
    let mut first = hedgerow.agent().await;
    for _ in 0..5 {
        assert_eq!(second.get(&upstream.url("/")).await.text(), "both");
        assert_eq!(first.get(&upstream.url("/")).await.text(), "both");
    }
    assert_eq!(upstream.connections(), 1, "kept, whoever asked");
    // A preface byte by byte is a preface.
    let mut slow: Agent = hedgerow.agent().await;
    for byte in crate::support::http2::frames::PREFACE {
        slow.send([*byte]).await;
        tokio::task::yield_now().await;
    }
    slow.send(Frame::settings(&[]).encode()).await;
    slow.send(Frame::headers(1, get(&upstream.address().to_string(), "/"), true).encode()).await;
    assert_eq!(FramePeer(slow).next(kind::DATA).await.payload, b"both");
    // And what begins like one but is a request is that.
    let mut patch = hedgerow.agent().await;
    patch.send(absolute("PRINT", &upstream.url("/"), &[], b"")).await;
    assert_eq!(patch.read_response_to("PRINT").await.status, 200);
}

/// RFC 8441: what is an upgrade in HTTP/1.1 is a CONNECT with a protocol here.
#[tokio::test]
async fn a_websocket_on_a_stream_becomes_an_upgrade_and_frames_pass_both_ways() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "hedge: off")).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    agent.until_websockets().await;
    let fields =
        [("sec-websocket-version", "13"), ("sec-websocket-protocol", "chat"), ("origin", "http://a.example")];
    let call = agent.open(websocket(&upstream.url("/chat?room=1"), &fields), false).await;
    let mut exchange = upstream.next().await;
    assert_eq!((exchange.head.method.as_str(), exchange.head.target.as_str()), ("GET", "/chat?room=1"));
    assert_eq!(exchange.header("upgrade"), Some("websocket"));
    assert!(exchange.header("connection").unwrap().eq_ignore_ascii_case("upgrade"));
    assert_eq!(exchange.header("sec-websocket-key").map(str::len), Some(24));
    assert_eq!(exchange.header("sec-websocket-protocol"), Some("chat"));
    exchange.accept_web_socket(&[("Sec-WebSocket-Protocol", "chat")]).await;
    let mut incoming = call.head().await;
    assert_eq!(incoming.status, 200);
    for absent in ["connection", "upgrade", "sec-websocket-accept"] {
        assert!(!incoming.headers.contains_key(absent), "{absent}");
    }
    assert_eq!(incoming.headers["sec-websocket-protocol"], "chat");
    let mut tunnel = exchange.tunnel();
    for n in 0..100 {
        let frame = format!("frame {n:03}");
        incoming.send(frame.clone(), false);
        tunnel.expect(frame.as_bytes()).await;
        tunnel.send(frame.as_bytes()).await;
        assert_eq!(incoming.chunk().await.as_deref(), Some(frame.as_bytes()));
    }
    // Neighbours are not concerned, and each side can end its direction.
    let other = agent.open(head("GET", &upstream.url("/"), &[]), true).await;
    upstream.next().await.respond(200, &[], "beside").await;
    assert_eq!(other.answer().await.text(), "beside");
    incoming.send("", true);
    assert_eq!(tunnel.rest().await.unwrap(), b"");
    tunnel.send(b"bye").await;
    drop(tunnel);
    let answer = incoming.rest().await;
    assert_eq!((answer.text(), answer.end), ("bye", End::Whole));
}

#[tokio::test]
async fn a_websocket_that_the_upstream_refuses_is_answered_with_its_refusal() {
    let upstream = Upstream::answering(|_| Reply::status(403).body("not you")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "hedge: off")).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    agent.until_websockets().await;
    let answer = agent.open(websocket(&upstream.url("/"), &[]), false).await.answer().await;
    assert_eq!((answer.status, answer.text(), answer.end), (403, "not you", End::Whole));
}

/// The client's library cannot look at it, since HTTP/2 has no place for it.
#[tokio::test]
async fn a_101_that_does_not_accept_the_key_of_a_websocket_is_an_upstreams_fault() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "hedge: off")).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    agent.until_websockets().await;
    let switch = [("Connection", "Upgrade"), ("Upgrade", "websocket")];
    let wrong = [&switch[..], &[("Sec-WebSocket-Accept", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")]].concat();
    for fields in [&switch[..], &wrong] {
        let call = agent.open(websocket(&upstream.url("/"), &[]), false).await;
        let mut exchange = upstream.next().await;
        exchange.head_only(101, fields).await;
        let answer = call.answer().await;
        assert_eq!((answer.status, &answer.json()["error"]), (502, &"upstream_invalid".into()));
        assert!(exchange.tunnel().rest().await.is_ok_and(|bytes| bytes.is_empty()));
    }
    let refused = [TOOL, ("code", "502"), ("outcome", "error")];
    hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &refused) == 2.0).await;

    // What is no WebSocket has no key, and nothing to accept.
    let mut other = websocket(&upstream.url("/"), &[]);
    other.extensions_mut().insert(h2::ext::Protocol::from_static("connect-udp"));
    let call = agent.open(other, false).await;
    let mut exchange = upstream.next().await;
    assert_eq!(
        (exchange.header("upgrade"), exchange.header("sec-websocket-key")),
        (Some("connect-udp"), None)
    );
    exchange.head_only(101, &[("Connection", "Upgrade"), ("Upgrade", "connect-udp")]).await;
    assert_eq!(call.head().await.status, 200);
}

#[tokio::test]
async fn a_connect_on_a_stream_opens_a_tunnel_and_a_reset_closes_it() {
    let port = crate::support::raw::RawPort::bind().await;
    let hedgerow = HedgerowProcess::start(&tool(port.address(), "hedge: off")).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let authority = port.address().to_string();
    for is_reset in [false, true] {
        let call = agent.open(head("CONNECT", &authority, &[]), false).await;
        let (mut incoming, mut far) = tokio::join!(call.head(), port.accept());
        assert_eq!(incoming.status, 200);
        assert!(!incoming.headers.contains_key("content-length"), "{:?}", incoming.headers);
        incoming.send("\x16\x03\x01 client", false);
        far.expect(b"\x16\x03\x01 client").await;
        far.send("server").await;
        assert_eq!(incoming.chunk().await.as_deref(), Some(&b"server"[..]));
        if is_reset {
            incoming.reset(Reason::CANCEL);
            far.ended().await;
        } else {
            far.half_close().await;
            incoming.send("last", true);
            far.expect(b"last").await;
            assert_eq!(incoming.rest().await.end, End::Whole);
            far.ended().await;
        }
    }
    let refused = agent.get(&format!("http://{}/", hedgerow.proxy)).await;
    assert_eq!(refused.status, 404, "the proxy itself is no upstream");
}

/// Whatever HTTP/1 would read as more than one line or one target must not get there.
#[tokio::test]
async fn a_head_that_would_smuggle_in_http1_is_refused() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let host = upstream.address().to_string();
    let named = |path: &str| {
        let mut block = get(&host, "/");
        block.truncate(block.len() - literal(":path", "/").len());
        block.extend(literal(":path", path));
        block
    };
    let with = |name: &str, value: &str| [get(&host, "/"), literal(name, value)].concat();
    let blocks = [
        named("/a b HTTP/1.1"),
        named("/a\r\nx-smuggled: 1"),
        named(""),
        named("no-slash"),
        with("x-a", "1\r\nx-smuggled: 1"),
        with("x-a: 1\r\nx-smuggled", "1"),
        with("X-Upper", "1"),
        with("connection", "close"),
        with("transfer-encoding", "chunked"),
        with("te", "gzip"),
        with("upgrade", "h2c"),
        with(":path", "/twice"),
        [literal("x-before", "1"), get(&host, "/")].concat(),
        get(&format!("user:pw@{host}"), "/"),
        get("a.example\r\nx-smuggled: 1", "/"),
        with("content-length", "5, 5"),
        with("content-length", "-1"),
        with("x-nul", "a\0b"),
    ];
    for block in blocks {
        let mut peer = FramePeer::client(hedgerow.agent().await).await;
        peer.send(Frame::headers(1, block.clone(), true)).await;
        let refusal = soon(async {
            loop {
                match peer.try_next().await {
                    Some(frame) if frame.stream == 1 || frame.kind == kind::GOAWAY => break Some(frame),
                    Some(_) => {}
                    None => break None,
                }
            }
        })
        .await;
        let text = String::from_utf8_lossy(&block);
        match refusal {
            Some(frame) if frame.kind == kind::HEADERS => {
                // An answer of ours: `:status: 400` is index 12 of the static table.
                assert_eq!(frame.payload[0], 0x8c, "{text:?}: {frame:?}");
            }
            Some(frame) => assert_eq!(frame.reason(), Reason::PROTOCOL_ERROR, "{text:?}"),
            None => {}
        }
    }
    assert_eq!(upstream.count(), 0, "{:?}", upstream.requests());
}

#[tokio::test]
async fn a_body_that_does_not_keep_its_length_is_never_sent_on_as_whole() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "hedge: off, breaker: off")).await;
    for sent in ["half", "more than was promised"] {
        let mut peer = FramePeer::client(hedgerow.agent().await).await;
        let mut block = get(&upstream.address().to_string(), "/");
        // `:method: POST` is index 3.
        block[0] = 0x83;
        block.extend(literal("content-length", "8"));
        peer.send(Frame::headers(1, block, false)).await;
        let mut exchange = upstream.next().await;
        peer.send(Frame::new(kind::DATA, 1, 1, sent)).await;
        let body = soon(exchange.try_body()).await.unwrap();
        assert!(!body.complete, "{sent}: {body:?}");
        assert_eq!(peer.next(kind::RST_STREAM).await.reason(), Reason::PROTOCOL_ERROR);
    }
}

#[tokio::test]
async fn the_host_field_stands_in_for_an_authority_and_never_against_it() {
    let upstream = Upstream::answering(|seen| Reply::ok(seen.header("host").unwrap_or_default())).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let host = upstream.address().to_string();
    let path = literal(":path", "/");
    let without = [&[0x82, 0x86][..], &path, &literal("host", &host)].concat();
    let against = [get(&host, "/"), literal("host", "other.example")].concat();
    for block in [without, against] {
        let mut peer = FramePeer::client(hedgerow.agent().await).await;
        peer.send(Frame::headers(1, block, true)).await;
        assert_eq!(peer.next(kind::DATA).await.payload, host.as_bytes());
    }
}

#[tokio::test]
async fn a_client_that_stops_reading_is_given_up_and_its_neighbours_are_not() {
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/large" => Reply::ok(vec![b'x'; 16 * 1024 * 1024]),
        _ => Reply::ok("small"),
    })
    .await;
    let mut builder = Builder::new();
    builder.initial_window_size(64 * 1024).initial_connection_window_size(1024 * 1024);
    for (nth, bound) in ["stream_idle: 1s", "deadline: { default: 1500ms, covers: body }"].iter().enumerate()
    {
        let hedgerow =
            HedgerowProcess::start(&tool(upstream.address(), &format!("hedge: off, {bound}"))).await;
        let agent = Http2Agent::with(hedgerow.agent().await, &builder).await;
        let slow = agent.open(head("GET", &upstream.url("/large"), &[]), true).await.head().await;
        upstream.until(|tally| tally.aborted == nth + 1).await;
        assert_eq!(agent.get(&upstream.url("/small")).await.text(), "small");
        assert!(matches!(slow.rest().await.end, End::Reset(_)), "{bound}");
        hedgerow.until_metrics(|m| m.value("hedgerow_bulkhead_in_flight", &[TOOL]) == 0.0).await;
    }
}

/// An agent that gives up a whole fan-out at once is no attacker.
#[tokio::test]
async fn a_hundred_streams_that_are_given_up_at_once_do_not_end_the_connection() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "hedge: off")).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    for _ in 0..3 {
        let mut calls = Vec::new();
        let mut exchanges = Vec::new();
        for _ in 0..100 {
            calls.push(agent.open(head("GET", &upstream.url("/"), &[]), true).await);
        }
        for _ in 0..100 {
            exchanges.push(upstream.next().await);
        }
        for call in calls {
            call.reset(Reason::CANCEL);
        }
        join_all(exchanges.into_iter().map(|exchange| exchange.gone())).await;
    }
    let call = agent.open(head("GET", &upstream.url("/"), &[]), true).await;
    upstream.next().await.respond(200, &[], "well").await;
    assert_eq!(call.answer().await.text(), "well");
}

/// The same before anybody has looked at them.
#[tokio::test]
async fn a_hundred_streams_that_are_opened_and_given_up_in_one_breath_do_not_end_the_connection() {
    let upstream = Upstream::answering(|_| Reply::ok("well")).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "hedge: off")).await;
    let mut peer = FramePeer::client(hedgerow.agent().await).await;
    let host = upstream.address().to_string();
    let open = |n: u32| Frame::headers(n * 2 + 1, get(&host, "/"), true).encode();
    let reset = |n: u32| Frame::reset(n * 2 + 1, Reason::CANCEL).encode();
    peer.0.send((0..100).flat_map(|n| [open(n), reset(n)].concat()).collect::<Vec<_>>()).await;
    peer.0.send(open(100)).await;
    loop {
        let frame = soon(peer.try_next()).await.expect("the connection goes on");
        match frame.kind {
            kind::GOAWAY => panic!("GOAWAY: {:?}", frame.reason()),
            kind::DATA if frame.stream == 201 => break assert_eq!(frame.payload, b"well"),
            _ => {}
        }
    }
}

/// Content that is on its way when the answer comes early crosses it on the wire, which is nobody's fault.
#[tokio::test]
async fn uploads_that_are_refused_at_once_by_the_hundred_do_not_end_the_connection() {
    let mut upstream = Upstream::start().await;
    let stages = "hedge: off, bulkhead: { max_concurrent: 1, max_queue: 0 }";
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    let mut holder = hedgerow.agent().await;
    holder.send(absolute("GET", &upstream.url("/"), &[], b"")).await;
    let held = upstream.next().await;
    let mut peer = FramePeer::client(hedgerow.agent().await).await;
    // Room for all the answers.
    peer.send(Frame::new(kind::WINDOW_UPDATE, 0, 0, (1_u32 << 20).to_be_bytes())).await;
    let host = upstream.address().to_string();
    for round in 0..5 {
        let streams: Vec<u32> = (0..100).map(|n| (round * 100 + n) * 2 + 1).collect();
        let heads =
            streams.iter().flat_map(|stream| Frame::headers(*stream, get(&host, "/"), false).encode());
        peer.0.send(heads.collect::<Vec<_>>()).await;
        for _ in &streams {
            let stopped = peer.next(kind::RST_STREAM).await;
            assert_eq!(stopped.reason(), Reason::NO_ERROR, "round {round}");
        }
        // A client that had not read them yet would have sent this already.
        let content =
            streams.iter().flat_map(|stream| Frame::new(kind::DATA, 1, *stream, "content").encode());
        peer.0.send(content.collect::<Vec<_>>()).await;
    }
    peer.send(Frame::new(kind::PING, 0, 0, [7; 8])).await;
    loop {
        let frame = soon(peer.try_next()).await.expect("the connection goes on");
        match frame.kind {
            kind::GOAWAY => panic!("GOAWAY: {:?}", frame.reason()),
            kind::PING => break,
            _ => {}
        }
    }
    held.respond(200, &[], "").await;
    assert_eq!(holder.read_response().await.status, 200);
}

/// A client may open streams before it has heard how many there may be.
#[tokio::test]
async fn streams_that_were_opened_before_the_settings_came_are_served_up_to_the_limit() {
    let upstream = Upstream::answering(|_| Reply::ok("served").after(ms(100))).await;
    let hedgerow = HedgerowProcess::start(&tool(upstream.address(), "hedge: off")).await;
    let mut peer = FramePeer::client(hedgerow.agent().await).await;
    let host = upstream.address().to_string();
    let burst: Vec<u8> =
        (0..150).flat_map(|n| Frame::headers(n * 2 + 1, get(&host, "/"), true).encode()).collect();
    peer.0.send(burst).await;
    let (mut served, mut refused) = (0, 0);
    while served + refused < 150 {
        let frame = soon(peer.try_next()).await.expect("the connection goes on");
        match frame.kind {
            kind::RST_STREAM => {
                assert_eq!(frame.reason(), Reason::REFUSED_STREAM);
                refused += 1;
            }
            kind::DATA if frame.ends_stream() => served += 1,
            kind::GOAWAY => panic!("GOAWAY after {served} and {refused}"),
            _ => {}
        }
    }
    assert!(served >= 100, "{served} served, {refused} refused");
    assert_eq!(upstream.count(), served);
}

#[tokio::test]
async fn a_websocket_on_a_stream_inside_an_interception_reaches_its_upstream_in_tls() {
    let pki = Pki::new();
    let mut upstream = Upstream::on([127, 0, 0, 1]).tls(pki.server(&["127.0.0.1"])).start().await;
    let hedgerow = HedgerowProcess::start(&intercepting(&upstream, &pki)).await;
    let authority = upstream.address().to_string();
    let agent = Http2Agent::intercepted(hedgerow.proxy, &authority, &ca_of(&hedgerow)).await;
    agent.until_websockets().await;
    let call = agent.open(websocket(&format!("https://{authority}/ws"), &[]), false).await;
    let mut exchange = upstream.next().await;
    assert_eq!((exchange.head.target.as_str(), exchange.header("upgrade")), ("/ws", Some("websocket")));
    assert_eq!(exchange.header("host"), Some(authority.as_str()));
    exchange.accept_web_socket(&[]).await;
    let mut incoming = call.head().await;
    assert_eq!(incoming.status, 200);
    let mut tunnel = exchange.tunnel();
    incoming.send("ping", false);
    tunnel.expect(b"ping").await;
    tunnel.send(b"pong").await;
    assert_eq!(incoming.chunk().await.as_deref(), Some(&b"pong"[..]));
    // The client that leaves takes the upstream's connection with it.
    incoming.reset(Reason::CANCEL);
    let _ = tunnel.rest().await;
}

/// The keep-alive time is for connections on which nothing is, however long a stream lasts.
#[tokio::test]
async fn a_stream_that_outlasts_the_keep_alive_time_goes_on() {
    let mut upstream = Upstream::start().await;
    let policy = format!("limits: {{ keep_alive: 1s }}\n{}", tool(upstream.address(), "hedge: off"));
    let hedgerow = HedgerowProcess::start(&policy).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let call = agent.open(head("GET", &upstream.url("/"), &[]), true).await;
    let mut exchange = upstream.next().await;
    exchange.start_chunks(200, &[]).await;
    exchange.chunk("first").await;
    let mut incoming = call.head().await;
    assert_eq!(incoming.chunk().await.as_deref(), Some(&b"first"[..]));
    tokio::time::sleep(ms(2500)).await;
    let second = agent.open(head("GET", &upstream.url("/"), &[]), true).await;
    upstream.next().await.respond(200, &[], "beside").await;
    assert_eq!(second.answer().await.text(), "beside", "no GOAWAY has come");
    exchange.chunk("second").await;
    exchange.end().await;
    assert_eq!(incoming.rest().await.text(), "second");
}

/// What is no host is told so, however the request came here, and never taken for another name.
#[tokio::test]
async fn an_authority_with_user_information_or_no_host_is_a_bad_request_on_every_way() {
    let pki = Pki::new();
    let secure =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&["127.0.0.1"])).answering(|_| Reply::ok("")).await;
    let plain = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(&intercepting(&secure, &pki)).await;
    let (secure_at, plain_at) = (secure.address().to_string(), plain.address().to_string());
    let mut tunnel = hedgerow.agent().await;
    assert_eq!(tunnel.open_tunnel(&plain_at).await.status, 200);
    let ways = [
        ("http", &plain_at, Http2Agent::connect(hedgerow.proxy).await),
        ("http", &plain_at, Http2Agent::over(tunnel).await),
        ("https", &secure_at, Http2Agent::intercepted(hedgerow.proxy, &secure_at, &ca_of(&hedgerow)).await),
    ];
    for (scheme, authority, agent) in &ways {
        for odd in [format!("u:p@{authority}"), "2130706433".to_owned(), "a..test".to_owned()] {
            let answer = agent.get(&format!("{scheme}://{odd}/")).await;
            assert_eq!((answer.status, &answer.json()["error"]), (400, &"invalid_request".into()), "{odd}");
        }
    }
    for target in [format!("http://u:p@{plain_at}/"), "http://2130706433/".to_owned()] {
        let mut agent = hedgerow.agent().await;
        assert_eq!(agent.open_tunnel(&plain_at).await.status, 200);
        agent.send(format!("GET {target} HTTP/1.1\r\nHost: {plain_at}\r\n\r\n")).await;
        assert_eq!(agent.read_response().await.status, 400, "{target}");
    }
    assert_eq!((plain.count(), secure.count()), (0, 0));
}
