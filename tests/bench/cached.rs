//! What the stages that find an answer another way cost in processor time: the cache beside the calls that it
//! saves, and all of them where they have nothing to do.
//!
//! One proxy under one policy, whose upstreams differ in the stages that are on. All are asked in turn by the same
//! number of connections in a closed loop, for the same 1 KiB, in several rounds; a figure is the median of
//! its rounds, and what must be below something is the median of ratios within a round. Processor time is
//! asked of the kernel, so that others who are busy on the machine spoil it least.
//!
//! A hit should cost less than a third of a forwarded call. It does not: the kernel's share of one read and one write
//! on loopback alone is a quarter of such a call, and the least that can be answered here, an OPTIONS for the proxy
//! itself, a third. The bar stands, and says so. A stage that is on and strikes nothing may cost its call some percent:
//! retry, rate limit and fallback together at most 15. Coalescing and the cache have work to do for every call, since
//! each may be the first of many, so all of them together have a bar of their own.
//!
//! `cargo bench --bench cached -- --help` tells the settings. The exit code is 1 when a bar was missed.

mod rig;

use std::io;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use clap::Parser;
use http::Response;
use http::header::{self, HeaderValue};
use http_body_util::Full;
use tokio::task::JoinSet;
use tokio::time::Instant;

use rig::{Agent, Cores, Line, Others, Proxy, conclude, serve, serve_tls};

/// The start of the policy, whose upstreams are the rows.
const POLICY: &str = "
threads: 1
listen: { proxy: 127.0.0.1:@PROXY@, admin: 127.0.0.1:@ADMIN@ }
telemetry: { access_log: off }
defaults: { bulkhead: { max_concurrent: 10000 } }
upstreams:
";

const RETRY: &str = "retry: true";
const RATE_LIMIT: &str = "rate_limit: { rate: 1000000/s }";
const FALLBACK: &str = "fallback: [ { degraded: { status: 200 } } ]";
const COALESCE: &str = "coalesce: true";
const CACHE: &str = "cache: true";

/// A line of the table, and the upstream that it asks.
#[derive(Clone, Copy)]
struct Row {
    name: &'static str,
    what: &'static str,
    /// Those that are on.
    stages: &'static [&'static str],
    /// What the upstream says of caches.
    control: Option<&'static str>,
    /// Whether each call is for a path of its own; else each connection has one, so that no two equal calls are
    /// ever under way.
    is_ever_new: bool,
    /// Whether the upstream speaks TLS.
    is_tls: bool,
    /// Of the processor time of the row with this name.
    most: Option<(f64, &'static str)>,
}

const OFF: Row = Row {
    name: "off",
    what: "forwarded, all these stages off",
    stages: &[],
    control: None,
    is_ever_new: false,
    is_tls: false,
    most: None,
};

/// The name of the call over TLS.
const TLS: &str = "tls";

const NO_STORE: Option<&str> = Some("no-store");
const MAX_AGE: Option<&str> = Some("max-age=3600");

const ROWS: [Row; 11] = [
    OFF,
    Row { name: "retry", what: "forwarded, retry on", stages: &[RETRY], ..OFF },
    Row { name: "rate_limit", what: "forwarded, rate limit on", stages: &[RATE_LIMIT], ..OFF },
    Row { name: "fallback", what: "forwarded, fallback on", stages: &[FALLBACK], ..OFF },
    Row {
        name: "three",
        what: "forwarded, these three on",
        stages: &[RETRY, RATE_LIMIT, FALLBACK],
        most: Some((1.15, OFF.name)),
        ..OFF
    },
    Row { name: "coalesce", what: "forwarded, coalescing on", stages: &[COALESCE], ..OFF },
    Row { name: "cache", what: "forwarded, cache on", stages: &[CACHE], control: NO_STORE, ..OFF },
    Row {
        name: "all",
        what: "forwarded, all five on",
        stages: &[RETRY, RATE_LIMIT, FALLBACK, COALESCE, CACHE],
        control: NO_STORE,
        most: Some((1.5, OFF.name)),
        ..OFF
    },
    Row {
        name: "kept",
        what: "forwarded and kept",
        stages: &[CACHE],
        control: MAX_AGE,
        is_ever_new: true,
        ..OFF
    },
    Row { name: TLS, what: "forwarded over TLS", is_tls: true, ..OFF },
    Row {
        name: "hit",
        what: "from the cache",
        stages: &[CACHE],
        control: MAX_AGE,
        is_tls: true,
        most: Some((1.0 / 3.0, OFF.name)),
        ..OFF
    },
];

/// Measures processor time per call.
#[derive(Parser)]
struct Arguments {
    /// Connections that ask again as soon as they were answered. One alone shows what a call costs a proxy that
    /// sleeps in between.
    #[arg(long, env = "CACHED_CONNECTIONS", default_value_t = 64)]
    connections: usize,
    /// How often every row has its turn.
    #[arg(long, env = "CACHED_ROUNDS", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Seconds of a turn.
    #[arg(long, env = "CACHED_SECS", default_value_t = 2.0)]
    secs: f64,
    /// Only these rows (by name, with commas) beside the two that others are compared with.
    #[arg(long, env = "CACHED_ONLY", value_delimiter = ',')]
    only: Vec<String>,
    /// What cargo says to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    let (arguments, cores) = (Arguments::parse(), Cores::choose());
    rig::run(cores, measure(&arguments, cores))
}

