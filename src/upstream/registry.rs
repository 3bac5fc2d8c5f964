//! All upstreams that are known, by their key, made on first use and forgotten when long unused.
//!
//! An [`Upstream`] is the state of one `host:port`: its guards, its pool. Policies come and go with
//! reloads while the state lives on, so the state never holds a setting: settings are passed in at
//! each question. Which policy applies is looked up once for each upstream and snapshot and then
//! remembered.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use dashmap::DashMap;
use http::Method;
use parking_lot::{Mutex, RwLock};
use tokio::time::Instant;

use super::dial::Dialer;
use super::pool::Pool;
use super::socket::Socket;
use crate::call::Needs;
use crate::config::{Config, Origin, OwnState, RateLimit, Route, Stages, UpstreamPolicy, UpstreamTls};
use crate::fleet::{Fault, Fleet, Id, Member};
use crate::policy::breaker::{BreakerCell, State};
use crate::policy::budget::ExtraLoadBudget;
use crate::policy::bulkhead::Bulkhead;
use crate::policy::cache::Store;
use crate::policy::hedge::HedgeState;
use crate::policy::identity::Passage;
use crate::policy::rate_limit::RateLimiter;
use crate::telemetry::metrics::{BreakerState, Metrics, UpstreamMetrics};
use crate::tls::client::{ClientTls, SystemRoots};
use crate::wire::authority::Authority;
use crate::wire::target::Scheme;

/// An upstream that nobody has called for so long is forgotten, once its breaker is closed.
const FORGET_AFTER: Duration = Duration::from_secs(10 * 60);

/// The upstreams of the process and what they share.
pub struct Registry {
    map: DashMap<Arc<str>, Arc<Upstream>>,
    dialer: Dialer,
    fleet: Arc<Fleet>,
    metrics: Arc<Metrics>,
    roots: Arc<SystemRoots>,
    tls: Mutex<Vec<(TlsKey, Arc<ClientTls>)>>,
    /// Kept answers.
    stores: Mutex<Stores>,
    epoch: Instant,
}

/// By the policy's name and the size that it gives.
type Stores = HashMap<(Arc<str>, u64), Arc<Store>>;

/// What two upstreams must have in common to share a TLS client with its roots and sessions.
#[derive(PartialEq, Eq, Clone)]
struct TlsKey {
    ca_pem: Option<Arc<[u8]>>,
    upstream: UpstreamTls,
}

/// One `host:port` and its state.
pub struct Upstream {
    fleet: Arc<Fleet>,
    authority: Authority,
    /// Set when the policy's name found it, not a request's host.
    name: Option<Arc<str>>,
    policy: ArcSwap<Bound>,
    guards: Guards,
    routes: RwLock<HashMap<Arc<str>, Arc<Guards>>>,
    /// What hedges and retries may add.
    pub budget: ExtraLoadBudget,
    /// Its connections that requests may use.
    pub pool: Pool,
    last_used_ms: AtomicU64,
    /// The shared state does not take what this upstream has to tell.
    is_refused: AtomicBool,
}

/// An upstream's place in one snapshot of the policy.
pub struct Bound {
    config: Arc<Config>,
    policy: Arc<UpstreamPolicy>,
    metrics: Arc<UpstreamMetrics>,
    tls: Arc<ClientTls>,
    /// By their sizes, of which a route may have one of its own.
    caches: Vec<(u64, Arc<Store>)>,
    passage: Passage,
}

/// The guards that an upstream, or a named route of it, has to itself.
pub struct Guards {
    bulkhead: Arc<Bulkhead>,
    breaker: Arc<BreakerCell>,
    hedge: HedgeState,
    rate: Arc<RateLimiter>,
}

impl Guards {
    fn new(member: Member) -> Self {
        Self {
            bulkhead: Bulkhead::new(),
            breaker: BreakerCell::of(member.clone()),
            hedge: HedgeState::new(),
            rate: RateLimiter::of(member),
        }
    }
}

impl Registry {
    /// An empty registry.
    pub fn new(dialer: Dialer, fleet: Arc<Fleet>, metrics: Arc<Metrics>) -> Self {
        Self {
            map: DashMap::new(),
            dialer,
            fleet,
            metrics,
            roots: Arc::new(SystemRoots::default()),
            tls: Mutex::default(),
            stores: Mutex::default(),
            epoch: Instant::now(),
        }
    }

    /// Makes connections.
    pub fn dialer(&self) -> &Dialer {
        &self.dialer
    }

