//! A backup provider that stands in: what it is sent, by which guards of its own, and what becomes of its failures.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::json;
use tokio::time::Instant;

use crate::support::client::{Agent, Response, absolute};
use crate::support::hedgerow::{HedgerowProcess, Metrics};
use crate::support::http2::agent::head;
use crate::support::http2::{Http2Agent, Http2Upstream};
use crate::support::policy::{TOOL, named};
use crate::support::road::{Mode, Road};
use crate::support::upstream::{Reply, Upstream};

/// One attempt and no guard that remembers, where the test is about neither.
const BARE: &str = "hedge: off, breaker: off";
/// The backup first, and then what always answers.
const CHAIN: &str = "fallback: [{ upstream: backup }, { degraded: { status: 200 } }]";

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[track_caller]
fn marks(answer: &Response) -> (Option<&str>, Option<&str>) {
    (answer.header("x-hedgerow-degraded"), answer.header("x-hedgerow-tried"))
}

fn in_time(left: Duration) -> String {
    let at = SystemTime::now() + left;
    at.duration_since(UNIX_EPOCH).expect("it is after 1970").as_millis().to_string()
}

fn attempts(metrics: &Metrics, upstream: &str, kind: &str, result: &str) -> f64 {
    let labels = [("upstream", upstream), ("kind", kind), ("result", result)];
    metrics.value("hedgerow_upstream_attempts_total", &labels)
}

/// `tool`, which falls back by [`CHAIN`] to `backup` with these keys.
fn policy(tool: &Upstream, stages: &str, backup: &Upstream, keys: &str) -> String {
    let backup = format!("backup: {{ endpoint: \"http://{}\", {keys} }}", backup.address());
    let tool = named("tool", tool.address(), &format!("{BARE}, {CHAIN}, {stages}"));
    format!("upstreams: {{ {tool}, {backup} }}")
}

/// Refuses every call.
async fn failing() -> Upstream {
    Upstream::answering(|_| Reply::status(503).body("bad")).await
}

/// The head was sent before the primary had spoken, and there was no way back.
#[tokio::test]
async fn c102_a_primary_that_refuses_at_once_is_stood_in_for_by_a_backup_that_is_well() {
    let backup = Upstream::answering(|_| Reply::ok("from the backup").header("x-own", "yes")).await;
    for failure in [Reply::reset(), Reply::close(), Reply::status(503)] {
        let tool = Upstream::answering(move |_| failure.clone()).await;
        let hedgerow = HedgerowProcess::start(&policy(&tool, "", &backup, BARE)).await;
        let answer = hedgerow.get(&tool.url("/")).await;
        assert_eq!(
            (answer.status, answer.text(), answer.header("x-own")),
            (200, "from the backup", Some("yes"))
        );
        assert_eq!((marks(&answer).0, answer.header("x-hedgerow-attempts")), (Some("backup"), Some("2")));
        let metrics = hedgerow
            .until_metrics(|m| m.value("hedgerow_requests_total", &[TOOL, ("outcome", "degraded")]) == 1.0)
            .await;
        assert_eq!(attempts(&metrics, "backup", "primary", "ok"), 1.0);
        assert_eq!(
            metrics.value("hedgerow_requests_total", &[("upstream", "backup")]),
            0.0,
            "nobody asked for it"
        );
    }
}

