//! A kept answer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{StatusCode, response};
use tokio::time::Instant;

use super::directives::{RequestControl, ResponseControl};
use super::freshness::{self, Lifetime};
use super::variant::Selection;
use super::{Asked, Times};
use crate::config::Cache;
use crate::policy::identity;

/// A kept answer. It never changes, but that it may lose its validity.
#[derive(Debug)]
pub struct Entry {
    head: Head,
    body: Bytes,
    /// Something was done to the resource since, by us: what is kept may only be given once the origin has
    /// confirmed it (RFC 9111 section 4.4).
    is_invalid: AtomicBool,
}

/// What is known of an answer before its body.
#[derive(Debug, Clone)]
pub(super) struct Head {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) control: ResponseControl,
    pub(super) lifetime: Lifetime,
    pub(super) initial_age: Duration,
    pub(super) times: Times,
    pub(super) selection: Option<Selection>,
    pub(super) resource: [u8; 32],
    /// For the partition of one credential.
    pub(super) is_private: bool,
    /// The request forbids to keep the answer.
    is_unwanted: bool,
}

impl Head {
    /// Reads what counts and copies what is kept. `control` is the answer's.
    pub(super) fn of(
        asked: Asked<'_>,
        status: StatusCode,
        answer: &HeaderMap,
        mut control: ResponseControl,
        is_private: bool,
        times: Times,
    ) -> Self {
        let headers = kept_fields(answer, &control, is_private, times);
        control.forget_fields();
        Self {
            status,
            lifetime: Lifetime::of(status, answer, &control, is_private, times.wall),
            initial_age: freshness::initial_age(answer, times),
            selection: Selection::of(answer, asked.headers),
            resource: identity::resource(asked.place),
            headers,
            is_unwanted: RequestControl::of(asked.headers).no_store
                || answer.contains_key(header::SET_COOKIE),
            control,
            times,
            is_private,
        }
    }

    /// Whether the answer may be kept (RFC 9111 section 3). The method is the caller's to look at, and an
    /// answer to a request with credentials is private, which is all that section 3.5 asks.
    pub(super) fn may_be_kept(&self) -> bool {
        let control = &self.control;
        let is_forbidden = if control.must_understand {
            // Section 5.2.2.3: then no-store is for caches that do not know the status.
            !is_understood(self.status)
        } else {
            control.no_store
        };
        let is_foreign = control.private && !self.is_private;
        let is_marked = control.public
            || (control.private && self.is_private)
            || control.max_age.is_some()
            || (control.s_maxage.is_some() && !self.is_private)
            || self.headers.contains_key(header::EXPIRES)
            || freshness::is_heuristically_cacheable(self.status);
        !is_never_kept(self.status)
            && !self.is_useless()
            && !is_forbidden
            && !is_foreign
            && !self.is_unwanted
            && self.selection.is_some()
            && is_marked
    }

    /// Bytes of memory, nearly, of the entry that it becomes, without a body.
    pub(super) fn weight(&self) -> usize {
        /// What a header map takes for a field beside its text.
        const FIELD: usize = 128;
        /// The entry, its share of the store's tables, the allocations' own.
        const ENTRY: usize = size_of::<Entry>() + 256;
        let fields: usize =
            self.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + FIELD).sum();
        ENTRY + fields + self.selection.as_ref().map_or(0, Selection::weight)
    }

    /// Whether it would have to be validated before each use and has nothing to be validated by.
    fn is_useless(&self) -> bool {
        let control = &self.control;
        let forbids_stale = control.must_revalidate || (control.proxy_revalidate && !self.is_private);
        let is_validated = control.no_cache || (forbids_stale && self.lifetime.is_never_fresh());
        is_validated && self.validators().next().is_none()
    }

    fn validators(&self) -> impl Iterator<Item = (HeaderName, &HeaderValue)> {
        [(header::IF_NONE_MATCH, header::ETAG), (header::IF_MODIFIED_SINCE, header::LAST_MODIFIED)]
            .into_iter()
            .filter_map(|(condition, field)| Some((condition, self.headers.get(field)?)))
    }
}

