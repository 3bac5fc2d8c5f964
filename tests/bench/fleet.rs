//! What pods that share their state promise: one Redis, eight proxies, and a provider that turns bad.
//!
//! **Opening.** Two of the pods meet failures, the others' calls go well, so whether these are refused is the fleet's doing
//! alone. From the failure that makes the quorum to the first refusal of the last pod: at most 200 ms, the median
//! of 20 upstreams. Once a pod has refused, none of its calls may reach the provider but the fleet's probes, one
//! for each wait.
//!
//! **Rate.** 200 a second shared by eight pods under 2,000 calls a second: 190 to 205 reach the provider.
//!
//! **Cost.** What Redis does for 1,000 calls of a fleet that is well: at most 20 commands. Those that scripts run count.
//!
//! **Times.** A proxy whose breaker and rate are shared and one that shares nothing, under the same load at the same
//! time: the 99th percentile of the one is at most 1.05 of the other's. Then Redis is stopped (SIGSTOP) under that
//! load: no call fails, it is at most 1.2, and 2 s after Redis goes on `/status` says that all is well. Times count from
//! when a call was due.
//!
//! `cargo bench --bench fleet -- --help` tells the settings. The exit code is 1 when a bar was missed. It needs
//! `redis-server`.

mod rig;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use clap::Parser;
use futures_util::future::try_join_all;
use http::{Response, StatusCode};
use http_body_util::Full;
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use rig::{Agent, Cores, Line, Others, Proxy, Server, Times, conclude, free_ports, serve};

/// Of all proxies here; what follows it is the section's own.
const COMMON: &str = "
threads: 1
listen: { proxy: 127.0.0.1:@PROXY@, admin: 127.0.0.1:@ADMIN@ }
telemetry: { access_log: off }
";

const PODS: usize = 8;
/// Of the pods, those whose calls fail.
const SICK: usize = 2;
/// Failures that open a pod's breaker.
const FAILURES: usize = 5;
const OPEN_FOR: Duration = Duration::from_secs(1);
/// How many of these waits are watched.
const WAITS: usize = 2;
/// For how long times are taken at a stretch.
const ROUND: Duration = Duration::from_secs(4);
/// How often Redis is stopped, for nearly so long: with nothing to ask, a pod finds out by its next sign of life, which
/// it gives every ten seconds.
const STOPS: usize = 3;
const STOP: Duration = Duration::from_secs(14);
/// Shared calls a second.
const RATE: f64 = 200.0;

/// Measures a fleet.
#[derive(Parser)]
struct Arguments {
    /// Upstreams that turn bad, one after the other.
    #[arg(long, env = "FLEET_UPSTREAMS", default_value_t = 20)]
    upstreams: usize,
    /// Seconds in which the rate and the commands are counted.
    #[arg(long, env = "FLEET_SECS", default_value_t = 20)]
    secs: u64,
    /// Calls a second while times are measured.
    #[arg(long, env = "FLEET_LOAD", default_value_t = 1_500)]
    load: u32,
    /// Stretches of four seconds in which times are taken.
    #[arg(long, env = "FLEET_ROUNDS", default_value_t = 12)]
    rounds: usize,
    /// What cargo says to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    let (arguments, cores) = (Arguments::parse(), Cores::choose());
    rig::run(cores, measure(&arguments, cores))
}

async fn measure(arguments: &Arguments, cores: Cores) -> io::Result<ExitCode> {
    let redis = Redis::start(cores).await?;
    let mut lines = opening(arguments, &redis, cores).await?;
    lines.push(rate(arguments, &redis, cores).await?);
    lines.push(cost(arguments, &redis, cores).await?);
    lines.extend(times(arguments, &redis, cores).await?);
    Ok(conclude(&format!("{PODS} proxies that share their state"), cores, &lines))
}

/// A server of the benchmark's own.
struct Redis {
    server: Server,
    _folder: TempDir,
}

