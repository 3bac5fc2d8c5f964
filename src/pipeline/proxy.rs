//! What all requests of the process share, and what the process knows of them.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::Poll;

use arc_swap::ArcSwap;
use http::HeaderValue;
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::feed::Gathered;
use super::flight::Brought;
use super::shelf::Shelf;
use crate::config::Config;
use crate::error::Error;
use crate::policy::room::Allowance;
use crate::policy::singleflight::Flights;
use crate::respond::headers;
use crate::telemetry::log::AccessLog;
use crate::telemetry::metrics::{Metrics, UpstreamMetrics};
use crate::tls::interceptor::Interceptor;
use crate::upstream::registry::Registry;
use crate::wire::replay::ReplayAllowance;

/// Kept answers that are renewed at once while their stale ones are given.
const MOST_RENEWALS: usize = 64;

/// Calls of fan-outs that run at once: more than any pod makes, and a bound on what they take together.
const MOST_FANNED_OUT: usize = 10_000;

/// Bytes that all fan-outs may hold together, requests and answers.
const FAN_OUT_MEMORY: u64 = 256 << 20;

/// What all requests of the process share.
pub struct Proxy {
    policy: Arc<ArcSwap<Config>>,
    registry: Registry,
    interceptor: Option<Interceptor>,
    replay: Arc<ReplayAllowance>,
    flights: Flights<Brought>,
    gathered: Arc<Gathered>,
    renewals: Arc<Semaphore>,
    shelf: Shelf,
    fan_out_places: Semaphore,
    fan_out_memory: Allowance,
    metrics: Arc<Metrics>,
    default_metrics: Arc<UpstreamMetrics>,
    log: AccessLog,
    pseudonym: String,
    identity: HeaderValue,
    in_flight: AtomicUsize,
    served: AtomicU64,
    became_idle: Notify,
    is_draining: AtomicBool,
    draining: Notify,
    is_ending: AtomicBool,
    ending: Notify,
}

impl Proxy {
    /// Puts the shared parts together. Its name in `Via` gets a random word, so that a request that
    /// comes back is told from one that passed another hedgerow.
    pub fn new(
        policy: Arc<ArcSwap<Config>>,
        registry: Registry,
        interceptor: Option<Interceptor>,
        metrics: Arc<Metrics>,
        log: AccessLog,
    ) -> Self {
        let pseudonym = format!("hedgerow-{:08x}", fastrand::u32(..));
        let identity = HeaderValue::from_str(&format!("1.1 {pseudonym}")).unwrap_or(headers::VIA);
        Self {
            policy,
            registry,
            interceptor,
            replay: ReplayAllowance::new(),
            flights: Flights::new(),
            gathered: Arc::default(),
            renewals: Arc::new(Semaphore::new(MOST_RENEWALS)),
            shelf: Shelf::default(),
            fan_out_places: Semaphore::new(MOST_FANNED_OUT),
            fan_out_memory: Allowance::new(FAN_OUT_MEMORY),
            default_metrics: metrics.upstream(&"default".into()),
            metrics,
            log,
            pseudonym,
            identity,
            in_flight: AtomicUsize::new(0),
            served: AtomicU64::new(0),
            became_idle: Notify::new(),
            is_draining: AtomicBool::new(false),
            draining: Notify::new(),
            is_ending: AtomicBool::new(false),
            ending: Notify::new(),
        }
    }

    /// The policy of this moment: to be taken once for each request.
    pub fn snapshot(&self) -> Arc<Config> {
        self.policy.load_full()
    }

    /// A new policy is in force: what was made from the old one is made anew.
    pub fn policy_changed(&self) {
        let config = self.snapshot();
        self.metrics.set_config(&config.hash);
        self.registry.fleet().nudge();
        if let Err(error) = self.registry.dialer().set_dns(&config.dns) {
            tracing::error!(%error, cause = error.cause(), "the new name servers cannot be used; the old ones stay");
        }
        if self.misses_interception(&config) {
            tracing::error!(
                "the policy intercepts, but the process has no CA since its start: until the next one \
                 calls in TLS are tunnelled past their policies"
            );
        }
        self.registry.sweep(&config, Instant::now());
    }

