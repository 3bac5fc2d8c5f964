//! How many calls are in flight at an upstream, who waits, who is refused, and that no place is ever lost.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use tokio::time::{Instant, sleep_until};

use crate::support::client::{self, Agent, Response, absolute};
use crate::support::dns::{Answer, Dns};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::policy::{TOOL, tool};
use crate::support::upstream::{Exchange, Reply, Upstream, by_path};

const IN_FLIGHT: &str = "hedgerow_bulkhead_in_flight";
const QUEUED: &str = "hedgerow_bulkhead_queued";
const REJECTED: &str = "hedgerow_bulkhead_rejected_total";

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn limit(max_concurrent: usize, max_queue: usize) -> String {
    format!(
        "hedge: off, breaker: off, bulkhead: {{ max_concurrent: {max_concurrent}, max_queue: {max_queue} }}"
    )
}

fn error_of(response: &Response) -> Option<String> {
    let is_problem = response.header("content-type") == Some("application/problem+json");
    is_problem.then(|| response.json()["error"].as_str().expect("a problem names its error").to_owned())
}

/// Sends a GET on a connection of its own and does not wait for the answer.
async fn ask(proxy: &HedgerowProcess, url: &str) -> Agent {
    let mut agent = proxy.agent().await;
    agent.send(absolute("GET", url, &[], b"")).await;
    agent
}

async fn until(proxy: &HedgerowProcess, gauge: &str, value: f64) {
    proxy.until_metrics(|metrics| metrics.value(gauge, &[TOOL]) == value).await;
}

/// The next request for this path. Others, of callers that have given up meanwhile, are closed.
async fn next_for(upstream: &mut Upstream, path: &str) -> Exchange {
    loop {
        let exchange = upstream.next().await;
        if exchange.path() == path {
            return exchange;
        }
    }
}

/// Proves that `places` calls run at once and no more, whatever happened before.
async fn has_places(proxy: &HedgerowProcess, upstream: &mut Upstream, places: usize) {
    until(proxy, IN_FLIGHT, 0.0).await;
    until(proxy, QUEUED, 0.0).await;
    while upstream.waiting().is_some() {}
    let url = upstream.url("/place");
    let mut agents = join_all((0..places + 1).map(|_| ask(proxy, &url))).await;
    let mut running = Vec::new();
    for _ in 0..places {
        running.push(next_for(upstream, "/place").await);
    }
    until(proxy, QUEUED, 1.0).await;
    assert!(upstream.waiting().is_none(), "more than {places} calls at once");
    for exchange in running {
        exchange.respond(200, &[], "").await;
    }
    upstream.next().await.respond(200, &[], "").await;
    for agent in &mut agents {
        assert_eq!(agent.read_response().await.status, 200);
    }
}

/// A call that is refused never reaches the upstream, and hears of it at once.
#[tokio::test]
async fn c078_a_call_beyond_limit_and_queue_is_refused_at_once_and_never_sent() {
    let mut upstream = Upstream::start().await;
    let stages =
        "hedge: off, breaker: { consecutive_failures: 1 }, bulkhead: { max_concurrent: 1, max_queue: 0 }";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    let mut holder = ask(&proxy, &upstream.url("/held")).await;
    let held = upstream.next().await;
    for _ in 0..50 {
        let began = Instant::now();
        let refused = proxy.get(&upstream.url("/refused")).await;
        assert_eq!((refused.status, error_of(&refused).as_deref()), (503, Some("bulkhead_full")));
        // And not after half a minute in a queue.
        assert!(began.elapsed() < ms(15_000), "{:?}", began.elapsed());
        assert!(refused.header("proxy-status").unwrap().contains("error=connection_limit_reached"));
        assert_eq!(refused.json()["retryable"], true);
    }
    held.respond(200, &[], "").await;
    assert_eq!(holder.read_response().await.status, 200);
    assert_eq!((upstream.count(), upstream.connections()), (1, 1));
    let metrics = proxy.metrics().await;
    assert_eq!(metrics.value(REJECTED, &[TOOL]), 50.0);
    // No failure of the upstream: the breaker would be open.
    assert_eq!(metrics.value("hedgerow_breaker_transitions_total", &[TOOL]), 0.0);
    until(&proxy, IN_FLIGHT, 0.0).await;
}

