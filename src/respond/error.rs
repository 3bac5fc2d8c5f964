//! From an [`Error`] to the one shape in which callers see it: status, `Proxy-Status` (RFC 9209) and
//! problem JSON (RFC 9457). A gRPC client takes whatever is no 200 for a fault on the way and tells its
//! user only the status code, so it gets a 200 with the error where it looks for one: in a Trailers-Only
//! answer (gRPC over HTTP/2, "Responses").

use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{Response, StatusCode};
use serde::Serialize;
use tokio::time::Instant;

use super::headers::{PROXY_STATUS, VIA, X_HEDGEROW_TRIED, tried};
use super::rate_limit;
use crate::call::{RequestId, Tried, TriedEnd};
use crate::config::RateLimit;
use crate::error::{Error, Origin};
use crate::wire::grpc;
use crate::wire::push_back::X_SHOULD_RETRY;

/// What a problem tells beside the error itself.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The policy name of the upstream; `None` when the call never got to know it.
    pub upstream: Option<&'a str>,
    /// The request's id.
    pub request_id: &'a RequestId,
    /// Whether the request is a gRPC call.
    pub is_grpc: bool,
    /// The time.
    pub now: Instant,
    /// When the caller stops waiting.
    pub deadline: Option<Instant>,
    /// What was tried, where the policy names more than one thing to try.
    pub tried: &'a [Tried],
    /// Whether this process has tried again already, so that the caller need not.
    pub is_final: bool,
    /// The upstream's rate limit, for who is refused by it.
    pub rate_limit: Option<&'a RateLimit>,
}

#[derive(Serialize)]
struct Problem<'a> {
    r#type: &'static str,
    title: &'static str,
    status: u16,
    detail: &'a str,
    error: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    upstream: Option<&'a str>,
    retryable: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    skew_ms: Option<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tried: Vec<TriedEntry<'a>>,
    request_id: &'a str,
}

/// One entry of `tried`: a status or an error's word.
#[derive(Serialize)]
pub(super) struct TriedEntry<'a> {
    upstream: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    error: &'static str,
}

impl<'a> TriedEntry<'a> {
    pub(super) fn all(tried: &'a [Tried]) -> Vec<Self> {
        let entry = |Tried { upstream, end }: &'a Tried| Self {
            upstream,
            status: match end {
                TriedEnd::Status(status) => Some(status.as_u16()),
                TriedEnd::Error(_) => None,
            },
            error: end.error(),
        };
        tried.iter().map(entry).collect()
    }
}

impl Context<'_> {
    fn detail(&self, error: &Error) -> String {
        error.detail(self.upstream.unwrap_or(Error::NO_NAME), self.now)
    }

    /// How long the caller should wait before another try, where that is known.
    fn wait(&self, error: &Error) -> Option<Duration> {
        error.retry_at().map(|at| at.saturating_duration_since(self.now))
    }
}

/// The problem JSON of a call that ends in `error`, in one line.
pub fn problem(error: &Error, context: Context<'_>) -> Bytes {
    let skew = match error {
        Error::DeadlineExceeded { skew, .. } => *skew,
        _ => None,
    };
    json(&Problem {
        r#type: "about:blank",
        title: error.title(),
        status: error.status().as_u16(),
        detail: &context.detail(error),
        error: error.word(),
        upstream: context.upstream,
        retryable: error.is_retryable(),
        retry_after_ms: context.wait(error).map(millis),
        skew_ms: skew.map(millis),
        tried: TriedEntry::all(context.tried),
        request_id: &context.request_id.to_string(),
    })
}

/// The whole response for a call that ends in `error`.
pub fn response(error: &Error, context: Context<'_>) -> Response<Bytes> {
    let detail = context.detail(error);
    let wait = context.wait(error);
    let mut response = match context.is_grpc {
        true => trailers_only(error, &detail, wait, context),
        false => plain(error, wait, context),
    };
    let headers = response.headers_mut();
    headers.insert(header::VIA, VIA);
    headers.insert(PROXY_STATUS.clone(), proxy_status(error, &detail));
    if let Some(tried) = tried(context.tried) {
        headers.insert(X_HEDGEROW_TRIED.clone(), tried);
    }
    response
}

