//! Servers as child processes: pinned, measured by what the kernel says of them, ended with the benchmark.

use std::ffi::OsStr;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpStream;

/// How long a server may take until it accepts.
const START: Duration = Duration::from_secs(10);

/// Which cores the two sides run on; `None` leaves it to the kernel.
#[derive(Debug, Clone, Copy)]
pub struct Cores {
    /// The proxy under test.
    pub proxy: Option<usize>,
    /// Load generator and upstream.
    pub load: Option<usize>,
}

impl Cores {
    /// One core for the proxy and another for the rest, where there are two and `taskset` is installed.
    pub fn choose() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let taskset =
            Command::new("taskset").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        match taskset {
            Ok(status) if status.success() && cores > 1 => Self { proxy: Some(0), load: Some(1) },
            _ => Self { proxy: None, load: None },
        }
    }

    /// Moves this process; called before it has threads.
    pub fn pin_load(&self) {
        let Some(core) = self.load else { return };
        let own = std::process::id().to_string();
        let _ = Command::new("taskset").args(["-cp", &core.to_string(), &own]).stdout(Stdio::null()).status();
    }
}

/// A running server.
pub struct Server {
    child: Child,
    /// Where it accepts.
    pub address: SocketAddr,
}

impl Server {
    /// Starts `program` on that core and waits until `address` accepts.
    pub async fn start(
        program: &Path,
        arguments: &[&OsStr],
        address: SocketAddr,
        core: Option<usize>,
    ) -> io::Result<Self> {
        let mut command = match core {
            Some(core) => {
                let mut command = Command::new("taskset");
                command.args(["-c", &core.to_string()]).arg(program);
                command
            }
            None => Command::new(program),
        };
        let child = command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        let mut server = Self { child, address };
        match tokio::time::timeout(START, server.accepts()).await {
            Ok(accepts) => accepts.map(|()| server),
            Err(_) => Err(io::Error::other(format!("{} does not accept at {address}", program.display()))),
        }
    }

    async fn accepts(&mut self) -> io::Result<()> {
        while TcpStream::connect(self.address).await.is_err() {
            if let Some(status) = self.child.try_wait()? {
                return Err(io::Error::other(format!("the server at {} ended: {status}", self.address)));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// CPU time of all its threads so far, user and system.
    pub fn cpu(&self) -> io::Result<Duration> {
        cpu_of(self.id())
    }

    /// Resident memory, bytes.
    pub fn resident(&self) -> io::Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
        let kib = line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok());
        kib.map(|kib| kib * 1024).ok_or_else(|| io::Error::other("no VmRSS"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// CPU time of all threads of a process so far, user and system.
pub fn cpu_of(process: u32) -> io::Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name, second field, may hold anything; count from its closing bracket.
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    Ok(ticks(after_name.split_whitespace().skip(11).take(2)))
}

/// A number of clock ticks as a time, the sum of `fields`.
pub fn ticks<'a>(fields: impl Iterator<Item = &'a str>) -> Duration {
    let ticks: u64 = fields.filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
    Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// Lets this process and its children open as many files as the system allows, for the idle connections.
pub fn raise_file_limit() -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?)
}

/// Two ports that are free now.
pub fn free_ports() -> io::Result<[SocketAddr; 2]> {
    let (one, other) =
        (TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?, TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?);
    Ok([one.local_addr()?, other.local_addr()?])
}
