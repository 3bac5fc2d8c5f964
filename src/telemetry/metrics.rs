//! Every number that hedgerow shows, with its name, in one place.
//!
//! There is no global recorder: a [`Metrics`] is a value, so that two instances in one process (tests, the
//! demo) do not add up in each other's counters. Recording goes through handles: [`Metrics::upstream`]
//! registers what an upstream needs once, and a request then increments atomics without looking up a
//! name or formatting a label.
//!
//! Labels are closed sets, enums here. `upstream` is a policy's name and never a host: hosts come from
//! callers, and a series for each would be a leak that anyone can feed. An upstream's metrics outlive
//! reloads, so that counters never fall. Series of small sets exist from the start with the value 0, since
//! a rate over a series that appears with its first event misses that event; requests and attempts, whose
//! sets are large, appear when used.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::StatusCode;
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, Recorder, SharedString};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use parking_lot::{Mutex, RwLock};

use crate::error::Stage;

const REQUESTS: &str = "hedgerow_requests_total";
const REQUEST_DURATION: &str = "hedgerow_request_duration_seconds";
const ATTEMPTS: &str = "hedgerow_upstream_attempts_total";
const HEDGES: &str = "hedgerow_hedges_total";
const HEDGE_DELAY: &str = "hedgerow_hedge_delay_seconds";
const BREAKER_STATE: &str = "hedgerow_breaker_state";
const BREAKER_TRANSITIONS: &str = "hedgerow_breaker_transitions_total";
const BULKHEAD_IN_FLIGHT: &str = "hedgerow_bulkhead_in_flight";
const BULKHEAD_QUEUED: &str = "hedgerow_bulkhead_queued";
const BULKHEAD_REJECTED: &str = "hedgerow_bulkhead_rejected_total";
const DEADLINE_EXCEEDED: &str = "hedgerow_deadline_exceeded_total";
const RETRIES: &str = "hedgerow_retries_total";
const RATE_LIMITED: &str = "hedgerow_rate_limited_total";
const COALESCED: &str = "hedgerow_coalesced_total";
const CACHE_REQUESTS: &str = "hedgerow_cache_requests_total";
const FALLBACKS: &str = "hedgerow_fallbacks_total";
const FANOUT_REQUESTS: &str = "hedgerow_fanout_requests_total";
const FANOUT_CALLS: &str = "hedgerow_fanout_calls_total";
const FANOUT_DURATION: &str = "hedgerow_fanout_duration_seconds";
const INTERCEPT_DECLINED: &str = "hedgerow_intercept_declined_total";
const CONFIG_RELOADS: &str = "hedgerow_config_reloads_total";
const SHARED_STATE_UP: &str = "hedgerow_shared_state_up";
const CONFIG_INFO: &str = "hedgerow_config_info";
const CONNECTIONS_OPEN: &str = "hedgerow_connections_open";
const ACCESS_LOG_DROPPED: &str = "hedgerow_access_log_dropped_total";

const COUNTERS: [(&str, &str); 16] = [
    (REQUESTS, "Requests by status and by how they ended."),
    (ATTEMPTS, "Attempts at an upstream by kind and result."),
    (HEDGES, "Hedges by outcome; the suppressed ones were due and not sent."),
    (BREAKER_TRANSITIONS, "Changes of a breaker's state by the state that it came to."),
    (BULKHEAD_REJECTED, "Attempts refused for want of a permit and of a place in the queue."),
    (DEADLINE_EXCEEDED, "Deadlines that struck, by what was being waited for."),
    (RETRIES, "Retries by result; the suppressed ones were due and not made."),
    (RATE_LIMITED, "Attempts that a rate limit held up or refused, and pauses that upstreams asked for."),
    (COALESCED, "Calls that were answered by an equal one's flight."),
    (CACHE_REQUESTS, "Calls that the cache was asked about, by what it had."),
    (FALLBACKS, "Answers that stood in for one that could not be had, by kind."),
    (FANOUT_REQUESTS, "Fan-outs by how much of what they asked for came."),
    (FANOUT_CALLS, "Calls of fan-outs by where the result comes from, or why there is none."),
    (INTERCEPT_DECLINED, "TLS handshakes in which a client refused the pod's certificate."),
    (CONFIG_RELOADS, "Reloads of the policy file by result."),
    (ACCESS_LOG_DROPPED, "Lines that the access log lost because nobody took them in time."),
];

