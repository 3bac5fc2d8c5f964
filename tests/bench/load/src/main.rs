//! What a request through hedgerow costs, beside no proxy at all and beside a bare one.
//!
//! Machines are noisy, so nothing here is worth quoting alone: all contestants run in one call, interleaved in
//! rounds, and the numbers that mean something are the ratios to the floor (a proxy of the same libraries that
//! does nothing but forward) and the latency added to the direct line, paired by round. Where others keep the
//! machine busy, trust CPU time per request over requests per second.

mod agent;
mod process;
mod table;

use std::ffi::OsStr;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use tempfile::TempDir;

use agent::Agent;
use process::{Cores, Server, free_ports, raise_file_limit};
use table::{Row, Sample};

/// Connections of the closed loop.
const SATURATING: usize = 64;
/// Connections that the open loop starts from idle.
const PACED: usize = 32;

/// Measures requests per second, CPU time, added latency and memory of hedgerow beside a bare proxy.
#[derive(Parser)]
struct Arguments {
    /// The release binary of hedgerow; without it only the floor is measured.
    #[arg(long, env = "HEDGEROW_BIN")]
    hedgerow: Option<PathBuf>,
    /// An Envoy binary, as one more contestant.
    #[arg(long, env = "ENVOY_BIN")]
    envoy: Option<PathBuf>,
    /// How often every contestant has its turn.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seconds of each turn: so long at saturation, and so long at the fixed rate.
    #[arg(long, default_value_t = 2.0)]
    secs: f64,
    /// Requests per second of the latency measurement.
    #[arg(long, default_value_t = 3000)]
    rate: u32,
    /// Idle client connections for the memory measurement.
    #[arg(long, default_value_t = 1000)]
    idle: usize,
}

/// A line of the table, and how to start what it measures.
struct Contestant {
    name: &'static str,
    kind: Kind,
}

