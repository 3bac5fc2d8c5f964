//! What one client, or too many of them, can make hedgerow hold.

use std::time::Duration;

use rustix::process::{Resource, Rlimit, prlimit};
use tokio::time::{Instant, sleep};

use crate::support::client::{Agent, Response, absolute, crowd};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::upstream::{Reply, Upstream};
use crate::support::{at_best_within, soon};

/// Sends a head and takes the refusal: one answer in the problem shape, then the end.
async fn refused(hedgerow: &HedgerowProcess, head: &str) -> Response {
    let mut agent = hedgerow.agent().await;
    agent.send(head).await;
    let answer = agent.read_response().await;
    assert_eq!(answer.header("connection"), Some("close"));
    agent.ended().await;
    answer
}

#[tokio::test]
async fn c129_a_head_that_is_too_large_gets_431_and_the_end() {
    // 400 tells nobody what is wrong, and a refusal that looks worth a retry makes a loop.
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let url = upstream.url("/");
    let begin = format!("GET {url} HTTP/1.1\r\nHost: {}\r\n", upstream.address());
    let mebibyte = format!("{begin}X-Big: {}\r\n\r\n", "x".repeat(1 << 20));
    let thousand = format!("{begin}{}\r\n", "X-Many: 1\r\n".repeat(1000));
    let one_more = format!("{begin}{}\r\n", "X-Many: 1\r\n".repeat(100));
    let padding = (64 << 10) - begin.len() - "X-Big: \r\n\r\n".len();
    let one_above = format!("{begin}X-Big: {}\r\n\r\n", "x".repeat(padding + 1));
    for head in [&mebibyte, &thousand, &one_more, &one_above] {
        let answer = refused(&hedgerow, head).await;
        let error = answer.json()["error"].clone();
        assert_eq!((answer.status, error), (431, "headers_too_large".into()), "{} bytes", head.len());
    }
    assert_eq!(upstream.count(), 0);

    let just_fits = format!("{begin}{}\r\n", "X-Many: 1\r\n".repeat(99));
    let long_fits = format!("{begin}X-Big: {}\r\n\r\n", "x".repeat(padding));
    for head in [&just_fits, &long_fits] {
        let mut agent = hedgerow.agent().await;
        agent.send(head).await;
        assert_eq!(agent.read_response().await.status, 200, "{} bytes", head.len());
    }

    let before = hedgerow.resident_kib();
    for _ in 0..30 {
        refused(&hedgerow, &mebibyte).await;
    }
    let after = hedgerow.resident_kib();
    assert!(after < before + (8 << 10), "{before} KiB before, {after} KiB after");
}

#[tokio::test]
async fn the_limits_on_a_head_are_the_policys() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("limits: { fields: 10, target: 100B, head: 16KiB }").await;
    let head = |target: &str, fields: &str| {
        format!("GET {target} HTTP/1.1\r\nHost: {}\r\n{fields}\r\n", upstream.address())
    };
    let cases = [
        (head(&upstream.url("/"), &"X: 1\r\n".repeat(9)), 200),
        (head(&upstream.url("/"), &"X: 1\r\n".repeat(10)), 431),
        (head(&upstream.url(&format!("/{}", "x".repeat(99))), ""), 200),
        (head(&upstream.url(&format!("/{}", "x".repeat(100))), ""), 414),
        (head(&upstream.url("/"), &format!("X: {}\r\n", "x".repeat(15 << 10))), 200),
        (head(&upstream.url("/"), &format!("X: {}\r\n", "x".repeat(16 << 10))), 431),
    ];
    for (head, status) in cases {
        let mut agent = hedgerow.agent().await;
        agent.send(&head).await;
        assert_eq!(agent.read_response().await.status, status, "{} bytes", head.len());
    }
}

#[tokio::test]
async fn a_target_that_is_too_long_gets_414_and_the_end() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    for length in [17 << 10, 60 << 10] {
        let url = upstream.url(&format!("/{}", "x".repeat(length)));
        let answer = refused(&hedgerow, &String::from_utf8(absolute("GET", &url, &[], b"")).unwrap()).await;
        assert_eq!((answer.status, &answer.json()["error"]), (414, &"uri_too_long".into()), "{length}");
    }
    assert_eq!(upstream.count(), 0);
    let fits = upstream.url(&format!("/{}", "x".repeat(16_000)));
    assert_eq!(hedgerow.get(&fits).await.status, 200);
}

