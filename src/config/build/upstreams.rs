//! The named upstreams, their routes, and what holds between them.

use std::collections::HashMap;

use http::Method;

use super::{Builder, DEFAULT_NAME, DIRECT_NAME};
use crate::config::problem::Path;
use crate::config::raw;
use crate::config::stages::Inherited;
use crate::config::{
    Endpoint, HostIndex, HostPattern, Origin, OwnState, Route, Stages, UpstreamPolicy, UpstreamTls, hosts,
};

/// Most upstreams of a policy: `/status` and metrics name each.
const MOST_UPSTREAMS: usize = 10_000;

impl Builder<'_> {
    pub(super) fn upstreams(
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
            } else if name == DIRECT_NAME {
                self.report.error(&path, "this name stands for the hosts in `direct`");
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
        let is_read = keys.endpoint.is_some() || keys.hosts.as_ref().is_some_and(|hosts| !hosts.is_empty());
        let is_written = |key| self.report.is_written(&path.key(key));
        if !is_read && !is_written("hosts") && !is_written("endpoint") {
            self.report.error(path, "nothing leads here: expected `hosts`, `endpoint` or both");
        }
        let endpoint = keys
            .endpoint
            .as_deref()
            .and_then(|url| self.report.check(&path.key("endpoint"), hosts::endpoint(url)));
        let own = keys.stages();
        let mut inherited = inherited.narrowed(&own, path);
        // The defaults may name a backup for all upstreams, of which the backup is one.
        let is_own_backup = inherited.forget_backup(name);
        let is_plain = own == raw::Stages::default() && !is_own_backup;
        let stages = if is_plain { wider.clone() } else { inherited.resolve(self.report, self.sources) };
        UpstreamPolicy {
            name: name.into(),
            index,
            origin: self.origin(keys.origin, endpoint.as_ref(), path),
            intercept: keys.intercept.map_or(self.intercept, |flag| flag.0),
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
            None | Some(raw::Origin::Auto) => Origin::Auto,
            Some(raw::Origin::Http) => Origin::Http,
            Some(raw::Origin::Https) => Origin::Https,
            Some(raw::Origin::H2c) => Origin::H2c,
        };
        let contradicts = match (origin, endpoint) {
            (Origin::Http | Origin::H2c, Some(endpoint)) => endpoint.is_https,
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
            client: self.client_identity(keys, path),
        }
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
        let mut stages = if own == raw::Stages::default() {
            wider.clone()
        } else {
            inherited.narrowed(&own, path).resolve(self.report, self.sources)
        };
        let methods: Vec<Method> = keys.methods.iter().flatten().map(|method| method.0.clone()).collect();
        let is_idempotent = keys.idempotent.is_some_and(|flag| flag.0);
        let own_state = OwnState {
            bulkhead: own.bulkhead.as_ref().is_some_and(|switch| switch.on().is_some()),
            breaker: own.breaker.as_ref().is_some_and(|switch| switch.on().is_some()),
            rate_limit: own.rate_limit.as_ref().is_some_and(|switch| switch.on().is_some()),
        };
        if keys.name.is_none() {
            self.doubt_own_state(own_state, path);
            self.share_as_upstream(&mut stages, wider, path);
        }
        self.doubt_route(&own, &stages, &methods, is_idempotent, path);
        Route {
            name: keys.name.as_deref().map(Into::into),
            path: keys
                .path
                .as_deref()
                .and_then(|glob| self.report.check(&path.key("path"), hosts::path_pattern(glob))),
            methods,
            idempotent: is_idempotent,
            own: own_state,
            stages,
        }
    }

    /// Guards that a route without a name sets: its state is found by that name, so it has the upstream's.
    fn doubt_own_state(&self, own: OwnState, path: &Path) {
        let all = [("bulkhead", own.bulkhead), ("breaker", own.breaker), ("rate_limit", own.rate_limit)];
        for (key, _) in all.into_iter().filter(|(_, is_own)| *is_own) {
            let message = "without a `name` the route has no state of its own: it shares the upstream's, which \
                           then goes by the one's values and the other's in turns";
            self.report.warning(&path.key(key), message);
        }
    }

    /// State that is the upstream's is shared or not as the upstream says: one breaker cannot be both.
    fn share_as_upstream(&self, stages: &mut Stages, upstream: &Stages, path: &Path) {
        let of_breaker = stages.breaker.as_mut().map(|breaker| &mut breaker.is_shared);
        let of_limit = stages.rate_limit.as_mut().map(|limit| &mut limit.is_shared);
        for (key, own, upstream) in [
            ("breaker", of_breaker, upstream.breaker.as_ref().map(|breaker| breaker.is_shared)),
            ("rate_limit", of_limit, upstream.rate_limit.as_ref().map(|limit| limit.is_shared)),
        ] {
            let (Some(own), Some(upstream)) = (own, upstream) else { continue };
            // They differ only where the route says so itself.
            if std::mem::replace(own, upstream) != upstream {
                let message = format!(
                    "counts for nothing: without a `name` the route has the upstream's state, where it is `{upstream}`"
                );
                self.report.warning(&path.key(key).key("shared"), message);
            }
        }
    }

    /// What the route says of itself and cannot do for its methods.
    fn doubt_route(
        &self,
        own: &raw::Stages,
        stages: &Stages,
        methods: &[Method],
        is_idempotent: bool,
        path: &Path,
    ) {
        let is_safe = methods.is_empty() || methods.iter().any(|m| matches!(*m, Method::GET | Method::HEAD));
        if own.cache.is_some() && stages.cache.is_some() && !is_safe {
            self.report.warning(&path.key("cache"), "answers GET and HEAD alone, and this route has neither");
        }
        if own.coalesce.is_some() && stages.coalesce.is_some() && !is_safe && !is_idempotent {
            let message = "joins GET and HEAD alone, or what the route calls `idempotent: true`";
            self.report.warning(&path.key("coalesce"), message);
        }
        let is_repeated = stages.hedge.is_some() || stages.retry.is_some();
        if is_idempotent && is_repeated && stages.replay_limit == 0 {
            let message = "replay_limit is 0B, so that no request with a body is ever sent twice";
            self.report.warning(&path.key("idempotent"), message);
        }
    }

    pub(super) fn host_index(&self, named: &[(String, raw::Upstream)]) -> HostIndex {
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
}

/// Names become metric labels and parts of admin paths.
fn name_is_fine(name: &str) -> Result<(), &'static str> {
    let is_fine = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
    match name.len() {
        1..=64 if name.bytes().all(is_fine) => Ok(()),
        _ => Err("expected a name of 1 to 64 letters, digits, `_`, `.` and `-`"),
    }
}
