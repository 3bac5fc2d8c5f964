//! The upstreams that stand in for others, as `hedge.to` and `fallback` name them.
//!
//! A slip here shows on the day of the outage, so all that the file can tell is told: that the name exists
//! and leads somewhere, that the policy's own egress rules let a call go there, and that the caller's
//! credentials do not go to another provider by oversight.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use http::header::{AUTHORIZATION, COOKIE, HeaderName};

use super::Builder;
use crate::config::de::did_you_mean;
use crate::config::egress::{check_address, check_name};
use crate::config::notation::Switch;
use crate::config::problem::{Path, Severity};
use crate::config::{Egress, Origin, Rewrite, UpstreamPolicy, raw};
use crate::error::Error;
use crate::wire::authority::Authority;
use crate::wire::credentials::is_credential;

/// Where a section names a backup.
struct Mention<'a> {
    /// The backup's name.
    to: &'a str,
    /// The key that names it.
    path: Path,
    /// The upstream that it is for; none for the defaults.
    of: Option<&'a UpstreamPolicy>,
}

impl Builder<'_> {
    /// Judges every upstream that another one names.
    pub(super) fn judge_backups(
        &self,
        upstreams: &[UpstreamPolicy],
        named: &[(String, raw::Upstream)],
        defaults: &raw::Defaults,
    ) {
        let known: HashMap<&str, &UpstreamPolicy> =
            upstreams.iter().map(|upstream| (&*upstream.name, upstream)).collect();
        let judge = |stages: &raw::Stages, section: &Path, of: Option<&UpstreamPolicy>| {
            self.judge_twice(stages, section);
            let mut doubted = HashSet::new();
            for mention in mentions(stages, section, of) {
                if let Some((backup, place)) = self.backup(&mention, &known)
                    && doubted.insert(mention.to)
                {
                    self.doubt_credentials(&mention, backup, &place);
                }
            }
        };
        judge(&defaults.stages(), &Path::of(["defaults"]), None);
        for (upstream, (name, keys)) in upstreams.iter().zip(named) {
            let section = Path::of(["upstreams", name.as_str()]);
            let judge_own = |own: &raw::Stages, section: &Path| {
                self.judge_section(keys, own, section);
                judge(own, section, Some(upstream));
            };
            judge_own(&keys.stages(), &section);
            for (index, route) in keys.routes.iter().flatten().enumerate() {
                judge_own(&route.stages(), &section.key("routes").index(index));
            }
        }
    }

    /// A backup must exist, have a place to dial, and be another than the upstream that it is for.
    fn backup<'a>(
        &self,
        mention: &Mention<'_>,
        known: &HashMap<&str, &'a UpstreamPolicy>,
    ) -> Option<(&'a UpstreamPolicy, Authority)> {
        let Mention { to, path, of } = mention;
        if of.is_some_and(|upstream| &*upstream.name == *to) {
            self.report.error(path, "the upstream itself; leave it out");
            return None;
        }
        let Some(backup) = known.get(to) else {
            let hint = did_you_mean(to, known.keys().copied());
            self.report.error(path, format!("no upstream is called `{to}`{hint}"));
            return None;
        };
        let place = backup.place();
        // Hosts or an endpoint that are wrong have been told.
        if place.is_none() && !backup.hosts.is_empty() {
            let message = format!(
                "`{to}` has neither `endpoint` nor a host without `*`, so there is no place to send it to"
            );
            self.report.error(path, message);
        }
        place.map(|place| (*backup, place))
    }

    fn judge_twice(&self, stages: &raw::Stages, section: &Path) {
        let mut first: HashMap<&str, usize> = HashMap::new();
        for (index, step) in steps(stages).iter().enumerate() {
            let Some(name) = step.upstream.as_deref() else { continue };
            let path = section.key("fallback").index(index).key("upstream");
            if let Some(earlier) = first.get(name) {
                let line = self.report.place(&section.key("fallback").index(*earlier)).line;
                self.report.error(&path, format!("`{name}` has been tried by then, see line {line}"));
            } else {
                first.insert(name, index);
            }
        }
    }

    /// What stands in for another upstream is called once, by its guards and rewrite: its own fallback would
    /// make chains that nobody has written down, and cycles.
    fn judge_section(&self, upstream: &raw::Upstream, own: &raw::Stages, section: &Path) {
        if has_no_hosts(upstream) && !steps(own).is_empty() {
            let message = "never followed: no host leads here, and a backup that stands in for another \
                           upstream has no fallback of its own";
            self.report.warning(&section.key("fallback"), message);
        }
        for (key, is_on) in [
            ("cache", own.cache.as_ref().is_some_and(|toggle| toggle.0.on().is_some())),
            ("coalesce", own.coalesce.as_ref().is_some_and(|toggle| toggle.0.on().is_some())),
        ] {
            if has_no_hosts(upstream) && is_on {
                let message = "never acts: no host leads here, and an answer is kept and shared by the upstream \
                               that the call was made to";
                self.report.warning(&section.key(key), message);
            }
        }
    }

    /// The caller's key for one provider is sent to the next unless the policy says otherwise.
    fn doubt_credentials(&self, mention: &Mention<'_>, backup: &UpstreamPolicy, place: &Authority) {
        let travelling = travelling(backup.rewrite.as_ref());
        let is_same = mention.of.is_some_and(|upstream| is_of_site(upstream, site(place.host())));
        if travelling.is_empty() || is_same || is_in_house(place) || !self.report.has_room(Severity::Warning)
        {
            return;
        }
        let (verb, them) = if travelling.len() == 1 { ("goes", "it") } else { ("go", "them") };
        let message = format!(
            "the caller's {} {verb} to {} too: set or remove {them} in upstreams.{}.rewrite.headers",
            in_words(&travelling),
            place.host(),
            backup.name
        );
        self.report.warning(&mention.path, message);
    }

    /// An upstream that the egress rules refuse by its name alone, or by its literal address.
    pub(super) fn judge_reach(&self, egress: &Egress, upstreams: &[UpstreamPolicy]) {
        for upstream in upstreams {
            let section = Path::of(["upstreams", &*upstream.name]);
            let places: Vec<(Path, Vec<Authority>)> = match &upstream.endpoint {
                Some(endpoint) => vec![(section.key("endpoint"), vec![endpoint.authority.clone()])],
                None => hosts_of(upstream, &section),
            };
            for (path, authorities) in places {
                let refusals: Vec<_> = authorities.iter().map(|to| refusal(egress, to)).collect();
                if let [Some(rule), ..] = refusals.as_slice()
                    && refusals.iter().all(Option::is_some)
                {
                    self.report.warning(&path, format!("every call there is refused by {rule}"));
                }
            }
        }
    }
}