/// First come, first served; one more than the queue has places for is refused.
#[tokio::test]
async fn the_queue_is_served_in_the_order_of_arrival() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &limit(1, 8))).await;
    let mut holder = ask(&proxy, &upstream.url("/first")).await;
    let mut running = upstream.next().await;
    let mut waiting = Vec::new();
    for nth in 0..8 {
        waiting.push(ask(&proxy, &upstream.url(&format!("/{nth}"))).await);
        until(&proxy, QUEUED, f64::from(nth + 1)).await;
    }
    assert_eq!(error_of(&proxy.get(&upstream.url("/late")).await).as_deref(), Some("bulkhead_full"));
    for (nth, agent) in waiting.iter_mut().enumerate() {
        running.respond(200, &[], "").await;
        running = upstream.next().await;
        assert_eq!(running.path(), format!("/{nth}"));
        if nth == 0 {
            assert_eq!(holder.read_response().await.status, 200);
        }
        if nth == 7 {
            running.respond(200, &[], "").await;
            let answer = agent.read_response().await;
            let timing = answer.header("server-timing").unwrap();
            assert!(!timing.starts_with("queue;dur=0.0,"), "{timing}");
            break;
        }
    }
    assert_eq!((upstream.count(), upstream.max_in_flight()), (9, 1));
}

/// The place is taken until the last byte, not until the head.
#[tokio::test]
async fn a_place_is_held_until_the_body_ends() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &limit(1, 0))).await;
    let mut agent = ask(&proxy, &upstream.url("/")).await;
    let mut exchange = upstream.next().await;
    exchange.start_chunks(200, &[]).await;
    exchange.chunk("a").await;
    assert_eq!(agent.read_head().await.status, 200);
    assert_eq!(agent.read_chunk().await.as_deref(), Some(&b"a"[..]));
    assert_eq!(error_of(&proxy.get(&upstream.url("/")).await).as_deref(), Some("bulkhead_full"));
    exchange.end().await;
    assert_eq!(agent.read_chunk().await.as_deref(), Some(&b""[..]));
    until(&proxy, IN_FLIGHT, 0.0).await;
}

/// A tunnel is a call that lasts until it closes.
#[tokio::test]
async fn a_tunnel_holds_its_place_until_it_closes() {
    let far_end = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to = far_end.local_addr().unwrap();
    let proxy = HedgerowProcess::start(&tool(to, &limit(1, 0))).await;
    for is_reset in [false, true] {
        let mut agent = proxy.agent().await;
        assert_eq!(agent.open_tunnel(&to.to_string()).await.status, 200);
        agent.send(b"\x16\x03\x01").await;
        let (socket, _) = far_end.accept().await.unwrap();
        until(&proxy, IN_FLIGHT, 1.0).await;
        let refused = proxy.agent().await.open_tunnel(&to.to_string()).await;
        assert_eq!((refused.status, error_of(&refused).as_deref()), (503, Some("bulkhead_full")));
        if is_reset {
            agent.reset();
        } else {
            drop(agent);
        }
        drop(socket);
        until(&proxy, IN_FLIGHT, 0.0).await;
    }
    let tunnels = [TOOL, ("outcome", "tunnel")];
    assert_eq!(proxy.metrics().await.value("hedgerow_requests_total", &tunnels), 2.0);
}

