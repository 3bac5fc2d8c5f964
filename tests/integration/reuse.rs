//! Reused upstream connections, which the other side may be closing at the very moment of use.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::support::client::{Agent, absolute};
use crate::support::hedgerow::{HedgerowProcess, Metrics};
use crate::support::http2::Http2Upstream;
use crate::support::raw::RawPort;
use crate::support::upstream::{Reply, Upstream};

const RUNS: usize = 50;
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

fn closed_breakers(metrics: &Metrics) -> f64 {
    metrics.value("hedgerow_breaker_state", &[("state", "closed")])
}

#[tokio::test]
async fn c027_get_that_meets_a_closing_connection_is_sent_once_more() {
    // The upstream closes each kept connection about when the next request comes: now and then a 502.
    const CALLS: usize = 300;
    let port = RawPort::bind().await;
    let hedgerow =
        HedgerowProcess::start("defaults: { hedge: off, breaker: { consecutive_failures: 1 } }").await;
    let requests = std::cell::Cell::new(0);
    let serve = async {
        let mut open = futures_util::stream::FuturesUnordered::new();
        loop {
            tokio::select! {
                connection = port.accept() => open.push(serve_then_close(connection, &requests)),
                Some(()) = futures_util::StreamExt::next(&mut open) => {}
            }
        }
    };
    let ask = async {
        let mut agent = hedgerow.agent().await;
        for call in 0..CALLS {
            let answer = agent.get(&port.url("/")).await;
            assert_eq!((answer.status, answer.text()), (200, "ok"), "call {call}");
            // Around the moment at which the upstream closes, on either side of it.
            sleep(Duration::from_micros(1500 + 97 * (call as u64 % 17))).await;
        }
    };
    tokio::select! {
        () = serve => unreachable!("it serves for ever"),
        () = ask => {}
    }
    assert!(requests.get() <= 2 * CALLS, "{} requests for {CALLS} calls", requests.get());
    assert_eq!(closed_breakers(&hedgerow.metrics().await), 1.0);
}

/// Answers requests until, after the first, 2 ms pass without another.
async fn serve_then_close(mut connection: Agent, requests: &std::cell::Cell<usize>) {
    let mut patience = Duration::from_secs(5);
    while let Ok(Some(_)) = tokio::time::timeout(patience, connection.try_request()).await {
        patience = Duration::from_millis(2);
        requests.set(requests.get() + 1);
        connection.send(OK).await;
    }
}

/// How a kept connection ends under the next request.
#[derive(Debug, Clone, Copy)]
enum Shape {
    Fin,
    Reset,
    /// Reset before the request is written, so that the write fails.
    BrokenPipe,
}

#[tokio::test]
async fn c028_fin_reset_and_broken_pipe_are_all_met_with_a_fresh_connection() {
    // The first fix knew one shape only, and a client once even got status 0.
    let port = RawPort::bind().await;
    let hedgerow =
        HedgerowProcess::start("defaults: { hedge: off, breaker: { consecutive_failures: 1 } }").await;
    for shape in [Shape::Fin, Shape::Reset, Shape::BrokenPipe] {
        for run in 0..RUNS {
            let serve = async {
                let mut kept = port.accept().await;
                kept.read_request().await;
                kept.send(OK).await;
                match shape {
                    Shape::BrokenPipe => kept.reset(),
                    Shape::Fin => {
                        kept.read_request().await;
                        drop(kept);
                    }
                    Shape::Reset => {
                        kept.read_request().await;
                        kept.reset();
                    }
                }
                let mut fresh = port.accept().await;
                fresh.read_request().await;
                // Not to be kept for the next run.
                fresh.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok").await;
            };
            let ask = async {
                let mut agent = hedgerow.agent().await;
                for _ in 0..2 {
                    let answer = agent.get(&port.url("/")).await;
                    assert_eq!((answer.status, answer.text()), (200, "ok"), "{shape:?}, run {run}");
                }
            };
            tokio::join!(serve, ask);
        }
    }
    assert_eq!(closed_breakers(&hedgerow.metrics().await), 1.0);
}

#[tokio::test]
async fn c029_post_that_was_read_before_the_reset_is_not_sent_again() {
    // The upstream may have acted on it; sending it once more was argued to be safe and charged cards twice.
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("defaults: { breaker: off }").await;
    for run in 0..RUNS {
        // Without a body, too: that one could be sent again.
        let body = if run % 2 == 0 { &b"once"[..] } else { b"" };
        let serve = async {
            let mut kept = port.accept().await;
            assert_eq!(kept.read_request().await.method, "GET");
            kept.send(OK).await;
            kept.read_request().await;
            kept.read_exactly(body.len()).await;
            kept.reset();
        };
        let ask = async {
            let mut agent = hedgerow.agent().await;
            assert_eq!(agent.get(&port.url("/")).await.status, 200);
            let answer = agent.request("POST", &port.url("/"), &[], body).await;
            let error = answer.json()["error"].clone();
            assert_eq!((answer.status, error), (502, "upstream_reset".into()), "run {run}");
        };
        // Were it sent again, the next run would accept a POST first.
        tokio::join!(serve, ask);
    }
    let nobody = tokio::time::timeout(Duration::from_millis(50), port.accept()).await;
    assert!(nobody.is_err(), "another connection was opened");
}