const GAUGES: [(&str, &str); 4] = [
    (BREAKER_STATE, "Breakers of the upstream in each state."),
    (BULKHEAD_IN_FLIGHT, "Permits that are out."),
    (BULKHEAD_QUEUED, "Attempts that wait for a permit."),
    (CONNECTIONS_OPEN, "Client connections by listener."),
];

const HISTOGRAMS: [(&str, &str); 3] = [
    (REQUEST_DURATION, "From a request's head to the last byte of its answer."),
    (HEDGE_DELAY, "How long an attempt went without an answer before its hedge was due."),
    (FANOUT_DURATION, "From a fan-out's head until all is known of its calls that will be."),
];

/// From a cache's answer to the longest that a policy lets a call take by default, close together where
/// tools and models answer.
const BUCKETS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

/// A closed set of label values.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident => $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$variant_doc])* $variant,)+ }

        impl $name {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// The word for labels and log lines.
            pub fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }
        }
    };
}

words! {
    /// How a request ended.
    Outcome {
        /// The upstream's answer was passed on whole.
        Answered => "answered",
        /// Hedgerow answered with an error of its own.
        Error => "error",
        /// The answer was cut after its head.
        Incomplete => "incomplete",
        /// Something stood in for the upstream's answer.
        Degraded => "degraded",
        /// The client went away; its status is 499.
        ClientLeft => "client_left",
        /// Nobody needed its answer any more: others of its fan-out were enough, or its backup. Its status is 499 too.
        NotAwaited => "not_awaited",
        /// A tunnel, whatever went through it.
        Tunnel => "tunnel",
    }
}

words! {
    /// Why an attempt was made.
    AttemptKind {
        /// The first of a call.
        Primary => "primary",
        /// The second one, because the first was slow.
        Hedge => "hedge",
        /// Another one after a failure.
        Retry => "retry",
        /// One that tells a half-open breaker how the upstream is.
        Probe => "probe",
    }
}

words! {
    /// What came of an attempt.
    AttemptResult {
        /// An acceptable answer.
        Ok => "ok",
        /// An answer with an unacceptable status.
        Status => "status",
        /// Nothing in time.
        Timeout => "timeout",
        /// The connection broke, or what came was no HTTP.
        Reset => "reset",
        /// There was no connection.
        Connect => "connect",
        /// There was no TLS session.
        Tls => "tls",
        /// Nobody waited for it any more.
        Cancelled => "cancelled",
    }
}

words! {
    /// What came of a hedge that was due.
    HedgeOutcome {
        /// Its answer was passed on.
        Won => "won",
        /// The primary's answer was passed on.
        Lost => "lost",
        /// It brought no acceptable answer.
        Failed => "failed",
        /// Not sent: the extra-load budget had no token.
        SuppressedBudget => "suppressed_budget",
        /// Not sent: its target's breaker was not closed.
        SuppressedBreaker => "suppressed_breaker",
        /// Not sent: no permit was free.
        SuppressedBulkhead => "suppressed_bulkhead",
        /// Not sent: no rate token was free.
        SuppressedRate => "suppressed_rate",
        /// Not sent: too little time was left.
        SuppressedDeadline => "suppressed_deadline",
        /// Not sent: hedges do not make this upstream faster.
        SuppressedNoGain => "suppressed_no_gain",
        /// Not sent: the upstream asked for fewer calls.
        SuppressedPushBack => "suppressed_push_back",
        /// Not sent: the request's body was too large to keep.
        SuppressedBody => "suppressed_body",
    }
}

words! {
    /// What stands in for an answer that could not be had.
    StandIn {
        /// Another upstream's answer.
        Backup => "backup",
        /// A kept answer that is no longer fresh.
        Stale => "stale",
        /// A fixed one.
        Static => "static",
    }
}

words! {
    /// What came of a retry, or why there was none.
    RetryResult {
        /// It brought an acceptable answer.
        Succeeded => "succeeded",
        /// It did not.
        Failed => "failed",
        /// Not made: the extra-load budget had no token.
        SuppressedBudget => "suppressed_budget",
        /// Not made: a guard was shut when its time had come.
        SuppressedGuard => "suppressed_guard",
        /// Not made: the wait would have left no time.
        SuppressedDeadline => "suppressed_deadline",
        /// Not made: the upstream asked for none, or for a wait that leaves no time.
        SuppressedPushBack => "suppressed_push_back",
        /// Not made: the call is itself a retry of the layer above.
        SuppressedCallersRetry => "suppressed_callers_retry",
        /// Not made: the upstream may have acted on the call, and twice may be more than once.
        SuppressedNotIdempotent => "suppressed_not_idempotent",
        /// Not made: the request's body was too large to keep.
        SuppressedBody => "suppressed_body",
    }
}

