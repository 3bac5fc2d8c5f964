//! A second attempt for a slow call: when it is sent, where it goes, whose answer counts, and what it may cost.

use std::fs;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;

use crate::support::client::{self, Response, absolute};
use crate::support::dns::{Answer, Dns};
use crate::support::hedgerow::{HedgerowProcess, Metrics};
use crate::support::http2::Http2Upstream;
use crate::support::policy::{TOOL, named, tool};
use crate::support::upstream::{Exchange, Reply, Upstream, by_path};

/// Hedges are never short of budget where the budget is not what a test is about.
const PLENTY: &str = "extra_load: { ratio: 100%, floor: 100/s }";
/// Due soon, for calls that are not answered before it has come.
const HEDGE: &str = "hedge: { after: 80ms }, extra_load: { ratio: 100%, floor: 100/s }";
/// Due later than a loaded machine needs for an answer that is there.
const LATE_HEDGE: &str = "hedge: { after: 1500ms }, extra_load: { ratio: 100%, floor: 100/s }";
/// Longer than that.
const LATE: Duration = ms(1700);

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn hedges(metrics: &Metrics, outcome: &str) -> f64 {
    metrics.value("hedgerow_hedges_total", &[TOOL, ("outcome", outcome)])
}

fn all_hedges(metrics: &Metrics) -> f64 {
    ["won", "lost", "failed"].iter().map(|outcome| hedges(metrics, outcome)).sum()
}

/// A GET on a connection of its own, running while the test serves it.
fn start(proxy: &HedgerowProcess, url: String) -> tokio::task::JoinHandle<Response> {
    let proxy = **proxy;
    tokio::spawn(async move { proxy.get(&url).await })
}

async fn pair(upstream: &mut Upstream) -> (Exchange, Exchange) {
    (upstream.next().await, upstream.next().await)
}

/// The story that the name stands for: the slow first attempt is overtaken and dropped.
#[tokio::test]
async fn a_slow_call_is_hedged_on_a_second_connection_and_the_loser_is_dropped() {
    let mut upstream = Upstream::start().await;
    let stages = "hedge: { after: 400ms }, extra_load: { ratio: 100%, floor: 100/s }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    let began = Instant::now();
    let call = start(&proxy, upstream.url("/slow?q=1"));
    let (primary, hedge) = pair(&mut upstream).await;
    assert!(hedge.at - began >= ms(400), "{:?}", hedge.at - began);
    assert_ne!(primary.connection, hedge.connection);
    assert_eq!(primary.head.target, hedge.head.target);
    assert_eq!(primary.header("x-request-deadline"), hedge.header("x-request-deadline"));
    hedge.respond(200, &[], "hedge").await;
    primary.gone().await;

    let answer = call.await.unwrap();
    assert_eq!(
        (answer.status, answer.text(), answer.header("x-hedgerow-attempts")),
        (200, "hedge", Some("2"))
    );
    assert!(answer.header("server-timing").unwrap().contains("hedge;desc=\"won\""));
    let metrics = proxy.until_metrics(|metrics| hedges(metrics, "won") == 1.0).await;
    assert_eq!(all_hedges(&metrics), 1.0);
    let attempts = |kind, result| {
        metrics.value("hedgerow_upstream_attempts_total", &[TOOL, ("kind", kind), ("result", result)])
    };
    assert_eq!((attempts("hedge", "ok"), attempts("primary", "cancelled")), (1.0, 1.0));
    assert_eq!(metrics.value("hedgerow_hedge_delay_seconds_count", &[TOOL]), 1.0);
    let line = proxy.access_log(|line| line["status"] == 200).await;
    assert_eq!((&line["attempts"], &line["hedge"]), (&2.into(), &"won".into()));
}

/// The same the other way round.
#[tokio::test]
async fn a_primary_that_answers_after_all_wins_and_its_hedge_is_dropped() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), HEDGE)).await;
    let call = start(&proxy, upstream.url("/"));
    let (primary, hedge) = pair(&mut upstream).await;
    primary.respond(200, &[], "primary").await;
    hedge.gone().await;
    let answer = call.await.unwrap();
    assert_eq!((answer.text(), answer.header("x-hedgerow-attempts")), ("primary", Some("2")));
    assert!(answer.header("server-timing").unwrap().contains("hedge;desc=\"lost\""));
    let metrics = proxy.until_metrics(|metrics| hedges(metrics, "lost") == 1.0).await;
    assert_eq!(all_hedges(&metrics), 1.0);
}

/// A call that is answered in time costs what it would cost without hedgerow.
#[tokio::test]
async fn a_call_that_is_answered_in_time_is_sent_once() {
    let upstream = Upstream::answering(|_| Reply::ok("fast")).await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), LATE_HEDGE)).await;
    let answer = proxy.get(&upstream.url("/")).await;
    assert_eq!(answer.header("x-hedgerow-attempts"), Some("1"));
    assert!(!answer.header("server-timing").unwrap().contains("hedge"));
    upstream.gets_nothing_more(LATE).await;
}