/// The backup has other paths and other keys, and the caller's are not for it.
#[tokio::test]
async fn a_backup_is_asked_in_its_own_words_and_with_its_own_key() {
    let tool = failing().await;
    let mut backup = Upstream::start().await;
    let rewrite = "rewrite: { path: { from: '^/v1/quote/(?<ticker>[^/]+)/(\\w+)$', to: '/prices/${ticker}?field=$2' }, \
         headers: { set: { x-api-key: '${env:BACKUP_KEY}', authorization: '${file:token}' }, remove: [cookie, x-ours] } }";
    let mut hedgerow = HedgerowProcess::with("{}").env("BACKUP_KEY", "sesame").start().await;
    std::fs::write(hedgerow.policy.folder().join("token"), "Bearer theirs\n").unwrap();
    hedgerow.policy.replace(&policy(&tool, "", &backup, &format!("{BARE}, {rewrite}")));
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "applied")]) == 1.0)
        .await;
    let deadline = in_time(ms(60_000));
    let fields = [
        ("x-request-deadline", &*deadline),
        ("Authorization", "Bearer ours"),
        ("Cookie", "ours=1"),
        ("X-Ours", "yes"),
        ("Accept-Language", "de"),
        ("If-None-Match", "\"ours\""),
        ("If-Modified-Since", "Sun, 29 Nov 2026 10:00:30 GMT"),
        ("If-Range", "\"ours\""),
        ("Range", "bytes=0-9"),
    ];
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("GET", &tool.url("/v1/quote/TSLA/last?a=%20b&c"), &fields, b"")).await;
    let exchange = backup.next().await;
    assert_eq!(exchange.head.target, "/prices/TSLA?field=last&a=%20b&c");
    let address = backup.address().to_string();
    for (name, value) in [
        ("host", Some(&*address)),
        ("x-api-key", Some("sesame")),
        ("authorization", Some("Bearer theirs")),
        ("cookie", None),
        ("x-ours", None),
        ("accept-language", Some("de")),
        // What the caller has is another provider's, and no part of this one's answer would complete it.
        ("if-none-match", None),
        ("if-modified-since", None),
        ("if-range", None),
        ("range", None),
        ("x-request-deadline", Some(&*deadline)),
        ("x-hedgerow-attempt", Some("2")),
    ] {
        assert_eq!(exchange.header(name), value, "{name}");
    }
    exchange.respond(200, &[], "priced").await;
    assert_eq!(agent.read_response().await.text(), "priced");
    let primary = &tool.requests()[0];
    assert_eq!(
        (primary.header("authorization"), primary.header("if-none-match")),
        (Some("Bearer ours"), Some("\"ours\""))
    );
    assert_eq!(primary.header("x-api-key"), None);
}

/// A backup that is an upstream like others, with hosts and no endpoint, is dialled by its host and told its own name.
#[tokio::test]
async fn a_backup_without_an_endpoint_is_called_by_its_first_exact_host() {
    for mode in Mode::ALL {
        let backup = Upstream::answering(|_| Reply::ok("backup")).await;
        let host = format!("b.test:{}", backup.address().port());
        let others = format!("backup: {{ hosts: [\"*.other.test\", \"{host}\"], origin: http, {BARE} }}");
        let mut road = Road::start_beside(mode, &format!("{BARE}, {CHAIN}"), &others).await;
        let mut call = road.call("GET", "/v1/x?q=1", &[]).await;
        road.upstream.next().await.respond(503, &[], "").await;
        let head = call.head().await;
        assert_eq!((head.status, head.get("x-hedgerow-tried")), (200, Some("tool=503")), "{mode:?}");
        assert_eq!(head.get("x-hedgerow-degraded"), Some("backup"), "{mode:?}");
        assert_eq!(call.rest().await, b"backup");
        let seen = &backup.requests()[0];
        assert_eq!((seen.head.target.as_str(), seen.header("host")), ("/v1/x?q=1", Some(&*host)), "{mode:?}");
    }
}

