//! The policy as the rest of the crate sees it: typed, complete, nothing optional that has a default.
//!
//! A [`Config`] is one immutable snapshot. Listeners take one for each request and keep it to the
//! request's end, so a reload never mixes two policies. What a user wrote is in `raw`; `build`
//! turns it into this and gathers every problem on the way; [`watch`] does so again when the file
//! changes.
//!
//! A stage that is off is `None`; a number that means "no bound" does not exist.

mod build;
mod de;
mod effective;
pub mod egress;
mod explain;
mod fields;
mod files;
mod hosts;
mod load;
mod notation;
mod problem;
mod quoting;
mod raw;
mod redis_url;
mod report;
mod schema;
mod secret;
mod sections;
mod shared_state;
mod stages;
mod surroundings;
#[cfg(test)]
mod tests;
mod tree;
mod unsupported;
pub mod watch;

pub use explain::{Explained, Explanation, Source};
pub use hosts::range;
pub use load::{Loaded, at_start, embedded, embedded_in, load, parse};
pub use problem::{Path, Place, Problem, Problems, Segment, Severity};
pub use schema::schema;
pub use secret::SecretBytes;
pub use shared_state::{LARGEST_QUORUM, Login, Redis, RedisKind, SharedState};
pub use surroundings::Surroundings;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::Method;
use ipnet::IpNet;

use crate::units::{Percent, Rate};
use crate::wire::authority::Authority;

/// One policy: the file's content, or the embedded default.
#[derive(Debug)]
pub struct Config {
    /// Sixteen hex digits of the file's bytes and of the certificates it names (not of its secrets),
    /// for `hedgerow_config_info` and `/status`.
    pub hash: String,
    /// Worker threads.
    pub threads: usize,
    /// Where the ports are. Read at start only.
    pub listen: Listen,
    /// Bounds on what a client may send and hold.
    pub limits: Limits,
    /// The name servers.
    pub dns: Dns,
    /// What passes with no policy at all.
    pub direct: Vec<DirectRule>,
    /// Which destinations may be dialled.
    pub egress: Egress,
    /// The CAs: of interception, and those trusted beside the system's.
    pub tls: Tls,
    /// How the process leaves.
    pub drain: Drain,
    /// What pods know together, if anything.
    pub shared_state: Option<SharedState>,
    /// What is written about each request.
    pub telemetry: Telemetry,
    /// For hosts that no upstream names; its name is `default`.
    pub defaults: Arc<UpstreamPolicy>,
    /// For hosts in `direct`, every stage off and nothing of the defaults; its name is `direct`.
    pub untouched: Arc<UpstreamPolicy>,
    /// In the file's order.
    pub upstreams: Vec<Arc<UpstreamPolicy>>,
    /// From host patterns to `upstreams`, most specific first.
    pub hosts: HostIndex,
}

impl Config {
    /// The policy of the most specific pattern that matches: exact host and port, exact host, longest
    /// suffix with the port, longest suffix; else the defaults.
    pub fn policy_for(&self, authority: &Authority) -> &Arc<UpstreamPolicy> {
        match self.hosts.find(authority.host(), authority.port()) {
            Some(index) => &self.upstreams[index],
            None if self.direct.iter().any(|rule| rule.matches(authority)) => &self.untouched,
            None => &self.defaults,
        }
    }

    /// The upstream that a policy key names, as in `hedge.to`.
    pub fn upstream(&self, name: &str) -> Option<&Arc<UpstreamPolicy>> {
        self.upstreams.iter().find(|policy| &*policy.name == name)
    }

    /// Every policy that a user wrote, the defaults last.
    pub fn policies(&self) -> impl Iterator<Item = &Arc<UpstreamPolicy>> {
        self.upstreams.iter().chain(std::iter::once(&self.defaults))
    }
}