/// Only what may happen twice is sent twice: by its method, the policy's word, or the caller's key.
#[tokio::test]
async fn c053_only_idempotent_calls_are_hedged() {
    // What is to be hedged gets its answer from the hedge alone, however late that is.
    let upstream = Upstream::answering(|seen| {
        let is_hedged = match seen.path() {
            "/listed" => matches!(&*seen.head.method, "PUT" | "DELETE"),
            "/get" | "/head" | "/options" | "/keyed-post" | "/keyed-patch" | "/declared" => true,
            _ => false,
        };
        match is_hedged {
            true if seen.nth % 2 == 1 => Reply::hang(),
            true => Reply::ok(""),
            false => Reply::ok("").after(ms(250)),
        }
    })
    .await;
    let routes = "routes: [{ path: \"/listed\", hedge: { methods: [PUT, DELETE] } }, { path: \"/declared\", idempotent: true }]";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &format!("{HEDGE}, {routes}"))).await;
    let key = &[("Idempotency-Key", "8e03978e")][..];
    let cases = [
        ("GET", "/get", &[][..], 2),
        ("HEAD", "/head", &[], 2),
        ("OPTIONS", "/options", &[], 2),
        ("POST", "/post", &[], 1),
        ("PATCH", "/patch", &[], 1),
        ("PUT", "/put", &[], 1),
        ("DELETE", "/delete", &[], 1),
        ("POST", "/keyed-post", key, 2),
        ("PATCH", "/keyed-patch", key, 2),
        ("POST", "/declared", &[], 2),
    ];
    let calls = cases.iter().map(async |(method, path, headers, _)| {
        proxy.agent().await.request(method, &upstream.url(path), headers, b"").await.status
    });
    assert!(join_all(calls).await.into_iter().all(|status| status == 200));
    for (method, path, _, count) in cases {
        assert_eq!(upstream.count_of(path), count, "{method} {path}");
    }
    for (method, count) in [("PUT", 2), ("DELETE", 2), ("GET", 1)] {
        let before = upstream.count_of("/listed");
        proxy.agent().await.request(method, &upstream.url("/listed"), &[], b"").await;
        assert_eq!(upstream.count_of("/listed") - before, count, "{method} where PUT and DELETE are listed");
    }
}

/// A loser may have sent its head and half a body: all it held comes back, round after round.
#[tokio::test]
async fn c054_a_loser_in_the_middle_of_its_body_is_closed_and_leaks_nothing() {
    let mut upstream = Upstream::start().await;
    let policy =
        tool(upstream.address(), "hedge: { after: 15ms }, extra_load: { ratio: 100%, floor: 1000/s }");
    let proxy = HedgerowProcess::start(&policy).await;
    let fds = || fs::read_dir(format!("/proc/{}/fd", proxy.pid().as_raw_nonzero())).unwrap().count();
    let mut after_warm_up = 0;
    for round in 0..50 {
        let call = start(&proxy, upstream.url("/"));
        let mut primary = upstream.next().await;
        let hedge = upstream.next().await;
        primary.head_only(503, &[("Content-Length", "1000")]).await;
        primary.raw(&[b'x'; 500]).await;
        hedge.respond(200, &[], "good").await;
        assert_eq!(call.await.unwrap().text(), "good");
        primary.gone().await;
        if round == 5 {
            after_warm_up = fds();
        }
    }
    let metrics =
        proxy.until_metrics(|metrics| metrics.value("hedgerow_bulkhead_in_flight", &[TOOL]) == 0.0).await;
    assert_eq!(hedges(&metrics, "won"), 50.0);
    // The closed client connections of the last rounds may linger.
    assert!(fds() <= after_warm_up + 4, "{after_warm_up} descriptors became {}", fds());
    upstream.until(|tally| tally.open <= 2 && tally.in_flight == 0).await;
}

/// When nothing better can come the answer goes out, with tokens for further hedges or without.
#[tokio::test]
async fn c055_two_failures_make_one_answer_as_soon_as_the_last_has_come() {
    let mut upstream = Upstream::start().await;
    let stages = "hedge: { after: 20ms }, breaker: off, extra_load: { ratio: 0%, floor: 2/s }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    for (round, is_reset) in [false, true].repeat(12).into_iter().enumerate() {
        let before = upstream.count();
        let call = start(&proxy, upstream.url("/"));
        let mut attempts = vec![upstream.next().await];
        // The budget pays for some of the rounds only: the others settle by the primary alone.
        let is_decided = |metrics: &Metrics| {
            let unpaid = hedges(metrics, "suppressed_budget") as usize;
            unpaid + upstream.count() - (round + 1) == round + 1
        };
        proxy.until_metrics(is_decided).await;
        if upstream.count() > before + 1 {
            attempts.push(upstream.next().await);
        }
        for attempt in attempts {
            if is_reset {
                attempt.reset();
            } else {
                // Not kept: a reset on a reused connection is sent again, which is another story.
                attempt.respond(503, &[("Connection", "close")], "no").await;
            }
        }
        let settled = Instant::now();
        let answer = call.await.unwrap();
        assert_eq!(answer.status, if is_reset { 502 } else { 503 });
        // And not at the deadline of half a minute.
        assert!(settled.elapsed() < ms(15_000), "{:?}", settled.elapsed());
    }
    let metrics = proxy.metrics().await;
    assert!(hedges(&metrics, "failed") >= 2.0 && hedges(&metrics, "suppressed_budget") >= 2.0);
    assert_eq!(metrics.value("hedgerow_requests_total", &[TOOL]), 24.0);
}

