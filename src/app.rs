//! The process put together: policy, shared state, ports; in which order it starts and leaves.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::{Instant, interval, sleep_until, timeout_at};

use crate::admin;
use crate::config::watch::{ReloadResult, Watch};
use crate::config::{self, Config, Problems, Surroundings};
use crate::fleet::Fleet;
use crate::liaison;
use crate::listen::accept::{self, Door};
use crate::pipeline::Proxy;
use crate::telemetry::log::AccessLog;
use crate::telemetry::metrics::{Listener, Metrics, Reload};
use crate::tls::ca::CertificateAuthority;
use crate::tls::client::public_roots;
use crate::tls::interceptor::Interceptor;
use crate::tls::leaf::Leaves;
use crate::tls::trust;
use crate::upstream::dial::Dialer;
use crate::upstream::registry::Registry;

/// How often long unused state is looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(5);

/// For the calls that the process ends to be told so.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Why the process cannot start.
#[derive(Debug, Error)]
pub enum StartError {
    /// The policy has problems.
    #[error("{0}")]
    Policy(Problems),
    /// A port cannot be had.
    #[error("cannot listen on {address} (listen.{key}): {source}; is another process there?")]
    Port {
        /// The key in the policy.
        key: &'static str,
        /// The address.
        address: SocketAddr,
        /// What the system says.
        source: io::Error,
    },
    /// Clients could not trust the certificates that interception needs.
    #[error("cannot intercept: {0}")]
    Trust(String),
    /// No resolver or no log.
    #[error("cannot start: {0}")]
    Setup(String),
}

impl StartError {
    /// Whether another process has the port.
    fn is_taken(&self) -> bool {
        matches!(self, Self::Port { source, .. } if source.kind() == io::ErrorKind::AddrInUse)
    }
}

/// A process that serves.
pub struct Running {
    proxy: Arc<Proxy>,
    watch: Option<Arc<Watch>>,
    tasks: Vec<JoinHandle<()>>,
    /// Where the proxy listens.
    pub proxy_address: SocketAddr,
    /// Where the admin port is.
    pub admin_address: SocketAddr,
    /// Where redirected connections arrive, if anywhere.
    pub transparent_address: Option<SocketAddr>,
}

/// Starts the proxy on the policy in `path`, which it follows from then on, or on the embedded one; in either case
/// with what `surroundings` fix.
/// When it returns, its ports are open.
///
/// # Errors
/// What keeps it from starting; nothing is left running then.
pub async fn start(path: Option<&Path>, surroundings: &Surroundings) -> Result<Running, StartError> {
    let Some(path) = path else {
        return start_with(config::embedded_in(surroundings).map_err(StartError::Policy)?).await;
    };
    let reloads = Reloads::new();
    let watch = Watch::start(path, surroundings, reloads.clone().hook()).map_err(StartError::Policy)?;
    serve(watch.policy().clone(), Some(Arc::new(watch)), reloads).await
}

/// Starts the proxy on a policy that stays as it is.
///
/// # Errors
/// As [`start`].
pub async fn start_with(config: Config) -> Result<Running, StartError> {
    serve(Arc::new(ArcSwap::from_pointee(config)), None, Reloads::new()).await
}