/// The ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listen {
    /// Forward proxy, reverse by host, CONNECT.
    pub proxy: SocketAddr,
    /// Connections that iptables redirected; `None` when off.
    pub transparent: Option<SocketAddr>,
    /// Health, metrics, status.
    pub admin: SocketAddr,
    /// Peers beyond loopback get no more of the admin port than health and metrics.
    pub is_admin_reserved: bool,
    /// Who may connect when `proxy` or `transparent` is not on loopback; empty means loopback peers
    /// alone.
    pub clients: Vec<IpNet>,
}

/// Bounds on the downstream side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Client connections at once.
    pub connections: usize,
    /// Bytes of a request head, the request line included.
    pub head: usize,
    /// Fields of a request head.
    pub fields: usize,
    /// Bytes of a request target.
    pub target: usize,
    /// From the first byte of a head (or the connection's start) to its last.
    pub header_timeout: Duration,
    /// How long a client connection may lie idle between requests.
    pub keep_alive: Duration,
    /// HTTP/2 streams at once on one client connection; at least 1.
    pub streams: u32,
    /// Bytes that all request bodies kept for replay may hold together.
    pub replay_total: usize,
    /// Upstreams (host:port) that are remembered at once.
    pub upstreams: usize,
    /// Bytes of the body of a fan-out request.
    pub fanout_body: usize,
}

/// Name resolution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dns {
    /// Empty: the system's resolv.conf and hosts file.
    pub servers: Vec<SocketAddr>,
    /// For one look-up, all servers and families included.
    pub timeout: Duration,
}

/// The egress guard's rules.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Egress {
    /// Whether what no rule names is refused.
    pub deny_by_default: bool,
    /// Refuse private, loopback and other special ranges unless allowed by name or range.
    pub deny_private: bool,
    /// What is let through.
    pub allow: Vec<EgressRule>,
    /// What is refused, before `allow` is looked at.
    pub deny: Vec<EgressRule>,
}

/// One entry of `egress.allow` or `egress.deny`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EgressRule {
    /// A name or `*.suffix`, with or without a port.
    Host(HostPattern),
    /// A range of addresses.
    Range(IpNet),
}

/// One entry of `direct`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DirectRule {
    /// `loopback`: `localhost`, names below it, and loopback addresses.
    Loopback,
    /// A name or `*.suffix`, with or without a port.
    Host(HostPattern),
    /// A range of addresses; a name that leads there is not in it, since names are not looked up for this.
    Range(IpNet),
}

impl DirectRule {
    /// Whether the rule is for calls to `authority`.
    pub fn matches(&self, authority: &Authority) -> bool {
        match self {
            Self::Loopback => match authority.ip() {
                Some(ip) => ip.to_canonical().is_loopback(),
                None => authority.host() == "localhost" || authority.host().ends_with(".localhost"),
            },
            Self::Host(pattern) => pattern.matches(authority.host(), authority.port()),
            Self::Range(range) => authority.ip().is_some_and(|ip| range.contains(&ip.to_canonical())),
        }
    }
}

/// A host in the policy: `a.example`, `a.example:8443`, `*.example`, `10.0.0.1`, `[::1]:80`.
/// The name is in normal form (lower case, A-labels, no trailing dot, IPv6 in brackets).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HostPattern {
    /// The exact host, or what must follow the first label for a suffix pattern.
    pub name: String,
    /// `*.name`: any host that ends in `.name`.
    pub is_suffix: bool,
    /// Only this port.
    pub port: Option<u16>,
}

impl HostPattern {
    /// Whether the pattern covers `host` (in normal form) at `port`.
    pub fn matches(&self, host: &str, port: u16) -> bool {
        if self.port.is_some_and(|own| own != port) {
            return false;
        }
        if self.is_suffix {
            host.strip_suffix(self.name.as_str()).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
        } else {
            host == self.name
        }
    }
}

/// Host patterns, found by hash: a look-up costs one probe for each label of the host at most.
#[derive(Debug, Default)]
pub struct HostIndex {
    exact: HashMap<String, PortIndex>,
    suffix: HashMap<String, PortIndex>,
}

#[derive(Debug, Default)]
struct PortIndex {
    any: Option<usize>,
    ports: Vec<(u16, usize)>,
}