/// When all calls are slow, hedges stay the small share that the policy allows.
#[tokio::test]
async fn c056_hedges_stay_within_the_budget_when_every_call_is_slow() {
    const CALLS: usize = 200;
    let upstream = Upstream::answering(|_| Reply::ok("").after(ms(2000))).await;
    let stages =
        "hedge: { after: 50ms }, extra_load: { ratio: 10%, floor: 1/s }, bulkhead: { max_concurrent: 1000 }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    let urls: Vec<_> = (0..CALLS).map(|_| upstream.url("/")).collect();
    let began = Instant::now();
    let answers = client::get_all(proxy.proxy, &urls).await;
    assert!(answers.iter().all(|answer| answer.status == 200));
    // The first second's floor is there from the start; then one each second.
    let floor = 1 + began.elapsed().as_secs() as usize + 1;
    let extra = upstream.count() - CALLS;
    assert!((CALLS / 20..=CALLS / 10 + floor).contains(&extra), "{extra} extra attempts");
    let metrics = proxy.metrics().await;
    assert_eq!(all_hedges(&metrics), extra as f64);
    assert_eq!(hedges(&metrics, "suppressed_budget"), (CALLS - extra) as f64);
}

/// At an upstream that answers at once a percentile is next to nothing; the floor of the delay keeps it from being
/// hedged all the time.
#[tokio::test]
async fn c057_a_fast_upstream_is_not_hedged_all_the_time() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let policy = tool(upstream.address(), &format!("hedge: {{ after: p90, min: 500ms }}, {PLENTY}"));
    let proxy = HedgerowProcess::start(&policy).await;
    let mut agent = proxy.agent().await;
    for _ in 0..400 {
        assert_eq!(agent.get(&upstream.url("/")).await.status, 200);
    }
    let metrics = proxy.metrics().await;
    assert!(all_hedges(&metrics) <= 20.0, "{} hedges in 400 calls", all_hedges(&metrics));
    assert_eq!(
        proxy.status().await["upstreams"]["tool"][upstream.address().to_string()]["hedge"]["after"],
        "500ms"
    );
}

/// A bad answer decides nothing while a better one may come, in whichever order and however close they come.
#[tokio::test]
async fn c058_the_first_acceptable_head_wins_over_an_earlier_bad_one() {
    let mut upstream = Upstream::start().await;
    let policy = tool(
        upstream.address(),
        "hedge: { after: 15ms }, breaker: off, extra_load: { ratio: 100%, floor: 1000/s }",
    );
    let proxy = HedgerowProcess::start(&policy).await;
    for round in 0..50 {
        let call = start(&proxy, upstream.url("/"));
        let (primary, hedge) = pair(&mut upstream).await;
        let (good, bad) = if round % 2 == 0 { (hedge, primary) } else { (primary, hedge) };
        match round % 4 {
            0 | 1 => {
                bad.respond([429, 500, 502, 503, 504][round % 5], &[], "bad").await;
                good.respond(200, &[], "good").await;
            }
            _ => {
                tokio::join!(bad.respond(503, &[], "bad"), good.respond(200, &[], "good"));
            }
        }
        let answer = call.await.unwrap();
        assert_eq!((answer.status, answer.text()), (200, "good"), "round {round}");
    }
}

/// Without an acceptable answer the caller gets what it would have got without a hedge.
#[tokio::test]
async fn c058_with_both_answers_bad_the_primarys_is_passed_on() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &format!("{HEDGE}, breaker: off"))).await;
    for is_primary_first in [true, false] {
        let call = start(&proxy, upstream.url("/"));
        let (primary, hedge) = pair(&mut upstream).await;
        let of_primary = [("x-from", "primary"), ("Connection", "close")];
        let of_hedge = [("Connection", "close")];
        if is_primary_first {
            primary.respond(503, &of_primary, "p").await;
            hedge.respond(500, &of_hedge, "h").await;
        } else {
            hedge.respond(500, &of_hedge, "h").await;
            primary.respond(503, &of_primary, "p").await;
        }
        let answer = call.await.unwrap();
        assert_eq!((answer.status, answer.text(), answer.header("x-from")), (503, "p", Some("primary")));
        assert_eq!(answer.header("x-hedgerow-attempts"), Some("2"));
    }
    // Where the primary has no answer at all, a bad one says more than none.
    let call = start(&proxy, upstream.url("/"));
    let (primary, hedge) = pair(&mut upstream).await;
    primary.reset();
    hedge.respond(500, &[], "h").await;
    assert_eq!(call.await.unwrap().text(), "h");
    let metrics = proxy.until_metrics(|metrics| hedges(metrics, "failed") == 3.0).await;
    assert_eq!(all_hedges(&metrics), 3.0);
}