words! {
    /// What a rate limit did.
    RateLimited {
        /// An attempt had to wait for its token, and got it.
        Waited => "waited",
        /// An attempt was refused, since its token would have come too late.
        Refused => "refused",
        /// The upstream asked for a pause.
        Paused => "paused",
    }
}

words! {
    /// What the cache had for a call.
    CacheResult {
        /// A fresh answer.
        Hit => "hit",
        /// A stale one, given while it is renewed.
        Stale => "stale",
        /// One that the upstream has confirmed.
        Revalidated => "revalidated",
        /// None.
        Miss => "miss",
        /// No part in it.
        Bypass => "bypass",
    }
}

words! {
    /// Where an answer comes from.
    Source {
        /// The first attempt, or a retry.
        Primary => "primary",
        /// A hedge.
        Hedge => "hedge",
        /// An equal call that was under way.
        Collapsed => "collapsed",
        /// A kept answer.
        Cache => "cache",
        /// Another upstream, which stands in.
        Backup => "backup",
        /// A kept answer that is no longer fresh, and stands in.
        Stale => "stale",
        /// A fixed answer, which stands in.
        Degraded => "degraded",
    }
}

impl From<StandIn> for Source {
    fn from(stand_in: StandIn) -> Self {
        match stand_in {
            StandIn::Backup => Self::Backup,
            StandIn::Stale => Self::Stale,
            StandIn::Static => Self::Degraded,
        }
    }
}

words! {
    /// How much of what a fan-out asked for came.
    FanoutOutcome {
        /// A result of every call that is not optional.
        Complete => "complete",
        /// Results of some.
        Partial => "partial",
        /// No result at all.
        Empty => "empty",
        /// The client went away first.
        ClientLeft => "client_left",
        /// Nothing was called: the request was refused.
        Refused => "refused",
    }
}

words! {
    /// Where the result of a fan-out's call comes from, or why there is none.
    FanoutCall {
        /// The upstream's first attempt, or a retry.
        Primary => "primary",
        /// A hedge.
        Hedge => "hedge",
        /// An equal call that was under way.
        Collapsed => "collapsed",
        /// A backup of the policy or of the call.
        Backup => "backup",
        /// A kept answer.
        Cache => "cache",
        /// A kept answer that is no longer fresh.
        Stale => "stale",
        /// The policy's fixed answer.
        Degraded => "degraded",
        /// None: the fan-out's deadline struck.
        Deadline => "deadline",
        /// None: the breaker was open.
        CircuitOpen => "circuit_open",
        /// None: the upstream's own answer was not acceptable.
        UpstreamStatus => "upstream_status",
        /// None: enough others had come.
        NotAwaited => "not_awaited",
        /// None, for another reason.
        Error => "error",
    }
}

impl From<Source> for FanoutCall {
    fn from(source: Source) -> Self {
        match source {
            Source::Primary => Self::Primary,
            Source::Hedge => Self::Hedge,
            Source::Collapsed => Self::Collapsed,
            Source::Cache => Self::Cache,
            Source::Backup => Self::Backup,
            Source::Stale => Self::Stale,
            Source::Degraded => Self::Degraded,
        }
    }
}

words! {
    /// The state that a breaker is in or comes to.
    BreakerState {
        /// Calls pass.
        Closed => "closed",
        /// None do.
        Open => "open",
        /// Probes do.
        HalfOpen => "half_open",
    }
}

words! {
    /// What came of a reload.
    Reload {
        /// The new policy is in force.
        Applied => "applied",
        /// The file is broken; the old policy stays.
        Rejected => "rejected",
        /// The file says what it said.
        Unchanged => "unchanged",
    }
}

words! {
    /// A port.
    Listener {
        /// Where agents connect.
        Proxy => "proxy",
        /// Where a redirect rule sends connections.
        Transparent => "transparent",
        /// Health, metrics, status.
        Admin => "admin",
    }
}