impl HostIndex {
    /// Adds a pattern for the upstream at `index`; false when the same pattern is there already.
    pub fn insert(&mut self, pattern: &HostPattern, index: usize) -> bool {
        let map = if pattern.is_suffix { &mut self.suffix } else { &mut self.exact };
        let entry = map.entry(pattern.name.clone()).or_default();
        match pattern.port {
            None if entry.any.is_some() => false,
            None => {
                entry.any = Some(index);
                true
            }
            Some(port) if entry.ports.iter().any(|(own, _)| *own == port) => false,
            Some(port) => {
                entry.ports.push((port, index));
                true
            }
        }
    }

    fn find(&self, host: &str, port: u16) -> Option<usize> {
        let in_entry = |entry: &PortIndex| {
            entry.ports.iter().find(|(own, _)| *own == port).map(|(_, index)| *index).or(entry.any)
        };
        if let Some(found) = self.exact.get(host).and_then(in_entry) {
            return Some(found);
        }
        if self.suffix.is_empty() {
            return None;
        }
        let mut rest = host;
        while let Some((_, parent)) = rest.split_once('.') {
            if let Some(found) = self.suffix.get(parent).and_then(in_entry) {
                return Some(found);
            }
            rest = parent;
        }
        None
    }
}

/// The CAs. Files are read when the policy is built; `ca_dir` and `own_ca` take effect at start only.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tls {
    /// Extra roots for all upstreams: PEM of `tls.ca_file`.
    pub ca_pem: Option<Arc<[u8]>>,
    /// Where what the agent must trust is written. It need not exist yet.
    pub ca_dir: Option<PathBuf>,
    /// Signs the certificates of interception instead of a CA made at start.
    pub own_ca: Option<OwnCa>,
}

/// A CA given by files. When it was read, its first certificate could sign others, was in its time, and
/// belonged to the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnCa {
    /// The CA's certificate, then any between it and its root.
    pub cert_pem: Arc<[u8]>,
    /// PKCS#8, SEC1 or PKCS#1 in PEM.
    pub key_pem: SecretBytes,
}

/// How the process leaves on SIGTERM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drain {
    /// Leave once nothing has been in flight for so long.
    pub quiet: Duration,
    /// Leave at the latest after this.
    pub max: Duration,
}

/// What is written about each request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Telemetry {
    /// The access log's form.
    pub access_log: AccessLog,
}

/// The access log's form; one line for each request, on standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessLog {
    /// A JSON object.
    Json,
    /// Words for a terminal.
    Text,
    /// Nothing.
    Off,
}

/// What holds for one upstream: a group of hosts under one name.
#[derive(Debug)]
pub struct UpstreamPolicy {
    /// The name in the policy; `default` for the defaults. The only metric label for its hosts.
    pub name: Arc<str>,
    /// Its place in `Config::upstreams`, or that list's length for the defaults.
    pub index: usize,
    /// The hosts that belong to it.
    pub hosts: Vec<HostPattern>,
    /// Dialled instead of the host that was asked for.
    pub endpoint: Option<Endpoint>,
    /// How the upstream is spoken to.
    pub origin: Origin,
    /// Whether TLS of tunnels to its hosts is ended here.
    pub intercept: bool,
    /// Its TLS peculiarities.
    pub tls: UpstreamTls,
    /// How requests are changed on their way to it.
    pub rewrite: Option<Rewrite>,
    /// The stages for calls that no route matches.
    pub stages: Stages,
    /// First match wins.
    pub routes: Vec<Route>,
}

