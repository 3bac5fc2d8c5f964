//! What becomes of calls when the Redis that pods share is slow, mute, gone, full, or not what it was.
//!
//! Nothing, as far as an agent sees: that is half of each test. The other half is that an operator is told, once, and
//! that pods know things together again when it is over, without anybody's help.
//!
//! Redis is asked for what a pod does not know yet, so the calls that could meet a fault go to hosts that
//! nobody has called before. There are many of those on loopback, and the policy's defaults hold for all.

use std::cell::Cell;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::support::client::Response;
use crate::support::forwarder::Forwarder;
use crate::support::hedgerow::HedgerowProcess;
use crate::support::redis::{RedisServer, Reply, Setup};
use crate::support::soon;
use crate::support::upstream::{Reply as Answer, Upstream, by_path};

/// The longest that a request may wait for an answer here. Long, so that a wait shows beside a machine's moods.
const TIMEOUT: Duration = Duration::from_millis(300);
/// A call that waited for an answer, and did not get it.
const WAITED: Duration = Duration::from_millis(280);
/// The calls of a fault that may have waited: three in a row make a pod ask no more, and a machine may have moods.
const FEW: usize = 8;

/// Too little time for any token that is not there.
const HURRY: (&str, &str) = ("grpc-timeout", "20m");

const DOWN: &str = "shared state is down";
const UP_AGAIN: &str = "shared state is up again";
const SLOW: &str = "shared state is slow";
const QUICK_AGAIN: &str = "shared state is quick again";
const UNUSABLE: &str = "of this upstream cannot be used";

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// All hosts have their breakers and rates together with other pods. One pod's word is enough.
fn policy(redis: &str) -> String {
    format!(
        "shared_state: {{ redis: \"{redis}\", timeout: {TIMEOUT:?}, quorum: 1 }}\n\
         defaults: {{ hedge: off, breaker: {{ consecutive_failures: 3, open_for: 5m, shared: true }}, \
                     rate_limit: {{ rate: 1000/s, burst: 100, shared: true }} }}"
    )
}

/// Two pods, the tools they call, and a line to the Redis that they share.
struct Fleet {
    redis: RedisServer,
    line: Forwarder,
    tools: Tools,
    pods: Vec<HedgerowProcess>,
}

/// One upstream, and as many hosts as there are addresses of this machine.
struct Tools {
    upstream: Upstream,
    called: Cell<u16>,
}

impl Tools {
    async fn start() -> Self {
        let answers = by_path(&[("/", Answer::ok("fine")), ("/fail", Answer::status(503))]);
        Self { upstream: Upstream::on(Ipv4Addr::UNSPECIFIED).answering(answers).await, called: Cell::new(1) }
    }

    /// The `host:port` of a tool that no pod has called before.
    fn fresh(&self) -> String {
        self.called.set(self.called.get() + 1);
        let [high, low] = self.called.get().to_be_bytes();
        format!("127.1.{high}.{low}:{}", self.upstream.address().port())
    }

    /// Calls of each pod to hosts that it does not know, one after the other. All of them succeed, and few wait.
    async fn serve(&self, pods: &[HedgerowProcess]) {
        for pod in pods {
            let mut took = Vec::new();
            for _ in 0..15 {
                let (host, began) = (self.fresh(), Instant::now());
                let answer = pod.get(&format!("http://{host}/")).await;
                assert_eq!((answer.status, answer.text()), (200, "fine"), "{answer:?}");
                took.push(began.elapsed());
            }
            let waited = took.iter().filter(|took| **took >= WAITED).count();
            assert!(waited <= FEW, "{waited} calls waited: {took:?}");
            // A call has several things to ask, and each question ends in time.
            assert!(took.iter().all(|took| *took < 4 * TIMEOUT + ms(3000)), "{took:?}");
        }
    }

