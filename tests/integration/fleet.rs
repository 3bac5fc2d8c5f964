//! Several pods that share a Redis: they stop together, probe for each other, keep to one rate, and none undoes what
//! the others know.

use std::time::Duration;

use futures_util::future::join_all;
use rustix::process::Signal;
use tokio::time::{Instant, sleep_until};

use crate::support::client::{Agent, Response};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::pki::Pki;
use crate::support::policy::named;
use crate::support::redis::{RedisCluster, RedisServer, Sentinels};
use crate::support::soon;
use crate::support::upstream::{Exchange, Reply, Seen, Upstream};

/// A breaker that opens at the second failure, for so long that no test sees its end.
const BREAKER: &str = "breaker: { consecutive_failures: 2, open_for: 5m, shared: true }, hedge: off";
/// The same, due again at once.
const SHORT: &str =
    "breaker: { consecutive_failures: 2, open_for: 1s, max_open_for: 1s, shared: true }, hedge: off";
/// Says to the upstream of [`failing`] what to answer.
const BAD: (&str, &str) = ("x-bad", "yes");

/// With time for a loaded machine: what is asked in vain is another test's matter.
fn policy(redis: &str, upstreams: &str) -> String {
    format!("shared_state: {{ redis: \"{redis}\", timeout: 1s }}\nupstreams: {{ {upstreams} }}")
}

fn of(redis: &RedisServer, upstream: &Upstream, stages: &str) -> String {
    policy(&redis.url(), &named("tool", upstream.address(), stages))
}

/// Fails the calls that say so.
async fn failing() -> Upstream {
    let script = |seen: &Seen| match seen.header(BAD.0) {
        Some(_) => Reply::status(500),
        None => Reply::ok(""),
    };
    Upstream::answering(script).await
}

/// So many pods, each of which has counted all of them.
async fn pods(count: usize, policy: &str) -> Vec<HedgerowProcess> {
    let pods = join_all((0..count).map(|_| HedgerowProcess::start(policy))).await;
    for pod in &pods {
        pod.until_status(|status| status["shared_state"]["up"] == true).await;
    }
    pods
}

async fn call(pod: &HedgerowProcess, upstream: &Upstream, headers: &[(&str, &str)]) -> Response {
    pod.agent().await.request("GET", &upstream.url("/"), headers, b"").await
}

/// Calls until this pod's own breaker is open.
async fn trip(pod: &HedgerowProcess, upstream: &Upstream) {
    for _ in 0..2 {
        assert_eq!(call(pod, upstream, &[BAD]).await.status, 500);
    }
}

fn is_cut_off(answer: &Response) -> bool {
    answer.status == 503 && answer.json()["error"] == "circuit_open"
}

fn breaker(status: &serde_json::Value, upstream: &Upstream) -> serde_json::Value {
    status["upstreams"]["tool"][upstream.address().to_string()]["breaker"].clone()
}

/// Waits until this pod has heard of it; it has to have called before.
async fn until_open(pod: &HedgerowProcess, upstream: &Upstream) {
    pod.until_status(|status| {
        let breaker = breaker(status, upstream);
        breaker["state"] == "open" && breaker["by_fleet"] == true
    })
    .await;
}

#[tokio::test]
async fn when_two_pods_have_seen_it_fail_all_stop() {
    let (redis, upstream) = (RedisServer::start().await, failing().await);
    let pods = pods(3, &of(&redis, &upstream, BREAKER)).await;
    assert_eq!(call(&pods[2], &upstream, &[]).await.status, 200);
    trip(&pods[0], &upstream).await;
    trip(&pods[1], &upstream).await;
    for pod in &pods {
        until_open(pod, &upstream).await;
    }
    let before = upstream.count();
    for pod in &pods {
        assert!(is_cut_off(&call(pod, &upstream, &[]).await));
    }
    assert_eq!(upstream.count(), before);
    let metrics = pods[2].metrics().await;
    let opened = metrics.value("hedgerow_breaker_transitions_total", &[("upstream", "tool"), ("to", "open")]);
    assert_eq!(opened, 1.0);
}

#[tokio::test]
async fn one_sick_pod_cuts_off_nobody_else() {
    let (redis, upstream) = (RedisServer::start().await, failing().await);
    let pods = pods(3, &of(&redis, &upstream, BREAKER)).await;
    trip(&pods[0], &upstream).await;
    let key = format!("hedgerow:cb:{}", upstream.address());
    redis.until(|redis| !redis.keys(&key).is_empty()).await;
    assert!(is_cut_off(&call(&pods[0], &upstream, &[]).await), "its own breaker is its own business");
    for pod in &pods[1..] {
        assert_eq!(call(pod, &upstream, &[]).await.status, 200);
    }
}

