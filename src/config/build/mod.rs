//! From what the user wrote to a [`Config`], gathering every problem on the way.
//!
//! A value that is wrong is noted and replaced by its default, so that what depends on it can still be
//! judged; whether the result may be used is for the caller to see from the problems.

mod backups;
mod caches;
mod certificates;
mod circles;
mod rewrite;
mod shared_state;
mod stale;
mod upstreams;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::files::Sources;
use super::notation::{Socket, Switch, Unit};
use super::problem::Path;
use super::raw;
use super::report::Report;
use super::stages::Inherited;
use super::{
    AccessLog, Config, DirectRule, Dns, Drain, Egress, HostIndex, Limits, Listen, Origin, Stages, Telemetry,
    UpstreamPolicy, UpstreamTls, hosts,
};
use crate::units::{ByteSize, Span};

/// The least head that the HTTP library can be bounded to.
const LEAST_HEAD: usize = 8 << 10;
/// The name of the policy for hosts that no upstream names.
const DEFAULT_NAME: &str = "default";
/// The name of the policy for hosts that `direct` lists.
const DIRECT_NAME: &str = "direct";

/// Builds the policy; problems go into `report`. `hash` stays empty.
pub(super) fn build(policy: &raw::Policy, report: &Report<'_>, sources: &Sources) -> Config {
    let root = Path::root();
    let defaults = policy.defaults.clone().unwrap_or_default();
    let builder = Builder { report, sources, intercept: defaults.intercept.is_some_and(|flag| flag.0) };
    let inherited = Inherited::default().narrowed(&defaults.stages(), &root.key("defaults"));
    let stages = inherited.resolve(report, sources);
    let named = policy.upstreams.as_ref().map(|named| named.0.as_slice()).unwrap_or_default();
    let upstreams = builder.upstreams(named, &inherited, &stages);
    builder.judge_backups(&upstreams, named, &defaults);
    builder.doubt_circles(named);
    builder.doubt_stale((&defaults, &stages), &upstreams, named);
    builder.doubt_caches(&stages, &upstreams);
    let egress = builder.egress(policy.egress.as_ref());
    builder.judge_reach(&egress, &upstreams);
    let hosts = builder.host_index(named);
    let tls = policy.tls.clone().unwrap_or_default();
    builder.judge_interception(&tls, &defaults, named);
    let tls = builder.tls(&tls, &root.key("tls"));
    builder.judge_sharing(policy.shared_state.as_ref(), (&defaults, &stages), &upstreams, named);
    Config {
        hash: String::new(),
        threads: builder.threads(policy.threads),
        listen: builder.listen(policy.listen.as_ref()),
        limits: builder.limits(policy.limits.as_ref()),
        dns: builder.dns(policy.dns.as_ref()),
        direct: builder.direct(policy.direct.as_ref().and_then(Switch::on), &hosts, named),
        egress,
        drain: builder.drain(policy.drain.as_ref()),
        shared_state: builder.shared_state(policy.shared_state.as_ref().and_then(Switch::on), &tls),
        tls,
        telemetry: telemetry(policy.telemetry.as_ref()),
        hosts,
        untouched: Arc::new(UpstreamPolicy {
            name: DIRECT_NAME.into(),
            index: upstreams.len() + 1,
            hosts: Vec::new(),
            endpoint: None,
            origin: Origin::Auto,
            intercept: false,
            tls: UpstreamTls::default(),
            rewrite: None,
            stages: Stages::untouched(),
            routes: Vec::new(),
        }),
        defaults: Arc::new(UpstreamPolicy {
            name: DEFAULT_NAME.into(),
            index: upstreams.len(),
            hosts: Vec::new(),
            endpoint: None,
            origin: Origin::Auto,
            intercept: builder.intercept,
            tls: UpstreamTls::default(),
            rewrite: None,
            stages,
            routes: Vec::new(),
        }),
        upstreams: upstreams.into_iter().map(Arc::new).collect(),
    }
}

struct Builder<'a> {
    report: &'a Report<'a>,
    sources: &'a Sources,
    /// What upstreams inherit.
    intercept: bool,
}

