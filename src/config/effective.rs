//! The policy in force, printed in the policy's own notation: for `/config` and `explain`.
//!
//! Every value is there, defaults included, so that one sees what holds and not what was written; what
//! is printed is itself a policy that means the same. Secrets and certificates are masked.

use std::fmt::Display;

use serde_json::{Map, Value, json};

use super::secret::MASK;
use super::{
    AccessLog, Breaker, Cache, Coalesce, Config, Covers, Deadline, Degraded, DirectRule, Egress, EgressRule,
    Endpoint, FallbackStep, Hedge, HedgeAfter, HostPattern, Limits, Origin, OwnState, RateLimit, Retry,
    Rewrite, Route, SharedState, Stages, StatusSet, Tls, UpstreamPolicy, UpstreamTls,
};
use crate::units::{ByteSize, Span};

/// What stands for the content of a certificate file.
const CERTIFICATES: &str = "[certificates]";

impl Config {
    /// The policy in force as JSON, which is YAML too. Values of fields that are set and keys are masked,
    /// and of certificate files it only says that they are there.
    pub fn effective(&self) -> Value {
        let named = |policy: &std::sync::Arc<UpstreamPolicy>| (policy.name.to_string(), upstream(policy));
        json!({
            "threads": self.threads,
            "listen": {
                "proxy": text(self.listen.proxy),
                "transparent": or_off(self.listen.transparent.map(text)),
                "admin": text(self.listen.admin),
                "clients": texts(&self.listen.clients),
            },
            "limits": limits(&self.limits),
            "dns": { "servers": texts(&self.dns.servers), "timeout": text(Span(self.dns.timeout)) },
            "direct": texts(&self.direct),
            "egress": egress(&self.egress),
            "tls": tls(&self.tls),
            "drain": { "quiet": text(Span(self.drain.quiet)), "max": text(Span(self.drain.max)) },
            "shared_state": or_off(self.shared_state.as_ref().map(shared_state)),
            "telemetry": { "access_log": match self.telemetry.access_log {
                AccessLog::Json => "json",
                AccessLog::Text => "text",
                AccessLog::Off => "off",
            } },
            "defaults": defaults(&self.defaults),
            "upstreams": self.upstreams.iter().map(named).collect::<Map<_, _>>(),
        })
    }
}

impl Stages {
    /// These values in the policy's notation.
    pub fn effective(&self) -> Value {
        stages(self, OwnState { bulkhead: true, breaker: true, rate_limit: true })
    }
}

fn limits(limits: &Limits) -> Value {
    json!({
        "connections": limits.connections,
        "head": text(ByteSize(limits.head)),
        "fields": limits.fields,
        "target": text(ByteSize(limits.target)),
        "header_timeout": text(Span(limits.header_timeout)),
        "keep_alive": text(Span(limits.keep_alive)),
        "streams": limits.streams,
        "replay_total": text(ByteSize(limits.replay_total)),
        "upstreams": limits.upstreams,
        "fanout_body": text(ByteSize(limits.fanout_body)),
    })
}

fn egress(egress: &Egress) -> Value {
    json!({
        "default": if egress.deny_by_default { "deny" } else { "allow" },
        "deny_private": egress.deny_private,
        "allow": texts(&egress.allow),
        "deny": texts(&egress.deny),
    })
}

fn tls(tls: &Tls) -> Value {
    object([
        ("ca_dir", tls.ca_dir.as_ref().map(|dir| text(dir.display()))),
        ("ca_cert", tls.own_ca.as_ref().map(|_| json!(CERTIFICATES))),
        ("ca_key", tls.own_ca.as_ref().map(|_| json!(MASK))),
        ("ca_file", tls.ca_pem.as_ref().map(|_| json!(CERTIFICATES))),
    ])
}

/// The servers are shown, and that there are a user and a password.
fn shared_state(shared: &SharedState) -> Value {
    json!({
        "redis": shared.redis.url(|_| MASK.into()),
        "timeout": text(Span(shared.timeout)),
        "quorum": shared.quorum,
        "prefix": &*shared.prefix,
    })
}

fn defaults(policy: &UpstreamPolicy) -> Value {
    let mut keys = json!({ "intercept": policy.intercept });
    merge(&mut keys, policy.stages.effective());
    keys
}

fn upstream(policy: &UpstreamPolicy) -> Value {
    let mut keys = object([
        ("hosts", Some(texts(&policy.hosts))),
        ("endpoint", policy.endpoint.as_ref().map(text)),
        ("origin", Some(json!(origin(policy.origin)))),
        ("intercept", Some(json!(policy.intercept))),
        ("tls", Some(upstream_tls(&policy.tls))),
        ("rewrite", policy.rewrite.as_ref().map(rewrite)),
    ]);
    merge(&mut keys, policy.stages.effective());
    merge(&mut keys, json!({ "routes": policy.routes.iter().map(route).collect::<Vec<_>>() }));
    keys
}