/// At the deadline a bad answer that lies there says more than none.
#[tokio::test]
async fn a_bad_answer_is_passed_on_when_the_deadline_strikes_while_the_other_is_awaited() {
    let mut upstream = Upstream::start().await;
    let stages = format!("{HEDGE}, breaker: off, deadline: {{ default: 2s }}");
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &stages)).await;
    let call = start(&proxy, upstream.url("/"));
    let (primary, hedge) = pair(&mut upstream).await;
    primary.respond(503, &[("x-from", "primary")], "p").await;
    let answer = call.await.unwrap();
    assert_eq!((answer.status, answer.text(), answer.header("x-from")), (503, "p", Some("primary")));
    hedge.gone().await;
    let metrics = proxy.until_metrics(|metrics| hedges(metrics, "lost") == 1.0).await;
    assert_eq!(all_hedges(&metrics), 1.0);
}

/// A hedge is an answer to slowness and no retry: a bad answer that comes in time is the answer.
#[tokio::test]
async fn a_bad_answer_before_the_hedge_is_due_is_passed_on_at_once() {
    let upstream = Upstream::answering(|_| Reply::status(503)).await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), LATE_HEDGE)).await;
    let answer = proxy.get(&upstream.url("/")).await;
    assert_eq!((answer.status, answer.header("x-hedgerow-attempts")), (503, Some("1")));
    upstream.gets_nothing_more(LATE).await;
}

/// Which statuses are worth waiting for something better is the policy's to say.
#[tokio::test]
async fn a_status_that_the_policy_finds_unacceptable_does_not_win() {
    let mut upstream = Upstream::start().await;
    let policy = tool(upstream.address(), &format!("{HEDGE}, unacceptable: [401]"));
    let proxy = HedgerowProcess::start(&policy).await;
    let call = start(&proxy, upstream.url("/"));
    let (primary, hedge) = pair(&mut upstream).await;
    primary.respond(401, &[], "").await;
    hedge.respond(503, &[], "").await;
    assert_eq!(call.await.unwrap().status, 503);
}

/// An upstream that asks for fewer calls gets no further one for this request, in whichever dialect it asks.
#[tokio::test]
async fn push_back_on_any_attempt_disarms_the_next_hedge() {
    // At once, since all that each of them does is to wait.
    let dialects = [("Retry-After", "1"), ("x-should-retry", "false"), ("grpc-retry-pushback-ms", "-1")];
    let tests = dialects.map(async |field| {
        let mut upstream = Upstream::start().await;
        let policy = tool(upstream.address(), &format!("hedge: {{ after: 1s, max_extra: 2 }}, {PLENTY}"));
        let proxy = HedgerowProcess::start(&policy).await;
        let call = start(&proxy, upstream.url("/"));
        let (primary, hedge) = pair(&mut upstream).await;
        hedge.respond(429, &[field], "").await;
        upstream.gets_nothing_more(ms(1200)).await;
        primary.respond(200, &[], "").await;
        let answer = call.await.unwrap();
        assert_eq!((answer.status, answer.header("x-hedgerow-attempts")), (200, Some("2")), "{field:?}");
        assert_eq!(hedges(&proxy.metrics().await, "suppressed_push_back"), 1.0, "{field:?}");
    });
    join_all(tests).await;
}

/// `max_extra` duplicates at most, one delay apart.
#[tokio::test]
async fn two_hedges_are_sent_where_the_policy_allows_two_and_no_third() {
    let mut upstream = Upstream::start().await;
    let policy = tool(upstream.address(), &format!("hedge: {{ after: 400ms, max_extra: 2 }}, {PLENTY}"));
    let proxy = HedgerowProcess::start(&policy).await;
    let began = Instant::now();
    let call = start(&proxy, upstream.url("/"));
    let (primary, first) = pair(&mut upstream).await;
    let second = upstream.next().await;
    assert!(first.at - began >= ms(400) && second.at - began >= ms(800));
    assert!(primary.connection != first.connection && first.connection != second.connection);
    upstream.gets_nothing_more(ms(500)).await;
    second.respond(200, &[], "second").await;
    primary.gone().await;
    first.gone().await;
    let answer = call.await.unwrap();
    assert_eq!((answer.text(), answer.header("x-hedgerow-attempts")), ("second", Some("3")));
    let metrics = proxy.until_metrics(|metrics| all_hedges(metrics) == 2.0).await;
    assert_eq!((hedges(&metrics, "won"), hedges(&metrics, "lost")), (1.0, 1.0));
}