    /// The pods that this one belongs to.
    pub fn fleet(&self) -> &Arc<Fleet> {
        &self.fleet
    }

    /// The upstream that a client names with `text`, a host with or without port. A spelling that is
    /// a key already is found without being parsed.
    ///
    /// # Errors
    /// What is wrong with the authority.
    pub fn by_authority(
        &self,
        config: &Arc<Config>,
        text: &str,
        scheme: Scheme,
    ) -> Result<Arc<Upstream>, &'static str> {
        if let Some(known) = self.map.get(text) {
            return Ok(known.clone());
        }
        let authority = Authority::parse(text, Some(scheme.default_port()))?;
        Ok(self.find_or_make(config, authority.key(), |registry| {
            let policy = config.policy_for(&authority).clone();
            Upstream::new(registry, config, authority.clone(), None, policy)
        }))
    }

    /// The upstream that the policy calls `name`, as a hedge's `to` does: its endpoint, or its first
    /// host.
    pub fn by_name(&self, config: &Arc<Config>, name: &str) -> Option<Arc<Upstream>> {
        let policy = config.upstream(name)?;
        // `@` is in no authority, so this state is the name's own.
        let key = format!("@{name}");
        let authority = policy.place()?;
        let make = |registry: &Self| {
            let name = Some(policy.name.clone());
            Upstream::new(registry, config, authority.clone(), name, policy.clone())
        };
        let upstream = self.find_or_make(config, &key, make);
        if upstream.authority == authority {
            return Some(upstream);
        }
        // A reload has moved the endpoint: state of the old one says nothing about the new.
        self.map.remove(key.as_str());
        Some(self.find_or_make(config, &key, make))
    }

    fn find_or_make(&self, config: &Config, key: &str, make: impl Fn(&Self) -> Upstream) -> Arc<Upstream> {
        if let Some(known) = self.map.get(key) {
            return known.clone();
        }
        if self.map.len() >= config.limits.upstreams {
            self.forget_oldest(config.limits.upstreams);
        }
        if self.map.len() >= config.limits.upstreams {
            // All of them are busy. The call goes on with guards that only it knows.
            return Arc::new(make(self));
        }
        self.map.entry(key.into()).or_insert_with(|| Arc::new(make(self))).clone()
    }

    /// The upstream as the snapshot `config` sees it. Remembered, so that the policy is looked up
    /// once for each upstream and snapshot.
    pub fn bind(&self, upstream: &Arc<Upstream>, config: &Arc<Config>) -> Arc<Bound> {
        let bound = upstream.policy.load_full();
        if Arc::ptr_eq(&bound.config, config) {
            return bound;
        }
        let policy = match &upstream.name {
            Some(name) => config.upstream(name).unwrap_or(&config.defaults),
            None => config.policy_for(&upstream.authority),
        };
        let fresh = Arc::new(self.bound(config, policy.clone()));
        upstream.policy.store(fresh.clone());
        fresh
    }

    fn bound(&self, config: &Arc<Config>, policy: Arc<UpstreamPolicy>) -> Bound {
        let key = TlsKey { ca_pem: config.tls.ca_pem.clone(), upstream: policy.tls.clone() };
        let tls = {
            let mut clients = self.tls.lock();
            match clients.iter().find(|(known, _)| *known == key) {
                Some((_, client)) => client.clone(),
                None => {
                    let client = Arc::new(ClientTls::new(
                        self.roots.clone(),
                        [&key.ca_pem, &key.upstream.ca_pem].into_iter().flatten().cloned(),
                        key.upstream.server_name.clone(),
                        key.upstream.client.clone(),
                    ));
                    clients.push((key, client.clone()));
                    client
                }
            }
        };
        let metrics = self.metrics.upstream(&policy.name);
        let caches = self.caches(&policy);
        let passage = Passage::of(&policy);
        Bound { config: config.clone(), policy, metrics, tls, caches, passage }
    }

    /// The stores of a policy. All its hosts share them, so that memory is bounded by what the policy says and not
    /// by how many hosts are called.
    fn caches(&self, policy: &UpstreamPolicy) -> Vec<(u64, Arc<Store>)> {
        let mut sizes: Vec<u64> = policy.cache_sizes().collect();
        sizes.sort_unstable();
        sizes.dedup();
        let mut stores = self.stores.lock();
        let mut store = |size: u64| {
            let key = (policy.name.clone(), size);
            let store = stores.entry(key).or_insert_with(|| Arc::new(Store::new(size)));
            (size, store.clone())
        };
        sizes.into_iter().map(&mut store).collect()
    }

    /// Lets go of what nobody needs: long unused upstreams, old connections, old snapshots.
    pub fn sweep(&self, config: &Arc<Config>, now: Instant) {
        let all: Vec<Arc<Upstream>> = self.map.iter().map(|entry| entry.value().clone()).collect();
        for upstream in all {
            upstream.pool.sweep(now);
            let bound = self.bind(&upstream, config);
            upstream.forget_routes(&bound.policy);
        }
        let oldest = self.age(now).saturating_sub(FORGET_AFTER.as_millis() as u64);
        self.map.retain(|_, upstream| {
            upstream.last_used_ms.load(Ordering::Relaxed) >= oldest || !upstream.is_forgettable(now)
        });
        // The registry itself holds one reference; whoever else holds one still dials with it.
        self.tls.lock().retain(|(_, client)| Arc::strong_count(client) > 1);
        // Likewise; a store that the policy still names outlives its hosts.
        let is_named = |(name, size): &(Arc<str>, u64)| {
            let policy = config.policies().find(|policy| policy.name == *name);
            policy.is_some_and(|policy| policy.cache_sizes().any(|own| own == *size))
        };
        self.stores.lock().retain(|key, store| Arc::strong_count(store) > 1 || is_named(key));
    }

    /// Makes room for a sixteenth of the limit, those unused for longest first.
    fn forget_oldest(&self, limit: usize) {
        let now = Instant::now();
        let mut ages: Vec<(u64, Arc<str>)> = self
            .map
            .iter()
            .filter(|entry| entry.value().is_forgettable(now))
            .map(|entry| (entry.value().last_used_ms.load(Ordering::Relaxed), entry.key().clone()))
            .collect();
        ages.sort_unstable_by_key(|(age, _)| *age);
        for (_, key) in ages.into_iter().take((limit / 16).max(1)) {
            self.map.remove(&key);
        }
    }

    /// Notes that the upstream is in use.
    pub fn touch(&self, upstream: &Upstream, now: Instant) {
        upstream.last_used_ms.store(self.age(now), Ordering::Relaxed);
    }

    /// How long it has not been used.
    pub fn idle_time(&self, upstream: &Upstream, now: Instant) -> Duration {
        let used = upstream.last_used_ms.load(Ordering::Relaxed);
        Duration::from_millis(self.age(now).saturating_sub(used))
    }

    /// The upstreams at a host and port: the one that requests name so, and those that policies name.
    pub fn at(&self, config: &Config, authority: &str) -> Vec<Arc<Upstream>> {
        let by_name =
            config.upstreams.iter().filter_map(|policy| self.map.get(&*format!("@{}", policy.name)));
        let named =
            by_name.map(|entry| entry.value().clone()).filter(|found| found.authority.key() == authority);
        self.map.get(authority).map(|entry| entry.value().clone()).into_iter().chain(named).collect()
    }

    fn age(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.epoch).as_millis() as u64
    }

    /// Every upstream, for the admin port.
    pub fn all(&self) -> Vec<Arc<Upstream>> {
        self.map.iter().map(|entry| entry.value().clone()).collect()
    }

    /// Every store of kept answers with its policy's name, for the admin port; by name, then by size.
    pub fn stores(&self) -> Vec<(Arc<str>, Arc<Store>)> {
        let stores = self.stores.lock();
        let mut all: Vec<_> =
            stores.iter().map(|((name, size), store)| (name.clone(), *size, store.clone())).collect();
        drop(stores);
        all.sort_unstable_by(|(one, less, _), (other, more, _)| (one, less).cmp(&(other, more)));
        all.into_iter().map(|(name, _, store)| (name, store)).collect()
    }

    /// How many upstreams are known.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }
}

