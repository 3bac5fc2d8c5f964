//! Where a message ends: read strictly on both sides, and never passed on in a form that reads in two ways.

use crate::support::client::{Agent, End, Response, absolute};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::raw::RawPort;
use crate::support::soon;
use crate::support::upstream::{Reply, Upstream};

/// What a refusal looks like whatever the reason: one answer, the problem shape, and the end.
async fn refused(agent: &mut Agent) -> Response {
    let answer = agent.read_response().await;
    assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{answer:?}");
    assert_eq!(answer.header("connection"), Some("close"));
    assert!(answer.complete);
    agent.ended().await;
    answer
}

/// A request written by hand: what a library would never send.
fn by_hand(upstream: &Upstream, fields: &str, body: &str) -> String {
    let address = upstream.address();
    format!("POST http://{address}/ HTTP/1.1\r\nHost: {address}\r\n{fields}\r\n{body}")
}

#[tokio::test]
async fn c001_length_beside_chunked_smuggles_nothing_whichever_comes_first() {
    // Where the length came first it survived beside the chunked coding, and the connection stayed open for
    // whatever the attacker had hidden in the difference.
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    for fields in [
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
    ] {
        let mut agent = hedgerow.agent().await;
        let smuggled = absolute("GET", &upstream.url("/smuggled"), &[], b"");
        let body = format!("3\r\nabc\r\n0\r\n\r\n{}", String::from_utf8(smuggled).unwrap());
        agent.send(by_hand(&upstream, fields, &body)).await;
        let answer = agent.read_response().await;
        assert!(matches!(answer.status, 200 | 400), "{answer:?}");
        assert_eq!(answer.header("connection"), Some("close"));
        agent.ended().await;
    }
    // The upstream reads strictly: with both fields it would have answered 400 and recorded nothing.
    assert_eq!(upstream.count_of("/smuggled"), 0);
    for seen in upstream.requests() {
        assert_eq!(seen.head.headers.all("content-length").len(), 0);
        assert_eq!(seen.body, b"abc");
    }
}

#[tokio::test]
async fn c002_lone_line_feed_in_chunk_framing_is_refused() {
    // One parser ends the chunk line at the lone LF, the other reads on: they disagree about the body.
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    for body in
        ["5\nhello\r\n0\r\n\r\n", "5;x=\nhello\r\n0\r\n\r\n", "5\r\nhello\n0\r\n\r\n", "5\r\nhello\r\n0\n\n"]
    {
        let mut agent = hedgerow.agent().await;
        agent.send(by_hand(&upstream, "Transfer-Encoding: chunked\r\n", body)).await;
        assert_eq!(refused(&mut agent).await.status, 400, "{body:?}");
    }
    // A head may have gone ahead; no body got to an end.
    let tally = upstream.until(|tally| tally.in_flight == 0).await;
    assert_eq!(tally.aborted, tally.requests);
}

#[tokio::test]
async fn chunk_extensions_are_not_copied_through() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    agent.send(by_hand(&upstream, "Transfer-Encoding: chunked\r\n", "5;x=y\r\nhello\r\n0;z\r\n\r\n")).await;
    assert_eq!(agent.read_response().await.status, 200);
    assert_eq!(upstream.requests()[0].body, b"hello");
    assert_eq!(upstream.requests()[0].header("transfer-encoding"), Some("chunked"));
}

#[tokio::test]
async fn c003_head_keeps_the_length_that_the_upstream_told() {
    // The length of an answer to HEAD is information, not framing: it was rewritten to 0.
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("HEAD", &upstream.url("/"), &[], b"")).await;
    let mut exchange = upstream.next().await;
    exchange.head_only(200, &[("Content-Length", "1488324")]).await;
    exchange.finish().await;
    let answer = agent.read_response_to("HEAD").await;
    assert_eq!((answer.status, answer.header("content-length")), (200, Some("1488324")));
    // The connection is in step on both sides: the next exchange is not read as the missing body.
    agent.send(absolute("GET", &upstream.url("/"), &[], b"")).await;
    upstream.next().await.respond(200, &[], "whole").await;
    assert_eq!(agent.read_response().await.text(), "whole");
    assert_eq!(upstream.connections(), 1);
}

#[tokio::test]
async fn c004_statuses_without_a_body_end_at_the_empty_line_whatever_they_announce() {
    // A receiver waited for the 512 bytes that a 304 only describes, until its timeout.
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    for status in [304, 204] {
        agent.send(absolute("GET", &upstream.url("/"), &[("If-None-Match", "\"v\"")], b"")).await;
        let mut exchange = upstream.next().await;
        exchange.head_only(status, &[("Content-Length", "512")]).await;
        exchange.finish().await;
        assert_eq!(agent.read_response().await.status, status);
        agent.send(absolute("GET", &upstream.url("/"), &[], b"")).await;
        upstream.next().await.respond(200, &[], "next").await;
        assert_eq!(agent.read_response().await.text(), "next");
    }
}