    /// What the first pod has met, the others know: their calls are refused although none of them failed.
    async fn are_guarded_together(&self, pods: &[HedgerowProcess]) {
        let host = self.fresh();
        for pod in pods {
            assert_eq!(pod.get(&format!("http://{host}/")).await.status, 200);
        }
        for _ in 0..3 {
            assert_eq!(pods[0].get(&format!("http://{host}/fail")).await.status, 503);
        }
        for pod in pods {
            until_cut_off(pod, &host).await;
        }
    }
}

/// Whether the breaker of this host is open.
async fn is_cut_off(pod: &HedgerowProcess, host: &str) -> bool {
    let answer = pod.get(&format!("http://{host}/")).await;
    let is_open = answer.status == 503 && error_of(&answer) == Some("circuit_open".to_owned());
    assert!(is_open || answer.status == 200, "{answer:?}");
    is_open
}

/// Waits until the breaker of this host is open.
#[track_caller]
fn until_cut_off(pod: &HedgerowProcess, host: &str) -> impl Future<Output = ()> {
    soon(async move { while !is_cut_off(pod, host).await {} })
}

fn error_of(answer: &Response) -> Option<String> {
    let is_problem = answer.header("content-type") == Some("application/problem+json");
    is_problem.then(|| answer.json()["error"].as_str().expect("a problem names its error").to_owned())
}

impl Fleet {
    async fn start() -> Self {
        Self::start_on(RedisServer::with()).await
    }

    async fn start_on(redis: Setup) -> Self {
        let redis = redis.start().await;
        let line = Forwarder::start(redis.address()).await;
        let policy = policy(&redis.url_by(line.address()));
        let mut pods = Vec::new();
        for _ in 0..2 {
            pods.push(HedgerowProcess::start(&policy).await);
        }
        let this = Self { redis, line, tools: Tools::start().await, pods };
        this.is_well().await;
        this
    }

    /// Pods serve and know things together, and say so.
    async fn is_well(&self) {
        for pod in &self.pods {
            until_up(pod).await;
        }
        self.tools.serve(&self.pods).await;
        self.tools.are_guarded_together(&self.pods).await;
    }

    /// Calls go on while every pod finds out, and after that. Returns what the pods say is wrong.
    async fn is_down(&self) -> Vec<String> {
        self.tools.serve(&self.pods).await;
        let mut errors = Vec::new();
        for pod in &self.pods {
            errors.push(until_down(pod).await);
        }
        self.tools.serve(&self.pods).await;
        errors
    }

    /// What the log was told of a fault that is over: when it began, and when it ended.
    #[track_caller]
    fn has_logged(&self, times: usize) {
        for pod in &self.pods {
            assert_eq!((count(pod, DOWN), count(pod, UP_AGAIN)), (times, times), "{}", pod.stderr.text());
        }
    }

    /// A fault that makes the Redis useless begins, is lived with, ends, and is got over. Returns what pods said was
    /// wrong.
    async fn lives_through(
        &mut self,
        begin: impl AsyncFnOnce(&mut Self),
        end: impl AsyncFnOnce(&mut Self),
    ) -> Vec<String> {
        begin(self).await;
        let errors = self.is_down().await;
        end(self).await;
        self.is_well().await;
        self.has_logged(1);
        errors
    }
}

async fn until_up(pod: &HedgerowProcess) -> Value {
    let status = pod.until_status(|status| status["shared_state"]["up"] == true).await;
    assert_eq!(status["shared_state"]["error"], Value::Null);
    pod.until_metrics(|metrics| metrics.value("hedgerow_shared_state_up", &[]) == 1.0).await;
    status
}

/// Waits until the pod has found out, and returns what it says is wrong.
async fn until_down(pod: &HedgerowProcess) -> String {
    let is_told =
        |status: &Value| status["shared_state"]["up"] == false && status["shared_state"]["error"].is_string();
    let status = pod.until_status(is_told).await;
    let metrics = pod.metrics().await;
    assert!(metrics.has("hedgerow_shared_state_up"));
    assert_eq!(metrics.value("hedgerow_shared_state_up", &[]), 0.0);
    status["shared_state"]["error"].as_str().expect("it was a text").to_owned()
}