/// Failures of the backup were never booked, so that it was hammered for ever.
#[tokio::test]
async fn c104_a_failing_backup_is_left_alone_by_a_breaker_of_its_own() {
    let (tool, backup) = (failing().await, failing().await);
    let breaker =
        |failures| format!("hedge: off, breaker: {{ consecutive_failures: {failures}, open_for: 1m }}");
    let upstreams = [
        named("tool", tool.address(), &format!("{}, {CHAIN}", breaker(5))),
        format!("backup: {{ endpoint: \"http://{}\", {} }}", backup.address(), breaker(3)),
    ];
    let hedgerow = HedgerowProcess::start(&format!("upstreams: {{ {} }}", upstreams.join(", "))).await;
    let mut agent = hedgerow.agent().await;
    let began = Instant::now();
    for nth in 1..=50 {
        let answer = agent.get(&tool.url("/")).await;
        let tried = match nth {
            1..=3 => "tool=503, backup=503",
            4..=5 => "tool=503, backup=circuit_open",
            _ => "tool=circuit_open, backup=circuit_open",
        };
        assert_eq!((answer.status, marks(&answer)), (200, (Some("static"), Some(tried))), "call {nth}");
    }
    // Not a timeout among them.
    assert!(began.elapsed() < ms(15_000), "{:?}", began.elapsed());
    assert_eq!((tool.count(), backup.count()), (5, 3));
    let metrics = hedgerow.metrics().await;
    for upstream in ["tool", "backup"] {
        let open = [("upstream", upstream), ("state", "open")];
        assert_eq!(metrics.value("hedgerow_breaker_state", &open), 1.0, "{upstream}");
    }
    let stand_in = [TOOL, ("kind", "static")];
    assert_eq!(metrics.value("hedgerow_fallbacks_total", &stand_in), 50.0);
    // What stands in for one upstream shares its guards with no other call to the same place.
    assert_eq!(hedgerow.get(&backup.url("/")).await.status, 503);
    assert_eq!(backup.count(), 4);
}

/// Permits and tokens of the backup are its own too; where none is free the next step comes.
#[tokio::test]
async fn a_full_or_spent_backup_is_passed_over() {
    let tool = failing().await;
    for (keys, word) in [
        ("bulkhead: { max_concurrent: 1, max_queue: 0 }", "bulkhead_full"),
        ("rate_limit: { rate: 1/h, burst: 1 }", "rate_limited"),
    ] {
        let mut backup = Upstream::start().await;
        let hedgerow = HedgerowProcess::start(&policy(&tool, "", &backup, &format!("{BARE}, {keys}"))).await;
        let mut first = hedgerow.agent().await;
        first.send(absolute("GET", &tool.url("/"), &[], b"")).await;
        let held = backup.next().await;
        let answer = hedgerow.get(&tool.url("/")).await;
        assert_eq!(marks(&answer), (Some("static"), Some(&*format!("tool=503, backup={word}"))));
        held.respond(200, &[], "backup").await;
        assert_eq!(first.read_response().await.text(), "backup");
        assert_eq!(backup.count(), 1);
    }
}

/// A backup has its own retries and hedges, paid from its own budget.
#[tokio::test]
async fn a_backup_is_retried_and_hedged_by_its_own_rules() {
    let tool = failing().await;
    let flaky = Upstream::answering(|seen| match seen.nth {
        1 => Reply::status(502),
        _ => Reply::ok("second try"),
    })
    .await;
    let keys = "breaker: off, hedge: off, retry: { backoff: 1ms }, extra_load: { ratio: 100%, floor: 10/s }";
    let hedgerow = HedgerowProcess::start(&policy(&tool, "", &flaky, keys)).await;
    let answer = hedgerow.get(&tool.url("/")).await;
    assert_eq!((answer.text(), marks(&answer)), ("second try", (Some("backup"), Some("tool=503"))));
    assert_eq!((answer.header("x-hedgerow-attempts"), tool.count()), (Some("3"), 1));
    assert_eq!(attempts(&hedgerow.metrics().await, "backup", "retry", "ok"), 1.0);

    let mut slow = Upstream::start().await;
    let keys = "breaker: off, hedge: { after: 80ms }, extra_load: { ratio: 100%, floor: 10/s }";
    let hedgerow = HedgerowProcess::start(&policy(&tool, "", &slow, keys)).await;
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("GET", &tool.url("/"), &[], b"")).await;
    let (primary, hedge) = (slow.next().await, slow.next().await);
    hedge.respond(200, &[], "hedge").await;
    primary.gone().await;
    let answer = agent.read_response().await;
    assert_eq!((answer.text(), marks(&answer)), ("hedge", (Some("backup"), Some("tool=503"))));
    assert!(answer.header("server-timing").unwrap().contains("hedge;desc=\"won\""));
}