async fn serve(
    policy: Arc<ArcSwap<Config>>,
    watch: Option<Arc<Watch>>,
    reloads: Reloads,
) -> Result<Running, StartError> {
    let metrics = reloads.metrics.clone();
    let config = policy.load_full();

    let proxy_port = bind("proxy", config.listen.proxy).await?;
    let admin_port = bind("admin", config.listen.admin).await?;
    let (proxy_address, admin_address) = (address(&proxy_port)?, address(&admin_port)?);
    let transparent_ports = match config.listen.transparent {
        Some(wanted) => bind_transparent(wanted).await?,
        None => Vec::new(),
    };
    let transparent_address = transparent_ports.first().map(address).transpose()?;

    metrics.set_config(&config.hash);
    let ports = [Some(proxy_address), Some(admin_address), transparent_address].into_iter().flatten();
    let dialer = Dialer::new(&config.dns, ports.map(|address| address.port()).collect()).map_err(setup)?;
    let log = AccessLog::new(io::stdout(), metrics.access_log_dropped()).map_err(setup)?;
    let fleet = Fleet::new();
    fleet.follow(config.shared_state.as_ref());
    let registry = Registry::new(dialer, fleet.clone(), metrics.clone());
    // Once nothing else can fail, the ports least of all: the files may be those of a process that runs. And
    // before anybody is answered, until when clients wait in the backlog: an agent that finds the proxy finds
    // the certificates as well.
    let interceptor = interceptor(&config)?;
    let proxy = Arc::new(Proxy::new(policy, registry, interceptor, metrics, log));
    // A version that came before this is in force already: the snapshot above has it.
    let _ = reloads.proxy.set(Arc::downgrade(&proxy));

    // What others know is worth a moment, in which clients wait in the backlog.
    if let Some(link) = fleet.link() {
        link.ready().await;
    }
    let places = Arc::new(Semaphore::new(config.limits.connections));
    let door = |listener, kind| Door {
        listener,
        kind,
        clients: config.listen.clients.clone(),
        places: places.clone(),
    };
    let view = admin::View { proxy: proxy.clone(), started: SystemTime::now(), watch: watch.clone() };
    let mut tasks = vec![
        tokio::spawn(accept::run(door(proxy_port, Listener::Proxy), proxy.clone())),
        tokio::spawn(admin::run(admin_port, view)),
        tokio::spawn(sweep(proxy.clone())),
        tokio::spawn(liaison::run(proxy.clone())),
    ];
    for port in transparent_ports {
        tasks.push(tokio::spawn(accept::run(door(port, Listener::Transparent), proxy.clone())));
    }
    tracing::info!(proxy = %proxy_address, admin = %admin_address, "hedgerow listens");
    Ok(Running { proxy, watch, tasks, proxy_address, admin_address, transparent_address })
}

/// The process's CA, and what agents need in order to trust it. Without a place for that there is none.
fn interceptor(config: &Config) -> Result<Option<Interceptor>, StartError> {
    let tls = &config.tls;
    if tls.ca_dir.is_none() && tls.own_ca.is_none() {
        return Ok(None);
    }
    // The key is in memory alone, so memory must not end in a core file.
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!(%error, "core dumps cannot be turned off; one would hold the key of the CA");
    }
    let ca = match &tls.own_ca {
        Some(own) => CertificateAuthority::from_pem(&own.cert_pem, own.key_pem.as_bytes()),
        None => CertificateAuthority::generate(),
    };
    let leaves = ca.and_then(Leaves::new).map_err(|error| trust(error.cause().unwrap_or(error.word())))?;
    if let Some(dir) = &tls.ca_dir
        && let Err(error) = trust::publish(dir, leaves.ca_pem(), &public_roots())
    {
        if config.policies().any(|policy| policy.intercept) {
            return Err(trust(error));
        }
        tracing::warn!(%error, "tls.ca_dir cannot be written, so nothing can be intercepted");
        return Ok(None);
    }
    Ok(Some(Interceptor::new(leaves)))
}

fn trust(error: impl std::fmt::Display) -> StartError {
    StartError::Trust(error.to_string())
}

/// What a reload is told to.
#[derive(Clone)]
struct Reloads {
    metrics: Arc<Metrics>,
    /// Set once there is one: the policy is watched before it is served.
    proxy: Arc<OnceLock<Weak<Proxy>>>,
}

impl Reloads {
    fn new() -> Self {
        Self { metrics: Arc::new(Metrics::new()), proxy: Arc::default() }
    }