/// A hedge that was due and not sent is counted by what stood in its way.
#[tokio::test]
async fn a_hedge_that_is_not_sent_is_counted_by_its_reason() {
    let upstream = Upstream::answering(by_path(&[
        ("/broke", Reply::ok("").after(ms(1500))),
        ("/full", Reply::ok("").after(ms(1500))),
        ("/late", Reply::hang()),
        ("/large", Reply::ok("").after(ms(1500))),
    ]))
    .await;
    let routes = "routes: [\
         { name: full, path: \"/full\", bulkhead: { max_concurrent: 1 } },\
         { path: \"/late\", hedge: { after: 1s }, deadline: { reserve: 0s } },\
         { path: \"/large\", idempotent: true, replay_limit: 1KiB },\
         { path: \"/broke\", extra_load: { ratio: 0%, floor: 0/s } }]";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &format!("{HEDGE}, {routes}"))).await;
    let call = async |method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]| {
        proxy.agent().await.request(method, &upstream.url(path), headers, body).await
    };
    let body = vec![b'x'; 4096];
    let (full, late, large, broke) = tokio::join!(
        call("GET", "/full", &[], b""),
        // A second after the start less than half of one is left, which is what another delay is worth.
        call("GET", "/late", &[("grpc-timeout", "1450m")], b""),
        call("POST", "/large", &[], &body),
        call("GET", "/broke", &[], b""),
    );
    assert_eq!((full.status, late.status, large.status, broke.status), (200, 504, 200, 200));
    assert_eq!(full.header("x-hedgerow-attempts"), Some("1"));
    let metrics = proxy.metrics().await;
    for reason in ["bulkhead", "deadline", "body", "budget"] {
        assert_eq!(hedges(&metrics, &format!("suppressed_{reason}")), 1.0, "{reason}");
    }
    assert!(upstream.requests().iter().any(|seen| seen.path() == "/large" && seen.body == body));
    assert_eq!(all_hedges(&metrics), 0.0);
    assert_eq!(upstream.count(), 4);
}

/// Where times are all alike a second try takes as long as the rest of the first: `auto` holds back and says so.
#[tokio::test]
async fn auto_does_not_hedge_where_the_times_seen_promise_no_gain() {
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/slow" => Reply::ok("").after(ms(2000)),
        _ => Reply::ok(""),
    })
    .await;
    let policy = tool(upstream.address(), &format!("hedge: {{ min: 500ms }}, {PLENTY}"));
    let proxy = HedgerowProcess::start(&policy).await;
    let mut agent = proxy.agent().await;
    for _ in 0..250 {
        agent.get(&upstream.url("/")).await;
    }
    assert_eq!(agent.get(&upstream.url("/slow")).await.header("x-hedgerow-attempts"), Some("1"));
    assert_eq!(upstream.count_of("/slow"), 1);
    assert_eq!(hedges(&proxy.metrics().await, "suppressed_no_gain"), 1.0);
    let status = proxy.status().await;
    let hedge = &status["upstreams"]["tool"][upstream.address().to_string()]["hedge"];
    assert_eq!(hedge["pays"], false);
    for ratio in ["5%", "10%", "25%"] {
        assert!(hedge["predicted"][ratio]["p99"].is_string(), "{hedge}");
    }
}

/// Both attempts send the whole body: the second one from what was kept as it passed.
#[tokio::test]
async fn a_body_is_replayed_byte_for_byte_however_it_is_framed() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), HEDGE)).await;
    let body: Vec<u8> = (0..100_000_u32).map(|n| (n % 251) as u8).collect();
    for is_chunked in [false, true] {
        let mut agent = proxy.agent().await;
        let host = upstream.address();
        let head = format!("POST http://{host}/ HTTP/1.1\r\nHost: {host}\r\nIdempotency-Key: k\r\n");
        if is_chunked {
            agent.send(format!("{head}Transfer-Encoding: chunked\r\n\r\n")).await;
            for piece in body.chunks(7919) {
                agent.send([format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat()).await;
            }
            agent.send("0\r\n\r\n").await;
        } else {
            agent.send(format!("{head}Content-Length: {}\r\n\r\n", body.len())).await;
            agent.send(&body).await;
        }
        let (mut primary, mut hedge) = pair(&mut upstream).await;
        assert!(primary.body().await == body, "the primary got another body");
        assert!(hedge.body().await == body, "the hedge got another body");
        hedge.respond(200, &[], "").await;
        assert_eq!(agent.read_response().await.status, 200);
        primary.gone().await;
    }
    proxy.until_status(|status| status["replay_bytes"] == 0).await;
}