/// So is a connection that changed its protocol.
#[tokio::test]
async fn an_upgraded_connection_holds_its_place_until_it_closes() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &limit(1, 0))).await;
    let upgrade = [("Connection", "upgrade"), ("Upgrade", "websocket")];
    for _ in 0..3 {
        let mut agent = proxy.agent().await;
        agent.send(absolute("GET", &upstream.url("/"), &upgrade, b"")).await;
        let mut exchange = upstream.next().await;
        exchange.head_only(101, &upgrade).await;
        assert_eq!(agent.read_head().await.status, 101);
        let mut tunnel = exchange.tunnel();
        agent.send("ping").await;
        tunnel.expect(b"ping").await;
        assert_eq!(error_of(&proxy.get(&upstream.url("/")).await).as_deref(), Some("bulkhead_full"));
        drop(tunnel);
        drop(agent);
        until(&proxy, IN_FLIGHT, 0.0).await;
    }
}

/// Waiters whose time runs out leave nothing behind: no place goes to one that has gone.
#[tokio::test]
async fn c075_waiters_that_time_out_take_no_place_with_them() {
    let mut upstream = Upstream::start().await;
    let policy = tool(upstream.address(), &format!("{}, deadline: {{ reserve: 0s }}", limit(4, 8)));
    let proxy = HedgerowProcess::start(&policy).await;
    let url = upstream.url("/held");
    for _ in 0..10 {
        let mut holders = join_all((0..4).map(|_| ask(&proxy, &url))).await;
        let mut held = Vec::new();
        for _ in 0..4 {
            held.push(next_for(&mut upstream, "/held").await);
        }
        // They give up while their turn comes: some in the queue, some with the place in hand.
        let waiters = (0..4).map(async |_| {
            let timeout = [("grpc-timeout", "40m")];
            proxy.agent().await.request("GET", &upstream.url("/waiter"), &timeout, b"").await
        });
        let (refusals, ()) = tokio::join!(join_all(waiters), async {
            sleep_until(Instant::now() + ms(40)).await;
            for exchange in held {
                exchange.respond(200, &[], "").await;
            }
        });
        assert!(refusals.iter().all(|answer| matches!(answer.status, 503 | 504)));
        for holder in &mut holders {
            assert_eq!(holder.read_response().await.status, 200);
        }
    }
    has_places(&proxy, &mut upstream, 4).await;
}

/// However a client leaves, and whenever, its place comes back.
#[tokio::test]
async fn c076_clients_that_leave_give_their_place_back_wherever_they_were() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &limit(2, 8))).await;
    for round in 0..50 {
        let before_head = ask(&proxy, &upstream.url("/")).await;
        let first = upstream.next().await;
        let mut in_body = ask(&proxy, &upstream.url("/")).await;
        let mut second = upstream.next().await;
        second.start_chunks(200, &[]).await;
        second.chunk("a").await;
        assert_eq!(in_body.read_head().await.status, 200);
        let queued = ask(&proxy, &upstream.url("/queued")).await;
        until(&proxy, QUEUED, 1.0).await;
        for agent in [queued, before_head, in_body] {
            if round % 2 == 0 {
                drop(agent);
            } else {
                agent.reset();
            }
        }
        first.gone().await;
        second.gone().await;
        until(&proxy, IN_FLIGHT, 0.0).await;
        until(&proxy, QUEUED, 0.0).await;
        // The one in the queue left first, or its turn came with nobody there to answer.
        while let Some(exchange) = upstream.waiting() {
            exchange.gone().await;
        }
    }
    has_places(&proxy, &mut upstream, 2).await;
}