/// All metrics of one instance of hedgerow.
pub struct Metrics {
    registry: Arc<Registry>,
    handle: PrometheusHandle,
    /// By policy name; grows only as policies are edited.
    upstreams: RwLock<HashMap<Arc<str>, Arc<UpstreamMetrics>>>,
    fanouts: Vec<Counter>,
    fanout_calls: Vec<Counter>,
    fanout_duration: Histogram,
    reloads: Vec<Counter>,
    connections: Vec<(Gauge, Arc<AtomicUsize>)>,
    access_log_dropped: Counter,
    config_hash: Mutex<String>,
    shared_state: Mutex<Option<bool>>,
}

impl Metrics {
    /// With nothing counted yet.
    pub fn new() -> Self {
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &BUCKETS)
            .expect("there are buckets")
            .build_recorder();
        describe(&recorder);
        let handle = recorder.handle();
        let registry = Arc::new(Registry(recorder));
        let reloads = each(Reload::ALL, |it| registry.counter(CONFIG_RELOADS, &[("result", it.word())]));
        let connections = each(Listener::ALL, |it| {
            (registry.gauge(CONNECTIONS_OPEN, &[("listener", it.word())]), Arc::default())
        });
        Self {
            handle,
            upstreams: RwLock::default(),
            fanouts: each(FanoutOutcome::ALL, |it| {
                registry.counter(FANOUT_REQUESTS, &[("result", it.word())])
            }),
            fanout_calls: each(FanoutCall::ALL, |it| {
                registry.counter(FANOUT_CALLS, &[("result", it.word())])
            }),
            fanout_duration: registry.histogram(FANOUT_DURATION, &[]),
            reloads,
            connections,
            access_log_dropped: registry.counter(ACCESS_LOG_DROPPED, &[]),
            config_hash: Mutex::default(),
            shared_state: Mutex::default(),
            registry,
        }
    }

    /// The metrics of the upstream with this policy name; always the same ones.
    pub fn upstream(&self, name: &Arc<str>) -> Arc<UpstreamMetrics> {
        if let Some(known) = self.upstreams.read().get(name) {
            return known.clone();
        }
        let mut upstreams = self.upstreams.write();
        let fresh = || Arc::new(UpstreamMetrics::new(self.registry.clone(), name));
        upstreams.entry(name.clone()).or_insert_with(fresh).clone()
    }

    /// The metrics of every upstream that any policy has named so far.
    pub fn upstreams(&self) -> Vec<Arc<UpstreamMetrics>> {
        self.upstreams.read().values().cloned().collect()
    }

    /// Counts a fan-out that has ended, with the time that it took where its calls were made.
    pub fn fanout(&self, outcome: FanoutOutcome, elapsed: Duration) {
        self.fanouts[outcome as usize].increment(1);
        if outcome != FanoutOutcome::Refused {
            self.fanout_duration.record(elapsed);
        }
    }

    /// Counts a call of a fan-out.
    pub fn fanout_call(&self, result: FanoutCall) {
        self.fanout_calls[result as usize].increment(1);
    }

    /// Counts a reload.
    pub fn reload(&self, result: Reload) {
        self.reloads[result as usize].increment(1);
    }

    /// The hash of the policy in force, for `hedgerow_config_info`.
    pub fn set_config(&self, hash: &str) {
        hash.clone_into(&mut self.config_hash.lock());
    }

    /// Whether what pods share can be reached; `None` where they share nothing, which has no series then, so that
    /// no alert takes it for trouble.
    pub fn set_shared_state(&self, is_up: Option<bool>) {
        *self.shared_state.lock() = is_up;
    }

    /// Counts a client connection as open for as long as the guard lives.
    pub fn connection(&self, listener: Listener) -> OpenConnection {
        let open = &self.connections[listener as usize].1;
        open.fetch_add(1, Ordering::Relaxed);
        OpenConnection(open.clone())
    }

    /// How many client connections a listener has.
    pub fn open_connections(&self, listener: Listener) -> usize {
        self.connections[listener as usize].1.load(Ordering::Relaxed)
    }

    /// For the access log to count the lines that it loses.
    pub fn access_log_dropped(&self) -> Counter {
        self.access_log_dropped.clone()
    }

    /// Everything in Prometheus' text format, version 0.0.4.
    pub fn render(&self) -> String {
        for (gauge, open) in &self.connections {
            gauge.set(open.load(Ordering::Relaxed) as f64);
        }
        let mut text = self.handle.render();
        // By hand, because a gauge that was registered never goes away again: one for each policy that
        // ever was would stay.
        let hash = self.config_hash.lock();
        if !hash.is_empty() {
            let help = "The policy in force, by the digest of its file.";
            let printable: String = hash.chars().filter(char::is_ascii_alphanumeric).collect();
            // Writing to a String cannot fail.
            let _ = write!(
                text,
                "# HELP {CONFIG_INFO} {help}\n# TYPE {CONFIG_INFO} gauge\n{CONFIG_INFO}{{hash=\"{printable}\"}} 1\n"
            );
        }
        drop(hash);
        if let Some(is_up) = *self.shared_state.lock() {
            let help = "Whether what pods share can be reached.";
            let value = u8::from(is_up);
            let _ = write!(
                text,
                "# HELP {SHARED_STATE_UP} {help}\n# TYPE {SHARED_STATE_UP} gauge\n{SHARED_STATE_UP} {value}\n"
            );
        }
        text
    }

    /// Folds the observations since the last time into their buckets. To be called every few seconds:
    /// until then each one is kept by itself.
    pub fn upkeep(&self) {
        self.handle.run_upkeep();
    }
}

