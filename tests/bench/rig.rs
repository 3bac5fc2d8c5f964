//! What the benchmarks of the running proxy share: its release binary on a core of its own, upstreams in this
//! process, connections that ask, and a table that says which bars were met.
//!
//! They are run by hand, on a machine that has nothing else to do: what they time is real, and a bar
//! that a busy machine misses says nothing. So none of them is a test.

use std::convert::Infallible;
use std::ffi::OsStr;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

#[path = "load/src/process.rs"]
#[allow(dead_code, unreachable_pub, reason = "the load benchmark's, which needs more of it")]
mod process;

#[allow(unused_imports, reason = "not each benchmark starts servers of its own")]
pub(crate) use process::{Cores, Server, free_ports};
use process::{cpu_of, raise_file_limit, ticks};

/// A running hedgerow; ends when dropped.
pub(crate) struct Proxy {
    server: Server,
    admin: SocketAddr,
    _folder: TempDir,
}

impl Proxy {
    /// Starts the binary that cargo has built for this benchmark, or `HEDGEROW_BIN`, under `policy` with free
    /// ports for `@PROXY@` and `@ADMIN@`.
    pub(crate) async fn start(policy: &str, cores: Cores) -> io::Result<Self> {
        // Its own limit is this process's.
        raise_file_limit()?;
        let program = std::env::var_os("HEDGEROW_BIN").map(PathBuf::from);
        let program = program.unwrap_or_else(|| env!("CARGO_BIN_EXE_hedgerow").into());
        let [proxy, admin] = free_ports()?;
        let folder = TempDir::new()?;
        let file = folder.path().join("policy.yaml");
        let ports = [("@PROXY@", proxy.port()), ("@ADMIN@", admin.port())];
        let policy = ports
            .iter()
            .fold(policy.to_owned(), |policy, (name, port)| policy.replace(name, &port.to_string()));
        std::fs::write(&file, policy)?;
        // What its upstreams do wrong is the benchmark's own story to tell.
        let arguments: [&OsStr; 5] =
            ["--log-level".as_ref(), "error".as_ref(), "run".as_ref(), "--config".as_ref(), file.as_ref()];
        let server = Server::start(&program, &arguments, proxy, cores.proxy).await?;
        Ok(Self { server, admin, _folder: folder })
    }

    /// Where it accepts.
    pub(crate) fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// Where its admin port is.
    #[allow(dead_code, reason = "of one benchmark")]
    pub(crate) fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// CPU time so far, user and system.
    pub(crate) fn cpu(&self) -> io::Result<Duration> {
        self.server.cpu()
    }

    /// Resident memory, MiB.
    #[allow(dead_code, reason = "of one benchmark")]
    pub(crate) fn resident(&self) -> io::Result<f64> {
        Ok(self.server.resident()? as f64 / f64::from(1 << 20))
    }
}

/// How busy others are on the machine while something is measured.
pub(crate) struct Others {
    since: Instant,
    before: Duration,
}

impl Others {
    pub(crate) fn watch(proxy: &Proxy) -> io::Result<Self> {
        Ok(Self { since: Instant::now(), before: Self::cpu(proxy)? })
    }

    /// In cores. Times that were measured beside others are theirs as well.
    pub(crate) fn tell(self, proxy: &Proxy) -> io::Result<Line> {
        let cpu = Self::cpu(proxy)?.saturating_sub(self.before);
        let cores = cpu.as_secs_f64() / self.since.elapsed().as_secs_f64();
        let words = if cores > 0.2 { ": too busy to judge times by" } else { "" };
        Ok(Line::tell("others on the machine", format!("{cores:.1} cores{words}")))
    }

    fn cpu(proxy: &Proxy) -> io::Result<Duration> {
        Ok(cpu_of_all()?.saturating_sub(cpu_of(std::process::id())? + proxy.cpu()?))
    }
}

/// Serves in this process, each request by what `answer` makes of its path.
pub(crate) async fn serve<A>(answer: impl Fn(String) -> A + Clone + Send + 'static) -> io::Result<SocketAddr>
where
    A: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = stream.set_nodelay(true);
            tokio::spawn(answer_on(stream, answer.clone()));
        }
    });
    Ok(address)
}

/// The same over TLS, and the folder that holds the authority of its certificate as `ca.pem`.
#[allow(dead_code, reason = "of one benchmark")]
pub(crate) async fn serve_tls<A>(
    answer: impl Fn(String) -> A + Clone + Send + 'static,
) -> io::Result<(SocketAddr, TempDir)>
where
    A: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let (acceptor, authority) = identity().map_err(io::Error::other)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = stream.set_nodelay(true);
            let (acceptor, answer) = (acceptor.clone(), answer.clone());
            tokio::spawn(async move {
                if let Ok(stream) = acceptor.accept(stream).await {
                    answer_on(stream, answer).await;
                }
            });
        }
    });
    Ok((address, authority))
}