impl UpstreamPolicy {
    /// The sizes of the caches that it and its routes have, in bytes.
    pub fn cache_sizes(&self) -> impl Iterator<Item = u64> + '_ {
        self.caches().map(|cache| cache.max_bytes)
    }

    /// Whether it, or a route of it, keeps answers for other pods too.
    pub fn shares_answers(&self) -> bool {
        self.caches().any(|cache| cache.is_shared)
    }

    fn caches(&self) -> impl Iterator<Item = &Cache> {
        let stages = std::iter::once(&self.stages).chain(self.routes.iter().map(|route| &route.stages));
        stages.filter_map(|stages| stages.cache.as_ref())
    }

    /// Where a call goes that is sent here by the upstream's name and not by a host: to its endpoint, or to
    /// its first host that is no pattern.
    pub fn place(&self) -> Option<Authority> {
        if let Some(endpoint) = &self.endpoint {
            return Some(endpoint.authority.clone());
        }
        let host = self.hosts.iter().find(|host| !host.is_suffix)?;
        let port = host.port.unwrap_or(if self.origin == Origin::Https { 443 } else { 80 });
        Authority::parse(&host.name, Some(port)).ok()
    }

    /// The first route that matches, with its index.
    pub fn route_for(&self, method: &Method, path: &str) -> Option<(usize, &Route)> {
        self.routes.iter().enumerate().find(|(_, route)| route.matches(method, path))
    }
}

/// `endpoint: https://api.other.example`: a fixed place to dial.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Whether TLS is spoken to it.
    pub is_https: bool,
    /// Its host and port; also the `Host` that it is sent.
    pub authority: Authority,
}

/// How an upstream is spoken to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// As the request's scheme says.
    Auto,
    /// In clear text, whatever the scheme.
    Http,
    /// Over TLS, whatever the scheme.
    Https,
    /// HTTP/2 in clear text, whatever the scheme.
    H2c,
}

/// TLS towards one upstream. Files are read when the policy is built.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UpstreamTls {
    /// Extra roots as PEM.
    pub ca_pem: Option<Arc<[u8]>>,
    /// The name to verify and to send as SNI instead of the host.
    pub server_name: Option<String>,
    /// What hedgerow shows when the upstream asks who it is.
    pub client: Option<ClientIdentity>,
}

/// A client certificate with the key that belongs to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientIdentity {
    /// The certificate, then those between it and its root.
    pub cert_pem: Arc<[u8]>,
    /// PKCS#8, SEC1 or PKCS#1 in PEM.
    pub key_pem: SecretBytes,
}

/// Changes to a request on its way to this upstream.
#[derive(Debug)]
pub struct Rewrite {
    /// Applied to the path (without query); `to` may use `${name}` groups.
    pub path: Option<(regex::Regex, String)>,
    /// Fields to set, replacing what is there. Values can be secrets.
    pub set: Vec<(http::HeaderName, http::HeaderValue)>,
    /// Fields to take away.
    pub remove: Vec<http::HeaderName>,
}

/// A part of an upstream with its own values.
#[derive(Debug)]
pub struct Route {
    /// For metrics, `/status`, and state of its own.
    pub name: Option<Arc<str>>,
    /// Matches the path without query; `None` matches all.
    pub path: Option<PathPattern>,
    /// Empty: any method.
    pub methods: Vec<Method>,
    /// POST and PATCH may be repeated.
    pub idempotent: bool,
    /// The stages, inherited key by key.
    pub stages: Stages,
    /// Which state is kept apart from the upstream's.
    pub own: OwnState,
}

impl Route {
    /// Whether a cache has a part in any of its calls, as it has in GET and HEAD.
    fn may_be_kept(&self) -> bool {
        self.methods.is_empty()
            || self.methods.iter().any(|method| matches!(*method, Method::GET | Method::HEAD))
    }

    fn matches(&self, method: &Method, path: &str) -> bool {
        (self.methods.is_empty() || self.methods.contains(method))
            && self.path.as_ref().is_none_or(|pattern| pattern.matches(path))
    }
}

/// Which guards a route named itself, and so keeps apart from its upstream's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OwnState {
    /// Its own permits and queue.
    pub bulkhead: bool,
    /// Its own breaker.
    pub breaker: bool,
    /// Its own rate tokens.
    pub rate_limit: bool,
}

/// A path glob: `*` stands for one segment or part of it, `**` for any rest. Matched on the bytes
/// that are forwarded, never on a decoded form.
#[derive(Debug, Clone)]
pub struct PathPattern {
    /// As written.
    pub glob: String,
    /// Compiled, anchored at both ends.
    pub regex: regex::Regex,
}

