//! The proof that a server has understood a WebSocket's handshake (RFC 6455 section 4.1). HTTP/2 has none of
//! it (RFC 8441 section 5), so whoever turns its CONNECT into an upgrade asks for it and looks at it.

use http::header::{HeaderMap, HeaderName, HeaderValue};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};

/// What asks for the proof.
pub static SEC_WEBSOCKET_KEY: HeaderName = HeaderName::from_static("sec-websocket-key");
/// The proof.
pub static SEC_WEBSOCKET_ACCEPT: HeaderName = HeaderName::from_static("sec-websocket-accept");

/// What makes a digest of the key one that nobody but a WebSocket server would send.
const GUID: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// The key of one handshake.
pub struct WebSocketKey(String);

impl WebSocketKey {
    /// Sixteen random bytes, which say no more than that this is a new handshake.
    pub fn random() -> Self {
        Self(base64(&fastrand::u128(..).to_be_bytes()))
    }

    /// The field's value.
    pub fn to_value(&self) -> HeaderValue {
        HeaderValue::from_str(&self.0).expect("base64 has no characters that a field has not")
    }

    /// Whether the fields of a 101 prove that this key was read.
    pub fn is_accepted_by(&self, headers: &HeaderMap) -> bool {
        let proof =
            base64(digest(&SHA1_FOR_LEGACY_USE_ONLY, format!("{}{GUID}", self.0).as_bytes()).as_ref());
        headers.get(&SEC_WEBSOCKET_ACCEPT).is_some_and(|accept| accept == proof.as_str())
    }
}

/// RFC 4648 section 4.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = (0..3).fold(0, |bits, i| bits << 8 | usize::from(group.get(i).copied().unwrap_or(0)));
        for i in 0..4 {
            text.push(if i > group.len() { '=' } else { DIGITS[bits >> (18 - 6 * i) & 63].into() });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_as_rfc_4648_section_10_has_them() {
        for (bytes, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }

    #[test]
    fn only_the_digest_of_the_key_accepts_it() {
        // The example of RFC 6455 section 1.3.
        let key = WebSocketKey("dGhlIHNhbXBsZSBub25jZQ==".into());
        let mut headers = HeaderMap::new();
        assert!(!key.is_accepted_by(&headers));
        headers.insert(&SEC_WEBSOCKET_ACCEPT, HeaderValue::from_static("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
        assert!(key.is_accepted_by(&headers));
        assert!(!WebSocketKey::random().is_accepted_by(&headers));
        assert_eq!(WebSocketKey::random().to_value().len(), 24);
    }
}