/// Whatever the quorum: what may be this pod's own trouble is no evidence.
#[tokio::test]
async fn c073_a_pod_without_a_way_to_the_upstream_cuts_off_nobody() {
    let (redis, upstream) = (RedisServer::start().await, failing().await);
    let (nowhere, _held) = Upstream::dead();
    let shared = format!("shared_state: {{ redis: \"{}\", quorum: 1, timeout: 1s }}\n", redis.url());
    let tool = |stages: &str| named("tool", upstream.address(), stages);
    let lost = tool(&format!("endpoint: \"http://{nowhere}\", {BREAKER}"));
    let lost = HedgerowProcess::start(&format!("{shared}upstreams: {{ {lost} }}")).await;
    let well = HedgerowProcess::start(&format!("{shared}upstreams: {{ {} }}", tool(BREAKER))).await;
    for pod in [&lost, &well] {
        pod.until_status(|status| status["shared_state"]["up"] == true).await;
    }
    for _ in 0..2 {
        assert_eq!(call(&lost, &upstream, &[]).await.status, 502);
    }
    assert!(is_cut_off(&call(&lost, &upstream, &[]).await));
    assert_eq!(call(&well, &upstream, &[]).await.status, 200);
    // With a failure that any pod would have met it is another matter, and that comes later over the same way.
    trip(&well, &upstream).await;
    until_open(&lost, &upstream).await;
    let since = redis.command(&["HGET", &format!("hedgerow:cb:{}", upstream.address()), "failure_count"]);
    assert_eq!(since.text(), "2", "those of the other pod were never told");
}

/// Calls until this pod's own breaker is open, at an upstream that is driven step by step.
async fn trip_by_hand(pod: &HedgerowProcess, upstream: &mut Upstream) {
    for _ in 0..2 {
        let mut agent = pod.ask("GET", &upstream.url("/"), &[], b"").await;
        upstream.next().await.respond(500, &[], "").await;
        assert_eq!(agent.read_response().await.status, 500);
    }
}

/// Calls through one pod after another until a call is let through: its agent, the pod's place, and the call itself.
async fn until_probe(pods: &[HedgerowProcess], upstream: &mut Upstream) -> (Agent, usize, Exchange) {
    let url = upstream.url("/");
    soon(async {
        for nth in (0..pods.len()).cycle() {
            let mut agent = pods[nth].ask("GET", &url, &[], b"").await;
            let refused = tokio::select! {
                exchange = upstream.next() => return (agent, nth, exchange),
                answer = agent.read_response() => answer,
            };
            assert!(is_cut_off(&refused));
        }
        unreachable!("the cycle has no end")
    })
    .await
}

#[tokio::test]
async fn one_pod_probes_for_all_of_them() {
    let (redis, mut upstream) = (RedisServer::start().await, Upstream::start().await);
    let pods = pods(3, &of(&redis, &upstream, SHORT)).await;
    trip_by_hand(&pods[0], &mut upstream).await;
    trip_by_hand(&pods[1], &mut upstream).await;
    until_open(&pods[0], &upstream).await;
    let (mut agent, _, exchange) = until_probe(&pods, &mut upstream).await;
    for pod in &pods {
        assert!(is_cut_off(&call(pod, &upstream, &[]).await), "one probe is enough");
    }
    assert!(upstream.waiting().is_none());
    exchange.respond(200, &[], "").await;
    assert_eq!(agent.read_response().await.status, 200);
    for pod in &pods {
        pod.until_status(|status| breaker(status, &upstream)["state"] == "closed").await;
    }
}

#[tokio::test]
async fn a_probe_that_fails_keeps_all_waiting_and_the_wait_is_the_fleets() {
    let (redis, upstream) = (RedisServer::start().await, failing().await);
    let stages =
        "breaker: { consecutive_failures: 2, open_for: 1s, max_open_for: 5m, shared: true }, hedge: off";
    let pods = pods(2, &of(&redis, &upstream, stages)).await;
    trip(&pods[0], &upstream).await;
    trip(&pods[1], &upstream).await;
    until_open(&pods[0], &upstream).await;
    let before = upstream.count();
    soon(async { while is_cut_off(&call(&pods[0], &upstream, &[BAD]).await) {} }).await;
    // The second wait is twice as long, and the other pod keeps to it as well.
    let waits = |status: &serde_json::Value| {
        let breaker = breaker(status, &upstream);
        breaker["state"] == "open" && breaker["retry_after_ms"].as_u64() > Some(1_200)
    };
    pods[1].until_status(waits).await;
    assert_eq!(upstream.count(), before + 1);
}