/// The guard of what may be dialled knows no exception for a backup.
#[tokio::test]
async fn a_backup_that_egress_denies_is_passed_over() {
    let tool = failing().await;
    let forbidden = Upstream::on([127, 0, 0, 3]).answering(|_| Reply::ok("inside")).await;
    let egress = "egress: { deny: [127.0.0.3] }";
    let hedgerow =
        HedgerowProcess::start(&format!("{egress}\n{}", policy(&tool, "", &forbidden, BARE))).await;
    let answer = hedgerow.get(&tool.url("/")).await;
    assert_eq!(marks(&answer), (Some("static"), Some("tool=503, backup=egress_denied")));
    assert_eq!(forbidden.connections(), 0);
}

/// Two that stand in for each other would send a call round in circles.
#[tokio::test]
async fn a_backups_own_chain_is_not_followed() {
    let (tool, backup) = (failing().await, failing().await);
    let upstreams = [
        named("tool", tool.address(), &format!("{BARE}, fallback: [{{ upstream: backup }}]")),
        named(
            "backup",
            backup.address(),
            &format!("{BARE}, fallback: [{{ upstream: tool }}, {{ degraded: {{ status: 200 }} }}]"),
        ),
    ];
    let hedgerow = HedgerowProcess::start(&format!("upstreams: {{ {} }}", upstreams.join(", "))).await;
    let answer = hedgerow.get(&tool.url("/")).await;
    assert_eq!(
        (answer.status, answer.text(), marks(&answer)),
        (503, "bad", (None, Some("tool=503, backup=503")))
    );
    // Asked for by its own name it has it.
    let answer = hedgerow.get(&backup.url("/")).await;
    assert_eq!((answer.status, marks(&answer)), (200, (Some("static"), Some("backup=503, tool=503"))));
    assert_eq!((tool.count(), backup.count()), (2, 2));
}

/// Client code read events twice when another provider began anew.
#[tokio::test]
async fn c103_after_the_first_bytes_there_is_no_switch_to_the_backup() {
    for mode in Mode::ALL {
        let backup = Upstream::answering(|_| Reply::ok("backup")).await;
        let others = format!("backup: {{ endpoint: \"http://{}\" }}", backup.address());
        let mut road = Road::start_beside(mode, &format!("{BARE}, {CHAIN}"), &others).await;
        let mut call = road.call("GET", "/", &[("Accept", "text/event-stream")]).await;
        let mut exchange = road.upstream.next().await;
        exchange.start_chunks(200, &[("Content-Type", "text/event-stream")]).await;
        for event in ["data: 1\n\n", "data: 2\n\n", "data: 3\n\n"] {
            exchange.chunk(event).await;
        }
        let head = call.head().await;
        assert_eq!((head.status, head.get("x-hedgerow-degraded")), (200, None), "{mode:?}");
        call.expect("data: 1\n\ndata: 2\n\ndata: 3\n\n").await;
        exchange.reset();
        let mut end = Vec::new();
        let cut = loop {
            match call.try_piece().await {
                Ok(Some(piece)) => end.extend(piece),
                Ok(None) => break false,
                Err(_) => break true,
            }
        };
        let end = String::from_utf8(end).unwrap();
        assert!(
            cut && end.starts_with("event: error\n") && end.contains("upstream_incomplete"),
            "{mode:?}: {end}"
        );
        assert_eq!(backup.count(), 0, "{mode:?}");
    }
}

/// The backup's head is passed on as any; what breaks behind it breaks visibly, and is booked where it broke.
#[tokio::test]
async fn a_backup_that_breaks_behind_its_head_is_cut_and_booked() {
    let tool = failing().await;
    let backup = Upstream::answering(|_| Reply::ok("0123456789").cut(4)).await;
    let keys = "hedge: off, breaker: { consecutive_failures: 2, open_for: 1m }";
    let hedgerow = HedgerowProcess::start(&policy(&tool, "", &backup, keys)).await;
    for _ in 0..2 {
        let answer = hedgerow.get(&tool.url("/")).await;
        assert_eq!((answer.status, answer.text(), answer.complete), (200, "0123", false));
        assert_eq!(marks(&answer), (Some("backup"), Some("tool=503")));
    }
    let incomplete = [TOOL, ("code", "200"), ("outcome", "incomplete")];
    hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &incomplete) == 2.0).await;
    let answer = hedgerow.get(&tool.url("/")).await;
    assert_eq!(marks(&answer), (Some("static"), Some("tool=503, backup=circuit_open")));
}