/// Every way for a call to end gives its place back.
#[tokio::test]
async fn every_exit_gives_the_place_back() {
    let upstream = Upstream::answering(by_path(&[
        ("/reset", Reply::reset()),
        ("/close", Reply::close()),
        ("/cut", Reply::ok("0123456789").cut(3)),
        ("/empty", Reply::status(204)),
        ("/error", Reply::status(500)),
        ("/hang", Reply::hang()),
        ("/ok", Reply::ok("ok")),
        ("/drip", Reply::ok("slow").drip(4, ms(500))),
    ]))
    .await;
    let (dead, _keeps_it_dead) = Upstream::dead();
    let dns = Dns::start(&[("mute.test", Answer::Mute), ("bad.test", Answer::Failure)]).await;
    let policy = format!(
        "dns: {{ servers: [\"{}\"] }}\nupstreams: {{ tool: {{ hosts: [\"{}\", \"{dead}\", mute.test, bad.test], {} }} }}",
        dns.address(),
        upstream.address(),
        limit(1, 0)
    );
    let proxy = HedgerowProcess::start(&policy).await;
    let timeout = [("grpc-timeout", "1S")];
    let wrong = [("x-request-deadline", "never")];
    let here = |path: &str| upstream.url(path);
    for (method, url, headers, status) in [
        ("GET", here("/reset"), &[][..], 502),
        ("POST", here("/close"), &[], 502),
        ("GET", here("/cut"), &[], 200),
        ("GET", here("/empty"), &[], 204),
        ("HEAD", here("/ok"), &[], 200),
        ("GET", here("/error"), &[], 500),
        ("GET", here("/hang"), &timeout, 504),
        ("GET", here("/drip"), &timeout, 200),
        ("GET", here("/ok"), &wrong, 400),
        ("GET", format!("http://{dead}/"), &[], 502),
        ("GET", "http://bad.test/".to_owned(), &[], 502),
        ("GET", "http://mute.test/".to_owned(), &timeout, 504),
    ] {
        let answer = proxy.agent().await.request(method, &url, headers, b"").await;
        assert_eq!(answer.status, status, "{method} {url}");
        until(&proxy, IN_FLIGHT, 0.0).await;
        assert_eq!(proxy.get(&here("/ok")).await.text(), "ok", "after {method} {url}");
    }
    assert_eq!(proxy.metrics().await.value(REJECTED, &[TOOL]), 0.0);
}

/// Time in the queue is time: the call ends at its deadline, and out of the queue it is.
#[tokio::test]
async fn c084_a_wait_in_the_queue_ends_at_the_deadline() {
    let mut upstream = Upstream::start().await;
    let stages = format!("{}, deadline: {{ reserve: 0s }}", limit(1, 10));
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &stages)).await;
    let _holder = ask(&proxy, &upstream.url("/held")).await;
    let _held = upstream.next().await;
    let at = SystemTime::now() + ms(1500);
    let since_epoch = at.duration_since(UNIX_EPOCH).unwrap();
    let deadline = format!("{}.{:09}", since_epoch.as_secs(), since_epoch.subsec_nanos());
    let field = [("x-request-deadline", deadline.as_str())];
    let answer = proxy.agent().await.request("GET", &upstream.url("/"), &field, b"").await;
    let late = SystemTime::now().duration_since(at).expect("not before the deadline");
    assert!(late < ms(15_000), "{late:?}");
    assert_eq!((answer.status, error_of(&answer).as_deref()), (504, Some("deadline_exceeded")));
    assert_eq!(answer.json()["detail"], "x-request-deadline struck in the bulkhead's queue");
    assert_eq!(upstream.count(), 1);
    until(&proxy, QUEUED, 0.0).await;
    let stage = [TOOL, ("stage", "queue")];
    assert_eq!(proxy.metrics().await.value("hedgerow_deadline_exceeded_total", &stage), 1.0);
}

/// Who cannot make it hears so at once, not at the deadline.
#[tokio::test]
async fn a_wait_that_is_expected_to_outlast_the_deadline_is_refused_at_once() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &limit(1, 10))).await;
    // From this call hedgerow knows that a place is held for two seconds and a half.
    let mut first = ask(&proxy, &upstream.url("/")).await;
    let exchange = upstream.next().await;
    sleep_until(Instant::now() + ms(2500)).await;
    exchange.respond(200, &[], "").await;
    assert_eq!(first.read_response().await.status, 200);

    let mut holder = ask(&proxy, &upstream.url("/")).await;
    let held = upstream.next().await;
    let began = Instant::now();
    let impatient = [("grpc-timeout", "2S")];
    let refused = proxy.agent().await.request("GET", &upstream.url("/"), &impatient, b"").await;
    assert_eq!((refused.status, error_of(&refused).as_deref()), (503, Some("bulkhead_full")));
    assert!(began.elapsed() < ms(1900), "{:?}", began.elapsed());
    // Who has the time may wait.
    let mut patient = ask(&proxy, &upstream.url("/patient")).await;
    until(&proxy, QUEUED, 1.0).await;
    held.respond(200, &[], "").await;
    upstream.next().await.respond(200, &[], "").await;
    assert_eq!((holder.read_response().await.status, patient.read_response().await.status), (200, 200));
    assert_eq!(upstream.count(), 3);
}

