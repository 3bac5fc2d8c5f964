//! Every way in which hedgerow itself ends a call, and the questions one may ask about each.
//!
//! The enum is the table of errors that users are promised: one word, one status, one `Proxy-Status`
//! type (RFC 9209 section 2.3) for each. Questions are answered by matches without a `_` arm, so that a
//! new variant does not compile until all of them are answered. An upstream's own 4xx or 5xx is no
//! `Error`: it is an answer, and only classified.
//!
//! What a caller may read is `title` and `detail`; addresses and library messages stay in the
//! [`Cause`], which goes to the log alone.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use tokio::time::Instant;

/// A call's end without an upstream's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The request breaks a rule of HTTP or of the proxy; the text names it.
    InvalidRequest(&'static str),
    /// The same of what a fan-out asks for; the text names the place in it.
    InvalidFanOut(Arc<str>),
    /// The client ended its connection within the request's body. Whoever still reads is told 400, as
    /// for any bad request; the accounts know a client that left.
    BodyBrokenOff,
    /// A deadline field that cannot be used.
    InvalidDeadline(&'static str),
    /// The request's body is larger than a stage can take.
    BodyTooLarge,
    /// The request target is longer than `limits.target`.
    UriTooLong,
    /// The head is larger than `limits.head` or has more than `limits.fields` fields.
    HeadersTooLarge,
    /// The head did not arrive within `limits.header_timeout`.
    RequestTimeout,
    /// The request inside a tunnel names another host than the tunnel (RFC 9110 section 15.5.20).
    Misdirected,
    /// The request is for hedgerow itself, and there is nothing at that path.
    NotFound,
    /// The request is for an endpoint of hedgerow's that takes other methods.
    MethodNotAllowed {
        /// Those that it takes, as `Allow` says it (RFC 9110 section 10.2.1).
        allow: &'static str,
    },
    /// The caller wants a kept answer alone, and there is none (RFC 9111 section 5.2.1.7).
    NotCached,
    /// The egress guard refuses the host or its address; the text names the rule.
    EgressDenied {
        /// The rule in the policy's words, such as `egress.deny_private`.
        rule: Arc<str>,
        /// Whether an address was refused rather than the name.
        by_address: bool,
    },
    /// No rate token will come in time.
    RateLimited {
        /// When a token can be had.
        retry_at: Instant,
    },
    /// The breaker is open, or half-open with its probes under way.
    CircuitOpen {
        /// When the next probe may pass, where that is known.
        retry_at: Option<Instant>,
    },
    /// No permit, and no place in the queue or none that would come up in time.
    BulkheadFull,
    /// All fan-outs together hold the memory that they may.
    FanOutsFull,
    /// The process ends before the call could.
    ShuttingDown,
    /// The name does not resolve.
    DnsFailed(Cause),
    /// No answer from the name servers within `dns.timeout`.
    DnsTimeout,
    /// No address accepted the connection.
    ConnectFailed(Cause),
    /// No address answered within `connect_timeout`.
    ConnectTimeout,
    /// The TLS handshake failed for a reason other than the certificate.
    TlsFailed(Cause),
    /// The upstream's certificate does not verify; the text says what is wrong with it.
    CertificateInvalid {
        /// Such as `expired` or `issued for another name`.
        what: &'static str,
        /// The verifier's own words, for the log.
        cause: Cause,
    },
    /// The upstream reset or closed the connection before it answered.
    UpstreamReset(Cause),
    /// The upstream's answer ended before it was complete.
    UpstreamIncomplete(Cause),
    /// The upstream's answer breaks HTTP.
    UpstreamInvalid(Cause),
    /// The request has been here before.
    Loop,
    /// The deadline, or a bound inside it, struck.
    DeadlineExceeded {
        /// What was being waited for.
        stage: Stage,
        /// What set the bound, so that one knows what to edit.
        bound: Bound,
        /// For a deadline that had passed on arrival: by how much. A wrong clock looks like this.
        skew: Option<Duration>,
    },
    /// A fault of hedgerow's own.
    Internal(Cause),
}

/// Where an error comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The request itself, or a rule that forbids it.
    Request,
    /// A guard of the upstream, which let no attempt be made.
    Guard,
    /// An attempt at the upstream.
    Attempt,
    /// The call's deadline.
    Deadline,
    /// This process.
    Process,
}

