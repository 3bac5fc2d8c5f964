//! What the first bytes in a tunnel are: TLS, HTTP in clear text, or something that only passes.
//!
//! undici, Node's fetch, ureq and WebSocket libraries open a tunnel even for `http://`; without a
//! look at the bytes their calls would miss every policy.

/// What a client begins to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sniff {
    /// An HTTP/1 request.
    Http,
    /// Anything else, TLS included: bytes to pass on.
    Other,
    /// Too little to tell.
    Undecided,
}

const METHODS: [&[u8]; 8] =
    [b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"TRACE "];

/// Judges the first bytes of a tunnel.
pub fn sniff(bytes: &[u8]) -> Sniff {
    if bytes.is_empty() {
        return Sniff::Undecided;
    }
    let mut verdict = Sniff::Other;
    for method in METHODS {
        if bytes.starts_with(method) {
            return Sniff::Http;
        }
        if method.starts_with(bytes) {
            verdict = Sniff::Undecided;
        }
    }
    verdict
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_bytes_tell_http_from_all_else() {
        assert_eq!(sniff(b""), Sniff::Undecided);
        assert_eq!(sniff(b"PO"), Sniff::Undecided);
        assert_eq!(sniff(b"POST /v1 HTTP/1.1\r\n"), Sniff::Http);
        assert_eq!(sniff(b"\x16\x03\x01"), Sniff::Other);
        assert_eq!(sniff(b"PRI * HTTP/2.0"), Sniff::Other);
        assert_eq!(sniff(b"EHLO a.example\r\n"), Sniff::Other);
        assert_eq!(sniff(b"GETX"), Sniff::Other);
    }
}