impl Upstream {
    fn new(
        registry: &Registry,
        config: &Arc<Config>,
        authority: Authority,
        name: Option<Arc<str>>,
        policy: Arc<UpstreamPolicy>,
    ) -> Self {
        let id = Id { authority: authority.key().into(), route: None };
        let member = Member { fleet: registry.fleet.clone(), id };
        Self {
            fleet: registry.fleet.clone(),
            authority,
            name,
            policy: ArcSwap::from_pointee(registry.bound(config, policy)),
            guards: Guards::new(member),
            routes: RwLock::default(),
            budget: ExtraLoadBudget::default(),
            pool: Pool::default(),
            last_used_ms: AtomicU64::new(registry.age(Instant::now())),
            is_refused: AtomicBool::new(false),
        }
    }

    /// Its key.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// The policy it was last used under.
    pub fn policy(&self) -> Arc<UpstreamPolicy> {
        self.policy.load().policy.clone()
    }

    /// Its own guards and those of its named routes.
    pub fn each_guards(&self, mut look: impl FnMut(Option<&Arc<str>>, &Guards)) {
        look(None, &self.guards);
        for (name, guards) in self.routes.read().iter() {
            look(Some(name), guards);
        }
    }

    /// The breakers that its policy has it share with other pods, each with its route.
    pub fn shared_breakers(&self) -> Vec<(Option<Arc<str>>, Arc<BreakerCell>)> {
        let policy = self.policy();
        let is_shared = |stages: &Stages| stages.breaker.as_ref().is_some_and(|breaker| breaker.is_shared);
        self.shared(
            &policy,
            |own| own.breaker,
            |stages, guards| is_shared(stages).then(|| guards.breaker.clone()),
        )
    }