impl Redis {
    async fn start(cores: Cores) -> io::Result<Self> {
        let (folder, [address, _]) = (TempDir::new()?, free_ports()?);
        let port = address.port().to_string();
        let arguments = ["--port", &port, "--bind", "127.0.0.1", "--save", "", "--dir"];
        let mut arguments: Vec<_> = arguments.iter().map(AsRef::as_ref).collect();
        arguments.push(folder.path().as_os_str());
        let server = Server::start(Path::new("redis-server"), &arguments, address, cores.load).await?;
        Ok(Self { server, _folder: folder })
    }

    fn policy(&self, rest: &str) -> String {
        format!("{COMMON}shared_state: {{ redis: \"redis://{}\" }}\n{rest}", self.server.address)
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        let process = i32::try_from(self.server.id()).ok().and_then(Pid::from_raw);
        Ok(kill_process(process.ok_or_else(|| io::Error::other("no process"))?, signal)?)
    }

    /// Commands that it has carried out.
    async fn commands(&self) -> io::Result<u64> {
        let mut stream = BufReader::new(TcpStream::connect(self.server.address).await?);
        stream.write_all(b"INFO stats\r\n").await?;
        let mut line = String::new();
        loop {
            line.clear();
            if stream.read_line(&mut line).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if let Some(count) = line.strip_prefix("total_commands_processed:") {
                return count.trim().parse().map_err(io::Error::other);
            }
        }
    }
}

/// A provider whose path says which pod calls.
#[derive(Clone, Default)]
struct Provider {
    /// Which pod's calls reached it, and when.
    seen: Arc<Mutex<Vec<(usize, Instant)>>>,
    /// The calls of so many pods, the first ones, fail.
    sick: Arc<AtomicUsize>,
}

impl Provider {
    async fn serve(&self) -> io::Result<SocketAddr> {
        let provider = self.clone();
        serve(move |path| {
            let pod = path[1..].parse().unwrap_or(0);
            provider.seen.lock().push((pod, Instant::now()));
            let mut answer = Response::new(Full::new(Bytes::from_static(b"{}")));
            if pod < provider.sick.load(Ordering::Relaxed) {
                *answer.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            }
            async { answer }
        })
        .await
    }

    fn has_seen(&self, pod: usize) -> bool {
        self.seen.lock().iter().any(|(by, _)| *by == pod)
    }
}

async fn pods(policy: &str, cores: Cores) -> io::Result<Vec<Proxy>> {
    let pods = try_join_all((0..PODS).map(|_| Proxy::start(policy, cores))).await?;
    until(Duration::from_secs(30), "the pods have not counted each other", async || {
        let mut all = true;
        for pod in &pods {
            let state = shared_state(pod).await?;
            all &= state["up"] == true;
        }
        Ok(all)
    })
    .await?;
    Ok(pods)
}

/// What `/status` tells of it.
async fn shared_state(proxy: &Proxy) -> io::Result<Value> {
    let mut stream = TcpStream::connect(proxy.admin()).await?;
    stream.write_all(b"GET /status HTTP/1.1\r\nHost: admin\r\nConnection: close\r\n\r\n").await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let status: Value = serde_json::from_str(body).map_err(io::Error::other)?;
    Ok(status["shared_state"].clone())
}

/// Looks every few milliseconds.
async fn until(
    patience: Duration,
    complaint: &str,
    mut look: impl AsyncFnMut() -> io::Result<bool>,
) -> io::Result<Duration> {
    let began = Instant::now();
    while !look().await? {
        if began.elapsed() > patience {
            return Err(io::Error::other(complaint.to_owned()));
        }
        sleep(Duration::from_millis(5)).await;
    }
    Ok(began.elapsed())
}

// --- opening ---

/// What came of one upstream that turned bad.
struct Opened {
    /// From the failure that made the quorum to the first refusal of the last pod.
    took: Duration,
    /// Calls that reached the provider through a pod that had refused one.
    reached: usize,
    /// Those that failed before any was refused.
    failed: usize,
}