/// A client connection that is open.
#[derive(Debug)]
#[must_use = "dropping it means that the connection is closed"]
pub struct OpenConnection(Arc<AtomicUsize>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

fn describe(recorder: &PrometheusRecorder) {
    let (name, help) = (KeyName::from_const_str, SharedString::const_str);
    for (metric, text) in COUNTERS {
        recorder.describe_counter(name(metric), None, help(text));
    }
    for (metric, text) in GAUGES {
        recorder.describe_gauge(name(metric), None, help(text));
    }
    for (metric, text) in HISTOGRAMS {
        recorder.describe_histogram(name(metric), None, help(text));
    }
}

/// One handle for each of a closed set, in its order.
fn each<L: Copy, H>(all: &[L], register: impl Fn(L) -> H) -> Vec<H> {
    all.iter().map(|label| register(*label)).collect()
}

/// Makes handles. The recorder is asked directly: the macros' way to it is a global or a thread-local.
struct Registry(PrometheusRecorder);

impl Registry {
    const METADATA: Metadata<'static> = Metadata::new("hedgerow", Level::INFO, None);

    fn counter(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Counter {
        self.0.register_counter(&key(name, labels), &Self::METADATA)
    }

    fn gauge(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Gauge {
        self.0.register_gauge(&key(name, labels), &Self::METADATA)
    }

    fn histogram(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Histogram {
        self.0.register_histogram(&key(name, labels), &Self::METADATA)
    }
}

fn key(name: &'static str, labels: &[(&'static str, &str)]) -> Key {
    let labels: Vec<Label> =
        labels.iter().map(|(key, value)| Label::new(*key, (*value).to_owned())).collect();
    Key::from_parts(name, labels)
}

/// The metrics of one upstream. Recording never blocks for longer than a short read lock.
pub struct UpstreamMetrics {
    registry: Arc<Registry>,
    name: Arc<str>,
    requests: RwLock<HashMap<(u16, Outcome), Counter>>,
    duration: Histogram,
    attempts: [OnceLock<Counter>; AttemptKind::ALL.len() * AttemptResult::ALL.len()],
    hedges: Vec<Counter>,
    hedge_delay: Histogram,
    retries: Vec<Counter>,
    rate_limited: Vec<Counter>,
    coalesced: Counter,
    cache: Vec<Counter>,
    fallbacks: Vec<Counter>,
    breakers: Vec<Gauge>,
    transitions: Vec<Counter>,
    in_flight: Gauge,
    queued: Gauge,
    rejected: Counter,
    declined: Counter,
    deadlines: Vec<Counter>,
}

impl UpstreamMetrics {
    fn new(registry: Arc<Registry>, name: &Arc<str>) -> Self {
        let upstream = [("upstream", &**name)];
        let with = |key: &'static str, word: &'static str| [upstream[0], (key, word)];
        let r = &registry;
        Self {
            requests: RwLock::default(),
            duration: r.histogram(REQUEST_DURATION, &upstream),
            attempts: [const { OnceLock::new() }; _],
            hedges: each(HedgeOutcome::ALL, |it| r.counter(HEDGES, &with("outcome", it.word()))),
            hedge_delay: r.histogram(HEDGE_DELAY, &upstream),
            retries: each(RetryResult::ALL, |it| r.counter(RETRIES, &with("result", it.word()))),
            rate_limited: each(RateLimited::ALL, |it| r.counter(RATE_LIMITED, &with("action", it.word()))),
            coalesced: r.counter(COALESCED, &upstream),
            cache: each(CacheResult::ALL, |it| r.counter(CACHE_REQUESTS, &with("result", it.word()))),
            fallbacks: each(StandIn::ALL, |it| r.counter(FALLBACKS, &with("kind", it.word()))),
            breakers: each(BreakerState::ALL, |it| r.gauge(BREAKER_STATE, &with("state", it.word()))),
            transitions: each(BreakerState::ALL, |it| r.counter(BREAKER_TRANSITIONS, &with("to", it.word()))),
            in_flight: r.gauge(BULKHEAD_IN_FLIGHT, &upstream),
            queued: r.gauge(BULKHEAD_QUEUED, &upstream),
            rejected: r.counter(BULKHEAD_REJECTED, &upstream),
            declined: r.counter(INTERCEPT_DECLINED, &upstream),
            deadlines: each(&Stage::ALL, |it| r.counter(DEADLINE_EXCEEDED, &with("stage", it.word()))),
            name: name.clone(),
            registry,
        }
    }

    /// The policy name of the upstream.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A request came to its end. `code` is the status that the client got, 499 when it had left.
    pub fn request(&self, code: u16, outcome: Outcome, elapsed: Duration) {
        self.duration.record(elapsed);
        let key = (bounded(code), outcome);
        if let Some(counter) = self.requests.read().get(&key) {
            return counter.increment(1);
        }
        let register = || {
            let code = if key.0 < 10 { format!("{}xx", key.0) } else { key.0.to_string() };
            let labels = [("upstream", &*self.name), ("code", code.as_str()), ("outcome", outcome.word())];
            self.registry.counter(REQUESTS, &labels)
        };
        self.requests.write().entry(key).or_insert_with(register).increment(1);
    }

    /// An attempt came to its end.
    pub fn attempt(&self, kind: AttemptKind, result: AttemptResult) {
        let at = kind as usize * AttemptResult::ALL.len() + result as usize;
        let register = || {
            let labels = [("upstream", &*self.name), ("kind", kind.word()), ("result", result.word())];
            self.registry.counter(ATTEMPTS, &labels)
        };
        self.attempts[at].get_or_init(register).increment(1);
    }

    /// A hedge was due.
    pub fn hedge(&self, outcome: HedgeOutcome) {
        self.hedges[outcome as usize].increment(1);
    }

    /// A hedge was due after this long.
    pub fn hedge_delay(&self, delay: Duration) {
        self.hedge_delay.record(delay);
    }

    /// A retry was due.
    pub fn retry(&self, result: RetryResult) {
        self.retries[result as usize].increment(1);
    }

    /// A rate limit held something up.
    pub fn rate_limited(&self, action: RateLimited) {
        self.rate_limited[action as usize].increment(1);
    }

    /// A call was answered by an equal one's flight.
    pub fn coalesced(&self) {
        self.coalesced.increment(1);
    }

    /// The cache was asked about a call.
    pub fn cache(&self, result: CacheResult) {
        self.cache[result as usize].increment(1);
    }

    /// Something stood in for the upstream's answer.
    pub fn fallback(&self, kind: StandIn) {
        self.fallbacks[kind as usize].increment(1);
    }

    /// One of the upstream's breakers changed its state.
    pub fn breaker_transition(&self, to: BreakerState) {
        self.transitions[to as usize].increment(1);
    }

    /// An attempt got neither a permit nor a place in the queue.
    pub fn bulkhead_rejected(&self) {
        self.rejected.increment(1);
    }

    /// A client does not trust the certificate that it was shown.
    pub fn intercept_declined(&self) {
        self.declined.increment(1);
    }

    /// A deadline struck.
    pub fn deadline_exceeded(&self, stage: Stage) {
        self.deadlines[stage_index(stage)].increment(1);
    }

    /// How many of the upstream's breakers are closed, open and half-open. To be set before rendering.
    pub fn set_breakers(&self, [closed, open, half_open]: [usize; 3]) {
        self.breakers[BreakerState::Closed as usize].set(closed as f64);
        self.breakers[BreakerState::Open as usize].set(open as f64);
        self.breakers[BreakerState::HalfOpen as usize].set(half_open as f64);
    }

    /// How many permits are out and how many attempts wait for one. To be set before rendering.
    pub fn set_bulkhead(&self, in_flight: usize, queued: usize) {
        self.in_flight.set(in_flight as f64);
        self.queued.set(queued as f64);
    }
}

impl std::fmt::Debug for UpstreamMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UpstreamMetrics").field("name", &self.name).finish_non_exhaustive()
    }
}