/// The body was kept as it passed, and the backup gets all of it; also where no hedge or retry would be allowed.
#[tokio::test]
async fn a_body_is_sent_to_the_backup_byte_for_byte() {
    let body: Vec<u8> = (0..100_000_u32).map(|n| (n % 251) as u8).collect();
    for mode in Mode::ALL {
        let backup = Upstream::answering(|_| Reply::ok("backup")).await;
        let others = format!("backup: {{ endpoint: \"http://{}\", {BARE} }}", backup.address());
        let mut road = Road::start_beside(mode, &format!("{BARE}, {CHAIN}"), &others).await;
        let length = body.len().to_string();
        for framing in [("Content-Length", &*length), ("Transfer-Encoding", "chunked")] {
            let mut call = road.call("POST", "/", &[framing]).await;
            for piece in body.chunks(7919) {
                call.send(piece).await;
            }
            call.finish().await;
            let mut exchange = road.upstream.next().await;
            assert!(exchange.body().await == body, "{mode:?}: the primary got another body");
            exchange.respond(503, &[], "").await;
            assert_eq!(call.head().await.get("x-hedgerow-degraded"), Some("backup"), "{mode:?} {framing:?}");
            assert_eq!(call.rest().await, b"backup");
            assert!(backup.requests().pop().unwrap().body == body, "{mode:?}: the backup got another body");
        }
        road.hedgerow.until_status(|status| status["replay_bytes"] == 0).await;
    }
}

/// A primary that refuses before it has read the body leaves all of it to the backup.
#[tokio::test]
async fn a_backup_gets_the_body_of_a_client_that_still_sends_it() {
    let mut tool = Upstream::start().await;
    let mut backup = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&policy(&tool, "", &backup, BARE)).await;
    let host = tool.address();
    let mut agent = hedgerow.agent().await;
    agent
        .send(format!("POST http://{host}/ HTTP/1.1\r\nHost: {host}\r\nContent-Length: 8\r\n\r\nhalf"))
        .await;
    let mut exchange = tool.next().await;
    exchange.head_only(503, &[("Content-Length", "0"), ("Connection", "close")]).await;
    exchange.close().await;
    let mut exchange = backup.next().await;
    agent.send("rest").await;
    assert_eq!(exchange.body().await, b"halfrest");
    exchange.respond(200, &[], "backup").await;
    assert_eq!(agent.read_response().await.text(), "backup");
}

/// A body that is not kept cannot be sent again: the backup is passed over, and told to nobody as tried.
#[tokio::test]
async fn a_body_too_large_to_be_kept_passes_the_backup_over() {
    let backup = Upstream::answering(|_| Reply::ok("backup")).await;
    let (dead, _keeps_it_dead) = Upstream::dead();
    let tool = failing().await;
    let routes = "replay_limit: 1KiB, routes: [{ path: /none, replay_limit: 0 }]";
    let upstreams = format!("dead: {{ hosts: [\"{dead}\"], {BARE}, {CHAIN}, replay_limit: 1KiB }}");
    let text =
        policy(&tool, routes, &backup, BARE).replace("upstreams: {", &format!("upstreams: {{ {upstreams},"));
    let hedgerow = HedgerowProcess::start(&text).await;
    let post = async |url: &str, size: usize| {
        hedgerow.agent().await.request("POST", url, &[], &vec![b'x'; size]).await
    };
    assert_eq!(marks(&post(&tool.url("/"), 1000).await).0, Some("backup"));
    let answer = post(&tool.url("/"), 2000).await;
    assert_eq!(marks(&answer), (Some("static"), Some("tool=503")));
    let answer = post(&tool.url("/none"), 10).await;
    assert_eq!(marks(&answer), (Some("static"), Some("tool=503")));
    assert_eq!(backup.count(), 1);
    // Of which nothing was read before the connection failed it is all there.
    let answer = post(&format!("http://{dead}/"), 2000).await;
    assert_eq!(marks(&answer), (Some("backup"), Some("dead=connect_failed")));
    assert_eq!(backup.requests()[1].body.len(), 2000);
    hedgerow.until_status(|status| status["replay_bytes"] == 0).await;
}

