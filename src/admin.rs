//! The admin port: health, metrics, status, the policy in force, and the breakers' levers.
//!
//! Everything here only looks, but for the breakers. There is no way to end the process through it:
//! whoever reaches the port must not be able to take the agent's calls away.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Map, Value, json};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};

use crate::config::watch::Watch;
use crate::config::{Config, RateLimit, Stages, UpstreamPolicy};
use crate::pipeline::Proxy;
use crate::policy::breaker::{BreakerCell, State};
use crate::policy::hedge::{HedgeReport, Plan};
use crate::policy::rate_limit::View as RateView;
use crate::telemetry::metrics::{BreakerState, Listener};
use crate::tls::interceptor::Interceptor;
use crate::units::Span;
use crate::upstream::registry::{Guards, Upstream};
use crate::wire::deadline_header::format_rfc3339_millis;

/// Admin connections at once.
const CONNECTIONS: usize = 64;
/// For a head to arrive.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);

/// What the kubelet and Prometheus need. The rest tells of the policy, or changes something.
const FOR_ALL: [&str; 3] = ["/livez", "/readyz", "/metrics"];

/// What the admin port may see.
#[derive(Clone)]
pub struct View {
    /// The process.
    pub proxy: Arc<Proxy>,
    /// When the process started.
    pub started: SystemTime,
    /// The policy's file, where there is one.
    pub watch: Option<Arc<Watch>>,
}

/// Serves the admin port until the future is dropped.
pub async fn run(listener: TcpListener, view: View) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let Ok((stream, peer)) = listener.accept().await else {
            sleep(Duration::from_millis(100)).await;
            continue;
        };
        let view = view.clone();
        let is_reserved = view.proxy.snapshot().listen.is_admin_reserved;
        let held = (place, view.proxy.metrics().connection(Listener::Admin));
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let response = match is_for(peer.ip(), is_reserved, request.uri().path()) {
                    true => answer(&view, &request),
                    false => text(
                        StatusCode::FORBIDDEN,
                        "beyond loopback there are /livez, /readyz and /metrics\n",
                    ),
                };
                async move { Ok::<_, Infallible>(response) }
            });
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIMEOUT)
                .serve_connection(TokioIo::new(stream), service)
                .await;
            if let Err(error) = served {
                tracing::debug!(%error, "admin connection ended early");
            }
            drop(held);
        });
    }
}

/// Whether `peer` may have this page. A reserved port is one that a pod opens to its network for the kubelet, where
/// anybody could otherwise set breakers.
fn is_for(peer: IpAddr, is_reserved: bool, path: &str) -> bool {
    !is_reserved || peer.to_canonical().is_loopback() || FOR_ALL.contains(&path)
}

fn answer(view: &View, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let path = request.uri().path();
    if let Some(rest) = path.strip_prefix("/breakers/") {
        return match *request.method() {
            Method::POST => pull_lever(view, rest),
            _ => not_allowed("POST"),
        };
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return not_allowed("GET, HEAD");
    }
    match path {
        "/livez" => text(StatusCode::OK, "ok"),
        "/readyz" if view.proxy.is_draining() => text(StatusCode::SERVICE_UNAVAILABLE, "draining"),
        "/readyz" => text(StatusCode::OK, "ok"),
        "/metrics" => metrics(view),
        "/status" => as_json(&status(view)),
        "/config" => as_json(&view.proxy.snapshot().effective()),
        "/" => text(StatusCode::OK, "hedgerow: /livez /readyz /metrics /status /config\n"),
        _ => text(StatusCode::NOT_FOUND, "no such page: /livez /readyz /metrics /status /config"),
    }
}

fn text(status: StatusCode, body: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from_static(body.as_bytes())));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

/// RFC 9110 section 15.5.6 wants the methods that would do.
fn not_allowed(methods: &'static str) -> Response<Full<Bytes>> {
    let mut response = text(StatusCode::METHOD_NOT_ALLOWED, methods);
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(methods));
    response
}

fn as_json(value: &Value) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(format!("{value:#}\n"))));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn metrics(view: &View) -> Response<Full<Bytes>> {
    let metrics = view.proxy.metrics();
    metrics.set_shared_state(view.proxy.registry().fleet().link().map(|link| link.is_up()));
    for policy in view.proxy.snapshot().policies() {
        metrics.upstream(&policy.name);
    }
    // Those too that no policy names any more, so that their gauges do not stay as they were.
    for upstream in metrics.upstreams() {
        let (breakers, bulkhead) = sums(view, upstream.name());
        upstream.set_breakers(breakers);
        upstream.set_bulkhead(bulkhead.0, bulkhead.1);
    }
    let mut response = Response::new(Full::new(Bytes::from(metrics.render())));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// How many breakers are closed, open and half-open, and how many calls are in flight and queued.
fn sums(view: &View, name: &str) -> ([usize; 3], (usize, usize)) {
    let mut breakers = [0; 3];
    let mut bulkhead = (0, 0);
    for upstream in upstreams_of(view, name) {
        upstream.each_guards(|_, guards| {
            breakers[state_of(guards.breaker()) as usize] += 1;
            bulkhead.0 += guards.bulkhead().in_flight();
            bulkhead.1 += guards.bulkhead().queued();
        });
    }
    (breakers, bulkhead)
}

fn state_of(breaker: &BreakerCell) -> BreakerState {
    match breaker.state() {
        State::Closed => BreakerState::Closed,
        State::Open => BreakerState::Open,
        State::HalfOpen => BreakerState::HalfOpen,
    }
}

fn upstreams_of<'a>(view: &View, name: &'a str) -> impl Iterator<Item = Arc<Upstream>> + use<'a> {
    view.proxy.registry().all().into_iter().filter(move |upstream| &*upstream.policy().name == name)
}