/// The hedge need not wait for the client: it gets what has come and then the rest, as the primary does.
#[tokio::test]
async fn a_hedge_starts_while_the_client_still_sends_its_body() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), HEDGE)).await;
    let mut agent = proxy.agent().await;
    let host = upstream.address();
    agent
        .send(format!(
            "POST http://{host}/ HTTP/1.1\r\nHost: {host}\r\nIdempotency-Key: k\r\nContent-Length: 8\r\n\r\nhalf"
        ))
        .await;
    let (mut primary, mut hedge) = pair(&mut upstream).await;
    agent.send("rest").await;
    assert_eq!((primary.body().await, hedge.body().await), (b"halfrest".to_vec(), b"halfrest".to_vec()));
    hedge.respond(200, &[], "").await;
    assert_eq!(agent.read_response().await.status, 200);
}

/// A hedge that read on faster than the primary came to the limit, took the body along, and failed: the primary,
/// slow and healthy, had lost it by then, and the client got an error of ours.
#[tokio::test]
async fn a_hedge_never_takes_the_body_away_from_a_slow_primary() {
    let mut upstream = Http2Upstream::on([127, 0, 0, 1]).window(10).start().await;
    let policy = tool(upstream.address(), &format!("origin: h2c, replay_limit: 1KiB, {HEDGE}"));
    let proxy = HedgerowProcess::start(&policy).await;
    let mut agent = proxy.agent().await;
    let host = upstream.address();
    let piece = "x".repeat(600);
    let chunk = format!("258\r\n{piece}\r\n");
    agent
        .send(format!(
            "POST http://{host}/ HTTP/1.1\r\nHost: {host}\r\nIdempotency-Key: k\r\n\
             Transfer-Encoding: chunked\r\n\r\n{chunk}"
        ))
        .await;
    let (mut primary, mut hedge) = (upstream.next().await, upstream.next().await);
    assert_ne!(primary.connection, hedge.connection);
    let mut read = 0;
    while read < piece.len() {
        read += hedge.chunk().await.expect("more to come").len();
    }
    agent.send(format!("{chunk}0\r\n\r\n")).await;
    assert!(hedge.body_end().await.is_some(), "both cannot have it, and this one came second");
    assert_eq!(primary.body().await.0.len(), 2 * piece.len());
    primary.respond(200, &[], "primary").await;
    let answer = agent.read_response_to("POST").await;
    assert_eq!((answer.status, answer.text()), (200, "primary"));
    let metrics = proxy.until_metrics(|metrics| all_hedges(metrics) == 1.0).await;
    assert_eq!(hedges(&metrics, "failed"), 1.0);
    proxy.until_status(|status| status["replay_bytes"] == 0).await;
}

/// What all bodies hold for replay is bounded for the process; past it a call goes on without a net.
#[tokio::test]
async fn the_process_wide_bound_on_kept_bodies_suppresses_the_hedge_and_not_the_call() {
    let upstream = Upstream::answering(|_| Reply::ok("").after(ms(1500))).await;
    let policy = format!("limits: {{ replay_total: 2KiB }}\n{}", tool(upstream.address(), HEDGE));
    let proxy = HedgerowProcess::start(&policy).await;
    let body = vec![b'x'; 10_000];
    let key = &[("Idempotency-Key", "k")];
    assert_eq!(proxy.agent().await.request("POST", &upstream.url("/"), key, &body).await.status, 200);
    assert_eq!((upstream.count(), upstream.requests()[0].body == body), (1, true));
    assert_eq!(hedges(&proxy.metrics().await, "suppressed_body"), 1.0);
    // What it held has come back: a small body is kept again.
    assert_eq!(proxy.agent().await.request("POST", &upstream.url("/"), key, b"small").await.status, 200);
    assert_eq!(upstream.count(), 3);
    proxy.until_status(|status| status["replay_bytes"] == 0).await;
}

/// Where the name has two addresses the second attempt goes to the other one.
#[tokio::test]
async fn a_hedge_goes_to_another_address_of_the_name() {
    let mut one = Upstream::start().await;
    let mut other = Upstream::on([127, 0, 0, 2]).port(one.address().port()).start().await;
    let dns = Dns::start(&[("two.test", Answer::addresses(&["127.0.0.1", "127.0.0.2"]))]).await;
    let host = format!("two.test:{}", one.address().port());
    let policy = format!("dns: {{ servers: [\"{}\"] }}\n{}", dns.address(), tool(&host, HEDGE));
    let proxy = HedgerowProcess::start(&policy).await;
    for _ in 0..10 {
        let call = start(&proxy, format!("http://{host}/"));
        // One attempt at each, in whichever order the resolver gave the addresses.
        let (at_one, at_other) = tokio::join!(one.next(), other.next());
        let (primary, hedge) = if at_one.at < at_other.at { (at_one, at_other) } else { (at_other, at_one) };
        assert_eq!(hedge.header("host"), Some(host.as_str()));
        hedge.respond(200, &[], "").await;
        primary.gone().await;
        assert_eq!(call.await.unwrap().status, 200);
    }
    assert_eq!((one.count(), other.count()), (10, 10));
}