/// The word of the policy for it.
pub(super) fn origin(origin: Origin) -> &'static str {
    match origin {
        Origin::Auto => "auto",
        Origin::Http => "http",
        Origin::Https => "https",
        Origin::H2c => "h2c",
    }
}

/// What is set, with files masked.
pub(super) fn upstream_tls(tls: &UpstreamTls) -> Value {
    object([
        ("ca_file", tls.ca_pem.as_ref().map(|_| json!(CERTIFICATES))),
        ("client_cert", tls.client.as_ref().map(|_| json!(CERTIFICATES))),
        ("client_key", tls.client.as_ref().map(|_| json!(MASK))),
        ("server_name", tls.server_name.as_ref().map(text)),
    ])
}

/// What is changed, with values masked.
pub(super) fn rewrite(rewrite: &Rewrite) -> Value {
    object([
        ("path", rewrite.path.as_ref().map(|(from, to)| json!({ "from": from.as_str(), "to": to }))),
        ("headers", Some(json!({ "set": masked(&rewrite.set), "remove": texts(&rewrite.remove) }))),
    ])
}

fn route(route: &Route) -> Value {
    let mut keys = object([
        ("name", route.name.as_ref().map(text)),
        ("path", route.path.as_ref().map(|pattern| json!(pattern.glob))),
        ("methods", Some(&route.methods).filter(|methods| !methods.is_empty()).map(|list| texts(list))),
        ("idempotent", Some(json!(route.idempotent))),
    ]);
    merge(&mut keys, stages(&route.stages, route.own));
    keys
}

/// A guard that is not the section's own is left out when it is on: written down, it would become one.
fn stages(stages: &Stages, own: OwnState) -> Value {
    let bulkhead =
        stages.bulkhead.map(|b| json!({ "max_concurrent": b.max_concurrent, "max_queue": b.max_queue }));
    object([
        ("connect_timeout", Some(text(Span(stages.connect_timeout)))),
        ("attempt_timeout", Some(or_off(stages.attempt_timeout.map(|span| text(Span(span)))))),
        ("stream_idle", Some(text(Span(stages.stream_idle)))),
        ("tunnel_idle", Some(text(Span(stages.tunnel_idle)))),
        ("replay_limit", Some(text(ByteSize(stages.replay_limit)))),
        ("unacceptable", Some(statuses(&stages.unacceptable))),
        ("deadline", Some(or_off(stages.deadline.as_ref().map(deadline)))),
        ("hedge", Some(or_off(stages.hedge.as_ref().map(hedge)))),
        (
            "extra_load",
            Some(json!({ "ratio": text(stages.extra_load.ratio), "floor": text(stages.extra_load.floor) })),
        ),
        ("bulkhead", Some(or_off(bulkhead)).filter(|value| own.bulkhead || value == "off")),
        (
            "breaker",
            Some(or_off(stages.breaker.as_ref().map(breaker))).filter(|value| own.breaker || value == "off"),
        ),
        ("retry", Some(or_off(stages.retry.as_ref().map(retry)))),
        (
            "rate_limit",
            Some(or_off(stages.rate_limit.as_ref().map(rate_limit)))
                .filter(|value| own.rate_limit || value == "off"),
        ),
        ("coalesce", Some(or_off(stages.coalesce.as_ref().map(coalesce)))),
        ("cache", Some(or_off(stages.cache.as_ref().map(cache)))),
        ("fallback", Some(stages.fallback.iter().map(fallback_step).collect())),
    ])
}

fn deadline(deadline: &Deadline) -> Value {
    json!({
        "default": text(Span(deadline.default)),
        "max": text(Span(deadline.max)),
        "reserve": text(Span(deadline.reserve)),
        "covers": match deadline.covers {
            Covers::Auto => "auto",
            Covers::Head => "head",
            Covers::Body => "body",
        },
        "hints": if deadline.hints { "on" } else { "off" },
        "tell_envoy": deadline.tell_envoy,
    })
}

fn hedge(hedge: &Hedge) -> Value {
    object([
        (
            "after",
            Some(match hedge.after {
                HedgeAfter::Auto => json!("auto"),
                HedgeAfter::Percentile(percentile) => {
                    json!(format!("p{}", percentile.to_string().trim_end_matches('%')))
                }
                HedgeAfter::Fixed(span) => text(Span(span)),
            }),
        ),
        ("initial", Some(text(Span(hedge.initial)))),
        ("min", Some(text(Span(hedge.min)))),
        ("max", Some(text(Span(hedge.max)))),
        ("max_extra", Some(json!(hedge.max_extra))),
        ("methods", Some(texts(&hedge.methods))),
        ("to", hedge.to.as_ref().map(text)),
    ])
}