async fn opening(arguments: &Arguments, redis: &Redis, cores: Cores) -> io::Result<Vec<Line>> {
    let breaker = format!(
        "defaults: {{ hedge: off, breaker: {{ consecutive_failures: {FAILURES}, open_for: {OPEN_FOR:?}, \
         max_open_for: {OPEN_FOR:?}, shared: true }} }}\n"
    );
    let pods = pods(&redis.policy(&breaker), cores).await?;
    let mut opened = Vec::new();
    for _ in 0..arguments.upstreams {
        opened.push(open_one(&pods).await?);
    }
    let took = Times::of(opened.iter().map(|one| one.took));
    let most = |of: fn(&Opened) -> usize| opened.iter().map(of).max().unwrap_or_default();
    let reached = most(|one| one.reached);
    Ok(vec![
        Line::tell(format!("last of {PODS} open after the quorum, of {}", opened.len()), took.to_string())
            .must("p50 ≤ 200 ms", took.quantile(0.5) <= Duration::from_millis(200)),
        Line::tell(format!("calls through while open for {WAITS} waits"), format!("{reached} at most"))
            .must(format!("≤ {WAITS}, the probes"), reached <= WAITS),
        Line::tell("calls that failed until then", format!("{} at most", most(|one| one.failed))),
    ])
}

async fn open_one(pods: &[Proxy]) -> io::Result<Opened> {
    let provider = Provider::default();
    let upstream = provider.serve().await?;
    let refused = Arc::new(Mutex::new(HashMap::new()));
    let mut calls = JoinSet::new();
    for (pod, proxy) in pods.iter().enumerate() {
        calls.spawn(call_on(pod, Agent::connect(proxy.address()).await?, upstream, refused.clone()));
    }
    let patience = Duration::from_secs(10);
    until(patience, "calls do not arrive", async || Ok((0..PODS).all(|pod| provider.has_seen(pod)))).await?;
    let turned = Instant::now();
    provider.sick.store(SICK, Ordering::Relaxed);
    until(patience, "a pod does not refuse", async || Ok(refused.lock().len() == PODS)).await?;
    // Whoever probes now finds it bad.
    provider.sick.store(PODS, Ordering::Relaxed);
    sleep(OPEN_FOR.mul_f64(WAITS as f64 + 0.5)).await;
    calls.shutdown().await;

    let (seen, refused) = (provider.seen.lock(), refused.lock());
    let calls_of = |pod| seen.iter().filter(move |(by, at)| *by == pod && *at >= turned).map(|(_, at)| *at);
    let quorum = (0..SICK).filter_map(|pod| calls_of(pod).nth(FAILURES - 1)).max();
    let (first, last) = (refused.values().min(), refused.values().max());
    let (Some(quorum), Some(first), Some(last)) = (quorum, first, last) else {
        return Err(io::Error::other("no quorum was made"));
    };
    Ok(Opened {
        took: last.saturating_duration_since(quorum),
        reached: seen.iter().filter(|(by, at)| *at > refused[by]).count(),
        failed: (0..SICK).flat_map(calls_of).filter(|at| at < first).count(),
    })
}

/// Calls again and again, and notes the first refusal.
async fn call_on(
    pod: usize,
    mut agent: Agent,
    upstream: SocketAddr,
    refused: Arc<Mutex<HashMap<usize, Instant>>>,
) -> io::Result<()> {
    let path = format!("/{pod}");
    loop {
        if agent.ask(upstream, &path).await?.0 == StatusCode::SERVICE_UNAVAILABLE {
            refused.lock().entry(pod).or_insert_with(Instant::now);
        }
        sleep(Duration::from_millis(2)).await;
    }
}

