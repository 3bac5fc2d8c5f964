//! The journey of a request, top to bottom in one function: [`journey`].
//!
//! Each step is a stage with its own file, and no stage knows another; their order is decided here
//! alone, and this is why it is as it is:
//!
//! 1. **Target** comes first since everything else is looked up by it. The caller took one snapshot of
//!    the policy, and it serves the whole journey.
//! 2. **Deadline** before anything waits, so that all waits are bounded by one instant.
//! 3. **Tries** ([`race`]): a primary [`attempt`] and, when it is slow, a hedge. Every attempt passes
//!    the gates ([`gate`]) of the upstream it goes to, and owes a verdict at its end ([`judge`]).
//! 4. **Answer** ([`answer`]): the head goes out at once and the body is streamed. Permit, deadline,
//!    verdict and account last until the body ends. Once a byte has been passed on there is no other
//!    attempt: what breaks, breaks visibly.

pub mod answer;
pub mod attempt;
pub mod gate;
pub mod judge;
pub mod ledger;
pub mod outgoing;
pub mod race;
pub mod target;

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::Poll;

use arc_swap::ArcSwap;
use http::{HeaderValue, StatusCode};
use hyper::body::Incoming;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::Instant;

use self::answer::{Answer, Upgraded};
use self::attempt::Try;
use self::ledger::Ledger;
use crate::call::InterimSink;
use crate::config::Config;
use crate::error::Error;
use crate::policy::deadline::{Arrival, Deadline};
use crate::respond::headers;
use crate::telemetry::log::AccessLog;
use crate::telemetry::metrics::{Metrics, UpstreamMetrics};
use crate::upstream::egress;
use crate::upstream::registry::Registry;
use crate::wire::replay::ReplayAllowance;
use crate::wire::target::Scheme;

/// What all requests of the process share.
pub struct Proxy {
    policy: Arc<ArcSwap<Config>>,
    registry: Registry,
    replay: Arc<ReplayAllowance>,
    metrics: Arc<Metrics>,
    default_metrics: Arc<UpstreamMetrics>,
    log: AccessLog,
    pseudonym: String,
    identity: HeaderValue,
    in_flight: AtomicUsize,
    served: AtomicU64,
    became_idle: Notify,
    is_draining: AtomicBool,
    is_ending: AtomicBool,
    ending: Notify,
}

impl Proxy {
    /// Puts the shared parts together. Its name in `Via` gets a random word, so that a request that
    /// comes back is told from one that passed another hedgerow.
    pub fn new(
        policy: Arc<ArcSwap<Config>>,
        registry: Registry,
        metrics: Arc<Metrics>,
        log: AccessLog,
    ) -> Self {
        let pseudonym = format!("hedgerow-{:08x}", fastrand::u32(..));
        let identity = HeaderValue::from_str(&format!("1.1 {pseudonym}")).unwrap_or(headers::VIA);
        Self {
            policy,
            registry,
            replay: ReplayAllowance::new(),
            default_metrics: metrics.upstream(&"default".into()),
            metrics,
            log,
            pseudonym,
            identity,
            in_flight: AtomicUsize::new(0),
            served: AtomicU64::new(0),
            became_idle: Notify::new(),
            is_draining: AtomicBool::new(false),
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
        if let Err(error) = self.registry.dialer().set_dns(&config.dns) {
            tracing::error!(%error, cause = error.cause(), "the new name servers cannot be used; the old ones stay");
        }
        self.registry.sweep(&config, Instant::now());
    }

    /// The upstreams.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// What request bodies may hold for replay.
    pub fn replay(&self) -> &Arc<ReplayAllowance> {
        &self.replay
    }

    /// All metrics.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    fn default_metrics(&self) -> &Arc<UpstreamMetrics> {
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

    fn enter(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    fn leave(&self) {
        self.served.fetch_add(1, Ordering::Relaxed);
        if self.in_flight.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.became_idle.notify_waiters();
        }
    }

    /// From now on every answer tells its client to open another connection, which will be elsewhere.
    pub fn start_draining(&self) {
        self.is_draining.store(true, Ordering::Relaxed);
    }

    /// Whether the process is about to leave.
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed)
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

    /// What becomes of a call that would have to wait on.
    pub fn unless_ending<T>(&self, polled: Poll<Result<T, Error>>) -> Poll<Result<T, Error>> {
        match polled {
            Poll::Pending if self.is_ending() => Poll::Ready(Err(Error::ShuttingDown)),
            polled => polled,
        }
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

/// What comes of a call.
pub enum Arrived {
    /// An answer.
    Answer(Answer),
    /// The connection changes its protocol, and is the client's and the upstream's from now on.
    Upgraded(Box<Upgraded>),
}

/// A request as a listener hands it on: readable, and for some upstream.
pub struct Intake {
    /// Its head.
    pub head: http::request::Parts,
    /// Its body.
    pub body: Incoming,
    /// The upstream, as the client or its tunnel named it.
    pub authority: String,
    /// The scheme that the client named.
    pub scheme: Scheme,
    /// Whether it asks about the server as a whole: `OPTIONS *`.
    pub is_for_server: bool,
    /// Whether it came through a tunnel.
    pub is_tunnelled: bool,
    /// The snapshot that serves the whole journey.
    pub config: Arc<Config>,
    /// When it arrived.
    pub arrival: Arrival,
    /// Where interim answers go.
    pub interim: Option<Arc<dyn InterimSink>>,
}

/// Takes a request from its arrival to the head of its answer. Dropping the future cancels all that
/// the call alone was waiting for, requests at upstreams included.
pub async fn journey(proxy: &Proxy, intake: Intake, mut ledger: Ledger) -> Arrived {
    let mut end = None;
    let travelled = {
        let mut travel = pin!(async {
            // 1. Target: the upstream, its policy and route, and whether the name may be called at all.
            let (upstream, target) = target::find(proxy, &intake)?;
            let lane = target::lane(proxy, &intake, upstream, &target);
            ledger.goes_to(&lane, target.as_str());
            egress::check_name(&lane.config().egress, lane.dialled())?;

            // 2. Deadline: one instant for everything below.
            let policy = lane.stages().deadline.as_ref();
            let deadline = Deadline::of(policy, &intake.head.headers, intake.arrival)?;
            end = deadline.as_ref().map(|deadline| deadline.at);
            let call = target::call(proxy, intake, &lane, target, &ledger);

            // 3. Tries: attempts, hedged when slow.
            let outcome = race::run(Try { proxy, call: &call, deadline: deadline.as_ref() }, &lane).await?;
            Ok((call, deadline, outcome))
        });
        poll_fn(|cx| proxy.unless_ending(travel.as_mut().poll(cx))).await
    };

    // 4. Answer: the head at once, the body as it comes.
    match travelled {
        Ok((_, _, outcome)) if is_upgrade(&outcome) => {
            Arrived::Upgraded(Box::new(answer::upgrade(outcome, ledger)))
        }
        Ok((call, deadline, outcome)) => {
            Arrived::Answer(answer::deliver(&call, deadline.as_ref(), outcome, ledger))
        }
        Err(error) => Arrived::Answer(answer::refuse(error, ledger, end)),
    }
}

fn is_upgrade(outcome: &race::Outcome) -> bool {
    outcome.head.response.status() == StatusCode::SWITCHING_PROTOCOLS
}