impl Entry {
    pub(super) fn new(head: Head, body: Bytes) -> Self {
        Self { head, body, is_invalid: AtomicBool::new(false) }
    }

    /// Its status.
    pub fn status(&self) -> StatusCode {
        self.head.status
    }

    /// What is kept of its fields: without `Age`, which changes, and `Content-Length`, which is the body's.
    pub fn headers(&self) -> &HeaderMap {
        &self.head.headers
    }

    /// The body, whole.
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// The age (RFC 9111 section 4.2.3, `current_age`).
    pub fn age(&self, now: Instant) -> Duration {
        let resident = now.saturating_duration_since(self.head.times.received);
        self.head.initial_age.saturating_add(resident)
    }

    /// Seconds for which it will be fresh; below zero, since when it is not. For `Cache-Status`.
    pub fn ttl(&self, cfg: &Cache, now: Instant) -> i64 {
        let seconds = |time: Duration| i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
        seconds(self.lifetime(cfg)) - seconds(self.age(now))
    }

    /// The fields that ask the upstream whether the entry still holds (RFC 9111 section 4.3.1); they take
    /// the place of the client's own conditions, which [`Entry::answer`] looks at. Empty when the answer
    /// has nothing to be known by.
    pub fn validators(&self) -> impl Iterator<Item = (HeaderName, HeaderValue)> + '_ {
        self.head.validators().map(|(condition, value)| (condition, value.clone()))
    }

    /// The entry after a 304 (RFC 9111 sections 3.2 and 4.3.4). `asked` is the request that was sent on,
    /// `answer` its head without hop-by-hop fields.
    ///
    /// `None` when the 304 is about something else than what is kept: then the upstream has to be asked
    /// again, without conditions.
    pub fn refreshed(&self, asked: Asked<'_>, answer: &response::Parts, times: Times) -> Option<Self> {
        if answer.status != StatusCode::NOT_MODIFIED || !self.is_meant_by(&answer.headers) {
            return None;
        }
        let mut headers = self.head.headers.clone();
        // A cookie is for who asked, and no reason to lose the entry.
        let is_news = |name: &&HeaderName| !BODYS.contains(name) && **name != header::SET_COOKIE;
        for name in answer.headers.keys().filter(is_news) {
            headers.remove(name);
            for value in answer.headers.get_all(name) {
                headers.append(name.clone(), value.clone());
            }
        }
        // A 304 without `Date` was made now.
        if !answer.headers.contains_key(header::DATE) {
            headers.remove(header::DATE);
        }
        let control = ResponseControl::of(&headers);
        let head = Head::of(asked, self.head.status, &headers, control, self.head.is_private, times);
        Some(Self::new(head, self.body.clone()))
    }

    /// By the strongest validator that the 304 has. One without any answers the only condition there was.
    fn is_meant_by(&self, answer: &HeaderMap) -> bool {
        let kept = &self.head.headers;
        match (answer.get(header::ETAG), answer.get(header::LAST_MODIFIED)) {
            (Some(etag), _) => {
                kept.get(header::ETAG).is_none_or(|kept| opaque(kept.as_bytes()) == opaque(etag.as_bytes()))
            }
            (None, Some(modified)) => {
                kept.contains_key(header::ETAG)
                    || kept.get(header::LAST_MODIFIED).is_none_or(|kept| kept == modified)
            }
            (None, None) => true,
        }
    }

    pub(super) fn head(&self) -> &Head {
        &self.head
    }

    pub(super) fn lifetime(&self, cfg: &Cache) -> Duration {
        self.head.lifetime.under(cfg)
    }

    pub(super) fn control(&self) -> &ResponseControl {
        &self.head.control
    }

    pub(super) fn is_private(&self) -> bool {
        self.head.is_private
    }

    /// Whether what refreshed it has left it something that may be kept.
    pub fn may_be_kept(&self) -> bool {
        self.head.may_be_kept()
    }

    pub(super) fn selection(&self) -> Option<&Selection> {
        self.head.selection.as_ref()
    }

    pub(super) fn resource(&self) -> &[u8; 32] {
        &self.head.resource
    }

    /// When the request was sent that brought it.
    pub fn sent(&self) -> Instant {
        self.head.times.sent
    }

    pub(super) fn must_be_validated(&self) -> bool {
        self.head.control.no_cache || self.is_invalid.load(Ordering::Relaxed)
    }

    /// From now on it must be validated before it is given.
    pub fn invalidate(&self) {
        self.is_invalid.store(true, Ordering::Relaxed);
    }

    /// Bytes of memory, nearly.
    pub(super) fn weight(&self) -> usize {
        self.head.weight() + self.body.len()
    }
}