/// Lines of the log that say so.
fn count(pod: &HedgerowProcess, what: &str) -> usize {
    pod.stderr.all().iter().filter(|line| line.contains(what)).count()
}

#[tokio::test]
async fn nothing_is_told_of_where_all_is_well() {
    let fleet = Fleet::start().await;
    fleet.is_well().await;
    fleet.has_logged(0);
    let pods = fleet.pods.len();
    fleet.pods[1].until_status(|status| status["shared_state"]["pods"] == pods).await;
    let alone = HedgerowProcess::start("{}").await;
    assert_eq!(alone.status().await["shared_state"], Value::Null);
    assert!(!alone.metrics().await.has("hedgerow_shared_state_up"));
}

/// Answers come, too late for any request. What pods tell each other still arrives.
#[tokio::test]
async fn a_slow_one_is_not_waited_for() {
    let mut fleet = Fleet::start().await;
    fleet.line.delay(ms(250), ms(250));
    fleet.tools.serve(&fleet.pods).await;
    for pod in &fleet.pods {
        let status = pod.until_status(|status| status["shared_state"]["slow"] == true).await;
        assert_eq!(status["shared_state"]["up"], true);
    }
    fleet.is_well().await;
    fleet.line.restore();
    for pod in &fleet.pods {
        pod.until_status(|status| status["shared_state"]["slow"] == false).await;
    }
    fleet.is_well().await;
    for pod in &fleet.pods {
        assert_eq!((count(pod, SLOW), count(pod, QUICK_AGAIN)), (1, 1), "{}", pod.stderr.text());
    }
    fleet.has_logged(0);
}

/// The process stands still, or its machine does.
#[tokio::test]
async fn c098_a_mute_one_is_waited_for_by_the_first_few_calls_alone() {
    let mut fleet = Fleet::start().await;
    fleet.lives_through(async |fleet| fleet.redis.pause(), async |fleet| fleet.redis.resume()).await;
}

/// No byte comes through, and no end of the connection either.
#[tokio::test]
async fn a_silent_line_is_waited_for_by_the_first_few_calls_alone() {
    let mut fleet = Fleet::start().await;
    fleet.lives_through(async |fleet| fleet.line.mute(), async |fleet| fleet.line.restore()).await;
}

/// What pods say is heard there, and no answer comes back.
#[tokio::test]
async fn a_line_that_is_silent_one_way_is_waited_for_by_the_first_few_calls_alone() {
    let mut fleet = Fleet::start().await;
    fleet.lives_through(async |fleet| fleet.line.mute_answers(), async |fleet| fleet.line.restore()).await;
}

#[tokio::test]
async fn c099_one_that_refuses_connections_is_found_when_it_takes_them_again() {
    let mut fleet = Fleet::start().await;
    let refuse = async |fleet: &mut Fleet| {
        fleet.line.refuse().await;
        fleet.line.cut();
    };
    fleet.lives_through(refuse, async |fleet| fleet.line.restore()).await;
}

/// Connections are cut again and again, as by a balancer that is being rolled out. Each time it is back at once.
#[tokio::test]
async fn a_cut_connection_is_made_again() {
    let fleet = Fleet::start().await;
    for cuts in 1..=3 {
        fleet.line.cut();
        fleet.is_well().await;
        for pod in &fleet.pods {
            let (down, up) = (count(pod, DOWN), count(pod, UP_AGAIN));
            assert!(down <= cuts && up == down, "{}", pod.stderr.text());
        }
    }
    fleet.line.until(|tally| tally.open == fleet.pods.len()).await;
}