fn plain(error: &Error, wait: Option<Duration>, context: Context<'_>) -> Response<Bytes> {
    let mut response = Response::new(problem(error, context));
    *response.status_mut() = error.status();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // A 429 says when to come back, even if that has come meanwhile (RFC 6585 section 4).
    let least = Duration::from_secs(u64::from(matches!(error, Error::RateLimited { .. })));
    if let Some(seconds) = wait.and_then(|wait| retry_after(wait.max(least), context)) {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if let (Error::RateLimited { retry_at }, Some(rule)) = (error, context.rate_limit) {
        headers.extend(rate_limit::fields(rule, *retry_at, context.now));
    }
    if let Error::MethodNotAllowed { allow } = error {
        headers.insert(header::ALLOW, HeaderValue::from_static(allow));
    }
    if is_pointless(error, wait, context) {
        headers.insert(X_SHOULD_RETRY.clone(), HeaderValue::from_static("false"));
    }
    response
}

/// The times to wait go the way that gRPC clients read them (gRFC A6): -1 asks for no other try.
fn trailers_only(
    error: &Error,
    detail: &str,
    wait: Option<Duration>,
    context: Context<'_>,
) -> Response<Bytes> {
    let mut response = Response::new(Bytes::new());
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, grpc::CONTENT_TYPE);
    headers.insert(grpc::GRPC_STATUS.clone(), grpc::Status::from_http(error.status()).into());
    headers.insert(grpc::GRPC_MESSAGE.clone(), grpc::message(detail));
    if is_pointless(error, wait, context) {
        headers.insert(grpc::GRPC_PUSHBACK.clone(), HeaderValue::from_static("-1"));
    } else if let Some(wait) = wait {
        headers.insert(grpc::GRPC_PUSHBACK.clone(), millis(wait).into());
    }
    response
}

/// Whole seconds, never more than the caller has left and never 0, which some clients take as "at
/// once, without end"; under a second it is left out.
fn retry_after(wait: Duration, context: Context<'_>) -> Option<u64> {
    let left = context.deadline.map(|at| at.saturating_duration_since(context.now));
    let seconds = wait.as_nanos().div_ceil(1_000_000_000) as u64;
    match left {
        Some(left) => Some(seconds.min(left.as_secs())).filter(|seconds| *seconds > 0),
        None => Some(seconds).filter(|seconds| *seconds > 0),
    }
}

/// Whether another try by the caller cannot help: the SDKs would otherwise make two more.
fn is_pointless(error: &Error, wait: Option<Duration>, context: Context<'_>) -> bool {
    match error {
        Error::EgressDenied { .. } => true,
        // Not an attempt's own timeout: the caller has time left.
        _ if error.origin() == Origin::Deadline => true,
        _ if context.is_final => true,
        Error::CircuitOpen { .. } => match (wait, context.deadline) {
            (Some(wait), Some(deadline)) => context.now + wait >= deadline,
            _ => false,
        },
        _ => false,
    }
}

/// `hedgerow; error=…; details="…"`. What a string of RFC 8941 cannot hold is left out, and so is the end of what
/// would be a long field.
fn proxy_status(error: &Error, detail: &str) -> HeaderValue {
    let is_printable = |c: &char| (' '..='~').contains(c) && !matches!(c, '"' | '\\');
    let details: String = detail.chars().filter(is_printable).take(LONGEST_DETAILS).collect();
    let text = format!("hedgerow; error={}; details=\"{details}\"", error.proxy_status());
    HeaderValue::from_maybe_shared(Bytes::from(text)).unwrap_or(HeaderValue::from_static("hedgerow"))
}

const LONGEST_DETAILS: usize = 300;

fn json(problem: &Problem<'_>) -> Bytes {
    // Strings and numbers always serialise.
    serde_json::to_vec(problem).unwrap_or_default().into()
}

fn millis(duration: Duration) -> u64 {
    duration.as_millis().try_into().unwrap_or(u64::MAX)
}

