//! What gRPC says where HTTP would say a status: read for the guards, written for our own answers.
//!
//! A gRPC answer is a 200 whatever came of the call; how it went stands in `grpc-status`, in the
//! trailers or, where there is no message, already in the head ("Trailers-Only"). The guards think in
//! HTTP statuses and the policy names those, so a gRPC status is mapped to the HTTP status that
//! `google.rpc.Code` gives it, rather than a second set of keys being made for the same judgement.
//!
//! gRPC-Web is not read here: it carries its trailers within the body.

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};

use super::media_type;

/// How the call went, in decimal.
pub static GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
/// The same in words, percent-encoded.
pub static GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// When another try may come (gRFC A6).
pub static GRPC_PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

/// The content type of our own answers.
pub const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/grpc");

/// Whether a request with this head is a gRPC call. Those are always POST; anything else, a CONNECT
/// above all, must never get an error that looks like a 200.
pub fn is_call(method: &Method, headers: &HeaderMap) -> bool {
    *method == Method::POST && is_grpc(headers)
}

/// Whether a message is gRPC: `application/grpc`, with a format such as `+proto` behind it or none.
pub fn is_grpc(headers: &HeaderMap) -> bool {
    after_name(headers).is_some_and(|rest| matches!(rest.first(), None | Some(b'+')))
}

/// The same, gRPC-Web included.
pub fn is_grpc_or_web(headers: &HeaderMap) -> bool {
    after_name(headers).is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b'-')))
}

/// What stands behind `application/grpc` in the media type.
fn after_name(headers: &HeaderMap) -> Option<&[u8]> {
    const NAME: &[u8] = b"application/grpc";
    let (name, rest) = media_type::of(headers).split_at_checked(NAME.len())?;
    name.eq_ignore_ascii_case(NAME).then_some(rest)
}

/// How a call went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status(u8);

impl Status {
    /// What a client makes of an answer that does not say it.
    pub const UNKNOWN: Self = Self(2);

    /// What these fields, of a head or of trailers, say; `None` where they say nothing. What is no
    /// number counts as [`Self::UNKNOWN`], as it does for clients.
    pub fn of(fields: &HeaderMap) -> Option<Self> {
        let digits = fields.get(&GRPC_STATUS)?.to_str().ok();
        Some(digits.and_then(|digits| digits.parse().ok()).map_or(Self::UNKNOWN, Self))
    }

    /// For an answer of ours that would have this status in HTTP. What gRPC's own libraries say of
    /// sizes beyond their limits is RESOURCE_EXHAUSTED; of a path that nobody serves, UNIMPLEMENTED.
    pub fn from_http(status: StatusCode) -> Self {
        Self(match status {
            StatusCode::BAD_REQUEST | StatusCode::MISDIRECTED_REQUEST => 3,
            StatusCode::GATEWAY_TIMEOUT => 4,
            StatusCode::FORBIDDEN => 7,
            StatusCode::TOO_MANY_REQUESTS
            | StatusCode::PAYLOAD_TOO_LARGE
            | StatusCode::URI_TOO_LONG
            | StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => 8,
            StatusCode::NOT_FOUND => 12,
            StatusCode::INTERNAL_SERVER_ERROR => 13,
            StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::REQUEST_TIMEOUT => 14,
            _ => return Self::UNKNOWN,
        })
    }

    /// The HTTP status that says the same (`google.rpc.Code`). 499 is a call that its client cancelled.
    pub fn to_http(self) -> StatusCode {
        let code = match self.0 {
            0 => 200,
            1 => 499,
            3 | 9 | 11 => 400,
            4 => 504,
            5 => 404,
            6 | 10 => 409,
            7 => 403,
            8 => 429,
            12 => 501,
            14 => 503,
            16 => 401,
            // UNKNOWN, INTERNAL, DATA_LOSS, and what has no meaning yet.
            _ => 500,
        };
        StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }
}

/// What a head says in the terms of HTTP, also where it says it in gRPC's.
pub fn status_of(status: StatusCode, headers: &HeaderMap) -> StatusCode {
    match status {
        StatusCode::OK if is_grpc(headers) => Status::of(headers).map_or(status, Status::to_http),
        _ => status,
    }
}

impl From<Status> for HeaderValue {
    fn from(status: Status) -> Self {
        u16::from(status.0).into()
    }
}

/// `grpc-message`: bytes other than printable ASCII, and `%`, are percent-encoded.
pub fn message(text: &str) -> HeaderValue {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    let mut out = Vec::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => out.push(byte),
            _ => out.extend_from_slice(&[b'%', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]),
        }
    }
    HeaderValue::from_maybe_shared(Bytes::from(out)).unwrap_or(HeaderValue::from_static(""))
}

#[cfg(test)]
mod tests {
    use http::header::CONTENT_TYPE;

    use super::*;

    fn fields(name: &HeaderName, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(name.clone(), HeaderValue::from_static(value))])
    }

    #[test]
    fn a_call_is_a_post_of_grpc() {
        for kind in [
            "application/grpc",
            "application/grpc+proto",
            "application/grpc; charset=utf-8",
            "Application/gRPC",
        ] {
            let headers = fields(&CONTENT_TYPE, kind);
            assert!(is_call(&Method::POST, &headers) && is_grpc_or_web(&headers), "{kind}");
            assert!(!is_call(&Method::CONNECT, &headers), "{kind}");
        }
        for kind in ["application/grpc-web", "application/grpc-web-text+proto"] {
            let headers = fields(&CONTENT_TYPE, kind);
            assert!(!is_call(&Method::POST, &headers) && is_grpc_or_web(&headers), "{kind}");
        }
        for kind in ["application/grpcx", "application/grp", "application/json", ""] {
            let headers = fields(&CONTENT_TYPE, kind);
            assert!(!is_call(&Method::POST, &headers) && !is_grpc_or_web(&headers), "{kind}");
        }
    }

    #[test]
    fn a_status_that_cannot_be_read_is_unknown() {
        assert_eq!(Status::of(&HeaderMap::new()), None);
        assert_eq!(Status::of(&fields(&GRPC_STATUS, "14")), Some(Status(14)));
        for odd in ["", "OK", "-1", "256", "1.5"] {
            assert_eq!(Status::of(&fields(&GRPC_STATUS, odd)), Some(Status::UNKNOWN), "{odd:?}");
        }
    }

    #[test]
    fn every_status_has_its_http_status() {
        let http = [200, 499, 500, 400, 504, 404, 409, 403, 429, 400, 409, 400, 501, 500, 503, 500, 401, 500];
        for (grpc, http) in (0..).zip(http) {
            assert_eq!(Status(grpc).to_http(), http, "{grpc}");
        }
    }

    #[test]
    fn our_own_refusals_have_a_grpc_status() {
        for (http, grpc) in [
            (400, 3),
            (403, 7),
            (404, 12),
            (408, 14),
            (413, 8),
            (414, 8),
            (421, 3),
            (429, 8),
            (431, 8),
            (500, 13),
            (502, 14),
            (503, 14),
            (504, 4),
        ] {
            assert_eq!(Status::from_http(StatusCode::from_u16(http).unwrap()), Status(grpc), "{http}");
        }
    }

    #[test]
    fn a_message_is_percent_encoded() {
        assert_eq!(message("a ~ is failing; next probe in 12 s"), "a ~ is failing; next probe in 12 s");
        assert_eq!(message("100% ü\n"), "100%25 %C3%BC%0A");
    }
}