/// It is killed, and comes back knowing nothing. Breakers that pods have opened stay open.
#[tokio::test]
async fn one_that_comes_back_empty_is_told_anew() {
    let mut fleet = Fleet::start().await;
    let host = fleet.tools.fresh();
    for _ in 0..3 {
        fleet.pods[0].get(&format!("http://{host}/fail")).await;
    }
    for pod in &fleet.pods {
        until_cut_off(pod, &host).await;
    }
    fleet.lives_through(async |fleet| fleet.redis.kill(), async |fleet| fleet.redis.restart().await).await;
    for pod in &fleet.pods {
        assert!(is_cut_off(pod, &host).await);
    }
    // And once more, at once.
    fleet.redis.restart().await;
    fleet.is_well().await;
    for pod in &fleet.pods {
        assert!(is_cut_off(pod, &host).await);
    }
}

/// The master has become a replica under the pods' connection, as in a failover by hand.
#[tokio::test]
async fn a_read_only_one_is_down() {
    let master = RedisServer::start().await;
    let mut fleet = Fleet::start().await;
    let follow =
        |redis: &RedisServer, host: &str, port: &str| drop(redis.command(&["REPLICAOF", host, port]));
    let begin = async |fleet: &mut Fleet| follow(&fleet.redis, "127.0.0.1", &master.port().to_string());
    let errors = fleet.lives_through(begin, async |fleet| follow(&fleet.redis, "NO", "ONE")).await;
    assert!(errors.iter().all(|error| error.starts_with("ReadOnly")), "{errors:?}");
}

#[tokio::test]
async fn a_full_one_is_down() {
    let mut fleet = Fleet::start().await;
    let limit = |redis: &RedisServer, most: &str| drop(redis.command(&["CONFIG", "SET", "maxmemory", most]));
    let begin = async |fleet: &mut Fleet| limit(&fleet.redis, "1");
    let errors = fleet.lives_through(begin, async |fleet| limit(&fleet.redis, "0")).await;
    assert!(errors.iter().all(|error| error.contains("OOM") || error.contains("memory")), "{errors:?}");
}

/// Somebody empties it, scripts and all. It is not down, so there is nothing to say; nobody is forgotten for long.
#[tokio::test]
async fn an_emptied_one_is_filled_again_and_nobody_notices() {
    let fleet = Fleet::start().await;
    let host = fleet.tools.fresh();
    for _ in 0..3 {
        fleet.pods[0].get(&format!("http://{host}/fail")).await;
    }
    for pod in &fleet.pods {
        until_cut_off(pod, &host).await;
    }
    for _ in 0..3 {
        fleet.redis.command(&["FLUSHALL"]);
        fleet.redis.command(&["SCRIPT", "FLUSH"]);
        fleet.is_well().await;
    }
    for pod in &fleet.pods {
        assert!(is_cut_off(pod, &host).await);
        pod.until_status(|status| status["shared_state"]["pods"] == fleet.pods.len()).await;
    }
    fleet.has_logged(0);
}

/// A server that does not know a script is told it within the same call (C097).
#[tokio::test]
async fn c097_a_script_that_is_forgotten_is_sent_again_in_the_same_call() {
    let fleet = Fleet::start().await;
    let (pod, host) = (&fleet.pods[0], fleet.tools.fresh());
    fleet.redis.command(&["SCRIPT", "FLUSH"]);
    let before = fleet.redis.calls("eval");
    assert_eq!(pod.get(&format!("http://{host}/")).await.status, 200);
    assert!(fleet.redis.calls("eval") > before);
    assert_eq!(fleet.redis.keys(&format!("hedgerow:rl:{host}")).len(), 1);
    fleet.has_logged(0);
}

/// Pods that start while it is away are ready, and join when it comes.
#[tokio::test]
async fn pods_that_start_without_it_serve_and_join_later() {
    let (mut redis, tools) = (RedisServer::start().await, Tools::start().await);
    redis.kill();
    let mut pods = Vec::new();
    for _ in 0..2 {
        pods.push(HedgerowProcess::start(&policy(&redis.url())).await);
    }
    tools.serve(&pods).await;
    for pod in &pods {
        until_down(pod).await;
    }
    redis.restart().await;
    for pod in &pods {
        until_up(pod).await;
    }
    tools.are_guarded_together(&pods).await;
    for pod in &pods {
        assert_eq!((count(pod, DOWN), count(pod, UP_AGAIN)), (1, 1), "{}", pod.stderr.text());
    }
}