    /// The rates that its policy has it share with other pods.
    pub fn shared_rates(&self) -> Vec<(RateLimit, Arc<RateLimiter>)> {
        let policy = self.policy();
        let found = self.shared(
            &policy,
            |own| own.rate_limit,
            |stages, guards| Some((stages.rate_limit.filter(|rate| rate.is_shared)?, guards.rate.clone())),
        );
        found.into_iter().map(|(_, rate)| rate).collect()
    }

    fn shared<T>(
        &self,
        policy: &UpstreamPolicy,
        is_own: impl Fn(&OwnState) -> bool,
        part: impl Fn(&Stages, &Guards) -> Option<T>,
    ) -> Vec<(Option<Arc<str>>, T)> {
        let mut found = Vec::new();
        self.each_guards(|name, guards| {
            let stages = match name {
                None => Some(&policy.stages),
                Some(_) => {
                    let route = policy.routes.iter().find(|route| route.name.as_ref() == name);
                    route.filter(|route| is_own(&route.own)).map(|route| &route.stages)
                }
            };
            if let Some(part) = stages.and_then(|stages| part(stages, guards)) {
                found.push((name.cloned(), part));
            }
        });
        found
    }

    /// Tells the log, once, that what pods share of this upstream cannot be used. The link tells of its own
    /// troubles.
    pub fn is_refused_by_fleet(&self, fault: &Fault) {
        if let Fault::Refused(reason) = fault
            && !self.is_refused.swap(true, Ordering::Relaxed)
        {
            let authority = &self.authority;
            tracing::warn!(%authority, reason, "what pods share of this upstream cannot be used: each goes by its own");
        }
    }

    /// Tells metrics and log that one of its breakers has changed its state, and through whom.
    pub fn breaker_moved(&self, state: State, by: &'static str) {
        let bound = self.policy.load();
        bound.metrics.breaker_transition(match state {
            State::Closed => BreakerState::Closed,
            State::Open => BreakerState::Open,
            State::HalfOpen => BreakerState::HalfOpen,
        });
        tracing::warn!(
            upstream = %bound.policy.name,
            authority = %self.authority,
            state = state.word(),
            by,
            "breaker changed"
        );
    }

    /// The state of its own breaker.
    pub fn breaker_state(&self) -> State {
        self.guards.breaker.state()
    }

    fn is_forgettable(&self, now: Instant) -> bool {
        let mut is_quiet = true;
        self.each_guards(|_, guards| {
            is_quiet &= guards.bulkhead.in_flight() == 0
                && guards.bulkhead.queued() == 0
                && guards.breaker.is_at_rest(now);
        });
        is_quiet
    }

    /// Lets go of guards whose routes a reload has taken away; calls under way keep theirs.
    fn forget_routes(&self, policy: &UpstreamPolicy) {
        let is_there = |name: &Arc<str>| policy.routes.iter().any(|route| route.name.as_ref() == Some(name));
        if !self.routes.read().keys().all(is_there) {
            self.routes.write().retain(|name, _| is_there(name));
        }
    }

    fn route_guards(&self, name: &Arc<str>) -> Arc<Guards> {
        if let Some(known) = self.routes.read().get(name) {
            return known.clone();
        }
        let id = Id { authority: self.authority.key().into(), route: Some(name.clone()) };
        let member = Member { fleet: self.fleet.clone(), id };
        self.routes.write().entry(name.clone()).or_insert_with(|| Arc::new(Guards::new(member))).clone()
    }
}

