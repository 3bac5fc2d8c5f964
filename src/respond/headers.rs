//! Fields that hedgerow adds to answers and to requests on their way.

use std::time::Duration;

use http::StatusCode;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};

use crate::call::{Tried, TriedEnd};
use crate::telemetry::metrics::StandIn;
use crate::wire::push_back::X_SHOULD_RETRY;

/// Attempts that were sent for the call.
pub static X_HEDGEROW_ATTEMPTS: HeaderName = HeaderName::from_static("x-hedgerow-attempts");
/// `Proxy-Status` (RFC 9209).
pub static PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");
/// What is left of a rate limit (draft-ietf-httpapi-ratelimit-headers).
pub static RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
/// The rate limit itself, from the same draft.
pub static RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// What stands in for an answer that could not be had: `backup`, `stale` or `static`.
pub static X_HEDGEROW_DEGRADED: HeaderName = HeaderName::from_static("x-hedgerow-degraded");
/// What had no acceptable answer, and what came instead.
pub static X_HEDGEROW_TRIED: HeaderName = HeaderName::from_static("x-hedgerow-tried");

static CACHE_STATUS: HeaderName = HeaderName::from_static("cache-status");
static SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

/// Our entry in `Via` of answers (RFC 9110 section 7.6.3).
pub const VIA: HeaderValue = HeaderValue::from_static("1.1 hedgerow");

/// How a call went, for the fields of its answer.
#[derive(Debug, Clone, Copy)]
pub struct Passage<'a> {
    /// Attempts that were sent.
    pub attempts: u32,
    /// Time in queues.
    pub queued: Duration,
    /// From sending the attempt that won to its head; `None` when none was sent for this call.
    pub upstream: Option<Duration>,
    /// Whether a hedge was sent, and whether it won.
    pub hedge: Option<HedgeEnd>,
    /// What the cache has to do with the answer.
    pub cache: Option<CacheStatus>,
    /// Whether the answer stands in for another one.
    pub stand_in: Option<StandIn>,
    /// What had no acceptable answer.
    pub tried: &'a [Tried],
    /// Whether another try by the caller would do no good.
    pub is_final: bool,
}

/// Our entry in `Cache-Status` (RFC 9211).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheStatus {
    /// The answer is a kept one.
    Hit {
        /// Seconds for which it is fresh; negative since it is stale.
        ttl: i64,
        /// Whether another pod had it.
        is_shared: bool,
    },
    /// The upstream was asked.
    Forwarded {
        /// Why, in a word of RFC 9211 section 2.2.
        why: &'static str,
        /// What the upstream answered, where the client gets another status.
        status: Option<StatusCode>,
        /// Whether the answer is kept.
        stored: bool,
        /// Whether another call did so for this one too.
        collapsed: bool,
    },
}

impl CacheStatus {
    fn to_value(self) -> HeaderValue {
        let text = match self {
            Self::Hit { ttl, is_shared } => {
                let detail = if is_shared { "; detail=shared" } else { "" };
                format!("hedgerow; hit; ttl={ttl}{detail}")
            }
            Self::Forwarded { why, status, stored, collapsed } => {
                let status = status.map(|status| format!("; fwd-status={}", status.as_u16()));
                let stored = if stored { "; stored" } else { "" };
                let collapsed = if collapsed { "; collapsed" } else { "" };
                format!("hedgerow; fwd={why}{}{stored}{collapsed}", status.unwrap_or_default())
            }
        };
        HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static("hedgerow"))
    }
}

/// How a call's hedge ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HedgeEnd {
    /// Its answer is the one that was passed on.
    Won,
    /// Another one's is.
    Lost,
}

impl HedgeEnd {
    /// For `Server-Timing` and the log.
    pub fn word(self) -> &'static str {
        match self {
            Self::Won => "won",
            Self::Lost => "lost",
        }
    }
}

/// Adds our fields to the head of an answer, whose hop-by-hop fields are gone.
pub fn pass_on(headers: &mut HeaderMap, passage: &Passage<'_>) {
    headers.append(header::VIA, VIA);
    headers.insert(X_HEDGEROW_ATTEMPTS.clone(), small_number(passage.attempts));
    headers.append(SERVER_TIMING.clone(), timing(passage));
    if let Some(cache) = passage.cache {
        headers.append(CACHE_STATUS.clone(), cache.to_value());
    }
    if let Some(stand_in) = passage.stand_in {
        headers.insert(X_HEDGEROW_DEGRADED.clone(), HeaderValue::from_static(stand_in.word()));
    }
    if let Some(tried) = tried(passage.tried) {
        headers.insert(X_HEDGEROW_TRIED.clone(), tried);
    }
    if passage.is_final {
        headers.insert(X_SHOULD_RETRY.clone(), HeaderValue::from_static("false"));
    }
}