fn stage_index(stage: Stage) -> usize {
    Stage::ALL.iter().position(|it| *it == stage).expect("ALL has every stage")
}

/// Statuses without a name count by their class, written as one digit: an upstream must not be able to
/// make a series of each of the nine hundred numbers.
fn bounded(code: u16) -> u16 {
    let is_named = |code| StatusCode::from_u16(code).is_ok_and(|status| status.canonical_reason().is_some());
    if code == CLIENT_LEFT || is_named(code) { code } else { (code / 100).min(9) }
}

/// The status of a client that left, by the convention that nginx began.
const CLIENT_LEFT: u16 = 499;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn lines(metrics: &Metrics) -> Vec<String> {
        metrics.render().lines().map(str::to_owned).collect()
    }

    fn assert_shown(metrics: &Metrics, line: &str) {
        let text = metrics.render();
        assert!(text.lines().any(|shown| shown == line), "{line} is not in\n{text}");
    }

    /// Touches everything once.
    fn busy() -> Metrics {
        let metrics = Metrics::new();
        let quotes = metrics.upstream(&"quotes".into());
        quotes.request(200, Outcome::Answered, Duration::from_millis(80));
        quotes.attempt(AttemptKind::Primary, AttemptResult::Ok);
        quotes.hedge(HedgeOutcome::Won);
        quotes.hedge_delay(Duration::from_millis(20));
        quotes.breaker_transition(BreakerState::HalfOpen);
        quotes.bulkhead_rejected();
        quotes.intercept_declined();
        quotes.deadline_exceeded(Stage::Queue);
        metrics.set_shared_state(Some(true));
        quotes.set_breakers([2, 1, 0]);
        quotes.set_bulkhead(7, 3);
        drop(metrics.connection(Listener::Admin));
        metrics.reload(Reload::Applied);
        metrics.set_config("abc123");
        metrics
    }

    #[test]
    fn exactly_these_names_are_shown_with_help_and_type() {
        let metrics = busy();
        let expected: BTreeSet<&str> = COUNTERS
            .iter()
            .chain(&GAUGES)
            .chain(&HISTOGRAMS)
            .map(|(name, _)| *name)
            .chain([CONFIG_INFO, SHARED_STATE_UP])
            .collect();
        for prefix in ["# TYPE ", "# HELP "] {
            let text = metrics.render();
            let shown: BTreeSet<&str> = text
                .lines()
                .filter_map(|line| line.strip_prefix(prefix)?.split_once(' '))
                .map(|(name, _)| name)
                .collect();
            assert_eq!(shown, expected);
        }
    }

    #[test]
    fn what_was_recorded_is_shown() {
        let metrics = busy();
        let _open = [(); 4].map(|()| metrics.connection(Listener::Proxy));
        for line in [
            r#"hedgerow_requests_total{upstream="quotes",code="200",outcome="answered"} 1"#,
            r#"hedgerow_request_duration_seconds_bucket{upstream="quotes",le="0.05"} 0"#,
            r#"hedgerow_request_duration_seconds_bucket{upstream="quotes",le="0.1"} 1"#,
            r#"hedgerow_request_duration_seconds_count{upstream="quotes"} 1"#,
            r#"hedgerow_upstream_attempts_total{upstream="quotes",kind="primary",result="ok"} 1"#,
            r#"hedgerow_hedges_total{upstream="quotes",outcome="won"} 1"#,
            r#"hedgerow_hedges_total{upstream="quotes",outcome="suppressed_no_gain"} 0"#,
            r#"hedgerow_hedge_delay_seconds_count{upstream="quotes"} 1"#,
            r#"hedgerow_breaker_state{upstream="quotes",state="closed"} 2"#,
            r#"hedgerow_breaker_state{upstream="quotes",state="open"} 1"#,
            r#"hedgerow_breaker_state{upstream="quotes",state="half_open"} 0"#,
            r#"hedgerow_breaker_transitions_total{upstream="quotes",to="half_open"} 1"#,
            r#"hedgerow_bulkhead_in_flight{upstream="quotes"} 7"#,
            r#"hedgerow_bulkhead_queued{upstream="quotes"} 3"#,
            r#"hedgerow_bulkhead_rejected_total{upstream="quotes"} 1"#,
            r#"hedgerow_intercept_declined_total{upstream="quotes"} 1"#,
            r#"hedgerow_deadline_exceeded_total{upstream="quotes",stage="queue"} 1"#,
            r#"hedgerow_config_reloads_total{result="applied"} 1"#,
            r#"hedgerow_config_reloads_total{result="rejected"} 0"#,
            r#"hedgerow_config_info{hash="abc123"} 1"#,
            r#"hedgerow_connections_open{listener="proxy"} 4"#,
            "hedgerow_access_log_dropped_total 0",
        ] {
            assert_shown(&metrics, line);
        }
    }

    #[test]
    fn an_upstream_keeps_its_counters_over_reloads() {
        let metrics = Metrics::new();
        let before = metrics.upstream(&"quotes".into());
        before.hedge(HedgeOutcome::Lost);
        let after = metrics.upstream(&"quotes".into());
        assert!(Arc::ptr_eq(&before, &after));
        drop((before, after));
        metrics.upstream(&"quotes".into()).hedge(HedgeOutcome::Lost);
        assert_shown(&metrics, r#"hedgerow_hedges_total{upstream="quotes",outcome="lost"} 2"#);
    }

    #[test]
    fn two_instances_count_apart() {
        let (one, other) = (Metrics::new(), Metrics::new());
        one.upstream(&"quotes".into()).bulkhead_rejected();
        other.upstream(&"quotes".into());
        assert_shown(&one, r#"hedgerow_bulkhead_rejected_total{upstream="quotes"} 1"#);
        assert_shown(&other, r#"hedgerow_bulkhead_rejected_total{upstream="quotes"} 0"#);
    }

    #[test]
    fn only_the_policy_in_force_is_shown() {
        let metrics = Metrics::new();
        for hash in ["aaaa", "bbbb"] {
            metrics.set_config(hash);
        }
        let shown: Vec<String> =
            lines(&metrics).into_iter().filter(|line| line.starts_with(CONFIG_INFO)).collect();
        assert_eq!(shown, [r#"hedgerow_config_info{hash="bbbb"} 1"#]);
    }

    #[test]
    fn an_upstream_cannot_make_a_series_of_every_status() {
        let metrics = Metrics::new();
        let quotes = metrics.upstream(&"quotes".into());
        for code in 0..=u16::MAX {
            quotes.request(code, Outcome::Answered, Duration::ZERO);
        }
        let series =
            lines(&metrics).iter().filter(|line| line.starts_with("hedgerow_requests_total{")).count();
        assert!(series < 80, "{series} series");
        quotes.request(499, Outcome::ClientLeft, Duration::ZERO);
        assert_shown(
            &metrics,
            r#"hedgerow_requests_total{upstream="quotes",code="499",outcome="client_left"} 1"#,
        );
        quotes.request(299, Outcome::Incomplete, Duration::ZERO);
        assert_shown(
            &metrics,
            r#"hedgerow_requests_total{upstream="quotes",code="2xx",outcome="incomplete"} 1"#,
        );
    }

    #[test]
    fn upkeep_loses_no_observation() {
        let metrics = Metrics::new();
        let quotes = metrics.upstream(&"quotes".into());
        for _ in 0..3 {
            quotes.request(200, Outcome::Answered, Duration::from_secs(2));
            metrics.upkeep();
        }
        assert_shown(&metrics, r#"hedgerow_request_duration_seconds_count{upstream="quotes"} 3"#);
        assert_shown(&metrics, r#"hedgerow_request_duration_seconds_sum{upstream="quotes"} 6"#);
    }

    #[test]
    fn words_are_unique_in_their_set() {
        let distinct = |words: Vec<&str>| words.len() == words.iter().collect::<BTreeSet<_>>().len();
        assert!(distinct(each(Outcome::ALL, Outcome::word)));
        assert!(distinct(each(AttemptKind::ALL, AttemptKind::word)));
        assert!(distinct(each(AttemptResult::ALL, AttemptResult::word)));
        assert!(distinct(each(HedgeOutcome::ALL, HedgeOutcome::word)));
    }
}
