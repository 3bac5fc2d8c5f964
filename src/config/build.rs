//! From what the user wrote to a [`Config`], gathering every problem on the way.
//!
//! A value that is wrong is noted and replaced by its default, so that what depends on it can still be
//! judged; whether the result may be used is for the caller to see from the problems.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue};

use super::de::did_you_mean;
use super::files::Sources;
use super::notation::{Named, Socket, Switch, Unit};
use super::problem::Path;
use super::raw;
use super::report::Report;
use super::stages::Inherited;
use super::{
    AccessLog, Config, Dns, Drain, Egress, Endpoint, HostIndex, HostPattern, Limits, Listen, Origin,
    OwnState, Rewrite, Route, Stages, Telemetry, UpstreamPolicy, UpstreamTls, hosts,
};
use crate::units::{ByteSize, Span};

/// Most upstreams of a policy: `/status` and metrics name each.
const MOST_UPSTREAMS: usize = 10_000;
/// The least head that the HTTP library can be bounded to.
const LEAST_HEAD: usize = 8 << 10;
/// The name of the policy for hosts that no upstream names.
pub(super) const DEFAULT_NAME: &str = "default";

/// Builds the policy; problems go into `report`. `hash` stays empty.
pub(super) fn build(policy: &raw::Policy, report: &Report<'_>, sources: &Sources) -> Config {
    let root = Path::root();
    let defaults = policy.defaults.clone().unwrap_or_default();
    let builder = Builder { report, sources };
    let inherited = Inherited::default().narrowed(&defaults.stages(), &root.key("defaults"));
    let stages = inherited.resolve(report);
    let named = policy.upstreams.as_ref().map(|named| named.0.as_slice()).unwrap_or_default();
    let upstreams = builder.upstreams(named, &inherited, &stages);
    builder.judge_hedge_targets(&upstreams, named, &defaults);
    Config {
        hash: String::new(),
        threads: builder.threads(policy.threads),
        listen: builder.listen(policy.listen.as_ref()),
        limits: builder.limits(policy.limits.as_ref()),
        dns: builder.dns(policy.dns.as_ref()),
        egress: builder.egress(policy.egress.as_ref()),
        ca_pem: builder.ca_file(policy.tls.as_ref().and_then(|tls| tls.ca_file.as_ref()), &root.key("tls")),
        drain: builder.drain(policy.drain.as_ref()),
        telemetry: telemetry(policy.telemetry.as_ref()),
        hosts: builder.host_index(named),
        defaults: Arc::new(UpstreamPolicy {
            name: DEFAULT_NAME.into(),
            index: upstreams.len(),
            hosts: Vec::new(),
            endpoint: None,
            origin: Origin::Auto,
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
            admin: keys.admin.map_or(SocketAddr::from(([127, 0, 0, 1], 15302)), |Socket(admin)| admin),
            clients,
        };
        let proxy_path = path.key("proxy");
        if !listen.proxy.ip().is_loopback() && listen.clients.is_empty() {
            let message =
                "not a loopback address, so anyone could use the proxy; name who may in `listen.clients`";
            self.report.error(&proxy_path, message);
        }
        if !listen.admin.ip().is_loopback() {
            let message = "not a loopback address: whoever reaches it can read the policy and set breakers";
            self.report.warning(&path.key("admin"), message);
        }
        if clash(listen.proxy, listen.admin) {
            let path = self.report.setter(std::slice::from_ref(&path), &["admin", "proxy"]);
            self.report.error(&path, format!("proxy and admin are both on port {}", listen.proxy.port()));
        }
        listen
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
            replay_total: bytes(keys.replay_total, 64 << 20),
            upstreams: keys.upstreams.unwrap_or(10_000),
        };
        let bounds = [
            ("connections", limits.connections, 1, 1_000_000),
            ("fields", limits.fields, 1, 10_000),
            ("upstreams", limits.upstreams, 1, 1_000_000),
        ];
        for (key, value, least, most) in bounds {
            if !(least..=most).contains(&value) {
                self.report.error(&path.key(key), format!("expected {least} to {most}; found `{value}`"));
            }
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

    fn ca_file(&self, file: Option<&String>, section: &Path) -> Option<Arc<[u8]>> {
        self.report.check(&section.key("ca_file"), self.sources.certificates(file?))
    }

    fn upstreams(
        &self,
        named: &[(String, raw::Upstream)],
        inherited: &Inherited,
        stages: &Stages,
    ) -> Vec<UpstreamPolicy> {
        let section = Path::of(["upstreams"]);
        if named.len() > MOST_UPSTREAMS {
            self.report.error(&section, format!("{} upstreams; at most {MOST_UPSTREAMS}", named.len()));
            return Vec::new();
        }
        let build = |(index, (name, keys)): (usize, &(String, raw::Upstream))| {
            let path = section.key(name);
            if name == DEFAULT_NAME {
                self.report.error(&path, "this name stands for hosts that no upstream names; set `defaults`");
            } else if let Err(message) = name_is_fine(name) {
                self.report.error(&path, message);
            }
            self.upstream(index, name, keys, &path, inherited, stages)
        };
        named.iter().enumerate().map(build).collect()
    }

    fn upstream(
        &self,
        index: usize,
        name: &str,
        keys: &raw::Upstream,
        path: &Path,
        inherited: &Inherited,
        wider: &Stages,
    ) -> UpstreamPolicy {
        let hosts = self.list(keys.hosts.as_deref(), &path.key("hosts"), hosts::host_pattern);
        let is_written = |key| self.report.is_written(&path.key(key));
        if !is_written("hosts") && !is_written("endpoint") {
            self.report.error(path, "nothing leads here: expected `hosts`, `endpoint` or both");
        }
        let endpoint = keys
            .endpoint
            .as_deref()
            .and_then(|url| self.report.check(&path.key("endpoint"), hosts::endpoint(url)));
        let own = keys.stages();
        let inherited = inherited.narrowed(&own, path);
        let mut stages =
            if own == raw::Stages::default() { wider.clone() } else { inherited.resolve(self.report) };
        // The defaults may name a backup for all upstreams, of which the backup is one.
        if let Some(hedge) = stages.hedge.as_mut().filter(|hedge| hedge.to.as_deref() == Some(name)) {
            hedge.to = None;
        }
        UpstreamPolicy {
            name: name.into(),
            index,
            origin: self.origin(keys.origin, endpoint.as_ref(), path),
            hosts,
            endpoint,
            tls: self.upstream_tls(keys.tls.as_ref(), &path.key("tls")),
            rewrite: keys.rewrite.as_ref().map(|rewrite| self.rewrite(rewrite, &path.key("rewrite"))),
            routes: self.routes(keys.routes.as_deref().unwrap_or_default(), path, &inherited, &stages),
            stages,
        }
    }

    fn origin(&self, origin: Option<raw::Origin>, endpoint: Option<&Endpoint>, path: &Path) -> Origin {
        let origin = match origin {
            None | Some(raw::Origin::Auto | raw::Origin::H2c) => Origin::Auto,
            Some(raw::Origin::Http) => Origin::Http,
            Some(raw::Origin::Https) => Origin::Https,
        };
        let contradicts = match (origin, endpoint) {
            (Origin::Http, Some(endpoint)) => endpoint.is_https,
            (Origin::Https, Some(endpoint)) => !endpoint.is_https,
            (Origin::Auto, _) | (_, None) => false,
        };
        if contradicts {
            self.report.error(&path.key("origin"), "contradicts the scheme of `endpoint`; leave it out");
        }
        origin
    }

    fn upstream_tls(&self, keys: Option<&raw::UpstreamTls>, path: &Path) -> UpstreamTls {
        let Some(keys) = keys else { return UpstreamTls::default() };
        UpstreamTls {
            ca_pem: self.ca_file(keys.ca_file.as_ref(), path),
            server_name: keys
                .server_name
                .as_deref()
                .and_then(|name| self.report.check(&path.key("server_name"), hosts::server_name(name))),
        }
    }

    fn rewrite(&self, keys: &raw::Rewrite, path: &Path) -> Rewrite {
        let headers = keys.headers.clone().unwrap_or_default();
        let remove_path = path.key("headers").key("remove");
        Rewrite {
            path: keys.path.as_ref().and_then(|keys| self.rewrite_path(keys, &path.key("path"))),
            set: self.set_headers(headers.set.as_ref(), &path.key("headers").key("set")),
            remove: self.list(headers.remove.as_deref(), &remove_path, header_name),
        }
    }

    fn rewrite_path(&self, keys: &raw::RewritePath, path: &Path) -> Option<(regex::Regex, String)> {
        let (Some(from), Some(to)) = (&keys.from, &keys.to) else {
            self.report.error(path, "expected both `from` and `to`");
            return None;
        };
        let regex = regex::Regex::new(from).map_err(|error| match error {
            regex::Error::Syntax(text) => {
                let reason = text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
                format!("expected a regular expression: {reason}")
            }
            _ => "the regular expression is too large".to_owned(),
        });
        let regex = self.report.check(&path.key("from"), regex)?;
        for group in groups_of(to) {
            let is_known = match group.parse::<usize>() {
                Ok(number) => number < regex.captures_len(),
                Err(_) => regex.capture_names().flatten().any(|name| name == group),
            };
            if !is_known {
                let hint = did_you_mean(group, regex.capture_names().flatten());
                self.report.error(&path.key("to"), format!("`from` has no group `{group}`{hint}"));
            }
        }
        Some((regex, to.clone()))
    }

    fn set_headers(&self, set: Option<&Named<String>>, path: &Path) -> Vec<(HeaderName, HeaderValue)> {
        let mut headers: Vec<(HeaderName, HeaderValue)> = Vec::new();
        for (name, text) in set.map(|set| set.0.as_slice()).unwrap_or_default() {
            let path = path.key(name);
            let Some(name) = self.report.check(&path, header_name(name)) else { continue };
            if headers.iter().any(|(own, _)| *own == name) {
                self.report.error(&path, "the same field in other letters is set already");
                continue;
            }
            let value = self.sources.substitute(text).and_then(|text| {
                HeaderValue::from_str(&text)
                    .map_err(|_| "the value has characters that no field has".to_owned())
            });
            let Some(mut value) = self.report.check(&path, value) else { continue };
            // Any of them may be a key, so that none is ever printed or indexed by HPACK.
            value.set_sensitive(true);
            headers.push((name, value));
        }
        headers
    }

    fn routes(
        &self,
        routes: &[raw::Route],
        upstream: &Path,
        inherited: &Inherited,
        wider: &Stages,
    ) -> Vec<Route> {
        let mut names: HashMap<&str, usize> = HashMap::new();
        let mut catch_all: Option<usize> = None;
        let mut built = Vec::with_capacity(routes.len());
        for (index, keys) in routes.iter().enumerate() {
            let path = upstream.key("routes").index(index);
            if let Some(earlier) = catch_all {
                let line = self.report.place(&upstream.key("routes").index(earlier)).line;
                self.report
                    .warning(&path, format!("never reached: the route in line {line} takes every call"));
            }
            if let Some(name) = keys.name.as_deref() {
                self.report.check(&path.key("name"), name_is_fine(name));
                if let Some(first) = names.insert(name, index) {
                    let line = self.report.place(&upstream.key("routes").index(first)).line;
                    self.report.error(&path.key("name"), format!("the route in line {line} has this name"));
                }
            }
            if keys.path.is_none() && keys.methods.is_none() {
                catch_all.get_or_insert(index);
            }
            built.push(self.route(keys, &path, inherited, wider));
        }
        built
    }

    fn route(&self, keys: &raw::Route, path: &Path, inherited: &Inherited, wider: &Stages) -> Route {
        let own = keys.stages();
        let stages = if own == raw::Stages::default() {
            wider.clone()
        } else {
            inherited.narrowed(&own, path).resolve(self.report)
        };
        Route {
            name: keys.name.as_deref().map(Into::into),
            path: keys
                .path
                .as_deref()
                .and_then(|glob| self.report.check(&path.key("path"), hosts::path_pattern(glob))),
            methods: keys.methods.iter().flatten().map(|method| method.0.clone()).collect(),
            idempotent: keys.idempotent.is_some_and(|flag| flag.0),
            own: OwnState {
                bulkhead: own.bulkhead.as_ref().is_some_and(|switch| switch.on().is_some()),
                breaker: own.breaker.as_ref().is_some_and(|switch| switch.on().is_some()),
            },
            stages,
        }
    }

    fn host_index(&self, named: &[(String, raw::Upstream)]) -> HostIndex {
        let mut index = HostIndex::default();
        let mut first: HashMap<HostPattern, Path> = HashMap::new();
        for (upstream, (name, keys)) in named.iter().enumerate() {
            for (nth, text) in keys.hosts.iter().flatten().enumerate() {
                // What is no host at all was noted with its upstream.
                let Ok(host) = hosts::host_pattern(text) else { continue };
                let path = Path::of(["upstreams", name, "hosts"]).index(nth);
                if index.insert(&host, upstream) {
                    first.insert(host, path);
                } else if let Some(earlier) = first.get(&host) {
                    let line = self.report.place(earlier).line;
                    self.report.error(&path, format!("this host is already in line {line}, {earlier}"));
                }
            }
        }
        index
    }

    /// A hedge's target must exist, have a place to dial, and be another than its own upstream.
    fn judge_hedge_targets(
        &self,
        upstreams: &[UpstreamPolicy],
        named: &[(String, raw::Upstream)],
        defaults: &raw::Defaults,
    ) {
        let known: HashMap<&str, bool> =
            upstreams.iter().map(|upstream| (&*upstream.name, upstream.endpoint.is_some())).collect();
        let judge = |hedge: Option<&Switch<raw::Hedge>>, section: &Path, own: Option<&str>| {
            let Some(to) = hedge.and_then(Switch::on).and_then(|hedge| hedge.to.as_deref()) else { return };
            let path = section.key("hedge").key("to");
            match known.get(to) {
                _ if own == Some(to) => self.report.error(&path, "the upstream itself; leave it out"),
                None => {
                    let hint = did_you_mean(to, known.keys().copied());
                    self.report.error(&path, format!("no upstream is called `{to}`{hint}"));
                }
                Some(false) => {
                    let message =
                        format!("`{to}` has no `endpoint`, so there is no place to send the hedge to");
                    self.report.error(&path, message);
                }
                Some(true) => {}
            }
        };
        judge(defaults.hedge.as_ref(), &Path::of(["defaults"]), None);
        for (name, keys) in named {
            let section = Path::of(["upstreams", name.as_str()]);
            judge(keys.hedge.as_ref(), &section, Some(name));
            for (index, route) in keys.routes.iter().flatten().enumerate() {
                judge(route.hedge.as_ref(), &section.key("routes").index(index), Some(name));
            }
        }
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

/// Names become metric labels and parts of admin paths.
fn name_is_fine(name: &str) -> Result<(), &'static str> {
    let is_fine = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
    match name.len() {
        1..=64 if name.bytes().all(is_fine) => Ok(()),
        _ => Err("expected a name of 1 to 64 letters, digits, `_`, `.` and `-`"),
    }
}

fn header_name(name: &str) -> Result<HeaderName, String> {
    const OF_THE_CONNECTION: [&str; 9] = [
        "connection",
        "content-length",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "proxy-connection",
    ];
    let header: HeaderName = name.parse().map_err(|_| "expected the name of a header field".to_owned())?;
    if OF_THE_CONNECTION.contains(&header.as_str()) {
        return Err(format!("`{header}` belongs to the connection, which hedgerow sets up itself"));
    }
    Ok(header)
}

/// The groups that a replacement uses, as the regex crate reads it: `$1`, `$name`, `${name}`.
fn groups_of(replacement: &str) -> Vec<&str> {
    let mut groups = Vec::new();
    let mut rest = replacement;
    while let Some((_, after)) = rest.split_once('$') {
        if let Some(after) = after.strip_prefix('$') {
            rest = after;
        } else if let Some((name, after)) = after.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
            groups.push(name);
            rest = after;
        } else {
            let end = after.find(|c: char| c != '_' && !c.is_ascii_alphanumeric()).unwrap_or(after.len());
            groups.extend(Some(&after[..end]).filter(|name| !name.is_empty()));
            rest = &after[end..];
        }
    }
    groups
}
