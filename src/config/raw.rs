//! What the user wrote: every key of the policy, as an `Option`, with nothing filled in.
//!
//! The structs are the single list of keys. Reading, the JSON Schema and the spelling hints are derived
//! from it, and each stage's [`or`](Overlay::or) lays a narrower section over a wider one key by key.
//! Keys of stages that are still to come are here too; [`unsupported`](super::unsupported) refuses them.

use schemars::JsonSchema;
use serde::Deserialize;

use super::notation::{After, Flag, MethodName, Named, Socket, Switch, Toggle, Unit};
use crate::units::{ByteSize, Percent, Rate, Span};

/// A narrower section laid over a wider one.
pub(super) trait Overlay {
    /// These keys, and `wider`'s where one is not set.
    #[must_use]
    fn or(&self, wider: &Self) -> Self;
}

/// A struct of optional keys. serde's `flatten` would save repeating the stages in the three kinds of
/// section, but it buffers values and so loses their places and the list of known keys.
macro_rules! keys {
    ($(#[$meta:meta])* $name:ident { $($(#[$key_meta:meta])* $key:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields)]
        pub(super) struct $name {
            $($(#[$key_meta])* pub(super) $key: Option<$type>,)*
        }

        impl Overlay for $name {
            fn or(&self, wider: &Self) -> Self {
                Self { $($key: self.$key.clone().or_else(|| wider.$key.clone()),)* }
            }
        }
    };
}

/// A section with keys of its own beside those of all the stages.
macro_rules! section {
    ($(#[$meta:meta])* $name:ident { $($own:tt)* }) => {
        keys! {
            $(#[$meta])*
            $name {
                $($own)*
                /// For name resolution, connecting and the TLS handshake together. Default: 2s.
                connect_timeout: Unit<Span>,
                /// From sending an attempt to its response head. Default: off.
                attempt_timeout: Switch<Unit<Span>>,
                /// The longest silence of a stream that no deadline covers. Default: 5m.
                stream_idle: Unit<Span>,
                /// The longest silence of a tunnel. Default: 1h.
                tunnel_idle: Unit<Span>,
                /// How much of a request body is kept for a second attempt. Default: 256KiB.
                replay_limit: Unit<ByteSize>,
                /// Statuses that are not good enough where a better answer may be had. Default: [429, 500, 502, 503, 504].
                unacceptable: Vec<u16>,
                /// How long a call may take. `off` leaves even the caller's deadline to the upstream.
                deadline: Switch<Deadline>,
                /// A second attempt when the first is slow.
                hedge: Switch<Hedge>,
                /// What hedges and retries together may add to an upstream's load.
                extra_load: ExtraLoad,
                /// How many calls may be under way at once.
                bulkhead: Switch<Bulkhead>,
                /// When to stop calling a failing upstream.
                breaker: Switch<Breaker>,
                /// Another try after a failure. Default: off.
                retry: Toggle<Retry>,
                /// How often the upstream may be called. Default: off.
                rate_limit: Switch<RateLimit>,
                /// One call for many equal ones that are under way at once. Default: off.
                coalesce: Toggle<Coalesce>,
                /// Answers kept for later. Default: off.
                cache: Toggle<Cache>,
                /// What to answer instead of a failure, in this order. Replaces a wider section's as a whole. Default: [].
                fallback: Switch<Vec<FallbackStep>>,
            }
        }

        impl $name {
            /// The stages' keys alone.
            pub(super) fn stages(&self) -> Stages {
                let Self {
                    connect_timeout, attempt_timeout, stream_idle, tunnel_idle, replay_limit, unacceptable,
                    deadline, hedge, extra_load, bulkhead, breaker, retry, rate_limit, coalesce, cache, fallback, ..
                } = self.clone();
                Stages {
                    connect_timeout, attempt_timeout, stream_idle, tunnel_idle, replay_limit, unacceptable,
                    deadline, hedge, extra_load, bulkhead, breaker, retry, rate_limit, coalesce, cache, fallback,
                }
            }
        }
    };
}

/// The stages' keys that a section can hold, told apart from its own.
macro_rules! stages {
    ($($key:ident: $type:ty,)*) => {
        #[derive(Debug, Clone, Default, PartialEq)]
        pub(super) struct Stages {
            $(pub(super) $key: Option<$type>,)*
        }

        impl Overlay for Stages {
            fn or(&self, wider: &Self) -> Self {
                Self { $($key: self.$key.clone().or_else(|| wider.$key.clone()),)* }
            }
        }

        /// Their names, for whoever looks for them at the top of the file.
        pub(super) const STAGE_KEYS: &[&str] = &[$(stringify!($key)),*];
    };
}

stages! {
    connect_timeout: Unit<Span>,
    attempt_timeout: Switch<Unit<Span>>,
    stream_idle: Unit<Span>,
    tunnel_idle: Unit<Span>,
    replay_limit: Unit<ByteSize>,
    unacceptable: Vec<u16>,
    deadline: Switch<Deadline>,
    hedge: Switch<Hedge>,
    extra_load: ExtraLoad,
    bulkhead: Switch<Bulkhead>,
    breaker: Switch<Breaker>,
    retry: Toggle<Retry>,
    rate_limit: Switch<RateLimit>,
    coalesce: Toggle<Coalesce>,
    cache: Toggle<Cache>,
    fallback: Switch<Vec<FallbackStep>>,
}

keys! {
    /// The policy of a hedgerow sidecar. Every key is optional.
    Policy {
        /// Worker threads. Default: the cores that the cgroup grants. Read at start only.
        threads: u16,
        /// Where hedgerow listens. Read at start only.
        listen: Listen,
        /// Bounds on what clients may send and hold.
        limits: Limits,
        /// Name resolution.
        dns: Dns,
        /// What passes with no policy at all: names, *.suffixes, ranges (CIDR) and the word `loopback`. An upstream that names the host beats it. Default: [].
        direct: Switch<Vec<String>>,
        /// Which destinations may be dialled.
        egress: Egress,
        /// Certificates.
        tls: Tls,
        /// How the process leaves on SIGTERM.
        drain: Drain,
        /// What pods know together: whatever says `shared: true`. Default: off.
        shared_state: Switch<SharedState>,
        /// What is written about each request.
        telemetry: Telemetry,
        /// Holds for every upstream, named below or not.
        defaults: Defaults,
        /// Groups of hosts, by name.
        upstreams: Named<Upstream>,
    }
}

keys! {
    /// Where hedgerow listens.
    Listen {
        /// Forward proxy, reverse by host, CONNECT. Default: 127.0.0.1:15300.
        proxy: Socket,
        /// Connections that redirect rules send here; at 127.0.0.1 those of IPv6, which they send to ::1, too. Default: off.
        transparent: Switch<Socket>,
        /// Health, metrics, status. Default: 127.0.0.1:15302.
        admin: Socket,
        /// Ranges (CIDR) that may connect when `proxy` or `transparent` is not on loopback. Default: [].
        clients: Vec<String>,
    }
}

keys! {
    /// Bounds on what clients may send and hold.
    Limits {
        /// Client connections at once. Default: 10000.
        connections: usize,
        /// Size of a request head. Default: 64KiB.
        head: Unit<ByteSize>,
        /// Fields of a request head. Default: 100.
        fields: usize,
        /// Length of a request target. Default: 16KiB.
        target: Unit<ByteSize>,
        /// For the head to arrive. Default: 10s.
        header_timeout: Unit<Span>,
        /// How long a client connection may lie idle. Default: 120s.
        keep_alive: Unit<Span>,
        /// HTTP/2 streams at once on a client connection. Default: 100.
        streams: u32,
        /// What all request bodies kept for a second attempt may hold together. Default: 64MiB.
        replay_total: Unit<ByteSize>,
        /// Upstreams (host and port) that are remembered at once. Default: 10000.
        upstreams: usize,
        /// Size of the body of a fan-out request. Default: 1MiB.
        fanout_body: Unit<ByteSize>,
    }
}

keys! {
    /// Name resolution.
    Dns {
        /// Name servers as address and port. Default: those of /etc/resolv.conf, and the hosts file.
        servers: Vec<Socket>,
        /// For one look-up as a whole. Default: 2s.
        timeout: Unit<Span>,
    }
}

keys! {
    /// Which destinations may be dialled.
    Egress {
        /// What happens to destinations that no rule names. Default: allow.
        default: Verdict,
        /// Refuse loopback, private and other special addresses. Default: false.
        deny_private: Flag,
        /// Names, *.suffixes and ranges (CIDR) that may be dialled. Default: [].
        allow: Vec<String>,
        /// Names, *.suffixes and ranges (CIDR) that may not be dialled; beats `allow`. Default: [].
        deny: Vec<String>,
    }
}

/// Whether a destination may be dialled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub(super) enum Verdict {
    /// It may.
    Allow,
    /// It may not.
    Deny,
}

keys! {
    /// Certificates.
    Tls {
        /// Directory where what the agent must trust for interception is written. Default: off. Read at start only.
        ca_dir: Switch<String>,
        /// PEM file with the certificate of an own CA for interception. Default: off, a CA is made at start. Read at start only.
        ca_cert: Switch<String>,
        /// PEM file with its private key. Read at start only.
        ca_key: Switch<String>,
        /// PEM file with extra roots for all upstreams, beside the system's.
        ca_file: String,
    }
}

keys! {
    /// How the process leaves on SIGTERM.
    Drain {
        /// Leave once nothing has been under way for so long. Default: 1s.
        quiet: Unit<Span>,
        /// Leave at the latest after this. Default: 25s.
        max: Unit<Span>,
    }
}

keys! {
    /// Where pods keep what they know together.
    SharedState {
        /// URL of a Redis or Valkey, the one key without a default: `redis://[[user]:password@]host[:port][/database]`,
        /// `redis-sentinel://[[user]:password@]host[:port][,host…]/SERVICE[/database]` (with
        /// `?sentinel_user=…&sentinel_password=…` for Sentinels that ask for a login themselves) or
        /// `redis-cluster://[[user]:password@]host[:port][,host…]`; over TLS `rediss://`, `rediss-sentinel://`,
        /// `rediss-cluster://`. `${env:NAME}` and `${file:PATH}` are replaced: alone by the whole URL as it stands,
        /// beside other text percent-encoded, as what is special in a URL has to be.
        redis: String,
        /// The longest that a request waits for it, from 1ms to 1s. Default: 25ms.
        timeout: Unit<Span>,
        /// Pods that must have seen an upstream fail before all of them open its breaker, from 1 to 10000. Default: 2.
        quorum: u32,
        /// First part of every key: 1 to 64 visible ASCII characters. Default: hedgerow.
        prefix: String,
    }
}

keys! {
    /// What is written about each request.
    Telemetry {
        /// Form of the access log on standard output. Default: json.
        access_log: AccessLog,
        /// Where traces are sent. Not supported yet.
        otlp: Switch<Otlp>,
        /// Share of calls that are traced. Not supported yet.
        sample: Unit<Percent>,
    }
}

/// Form of the access log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub(super) enum AccessLog {
    /// A JSON object for each request.
    Json,
    /// Words for a terminal.
    Text,
    /// Nothing.
    Off,
}

keys! {
    /// Where traces are sent. Not supported yet.
    Otlp {
        /// URL of the collector.
        endpoint: String,
    }
}

section! {
    /// What holds for every upstream.
    Defaults {
        /// Whether TLS of tunnels is ended here, so that what is inside has a policy. Default: false.
        intercept: Flag,
    }
}

section! {
    /// A group of hosts under one name.
    Upstream {
        /// Names, *.suffixes and addresses, with or without a port.
        hosts: Vec<String>,
        /// URL that is dialled instead of the host that was asked for; alone, the upstream is reached by `to:` and `fallback` only.
        endpoint: String,
        /// How the upstream is spoken to. Default: auto, as the request's scheme says.
        origin: Origin,
        /// Whether TLS of tunnels is ended here, so that what is inside has a policy. Default: that of `defaults`.
        intercept: Flag,
        /// TLS towards this upstream.
        tls: UpstreamTls,
        /// How requests are changed on their way to it.
        rewrite: Rewrite,
        /// Parts with values of their own; the first that matches counts.
        routes: Vec<Route>,
    }
}

section! {
    /// A part of an upstream with values of its own.
    Route {
        /// For metrics and state of its own.
        name: String,
        /// Glob: `*` within one segment, `**` for any rest. Default: every path.
        path: String,
        /// Default: every method.
        methods: Vec<MethodName>,
        /// Whether POST and PATCH may be repeated here. Default: false.
        idempotent: Flag,
    }
}

/// How an upstream is spoken to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub(super) enum Origin {
    /// As the request's scheme says.
    Auto,
    /// In clear text.
    Http,
    /// Over TLS.
    Https,
    /// HTTP/2 in clear text.
    H2c,
}

keys! {
    /// TLS towards one upstream. Its certificate is always verified.
    UpstreamTls {
        /// PEM file with extra roots for this upstream, beside the system's.
        ca_file: String,
        /// PEM file with the certificate that is shown to an upstream that asks for one. Default: off.
        client_cert: Switch<String>,
        /// PEM file with its private key.
        client_key: Switch<String>,
        /// Name that the certificate must have, also sent as SNI. Default: the host.
        server_name: String,
    }
}

keys! {
    /// How requests are changed on their way to an upstream.
    Rewrite {
        /// The path, without the query.
        path: RewritePath,
        /// The fields of the head.
        headers: RewriteHeaders,
    }
}

keys! {
    /// A new path by a regular expression.
    RewritePath {
        /// Regular expression; a path that does not match stays as it is.
        from: String,
        /// What stands for the match; `${name}` is a group of `from`.
        to: String,
    }
}

keys! {
    /// Changes to the fields of a request head.
    RewriteHeaders {
        /// Fields to set. A value may hold `${env:NAME}` and `${file:PATH}`.
        set: Named<String>,
        /// Fields to take away.
        remove: Vec<String>,
    }
}

keys! {
    /// How long a call may take.
    Deadline {
        /// Where the request brings none. Default: 30s.
        default: Unit<Span>,
        /// The most that a request may ask for. Default: 15m.
        max: Unit<Span>,
        /// Kept back for delivering the answer, a tenth of what is left at most. Default: 50ms.
        reserve: Unit<Span>,
        /// Whether the body is bounded too. Default: auto.
        covers: Covers,
        /// Whether the SDKs' own timeout headers count. Default: on.
        hints: Flag,
        /// Send `x-envoy-expected-rq-timeout-ms` with each attempt. Default: false.
        tell_envoy: Flag,
    }
}

/// What a deadline ends with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub(super) enum Covers {
    /// The body for a caller's deadline, the head of a stream for the policy's default.
    Auto,
    /// The response head.
    Head,
    /// The last byte of the body.
    Body,
}

keys! {
    /// A second attempt when the first is slow.
    Hedge {
        /// When it starts: a duration, a percentile of recent times such as p90, or auto. Default: auto.
        after: After,
        /// The delay until there are enough samples. Default: 800ms.
        initial: Unit<Span>,
        /// The least delay. Default: 20ms.
        min: Unit<Span>,
        /// The greatest delay. Default: 1200ms.
        max: Unit<Span>,
        /// Extra attempts for one call. Default: 1.
        max_extra: u8,
        /// Methods that may be repeated. Default: [GET, HEAD, OPTIONS].
        methods: Vec<MethodName>,
        /// Upstream that the extra attempt goes to instead.
        to: String,
    }
}

keys! {
    /// What hedges and retries together may add to an upstream's load.
    ExtraLoad {
        /// Extra attempts for each call. Default: 10%.
        ratio: Unit<Percent>,
        /// Extra attempts that are always allowed. Default: 1/s.
        floor: Unit<Rate>,
    }
}

keys! {
    /// How many calls may be under way at once.
    Bulkhead {
        /// Calls at once. Default: 100.
        max_concurrent: usize,
        /// Calls that may wait. Default: 100; 0 for none.
        max_queue: usize,
    }
}

keys! {
    /// When to stop calling a failing upstream.
    Breaker {
        /// Failures in a row that open it, or `off`. Default: 5.
        consecutive_failures: Switch<u32>,
        /// Share of failures in the window that opens it. Default: off.
        failure_rate: Switch<Unit<Percent>>,
        /// Share of slow calls in the window that opens it. Default: off.
        slow_rate: Switch<Unit<Percent>>,
        /// From when a call is slow. Default: 5s.
        slow_after: Unit<Span>,
        /// What the rates look back on. Default: 60s.
        window: Unit<Span>,
        /// Calls in the window below which the rates say nothing. Default: 20.
        min_requests: u32,
        /// The first wait before a probe. Default: 30s.
        open_for: Unit<Span>,
        /// The longest wait before a probe. Default: 5m.
        max_open_for: Unit<Span>,
        /// Probes that must all succeed. Default: 1.
        half_open_probes: u32,
        /// Statuses that are failures. Default: [500, 502, 503, 504].
        failure_statuses: Vec<u16>,
        /// A deadline that left the upstream less than this says nothing about it. Default: 1s.
        fair_chance: Unit<Span>,
        /// Whether all pods open it together; needs `shared_state`. Default: false.
        shared: Flag,
    }
}

keys! {
    /// Another try after a failure.
    Retry {
        /// Tries in all, the first included. Default: 2.
        max_attempts: u32,
        /// The most that the first wait between two tries can be; it doubles for each further one. Default: 100ms.
        backoff: Unit<Span>,
        /// The most that any wait between two tries can be. Default: 2s.
        max_backoff: Unit<Span>,
        /// Methods that may be repeated. Default: [GET, HEAD, OPTIONS].
        methods: Vec<MethodName>,
    }
}

keys! {
    /// How often an upstream may be called.
    RateLimit {
        /// Calls. The one key without a default.
        rate: Unit<Rate>,
        /// Calls at once after a pause. Default: one second's worth of `rate`, at least 1.
        burst: u32,
        /// The longest pause that an upstream can ask for. Default: 60s.
        max_pause: Unit<Span>,
        /// Whether all pods take from one bucket; needs `shared_state`. Default: false.
        shared: Flag,
    }
}

keys! {
    /// One call for many equal ones that are under way at once.
    Coalesce {
        /// Largest answer that is shared. Default: 1MiB.
        max_body: Unit<ByteSize>,
        /// Request fields that tell calls apart, beside those that always do. Default: [].
        vary: Vec<String>,
    }
}

keys! {
    /// Answers kept for later.
    Cache {
        /// How long an answer is fresh whose origin does not say. Default: a tenth of the time since `Last-Modified`.
        ttl: Unit<Span>,
        /// How long after its freshness an answer may stand in for a failure. Default: 0s.
        stale_if_error: Unit<Span>,
        /// How long after its freshness an answer may be given while a new one is fetched. Default: 0s.
        stale_while_revalidate: Unit<Span>,
        /// What all kept answers of an upstream may hold together. Default: 64MiB.
        max_bytes: Unit<ByteSize>,
        /// Largest answer that is kept. Default: 1MiB.
        max_body: Unit<ByteSize>,
        /// Request fields that tell calls apart, beside those that always do. Default: [].
        vary: Vec<String>,
        /// Whether answers are kept for the other pods too; needs `shared_state`. Default: false.
        shared: Flag,
    }
}

keys! {
    /// One thing to answer instead of a failure: one of its keys.
    FallbackStep {
        /// A backup upstream. Its own `fallback` is not followed.
        upstream: String,
        /// An answer from the cache whose freshness ended at most so long ago.
        stale: Unit<Span>,
        /// A fixed answer; `{}` for the built-in one.
        degraded: Degraded,
    }
}

keys! {
    /// A fixed answer.
    Degraded {
        /// From 200 to 599. Default: 503.
        status: u16,
        /// Fields of its head. A value may hold `${env:NAME}` and `${file:PATH}`.
        headers: Named<String>,
        /// Its body, in which `{error}`, `{upstream}` and `{retry_after_ms}` are filled in. Default: a JSON object that says what happened.
        body: String,
    }
}