/// The opaque part of an entity tag (RFC 9110 section 8.8.3), which is all that a weak comparison looks at.
pub(super) fn opaque(etag: &[u8]) -> &[u8] {
    etag.strip_prefix(b"W/").unwrap_or(etag)
}

/// What says something of the bytes of the body, which a 304 does not bring. The tag is theirs as well: it
/// may come in another strength.
static BODYS: [HeaderName; 8] = [
    header::CONTENT_LENGTH,
    header::CONTENT_ENCODING,
    header::CONTENT_RANGE,
    header::ETAG,
    HeaderName::from_static("content-md5"),
    HeaderName::from_static("content-digest"),
    HeaderName::from_static("repr-digest"),
    HeaderName::from_static("digest"),
];

/// Not kept, whoever asks: they belong to one connection (RFC 9111 section 3.1), to one answer (`Age`), to
/// the body or to one client.
static NEVER_KEPT: [HeaderName; 8] = [
    header::AGE,
    header::CONTENT_LENGTH,
    header::TRAILER,
    header::SET_COOKIE,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    HeaderName::from_static("proxy-authentication-info"),
    header::TRANSFER_ENCODING,
];

/// The fields that are kept. Values are copied: those of a head that was read are slices of the connection's
/// buffer, and would hold all of it.
fn kept_fields(answer: &HeaderMap, control: &ResponseControl, is_private: bool, times: Times) -> HeaderMap {
    let foreign: &[HeaderName] = if is_private { &[] } else { &control.private_fields };
    let mut kept = HeaderMap::with_capacity(answer.len() + 1);
    for (name, value) in answer {
        let is_left = NEVER_KEPT.contains(name) || foreign.contains(name);
        if is_left || control.no_cache_fields.contains(name) {
            continue;
        }
        if let Ok(copy) = HeaderValue::from_bytes(value.as_bytes()) {
            kept.append(name.clone(), copy);
        }
    }
    // RFC 9110 section 6.6.1: an answer that comes without a date gets that of its coming.
    if !kept.contains_key(header::DATE)
        && let Ok(date) = HeaderValue::try_from(httpdate::fmt_http_date(times.wall))
    {
        kept.insert(header::DATE, date);
    }
    kept
}

/// Statuses that are about this request, connection or moment, not the resource: a part, an answer to a
/// condition or an expectation, a proxy's own, and those that RFC 6585 and RFC 8470 keep out of caches.
fn is_never_kept(status: StatusCode) -> bool {
    status.is_informational()
        || matches!(
            status.as_u16(),
            206 | 304 | 407 | 408 | 412 | 416 | 417 | 421 | 425 | 428 | 429 | 431 | 511
        )
}

/// Statuses whose meaning for a cache is known here.
fn is_understood(status: StatusCode) -> bool {
    freshness::is_heuristically_cacheable(status) || matches!(status.as_u16(), 302 | 303 | 307 | 400 | 403)
}
