//! The body of a result, in the form in which the answer holds it: JSON as JSON, text as text, anything else
//! in base64.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::{self, HeaderMap};
use serde::ser::SerializeMap;
use serde_json::value::RawValue;

use crate::wire::media_type;

/// Deeper JSON is treated as text: many readers, Rust's and Python's among them, give up not far beyond.
const DEEPEST: usize = 128;

/// A body as the answer shows it.
#[derive(Debug)]
pub enum Content {
    /// There is none.
    Empty,
    /// In one line, and otherwise byte for byte: numbers of any size stay what they are.
    Json(Box<RawValue>),
    /// UTF-8.
    Text(String),
    /// Anything else.
    Binary(Vec<u8>),
}

impl Content {
    /// What `body` is, by its own `headers`. A part of JSON is no JSON.
    pub fn of(body: Vec<u8>, is_truncated: bool, headers: &HeaderMap) -> Self {
        if body.is_empty() {
            return Self::Empty;
        }
        let kind = media_type::of(headers).to_ascii_lowercase();
        let is_coded = headers.get(header::CONTENT_ENCODING).is_some_and(|coding| coding != "identity");
        if is_coded || !is_textual(&kind) {
            return Self::Binary(body);
        }
        let text = match String::from_utf8(body) {
            Ok(text) => text,
            // The cut may have gone through a character.
            Err(error) if is_truncated && error.utf8_error().error_len().is_none() => {
                let valid = error.utf8_error().valid_up_to();
                let mut body = error.into_bytes();
                body.truncate(valid);
                String::from_utf8(body).unwrap_or_default()
            }
            Err(error) => return Self::Binary(error.into_bytes()),
        };
        if is_json(&kind) && !is_truncated && !is_too_deep(&text) {
            return json(text);
        }
        Self::Text(text)
    }

    /// The keys that show it.
    pub fn serialize<M: SerializeMap>(&self, headers: &HeaderMap, map: &mut M) -> Result<(), M::Error> {
        match self {
            Self::Empty => map.serialize_entry("body", &()),
            Self::Json(json) => map.serialize_entry("body", json),
            Self::Text(text) => map.serialize_entry("body", text),
            Self::Binary(bytes) => {
                let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
                map.serialize_entry("content_type", &kind)?;
                map.serialize_entry("body_base64", &STANDARD.encode(bytes))
            }
        }
    }

    /// About how many bytes it takes in the answer.
    pub fn len(&self) -> usize {
        match self {
            Self::Empty => 0,
            Self::Json(json) => json.get().len(),
            Self::Text(text) => text.len(),
            Self::Binary(bytes) => bytes.len() * 4 / 3,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Empty)
    }
}

fn json(text: String) -> Content {
    match serde_json::from_str::<&RawValue>(&text) {
        Err(_) => Content::Text(text),
        Ok(json) if !json.get().contains(['\n', '\r']) => Content::Json(json.to_owned()),
        // Line ends stand between tokens only, and a stream of events has none to spare.
        Ok(json) => match RawValue::from_string(json.get().replace(['\n', '\r'], "")) {
            Ok(json) => Content::Json(json),
            Err(_) => Content::Text(text),
        },
    }
}

fn is_json(kind: &[u8]) -> bool {
    kind == b"application/json" || kind.ends_with(b"+json")
}

/// Whether content of this type may be text; what does not say what it is may be, too.
fn is_textual(kind: &[u8]) -> bool {
    kind.is_empty()
        || kind.starts_with(b"text/")
        || is_json(kind)
        || kind.ends_with(b"+xml")
        || matches!(
            kind,
            b"application/xml"
                | b"application/javascript"
                | b"application/x-www-form-urlencoded"
                | b"application/x-ndjson"
                | b"application/jsonl"
                | b"application/yaml"
                | b"application/graphql"
        )
}

/// Whether JSON is nested more deeply than many readers take.
pub fn is_too_deep(json: &str) -> bool {
    let (mut depth, mut is_string, mut is_escaped) = (0_usize, false, false);
    for byte in json.bytes() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_string => is_escaped = true,
            b'"' => is_string = !is_string,
            b'[' | b'{' if !is_string => depth += 1,
            b']' | b'}' if !is_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > DEEPEST {
            return true;
        }
    }
    false
}