/// What a call was waiting for when its deadline struck.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Nothing: it had passed before the request came.
    Arrival,
    /// A bulkhead permit.
    Queue,
    /// An answer from the name servers.
    Dns,
    /// A connection, its TLS handshake included.
    Connect,
    /// The response head.
    Head,
    /// The rest of the response body.
    Body,
}

impl Stage {
    /// All of them, for registering metrics.
    pub const ALL: [Self; 6] = [Self::Arrival, Self::Queue, Self::Dns, Self::Connect, Self::Head, Self::Body];

    /// The label value.
    pub fn word(self) -> &'static str {
        match self {
            Self::Arrival => "arrival",
            Self::Queue => "queue",
            Self::Dns => "dns",
            Self::Connect => "connect",
            Self::Head => "head",
            Self::Body => "body",
        }
    }
}

/// What set the effective deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// `x-request-deadline`.
    Header,
    /// `grpc-timeout`.
    Grpc,
    /// A hint of the caller's SDK.
    SdkHint,
    /// `deadline.default` of the policy.
    Default,
    /// `deadline.max` of the policy.
    Max,
    /// `attempt_timeout` of the policy.
    AttemptTimeout,
    /// `stream_idle` of the policy.
    StreamIdle,
    /// `deadline_ms` of the fan-out that the call is part of, or what bounds that as a whole.
    FanOut,
    /// `timeout_ms` of the call in its fan-out.
    FanOutCall,
}

impl Bound {
    /// What to edit: a header's name, or the policy key below `upstreams.NAME`.
    pub fn source(self) -> &'static str {
        match self {
            Self::Header => "x-request-deadline",
            Self::Grpc => "grpc-timeout",
            Self::SdkHint => "the SDK's own timeout header",
            Self::Default => "deadline.default",
            Self::Max => "deadline.max",
            Self::AttemptTimeout => "attempt_timeout",
            Self::StreamIdle => "stream_idle",
            Self::FanOut => "the fan-out's deadline",
            Self::FanOutCall => "timeout_ms",
        }
    }

    /// Whether `source` is a key of the policy rather than a field of the request.
    pub fn is_policy(self) -> bool {
        match self {
            Self::Default | Self::Max | Self::AttemptTimeout | Self::StreamIdle => true,
            Self::Header | Self::Grpc | Self::SdkHint | Self::FanOut | Self::FanOutCall => false,
        }
    }
}

/// A reason that only the log may tell: it can name addresses. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Cause(Option<Arc<str>>);

impl Cause {
    /// No more is known than the variant says.
    pub const NONE: Self = Self(None);

    /// The text for the log.
    pub fn as_str(&self) -> Option<&str> {
        self.0.as_deref()
    }

    /// An error with the chain of its sources, joined by `: `.
    pub fn chain(error: &(dyn std::error::Error + 'static)) -> Self {
        let mut text = error.to_string();
        let mut next = error.source();
        while let Some(source) = next {
            let part = source.to_string();
            if !text.ends_with(&part) {
                text.push_str(": ");
                text.push_str(&part);
            }
            next = source.source();
        }
        Self(Some(text.into()))
    }
}

impl From<&str> for Cause {
    fn from(text: &str) -> Self {
        Self(Some(text.into()))
    }
}

impl From<String> for Cause {
    fn from(text: String) -> Self {
        Self(Some(text.into()))
    }
}

impl fmt::Debug for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str().unwrap_or("-"))
    }
}