fn status(view: &View) -> Value {
    let config = view.proxy.snapshot();
    let now = Instant::now();
    let mut upstreams = Map::new();
    let direct = Some(&config.untouched).filter(|_| !config.direct.is_empty());
    for policy in config.policies().chain(direct) {
        let hosts: Map<String, Value> = upstreams_of(view, &policy.name)
            .map(|upstream| (upstream.authority().key().to_owned(), host(&upstream, policy, now)))
            .collect();
        upstreams.insert(policy.name.to_string(), Value::Object(hosts));
    }
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "started": format_rfc3339_millis(view.started),
        "draining": view.proxy.is_draining(),
        "policy": policy_status(view, &config),
        "in_flight": view.proxy.in_flight(),
        "flights": view.proxy.flights().len(),
        "connections": connections(view),
        "replay_bytes": view.proxy.replay().held(),
        "caches": caches(view),
        "shared_state": shared_state(view),
        "intercept_stepped_down": view.proxy.interceptor().map(Interceptor::stepped_down),
        "upstreams": upstreams,
    })
}

/// What pods share, and whether it can be reached; `null` where they share nothing.
fn shared_state(view: &View) -> Value {
    let Some(link) = view.proxy.registry().fleet().link() else { return Value::Null };
    let status = link.status();
    json!({
        "up": status.is_up,
        "slow": status.is_slow,
        "since": format_rfc3339_millis(status.since),
        "error": status.error,
        "pods": status.pods,
    })
}

/// Connections of clients, however they came here.
fn connections(view: &View) -> usize {
    [Listener::Proxy, Listener::Transparent]
        .map(|port| view.proxy.metrics().open_connections(port))
        .iter()
        .sum()
}

/// The kept answers of each upstream, all of its hosts together; a route with a size of its own has a
/// store of its own.
fn caches(view: &View) -> Value {
    let mut caches: Map<String, Value> = Map::new();
    for (name, store) in view.proxy.registry().stores() {
        let status = json!({
            "entries": store.len(),
            "bytes": store.bytes(),
            "max_bytes": store.max_bytes(),
            "from_other_pods": store.adopted(),
        });
        if let Value::Array(stores) = caches.entry(&*name).or_insert_with(|| json!([])) {
            stores.push(status);
        }
    }
    Value::Object(caches)
}

fn policy_status(view: &View, config: &Config) -> Value {
    let mut policy = json!({ "hash": config.hash });
    if let Some(status) = view.watch.as_ref().map(|watch| watch.status()) {
        policy["applied_at"] = format_rfc3339_millis(status.applied_at).into();
        policy["last_reload"] = status.last.map(|last| last.word()).into();
        policy["last_reload_at"] = format_rfc3339_millis(status.at).into();
        policy["error"] = status.error.as_deref().into();
        let mut needs_restart = status.needs_restart;
        if view.proxy.misses_interception(config) {
            needs_restart.push("intercept");
        }
        policy["needs_restart"] = needs_restart.into();
    }
    policy
}

fn host(upstream: &Upstream, policy: &UpstreamPolicy, now: Instant) -> Value {
    let mut own = Value::Null;
    let mut routes = Map::new();
    upstream.each_guards(|route, guards| match route {
        None => own = guards_status(guards, &policy.stages, policy.stages.rate_limit.as_ref(), now),
        Some(name) => {
            if let Some(route) = policy.routes.iter().find(|route| route.name.as_ref() == Some(name)) {
                // Without tokens of its own it takes the upstream's.
                let rate = route.stages.rate_limit.as_ref().filter(|_| route.own.rate_limit);
                routes.insert(name.to_string(), guards_status(guards, &route.stages, rate, now));
            }
        }
    });
    own["idle_connections"] = upstream.pool.idle().into();
    own["shared_connections"] = upstream.pool.shared.len().into();
    own["extra_load_tokens"] = upstream.budget.balance(&policy.stages.extra_load, now).into();
    if !routes.is_empty() {
        own["routes"] = Value::Object(routes);
    }
    own
}