impl Guards {
    /// The permits.
    pub fn bulkhead(&self) -> &Arc<Bulkhead> {
        &self.bulkhead
    }

    /// The breaker.
    pub fn breaker(&self) -> &Arc<BreakerCell> {
        &self.breaker
    }

    /// The hedge's memory.
    pub fn hedge(&self) -> &HedgeState {
        &self.hedge
    }

    /// The rate tokens.
    pub fn rate(&self) -> &Arc<RateLimiter> {
        &self.rate
    }
}

/// An upstream together with the rules and guards that one call meets there. Cheap to clone.
#[derive(Clone)]
pub struct Lane {
    /// The state of the host.
    pub upstream: Arc<Upstream>,
    bound: Arc<Bound>,
    route: Option<usize>,
    route_guards: Option<Arc<Guards>>,
}

impl Lane {
    /// What `method path` meets at `upstream` under the snapshot `config`.
    pub fn find(
        registry: &Registry,
        config: &Arc<Config>,
        upstream: Arc<Upstream>,
        method: &Method,
        path: &str,
    ) -> Self {
        let bound = registry.bind(&upstream, config);
        let route = bound.policy.route_for(method, path);
        let route_guards =
            route.and_then(|(_, route)| route.name.as_ref()).map(|name| upstream.route_guards(name));
        let route = route.map(|(index, _)| index);
        Self { upstream, bound, route, route_guards }
    }

    /// The snapshot.
    pub fn config(&self) -> &Arc<Config> {
        &self.bound.config
    }

    /// The policy.
    pub fn policy(&self) -> &UpstreamPolicy {
        &self.bound.policy
    }

    /// The route that matched.
    pub fn route(&self) -> Option<&Route> {
        self.route.map(|index| &self.bound.policy.routes[index])
    }

    /// The route's stages, or else the upstream's.
    pub fn stages(&self) -> &Stages {
        self.route().map_or(&self.bound.policy.stages, |route| &route.stages)
    }

    /// Its metrics.
    pub fn metrics(&self) -> &Arc<UpstreamMetrics> {
        &self.bound.metrics
    }

    /// The permits: the route's own, where it names some.
    pub fn bulkhead(&self) -> &Arc<Bulkhead> {
        &self.own_guards(|own| own.bulkhead).bulkhead
    }

    /// The breaker: the route's own, where it names one.
    pub fn breaker(&self) -> &Arc<BreakerCell> {
        &self.own_guards(|own| own.breaker).breaker
    }

    /// The rate tokens: the route's own, where it names some.
    pub fn rate(&self) -> &Arc<RateLimiter> {
        &self.own_guards(|own| own.rate_limit).rate
    }

    /// The kept answers; `None` where the cache is off.
    pub fn cache(&self) -> Option<&Arc<Store>> {
        let most = self.stages().cache.as_ref()?.max_bytes;
        self.bound.caches.iter().find(|(bytes, _)| *bytes == most).map(|(_, store)| store)
    }

    /// All stores of the policy, its routes' included.
    pub fn caches(&self) -> impl Iterator<Item = &Arc<Store>> {
        self.bound.caches.iter().map(|(_, store)| store)
    }

    /// What the policy makes of requests on their way.
    pub fn passage(&self) -> &Passage {
        &self.bound.passage
    }

    /// The hedge's memory: each named route has its own, since routes differ in speed.
    pub fn hedge(&self) -> &HedgeState {
        &self.route_guards.as_deref().unwrap_or(&self.upstream.guards).hedge
    }

    fn own_guards(&self, is_own: impl Fn(&crate::config::OwnState) -> bool) -> &Guards {
        match (&self.route_guards, self.route()) {
            (Some(guards), Some(route)) if is_own(&route.own) => guards,
            _ => &self.upstream.guards,
        }
    }

    /// Whether it stands in for the upstream that was asked for, as a backup does.
    pub fn is_stand_in(&self) -> bool {
        self.upstream.name.is_some()
    }

    /// Whether something else is dialled than the host that was asked for: what its client knows of that
    /// host, its address, its name, the version that it speaks, is no news of this place.
    pub fn is_elsewhere(&self) -> bool {
        self.bound.policy.endpoint.is_some() || self.is_stand_in()
    }