enum Kind {
    Direct,
    Floor(PathBuf),
    Hedgerow(PathBuf, &'static str),
    Envoy(PathBuf),
}

fn main() -> std::process::ExitCode {
    let arguments = Arguments::parse();
    let cores = Cores::choose();
    cores.pin_load();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be made");
    match runtime.block_on(run(&arguments, cores)) {
        Ok(0) => std::process::ExitCode::SUCCESS,
        Ok(failed) => {
            eprintln!("load: {failed} requests failed; the numbers above are worth nothing");
            std::process::ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("load: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}

/// Prints the table; how many requests failed.
async fn run(arguments: &Arguments, cores: Cores) -> io::Result<u64> {
    raise_file_limit()?;
    let folder = TempDir::new()?;
    let [upstream, _] = free_ports()?;
    let port = upstream.port().to_string();
    let _upstream = Server::start(&beside_us("upstream")?, &[port.as_ref()], upstream, cores.load).await?;
    let mut running = Vec::new();
    for contestant in contestants(arguments)? {
        let server = contestant.start(folder.path(), cores).await?;
        running.push((contestant, server, Row::default()));
    }
    for _ in 0..arguments.rounds {
        for (contestant, server, row) in &mut running {
            let sample = sample(arguments, server.as_ref(), upstream).await;
            row.samples.push(sample.map_err(|error| contestant.blame(&error))?);
        }
    }
    let mut rows = Vec::new();
    for (contestant, server, mut row) in running {
        drop(server);
        if let Some(server) = contestant.start(folder.path(), cores).await? {
            let memory = memory(&server, upstream, arguments.idle).await;
            row.memory = Some(memory.map_err(|error| contestant.blame(&error))?);
        }
        rows.push((contestant.name, row));
    }
    print!("{}", table::print(&rows, arguments.rate, arguments.idle, cores));
    Ok(rows.iter().map(|(_, row)| row.failed()).sum())
}

fn contestants(arguments: &Arguments) -> io::Result<Vec<Contestant>> {
    let mut all = vec![
        Contestant { name: "direct", kind: Kind::Direct },
        Contestant { name: "floor", kind: Kind::Floor(beside_us("floor")?) },
    ];
    if let Some(hedgerow) = &arguments.hedgerow {
        let bare = Kind::Hedgerow(hedgerow.clone(), include_str!("../config/bare.yaml"));
        let guards = Kind::Hedgerow(hedgerow.clone(), include_str!("../config/guards.yaml"));
        all.push(Contestant { name: "hedgerow-bare", kind: bare });
        all.push(Contestant { name: "hedgerow", kind: guards });
    }
    if let Some(envoy) = &arguments.envoy {
        all.push(Contestant { name: "envoy", kind: Kind::Envoy(envoy.clone()) });
    }
    Ok(all)
}

/// A binary of this crate, built into the same folder as this one.
fn beside_us(name: &str) -> io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(name))
}

impl Contestant {
    /// An error of its turn, with its name.
    fn blame(&self, error: &io::Error) -> io::Error {
        io::Error::other(format!("{}: {error}", self.name))
    }

    /// Starts the proxy; `None` for the direct line, which has none.
    async fn start(&self, folder: &Path, cores: Cores) -> io::Result<Option<Server>> {
        let [proxy, admin] = free_ports()?;
        let port = proxy.port().to_string();
        let config = |text: &str| {
            let path = folder.join(format!("{}.yaml", self.name));
            let text = text.replace("@PROXY@", &port).replace("@ADMIN@", &admin.port().to_string());
            std::fs::write(&path, text).map(|()| path)
        };
        let (program, arguments): (_, Vec<Box<OsStr>>) = match &self.kind {
            Kind::Direct => return Ok(None),
            Kind::Floor(program) => (program, owned(&["http", &port, "1"], None)),
            Kind::Hedgerow(program, policy) => (program, owned(&["run", "--config"], Some(config(policy)?))),
            Kind::Envoy(program) => {
                let file = config(include_str!("../config/envoy.yaml"))?;
                let quiet = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "off", "-c"];
                (program, owned(&quiet, Some(file)))
            }
        };
        let arguments: Vec<&OsStr> = arguments.iter().map(|argument| &**argument).collect();
        Server::start(program, &arguments, proxy, cores.proxy).await.map(Some)
    }
}

fn owned(words: &[&str], file: Option<PathBuf>) -> Vec<Box<OsStr>> {
    let words = words.iter().map(|word| OsStr::new(word).into());
    words.chain(file.map(|file| file.into_os_string().into_boxed_os_str())).collect()
}

/// One turn: saturation with its CPU time, then latency at the fixed rate.
async fn sample(arguments: &Arguments, server: Option<&Server>, upstream: SocketAddr) -> io::Result<Sample> {
    let to = server.map_or(upstream, |server| server.address);
    let span = Duration::from_secs_f64(arguments.secs);
    let before = server.map(Server::cpu).transpose()?;
    let count = agent::saturate(to, upstream, SATURATING, span).await;
    let after = server.map(Server::cpu).transpose()?;
    let (latencies, failed) = agent::pace(to, upstream, arguments.rate, PACED, span).await?;
    Ok(Sample {
        per_second: count.good as f64 / span.as_secs_f64(),
        cpu_per_100k: after
            .zip(before)
            .map(|(after, before)| (after - before).as_secs_f64() * 100_000.0 / count.good.max(1) as f64),
        p50: table::quantile(&latencies, 0.50),
        p99: table::quantile(&latencies, 0.99),
        failed: count.failed + failed,
    })
}

/// Resident bytes fresh, and with so many connections that each asked once and stay open.
async fn memory(server: &Server, upstream: SocketAddr, idle: usize) -> io::Result<(u64, u64)> {
    let fresh = server.resident()?;
    let mut agents = Vec::with_capacity(idle);
    for _ in 0..idle {
        let mut agent = Agent::connect(server.address, upstream).await?;
        agent.exchange().await?;
        agents.push(agent);
    }
    Ok((fresh, server.resident()?))
}