impl PathPattern {
    fn matches(&self, path: &str) -> bool {
        self.regex.is_match(path)
    }
}

/// The stages of a call under one policy or route, inherited key by key.
#[derive(Debug, Clone)]
pub struct Stages {
    /// For name resolution, connecting and the TLS handshake together.
    pub connect_timeout: Duration,
    /// From sending an attempt to its response head.
    pub attempt_timeout: Option<Duration>,
    /// Between two bytes of a stream that no deadline covers.
    pub stream_idle: Duration,
    /// Between two bytes of a tunnel.
    pub tunnel_idle: Duration,
    /// Bytes of a request body kept for another attempt.
    pub replay_limit: usize,
    /// Answers that are not good enough where a better one may be had.
    pub unacceptable: StatusSet,
    /// How long a call may take.
    pub deadline: Option<Deadline>,
    /// A second attempt when the first is slow.
    pub hedge: Option<Hedge>,
    /// What hedges and retries may add to an upstream's load.
    pub extra_load: ExtraLoad,
    /// Calls at once.
    pub bulkhead: Option<Bulkhead>,
    /// When to stop calling.
    pub breaker: Option<Breaker>,
    /// Another try after a failure.
    pub retry: Option<Retry>,
    /// How often the upstream may be called.
    pub rate_limit: Option<RateLimit>,
    /// One call for many equal ones.
    pub coalesce: Option<Coalesce>,
    /// Answers kept for later.
    pub cache: Option<Cache>,
    /// What to answer instead of a failure, in order.
    pub fallback: Arc<[FallbackStep]>,
}

/// The deadline stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deadline {
    /// Where the request brings none.
    pub default: Duration,
    /// The most that a request may ask for.
    pub max: Duration,
    /// Kept back for delivering the answer; never more than a tenth of what is left.
    pub reserve: Duration,
    /// Whether the body is bounded too.
    pub covers: Covers,
    /// Whether the SDKs' own timeout headers count.
    pub hints: bool,
    /// Tell an Envoy upstream in `x-envoy-expected-rq-timeout-ms`.
    pub tell_envoy: bool,
}

impl Deadline {
    /// What holds where a policy says nothing.
    pub const BUILT_IN: Self = Self {
        default: Duration::from_secs(30),
        max: Duration::from_secs(15 * 60),
        reserve: Duration::from_millis(50),
        covers: Covers::Auto,
        hints: true,
        tell_envoy: false,
    };
}

/// What a deadline ends with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Covers {
    /// A caller's deadline covers the body; the policy's own default ends at a stream's head.
    Auto,
    /// The response head.
    Head,
    /// The last byte of the body.
    Body,
}

/// The hedge stage.
#[derive(Debug, Clone, PartialEq)]
pub struct Hedge {
    /// When the second attempt starts.
    pub after: HedgeAfter,
    /// Until there are enough samples.
    pub initial: Duration,
    /// The least delay.
    pub min: Duration,
    /// The greatest delay.
    pub max: Duration,
    /// Duplicates for one call.
    pub max_extra: usize,
    /// Methods that may be repeated without more ado.
    pub methods: Vec<Method>,
    /// The upstream that the duplicate goes to instead.
    pub to: Option<Arc<str>>,
}

/// When a hedge starts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HedgeAfter {
    /// After this long, always.
    Fixed(Duration),
    /// At this percentile of recent times to head.
    Percentile(Percent),
    /// At the percentile that the extra-load ratio pays for, where it pays.
    Auto,
}

/// The extra-load budget.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExtraLoad {
    /// Extra attempts for each call.
    pub ratio: Percent,
    /// Extra attempts that are always allowed.
    pub floor: Rate,
}

/// The bulkhead stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bulkhead {
    /// Permits.
    pub max_concurrent: usize,
    /// Places in the queue.
    pub max_queue: usize,
}

