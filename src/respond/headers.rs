//! Fields that hedgerow adds to answers and to requests on their way.

use std::time::Duration;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};

use crate::wire::hop_by_hop;

/// Attempts that were sent for the call.
pub static X_HEDGEROW_ATTEMPTS: HeaderName = HeaderName::from_static("x-hedgerow-attempts");
/// `Proxy-Status` (RFC 9209).
pub static PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");
/// What is left of a rate limit (draft-ietf-httpapi-ratelimit-headers).
pub static RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
/// The rate limit itself, from the same draft.
pub static RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
/// Tells the OpenAI and Anthropic SDKs not to try again.
pub static X_SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

static SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

/// Our entry in `Via` of answers (RFC 9110 section 7.6.3).
pub const VIA: HeaderValue = HeaderValue::from_static("1.1 hedgerow");

/// How a call went, for the fields of its answer.
#[derive(Debug, Clone, Copy)]
pub struct Passage {
    /// Attempts that were sent.
    pub attempts: u32,
    /// Time in the bulkhead's queue.
    pub queued: Duration,
    /// From sending the attempt that won to its head.
    pub upstream: Duration,
    /// Whether a hedge was sent, and whether it won.
    pub hedge: Option<HedgeEnd>,
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

/// Makes an upstream's response head ours: without its hop-by-hop fields, with `Via` and the passage.
pub fn pass_on(headers: &mut HeaderMap, passage: &Passage) {
    hop_by_hop::strip(headers);
    headers.append(header::VIA, VIA);
    headers.insert(X_HEDGEROW_ATTEMPTS.clone(), small_number(passage.attempts));
    headers.append(SERVER_TIMING.clone(), timing(passage));
}

fn small_number(n: u32) -> HeaderValue {
    match n {
        1 => HeaderValue::from_static("1"),
        n => HeaderValue::from(n),
    }
}

/// `queue;dur=0.1, upstream;dur=12.3, hedge;desc="won"`, in milliseconds with one place.
fn timing(passage: &Passage) -> HeaderValue {
    let mut text = Vec::with_capacity(64);
    text.extend_from_slice(b"queue;dur=");
    write_millis(&mut text, passage.queued);
    text.extend_from_slice(b", upstream;dur=");
    write_millis(&mut text, passage.upstream);
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

    #[test]
    fn the_passage_is_told_in_milliseconds() {
        let passage = Passage {
            attempts: 2,
            queued: Duration::from_micros(140),
            upstream: Duration::from_micros(12_349),
            hedge: Some(HedgeEnd::Won),
        };
        let mut headers = HeaderMap::new();
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        pass_on(&mut headers, &passage);
        assert_eq!(headers["server-timing"], "queue;dur=0.1, upstream;dur=12.3, hedge;desc=\"won\"");
        assert_eq!(headers["x-hedgerow-attempts"], "2");
        assert_eq!(headers["via"], "1.1 hedgerow");
        assert!(!headers.contains_key("connection"));
    }
}