/// Pods ask for more than there is, before, while and after it is away: never is more called than the rate allows, nor
/// does the rate go unused.
#[tokio::test]
async fn a_shared_rate_is_kept_to_without_it() {
    let (mut redis, tools) = (RedisServer::start().await, Tools::start().await);
    let rate = "rate_limit: { rate: 50/s, burst: 10, shared: true }";
    let policy = policy(&redis.url()).replace("rate_limit: { rate: 1000/s, burst: 100, shared: true }", rate);
    assert!(policy.contains(rate));
    let pods = [HedgerowProcess::start(&policy).await, HedgerowProcess::start(&policy).await];
    for pod in &pods {
        pod.until_status(|status| status["shared_state"]["pods"] == pods.len()).await;
    }
    let (host, began) = (tools.fresh(), Instant::now());
    let mut passed = Vec::new();
    for phase in 0..3 {
        match phase {
            0 => {}
            1 => redis.kill(),
            _ => redis.restart().await,
        }
        let (before, end) = (tools.upstream.count(), Instant::now() + ms(2500));
        let hammer = async |pod: &HedgerowProcess| {
            while Instant::now() < end {
                let mut agent = pod.agent().await;
                let answer = agent.request("GET", &format!("http://{host}/"), &[HURRY], b"").await;
                // On a loaded machine the answer may be late.
                assert!(matches!(answer.status, 200 | 429 | 504), "{answer:?}");
            }
        };
        tokio::join!(hammer(&pods[0]), hammer(&pods[1]));
        passed.push(tools.upstream.count() - before);
        // Both pods have a token of their own whatever their share, and each may have one more that is new.
        let due = 10.0 + 4.0 + 50.0 * began.elapsed().as_secs_f64();
        assert!(tools.upstream.count() as f64 <= due, "{passed:?} of {due}");
    }
    assert!(passed.iter().all(|passed| *passed >= 15), "{passed:?}");
}

/// A policy with this URL is lived with, and its correction takes effect. Returns what was said to be wrong.
async fn is_wrong_until_corrected(url: &str, redis: &RedisServer) -> String {
    let tools = Tools::start().await;
    let mut pods = Vec::new();
    for _ in 0..2 {
        pods.push(HedgerowProcess::start(&policy(url)).await);
    }
    tools.serve(&pods).await;
    let mut error = String::new();
    for pod in &pods {
        error = until_down(pod).await;
        // As often as it is tried, it is told once.
        assert_eq!(count(pod, DOWN), 1, "{}", pod.stderr.text());
    }
    tools.serve(&pods).await;
    for pod in &mut pods {
        pod.policy.replace(&policy(&redis.url()));
        until_up(pod).await;
        assert_eq!(count(pod, DOWN), 1, "{}", pod.stderr.text());
    }
    tools.are_guarded_together(&pods).await;
    for pod in &pods {
        for text in [pod.stderr.text(), pod.stdout.text(), pod.status().await.to_string()] {
            assert!(!text.contains("secret"), "{text}");
        }
    }
    error
}

#[tokio::test]
async fn a_wrong_password_is_told_without_it() {
    let redis = RedisServer::with().password("right-secret").start().await;
    let url = format!("redis://:wrong-secret@{}", redis.address());
    let error = is_wrong_until_corrected(&url, &redis).await;
    assert!(error.contains("WRONGPASS") || error.to_lowercase().contains("password"), "{error}");

    let error = is_wrong_until_corrected(&format!("redis://{}", redis.address()), &redis).await;
    assert!(error.contains("NOAUTH") || error.to_lowercase().contains("authentication"), "{error}");
}

