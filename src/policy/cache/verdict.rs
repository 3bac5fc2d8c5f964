//! What may be done with what is kept (RFC 9111 section 4).

use std::time::Duration;

use http::header::HeaderMap;
use tokio::time::Instant;

use super::directives::RequestControl;
use super::{Asked, Entry};
use crate::config::Cache;

/// What the cache says about a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The answer may be given as it is: it is fresh, or as stale as the request takes it (`max-stale`).
    Fresh,
    /// The answer is stale and may be given while a new one is fetched (RFC 5861 section 3).
    StaleUsable,
    /// The upstream has to be asked before the answer may be given.
    Validate(Why),
    /// What is kept has no part in the answer.
    Miss(Why),
}

/// Why a request goes on to the upstream, in the words of RFC 9211 section 2.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// The cache has no part in such a request.
    Bypass,
    /// The cache does not know the method.
    Method,
    /// Nothing is kept for it.
    UriMiss,
    /// Something is kept, but for requests with other fields.
    VaryMiss,
    /// What is kept would do, but not for what the request says of caches.
    Request,
    /// What is kept is stale.
    Stale,
}

impl Why {
    /// The value of `fwd` in `Cache-Status`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Bypass => "bypass",
            Self::Method => "method",
            Self::UriMiss => "uri-miss",
            Self::VaryMiss => "vary-miss",
            Self::Request => "request",
            Self::Stale => "stale",
        }
    }
}

/// Whether the client would rather have a 504 than an answer from upstream (RFC 9111 section 5.2.1.7): for
/// every verdict that does not give an answer.
pub fn is_only_if_cached(headers: &HeaderMap) -> bool {
    RequestControl::of(headers).only_if_cached
}

/// What the origin says of using the answer when it is stale (RFC 9111 section 4.2.4).
#[derive(PartialEq, Eq)]
enum Permission {
    /// It does not mind.
    Free,
    /// `s-maxage` stands for proxy-revalidate as well (section 5.2.2.10). Where the same answer allows a
    /// staleness aloud, its author meant that to hold, and no more.
    AsItSays,
    Never,
}

impl Entry {
    /// What may be done with the entry for this request.
    pub fn judge(&self, asked: Asked<'_>, cfg: &Cache, now: Instant) -> Verdict {
        if let Some(why) = asked.passes_by() {
            return Verdict::Miss(why);
        }
        let request = RequestControl::of(asked.headers);
        // Section 5.2.1.5 is about keeping; who sends it does not want to be told old things either.
        if request.no_store {
            return Verdict::Miss(Why::Request);
        }
        let staleness = self.staleness(cfg, now);
        match (self.is_fresh(cfg, now), self.suffices(&request, cfg, now)) {
            (true, true) => Verdict::Fresh,
            (true, false) => Verdict::Validate(Why::Request),
            (false, true) if self.stale_for(&request).is_some_and(|most| staleness <= most) => Verdict::Fresh,
            (false, true) if staleness < self.usable_for(cfg) => Verdict::StaleUsable,
            (false, _) => Verdict::Validate(Why::Stale),
        }
    }

    /// Whether the entry may be given instead of a failure. `allowance` is what the policy or the step of
    /// the fallback allows beyond freshness; where the answer or the request allows more, that counts
    /// (RFC 5861 section 4). An error that is kept helps nobody.
    pub fn may_stand_in(&self, allowance: Duration, request: &HeaderMap, cfg: &Cache, now: Instant) -> bool {
        let request = RequestControl::of(request);
        let is_too_old = request.max_age.is_some_and(|most| self.age(now) > most);
        let is_refused = is_too_old && request.stale_if_error.is_none();
        if self.status().is_server_error() || request.no_cache || request.no_store || is_refused {
            return false;
        }
        let said = self.control().stale_if_error.unwrap_or_default();
        let asked = request.stale_if_error.unwrap_or_default();
        let longest = match self.permission() {
            Permission::Free => allowance.max(said).max(asked),
            Permission::AsItSays => said,
            Permission::Never => return self.is_fresh(cfg, now),
        };
        self.is_fresh(cfg, now) || self.staleness(cfg, now) <= longest
    }

    /// How long the entry, while it is fresh, may be of use to anybody: to its freshness' end, and as long after it as it
    /// may be given all the same. `allowance` is the longest staleness that the policy's fallback takes.
    pub(super) fn useful_for(&self, allowance: Duration, cfg: &Cache, now: Instant) -> Duration {
        if !self.is_fresh(cfg, now) {
            return Duration::ZERO;
        }
        let said = self.control().stale_if_error.unwrap_or_default();
        let stale = match self.permission() {
            Permission::Free => said.max(allowance).max(cfg.stale_if_error),
            Permission::AsItSays => said,
            Permission::Never => Duration::ZERO,
        };
        let useful = self.lifetime(cfg).saturating_add(stale.max(self.usable_for(cfg)));
        useful.saturating_sub(self.age(now))
    }

    fn is_fresh(&self, cfg: &Cache, now: Instant) -> bool {
        !self.must_be_validated() && self.age(now) < self.lifetime(cfg)
    }

    /// How long the entry has been stale; nothing while it is fresh.
    fn staleness(&self, cfg: &Cache, now: Instant) -> Duration {
        self.age(now).saturating_sub(self.lifetime(cfg))
    }

    /// Whether the entry's age will do for the request (sections 5.2.1.1, 5.2.1.3 and 5.2.1.4).
    fn suffices(&self, request: &RequestControl, cfg: &Cache, now: Instant) -> bool {
        let age = self.age(now);
        !request.no_cache
            && request.max_age.is_none_or(|most| age <= most)
            && request.min_fresh.is_none_or(|least| self.lifetime(cfg).saturating_sub(age) >= least)
    }

    /// Staleness that the request takes without any refreshing (section 5.2.1.2); nothing by default.
    fn stale_for(&self, request: &RequestControl) -> Option<Duration> {
        request.max_stale.filter(|_| self.permission() == Permission::Free)
    }

    /// Staleness that is taken while the answer is refreshed. What the policy allows begins where freshness
    /// ends, so it is not for answers that never were fresh.
    fn usable_for(&self, cfg: &Cache) -> Duration {
        let said = self.control().stale_while_revalidate.unwrap_or_default();
        let was_fresh = !self.lifetime(cfg).is_zero();
        match self.permission() {
            Permission::Free if was_fresh => said.max(cfg.stale_while_revalidate),
            Permission::Free | Permission::AsItSays => said,
            Permission::Never => Duration::ZERO,
        }
    }

    fn permission(&self) -> Permission {
        let control = self.control();
        let is_shared = !self.is_private();
        if self.must_be_validated() || control.must_revalidate || (is_shared && control.proxy_revalidate) {
            Permission::Never
        } else if is_shared && control.s_maxage.is_some() {
            Permission::AsItSays
        } else {
            Permission::Free
        }
    }
}
