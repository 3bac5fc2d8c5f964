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

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn headers(kind: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_str(kind).unwrap())])
    }

    fn of(body: impl Into<Vec<u8>>, kind: &str) -> Content {
        Content::of(body.into(), false, &headers(kind))
    }

    /// The keys as they stand in the answer.
    fn shown(content: &Content, headers: &HeaderMap) -> String {
        let mut keys = Vec::new();
        content.write(headers, &mut keys);
        format!("{{{}}}", std::str::from_utf8(&keys[1..]).unwrap())
    }

    #[test]
    fn the_type_says_what_a_body_is_and_the_body_whether_that_can_be() {
        for (body, kind, expected) in [
            (&b"{}"[..], "application/json", "json"),
            (b" [1]\n", "APPLICATION/JSON;charset=utf-8", "json"),
            (b"{}", "application/vnd.api+json", "json"),
            (b"{", "application/json", "text"),
            (b"{\"a\":1}{}", "application/json", "text"),
            (b"\xef\xbb\xbf{}", "application/json", "text"),
            (b"\xff", "application/json", "binary"),
            (b"{}", "text/plain", "text"),
            (b"<a/>", "application/atom+xml", "text"),
            (b"a=b", "application/x-www-form-urlencoded", "text"),
            (b"{}\n{}", "application/x-ndjson", "text"),
            (b"a", "", "text"),
            (b"\x80", "", "binary"),
            (b"\x80", "text/plain", "binary"),
            (b"%PDF", "application/pdf", "binary"),
            (b"a", "application/octet-stream", "binary"),
            (b"", "application/pdf", "empty"),
        ] {
            let content = of(body, kind);
            let found = match content {
                Content::Empty => "empty",
                Content::Json(_) => "json",
                Content::Text(_) => "text",
                Content::Binary(_) => "binary",
            };
            assert_eq!(found, expected, "{body:?} as {kind}");
            assert_eq!(content.is_empty(), body.is_empty());
            assert!(content.len() >= body.trim_ascii().len(), "{content:?}");
        }
        let mut coded = headers("application/json");
        coded.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        assert!(matches!(Content::of(b"{}".to_vec(), false, &coded), Content::Binary(_)));
        coded.insert(header::CONTENT_ENCODING, HeaderValue::from_static("identity"));
        assert!(matches!(Content::of(b"{}".to_vec(), false, &coded), Content::Json(_)));
    }

    #[test]
    fn each_kind_has_its_own_keys() {
        for (body, kind, expected) in [
            (
                &b"[1e300,\n 12345678901234567890123]"[..],
                "application/json",
                r#"{"body":[1e300, 12345678901234567890123]}"#,
            ),
            (b"a\n", "text/plain", r#"{"body":"a\n"}"#),
            (b"", "text/plain", r#"{"body":null}"#),
            (b"\xff\x00", "image/png", r#"{"content_type":"image/png","body_base64":"/wA="}"#),
        ] {
            assert_eq!(shown(&of(body, kind), &headers(kind)), expected);
        }
        let unknown = Content::of(b"\xff".to_vec(), false, &HeaderMap::new());
        assert_eq!(shown(&unknown, &HeaderMap::new()), r#"{"content_type":null,"body_base64":"/w=="}"#);
    }

    #[test]
    fn json_that_is_too_deep_for_many_readers_is_text() {
        let nested = |depth: usize| format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
        assert!(matches!(of(nested(100), "application/json"), Content::Json(_)));
        for depth in [101, 100_000] {
            assert!(matches!(of(nested(depth), "application/json"), Content::Text(_)), "{depth}");
        }
        assert!(!is_too_deep(&format!("[{:?}, {:?}]", "[".repeat(1000), "\\\"{".repeat(1000))));
        assert!(!is_too_deep(&"[]".repeat(1000)));
        assert!(!is_too_deep(&"]".repeat(1000)));
    }

    /// The answer is one JSON text: what one reader of it refuses would cost it all of the others' results.
    #[test]
    fn json_that_not_every_reader_takes_is_text() {
        for body in ["1e400", "[-1e999]", "\"\\ud83d\"", "{\"\\udc00\":1}", "\"\\ud83dx\""] {
            assert_eq!(of(body, "application/json"), Content::Text(body.to_owned()));
        }
        for body in ["1e308", "\"\\ud83d\\ude00\"", "{\"a\":1,\"a\":2}", "-0.0"] {
            assert_eq!(of(body, "application/json"), Content::Json(body.to_owned()));
        }
    }

    /// JSON whose numbers a reader keeps, so that two texts can be compared.
    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
            Just(json!("\n\r\"\\\u{2028}")),
        ];
        leaf.prop_recursive(5, 64, 6, |inner| {
            let key = prop_oneof![any::<String>(), Just("\r\n".to_owned())];
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::vec((key, inner), 0..6)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_json_comes_back_equal_and_in_one_line(value in value(), is_pretty: bool, ends in "[ \t\r\n]{0,3}") {
            let text = if is_pretty { format!("{value:#}") } else { value.to_string() };
            let body = format!("{ends}{}{ends}", text.replace('\n', &format!("\n{ends}")));
            let content = of(body, "application/json");
            let Content::Json(json) = &content else { return Err(TestCaseError::fail(format!("{content:?}"))) };
            prop_assert!(!json.contains(['\n', '\r']), "{}", json);
            prop_assert_eq!(serde_json::from_str::<Value>(json).unwrap(), value.clone());
            let shown = shown(&content, &HeaderMap::new());
            prop_assert!(!shown.contains(['\n', '\r']));
            prop_assert_eq!(serde_json::from_str::<Value>(&shown).unwrap(), json!({ "body": value }));
        }

        #[test]
        fn no_body_is_lost_whatever_it_says_it_is(
            body in prop::collection::vec(any::<u8>(), 0..64),
            kind in prop::sample::select(vec!["", "text/plain", "application/json", "image/png"]),
        ) {
            let headers = headers(kind);
            let content = Content::of(body.clone(), false, &headers);
            let shown: Value = serde_json::from_str(&shown(&content, &headers)).unwrap();
            match content {
                Content::Empty => prop_assert!(body.is_empty()),
                Content::Json(_) => {
                    prop_assert_eq!(&shown["body"], &serde_json::from_slice::<Value>(&body).unwrap());
                }
                Content::Text(_) => prop_assert_eq!(shown["body"].as_str().unwrap().as_bytes(), &*body),
                Content::Binary(_) => {
                    prop_assert_eq!(STANDARD.decode(shown["body_base64"].as_str().unwrap()).unwrap(), body);
                }
            }
        }

        #[test]
        fn text_that_is_cut_ends_with_a_whole_character(text in "[a-z\u{e4}\u{4ef7}\u{1f600}]{1,12}", cut in 0_usize..48) {
            let cut = cut.min(text.len());
            let whole = (0..=cut).rev().find(|at| text.is_char_boundary(*at)).unwrap();
            let content = Content::of(text.as_bytes()[..cut].to_vec(), true, &headers("text/plain"));
            match content {
                Content::Empty => prop_assert_eq!(cut, 0),
                Content::Text(shown) => prop_assert_eq!(shown, &text[..whole]),
                other => return Err(TestCaseError::fail(format!("{other:?}"))),
            }
        }
    }
}
