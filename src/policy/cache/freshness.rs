//! How old an answer is and how long it is fresh (RFC 9111 section 4.2).

use std::time::{Duration, SystemTime};

use http::StatusCode;
use http::header::{self, HeaderMap, HeaderName};

use super::Times;
use super::directives::{Escapes, ResponseControl, delta_seconds, members};
use crate::config::Cache;

/// The most that is guessed. The RFC leaves the bound to the cache; a day is what it once named as the
/// point from which a guess deserved a warning.
const LONGEST_GUESS: Duration = Duration::from_secs(24 * 60 * 60);

/// How long an answer is fresh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lifetime {
    /// By the origin's own word.
    Said(Duration),
    /// The origin says nothing. Until the policy says otherwise, a tenth of the time for which the resource
    /// had not changed (section 4.2.2).
    Unsaid(Duration),
    /// The origin says nothing, and nothing may be guessed of this status.
    Unknown,
}

impl Lifetime {
    /// `is_private`: for the cache of one credential.
    pub(super) fn of(
        status: StatusCode,
        headers: &HeaderMap,
        control: &ResponseControl,
        is_private: bool,
        wall: SystemTime,
    ) -> Self {
        if let Some(said) = said(headers, control, is_private, wall) {
            return Self::Said(said);
        }
        // Section 4.2.2: for statuses that are cacheable by default, or answers that are said to be.
        if !is_heuristically_cacheable(status) && !control.public {
            return Self::Unknown;
        }
        let date = only_date(headers, &header::DATE).unwrap_or(wall);
        let unchanged =
            only_date(headers, &header::LAST_MODIFIED).and_then(|changed| date.duration_since(changed).ok());
        Self::Unsaid(unchanged.map_or(Duration::ZERO, |unchanged| (unchanged / 10).min(LONGEST_GUESS)))
    }

    /// Whether no policy could make the answer fresh.
    pub(super) fn is_never_fresh(self) -> bool {
        matches!(self, Self::Said(Duration::ZERO) | Self::Unknown)
    }

    /// The policy's `ttl` is for origins that say nothing.
    pub(super) fn under(self, cfg: &Cache) -> Duration {
        match self {
            Self::Said(lifetime) => lifetime,
            Self::Unsaid(guess) => cfg.ttl.unwrap_or(guess),
            Self::Unknown => Duration::ZERO,
        }
    }
}

/// Section 4.2.1, first match wins. `s-maxage` goes first in a shared cache. In a credential's own partition
/// it is what is left when the origin says nothing else: section 3.5 lets a proxy go by it there too.
fn said(
    headers: &HeaderMap,
    control: &ResponseControl,
    is_private: bool,
    wall: SystemTime,
) -> Option<Duration> {
    let general = || control.max_age.or_else(|| until_expires(headers, wall));
    if is_private { general().or(control.s_maxage) } else { control.s_maxage.or_else(general) }
}

/// Section 5.3: what is no date, "0" above all, is in the past.
fn until_expires(headers: &HeaderMap, wall: SystemTime) -> Option<Duration> {
    headers.contains_key(header::EXPIRES).then(|| {
        let expires = only_date(headers, &header::EXPIRES);
        let date = only_date(headers, &header::DATE).unwrap_or(wall);
        expires.and_then(|expires| expires.duration_since(date).ok()).unwrap_or_default()
    })
}

/// The age of an answer when its head was received (section 4.2.3, `corrected_initial_age`).
pub(super) fn initial_age(headers: &HeaderMap, times: Times) -> Duration {
    let date = only_date(headers, &header::DATE).unwrap_or(times.wall);
    let apparent = times.wall.duration_since(date).unwrap_or_default();
    let delay = times.received.saturating_duration_since(times.sent);
    apparent.max(age_field(headers).saturating_add(delay))
}

/// Section 5.1: of a list the first member counts, and what is no number is ignored.
fn age_field(headers: &HeaderMap) -> Duration {
    let first = headers.get(header::AGE).and_then(|value| members(value.as_bytes(), Escapes::No).next());
    first.and_then(delta_seconds).unwrap_or_default()
}

/// RFC 9110 section 15.1, but for 206.
pub(super) fn is_heuristically_cacheable(status: StatusCode) -> bool {
    matches!(status.as_u16(), 200 | 203 | 204 | 300 | 301 | 308 | 404 | 405 | 410 | 414 | 501)
}

/// The date in a field; `None` when it is none, or there are several that differ.
pub(super) fn only_date(headers: &HeaderMap, name: &HeaderName) -> Option<SystemTime> {
    let mut values = headers.get_all(name).iter();
    let first = values.next()?;
    if values.any(|other| other != first) {
        return None;
    }
    let text = first.to_str().ok()?;
    httpdate::parse_http_date(text).or_else(|_| httpdate::parse_http_date(&in_usual_case(text))).ok()
}

/// Section 4.2: the names of days and months count in any case.
fn in_usual_case(date: &str) -> String {
    let mut is_inside = false;
    let usual = date.chars().map(|letter| {
        let cased = if is_inside { letter.to_ascii_lowercase() } else { letter.to_ascii_uppercase() };
        is_inside = letter.is_ascii_alphabetic();
        cased
    });
    usual.collect::<String>().replace("Gmt", "GMT")
}
