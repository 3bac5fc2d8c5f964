//! The fixed answer that stands in for one that could not be had, in words that a model can read.

use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http::header::{self, HeaderValue};
use serde::Serialize;

use super::error::TriedEntry;
use crate::call::Tried;
use crate::config::Degraded;

/// What the payload tells.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// The policy name of the upstream that failed.
    pub upstream: &'a str,
    /// The word of what went wrong there.
    pub error: &'static str,
    /// When it may be asked again, where that is known.
    pub wait: Option<Duration>,
    /// What was tried.
    pub tried: &'a [Tried],
}

/// The built-in payload.
#[derive(Serialize)]
struct BuiltIn<'a> {
    status: &'static str,
    message: String,
    error: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_ms: Option<u64>,
    tried: Vec<TriedEntry<'a>>,
}

/// The answer that `payload` describes. Names and numbers go into its placeholders, none of which needs to be
/// escaped in JSON.
pub fn response(payload: &Degraded, context: &Context<'_>) -> Response<Bytes> {
    let has_body = !matches!(payload.status.as_u16(), 204 | 205 | 304);
    let body = match &payload.body {
        _ if !has_body => Bytes::new(),
        None => built_in(context),
        Some(text) => fill(text, context).into(),
    };
    let mut response = Response::new(body);
    *response.status_mut() = payload.status;
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if has_body {
        headers.insert(header::CONTENT_TYPE, content_type(payload));
    }
    for (name, value) in &payload.headers {
        headers.insert(name.clone(), value.clone());
    }
    response
}

/// A payload that says nothing of its kind is JSON when it looks like it.
fn content_type(payload: &Degraded) -> HeaderValue {
    let is_json = payload.body.as_deref().is_none_or(|text| text.trim_start().starts_with(['{', '[', '"']));
    HeaderValue::from_static(if is_json { "application/json" } else { "text/plain; charset=utf-8" })
}

fn built_in(context: &Context<'_>) -> Bytes {
    let payload = BuiltIn {
        status: "degraded",
        message: format!("{} is temporarily unavailable", context.upstream),
        error: context.error,
        retry_after_ms: context.wait.map(millis),
        tried: TriedEntry::all(context.tried),
    };
    // Strings and numbers always serialise.
    serde_json::to_vec(&payload).unwrap_or_default().into()
}

/// A time that is not known is `null`.
fn fill(text: &str, context: &Context<'_>) -> String {
    let wait = context.wait.map_or_else(|| "null".to_owned(), |wait| millis(wait).to_string());
    text.replace("{error}", context.error)
        .replace("{upstream}", context.upstream)
        .replace("{retry_after_ms}", &wait)
}

fn millis(duration: Duration) -> u64 {
    duration.as_millis().try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::*;
    use crate::call::TriedEnd;

    fn respond(body: Option<&str>, wait: Option<Duration>) -> Response<Bytes> {
        let tried = [
            Tried { upstream: "quotes".into(), end: TriedEnd::Error("circuit_open") },
            Tried { upstream: "backup".into(), end: TriedEnd::Status(StatusCode::BAD_GATEWAY) },
        ];
        let payload = Degraded { status: StatusCode::OK, headers: Vec::new(), body: body.map(Into::into) };
        response(&payload, &Context { upstream: "quotes", error: "circuit_open", wait, tried: &tried })
    }

    #[test]
    fn the_built_in_payload_tells_what_happened() {
        let response = respond(None, Some(Duration::from_secs(12)));
        assert_eq!(response.headers()["content-type"], "application/json");
        let body: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
        let expected = serde_json::json!({
            "status": "degraded",
            "message": "quotes is temporarily unavailable",
            "error": "circuit_open",
            "retry_after_ms": 12_000,
            "tried": [
                { "upstream": "quotes", "error": "circuit_open" },
                { "upstream": "backup", "status": 502, "error": "upstream_status" },
            ],
        });
        assert_eq!(body, expected);
    }

    #[test]
    fn a_status_without_content_has_neither_body_nor_kind() {
        for status in [StatusCode::NO_CONTENT, StatusCode::RESET_CONTENT, StatusCode::NOT_MODIFIED] {
            let payload = Degraded { status, headers: Vec::new(), body: None };
            let context = Context { upstream: "quotes", error: "circuit_open", wait: None, tried: &[] };
            let response = response(&payload, &context);
            assert_eq!((response.status(), response.body().len()), (status, 0));
            assert!(!response.headers().contains_key("content-type"));
        }
    }

    #[test]
    fn an_own_payload_is_filled_in() {
        let text = r#"{"why":"{error}","who":"{upstream}","again":{retry_after_ms}}"#;
        let known = respond(Some(text), Some(Duration::from_millis(1500)));
        assert_eq!(*known.body(), r#"{"why":"circuit_open","who":"quotes","again":1500}"#);
        let unknown = respond(Some(text), None);
        assert_eq!(*unknown.body(), r#"{"why":"circuit_open","who":"quotes","again":null}"#);
        assert_eq!(
            respond(Some("sorry, no {upstream}"), None).headers()["content-type"],
            "text/plain; charset=utf-8"
        );
    }
}
