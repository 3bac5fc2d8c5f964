//! Coalescing under a storm: how many calls the upstream still sees, and what waiting for another one's answer
//! costs beside the waiting.
//!
//! Calls come as a Poisson process of `q` a second, whatever happens to earlier ones, each for one of `K` keys
//! that are equally likely; the upstream takes `L` for each. A key that is in flight for `L` and then waits
//! `K/q` for its next call is asked for every `L + K/q`, so the upstream should see `K / (L + K/q)`, which is
//! `q / (1 + qL/K)`: 120 a second instead of 1,500. It must see that within 2 %, `L` being what it really took.
//! More would be calls that flew alone, fewer would be calls that were given an answer older than themselves.
//!
//! The proxy's own time for a call is what it took less what was left of its flight at the upstream when the call
//! was sent. It must be below 5 ms at the 99th percentile, and so must be what the storm adds at that percentile to
//! calls to another tool, which is not coalesced. No call may fail or get another key's answer.
//!
//! Keys would all begin to fly in the first moment and stay in step for many flights, of which the measured time
//! would hold one more or less. So each key joins at its own time of the first cycle, as if the storm had
//! always been there; that time is not measured.
//!
//! `cargo bench --bench coalesce -- --help` tells the settings. The exit code is 1 when a bar was missed.

mod rig;

use std::io;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use clap::Parser;
use http::Response;
use http_body_util::Full;
use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use rig::{Agent, Cores, Line, Others, Proxy, Times, conclude, serve};

/// What a call may cost beside the waiting.
const OWN: Duration = Duration::from_millis(5);