    /// What is dialled: the policy's endpoint, or the host itself.
    pub fn dialled(&self) -> &Authority {
        self.bound.policy.endpoint.as_ref().map_or(self.upstream.authority(), |to| &to.authority)
    }

    /// Whether HTTP/1.1 would not do here for a call that needs this, where the policy leaves it open.
    pub fn must_be_http2(&self, needs: Needs) -> bool {
        match needs {
            Needs::Http2 => true,
            Needs::SpokenHttp2 => !self.is_elsewhere(),
            Needs::Either | Needs::Http1 => false,
        }
    }

    /// How the upstream is spoken to in a call of this scheme, for what the call needs.
    pub fn speech(&self, scheme: Scheme, needs: Needs) -> Speech<'_> {
        let is_https = match (&self.bound.policy.endpoint, self.bound.policy.origin) {
            (_, Origin::Https) => true,
            (_, Origin::Http | Origin::H2c) => false,
            (Some(endpoint), Origin::Auto) => endpoint.is_https,
            (None, Origin::Auto) => scheme == Scheme::Https,
        };
        let is_h2c = match self.bound.policy.origin {
            Origin::H2c => needs != Needs::Http1,
            Origin::Auto => self.must_be_http2(needs),
            Origin::Http | Origin::Https => false,
        };
        match is_https {
            true if needs == Needs::Http1 => Speech::Tls1(&self.bound.tls),
            true => Speech::Tls(&self.bound.tls),
            false if is_h2c => Speech::Clear2,
            false => Speech::Clear,
        }
    }
}

/// How an upstream is spoken to. What needs a connection to itself, as an upgrade does, speaks HTTP/1.1
/// whatever the upstream knows beside it.
#[derive(Clone, Copy)]
pub enum Speech<'a> {
    /// HTTP/1.1 in clear text.
    Clear,
    /// HTTP/2 in clear text, by prior knowledge (RFC 9113 section 3.3).
    Clear2,
    /// TLS, in which the handshake decides between HTTP/2 and HTTP/1.1.
    Tls(&'a Arc<ClientTls>),
    /// HTTP/1.1 over TLS.
    Tls1(&'a Arc<ClientTls>),
}

impl<'a> Speech<'a> {
    /// The TLS client; `None` for clear text.
    pub fn tls(self) -> Option<&'a Arc<ClientTls>> {
        match self {
            Self::Clear | Self::Clear2 => None,
            Self::Tls(tls) | Self::Tls1(tls) => Some(tls),
        }
    }

    /// The scheme on the wire.
    pub fn scheme(self) -> Scheme {
        if self.tls().is_some() { Scheme::Https } else { Scheme::Http }
    }

    /// Whether an HTTP/1.1 connection will do.
    pub fn may_be_http1(self) -> bool {
        !matches!(self, Self::Clear2)
    }

    /// Whether an HTTP/2 connection will do.
    pub fn may_be_http2(self) -> bool {
        matches!(self, Self::Clear2 | Self::Tls(_))
    }

    /// Whether a socket that was dialled for it speaks HTTP/2.
    pub fn is_http2(self, socket: &Socket) -> bool {
        matches!(self, Self::Clear2) || socket.agreed_on_http2()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn policy(routes: &str) -> Arc<Config> {
        let text = format!("upstreams: {{ tools: {{ hosts: [a.example], routes: [{routes}] }} }}");
        Arc::new(crate::config::parse(&text, Path::new("")).unwrap().config)
    }

    #[tokio::test]
    async fn a_route_that_a_reload_took_away_leaves_no_guards_behind() {
        let (before, after) =
            (policy("{ name: old, path: /x }, { name: kept, path: /y }"), policy("{ name: kept, path: /y }"));
        let dialer = Dialer::new(&before.dns, Vec::new()).unwrap();
        let registry = Registry::new(dialer, Fleet::new(), Arc::new(Metrics::new()));
        let upstream = registry.by_authority(&before, "a.example", Scheme::Http).unwrap();
        for path in ["/x", "/y"] {
            Lane::find(&registry, &before, upstream.clone(), &Method::GET, path);
        }
        let routes = || {
            let mut names = Vec::new();
            upstream.each_guards(|name, _| names.extend(name.map(|name| name.to_string())));
            names.sort();
            names
        };
        assert_eq!(routes(), ["kept", "old"]);
        registry.sweep(&after, Instant::now());
        assert_eq!(routes(), ["kept"]);
    }
}