/// The leave to probe is lent, not given.
#[tokio::test]
async fn when_the_pod_that_probes_is_gone_another_one_does() {
    let (redis, mut upstream) = (RedisServer::start().await, Upstream::start().await);
    let mut pods = pods(2, &of(&redis, &upstream, SHORT)).await;
    trip_by_hand(&pods[0], &mut upstream).await;
    trip_by_hand(&pods[1], &mut upstream).await;
    until_open(&pods[0], &upstream).await;
    let (_agent, nth, exchange) = until_probe(&pods, &mut upstream).await;
    pods[nth].signal(Signal::KILL);
    exchange.gone().await;
    let left = [pods.remove(1 - nth)];
    let (mut agent, _, exchange) = until_probe(&left, &mut upstream).await;
    exchange.respond(200, &[], "").await;
    assert_eq!(agent.read_response().await.status, 200);
}

#[tokio::test]
async fn a_client_that_leaves_takes_no_leave_to_probe_along() {
    let (redis, mut upstream) = (RedisServer::start().await, Upstream::start().await);
    let pods = pods(2, &of(&redis, &upstream, SHORT)).await;
    trip_by_hand(&pods[0], &mut upstream).await;
    trip_by_hand(&pods[1], &mut upstream).await;
    until_open(&pods[0], &upstream).await;
    let (agent, nth, exchange) = until_probe(&pods, &mut upstream).await;
    drop(agent);
    exchange.gone().await;
    let began = Instant::now();
    let (_agent, _, exchange) = until_probe(&pods[1 - nth..][..1], &mut upstream).await;
    assert!(began.elapsed() < Duration::from_secs(9), "sooner than a lease ends");
    exchange.respond(200, &[], "").await;
}

#[tokio::test]
async fn a_pod_that_starts_takes_the_state_and_changes_nothing() {
    let (redis, upstream) = (RedisServer::start().await, failing().await);
    let policy = of(&redis, &upstream, BREAKER);
    let mut pods = pods(2, &policy).await;
    trip(&pods[0], &upstream).await;
    trip(&pods[1], &upstream).await;
    until_open(&pods[0], &upstream).await;
    let before = upstream.count();
    // Restarted, and one more.
    pods.remove(0);
    for _ in 0..2 {
        let pod = HedgerowProcess::start(&policy).await;
        pod.until_status(|status| status["shared_state"]["up"] == true).await;
        assert!(is_cut_off(&call(&pod, &upstream, &[]).await));
        assert!(is_cut_off(&call(&pods[0], &upstream, &[]).await));
    }
    assert_eq!(upstream.count(), before);
}

#[tokio::test]
async fn a_pod_that_stood_still_hears_first_what_it_missed() {
    let (redis, upstream) = (RedisServer::start().await, failing().await);
    let pods = pods(3, &of(&redis, &upstream, BREAKER)).await;
    for pod in &pods {
        assert_eq!(call(pod, &upstream, &[]).await.status, 200);
    }
    pods[2].signal(Signal::STOP);
    // What it takes for a standstill is more than three seconds.
    let long_enough = Instant::now() + Duration::from_secs(4);
    trip(&pods[0], &upstream).await;
    trip(&pods[1], &upstream).await;
    until_open(&pods[0], &upstream).await;
    let before = upstream.count();
    sleep_until(long_enough).await;
    pods[2].signal(Signal::CONT);
    assert!(is_cut_off(&call(&pods[2], &upstream, &[]).await));
    assert_eq!(upstream.count(), before);
}

#[tokio::test]
async fn what_lies_in_redis_is_as_documented_and_holds_no_secret() {
    let (redis, upstream) = (RedisServer::start().await, failing().await);
    let stages = format!("{BREAKER}, rate_limit: {{ rate: 100/s, shared: true }}");
    let pods = pods(2, &of(&redis, &upstream, &stages)).await;
    for pod in &pods {
        for _ in 0..2 {
            let headers = [BAD, ("authorization", "Bearer hunter2"), ("x-api-key", "hunter2")];
            pod.agent().await.request("GET", &upstream.url("/hunter2?key=hunter2"), &headers, b"").await;
        }
    }
    until_open(&pods[0], &upstream).await;
    let key = format!("hedgerow:cb:{}", upstream.address());
    let ttl = redis.command(&["TTL", &key]).integer();
    assert!((320..=391).contains(&ttl), "a minute past the wait of five: {ttl}");
    let field = |name: &str| redis.command(&["HGET", &key, name]).text();
    assert_eq!(field("state"), "open");
    assert_eq!(field("failure_count"), "4");
    let (failed, opens) = (field("last_failure_ts"), field("open_until_ts"));
    let wait = opens.parse::<u64>().unwrap() - failed.parse::<u64>().unwrap();
    assert!((265_000..=335_000).contains(&wait), "{wait} ms");
    let mut keys = redis.keys("*");
    keys.sort();
    assert_eq!(keys, [key, "hedgerow:pods".into(), format!("hedgerow:rl:{}", upstream.address())]);
    for key in &keys {
        assert!(redis.command(&["PTTL", key]).integer() > 0, "{key} would stay for ever");
        let dump = format!("{:?}", redis.command(&["DUMP", key]));
        assert!(!dump.contains("hunter2"), "{key}");
    }
}

