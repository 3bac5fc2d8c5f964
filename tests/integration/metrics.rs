//! What the numbers do when much happens (theme 23).

use std::time::Duration;

use futures_util::future::join_all;

use crate::support::at_best_within;
use crate::support::client::{Agent, absolute};
use crate::support::dns::Dns;
use crate::support::footprint::Footprint;
use crate::support::hedgerow::{HedgerowProcess, Metrics};
use crate::support::upstream::{Reply, Upstream};

/// Series of a scrape and its text's length.
async fn scrape(hedgerow: &HedgerowProcess) -> (usize, String) {
    let text = hedgerow.ask_admin("GET", "/metrics").await.text().to_owned();
    (text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).count(), text)
}

// A series for each host: memory and scrape grew without bound.
#[tokio::test]
async fn c116_two_thousand_hosts_bring_no_series_of_their_own() {
    // Every address of 127.0.0.0/8 leads to one listener on the wildcard address.
    let upstream = Upstream::on([0, 0, 0, 0]).answering(|_| Reply::ok("here")).await;
    let port = upstream.address().port();
    let dns = Dns::start(&[]).await;
    let hedgerow = HedgerowProcess::start(&format!("dns: {{ servers: [\"{}\"] }}", dns.address())).await;
    let call = async |hosts: Vec<String>, status: u16| {
        let mut agent = hedgerow.agent().await;
        for host in hosts {
            let answer = agent.get(&format!("http://{host}:{port}/")).await;
            assert_eq!(answer.status, status, "{host}: {}", answer.text());
        }
    };
    call(vec!["127.9.9.9".into()], 200).await;
    call(vec!["unknown.test".into()], 502).await;
    hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &[]) == 2.0).await;
    let (series, _) = scrape(&hedgerow).await;
    let before = Footprint::of(hedgerow.pid());

    let known = (0..8).map(|a| (0..125).map(|b| format!("127.1.{a}.{b}")).collect());
    let unknown = (0..8).map(|a| (0..125).map(|b| format!("h{a}-{b}.test")).collect());
    let calls = known.map(|hosts| call(hosts, 200)).chain(unknown.map(|hosts| call(hosts, 502)));
    join_all(calls).await;

    hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &[]) == 2002.0).await;
    at_best_within(Duration::from_secs(1), async || drop(scrape(&hedgerow).await)).await;
    let (series_after, text) = scrape(&hedgerow).await;
    assert_eq!(series_after, series);
    assert!(!text.contains("127.1.") && !text.contains(".test"), "a host became a label");
    let after = Footprint::of(hedgerow.pid());
    // An upstream costs its state, and a known one its idle connection too.
    assert!(after.resident_kib < before.resident_kib + 64 * 1024, "{before:?} {after:?}");
}

fn outcomes(metrics: &Metrics) -> f64 {
    metrics.value("hedgerow_requests_total", &[])
}

// The gauge of calls in flight never fell again.
#[tokio::test]
async fn c117_clients_that_leave_at_any_point_leave_nothing_in_flight() {
    const CLIENTS: usize = 500;
    let body = vec![b'x'; 64 * 1024];
    let upstream = Upstream::answering(move |seen| {
        let pause = Duration::from_millis(seen.nth as u64 % 7);
        Reply::ok(body.clone()).drip(4, pause).after(pause)
    })
    .await;
    let hedgerow =
        HedgerowProcess::start("defaults: { bulkhead: { max_concurrent: 20, max_queue: 600 } }").await;
    let url = upstream.url("/");
    let leave = async |n: usize| {
        let mut agent = Agent::connect(hedgerow.proxy).await;
        let request = absolute("GET", &url, &[], b"");
        match n % 5 {
            // In the midst of the head, before any byte of the answer, in the midst of it, and not at all.
            0 => agent.send(&request[..request.len() / 2]).await,
            1 => agent.send(&request).await,
            2 => {
                agent.send(&request).await;
                tokio::time::sleep(Duration::from_millis(n as u64 % 40)).await;
            }
            3 => {
                agent.send(&request).await;
                agent.read_head().await;
                agent.reset();
            }
            _ => assert_eq!(agent.get(&url).await.status, 200),
        }
    };
    for batch in 0..CLIENTS / 50 {
        join_all((0..50).map(|n| leave(batch * 50 + n))).await;
    }
    hedgerow.until_status(|status| status["in_flight"] == 0 && status["connections"] == 0).await;
    let metrics = hedgerow.until_metrics(|m| m.value("hedgerow_bulkhead_in_flight", &[]) == 0.0).await;
    assert_eq!(metrics.value("hedgerow_bulkhead_queued", &[]), 0.0);
    // Every request that was begun has one end, and what was read to its end counts as that.
    let of = |outcome| metrics.value("hedgerow_requests_total", &[("outcome", outcome)]);
    assert_eq!(of("answered") + of("client_left"), outcomes(&metrics));
    assert!(of("answered") >= 100.0 && of("client_left") >= 20.0, "{} {}", of("answered"), of("client_left"));
    let observed = metrics.value("hedgerow_request_duration_seconds_count", &[]);
    assert_eq!(observed, outcomes(&metrics));
}

#[tokio::test]
async fn counters_never_fall_when_an_upstream_leaves_the_policy_and_comes_back() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let named = "upstreams: { tools: { hosts: [127.0.0.1] } }";
    let mut hedgerow = HedgerowProcess::start(named).await;
    let count = |m: &Metrics, name| m.value("hedgerow_requests_total", &[("upstream", name)]);
    hedgerow.get(&upstream.url("/")).await;
    hedgerow.until_metrics(|m| count(m, "tools") == 1.0).await;
    hedgerow.policy.replace("{}");
    hedgerow.until_status(|status| status["upstreams"].get("tools").is_none()).await;
    hedgerow.get(&upstream.url("/")).await;
    hedgerow.until_metrics(|m| count(m, "default") == 1.0 && count(m, "tools") == 1.0).await;
    // What is no upstream any more has no breakers and no permits out.
    let metrics = hedgerow.metrics().await;
    assert_eq!(metrics.value("hedgerow_breaker_state", &[("upstream", "tools")]), 0.0);
    hedgerow.policy.replace(named);
    hedgerow.until_status(|status| status["upstreams"].get("tools").is_some()).await;
    hedgerow.get(&upstream.url("/")).await;
    hedgerow.until_metrics(|m| count(m, "tools") == 2.0).await;
}