/// Whoever leaves takes the backup's work along.
#[tokio::test]
async fn a_client_that_leaves_while_the_backup_works_cancels_it() {
    let tool = failing().await;
    let mut backup = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&policy(
        &tool,
        "",
        &backup,
        "hedge: off, breaker: { consecutive_failures: 1 }",
    ))
    .await;
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("GET", &tool.url("/"), &[], b"")).await;
    let exchange = backup.next().await;
    drop(agent);
    exchange.gone().await;
    let left = [TOOL, ("code", "499"), ("outcome", "client_left")];
    let metrics = hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &left) == 1.0).await;
    assert_eq!(attempts(&metrics, "backup", "primary", "cancelled"), 1.0);
    assert_eq!(metrics.value("hedgerow_fallbacks_total", &[]), 0.0);
    let closed = [("upstream", "backup"), ("state", "closed")];
    assert_eq!(metrics.value("hedgerow_breaker_state", &closed), 1.0, "which is no failure of the backup");
}

/// All steps have one deadline: the backup gets what the primary has left of it.
#[tokio::test]
async fn the_deadline_that_strikes_in_the_backup_leaves_what_costs_no_time() {
    let tool = Upstream::answering(|_| Reply::status(503).after(ms(300))).await;
    let mut backup = Upstream::start().await;
    let hedgerow = HedgerowProcess::start(&policy(&tool, "", &backup, BARE)).await;
    let mut agent = hedgerow.agent().await;
    let began = Instant::now();
    agent.send(absolute("GET", &tool.url("/"), &[("grpc-timeout", "2S")], b"")).await;
    backup.next().await.gone().await;
    let answer = agent.read_response().await;
    assert_eq!(marks(&answer), (Some("static"), Some("tool=503, backup=deadline_exceeded")));
    assert!((ms(1500)..ms(15_000)).contains(&began.elapsed()), "{:?}", began.elapsed());

    // Struck already it is no time for a backup.
    let slow = Upstream::answering(|_| Reply::hang()).await;
    let hedgerow = HedgerowProcess::start(&policy(&slow, "", &backup, BARE)).await;
    let answer =
        hedgerow.agent().await.request("GET", &slow.url("/"), &[("grpc-timeout", "500m")], b"").await;
    assert_eq!(marks(&answer), (Some("static"), Some("tool=deadline_exceeded")));
    assert_eq!(backup.count(), 1);
}

/// What the backup says is not kept under the name of the upstream that it stands in for.
#[tokio::test]
async fn a_backups_answer_is_not_kept_for_later() {
    let tool = Upstream::answering(|seen| match seen.nth {
        1 => Reply::status(503),
        _ => Reply::ok("own"),
    })
    .await;
    let backup = Upstream::answering(|_| Reply::ok("backup").header("Cache-Control", "max-age=600")).await;
    let hedgerow = HedgerowProcess::start(&policy(&tool, "cache: {}", &backup, BARE)).await;
    assert_eq!(hedgerow.get(&tool.url("/")).await.text(), "backup");
    let answer = hedgerow.get(&tool.url("/")).await;
    assert_eq!((answer.text(), marks(&answer)), ("own", (None, None)));
}

/// The failure of the primary is its own, whoever answered in its place.
#[tokio::test]
async fn the_primarys_breaker_is_told_although_the_backup_has_answered() {
    let tool = failing().await;
    let backup = Upstream::answering(|_| Reply::ok("backup")).await;
    let upstreams = [
        named(
            "tool",
            tool.address(),
            &format!("hedge: off, breaker: {{ consecutive_failures: 2 }}, {CHAIN}"),
        ),
        format!("backup: {{ endpoint: \"http://{}\", {BARE} }}", backup.address()),
    ];
    let hedgerow = HedgerowProcess::start(&format!("upstreams: {{ {} }}", upstreams.join(", "))).await;
    for tried in ["tool=503", "tool=503", "tool=circuit_open", "tool=circuit_open"] {
        let answer = hedgerow.get(&tool.url("/")).await;
        assert_eq!(marks(&answer), (Some("backup"), Some(tried)));
    }
    assert_eq!((tool.count(), backup.count()), (2, 4));
}