#[tokio::test]
async fn a_user_who_may_not_is_down_without_a_secret_told() {
    let rules = "~other:* &* +@all";
    let redis = RedisServer::with().user("hedge", "secret", rules).start().await;
    redis.command(&["ACL", "SETUSER", "all", "on", ">secret", "~*", "&*", "+@all"]);
    let wrong = redis.url();
    let tools = Tools::start().await;
    let mut pod = HedgerowProcess::start(&policy(&wrong)).await;
    tools.serve(std::slice::from_ref(&pod)).await;
    let error = until_down(&pod).await;
    assert!(error.contains("NOPERM") || error.to_lowercase().contains("permission"), "{error}");
    pod.policy.replace(&policy(&wrong.replace("hedge:", "all:")));
    until_up(&pod).await;
    assert!(!pod.stderr.text().contains("secret"));
}

#[tokio::test]
async fn a_database_that_is_not_there_is_down() {
    let redis = RedisServer::with().databases(2).start().await;
    let error = is_wrong_until_corrected(&format!("{}/7", redis.url()), &redis).await;
    assert!(error.contains("DB index") || error.to_lowercase().contains("database"), "{error}");
    // One that is there is used, and no other.
    let pod = HedgerowProcess::start(&policy(&format!("{}/1", redis.url()))).await;
    until_up(&pod).await;
    let mut connection = redis.connect();
    connection.command(&["SELECT", "1"]);
    assert_eq!(connection.command(&["KEYS", "hedgerow:pods"]).texts(), ["hedgerow:pods"]);
}

/// A port where something else is, which says the same to everybody.
struct Stranger {
    address: SocketAddr,
    serving: JoinHandle<()>,
}

impl Stranger {
    /// Says this at once and again after each pause.
    async fn saying(word: &'static [u8], pause: Duration) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("loopback can be bound");
        let address = listener.local_addr().expect("a bound listener has an address");
        let serving = tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                tokio::spawn(async move {
                    while socket.write_all(word).await.is_ok() {
                        sleep(pause).await;
                    }
                });
            }
        });
        Self { address, serving }
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

#[tokio::test]
async fn a_server_of_something_else_is_down() {
    let redis = RedisServer::start().await;
    let http = Upstream::answering(|_| Answer::ok("a page")).await;
    is_wrong_until_corrected(&format!("redis://{}", http.address()), &redis).await;
}

#[tokio::test]
async fn a_server_that_talks_nonsense_is_down() {
    let words = [
        &b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"[..],
        b"220 mail.test ESMTP ready\r\n",
        b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00",
        b"%1000000000\r\n",
        b"*2147483647\r\n",
        b"$536870912\r\n",
        b"-ERR no\r\n",
        &[b'x'; 64 << 10],
    ];
    are_down(&words).await;
}