/// The breaker stage.
#[derive(Debug, Clone, PartialEq)]
pub struct Breaker {
    /// Failures in a row that open it; `None` when that rule is off.
    pub consecutive_failures: Option<u32>,
    /// Share of failures in the window that opens it.
    pub failure_rate: Option<Percent>,
    /// Share of slow calls in the window that opens it.
    pub slow_rate: Option<Percent>,
    /// From when a call is slow.
    pub slow_after: Duration,
    /// What the rates look back on.
    pub window: Duration,
    /// Calls in the window below which the rates say nothing.
    pub min_requests: u32,
    /// The first wait before a probe.
    pub open_for: Duration,
    /// The longest wait before a probe.
    pub max_open_for: Duration,
    /// Probes that must all succeed.
    pub half_open_probes: u32,
    /// Statuses that are failures.
    pub failure_statuses: StatusSet,
    /// A deadline that left the upstream less than this says nothing about it.
    pub fair_chance: Duration,
    /// Whether all pods open it together.
    pub is_shared: bool,
}

/// The retry stage.
#[derive(Debug, Clone, PartialEq)]
pub struct Retry {
    /// Tries in all, the first included; at least 2.
    pub max_attempts: u32,
    /// The most that the first wait between two tries can be; doubled for each further one.
    pub backoff: Duration,
    /// The most that any wait between two tries can be.
    pub max_backoff: Duration,
    /// Methods that may be repeated without more ado.
    pub methods: Vec<Method>,
}

/// The rate limit stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RateLimit {
    /// Tokens that come back; more than none.
    pub rate: Rate,
    /// Tokens that can be saved up; at least 1.
    pub burst: u32,
    /// The longest pause that an upstream can ask for.
    pub max_pause: Duration,
    /// Whether all pods take their tokens from one bucket.
    pub is_shared: bool,
}

/// The coalesce stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coalesce {
    /// Bytes of the largest answer that is shared.
    pub max_body: usize,
    /// Request fields that tell calls apart, beside those that always do.
    pub vary: Vec<http::HeaderName>,
}

/// The cache stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cache {
    /// How long an answer is fresh whose origin says nothing about it.
    pub ttl: Option<Duration>,
    /// How long after its freshness an answer may stand in for a failure.
    pub stale_if_error: Duration,
    /// How long after its freshness an answer may be given while a new one is fetched.
    pub stale_while_revalidate: Duration,
    /// Bytes that all kept answers of the upstream may hold together.
    pub max_bytes: u64,
    /// Bytes of the largest answer that is kept.
    pub max_body: usize,
    /// Request fields that tell calls apart, beside those that always do.
    pub vary: Vec<http::HeaderName>,
    /// Whether answers are kept for the other pods too.
    pub is_shared: bool,
}

/// One thing to try instead of a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FallbackStep {
    /// The upstream of this name.
    Upstream(Arc<str>),
    /// A kept answer whose freshness ended at most so long ago.
    Stale(Duration),
    /// A fixed answer.
    Degraded(Degraded),
}

/// A fixed answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Degraded {
    /// Its status.
    pub status: http::StatusCode,
    /// Fields of its head. Values can be secrets.
    pub headers: Vec<(http::HeaderName, http::HeaderValue)>,
    /// Its body, with `{error}`, `{upstream}` and `{retry_after_ms}` to be filled in; `None` for the
    /// built-in one. Never set for a status that has no body (204, 205, 304), which has no built-in one
    /// either.
    pub body: Option<Arc<str>>,
}

/// A set of HTTP statuses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StatusSet(Vec<u16>);

impl StatusSet {
    /// The set of these.
    pub fn new(statuses: impl IntoIterator<Item = u16>) -> Self {
        let mut list: Vec<u16> = statuses.into_iter().collect();
        list.sort_unstable();
        list.dedup();
        Self(list)
    }

    /// Whether it holds `status`. The sets are short, so a scan beats hashing.
    pub fn contains(&self, status: http::StatusCode) -> bool {
        self.0.contains(&status.as_u16())
    }

    /// In ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        self.0.iter().copied()
    }
}