impl Error {
    /// The word for JSON, metrics and log.
    pub fn word(&self) -> &'static str {
        match self {
            Self::InvalidRequest(_) | Self::InvalidFanOut(_) | Self::BodyBrokenOff => "invalid_request",
            Self::InvalidDeadline(_) => "invalid_deadline",
            Self::BodyTooLarge => "body_too_large",
            Self::UriTooLong => "uri_too_long",
            Self::HeadersTooLarge => "headers_too_large",
            Self::RequestTimeout => "request_timeout",
            Self::Misdirected => "misdirected",
            Self::NotFound => "not_found",
            Self::MethodNotAllowed { .. } => "method_not_allowed",
            Self::NotCached => "not_cached",
            Self::EgressDenied { .. } => "egress_denied",
            Self::RateLimited { .. } => "rate_limited",
            Self::CircuitOpen { .. } => "circuit_open",
            Self::BulkheadFull | Self::FanOutsFull => "bulkhead_full",
            Self::ShuttingDown => "shutting_down",
            Self::DnsFailed(_) => "dns_failed",
            Self::DnsTimeout => "dns_timeout",
            Self::ConnectFailed(_) => "connect_failed",
            Self::ConnectTimeout => "connect_timeout",
            Self::TlsFailed(_) => "tls_failed",
            Self::CertificateInvalid { .. } => "certificate_invalid",
            Self::UpstreamReset(_) => "upstream_reset",
            Self::UpstreamIncomplete(_) => "upstream_incomplete",
            Self::UpstreamInvalid(_) => "upstream_invalid",
            Self::Loop => "loop",
            Self::DeadlineExceeded { .. } => "deadline_exceeded",
            Self::Internal(_) => "internal",
        }
    }

    /// The status that the caller gets.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::InvalidRequest(_)
            | Self::InvalidFanOut(_)
            | Self::BodyBrokenOff
            | Self::InvalidDeadline(_) => StatusCode::BAD_REQUEST,
            Self::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::UriTooLong => StatusCode::URI_TOO_LONG,
            Self::HeadersTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::RequestTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::Misdirected => StatusCode::MISDIRECTED_REQUEST,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::EgressDenied { .. } => StatusCode::FORBIDDEN,
            Self::RateLimited { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::CircuitOpen { .. } | Self::BulkheadFull | Self::FanOutsFull | Self::ShuttingDown => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::DnsFailed(_)
            | Self::ConnectFailed(_)
            | Self::TlsFailed(_)
            | Self::CertificateInvalid { .. }
            | Self::UpstreamReset(_)
            | Self::UpstreamIncomplete(_)
            | Self::UpstreamInvalid(_)
            | Self::Loop => StatusCode::BAD_GATEWAY,
            Self::NotCached | Self::DnsTimeout | Self::ConnectTimeout | Self::DeadlineExceeded { .. } => {
                StatusCode::GATEWAY_TIMEOUT
            }
            Self::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The `error` parameter of our `Proxy-Status` entry (RFC 9209 section 2.3).
    pub fn proxy_status(&self) -> &'static str {
        match self {
            Self::InvalidRequest(_)
            | Self::InvalidFanOut(_)
            | Self::BodyBrokenOff
            | Self::InvalidDeadline(_)
            | Self::BodyTooLarge
            | Self::UriTooLong
            | Self::HeadersTooLarge
            | Self::RequestTimeout
            | Self::Misdirected
            | Self::NotFound
            | Self::MethodNotAllowed { .. }
            | Self::NotCached
            | Self::RateLimited { .. } => "http_request_error",
            Self::EgressDenied { by_address: true, .. } => "destination_ip_prohibited",
            Self::EgressDenied { by_address: false, .. } => "http_request_denied",
            Self::CircuitOpen { .. } | Self::ShuttingDown => "destination_unavailable",
            Self::BulkheadFull | Self::FanOutsFull => "connection_limit_reached",
            Self::DnsFailed(_) => "dns_error",
            Self::DnsTimeout => "dns_timeout",
            Self::ConnectFailed(_) => "connection_refused",
            Self::ConnectTimeout
            | Self::DeadlineExceeded { stage: Stage::Dns | Stage::Connect | Stage::Queue, .. } => {
                "connection_timeout"
            }
            Self::TlsFailed(_) => "tls_protocol_error",
            Self::CertificateInvalid { .. } => "tls_certificate_error",
            Self::UpstreamReset(_) => "connection_terminated",
            Self::UpstreamIncomplete(_) => "http_response_incomplete",
            Self::UpstreamInvalid(_) => "http_protocol_error",
            Self::Loop => "proxy_loop_detected",
            Self::DeadlineExceeded { stage: Stage::Arrival | Stage::Head | Stage::Body, .. } => {
                "http_response_timeout"
            }
            Self::Internal(_) => "proxy_internal_error",
        }
    }

    /// Whether the same call may fare better later: what `retryable` in the problem JSON says.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::RateLimited { .. }
            | Self::BulkheadFull
            | Self::FanOutsFull
            | Self::ShuttingDown
            | Self::DnsFailed(_)
            | Self::DnsTimeout
            | Self::ConnectFailed(_)
            | Self::ConnectTimeout
            | Self::UpstreamReset(_)
            | Self::UpstreamIncomplete(_)
            | Self::DeadlineExceeded { bound: Bound::AttemptTimeout, .. } => true,
            Self::InvalidRequest(_)
            | Self::InvalidFanOut(_)
            | Self::BodyBrokenOff
            | Self::InvalidDeadline(_)
            | Self::BodyTooLarge
            | Self::UriTooLong
            | Self::HeadersTooLarge
            | Self::RequestTimeout
            | Self::Misdirected
            | Self::NotFound
            | Self::MethodNotAllowed { .. }
            | Self::NotCached
            | Self::EgressDenied { .. }
            | Self::CircuitOpen { .. }
            | Self::TlsFailed(_)
            | Self::CertificateInvalid { .. }
            | Self::UpstreamInvalid(_)
            | Self::Loop
            | Self::DeadlineExceeded { .. }
            | Self::Internal(_) => false,
        }
    }

    /// Where it comes from, which decides what may be done about it.
    pub fn origin(&self) -> Origin {
        match self {
            Self::InvalidRequest(_)
            | Self::InvalidFanOut(_)
            | Self::BodyBrokenOff
            | Self::InvalidDeadline(_)
            | Self::BodyTooLarge
            | Self::UriTooLong
            | Self::HeadersTooLarge
            | Self::RequestTimeout
            | Self::Misdirected
            | Self::NotFound
            | Self::MethodNotAllowed { .. }
            | Self::NotCached
            | Self::EgressDenied { .. }
            | Self::Loop => Origin::Request,
            Self::RateLimited { .. } | Self::CircuitOpen { .. } | Self::BulkheadFull => Origin::Guard,
            Self::DnsFailed(_)
            | Self::DnsTimeout
            | Self::ConnectFailed(_)
            | Self::ConnectTimeout
            | Self::TlsFailed(_)
            | Self::CertificateInvalid { .. }
            | Self::UpstreamReset(_)
            | Self::UpstreamIncomplete(_)
            | Self::UpstreamInvalid(_)
            | Self::DeadlineExceeded { bound: Bound::AttemptTimeout, .. } => Origin::Attempt,
            Self::DeadlineExceeded { .. } => Origin::Deadline,
            Self::FanOutsFull | Self::ShuttingDown | Self::Internal(_) => Origin::Process,
        }
    }

    /// Whether another attempt may fare better.
    pub fn is_worth_another_try(&self) -> bool {
        self.origin() == Origin::Attempt && !matches!(self, Self::CertificateInvalid { .. })
    }

    /// Whether something else may stand in for the answer that could not be had. What is wrong with the
    /// request itself, or forbidden, would be so elsewhere too.
    pub fn may_be_stood_in_for(&self) -> bool {
        match self.origin() {
            Origin::Guard | Origin::Attempt | Origin::Deadline => true,
            Origin::Request | Origin::Process => false,
        }
    }

    /// Whether every call that waits for the same answer would have met it, and not only one with this
    /// deadline or without a permit.
    pub fn is_everyones(&self) -> bool {
        self.origin() == Origin::Attempt || matches!(self, Self::CircuitOpen { .. })
    }

    /// Whether the failure speaks against the upstream's health. A deadline counts only once the
    /// upstream had its fair chance, which the attempt judges; local refusals never count.
    pub fn counts_against_upstream(&self) -> bool {
        match self.origin() {
            Origin::Attempt | Origin::Deadline => {
                !matches!(self, Self::DeadlineExceeded { stage: Stage::Arrival | Stage::Queue, .. })
            }
            Origin::Request | Origin::Guard | Origin::Process => false,
        }
    }

    /// The problem's `title`: the same for every occurrence.
    pub fn title(&self) -> &'static str {
        match self {
            Self::InvalidRequest(_) | Self::InvalidFanOut(_) | Self::BodyBrokenOff => "invalid request",
            Self::InvalidDeadline(_) => "invalid deadline",
            Self::BodyTooLarge => "body too large",
            Self::UriTooLong => "request target too long",
            Self::HeadersTooLarge => "request head too large",
            Self::RequestTimeout => "request head too slow",
            Self::Misdirected => "misdirected request",
            Self::NotFound => "no such endpoint",
            Self::MethodNotAllowed { .. } => "method not allowed",
            Self::NotCached => "not cached",
            Self::EgressDenied { .. } => "egress denied",
            Self::RateLimited { .. } => "rate limited",
            Self::CircuitOpen { .. } => "circuit open",
            Self::BulkheadFull | Self::FanOutsFull => "bulkhead full",
            Self::ShuttingDown => "shutting down",
            Self::DnsFailed(_) => "name resolution failed",
            Self::DnsTimeout => "name resolution timed out",
            Self::ConnectFailed(_) => "connection failed",
            Self::ConnectTimeout => "connection timed out",
            Self::TlsFailed(_) => "TLS handshake failed",
            Self::CertificateInvalid { .. } => "upstream certificate invalid",
            Self::UpstreamReset(_) => "upstream closed the connection",
            Self::UpstreamIncomplete(_) => "upstream answer incomplete",
            Self::UpstreamInvalid(_) => "upstream answer invalid",
            Self::Loop => "proxy loop",
            Self::DeadlineExceeded { .. } => "deadline exceeded",
            Self::Internal(_) => "internal error",
        }
    }

    /// What an upstream is called in a [`detail`](Self::detail) where none is known.
    pub const NO_NAME: &str = "the upstream";

    /// The problem's `detail` for a call to `upstream` (a policy name), at the time `now`.
    pub fn detail(&self, upstream: &str, now: Instant) -> String {
        match self {
            Self::InvalidRequest(what) | Self::InvalidDeadline(what) => (*what).into(),
            Self::InvalidFanOut(what) => what.to_string(),
            Self::BodyBrokenOff => "the request body broke off before its end".into(),
            Self::BodyTooLarge => "the request body is larger than limits.fanout_body allows".into(),
            Self::UriTooLong => "the request target is longer than limits.target allows".into(),
            Self::HeadersTooLarge => {
                "the request head is larger than limits.head, or has more fields than limits.fields".into()
            }
            Self::RequestTimeout => "the request head did not arrive within limits.header_timeout".into(),
            Self::Misdirected => "the request names another host than its tunnel".into(),
            Self::NotFound => "hedgerow has no endpoint at this path".into(),
            Self::MethodNotAllowed { allow } => format!("this endpoint takes {allow}"),
            Self::NotCached => "the request is only-if-cached, and no answer to it is kept".into(),
            Self::EgressDenied { rule, .. } => format!("refused by {rule}"),
            Self::RateLimited { retry_at } => {
                format!("the rate limit of {upstream} allows the next call in {}", Wait(*retry_at, now))
            }
            Self::CircuitOpen { retry_at: Some(at) } => {
                format!("{upstream} is failing; next probe in {}", Wait(*at, now))
            }
            Self::CircuitOpen { retry_at: None } => format!("{upstream} is failing; a probe is under way"),
            Self::BulkheadFull => {
                format!("{upstream} has all its permits out and no place in its queue in time")
            }
            Self::FanOutsFull => "fan-outs hold all the memory that they may; some must be read first".into(),
            Self::ShuttingDown => "hedgerow is leaving".into(),
            Self::DnsFailed(_) => format!("the name of {upstream} does not resolve"),
            Self::DnsTimeout => format!("no answer for the name of {upstream} within dns.timeout"),
            Self::ConnectFailed(_) => format!("no address of {upstream} accepted a connection"),
            Self::ConnectTimeout => format!("no address of {upstream} answered within connect_timeout"),
            Self::TlsFailed(_) => format!("the TLS handshake with {upstream} failed"),
            Self::CertificateInvalid { what, .. } => format!("the certificate of {upstream} is {what}"),
            Self::UpstreamReset(_) => format!("{upstream} closed the connection before it answered"),
            Self::UpstreamIncomplete(_) => format!("the answer of {upstream} ended before it was complete"),
            Self::UpstreamInvalid(_) => format!("the answer of {upstream} breaks HTTP"),
            Self::Loop => "the request has already passed through this hedgerow".into(),
            Self::DeadlineExceeded { skew: Some(skew), bound, .. } => format!(
                "{} had passed {} ms before the request arrived; if that surprises, compare the clocks",
                bound.source(),
                skew.as_millis()
            ),
            Self::DeadlineExceeded { stage, bound, skew: None } => {
                let wait = match stage {
                    Stage::Arrival => "on arrival",
                    Stage::Queue => "in the bulkhead's queue",
                    Stage::Dns => "while resolving the name",
                    Stage::Connect => "while connecting",
                    Stage::Head => "before the response head",
                    Stage::Body => "before the end of the body",
                };
                match bound.is_policy() {
                    true if matches!(upstream, "default" | Self::NO_NAME) => {
                        format!("defaults.{} struck {wait}", bound.source())
                    }
                    true => format!("upstreams.{upstream}.{} struck {wait}", bound.source()),
                    false => format!("{} struck {wait}", bound.source()),
                }
            }
            Self::Internal(_) => "a fault of hedgerow's own; the log tells more under this request id".into(),
        }
    }

    /// When another try makes sense, where that is known.
    pub fn retry_at(&self) -> Option<Instant> {
        match self {
            Self::RateLimited { retry_at } => Some(*retry_at),
            Self::CircuitOpen { retry_at } => *retry_at,
            _ => None,
        }
    }

    /// What only the log may tell.
    pub fn cause(&self) -> Option<&str> {
        match self {
            Self::DnsFailed(cause)
            | Self::ConnectFailed(cause)
            | Self::TlsFailed(cause)
            | Self::CertificateInvalid { cause, .. }
            | Self::UpstreamReset(cause)
            | Self::UpstreamIncomplete(cause)
            | Self::UpstreamInvalid(cause)
            | Self::Internal(cause) => cause.as_str(),
            _ => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.title())
    }
}

impl std::error::Error for Error {}

/// Time left as a person says it: whole seconds from one second up, else milliseconds.
struct Wait(Instant, Instant);

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let left = self.0.saturating_duration_since(self.1);
        match left.as_millis() {
            ms if ms >= 1000 => write!(f, "{} s", ms.div_ceil(1000)),
            ms => write!(f, "{ms} ms"),
        }
    }
}