fn breaker(breaker: &Breaker) -> Value {
    json!({
        "consecutive_failures": or_off(breaker.consecutive_failures.map(|failures| json!(failures))),
        "failure_rate": or_off(breaker.failure_rate.map(text)),
        "slow_rate": or_off(breaker.slow_rate.map(text)),
        "slow_after": text(Span(breaker.slow_after)),
        "window": text(Span(breaker.window)),
        "min_requests": breaker.min_requests,
        "open_for": text(Span(breaker.open_for)),
        "max_open_for": text(Span(breaker.max_open_for)),
        "half_open_probes": breaker.half_open_probes,
        "failure_statuses": statuses(&breaker.failure_statuses),
        "fair_chance": text(Span(breaker.fair_chance)),
        "shared": breaker.is_shared,
    })
}

fn retry(retry: &Retry) -> Value {
    json!({
        "max_attempts": retry.max_attempts,
        "backoff": text(Span(retry.backoff)),
        "max_backoff": text(Span(retry.max_backoff)),
        "methods": texts(&retry.methods),
    })
}

fn rate_limit(limit: &RateLimit) -> Value {
    json!({
        "rate": text(limit.rate),
        "burst": limit.burst,
        "max_pause": text(Span(limit.max_pause)),
        "shared": limit.is_shared,
    })
}

fn coalesce(coalesce: &Coalesce) -> Value {
    json!({ "max_body": text(ByteSize(coalesce.max_body)), "vary": texts(&coalesce.vary) })
}

fn cache(cache: &Cache) -> Value {
    let max_bytes = usize::try_from(cache.max_bytes).unwrap_or(usize::MAX);
    object([
        ("ttl", cache.ttl.map(|ttl| text(Span(ttl)))),
        ("stale_if_error", Some(text(Span(cache.stale_if_error)))),
        ("stale_while_revalidate", Some(text(Span(cache.stale_while_revalidate)))),
        ("max_bytes", Some(text(ByteSize(max_bytes)))),
        ("max_body", Some(text(ByteSize(cache.max_body)))),
        ("vary", Some(texts(&cache.vary))),
        ("shared", Some(json!(cache.is_shared))),
    ])
}

fn fallback_step(step: &FallbackStep) -> Value {
    match step {
        FallbackStep::Upstream(name) => json!({ "upstream": &**name }),
        FallbackStep::Stale(age) => json!({ "stale": text(Span(*age)) }),
        FallbackStep::Degraded(answer) => json!({ "degraded": degraded(answer) }),
    }
}

fn degraded(degraded: &Degraded) -> Value {
    let headers = masked(&degraded.headers);
    object([
        ("status", Some(json!(degraded.status.as_u16()))),
        ("headers", Some(headers).filter(|headers| headers.as_object().is_some_and(|set| !set.is_empty()))),
        ("body", degraded.body.as_ref().map(text)),
    ])
}

/// Names without values.
fn masked(fields: &[(http::HeaderName, http::HeaderValue)]) -> Value {
    fields.iter().map(|(name, _)| (name.to_string(), json!(MASK))).collect::<Map<_, _>>().into()
}

fn statuses(set: &StatusSet) -> Value {
    set.iter().collect::<Vec<_>>().into()
}

fn or_off(value: Option<Value>) -> Value {
    value.unwrap_or_else(|| json!("off"))
}

fn text(value: impl Display) -> Value {
    json!(value.to_string())
}

fn texts<T: Display>(values: &[T]) -> Value {
    values.iter().map(text).collect()
}

/// Without the keys that have no value.
fn object<const N: usize>(keys: [(&str, Option<Value>); N]) -> Value {
    keys.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect::<Map<_, _>>().into()
}

fn merge(object: &mut Value, more: Value) {
    if let (Value::Object(object), Value::Object(more)) = (object, more) {
        object.extend(more);
    }
}

impl Display for HostPattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_suffix {
            f.write_str("*.")?;
        }
        f.write_str(&self.name)?;
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

impl Display for EgressRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host(host) => host.fmt(f),
            Self::Range(range) => range.fmt(f),
        }
    }
}

impl Display for DirectRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Loopback => f.write_str("loopback"),
            Self::Host(host) => host.fmt(f),
            Self::Range(range) => range.fmt(f),
        }
    }
}

impl Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (scheme, port) = if self.is_https { ("https", 443) } else { ("http", 80) };
        write!(f, "{scheme}://{}", self.authority.host_field(port))
    }
}