/// With `to` the hedge asks another provider, in that provider's words and with its key.
#[tokio::test]
async fn a_hedge_goes_to_the_named_backup_with_its_rewrite() {
    let mut upstream = Upstream::start().await;
    let mut backup = Upstream::start().await;
    let rewrite = "rewrite: { path: { from: \"^/v1/quote/(?<t>[^/]+)$\", to: \"/prices/${t}\" }, \
         headers: { set: { x-api-key: \"${env:BACKUP_KEY}\" }, remove: [authorization] } }";
    let policy = format!(
        "upstreams: {{ {}, backup: {{ endpoint: \"http://{}\", {rewrite} }} }}",
        named("tool", upstream.address(), &format!("hedge: {{ after: 80ms, to: backup }}, {PLENTY}")),
        backup.address(),
    );
    let proxy = HedgerowProcess::with(&policy).env("BACKUP_KEY", "sesame").start().await;
    let mut agent = proxy.agent().await;
    agent
        .send(absolute("GET", &upstream.url("/v1/quote/TSLA?x=1"), &[("Authorization", "Bearer ours")], b""))
        .await;
    let primary = upstream.next().await;
    let hedge = backup.next().await;
    assert_eq!(
        (primary.head.target.as_str(), primary.header("authorization")),
        ("/v1/quote/TSLA?x=1", Some("Bearer ours"))
    );
    assert_eq!(primary.header("x-api-key"), None);
    assert_eq!((hedge.head.target.as_str(), hedge.header("authorization")), ("/prices/TSLA?x=1", None));
    assert_eq!(hedge.header("x-api-key"), Some("sesame"));
    assert_eq!(hedge.header("host"), Some(backup.address().to_string().as_str()));
    hedge.respond(200, &[], "from the backup").await;
    primary.gone().await;
    assert_eq!(agent.read_response().await.text(), "from the backup");
    let metrics = proxy.until_metrics(|metrics| hedges(metrics, "won") == 1.0).await;
    let at_backup = [("upstream", "backup"), ("kind", "hedge"), ("result", "ok")];
    assert_eq!(metrics.value("hedgerow_upstream_attempts_total", &at_backup), 1.0);

    // The backup has a breaker of its own: open, it takes no hedge.
    assert_eq!(proxy.ask_admin("POST", "/breakers/backup/force_open").await.status, 200);
    agent.send(absolute("GET", &upstream.url("/v1/quote/TSLA"), &[], b"")).await;
    let primary = upstream.next().await;
    proxy.until_metrics(|metrics| hedges(metrics, "suppressed_breaker") == 1.0).await;
    primary.respond(200, &[], "alone").await;
    assert_eq!(agent.read_response().await.text(), "alone");
    assert_eq!(backup.count(), 1);
}

/// Losing a race is not a failure of the upstream, however often it happens and however long it had.
#[tokio::test]
async fn c070_losers_open_no_breaker() {
    let mut upstream = Upstream::start().await;
    let stages = "hedge: { after: 15ms }, breaker: { consecutive_failures: 1, fair_chance: 5ms }, extra_load: { ratio: 100%, floor: 1000/s }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    for _ in 0..50 {
        let call = start(&proxy, upstream.url("/"));
        let (primary, hedge) = pair(&mut upstream).await;
        hedge.respond(200, &[], "").await;
        assert_eq!(call.await.unwrap().status, 200);
        primary.gone().await;
    }
    let status = proxy.status().await;
    let breaker = &status["upstreams"]["tool"][upstream.address().to_string()]["breaker"];
    assert_eq!((&breaker["state"], &breaker["failures_in_row"]), (&"closed".into(), &0.into()));
}

/// Hedging hides slowness from the agent but not from the slow-call rule: a loser that had passed the mark is slow.
#[tokio::test]
async fn a_loser_older_than_slow_after_counts_as_slow() {
    let mut upstream = Upstream::start().await;
    let stages = "hedge: { after: 60ms }, extra_load: { ratio: 100%, floor: 1000/s }, \
         breaker: { consecutive_failures: off, slow_rate: 50%, slow_after: 40ms, min_requests: 6 }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    for _ in 0..3 {
        let call = start(&proxy, upstream.url("/"));
        let (primary, hedge) = pair(&mut upstream).await;
        hedge.respond(200, &[], "").await;
        assert_eq!(call.await.unwrap().status, 200);
        primary.gone().await;
    }
    // Three slow losers and three fast winners: half of six.
    let answer = proxy.get(&upstream.url("/")).await;
    assert_eq!((answer.status, answer.json()["error"].as_str()), (503, Some("circuit_open")));
}