/// `quotes=429, quotes-backup=connect_failed`; `None` when nothing was tried in vain.
pub fn tried(tried: &[Tried]) -> Option<HeaderValue> {
    if tried.is_empty() {
        return None;
    }
    let each = tried.iter().map(|Tried { upstream, end }| match end {
        TriedEnd::Status(status) => format!("{upstream}={}", status.as_u16()),
        TriedEnd::Error(word) => format!("{upstream}={word}"),
    });
    HeaderValue::try_from(each.collect::<Vec<_>>().join(", ")).ok()
}

/// A number that is nearly always 1.
pub fn small_number(n: u32) -> HeaderValue {
    match n {
        1 => HeaderValue::from_static("1"),
        n => HeaderValue::from(n),
    }
}

/// `queue;dur=0.1, upstream;dur=12.3, hedge;desc="won"`, in milliseconds with one place.
fn timing(passage: &Passage<'_>) -> HeaderValue {
    let mut text = Vec::with_capacity(64);
    text.extend_from_slice(b"queue;dur=");
    write_millis(&mut text, passage.queued);
    if let Some(upstream) = passage.upstream {
        text.extend_from_slice(b", upstream;dur=");
        write_millis(&mut text, upstream);
    }
    if let Some(end) = passage.hedge {
        text.extend_from_slice(b", hedge;desc=\"");
        text.extend_from_slice(end.word().as_bytes());
        text.push(b'"');
    }
    HeaderValue::from_maybe_shared(bytes::Bytes::from(text)).unwrap_or(HeaderValue::from_static("queue"))
}

/// Milliseconds with one place.
fn write_millis(out: &mut Vec<u8>, duration: Duration) {
    let tenths = u64::try_from(duration.as_micros() / 100).unwrap_or(u64::MAX);
    out.extend_from_slice(itoa::Buffer::new().format(tenths / 10).as_bytes());
    out.extend_from_slice(&[b'.', b'0' + (tenths % 10) as u8]);
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSAGE: Passage<'_> = Passage {
        attempts: 2,
        queued: Duration::from_micros(140),
        upstream: Some(Duration::from_micros(12_349)),
        hedge: Some(HedgeEnd::Won),
        cache: None,
        stand_in: None,
        tried: &[],
        is_final: false,
    };

    fn passed_on(passage: &Passage<'_>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        pass_on(&mut headers, passage);
        headers
    }

    #[test]
    fn the_passage_is_told_in_milliseconds() {
        let headers = passed_on(&PASSAGE);
        assert_eq!(headers["server-timing"], "queue;dur=0.1, upstream;dur=12.3, hedge;desc=\"won\"");
        assert_eq!(headers["x-hedgerow-attempts"], "2");
        assert_eq!(headers["via"], "1.1 hedgerow");
        assert_eq!(headers.len(), 3);
    }

    #[test]
    fn an_answer_that_stands_in_says_so_and_what_was_tried() {
        let tried = [
            Tried { upstream: "quotes".into(), end: TriedEnd::Status(StatusCode::TOO_MANY_REQUESTS) },
            Tried { upstream: "quotes-backup".into(), end: TriedEnd::Error("connect_failed") },
        ];
        let cache = Some(CacheStatus::Hit { ttl: -12, is_shared: false });
        let stand_in = Some(StandIn::Stale);
        let headers = passed_on(&Passage { cache, stand_in, tried: &tried, is_final: true, ..PASSAGE });
        assert_eq!(headers["x-hedgerow-degraded"], "stale");
        assert_eq!(headers["x-hedgerow-tried"], "quotes=429, quotes-backup=connect_failed");
        assert_eq!(headers["cache-status"], "hedgerow; hit; ttl=-12");
        assert_eq!(headers["x-should-retry"], "false");
    }

    #[test]
    fn cache_status_tells_why_the_upstream_was_asked() {
        let forwarded = |status, stored, collapsed| {
            let cache = CacheStatus::Forwarded { why: "stale", status, stored, collapsed };
            passed_on(&Passage { cache: Some(cache), ..PASSAGE })["cache-status"].clone()
        };
        assert_eq!(forwarded(None, false, false), "hedgerow; fwd=stale");
        let status = Some(StatusCode::NOT_MODIFIED);
        assert_eq!(forwarded(status, true, true), "hedgerow; fwd=stale; fwd-status=304; stored; collapsed");
    }
}