#[tokio::test]
async fn c005_early_413_reaches_a_client_that_is_still_uploading() {
    // The upstream answered in the middle of the upload and closed; the proxy saw its own write fail and
    // made a 503 of it.
    const RUNS: usize = 50;
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("defaults: { breaker: { consecutive_failures: 1 } }").await;
    let upload = absolute("POST", &port.url("/"), &[], &vec![b'x'; 5 << 20]);
    let refuse = async {
        for _ in 0..RUNS {
            let mut upstream = port.accept().await;
            upstream.read_request().await;
            upstream.read_exactly(64 << 10).await;
            upstream
                .send("HTTP/1.1 413 Content Too Large\r\nConnection: close\r\nContent-Length: 3\r\n\r\nbig")
                .await;
        }
    };
    let upload = async {
        for run in 0..RUNS {
            let mut agent = hedgerow.agent().await;
            soon(agent.send(&upload)).await;
            let answer = agent.read_response().await;
            assert_eq!((answer.status, answer.text()), (413, "big"), "run {run}");
        }
    };
    tokio::join!(refuse, upload);
}

#[tokio::test]
async fn c006_lengths_that_are_no_plain_number_are_refused() {
    // They were forwarded as they came, and each parser behind made its own number of them.
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    for length in ["", "+5", "5, 6", "0x5", "-5", "5 5", "18446744073709551616"] {
        let mut agent = hedgerow.agent().await;
        agent.send(by_hand(&upstream, &format!("Content-Length: {length}\r\n"), "hello")).await;
        assert_eq!(refused(&mut agent).await.status, 400, "{length:?}");
    }
    assert_eq!(upstream.count(), 0);
}

#[tokio::test]
async fn transfer_codings_other_than_one_chunked_are_refused() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    for fields in [
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked, chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding: identity\r\n",
        "Transfer-Encoding:\r\n",
        "Transfer-Encoding : chunked\r\n",
        "Transfer-Encoding: \u{b}chunked\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n",
    ] {
        let mut agent = hedgerow.agent().await;
        agent.send(by_hand(&upstream, fields, "5\r\nhello\r\n0\r\n\r\n")).await;
        assert_eq!(refused(&mut agent).await.status, 400, "{fields:?}");
    }
    assert_eq!(upstream.count(), 0);
}

#[tokio::test]
async fn garbage_instead_of_a_head_gets_400_in_the_usual_shape() {
    let hedgerow = HedgerowProcess::start("{}").await;
    for garbage in [
        "garbage\r\n\r\n",
        "GET\r\n\r\n",
        "GET /\r\n\r\n",
        "GET / HTTP/3.7\r\nHost: a\r\n\r\n",
        "G@T / HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nX Y: 1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nX : 1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nX: 1\r\n folded\r\n\r\n",
        "GET / HTTP/1.1\r\n Host: a\r\n\r\n",
        "GET / HTTP/1.1\r\n: a\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\x00\x03\x03 no HTTP at all\r\n\r\n",
    ] {
        let mut agent = hedgerow.agent().await;
        agent.send(garbage).await;
        let answer = refused(&mut agent).await;
        assert_eq!((answer.status, &answer.json()["error"]), (400, &"invalid_request".into()), "{garbage:?}");
        assert_eq!(answer.header("via"), Some("1.1 hedgerow"));
    }
    assert_eq!(hedgerow.ask_admin("GET", "/livez").await.status, 200);
}

#[tokio::test]
async fn answers_that_read_in_two_ways_become_502() {
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("defaults: { breaker: off }").await;
    for answer in [
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        "HTTP/1.1 200 OK\r\nContent-Length: +3\r\n\r\nabc",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nX: a\0b\r\n\r\nabc",
        "HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n",
        "SSH-2.0-OpenSSH_9.9\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    ] {
        let url = port.url("/");
        let call = hedgerow.get(&url);
        let reply = async {
            let mut upstream = port.accept().await;
            upstream.read_request().await;
            upstream.send(answer).await;
            upstream
        };
        let (problem, _upstream) = tokio::join!(call, reply);
        let error = problem.json()["error"].clone();
        assert_eq!((problem.status, error), (502, "upstream_invalid".into()), "{answer:?}");
    }
}

#[tokio::test]
async fn bytes_after_an_answer_are_nobodys_answer() {
    // Left on the connection they would be served to the next caller.
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let serve = async {
        let mut first = port.accept().await;
        first.read_request().await;
        first
            .send("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\noneHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
            .await;
        assert!(matches!(first.ended().await, End::Closed | End::Reset));
        let mut second = port.accept().await;
        second.read_request().await;
        second.send("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\ntwo").await;
    };
    let ask = async {
        for wanted in ["one", "two"] {
            assert_eq!(hedgerow.get(&port.url("/")).await.text(), wanted);
        }
    };
    tokio::join!(serve, ask);
}