/// It learned of the failure when the backup had answered, and never when the client had left by then.
#[tokio::test]
async fn the_primarys_breaker_is_told_while_the_backup_still_works() {
    let tool = failing().await;
    let mut backup = Upstream::start().await;
    let upstreams = [
        named(
            "tool",
            tool.address(),
            &format!("hedge: off, breaker: {{ consecutive_failures: 1 }}, {CHAIN}"),
        ),
        format!("backup: {{ endpoint: \"http://{}\", {BARE} }}", backup.address()),
    ];
    let hedgerow = HedgerowProcess::start(&format!("upstreams: {{ {} }}", upstreams.join(", "))).await;
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("GET", &tool.url("/"), &[], b"")).await;
    let exchange = backup.next().await;
    let open = [TOOL, ("state", "open")];
    let metrics = hedgerow.until_metrics(|m| m.value("hedgerow_breaker_state", &open) == 1.0).await;
    assert_eq!(attempts(&metrics, "tool", "primary", "status"), 1.0);
    drop(agent);
    exchange.gone().await;
    let left = [TOOL, ("code", "499"), ("outcome", "client_left")];
    let metrics = hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &left) == 1.0).await;
    assert_eq!(attempts(&metrics, "tool", "primary", "status"), 1.0);
    assert_eq!(attempts(&metrics, "tool", "primary", "cancelled"), 0.0);
}

/// Calls that wait for a slow backup held all permits of an upstream that had nothing to do.
#[tokio::test]
async fn the_primarys_permit_is_free_while_the_backup_works() {
    let tool = failing().await;
    let mut backup = Upstream::start().await;
    let bulkhead = "bulkhead: { max_concurrent: 1, max_queue: 0 }";
    let hedgerow = HedgerowProcess::start(&policy(&tool, bulkhead, &backup, BARE)).await;
    let mut agents = Vec::new();
    let mut held = Vec::new();
    for _ in 0..3 {
        let mut agent = hedgerow.agent().await;
        agent.send(absolute("GET", &tool.url("/"), &[], b"")).await;
        held.push(backup.next().await);
        agents.push(agent);
    }
    for (mut agent, exchange) in agents.into_iter().zip(held) {
        exchange.respond(200, &[], "backup").await;
        assert_eq!(marks(&agent.read_response().await), (Some("backup"), Some("tool=503")));
    }
    assert_eq!(tool.count(), 3);
}

/// A gRPC backup answers a gRPC call, over HTTP/2 as the call needs it.
#[tokio::test]
async fn a_grpc_call_is_answered_by_its_backup() {
    const GRPC: [(&str, &str); 1] = [("content-type", "application/grpc")];
    let serve = |status: &'static str| {
        Http2Upstream::serving(move |mut stream| async move {
            stream.body().await;
            if status != "0" {
                let fields = [GRPC[0], ("grpc-status", status)];
                return stream.respond(200, &fields, "").await;
            }
            stream.head(200, &GRPC);
            stream.data(vec![0; 5]).await;
            stream.trailers(&[("grpc-status", status)]);
        })
    };
    let (tool, backup) = (serve("14").await, serve("0").await);
    let policy = format!(
        "upstreams: {{ {}, backup: {{ endpoint: \"http://{}\", origin: h2c, {BARE} }} }}",
        named("tool", tool.address(), &format!("origin: h2c, {BARE}, {CHAIN}")),
        backup.address()
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    let agent = Http2Agent::connect(hedgerow.proxy).await;
    let mut call = agent.open(head("POST", &tool.url("/pkg.Service/Method"), &GRPC), false).await;
    call.send(vec![0; 5], true).await;
    let answer = call.answer().await;
    assert_eq!((answer.status, answer.trailer("grpc-status"), answer.body.len()), (200, Some("0"), 5));
    assert_eq!(answer.header("x-hedgerow-degraded"), Some("backup"));
    assert_eq!(answer.header("x-hedgerow-tried"), Some("tool=503"));
    assert_eq!(backup.requests()[0].uri.path(), "/pkg.Service/Method");
}