#[tokio::test]
async fn a_named_route_has_a_breaker_of_its_own() {
    let (redis, upstream) = (RedisServer::start().await, failing().await);
    let routes = "routes: [{ name: search, path: /s, breaker: { consecutive_failures: 2, open_for: 5m } }]";
    let pods = pods(2, &of(&redis, &upstream, &format!("{BREAKER}, {routes}"))).await;
    for pod in &pods {
        for _ in 0..2 {
            pod.agent().await.request("GET", &upstream.url("/s"), &[BAD], b"").await;
        }
    }
    for pod in &pods {
        soon(async { while !is_cut_off(&pod.get(&upstream.url("/s")).await) {} }).await;
        assert_eq!(call(pod, &upstream, &[]).await.status, 200);
    }
    let key = format!("hedgerow:cb:{}:search", upstream.address());
    assert_eq!(redis.command(&["HGET", &key, "state"]).text(), "open");
}

#[tokio::test]
async fn pods_keep_to_one_rate_and_most_calls_ask_nobody() {
    let (redis, upstream) = (RedisServer::start().await, Upstream::answering(|_| Reply::ok("")).await);
    let stages =
        "rate_limit: { rate: 100/s, burst: 20, shared: true }, bulkhead: off, breaker: off, hedge: off";
    let pods = pods(4, &of(&redis, &upstream, stages)).await;
    let began = Instant::now();
    let end = began + Duration::from_secs(8);
    let before = redis.calls("evalsha") + redis.calls("eval");
    let callers = pods.iter().flat_map(|pod| [pod; 8]).map(async |pod| {
        let (mut agent, mut answers) = (pod.agent().await, 0);
        while Instant::now() < end {
            // Enough to wait for a turn in line, so that nobody calls in vain all the time.
            let deadline = [("grpc-timeout", "2S")];
            agent.request("GET", &upstream.url("/"), &deadline, b"").await;
            answers += 1;
        }
        answers
    });
    let answers: u64 = join_all(callers).await.into_iter().sum();
    let took = began.elapsed().as_secs_f64();
    let passed = upstream.count() as f64;
    assert!(passed <= 20.0 + 105.0 * took, "{passed} in {took} s");
    assert!(passed >= 70.0 * took, "{passed} in {took} s");
    let asked = redis.calls("evalsha") + redis.calls("eval") - before;
    assert!(asked * 5 < answers, "{asked} questions for {answers} calls");
}

#[tokio::test]
async fn a_pod_that_leaves_gives_its_share_back() {
    let (redis, upstream) = (RedisServer::start().await, Upstream::answering(|_| Reply::ok("")).await);
    let stages = "rate_limit: { rate: 100/s, burst: 20, shared: true }";
    let mut pods = pods(2, &of(&redis, &upstream, stages)).await;
    let key = format!("hedgerow:rl:{}", upstream.address());
    let leases = |redis: &RedisServer| {
        redis.command(&["HKEYS", &key]).texts().iter().filter(|field| field.starts_with("p:")).count()
    };
    soon(async {
        while leases(&redis) < 2 {
            for pod in &pods {
                assert_eq!(call(pod, &upstream, &[]).await.status, 200);
            }
        }
    })
    .await;
    pods[0].signal(Signal::TERM);
    assert_eq!(pods[0].wait().await, 0);
    assert_eq!(leases(&redis), 1);
    assert_eq!(redis.command(&["ZCARD", "hedgerow:pods"]).integer(), 1);
}