#[tokio::test]
async fn c127_heads_that_trickle_are_ended_with_408_while_others_are_served() {
    // The bound was set but no timer ran: a byte a second held a connection for good.
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("limits: { header_timeout: 1500ms }").await;
    let begin = Instant::now();
    let trickle = async |mut agent: Agent| {
        for byte in
            "GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nX-Slow: very slow indeed\r\n".bytes().cycle()
        {
            agent.send([byte]).await;
            if let Ok(answer) =
                tokio::time::timeout(Duration::from_millis(50), agent.try_response("GET")).await
            {
                return answer.expect("a status line before the end").status;
            }
        }
        unreachable!("the bytes go round")
    };
    let slow = crowd(hedgerow.proxy, 100).await.into_iter().map(trickle);
    let slow = async {
        let statuses = futures_util::future::join_all(slow).await;
        assert!(statuses.iter().all(|status| *status == 408), "{statuses:?}");
        begin.elapsed()
    };
    let normal = async {
        for _ in 0..20 {
            assert_eq!(hedgerow.get(&upstream.url("/")).await.status, 200);
            sleep(Duration::from_millis(20)).await;
        }
    };
    let (gone, ()) = tokio::join!(soon(slow), normal);
    // The usual limit is ten seconds.
    assert!(gone < Duration::from_secs(9), "{gone:?}");
    hedgerow.until_status(|status| status["connections"] == 0).await;
}

#[tokio::test]
async fn a_connection_that_never_says_anything_is_closed_after_the_header_timeout() {
    // And not when some other timer next looks: until its first byte it is watched alone.
    let hedgerow = HedgerowProcess::start("limits: { header_timeout: 200ms }").await;
    // Other timers look once a second.
    at_best_within(Duration::from_secs(1), async || {
        let begin = Instant::now();
        hedgerow.agent().await.ended().await;
        assert!(begin.elapsed() >= Duration::from_millis(200), "{:?}", begin.elapsed());
    })
    .await;
}

#[tokio::test]
async fn the_header_timeout_does_not_run_while_a_body_or_an_answer_is_awaited() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("limits: { header_timeout: 1s }").await;
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("POST", &upstream.url("/"), &[("Content-Length", "2")], b"")).await;
    let mut exchange = upstream.next().await;
    sleep(Duration::from_millis(1200)).await;
    agent.send("ok").await;
    assert_eq!(exchange.body().await, b"ok");
    sleep(Duration::from_millis(1200)).await;
    exchange.respond(200, &[], "").await;
    assert_eq!(agent.read_response().await.status, 200);
}

#[tokio::test]
async fn connections_above_the_limit_wait_and_are_served_when_others_leave() {
    // Closed unanswered, some clients would reconnect without end.
    let upstream = Upstream::answering(|_| Reply::ok("ok")).await;
    let hedgerow = HedgerowProcess::start("limits: { connections: 3 }").await;
    let url = upstream.url("/");
    let mut held = Vec::new();
    for mut agent in crowd(hedgerow.proxy, 3).await {
        assert_eq!(agent.get(&url).await.status, 200);
        held.push(agent);
    }
    let mut waiting = hedgerow.agent().await;
    let authority = upstream.address();
    waiting.send(format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n")).await;
    // Those inside are served as before, and the one outside gets nothing, not even an end.
    for agent in &mut held {
        assert_eq!(agent.get(&url).await.status, 200);
    }
    let early = tokio::time::timeout(Duration::from_millis(50), waiting.try_response("CONNECT")).await;
    assert!(early.is_err(), "{early:?}");
    held.pop();
    assert_eq!(waiting.read_response_to("CONNECT").await.status, 200);
    drop((held, waiting));
    hedgerow.until_status(|status| status["connections"] == 0).await;
}

#[tokio::test]
async fn c126_running_out_of_descriptors_burns_no_processor_and_breaks_nothing_open() {
    // Accepting failed in a tight loop: a core burnt, the log flooded, and the open calls starved.
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("defaults: { hedge: off }").await;
    let mut open = hedgerow.agent().await;
    open.send(absolute("GET", &upstream.url("/"), &[], b"")).await;
    let exchange = upstream.next().await;
    let few = Rlimit { current: Some(64), maximum: Some(64) };
    prlimit(Some(hedgerow.pid()), Resource::Nofile, few).unwrap();

    let held = crowd(hedgerow.proxy, 200).await;
    hedgerow.stderr.until(|line| line.contains("cannot accept")).await;
    let (ticks, lines, begin) = (hedgerow.processor_ticks(), hedgerow.stderr.all().len(), Instant::now());
    sleep(Duration::from_millis(800)).await;
    let seconds = begin.elapsed().as_secs_f64();
    let used = (hedgerow.processor_ticks() - ticks) as f64 / 100.0;
    assert!(used < 0.2 * seconds, "{used} s of processor time in {seconds} s");
    let told = (hedgerow.stderr.all().len() - lines) as f64;
    assert!(told <= 2.0 * seconds, "{told} lines in {seconds} s");

    exchange.respond(200, &[], "still here").await;
    assert_eq!(open.read_response().await.text(), "still here");
    drop(held);
    let url = upstream.url("/after");
    let (answer, ()) =
        tokio::join!(hedgerow.get(&url), async { upstream.next().await.respond(200, &[], "after").await });
    assert_eq!(answer.text(), "after");
}