fn guards_status(guards: &Guards, stages: &Stages, rate: Option<&RateLimit>, now: Instant) -> Value {
    let breaker = guards.breaker().snapshot(now);
    let mut status = json!({
        "breaker": {
            "state": breaker.state.word(),
            "forced": breaker.is_forced,
            "by_fleet": breaker.is_fleets,
            "failures_in_row": breaker.failures_in_row,
            "requests": breaker.requests,
            "failure_rate": breaker.failure_rate.map(|rate| rate.to_string()),
            "slow_rate": breaker.slow_rate.map(|rate| rate.to_string()),
            "retry_after_ms": breaker.retry_at.map(|at| millis_until(at, now)),
        },
        "bulkhead": { "in_flight": guards.bulkhead().in_flight(), "queued": guards.bulkhead().queued() },
    });
    if let Some(rate) = rate {
        status["rate_limit"] = rate_status(&guards.rate().view(rate, now), now);
        if rate.is_shared {
            status["rate_limit"]["share"] = guards.rate().share().into();
        }
    }
    if let Some(hedge) = &stages.hedge {
        status["hedge"] = hedge_status(&guards.hedge().report(hedge, stages.extra_load.ratio, now), now);
    }
    status
}

/// The tokens, who waits for one, and the pauses that the upstream has asked for.
fn rate_status(rate: &RateView, now: Instant) -> Value {
    json!({
        "tokens": rate.tokens,
        "full_after_ms": millis_until(rate.full_at, now),
        "queued": rate.in_line,
        "held": rate.held,
        "paused_credentials": rate.paused,
        "paused_ms": rate.paused_until.map(|until| millis_until(until, now)),
    })
}

/// The delay, and what hedging is worth: enough to choose the budget by.
fn hedge_status(report: &HedgeReport, now: Instant) -> Value {
    let span = |duration: Duration| Span(duration).to_string();
    let (delay, pays) = match report.plan {
        Plan::After(delay) => (delay, true),
        Plan::NoGain(delay) => (delay, false),
    };
    let predicted: Map<String, Value> = report
        .predictions
        .iter()
        .map(|at| (at.ratio.to_string(), json!({ "after": span(at.delay), "p99": span(at.p99) })))
        .collect();
    json!({
        "after": span(delay),
        "pays": pays,
        "held_back_ms": report.held_until.map(|at| millis_until(at, now)),
        "samples": report.samples,
        "p50": report.quantiles.map(|q| span(q.p50)),
        "p90": report.quantiles.map(|q| span(q.p90)),
        "p99": report.quantiles.map(|q| span(q.p99)),
        "predicted": predicted,
        "win_share": report.win_share.map(|share| share.to_string()),
    })
}

fn millis_until(at: Instant, now: Instant) -> u64 {
    at.saturating_duration_since(now).as_millis() as u64
}

/// `POST /breakers/{upstream}/{action}` for all hosts of an upstream, or
/// `/breakers/{upstream}/{host:port}/{action}` for one.
fn pull_lever(view: &View, path: &str) -> Response<Full<Bytes>> {
    let parts: Vec<&str> = path.split('/').collect();
    let (name, host, action) = match parts[..] {
        [name, action] => (name, None, action),
        [name, host, action] => (name, Some(host), action),
        _ => {
            return text(
                StatusCode::NOT_FOUND,
                "use /breakers/UPSTREAM/ACTION or /breakers/UPSTREAM/HOST:PORT/ACTION",
            );
        }
    };
    let pull = match action {
        "force_open" => BreakerCell::force_open,
        "force_closed" => BreakerCell::force_closed,
        "reset" => BreakerCell::reset,
        _ => return text(StatusCode::NOT_FOUND, "the action is force_open, force_closed or reset"),
    };
    let mut moved = Map::new();
    for upstream in upstreams_of(view, name) {
        if host.is_some_and(|host| host != upstream.authority().key()) {
            continue;
        }
        upstream.each_guards(|_, guards| {
            if pull(guards.breaker()).is_some() {
                view.proxy.metrics().upstream(&name.into()).breaker_transition(state_of(guards.breaker()));
            }
        });
        moved.insert(upstream.authority().key().to_owned(), upstream.breaker_state().word().into());
    }
    if moved.is_empty() {
        return text(StatusCode::NOT_FOUND, "no such upstream has been called yet");
    }
    tracing::warn!(upstream = name, host, action, "breaker set by an operator");
    as_json(&Value::Object(moved))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserved_port_shows_the_network_no_more_than_it_needs() {
        let loopback = ["127.0.0.1", "::1", "::ffff:127.0.0.1"].map(|ip| ip.parse().unwrap());
        let network = ["10.0.0.1", "fd00::1", "::ffff:10.0.0.1"].map(|ip| ip.parse().unwrap());
        for path in ["/livez", "/readyz", "/metrics"] {
            assert!(loopback.into_iter().chain(network).all(|peer| is_for(peer, true, path)), "{path}");
        }
        for path in ["/", "/status", "/config", "/breakers/default/force_open", "/livez/"] {
            assert!(loopback.into_iter().all(|peer| is_for(peer, true, path)), "{path}");
            assert!(!network.into_iter().any(|peer| is_for(peer, true, path)), "{path}");
            assert!(network.into_iter().all(|peer| is_for(peer, false, path)), "{path}");
        }
    }
}