/// A route that names its own limit has it for itself.
#[tokio::test]
async fn a_route_with_a_bulkhead_of_its_own_neither_takes_nor_gives() {
    let mut upstream = Upstream::start().await;
    let stages = format!(
        "{}, routes: [{{ name: search, path: \"/search/**\", bulkhead: {{ max_concurrent: 1, max_queue: 0 }} }}, \
         {{ name: plain, path: \"/plain\" }}]",
        limit(1, 0)
    );
    let proxy = HedgerowProcess::start(&tool(upstream.address(), &stages)).await;
    let mut searching = ask(&proxy, &upstream.url("/search/a")).await;
    let search: Exchange = upstream.next().await;
    assert_eq!(error_of(&proxy.get(&upstream.url("/search/b")).await).as_deref(), Some("bulkhead_full"));
    let mut other = ask(&proxy, &upstream.url("/plain")).await;
    let plain = upstream.next().await;
    // A route without a limit of its own shares the upstream's.
    assert_eq!(error_of(&proxy.get(&upstream.url("/")).await).as_deref(), Some("bulkhead_full"));
    until(&proxy, IN_FLIGHT, 2.0).await;
    search.respond(200, &[], "").await;
    plain.respond(200, &[], "").await;
    assert_eq!((searching.read_response().await.status, other.read_response().await.status), (200, 200));
    until(&proxy, IN_FLIGHT, 0.0).await;
}

/// A reload's new limit holds for the calls that come, and for those that queue already.
#[tokio::test]
async fn a_limit_raised_by_a_reload_lets_the_queue_in_first() {
    let mut upstream = Upstream::start().await;
    let policy = |places: usize| tool(upstream.address(), &limit(places, 5));
    let mut proxy = HedgerowProcess::start(&policy(1)).await;
    let raised = policy(3);
    let url = upstream.url("/");
    let mut agents = vec![ask(&proxy, &url).await];
    let mut running = vec![upstream.next().await];
    agents.push(ask(&proxy, &upstream.url("/queued")).await);
    until(&proxy, QUEUED, 1.0).await;
    let label = [("result", "applied")];
    let reloads = "hedgerow_config_reloads_total";
    let before = proxy.metrics().await.value(reloads, &label);
    proxy.policy.replace(&raised);
    proxy.until_metrics(|metrics| metrics.value(reloads, &label) == before + 1.0).await;
    agents.push(ask(&proxy, &upstream.url("/new")).await);
    for _ in 0..2 {
        running.push(upstream.next().await);
    }
    assert_eq!(upstream.max_in_flight(), 3);
    for exchange in running {
        exchange.respond(200, &[], "").await;
    }
    for agent in &mut agents {
        assert_eq!(agent.read_response().await.status, 200);
    }
}

/// Off is off.
#[tokio::test]
async fn a_bulkhead_that_is_off_bounds_nothing() {
    let upstream = Upstream::answering(|_| Reply::ok("").after(ms(1500))).await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), "hedge: off, bulkhead: off")).await;
    let urls = vec![upstream.url("/"); 150];
    assert!(client::get_all(proxy.proxy, &urls).await.iter().all(|answer| answer.status == 200));
    assert!(upstream.max_in_flight() > 100, "{}", upstream.max_in_flight());
}