    fn hook(self) -> impl Fn(ReloadResult) + Send + 'static {
        move |result| {
            self.metrics.reload(match result {
                ReloadResult::Applied => Reload::Applied,
                ReloadResult::Rejected => Reload::Rejected,
                ReloadResult::Unchanged => Reload::Unchanged,
            });
            if result == ReloadResult::Applied
                && let Some(proxy) = self.proxy.get().and_then(Weak::upgrade)
            {
                proxy.policy_changed();
            }
        }
    }
}

impl Running {
    /// Reads the policy file again, whether it has changed or not.
    pub fn reload(&self) {
        if let Some(watch) = &self.watch {
            watch.reload();
        }
    }

    /// Leaves as one should: not ready any more but still serving, until nothing has been in flight
    /// for `drain.quiet`, at the latest after `drain.max`. What still runs then is cut.
    pub async fn drain(self) {
        let drain = self.proxy.snapshot().drain.clone();
        self.proxy.start_draining();
        tracing::info!(in_flight = self.proxy.in_flight(), "draining");
        let end = Instant::now() + drain.max;
        while Instant::now() < end {
            self.idle_before(end).await;
            let seen = self.proxy.served();
            sleep_until((Instant::now() + drain.quiet).min(end)).await;
            if self.proxy.in_flight() == 0 && self.proxy.served() == seen {
                break;
            }
        }
        tracing::info!(in_flight = self.proxy.in_flight(), "leaving");
        self.proxy.end_calls();
        self.idle_before(Instant::now() + LAST_WORDS).await;
        liaison::leave(&self.proxy).await;
    }

    /// Waits until nothing is in flight, at the latest until `end`.
    async fn idle_before(&self, end: Instant) {
        while self.proxy.in_flight() > 0 && Instant::now() < end {
            // What ends between the look and the wait is seen at the next look.
            let look_again = Instant::now() + Duration::from_millis(50);
            let _ = timeout_at(look_again.min(end), self.proxy.became_idle()).await;
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// Lets go of long unused state, and keeps the histograms from growing between two scrapes.
async fn sweep(proxy: Arc<Proxy>) {
    let mut ticks = interval(SWEEP_EVERY);
    loop {
        let now = ticks.tick().await;
        let config = proxy.snapshot();
        proxy.registry().sweep(&config, now);
        proxy.metrics().upkeep();
    }
}

/// A redirect rule sends IPv4 to 127.0.0.1 and IPv6 to ::1, so the first of them stands for both.
async fn bind_transparent(wanted: SocketAddr) -> Result<Vec<TcpListener>, StartError> {
    let mut ports = vec![bind("transparent", wanted).await?];
    if wanted.ip() == Ipv4Addr::LOCALHOST {
        let twin = SocketAddr::from((Ipv6Addr::LOCALHOST, address(&ports[0])?.port()));
        match bind("transparent", twin).await {
            Ok(port) => ports.push(port),
            Err(error) if error.is_taken() => return Err(error),
            // Where there is no IPv6, no rule redirects it.
            Err(error) => tracing::debug!(%error, "IPv6 is not taken"),
        }
    }
    Ok(ports)
}

async fn bind(key: &'static str, wanted: SocketAddr) -> Result<TcpListener, StartError> {
    let told = |source| StartError::Port { key, address: wanted, source };
    match TcpListener::bind(wanted).await {
        // All addresses are those of IPv4 where the kernel knows no others.
        Err(error) if wanted.ip() == Ipv6Addr::UNSPECIFIED && is_unknown_family(&error) => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, wanted.port())).await.map_err(told)
        }
        bound => bound.map_err(told),
    }
}

fn is_unknown_family(error: &io::Error) -> bool {
    let unknown = [Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL].map(|error| error.raw_os_error());
    error.raw_os_error().is_some_and(|code| unknown.contains(&code))
}

fn address(listener: &TcpListener) -> Result<SocketAddr, StartError> {
    listener.local_addr().map_err(setup)
}

fn setup(error: impl std::fmt::Display) -> StartError {
    StartError::Setup(error.to_string())
}