/// How many calls of a shared rate reach the provider.
async fn rate(arguments: &Arguments, redis: &Redis, cores: Cores) -> io::Result<Line> {
    const AT_ONCE: usize = 25;
    const OFFERED: f64 = 2_000.0;
    let stages = format!(
        "defaults: {{ hedge: off, breaker: off, bulkhead: {{ max_concurrent: 1000 }}, deadline: {{ default: 100ms }}, \
         rate_limit: {{ rate: {RATE}/s, burst: 10, shared: true }} }}\n"
    );
    let pods = pods(&redis.policy(&stages), cores).await?;
    let provider = Provider::default();
    let upstream = provider.serve().await?;
    let mut calls = JoinSet::new();
    let between = Duration::from_secs_f64((PODS * AT_ONCE) as f64 / OFFERED);
    for (number, proxy) in pods.iter().flat_map(|pod| [pod; AT_ONCE]).enumerate() {
        let mut agent = Agent::connect(proxy.address()).await?;
        let mut due = Instant::now() + between.mul_f64(number as f64 / (PODS * AT_ONCE) as f64);
        calls.spawn(async move {
            loop {
                sleep_until(due).await;
                due += between;
                agent.ask(upstream, "/0").await?;
            }
        });
    }
    // The first shares are small until each pod has told its need.
    sleep(Duration::from_secs(3)).await;
    let (before, began) = (provider.seen.lock().len(), Instant::now());
    sleep(Duration::from_secs(arguments.secs)).await;
    let passed = (provider.seen.lock().len() - before) as f64 / began.elapsed().as_secs_f64();
    ended(&mut calls)?;
    let what = format!("calls a second of {RATE} shared, {OFFERED} offered, over {} s", arguments.secs);
    Ok(Line::tell(what, format!("{passed:.1}"))
        .must("190 to 205", (0.95 * RATE..=1.025 * RATE).contains(&passed)))
}

/// What Redis has to do for a fleet that is well.
async fn cost(arguments: &Arguments, redis: &Redis, cores: Cores) -> io::Result<Line> {
    const LOAD: u32 = 800;
    let pods = pods(&redis.policy(SHARING), cores).await?;
    let upstream = Provider::default().serve().await?;
    let mut calls = JoinSet::new();
    for proxy in &pods {
        calls.spawn(load(
            proxy.address(),
            upstream,
            LOAD / PODS as u32,
            Duration::from_secs(5 + arguments.secs),
        ));
    }
    sleep(Duration::from_secs(4)).await;
    let (before, began) = (redis.commands().await?, Instant::now());
    sleep(Duration::from_secs(arguments.secs)).await;
    // The question is not of the fleet.
    let commands = redis.commands().await? - before - 1;
    let per_thousand = 1_000.0 * commands as f64 / (f64::from(LOAD) * began.elapsed().as_secs_f64());
    while let Some(done) = calls.join_next().await {
        done.map_err(io::Error::other)??;
    }
    let what = format!("commands of Redis for 1,000 calls, {LOAD} a second");
    Ok(Line::tell(what, format!("{per_thousand:.1}")).must("≤ 20", per_thousand <= 20.0))
}

/// What is shared where times are measured. Each call is for something new, so all of them go their whole way.
const SHARING: &str = "defaults: { hedge: off, bulkhead: { max_concurrent: 1000 }, breaker: { shared: true }, \
                       rate_limit: { rate: 100000/s, shared: true } }\n";
const ALONE: &str = "defaults: { hedge: off, bulkhead: { max_concurrent: 1000 }, breaker: {}, \
                     rate_limit: { rate: 100000/s } }\n";

