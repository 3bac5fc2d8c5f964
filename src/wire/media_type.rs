//! What kind of content a message says it has.
//!
//! Type and subtype are case-insensitive, and parameters may follow (RFC 9110 section 8.3.1), so a
//! comparison with the whole field value is wrong in two ways. Every place that treats some content
//! in its own way asks here.

use http::header::{self, HeaderMap};

/// `type/subtype` of `Content-Type`, without parameters and as spelled: to be compared without regard
/// to case. Empty without the field.
pub fn of(headers: &HeaderMap) -> &[u8] {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return b"" };
    let value = value.as_bytes();
    let end = value.iter().position(|byte| *byte == b';').unwrap_or(value.len());
    value[..end].trim_ascii()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn parameters_are_no_part_of_the_type() {
        for (value, kind) in [
            ("text/event-stream", "text/event-stream"),
            ("Text/Event-Stream ; charset=utf-8", "Text/Event-Stream"),
            ("application/grpc;proto=x;y", "application/grpc"),
            ("", ""),
        ] {
            let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_static(value))]);
            assert_eq!(of(&headers), kind.as_bytes(), "{value:?}");
        }
        assert_eq!(of(&HeaderMap::new()), b"");
    }
}