impl Builder<'_> {
    fn threads(&self, threads: Option<u16>) -> usize {
        if threads.is_some_and(|threads| !(1..=1024).contains(&threads)) {
            self.report.error(&Path::of(["threads"]), "expected 1 to 1024");
        }
        // Honours the cgroup's CPU quota on Linux, rounded down, and the affinity mask.
        let granted = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        threads.map_or_else(granted, usize::from)
    }

    fn listen(&self, keys: Option<&raw::Listen>) -> Listen {
        let keys = keys.cloned().unwrap_or_default();
        let path = Path::of(["listen"]);
        let clients = self.list(keys.clients.as_deref(), &path.key("clients"), hosts::range);
        let listen = Listen {
            proxy: keys.proxy.map_or(SocketAddr::from(([127, 0, 0, 1], 15300)), |Socket(proxy)| proxy),
            transparent: keys.transparent.as_ref().and_then(Switch::on).map(|Socket(address)| *address),
            admin: keys.admin.map_or(SocketAddr::from(([127, 0, 0, 1], 15302)), |Socket(admin)| admin),
            is_admin_reserved: false,
            clients,
        };
        for (key, address) in [("proxy", Some(listen.proxy)), ("transparent", listen.transparent)] {
            if address.is_some_and(|address| !address.ip().is_loopback()) && listen.clients.is_empty() {
                let message =
                    "not a loopback address, so anyone could use the proxy; name who may in `listen.clients`";
                self.report.error(&path.key(key), message);
            }
        }
        if !listen.admin.ip().is_loopback() {
            let message = "not a loopback address: whoever reaches it can read the policy and set breakers";
            self.report.warning(&path.key("admin"), message);
        }
        self.judge_ports(&listen, &path);
        listen
    }

    fn judge_ports(&self, listen: &Listen, path: &Path) {
        let mut bound = vec![("proxy", listen.proxy), ("admin", listen.admin)];
        bound.extend(listen.transparent.map(|address| ("transparent", address)));
        for (nth, (later, address)) in bound.iter().enumerate() {
            for (earlier, other) in &bound[..nth] {
                if clash(*address, *other) {
                    let path = self.report.setter(std::slice::from_ref(path), &[later, earlier]);
                    let message = format!("{earlier} and {later} are both on port {}", address.port());
                    self.report.error(&path, message);
                }
            }
        }
    }

    fn limits(&self, keys: Option<&raw::Limits>) -> Limits {
        let keys = keys.cloned().unwrap_or_default();
        let path = Path::of(["limits"]);
        let bytes = |key: Option<Unit<ByteSize>>, default| key.map_or(default, |Unit(ByteSize(bytes))| bytes);
        let limits = Limits {
            connections: keys.connections.unwrap_or(10_000),
            head: bytes(keys.head, 64 << 10),
            fields: keys.fields.unwrap_or(100),
            target: bytes(keys.target, 16 << 10),
            header_timeout: self.positive(keys.header_timeout, 10, &path.key("header_timeout")),
            keep_alive: self.positive(keys.keep_alive, 120, &path.key("keep_alive")),
            streams: keys.streams.unwrap_or(100),
            replay_total: bytes(keys.replay_total, 64 << 20),
            upstreams: keys.upstreams.unwrap_or(10_000),
            fanout_body: bytes(keys.fanout_body, 1 << 20),
        };
        let bounds = [
            ("connections", limits.connections, 1, 1_000_000),
            ("fields", limits.fields, 1, 10_000),
            ("streams", limits.streams as usize, 1, 1_000_000),
            ("upstreams", limits.upstreams, 1, 1_000_000),
        ];
        for (key, value, least, most) in bounds {
            if !(least..=most).contains(&value) {
                self.report.error(&path.key(key), format!("expected {least} to {most}; found `{value}`"));
            }
        }
        if !(1 << 10..=64 << 20).contains(&limits.fanout_body) {
            self.report.error(&path.key("fanout_body"), "expected 1KiB to 64MiB");
        }
        if !(LEAST_HEAD..=16 << 20).contains(&limits.head) {
            self.report.error(&path.key("head"), "expected 8KiB to 16MiB");
        } else if !(64..=limits.head).contains(&limits.target) {
            let message = format!("expected 64B to limits.head ({})", ByteSize(limits.head));
            self.report.error(&self.report.setter(&[path], &["target", "head"]), message);
        }
        limits
    }

    fn dns(&self, keys: Option<&raw::Dns>) -> Dns {
        let keys = keys.cloned().unwrap_or_default();
        let path = Path::of(["dns"]);
        let servers: Vec<SocketAddr> = keys.servers.iter().flatten().map(|Socket(server)| *server).collect();
        for (index, server) in servers.iter().enumerate() {
            if server.port() == 0 {
                self.report.error(&path.key("servers").index(index), "expected a port from 1 to 65535");
            }
        }
        Dns { servers, timeout: self.positive(keys.timeout, 2, &path.key("timeout")) }
    }

    fn egress(&self, keys: Option<&raw::Egress>) -> Egress {
        let keys = keys.cloned().unwrap_or_default();
        let path = Path::of(["egress"]);
        Egress {
            deny_by_default: keys.default == Some(raw::Verdict::Deny),
            deny_private: keys.deny_private.is_some_and(|flag| flag.0),
            allow: self.list(keys.allow.as_deref(), &path.key("allow"), hosts::egress_rule),
            deny: self.list(keys.deny.as_deref(), &path.key("deny"), hosts::egress_rule),
        }
    }

    fn direct(
        &self,
        items: Option<&Vec<String>>,
        index: &HostIndex,
        named: &[(String, raw::Upstream)],
    ) -> Vec<DirectRule> {
        let path = Path::of(["direct"]);
        let rules = self.list(items.map(Vec::as_slice), &path, hosts::direct_rule);
        for (nth, text) in items.into_iter().flatten().enumerate() {
            let Ok(DirectRule::Host(host)) = hosts::direct_rule(text) else { continue };
            // A suffix may well have exceptions, which then are upstreams.
            if host.is_suffix {
                continue;
            }
            let found = |port| index.find(&host.name, host.port.unwrap_or(port));
            if let (Some(upstream), Some(_)) = (found(80), found(443)) {
                let message = format!("never counts: upstreams.{} names this host", named[upstream].0);
                self.report.warning(&path.index(nth), message);
            }
        }
        rules
    }

    fn drain(&self, keys: Option<&raw::Drain>) -> Drain {
        let span =
            |key: Option<Unit<Span>>, default| key.map_or(Duration::from_secs(default), |unit| unit.0.0);
        let drain = Drain {
            quiet: span(keys.and_then(|keys| keys.quiet), 1),
            max: span(keys.and_then(|keys| keys.max), 25),
        };
        if drain.quiet > drain.max {
            let path = self.report.setter(&[Path::of(["drain"])], &["quiet", "max"]);
            let (quiet, max) = (Span(drain.quiet), Span(drain.max));
            self.report.error(&path, format!("quiet ({quiet}) is longer than max ({max})"));
        }
        drain
    }

    fn positive(&self, key: Option<Unit<Span>>, default_seconds: u64, path: &Path) -> Duration {
        let span = key.map_or(Duration::from_secs(default_seconds), |unit| unit.0.0);
        if span.is_zero() {
            self.report.error(path, "expected a duration longer than 0s");
        }
        span
    }

    /// Every item that `read` takes; the others are noted, each in its own line.
    fn list<T, E: std::fmt::Display>(
        &self,
        items: Option<&[String]>,
        path: &Path,
        read: impl Fn(&str) -> Result<T, E>,
    ) -> Vec<T> {
        let items = items.unwrap_or_default().iter().enumerate();
        items.filter_map(|(index, item)| self.report.check(&path.index(index), read(item))).collect()
    }
}

fn telemetry(keys: Option<&raw::Telemetry>) -> Telemetry {
    let access_log = match keys.and_then(|keys| keys.access_log) {
        None | Some(raw::AccessLog::Json) => AccessLog::Json,
        Some(raw::AccessLog::Text) => AccessLog::Text,
        Some(raw::AccessLog::Off) => AccessLog::Off,
    };
    Telemetry { access_log }
}

/// Whether two listeners cannot both be bound. Port 0 is chosen by the system, never twice.
fn clash(one: SocketAddr, other: SocketAddr) -> bool {
    let any = one.ip().is_unspecified() || other.ip().is_unspecified();
    one.port() == other.port() && one.port() != 0 && (any || one.ip() == other.ip())
}