/// The usual credentials that `rewrite` neither sets nor removes. Who deals with a key under another name knows
/// what that provider's callers have, and is not asked about `x-api-key`.
fn travelling(rewrite: Option<&Rewrite>) -> Vec<HeaderName> {
    let handled: Vec<&HeaderName> = rewrite
        .into_iter()
        .flat_map(|rewrite| rewrite.remove.iter().chain(rewrite.set.iter().map(|(name, _)| name)))
        .collect();
    let usual = [AUTHORIZATION, COOKIE];
    let has_key = handled.iter().any(|name| is_credential(name) && !usual.contains(name));
    let key = (!has_key).then(|| HeaderName::from_static("x-api-key"));
    usual.into_iter().filter(|name| !handled.contains(&name)).chain(key).collect()
}

/// `a`, `b` and `c`, each in backticks.
fn in_words(names: &[HeaderName]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    match quoted.as_slice() {
        [all @ .., last] if !all.is_empty() => format!("{} and {last}", all.join(", ")),
        few => few.concat(),
    }
}

/// The hosts that are no patterns, at each port by which they are likely called.
fn hosts_of(upstream: &UpstreamPolicy, section: &Path) -> Vec<(Path, Vec<Authority>)> {
    let likely: &[u16] = match upstream.origin {
        Origin::Https => &[443],
        Origin::Auto | Origin::Http | Origin::H2c => &[80, 443],
    };
    let hosts = upstream.hosts.iter().enumerate().filter(|(_, host)| !host.is_suffix);
    hosts
        .map(|(index, host)| {
            let ports = host.port.as_ref().map_or(likely, std::slice::from_ref);
            let at = ports.iter().filter_map(|port| Authority::parse(&host.name, Some(*port)).ok());
            (section.key("hosts").index(index), at.collect())
        })
        .collect()
}

/// The rule that certainly refuses a call to `to`. What its name resolves to is not known here.
fn refusal(egress: &Egress, to: &Authority) -> Option<std::sync::Arc<str>> {
    let answer = check_name(egress, to).and_then(|verdict| match to.ip() {
        Some(ip) => check_address(egress, to, verdict, ip),
        None => Ok(()),
    });
    match answer {
        Err(Error::EgressDenied { rule, .. }) => Some(rule),
        Err(_) | Ok(()) => None,
    }
}

/// Whether nothing but other upstreams leads there.
pub(super) fn has_no_hosts(keys: &raw::Upstream) -> bool {
    keys.endpoint.is_some() && keys.hosts.as_ref().is_none_or(Vec::is_empty)
}