async fn measure(arguments: &Arguments, cores: Cores) -> io::Result<ExitCode> {
    let is_wanted = |row: &&Row| {
        let only = &arguments.only;
        only.is_empty() || [OFF.name, TLS].contains(&row.name) || only.iter().any(|only| only == row.name)
    };
    let rows: Vec<_> = ROWS.iter().filter(is_wanted).collect();
    let (mut policy, mut tools, mut authorities) = (POLICY.to_owned(), Vec::new(), Vec::new());
    for row in &rows {
        let control = row.control;
        let answers = move |_path| async move { answer(control) };
        let mut keys = vec![String::new()];
        let tool = match row.is_tls {
            true => {
                let (tool, authority) = serve_tls(answers).await?;
                keys.push(format!(
                    "origin: https, tls: {{ ca_file: {:?} }}",
                    authority.path().join("ca.pem")
                ));
                authorities.push(authority);
                tool
            }
            false => serve(answers).await?,
        };
        keys[0] = format!("hosts: [\"{tool}\"]");
        keys.extend(row.stages.iter().map(|stage| (*stage).to_owned()));
        policy += &format!("  {}: {{ {} }}\n", row.name, keys.join(", "));
        tools.push(tool);
    }
    let proxy = Proxy::start(&policy, cores).await?;
    let mut load = Load::start(proxy.address(), arguments.connections).await?;
    // Not measured: connections to the upstream are opened, and what is to be hit is kept.
    for (row, tool) in rows.iter().zip(&tools) {
        load.turn(row, *tool, Duration::from_millis(200)).await?;
    }
    let others = Others::watch(&proxy)?;
    let mut rounds = vec![Vec::new(); rows.len()];
    for _ in 0..arguments.rounds {
        for ((row, tool), samples) in rows.iter().zip(&tools).zip(&mut rounds) {
            let before = proxy.cpu()?;
            let answered = load.turn(row, *tool, Duration::from_secs_f64(arguments.secs)).await?;
            samples.push((proxy.cpu()? - before).as_secs_f64() * 1e6 / answered as f64);
        }
    }
    let samples_of =
        |name| rows.iter().zip(&rounds).find(|(row, _)| row.name == name).map(|(_, samples)| samples);
    let mut lines = Vec::new();
    for (row, samples) in rows.iter().zip(&rounds) {
        lines.push(line(row, samples, &rounds[0], row.most.and_then(|(_, name)| samples_of(name))));
    }
    lines.push(others.tell(&proxy)?);
    let title = format!(
        "processor time, medians of {} rounds of {} s, {} connections",
        arguments.rounds, arguments.secs, arguments.connections
    );
    Ok(conclude(&title, cores, &lines))
}

fn line(row: &Row, samples: &[f64], first: &[f64], beside: Option<&Vec<f64>>) -> Line {
    let cpu = median(samples.iter().copied());
    let of = |others: &[f64]| median(samples.iter().zip(others).map(|(own, other)| own / other));
    let line = Line::tell(row.what, format!("{cpu:5.1} us a call, {:.2} of the first", of(first)));
    match row.most.zip(beside) {
        Some(((most, name), beside)) => {
            let ratio = of(beside);
            line.must(format!("{ratio:.2} of `{name}`, {most:.2} at most"), ratio <= most)
        }
        None => line,
    }
}

/// Of at least one value.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    f64::midpoint(values[(values.len() - 1) / 2], values[values.len() / 2])
}

/// 1 KiB.
fn answer(control: Option<&'static str>) -> Response<Full<Bytes>> {
    static BODY: [u8; 1024] = [b'x'; 1024];
    let mut answer = Response::new(Full::new(Bytes::from_static(&BODY)));
    if let Some(control) = control {
        answer.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static(control));
    }
    answer
}

/// The closed loop.
struct Load {
    agents: Vec<Agent>,
    /// Calls so far.
    asked: Arc<AtomicU64>,
}

impl Load {
    async fn start(proxy: SocketAddr, connections: usize) -> io::Result<Self> {
        let mut agents = Vec::new();
        for _ in 0..connections {
            agents.push(Agent::connect(proxy).await?);
        }
        Ok(Self { agents, asked: Arc::default() })
    }

    /// Asks for so long; how often. Every call must be answered well.
    async fn turn(&mut self, row: &Row, tool: SocketAddr, span: Duration) -> io::Result<u64> {
        let (end, is_ever_new) = (Instant::now() + span, row.is_ever_new);
        let before = self.asked.load(Ordering::Relaxed);
        let mut running = JoinSet::new();
        for (place, mut agent) in self.agents.drain(..).enumerate() {
            let asked = self.asked.clone();
            running.spawn(async move {
                while Instant::now() < end {
                    let number = asked.fetch_add(1, Ordering::Relaxed);
                    let last = if is_ever_new { number } else { place as u64 };
                    agent.get(tool, &format!("/v1/{last}")).await?;
                }
                io::Result::Ok(agent)
            });
        }
        while let Some(done) = running.join_next().await {
            self.agents.push(done.map_err(io::Error::other)??);
        }
        Ok(self.asked.load(Ordering::Relaxed) - before)
    }
}