/// The door that a reload opens leads to the new place, and the old state stays behind.
#[tokio::test]
async fn a_backup_that_a_reload_moves_is_called_in_its_new_place() {
    let tool = failing().await;
    let (old, new) = (failing().await, Upstream::answering(|_| Reply::ok("new")).await);
    let keys = "hedge: off, breaker: { consecutive_failures: 1, open_for: 1m }";
    let mut hedgerow = HedgerowProcess::start(&policy(&tool, "", &old, keys)).await;
    for tried in ["tool=503, backup=503", "tool=503, backup=circuit_open"] {
        assert_eq!(marks(&hedgerow.get(&tool.url("/")).await).1, Some(tried));
    }
    hedgerow.policy.replace(&policy(&tool, "", &new, keys));
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "applied")]) == 1.0)
        .await;
    let answer = hedgerow.get(&tool.url("/")).await;
    assert_eq!((answer.text(), marks(&answer)), ("new", (Some("backup"), Some("tool=503"))));
    assert_eq!(old.count(), 1);
}

/// A name that leads to the client's own address is not where the backup is (transparent clients bring it along,
/// and so does the `Host` of a client that knows of no proxy).
#[tokio::test]
async fn a_hedge_to_a_host_is_told_the_name_of_that_host() {
    for mode in [Mode::PlainTunnel, Mode::Intercepted, Mode::InterceptedHttp2] {
        let mut backup = Upstream::start().await;
        let host = format!("b.test:{}", backup.address().port());
        let others = format!("backup: {{ hosts: [\"{host}\"], origin: http, {BARE} }}");
        let stages =
            "hedge: { after: 80ms, to: backup }, breaker: off, extra_load: { ratio: 100%, floor: 10/s }";
        let mut road = Road::start_beside(mode, stages, &others).await;
        let mut call = road.call("GET", "/", &[]).await;
        let primary = road.upstream.next().await;
        let hedge = backup.next().await;
        assert_eq!(hedge.header("host"), Some(&*host), "{mode:?}");
        hedge.respond(200, &[], "hedge").await;
        assert_eq!(call.head().await.status, 200);
        primary.gone().await;
    }
}

/// The field says what the answer is; a layer above that reads it needs no list of our names.
#[tokio::test]
async fn what_an_answer_says_of_itself_is_the_last_layers_word() {
    let tool = Upstream::answering(|_| {
        Reply::ok("").header("x-hedgerow-degraded", "stale").header("x-hedgerow-tried", "inner=500")
    })
    .await;
    let (bad, backup) = (
        failing().await,
        Upstream::answering(|_| Reply::ok("").header("x-hedgerow-degraded", "static")).await,
    );
    let hedgerow = HedgerowProcess::start(&policy(&tool, "", &backup, BARE)).await;
    assert_eq!(marks(&hedgerow.get(&tool.url("/")).await), (Some("stale"), Some("inner=500")));
    let hedgerow = HedgerowProcess::start(&policy(&bad, "", &backup, BARE)).await;
    assert_eq!(marks(&hedgerow.get(&bad.url("/")).await), (Some("backup"), Some("tool=503")));
}

/// So the log of each call can be read on its own.
#[tokio::test]
async fn the_log_tells_of_the_call_and_not_of_the_backup() {
    let tool = failing().await;
    let backup = Upstream::answering(|_| Reply::ok("backup")).await;
    let hedgerow = HedgerowProcess::start(&policy(&tool, "", &backup, BARE)).await;
    let _ = Agent::connect(hedgerow.proxy).await.get(&tool.url("/path?secret=1")).await;
    let line = hedgerow.access_log(|line| line["path"] == "/path").await;
    assert_eq!((&line["upstream"], &line["status"]), (&json!("tool"), &json!(200)));
    assert_eq!(
        (&line["source"], &line["outcome"], &line["attempts"]),
        (&json!("backup"), &json!("degraded"), &json!(2))
    );
    assert!(!hedgerow.stdout.text().contains("secret"));
}