#[tokio::test]
async fn post_on_a_connection_that_closed_while_idle_goes_out_on_a_fresh_one() {
    // Nothing can have come of it: the end is seen before a byte is written.
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("defaults: { breaker: off }").await;
    for reset in [false, true] {
        let mut agent = hedgerow.agent().await;
        let first = async {
            let mut kept = port.accept().await;
            kept.read_request().await;
            kept.send(OK).await;
            kept
        };
        let url = port.url("/");
        let (answer, kept) = tokio::join!(agent.get(&url), first);
        assert_eq!(answer.status, 200);
        if reset {
            kept.reset()
        } else {
            drop(kept)
        }
        let second = async {
            let mut fresh = port.accept().await;
            fresh.read_request().await;
            fresh.expect(b"body").await;
            fresh.send("HTTP/1.1 201 Created\r\nConnection: close\r\nContent-Length: 0\r\n\r\n").await;
        };
        let (answer, ()) = tokio::join!(agent.request("POST", &url, &[], b"body"), second);
        assert_eq!(answer.status, 201, "reset: {reset}");
    }
}

#[tokio::test]
async fn c030_an_upstream_that_closes_every_connection_is_not_dialled_without_end() {
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("defaults: { hedge: off }").await;
    let accepts = std::cell::Cell::new(0);
    let serve = async {
        loop {
            drop(port.accept().await);
            accepts.set(accepts.get() + 1);
        }
    };
    let begin = Instant::now();
    let url = port.url("/");
    let answer = tokio::select! {
        () = serve => unreachable!("it closes for ever"),
        answer = hedgerow.get(&url) => answer,
    };
    assert_eq!((answer.status, &answer.json()["error"]), (502, &"upstream_reset".into()));
    // And not at the deadline of half a minute.
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
    assert!(accepts.get() <= 2, "{} connections for one call", accepts.get());
}

#[tokio::test]
async fn requests_of_many_clients_share_kept_connections() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    for _ in 0..10 {
        assert_eq!(hedgerow.get(&upstream.url("/")).await.status, 200);
    }
    assert_eq!((upstream.count(), upstream.connections()), (10, 1));
}

#[tokio::test]
async fn a_connection_is_not_kept_when_the_upstream_says_close_or_has_unread_bytes_coming() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("defaults: { hedge: off }").await;
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("GET", &upstream.url("/"), &[], b"")).await;
    upstream.next().await.respond(200, &[("Connection", "close")], "").await;
    assert_eq!(agent.read_response().await.status, 200);

    // The client leaves in the middle of an answer: what is still to come must meet nobody.
    agent.send(absolute("GET", &upstream.url("/"), &[], b"")).await;
    let mut exchange = upstream.next().await;
    assert_eq!(exchange.connection, 2);
    exchange.start_chunks(200, &[]).await;
    assert_eq!(agent.read_head().await.status, 200);
    drop(agent);
    exchange.gone().await;

    let url = upstream.url("/");
    let (answer, ()) = tokio::join!(hedgerow.get(&url), async {
        let exchange = upstream.next().await;
        assert_eq!(exchange.connection, 3);
        exchange.respond(200, &[], "mine").await;
    });
    assert_eq!(answer.text(), "mine");
}

/// A connection is to a place, not to the name that led there.
#[tokio::test]
async fn a_kept_connection_is_not_used_when_a_reload_has_moved_the_endpoint() {
    for origin in ["http", "h2c"] {
        let mut words = Vec::new();
        let policy = |to: std::net::SocketAddr| {
            format!(
                "upstreams: {{ tool: {{ hosts: [a.example], endpoint: \"http://{to}\", origin: {origin} }} }}"
            )
        };
        let (one, two) = (telling(origin, "one").await, telling(origin, "two").await);
        let mut hedgerow = HedgerowProcess::start(&policy(one.0)).await;
        for (n, to) in [one.0, two.0, one.0].into_iter().enumerate() {
            if n > 0 {
                hedgerow.policy.replace(&policy(to));
                let applied = |metrics: &Metrics| {
                    let result = [("result", "applied")];
                    metrics.value("hedgerow_config_reloads_total", &result) == n as f64
                };
                hedgerow.until_metrics(applied).await;
            }
            words.push(hedgerow.get("http://a.example/").await.text().to_owned());
        }
        assert_eq!(words, ["one", "two", "one"], "{origin}");
    }
}

/// An upstream that speaks this version and says this word, and where it is.
async fn telling(origin: &str, word: &'static str) -> (std::net::SocketAddr, Box<dyn std::any::Any>) {
    match origin {
        "h2c" => {
            let upstream = Http2Upstream::serving(move |stream| stream.respond(200, &[], word)).await;
            (upstream.address(), Box::new(upstream))
        }
        _ => {
            let upstream = Upstream::answering(move |_| Reply::ok(word)).await;
            (upstream.address(), Box::new(upstream))
        }
    }
}