/// The fallback that a section writes.
pub(super) fn steps(stages: &raw::Stages) -> &[raw::FallbackStep] {
    stages.fallback.as_ref().and_then(Switch::on).map(Vec::as_slice).unwrap_or_default()
}

fn mentions<'a>(
    stages: &'a raw::Stages,
    section: &Path,
    of: Option<&'a UpstreamPolicy>,
) -> impl Iterator<Item = Mention<'a>> {
    let hedge = stages.hedge.as_ref().and_then(Switch::on).and_then(|hedge| hedge.to.as_deref());
    let hedge = hedge.map(|to| (to, section.key("hedge").key("to")));
    let list = section.key("fallback");
    let backups = steps(stages).iter().enumerate().filter_map(move |(index, step)| {
        Some((step.upstream.as_deref()?, list.index(index).key("upstream")))
    });
    hedge.into_iter().chain(backups).map(move |(to, path)| Mention { to, path, of })
}

/// What most likely belongs to one owner: the last two labels, or three where the last two are one
/// registry's (`co.uk`, `com.au`). The public suffix list would know better, and change every week; what
/// hangs on it is a warning.
fn site(host: &str) -> &str {
    if host.starts_with('[') || host.parse::<IpAddr>().is_ok() {
        return host;
    }
    let starts: Vec<usize> =
        std::iter::once(0).chain(host.match_indices('.').map(|(at, _)| at + 1)).collect();
    let labels: Vec<&str> = host.split('.').collect();
    let count = match labels.as_slice() {
        [.., second, last] if last.len() == 2 && second.len() <= 3 => 3,
        _ => 2,
    };
    starts.iter().rev().nth(count - 1).map_or(host, |start| &host[*start..])
}

fn is_of_site(upstream: &UpstreamPolicy, other: &str) -> bool {
    let endpoint = upstream.endpoint.iter().map(|endpoint| endpoint.authority.host());
    upstream.hosts.iter().map(|host| host.name.as_str()).chain(endpoint).any(|host| site(host) == other)
}

/// A place inside the machine, the pod or the cluster: no other provider.
fn is_in_house(place: &Authority) -> bool {
    match place.ip().map(|ip| ip.to_canonical()) {
        Some(IpAddr::V4(ip)) => ip.is_loopback() || ip.is_private(),
        Some(IpAddr::V6(ip)) => ip.is_loopback() || ip.is_unique_local(),
        None => {
            let host = place.host();
            !host.contains('.')
                || [".localhost", ".local", ".internal", ".svc"].iter().any(|end| host.ends_with(end))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_is_what_most_likely_has_one_owner() {
        for (host, expected) in [
            ("a.example", "a.example"),
            ("b.a.example", "a.example"),
            ("c.b.a.example", "a.example"),
            ("a.foo.co.uk", "foo.co.uk"),
            ("co.uk", "co.uk"),
            ("api.example.io", "example.io"),
            ("localhost", "localhost"),
            ("10.1.2.3", "10.1.2.3"),
            ("[2001:db8::1]", "[2001:db8::1]"),
        ] {
            assert_eq!(site(host), expected, "{host}");
        }
    }

    #[test]
    fn the_usual_credentials_travel_unless_the_backup_deals_with_them() {
        let names = |list: &[&'static str]| list.iter().map(|name| HeaderName::from_static(name)).collect();
        for (set, remove, expected) in [
            (&[][..], &[][..], "`authorization`, `cookie` and `x-api-key`"),
            (&[], &["authorization"], "`cookie` and `x-api-key`"),
            (&["authorization"], &["cookie"], "`x-api-key`"),
            (&["x-client"], &["authorization", "x-api-key"], "`cookie`"),
            (&["x-goog-api-key"], &["authorization", "cookie"], ""),
            (&["x-api-key"], &["authorization", "cookie"], ""),
        ] {
            let value = http::HeaderValue::from_static("x");
            let set: Vec<HeaderName> = names(set);
            let set = set.into_iter().map(|name| (name, value.clone())).collect();
            let rewrite = Rewrite { path: None, set, remove: names(remove) };
            assert_eq!(in_words(&travelling(Some(&rewrite))), expected);
        }
        assert_eq!(travelling(None).len(), 3);
    }

    #[test]
    fn what_is_in_house_gets_the_caller_s_credentials() {
        for (place, expected) in [
            ("127.0.0.1:80", true),
            ("[::ffff:10.0.0.1]:80", true),
            ("[fd00::1]:80", true),
            ("sidecar:80", true),
            ("quotes.prod.svc:80", true),
            ("api.corp.internal:80", true),
            ("192.0.2.1:80", false),
            ("internal.example.com:80", false),
        ] {
            assert_eq!(is_in_house(&Authority::parse(place, None).unwrap()), expected, "{place}");
        }
    }
}