async fn answer_on<A>(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    answer: impl Fn(String) -> A + Clone + Send + 'static,
) where
    A: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let service = service_fn(move |request: Request<Incoming>| {
        let answer = answer(request.uri().path().to_owned());
        async { Ok::<_, Infallible>(answer.await) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .serve_connection(TokioIo::new(stream), service);
    // A client that leaves is no fault.
    let _ = connection.await;
}

/// A certificate for loopback, by an authority of its own.
fn identity() -> Result<(TlsAcceptor, TempDir), Box<dyn std::error::Error + Send + Sync>> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    let folder = TempDir::new()?;
    std::fs::write(folder.path().join("ca.pem"), authority.pem())?;

    let key = KeyPair::generate()?;
    let leaf = CertificateParams::new([Ipv4Addr::LOCALHOST.to_string()])?.signed_by(&key, &authority)?;
    let key = PrivateKeyDer::try_from(key.serialize_der())?;
    let config =
        ServerConfig::builder().with_no_client_auth().with_single_cert(vec![leaf.der().clone()], key)?;
    Ok((TlsAcceptor::from(Arc::new(config)), folder))
}

/// A kept-alive connection to the proxy.
pub(crate) struct Agent {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Agent {
    pub(crate) async fn connect(proxy: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(proxy).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: Vec::with_capacity(4096) })
    }

    /// Asks in absolute-form, as a client of a proxy does: the body of the answer, which must be a 200.
    pub(crate) async fn get(&mut self, upstream: SocketAddr, path: &str) -> io::Result<&[u8]> {
        match self.ask(upstream, path).await? {
            (200, body) => Ok(body),
            (status, _) => Err(io::Error::other(format!("the answer to {path} is a {status}"))),
        }
    }

    /// The same, for any status.
    pub(crate) async fn ask(&mut self, upstream: SocketAddr, path: &str) -> io::Result<(u16, &[u8])> {
        let request = format!(
            "GET http://{upstream}{path} HTTP/1.1\r\nHost: {upstream}\r\nUser-Agent: bench\r\n\
             Accept: */*\r\nAccept-Encoding: gzip\r\nAuthorization: Bearer of-nobody\r\n\r\n"
        );
        self.stream.write_all(request.as_bytes()).await?;
        self.buffer.clear();
        loop {
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if let Some((status, head, length)) = parts(&self.buffer)?
                && self.buffer.len() >= head + length
            {
                return Ok((status, &self.buffer[head..head + length]));
            }
        }
    }
}

/// The status, and the lengths of head and body; `None` while the head is not complete.
fn parts(bytes: &[u8]) -> io::Result<Option<(u16, usize, usize)>> {
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut response = httparse::Response::new(&mut fields);
    let head = match response.parse(bytes) {
        Ok(httparse::Status::Complete(head)) => head,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
    };
    let length = response.headers.iter().find(|field| field.name.eq_ignore_ascii_case("content-length"));
    let length = length.and_then(|field| std::str::from_utf8(field.value).ok()?.parse().ok());
    match (response.code, length) {
        (Some(status), Some(length)) => Ok(Some((status, head, length))),
        (code, _) => Err(io::Error::other(format!("answer {code:?} with length {length:?}"))),
    }
}

/// How long things took, in order.
#[allow(dead_code, reason = "not of the benchmark that counts processor time alone")]
pub(crate) struct Times(Vec<Duration>);

#[allow(dead_code, reason = "as above")]
impl Times {
    pub(crate) fn of(times: impl Iterator<Item = Duration>) -> Self {
        let mut times: Vec<_> = times.collect();
        times.sort_unstable();
        Self(times)
    }

    pub(crate) fn quantile(&self, share: f64) -> Duration {
        let rank = (self.0.len() as f64 * share).ceil() as usize;
        self.0.get(rank.max(1) - 1).copied().unwrap_or_default()
    }
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ms = |share| self.quantile(share).as_secs_f64() * 1e3;
        write!(f, "p50 {:.2} ms, p99 {:.2} ms, most {:.2} ms", ms(0.5), ms(0.99), ms(1.0))
    }
}

/// A line of the table.
pub(crate) struct Line {
    what: String,
    measured: String,
    /// What it must be, and whether it is.
    bar: Option<(String, bool)>,
}

impl Line {
    /// Something worth knowing that has no bar.
    pub(crate) fn tell(what: impl Into<String>, measured: impl Into<String>) -> Self {
        Self { what: what.into(), measured: measured.into(), bar: None }
    }

    /// Something that must be so.
    pub(crate) fn must(self, bar: impl Into<String>, is_met: bool) -> Self {
        Self { bar: Some((bar.into(), is_met)), ..self }
    }
}

/// Prints the table; the exit code is 1 when a bar was missed.
pub(crate) fn conclude(title: &str, cores: Cores, lines: &[Line]) -> ExitCode {
    let place = match cores {
        Cores { proxy: Some(proxy), load: Some(load) } => {
            format!("proxy on core {proxy}, load and upstream on core {load}")
        }
        _ => "not pinned".to_owned(),
    };
    println!("\n{title}; {place}\n");
    let width = |of: fn(&Line) -> &str| lines.iter().map(|line| of(line).len()).max().unwrap_or_default();
    let (what, measured) = (width(|line| &line.what), width(|line| &line.measured));
    for line in lines {
        let bar = line.bar.as_ref().map_or(String::new(), |(bar, is_met)| {
            format!("{}  {bar}", if *is_met { "met   " } else { "MISSED" })
        });
        println!("{}", format!("{:what$}  {:measured$}  {bar}", line.what, line.measured).trim_end());
    }
    let is_missed = lines.iter().any(|line| line.bar.as_ref().is_some_and(|(_, is_met)| !is_met));
    if is_missed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs a benchmark on one thread; what it says, or an error in words.
pub(crate) fn run(cores: Cores, work: impl Future<Output = io::Result<ExitCode>>) -> ExitCode {
    cores.pin_load();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.and_then(|runtime| runtime.block_on(work)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// CPU time that all processes of the machine have had so far, and what it has lost to others beside it.
fn cpu_of_all() -> io::Result<Duration> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let all = stat.lines().next().unwrap_or_default().split_whitespace().skip(1).take(8);
    // The fourth and fifth are idleness.
    Ok(ticks(all.enumerate().filter(|(place, _)| !matches!(place, 3 | 4)).map(|(_, ticks)| ticks)))
}
