//! The directives of `Cache-Control` (RFC 9111 section 5.2).

use http::HeaderMap;
use http::header;

/// Whether a directive stands there, with or without an argument.
pub fn has(headers: &HeaderMap, directive: &str) -> bool {
    let values = headers.get_all(header::CACHE_CONTROL).iter();
    values.flat_map(|value| value.as_bytes().split(|b| *b == b',')).any(|part| {
        let name = part.split(|b| *b == b'=').next().unwrap_or_default();
        name.trim_ascii().eq_ignore_ascii_case(directive.as_bytes())
    })
}