/// An answer of which a byte was passed on is never continued from another one.
#[tokio::test]
async fn c060_after_the_first_byte_there_is_no_other_attempt() {
    let mut upstream = Upstream::start().await;
    let stages = "hedge: { after: 1s }, extra_load: { ratio: 100%, floor: 100/s }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    let mut agent = proxy.agent().await;
    agent.send(absolute("GET", &upstream.url("/"), &[("grpc-timeout", "2S")], b"")).await;
    let mut exchange = upstream.next().await;
    exchange.head_only(200, &[("Content-Length", "5")]).await;
    exchange.raw(b"H").await;
    let (answer, _) = tokio::join!(agent.read_response(), exchange.gone());
    assert_eq!((answer.status, answer.text(), answer.complete), (200, "H", false));
    assert_eq!(upstream.count(), 1);
}

/// A body meant for an address that refuses is sent whole to the one that does not.
#[tokio::test]
async fn c061_a_put_whose_first_address_refuses_arrives_whole_at_the_second() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let host = format!("two.test:{}", upstream.address().port());
    let body: Vec<u8> = (0..10_240_u32).map(|n| (n * 7 % 256) as u8).collect();
    for addresses in [["127.0.0.2", "127.0.0.1"], ["127.0.0.1", "127.0.0.2"]] {
        let dns = Dns::start(&[("two.test", Answer::addresses(&addresses))]).await;
        let policy = format!(
            "dns: {{ servers: [\"{}\"] }}\n{}",
            dns.address(),
            tool(&host, "breaker: { consecutive_failures: 1 }")
        );
        let proxy = HedgerowProcess::start(&policy).await;
        for _ in 0..3 {
            // A connection of its own each time, so that each call dials.
            let answer = proxy
                .agent()
                .await
                .request("PUT", &format!("http://{host}/"), &[("Connection", "close")], &body)
                .await;
            assert_eq!(answer.status, 200);
            assert!(upstream.requests().pop().unwrap().body == body);
        }
        // A dead address is no failure while another one answers.
        let metrics = proxy.metrics().await;
        assert_eq!(metrics.value("hedgerow_breaker_transitions_total", &[TOOL]), 0.0);
    }
    assert_eq!(upstream.count(), 6);
}

/// A provider that says when to come back is understood by whoever is told: nothing is sent meanwhile.
#[tokio::test]
async fn c063_a_429_goes_back_at_once_with_its_retry_after() {
    let upstream =
        Upstream::answering(|_| Reply::status(429).header("Retry-After", "90").body("later")).await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), LATE_HEDGE)).await;
    let began = Instant::now();
    let answer = proxy.get(&upstream.url("/")).await;
    assert_eq!((answer.status, answer.header("retry-after"), answer.text()), (429, Some("90"), "later"));
    assert!(began.elapsed() < ms(15_000), "{:?}", began.elapsed());
    upstream.gets_nothing_more(LATE).await;
    assert_eq!(upstream.count(), 1);
}

/// A `Retry-After` that nobody can read is passed on like any field, and counts as none.
#[tokio::test]
async fn c064_an_unusable_retry_after_is_passed_on_and_harms_nothing() {
    const UNUSABLE: [&str; 7] = [
        "Wed, 01 Jan 9999999 00:00:00 GMT",
        "abc",
        "-1",
        "1e400",
        "",
        "99999999999999999999999",
        "Mon, 31 Feb 2026 25:61:61 GMT",
    ];
    let upstream = Upstream::answering(|seen| {
        let nth: usize = seen.path()[1..].parse().expect("the path is an index");
        Reply::status(503).header("Retry-After", UNUSABLE[nth])
    })
    .await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), "hedge: off, breaker: off")).await;
    for (nth, value) in UNUSABLE.into_iter().enumerate() {
        let answer = proxy.get(&upstream.url(&format!("/{nth}"))).await;
        assert_eq!((answer.status, answer.header("retry-after")), (503, Some(value)));
    }
    assert_eq!(upstream.count(), UNUSABLE.len());
}

/// The answer to HEAD is complete without the bytes that its length speaks of.
#[tokio::test]
async fn c065_a_length_in_the_answer_to_head_promises_nothing() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(
        upstream.address(),
        &format!("{LATE_HEDGE}, breaker: {{ consecutive_failures: 1 }}"),
    ))
    .await;
    let mut agent = proxy.agent().await;
    for _ in 0..2 {
        agent.send(absolute("HEAD", &upstream.url("/"), &[], b"")).await;
        let mut exchange = upstream.next().await;
        exchange.head_only(200, &[("Content-Length", "5000")]).await;
        exchange.finish().await;
        let answer = agent.read_response_to("HEAD").await;
        assert_eq!((answer.status, answer.header("content-length")), (200, Some("5000")));
    }
    // On kept connections on both sides, and booked as whole.
    assert_eq!((upstream.count(), upstream.connections()), (2, 1));
    let metrics = proxy.metrics().await;
    assert_eq!(
        metrics.value("hedgerow_requests_total", &[TOOL, ("code", "200"), ("outcome", "answered")]),
        2.0
    );
}