    /// Whether this policy would have TLS end here, which the process cannot do.
    pub fn misses_interception(&self, config: &Config) -> bool {
        self.interceptor.is_none() && config.policies().any(|policy| policy.intercept)
    }

    /// The upstreams.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// What ends the TLS of clients; `None` when the process has no CA that they could trust.
    pub fn interceptor(&self) -> Option<&Interceptor> {
        self.interceptor.as_ref()
    }

    /// What request bodies may hold for replay.
    pub fn replay(&self) -> &Arc<ReplayAllowance> {
        &self.replay
    }

    /// The flights under way.
    pub fn flights(&self) -> &Flights<Brought> {
        &self.flights
    }

    /// What the flights have gathered.
    pub(super) fn gathered(&self) -> &Arc<Gathered> {
        &self.gathered
    }

    /// Leave to renew a kept answer beside all calls; `None` when enough are being renewed.
    pub(super) fn place_for_renewal(&self) -> Option<OwnedSemaphorePermit> {
        self.renewals.clone().try_acquire_owned().ok()
    }

    /// What goes to and from the answers that pods share.
    pub(super) fn shelf(&self) -> &Shelf {
        &self.shelf
    }

    /// One for each call that a fan-out has under way.
    pub fn fan_out_places(&self) -> &Semaphore {
        &self.fan_out_places
    }

    /// For the bodies that fan-outs hold.
    pub fn fan_out_memory(&self) -> &Allowance {
        &self.fan_out_memory
    }

    /// All metrics.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    pub(super) fn default_metrics(&self) -> &Arc<UpstreamMetrics> {
        &self.default_metrics
    }

    /// The access log.
    pub fn log(&self) -> &AccessLog {
        &self.log
    }

    /// Our entry in `Via` of requests.
    pub fn identity(&self) -> &HeaderValue {
        &self.identity
    }

    /// Whether a request has passed through this process before.
    pub fn has_passed(&self, headers: &http::HeaderMap) -> bool {
        headers
            .get_all(http::header::VIA)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .any(|entry| entry.split_whitespace().nth(1) == Some(self.pseudonym.as_str()))
    }

    pub(super) fn enter(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn leave(&self) {
        self.served.fetch_add(1, Ordering::Relaxed);
        if self.in_flight.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.became_idle.notify_waiters();
        }
    }

    /// From now on every answer tells its client to open another connection, which will be elsewhere.
    pub fn start_draining(&self) {
        self.is_draining.store(true, Ordering::Relaxed);
        self.draining.notify_waiters();
    }

    /// Whether the process is about to leave.
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed)
    }

    /// Resolves when the process is about to leave, at once when it is already. Cancel-safe.
    pub async fn draining(&self) {
        // In this order, since what begins between the two is heard from here on.
        let begins = self.draining.notified();
        if !self.is_draining() {
            begins.await;
        }
    }

    /// Ends what still runs: a call without an answer gets one that says so, bodies and tunnels are cut.
    pub fn end_calls(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
        self.ending.notify_waiters();
    }

    /// Whether calls are being ended.
    pub fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    /// Resolves when calls are being ended; for the task of a connection, which polls all that it serves.
    pub fn ending(&self) -> Notified<'_> {
        self.ending.notified()
    }

    /// Works on a call, and gives it up where it would have to wait on while calls are being ended.
    ///
    /// # Errors
    /// Those of `work`, or [`Error::ShuttingDown`].
    pub async fn until_ending<T>(
        &self,
        mut work: Pin<&mut impl Future<Output = Result<T, Error>>>,
    ) -> Result<T, Error> {
        poll_fn(|cx| match work.as_mut().poll(cx) {
            Poll::Pending if self.is_ending() => Poll::Ready(Err(Error::ShuttingDown)),
            polled => polled,
        })
        .await
    }

    /// Requests and tunnels under way.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Requests and tunnels that have ended since the start.
    pub fn served(&self) -> u64 {
        self.served.load(Ordering::Relaxed)
    }

    /// Resolves when the last request under way ends. Cancel-safe.
    pub async fn became_idle(&self) {
        self.became_idle.notified().await;
    }
}
