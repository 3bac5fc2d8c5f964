//! The body of a result, in the form in which the answer holds it: JSON as JSON, text as text, anything else
//! in base64.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::{self, HeaderMap};
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::wire::media_type;

/// Deeper JSON is shown as text. Readers give up at some depth, Rust's at 128, and a result lies within the answer.
const DEEPEST: u32 = 100;

/// A body as the answer shows it.
#[derive(Debug, PartialEq, Eq)]
pub enum Content {
    /// There is none.
    Empty,
    /// JSON in one line, and otherwise byte for byte: numbers of any length stay what they are.
    Json(String),
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
        if !is_json(&kind) || is_truncated || !is_sound(&text) {
            return Self::Text(text);
        }
        // Line ends stand between tokens only, and a stream of events has none to spare.
        match text.contains(['\n', '\r']) {
            true => Self::Json(text.replace(['\n', '\r'], "")),
            false => Self::Json(text),
        }
    }

    /// Writes the keys that show it, behind others of an object.
    pub fn write(&self, headers: &HeaderMap, out: &mut Vec<u8>) {
        match self {
            Self::Empty => out.extend_from_slice(b",\"body\":null"),
            Self::Json(json) => {
                out.extend_from_slice(b",\"body\":");
                out.extend_from_slice(json.as_bytes());
            }
            Self::Text(text) => {
                out.extend_from_slice(b",\"body\":");
                write_json(out, text);
            }
            Self::Binary(bytes) => {
                let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
                out.extend_from_slice(b",\"content_type\":");
                write_json(out, &kind);
                out.extend_from_slice(b",\"body_base64\":\"");
                let start = out.len();
                out.resize(start + bytes.len().div_ceil(3) * 4, b'=');
                // The place is as long as the text.
                let _ = STANDARD.encode_slice(bytes, &mut out[start..]);
                out.push(b'"');
            }
        }
    }

    /// Bytes that it holds.
    pub fn len(&self) -> usize {
        match self {
            Self::Empty => 0,
            Self::Json(text) | Self::Text(text) => text.len(),
            Self::Binary(bytes) => bytes.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Empty)
    }
}

/// Writes what always serialises: texts and numbers.
pub fn write_json(out: &mut Vec<u8>, value: &(impl serde::Serialize + ?Sized)) {
    let _ = serde_json::to_writer(out, value);
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

/// Whether this is JSON that any reader takes, wherever it stands: one tool's body must not make all of the answer
/// unreadable. So no half characters (`"\ud800"`), no numbers beyond a double, and no great depth.
fn is_sound(json: &str) -> bool {
    let mut reader = serde_json::Deserializer::from_str(json);
    Sound { depth: DEEPEST }.deserialize(&mut reader).is_ok() && reader.end().is_ok()
}

/// Whether JSON is nested more deeply than most readers take.
pub fn is_too_deep(json: &str) -> bool {
    let (mut depth, mut is_string, mut is_escaped) = (0_u32, false, false);
    json.bytes().any(|byte| {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_string => is_escaped = true,
            b'"' => is_string = !is_string,
            b'[' | b'{' if !is_string => depth += 1,
            b']' | b'}' if !is_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth > DEEPEST
    })
}

/// Reads a value of at most this depth, and keeps nothing of it.
#[derive(Clone, Copy)]
struct Sound {
    depth: u32,
}

impl Sound {
    fn deeper<E: serde::de::Error>(self) -> Result<Self, E> {
        let depth = self.depth.checked_sub(1).ok_or_else(|| E::custom("too deep"))?;
        Ok(Self { depth })
    }
}

impl<'de> DeserializeSeed<'de> for Sound {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Sound {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let within = self.deeper()?;
        while items.next_element_seed(within)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        let within = self.deeper()?;
        while entries.next_key_seed(within)?.is_some() {
            entries.next_value_seed(within)?;
        }
        Ok(())
    }
}