/// The response as bytes, for a connection that the HTTP library has given up.
pub fn on_the_wire(response: &Response<Bytes>) -> Vec<u8> {
    let status = response.status();
    let mut out = Vec::with_capacity(512 + response.body().len());
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(status.as_str().as_bytes());
    out.push(b' ');
    out.extend_from_slice(status.canonical_reason().unwrap_or("Error").as_bytes());
    out.extend_from_slice(b"\r\n");
    for (name, value) in response.headers() {
        out.extend_from_slice(name.as_str().as_bytes());
        out.extend_from_slice(b": ");
        out.extend_from_slice(value.as_bytes());
        out.extend_from_slice(b"\r\n");
    }
    let length = response.body().len();
    out.extend_from_slice(format!("content-length: {length}\r\nconnection: close\r\n\r\n").as_bytes());
    out.extend_from_slice(response.body());
    out
}

/// Statuses whose connection ends with the answer: what followed a bad head cannot be trusted.
pub fn ends_connection(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::BAD_REQUEST
            | StatusCode::REQUEST_TIMEOUT
            | StatusCode::URI_TOO_LONG
            | StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Bound, Stage};

    fn respond(error: &Error, left: Option<Duration>) -> (Response<Bytes>, serde_json::Value) {
        let now = Instant::now();
        let id = RequestId::Ours(7);
        let deadline = left.map(|left| now + left);
        let context = Context {
            upstream: Some("quotes"),
            request_id: &id,
            is_grpc: false,
            now,
            deadline,
            tried: &[],
            is_final: false,
            rate_limit: None,
        };
        let response = response(error, context);
        let body = serde_json::from_slice(response.body()).unwrap();
        (response, body)
    }

    #[tokio::test]
    async fn an_open_circuit_says_when_to_come_back() {
        let error = Error::CircuitOpen { retry_at: Some(Instant::now() + Duration::from_secs(12)) };
        let (response, body) = respond(&error, Some(Duration::from_secs(30)));
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()["retry-after"], "12");
        assert!(!response.headers().contains_key("x-should-retry"));
        assert_eq!(body["error"], "circuit_open");
        assert_eq!(body["detail"], "quotes is failing; next probe in 12 s");
        assert_eq!(body["retryable"], false);
        assert_eq!(body["request_id"], "0000000000000007");
        assert_eq!(
            response.headers()["proxy-status"],
            "hedgerow; error=destination_unavailable; details=\"quotes is failing; next probe in 12 s\""
        );
    }

    #[tokio::test]
    async fn retry_after_never_exceeds_what_the_caller_has_left_and_is_never_zero() {
        let error = Error::CircuitOpen { retry_at: Some(Instant::now() + Duration::from_secs(12)) };
        let (response, _) = respond(&error, Some(Duration::from_millis(5500)));
        assert_eq!(response.headers()["retry-after"], "5");
        assert_eq!(response.headers()["x-should-retry"], "false");
        let (response, _) = respond(&error, Some(Duration::from_millis(900)));
        assert!(!response.headers().contains_key("retry-after"));
    }

    #[tokio::test]
    async fn c101_a_429_says_to_come_back_in_a_second_at_the_soonest() {
        for (wait, seconds) in [(0, "1"), (5, "1"), (1_500, "2")] {
            let error = Error::RateLimited { retry_at: Instant::now() + Duration::from_millis(wait) };
            let (response, _) = respond(&error, Some(Duration::from_secs(30)));
            assert_eq!(response.status(), 429);
            assert_eq!(response.headers()["retry-after"], seconds, "{wait} ms");
            let (response, _) = respond(&error, Some(Duration::from_millis(900)));
            assert!(!response.headers().contains_key("retry-after"), "the caller does not have a second");
        }
    }

    #[tokio::test]
    async fn a_deadline_that_had_passed_tells_the_skew() {
        let error = Error::DeadlineExceeded {
            stage: Stage::Arrival,
            bound: Bound::Header,
            skew: Some(Duration::from_millis(30_000)),
        };
        let (response, body) = respond(&error, None);
        assert_eq!(response.status(), 504);
        assert_eq!(body["skew_ms"], 30_000);
        assert_eq!(response.headers()["x-should-retry"], "false");
    }

    #[tokio::test]
    async fn a_bound_of_the_policy_is_named_by_the_key_to_edit() {
        let error = Error::DeadlineExceeded { stage: Stage::Head, bound: Bound::Default, skew: None };
        let now = Instant::now();
        let named = "upstreams.quotes.deadline.default struck before the response head";
        assert_eq!(error.detail("quotes", now), named);
        assert_eq!(error.detail("default", now), "defaults.deadline.default struck before the response head");
    }
}