/// Pods whose port answers like this serve, and say that it is of no use.
async fn are_down(words: &[&'static [u8]]) {
    let tools = Tools::start().await;
    join_all(words.iter().map(async |word| {
        let stranger = Stranger::saying(word, ms(20)).await;
        let pod = HedgerowProcess::start(&policy(&format!("redis://{}", stranger.address))).await;
        tools.serve(std::slice::from_ref(&pod)).await;
        until_down(&pod).await;
        tools.serve(std::slice::from_ref(&pod)).await;
        assert_eq!((count(&pod, DOWN), count(&pod, UP_AGAIN)), (1, 0), "{}", pod.stderr.text());
    }))
    .await;
}

/// Keys that somebody else has put where ours should be. Those hosts' guards are each pod's own; all others are shared.
#[tokio::test]
async fn a_key_of_a_foreign_type_is_a_trouble_of_its_own_host_alone() {
    for kind in ["cb", "rl"] {
        let fleet = Fleet::start().await;
        let host = fleet.tools.fresh();
        let key = format!("hedgerow:{kind}:{host}");
        fleet.redis.command(&["SET", &key, "foreign"]);
        for pod in &fleet.pods {
            for _ in 0..20 {
                assert_eq!(pod.get(&format!("http://{host}/")).await.status, 200);
            }
        }
        for _ in 0..3 {
            assert_eq!(fleet.pods[0].get(&format!("http://{host}/fail")).await.status, 503);
        }
        assert!(is_cut_off(&fleet.pods[0], &host).await);
        fleet.is_well().await;
        fleet.has_logged(0);
        for pod in &fleet.pods {
            assert!(count(pod, UNUSABLE) <= 1, "{}", pod.stderr.text());
        }
        // It is not ours to take away.
        assert_eq!(fleet.redis.command(&["GET", &key]).text(), "foreign");
        if kind == "cb" {
            let told = fleet.pods[0].stderr.until(|line| line.contains(UNUSABLE)).await;
            assert!(told.contains(&host), "{told}");
        }
    }
}

/// Without the one key that all have in common there is nothing shared.
#[tokio::test]
async fn a_list_of_pods_of_a_foreign_type_is_down() {
    let mut fleet = Fleet::start().await;
    let spoil = async |fleet: &mut Fleet| {
        fleet.redis.command(&["SET", "hedgerow:pods", "foreign"]);
        // Found out with the next sign of life, for which a new connection is an occasion.
        fleet.line.cut();
    };
    let mend = async |fleet: &mut Fleet| drop(fleet.redis.command(&["DEL", "hedgerow:pods"]));
    fleet.lives_through(spoil, mend).await;
}

/// What another version may have left under the same keys: fields that are missing, of other names, or no numbers.
#[tokio::test]
async fn values_of_another_version_are_read_as_none() {
    let fleet = Fleet::start().await;
    let breakers: [&[&str]; 4] = [
        &["state", "ajar", "since", "yesterday", "open_until_ts", "soon", "reopens", "many"],
        &["state", "", "e:", "", "e:other", "nonsense", "e:another", "99999999999999999999:7"],
        &["opened_at", "1700000000", "failures", "[1,2,3]", "version", "2"],
        &[
            "state",
            "closed",
            "since",
            "1.5",
            "open_until_ts",
            "",
            "failure_count",
            "a",
            "last_failure_ts",
            "b",
        ],
    ];
    let rates: [&[&str]; 5] = [
        &["tokens", "many", "ts", "now", "sum", "all", "need", "nothing"],
        &["tokens", "-1e9", "ts", "-1", "sum", "-7", "need", "-7"],
        &["p:", "", "p:other", "nonsense", "p:another", "0.5 x y", "p:third", "1"],
        &["bucket", "7", "last_refill", "1700000000", "version", "2"],
        &["tokens", "nan", "ts", "inf", "sum", "nan", "need", "nan"],
    ];
    let spoiled =
        breakers.iter().map(|fields| ("cb", fields)).chain(rates.iter().map(|fields| ("rl", fields)));
    for (kind, fields) in spoiled {
        let host = fleet.tools.fresh();
        let key = format!("hedgerow:{kind}:{host}");
        fleet.redis.command(&[&["HSET", &key][..], fields].concat());
        for pod in &fleet.pods {
            for nth in 0..10 {
                let began = Instant::now();
                let answer = pod.get(&format!("http://{host}/")).await;
                assert_eq!(answer.status, 200, "{fields:?}: {answer:?}");
                assert!(began.elapsed() < ms(5000), "call {nth} with {fields:?} took {:?}", began.elapsed());
            }
        }
        for _ in 0..3 {
            assert_eq!(fleet.pods[0].get(&format!("http://{host}/fail")).await.status, 503, "{fields:?}");
        }
        for pod in &fleet.pods {
            until_cut_off(pod, &host).await;
        }
        let state = fleet.redis.command(&["HGET", &format!("hedgerow:cb:{host}"), "state"]);
        assert_eq!(state, Reply::Text(b"open".to_vec()), "{fields:?}");
    }
    fleet.is_well().await;
    fleet.has_logged(0);
    for pod in &fleet.pods {
        assert_eq!(count(pod, UNUSABLE), 0, "{}", pod.stderr.text());
    }
}