async fn times(arguments: &Arguments, redis: &Redis, cores: Cores) -> io::Result<Vec<Line>> {
    let sharing = Proxy::start(&redis.policy(SHARING), cores).await?;
    let alone = Proxy::start(&format!("{COMMON}{ALONE}"), cores).await?;
    let upstream = Provider::default().serve().await?;
    let others = Others::watch(&sharing)?;
    // At the same time, so that whatever else happens on the machine happens to both.
    let both = async |length| {
        let run = |proxy: &Proxy| load(proxy.address(), upstream, arguments.load / 2, length);
        let (without, with) = tokio::join!(run(&alone), run(&sharing));
        Ok::<_, io::Error>((without?, with?))
    };
    both(ROUND).await?;
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..arguments.rounds {
        let (more_without, more_with) = both(ROUND).await?;
        without.extend(more_without);
        with.extend(more_with);
    }
    let mut lines = Vec::from(compare("beside it, sharing breaker and rate", without, with, 1.05));

    let (mut without, mut with) = (Vec::new(), Vec::new());
    let (mut is_told, mut recoveries) = (true, Vec::new());
    for _ in 0..STOPS {
        let stop = async {
            sleep(ROUND / 8).await;
            redis.signal(Signal::STOP)
        };
        // A call that fails is an error here.
        let (times, stopped) = tokio::join!(both(STOP), stop);
        let ((more_without, more_with), ()) = (times?, stopped?);
        without.extend(more_without);
        with.extend(more_with);
        is_told &= shared_state(&sharing).await?["up"] == false;
        redis.signal(Signal::CONT)?;
        let recovery = until(Duration::from_secs(10), "it does not come up again", async || {
            let state = shared_state(&sharing).await?;
            Ok(state["up"] == true && state["slow"] == false)
        });
        recoveries.push(recovery.await?);
    }
    lines.extend(compare("beside it, while Redis is stopped, no call failed", without, with, 1.2));
    let recoveries = Times::of(recoveries.into_iter());
    lines.extend([
        Line::tell("what /status says of it", if is_told { "down" } else { "up" }).must("down", is_told),
        Line::tell(format!("up and quick again, of {STOPS}"), recoveries.to_string())
            .must("≤ 2 s", recoveries.quantile(1.0) <= Duration::from_secs(2)),
        others.tell(&sharing)?,
    ]);
    Ok(lines)
}

fn compare(what: &str, without: Vec<Duration>, with: Vec<Duration>, most: f64) -> [Line; 3] {
    let (without, with) = (Times::of(without.into_iter()), Times::of(with.into_iter()));
    let ratio = with.quantile(0.99).as_secs_f64() / without.quantile(0.99).as_secs_f64();
    [
        Line::tell("a proxy that shares nothing", without.to_string()),
        Line::tell(what, with.to_string()),
        Line::tell("p99 of it", format!("{ratio:.2}")).must(format!("≤ {most}"), ratio <= most),
    ]
}

/// Calls at even times; how long each took from when it was due. One that does not succeed is an error.
async fn load(
    proxy: SocketAddr,
    upstream: SocketAddr,
    per_second: u32,
    length: Duration,
) -> io::Result<Vec<Duration>> {
    const AT_ONCE: u32 = 32;
    let mut calls = JoinSet::new();
    let began = Instant::now();
    for number in 0..AT_ONCE {
        let mut agent = Agent::connect(proxy).await?;
        calls.spawn(async move {
            let (mut times, mut due) = (Vec::new(), began + Duration::from_secs(number.into()) / per_second);
            while due < began + length {
                sleep_until(due).await;
                agent.get(upstream, "/0").await?;
                times.push(due.elapsed());
                due += Duration::from_secs(AT_ONCE.into()) / per_second;
            }
            Ok::<_, io::Error>(times)
        });
    }
    let mut times = Vec::new();
    while let Some(done) = calls.join_next().await {
        times.extend(done.map_err(io::Error::other)??);
    }
    Ok(times)
}

/// Calls that were to go on must not have ended: the first that did says why.
fn ended(calls: &mut JoinSet<io::Result<()>>) -> io::Result<()> {
    match calls.try_join_next() {
        None => Ok(()),
        Some(done) => done.map_err(io::Error::other)?,
    }
}