const POLICY: &str = "
threads: @THREADS@
listen: { proxy: 127.0.0.1:@PROXY@, admin: 127.0.0.1:@ADMIN@ }
telemetry: { access_log: off }
defaults: { hedge: off, bulkhead: { max_concurrent: 100000 } }
upstreams:
  stormed: { hosts: [\"@STORMED@\"], coalesce: true }
";

/// Measures coalescing under a storm of equal calls.
#[derive(Parser)]
struct Arguments {
    /// Calls a second (q).
    #[arg(long, env = "COALESCE_RATE", default_value_t = 1500.0)]
    rate: f64,
    /// Keys, all equally likely (K).
    #[arg(long, env = "COALESCE_KEYS", default_value_t = 65)]
    keys: usize,
    /// Seconds that the upstream takes (L).
    #[arg(long, env = "COALESCE_LATENCY", default_value_t = 0.5)]
    latency: f64,
    /// Seconds that are measured.
    #[arg(long, env = "COALESCE_SECS", default_value_t = 10.0)]
    secs: f64,
    /// Calls a second to the other tool.
    #[arg(long, env = "COALESCE_BESIDE", default_value_t = 100.0)]
    beside: f64,
    /// Threads of the proxy.
    #[arg(long, env = "COALESCE_THREADS", default_value_t = 1)]
    threads: usize,
    /// What cargo says to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    let (arguments, cores) = (Arguments::parse(), Cores::choose());
    rig::run(cores, measure(&arguments, cores))
}

async fn measure(arguments: &Arguments, cores: Cores) -> io::Result<ExitCode> {
    let flights = Flights::default();
    let latency = Duration::from_secs_f64(arguments.latency);
    let stormed = serve({
        let flights = flights.clone();
        move |path| {
            let flights = flights.clone();
            async move { flights.fly(path, latency).await }
        }
    })
    .await?;
    let other = serve(|path| async move { Response::new(Full::new(path.into())) }).await?;
    let policy = POLICY
        .replace("@THREADS@", &arguments.threads.to_string())
        .replace("@STORMED@", &stormed.to_string());
    let proxy = Proxy::start(&policy, cores).await?;
    let (fresh, others) = (proxy.resident()?, Others::watch(&proxy)?);

    let cycle = Duration::from_secs_f64(arguments.latency + arguments.keys as f64 / arguments.rate);
    let (start_up, measured) = (cycle * 2, Duration::from_secs_f64(arguments.secs));
    let poisson = || Poisson { rate: arguments.beside, at: Duration::ZERO, end: start_up + measured };
    let call_other = || poisson().map(|at| Due { at, path: "/".into() });

    let calm = open_loop(proxy.address(), other, call_other()).await.after(start_up);

    let storm = Poisson { rate: arguments.rate, ..poisson() }.filter_map(|at| {
        let key = fastrand::usize(..arguments.keys);
        let joins = cycle.mul_f64(key as f64 / arguments.keys as f64);
        (at >= joins).then(|| Due { at, path: format!("/{key}") })
    });
    let cpu_before = proxy.cpu()?;
    let mut peak = fresh;
    let (storm, beside) = tokio::select! {
        both = async {
            tokio::join!(
                open_loop(proxy.address(), stormed, storm),
                open_loop(proxy.address(), other, call_other()),
            )
        } => both,
        error = watch_memory(&proxy, &mut peak) => return Err(error),
    };
    let calls = storm.calls.len() + storm.failed + beside.calls.len();
    let cpu = (proxy.cpu()? - cpu_before) / calls as u32;
    let others = others.tell(&proxy)?;
    let (storm, beside) = (storm.after(start_up), beside.after(start_up));

    let flights = flights.0.lock();
    let span = storm.start + start_up..storm.start + start_up + measured;
    let flown: Vec<_> = flights.iter().filter(|flight| span.contains(&flight.came)).collect();
    let rate = storm.calls.len() as f64 / arguments.secs;
    let took = flown.iter().map(|flight| (flight.went - flight.came).as_secs_f64()).sum::<f64>();
    let took = took / flown.len() as f64;
    let expected = rate / (1.0 + rate * took / arguments.keys as f64);
    let seen = flown.len() as f64 / arguments.secs;
    let own: Vec<_> = storm.calls.iter().map(|call| own_time(call, &flights)).collect();
    let wrong = own.iter().filter(|own| own.is_none()).count();
    let own = Times::of(own.into_iter().flatten());
    let failed = calm.failed + storm.failed + beside.failed + wrong;
    let late = Times::of(storm.calls.iter().map(|call| call.sent - call.due));
    let (calm, beside) = (Times::of(calm.times()), Times::of(beside.times()));
    let added = beside.quantile(0.99).saturating_sub(calm.quantile(0.99));
    let lines = [
        Line::tell(
            "calls to the upstream",
            format!("{seen:.1}/s, {:.3} of q/(1+qL/K) = {expected:.1}/s", seen / expected),
        )
        .must("within 2 %", (seen / expected - 1.0).abs() <= 0.02),
        Line::tell("the proxy's own time", own.to_string()).must("p99 < 5 ms", own.quantile(0.99) < OWN),
        Line::tell("calls that failed", failed.to_string()).must("0", failed == 0),
        Line::tell("another tool, alone", calm.to_string()),
        Line::tell("another tool, in the storm", beside.to_string()).must("p99 + 5 ms at most", added <= OWN),
        Line::tell("CPU of the proxy", format!("{} us a call", cpu.as_micros())),
        Line::tell(
            "memory",
            format!("{fresh:.1} MiB fresh, {peak:.1} MiB at most, for {} connections", storm.connections),
        ),
        Line::tell("sent after they were due", late.to_string()),
        others,
    ];
    let title = format!(
        "{rate:.0} calls/s for {} keys, L = {:.1} ms, {:.0} s",
        arguments.keys,
        took * 1e3,
        arguments.secs
    );
    Ok(conclude(&title, cores, &lines))
}

/// What the upstream saw: each answer carries its index.
#[derive(Clone, Default)]
struct Flights(Arc<Mutex<Vec<Flight>>>);

struct Flight {
    path: String,
    came: Instant,
    went: Instant,
}

impl Flights {
    async fn fly(self, path: String, latency: Duration) -> Response<Full<Bytes>> {
        let came = Instant::now();
        sleep(latency).await;
        let mut flights = self.0.lock();
        flights.push(Flight { path, came, went: Instant::now() });
        Response::new(Full::new((flights.len() - 1).to_string().into()))
    }
}

/// `None` when the answer is another key's.
fn own_time(call: &Call, flights: &[Flight]) -> Option<Duration> {
    let index: usize = std::str::from_utf8(&call.body).ok()?.parse().ok()?;
    let flight = flights.get(index).filter(|flight| flight.path == call.path)?;
    let left = flight.went.saturating_duration_since(call.sent.max(flight.came));
    Some((call.answered - call.sent).saturating_sub(left))
}

/// The times of a Poisson process, up to an end.
struct Poisson {
    rate: f64,
    at: Duration,
    end: Duration,
}

impl Iterator for Poisson {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.at += Duration::from_secs_f64(-(1.0 - fastrand::f64()).ln() / self.rate);
        (self.at < self.end).then_some(self.at)
    }
}

/// A call to make.
struct Due {
    /// From the start.
    at: Duration,
    path: String,
}

/// A call that was answered.
struct Call {
    path: String,
    due: Instant,
    sent: Instant,
    answered: Instant,
    body: Vec<u8>,
}

struct Run {
    start: Instant,
    calls: Vec<Call>,
    failed: usize,
    /// Connections that were needed.
    connections: usize,
}

impl Run {
    /// Without the calls of the time in which the proxy and the storm got going. What failed counts all the same.
    fn after(mut self, start_up: Duration) -> Self {
        self.calls.retain(|call| call.due >= self.start + start_up);
        self
    }

    fn times(&self) -> impl Iterator<Item = Duration> {
        self.calls.iter().map(|call| call.answered - call.sent)
    }
}

/// Sends each call when it is due, to the millisecond that the runtime's timer counts, on an idle connection or
/// a new one.
async fn open_loop(proxy: SocketAddr, upstream: SocketAddr, calls: impl Iterator<Item = Due>) -> Run {
    let mut run = Run { start: Instant::now(), calls: Vec::new(), failed: 0, connections: 0 };
    let mut calls = calls.peekable();
    let (mut idle, mut running) = (Vec::new(), JoinSet::new());
    loop {
        let next = calls.peek().map(|due| run.start + due.at);
        tokio::select! {
            () = sleep_until(next.unwrap_or(run.start)), if next.is_some() => {
                let now = Instant::now();
                while let Some(Due { at, path }) = calls.next_if(|due| run.start + due.at <= now) {
                    running.spawn(call(proxy, upstream, idle.pop(), path, run.start + at));
                }
            }
            Some(done) = running.join_next() => match done.map_err(io::Error::other).flatten() {
                Ok((call, agent)) => {
                    run.calls.push(call);
                    idle.push(agent);
                    run.connections = run.connections.max(idle.len() + running.len());
                }
                Err(error) => {
                    eprintln!("a call failed: {error}");
                    run.failed += 1;
                }
            },
            else => return run,
        }
    }
}

async fn call(
    proxy: SocketAddr,
    upstream: SocketAddr,
    agent: Option<Agent>,
    path: String,
    due: Instant,
) -> io::Result<(Call, Agent)> {
    let mut agent = match agent {
        Some(agent) => agent,
        None => Agent::connect(proxy).await?,
    };
    let sent = Instant::now();
    let body = agent.get(upstream, &path).await?.to_vec();
    Ok((Call { path, due, sent, answered: Instant::now(), body }, agent))
}

/// Only ends when the proxy has.
async fn watch_memory(proxy: &Proxy, peak: &mut f64) -> io::Error {
    loop {
        match proxy.resident() {
            Ok(now) => *peak = peak.max(now),
            Err(error) => return error,
        }
        sleep(Duration::from_millis(100)).await;
    }
}