#[tokio::test]
async fn c097_a_server_that_has_forgotten_the_scripts_is_told_them_again() {
    let (mut redis, upstream) = (RedisServer::start().await, Upstream::answering(|_| Reply::ok("")).await);
    // Two calls, and no third that a test would live to see. So few lease no share: each asks.
    let stages = "rate_limit: { rate: 1/h, burst: 2, shared: true }, hedge: off";
    let pods = pods(2, &of(&redis, &upstream, stages)).await;
    assert_eq!(call(&pods[0], &upstream, &[]).await.status, 200);
    redis.command(&["SCRIPT", "FLUSH"]);
    assert_eq!(call(&pods[1], &upstream, &[]).await.status, 200);
    let refused = call(&pods[0], &upstream, &[]).await;
    assert_eq!(refused.status, 429, "the two tokens were one bucket's");
    assert!(refused.header("retry-after").is_some());
    redis.restart().await;
    redis.until(|redis| redis.command(&["ZCARD", "hedgerow:pods"]).integer() == 2).await;
    // A new bucket is full; who has just heard that there is nothing asks again a little later.
    soon(async { while call(&pods[1], &upstream, &[]).await.status == 429 {} }).await;
    assert_eq!(upstream.count(), 3);
}

#[tokio::test]
async fn over_tls_with_a_user_and_a_password_from_the_environment() {
    let pki = Pki::new();
    let redis = RedisServer::with()
        .tls(&pki)
        .user("pod", "p@ss/w#rd:%", "~hedgerow:* &hedgerow:* +@all")
        .start()
        .await;
    let upstream = failing().await;
    let url = format!("rediss://pod:${{env:REDIS_PASSWORD}}@127.0.0.1:{}", redis.port());
    let ca = pki.ca_file();
    let policy = format!(
        "tls: {{ ca_file: \"{}\" }}\n{}",
        ca.display(),
        policy(&url, &named("tool", upstream.address(), BREAKER))
    );
    let pod = HedgerowProcess::with(&policy).env("REDIS_PASSWORD", "p@ss/w#rd:%").start().await;
    pod.until_status(|status| status["shared_state"]["up"] == true).await;
    let shown = pod.ask_admin("GET", "/config").await;
    assert!(!shown.text().contains("p@ss") && !pod.stderr.text().contains("p@ss"));
}

#[tokio::test]
async fn sentinels_name_another_master_and_the_pods_follow() {
    let (mut sentinels, upstream) = (Sentinels::start().await, failing().await);
    let addresses: Vec<_> = sentinels.addresses().iter().map(ToString::to_string).collect();
    let url = format!("redis-sentinel://{}/{}", addresses.join(","), Sentinels::SERVICE);
    let pods = pods(2, &policy(&url, &named("tool", upstream.address(), BREAKER))).await;
    sentinels.fail_over().await;
    for pod in &pods {
        trip(pod, &upstream).await;
    }
    for pod in &pods {
        until_open(pod, &upstream).await;
    }
}

#[tokio::test]
async fn in_a_cluster_each_key_is_where_it_belongs() {
    let cluster = RedisCluster::start().await;
    let upstreams = join_all((0..4).map(|_| failing())).await;
    let tools: Vec<_> = (0..4).map(|n| named(&format!("tool{n}"), upstreams[n].address(), BREAKER)).collect();
    let url = format!("redis-cluster://127.0.0.1:{}", cluster.node_of("hedgerow:pods").port());
    let pods = pods(2, &policy(&url, &tools.join(", "))).await;
    for upstream in &upstreams {
        for pod in &pods {
            trip(pod, upstream).await;
        }
    }
    for upstream in &upstreams {
        for pod in &pods {
            soon(async { while !is_cut_off(&call(pod, upstream, &[]).await) {} }).await;
        }
    }
    assert_eq!(cluster.keys("hedgerow:cb:*").len(), 4);
}

#[tokio::test]
async fn a_reload_turns_it_on_moves_it_and_turns_it_off() {
    let (one, other, upstream) = (RedisServer::start().await, RedisServer::start().await, failing().await);
    let alone = format!("upstreams: {{ {} }}", named("tool", upstream.address(), "hedge: off"));
    let mut pod = HedgerowProcess::start(&alone).await;
    assert_eq!(pod.status().await["shared_state"], serde_json::Value::Null);
    assert!(!pod.metrics().await.has("hedgerow_shared_state_up"));
    for redis in [&one, &other] {
        pod.policy.replace(&of(redis, &upstream, BREAKER));
        redis.until(|redis| redis.command(&["ZCARD", "hedgerow:pods"]).integer() == 1).await;
        assert_eq!(call(&pod, &upstream, &[]).await.status, 200);
    }
    pod.until_metrics(|metrics| metrics.value("hedgerow_shared_state_up", &[]) == 1.0).await;
    pod.policy.replace(&alone);
    pod.until_status(|status| status["shared_state"].is_null()).await;
    assert_eq!(call(&pod, &upstream, &[]).await.status, 200);
}
