//! What the first bytes in a tunnel are: TLS, HTTP in clear text, or something that only passes.
//!
//! undici, Node's fetch, ureq and WebSocket libraries open a tunnel even for `http://`; without a
//! look at the bytes their calls would miss every policy.

/// What a client begins to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sniff {
    /// A request, of HTTP/1 or of HTTP/2 by prior knowledge.
    Http,
    /// A TLS handshake.
    Tls,
    /// Anything else: bytes to pass on.
    Other,
    /// Too little to tell.
    Undecided,
}

/// What an HTTP/2 client says first (RFC 9113 section 3.4), as far as no HTTP/1 client does.
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n";

/// Methods, and what stands in their place in HTTP/2.
const BEGINNINGS: [&[u8]; 9] =
    [b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"TRACE ", PREFACE];
/// A TLS record that holds a handshake, of any version since 3.0 (RFC 8446 section 5.1).
const HANDSHAKE_RECORD: [u8; 2] = [0x16, 0x03];

/// Bytes of a frame's head (RFC 9113 section 4.1).
pub const FRAME_HEAD: usize = 9;

/// Whether this is the head of the SETTINGS frame that begins what an HTTP/2 server says.
pub fn is_settings(head: [u8; FRAME_HEAD]) -> bool {
    const SETTINGS: u8 = 4;
    head[3..] == [SETTINGS, 0, 0, 0, 0, 0]
}

/// Judges the first bytes of a tunnel.
pub fn sniff(bytes: &[u8]) -> Sniff {
    if bytes.is_empty() {
        return Sniff::Undecided;
    }
    if bytes.starts_with(&HANDSHAKE_RECORD) {
        return Sniff::Tls;
    }
    let mut verdict = if HANDSHAKE_RECORD.starts_with(bytes) { Sniff::Undecided } else { Sniff::Other };
    for beginning in BEGINNINGS {
        if bytes.starts_with(beginning) {
            return Sniff::Http;
        }
        if beginning.starts_with(bytes) {
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
        assert_eq!(sniff(b"\x16"), Sniff::Undecided);
        assert_eq!(sniff(b"\x16\x03\x01"), Sniff::Tls);
        assert_eq!(sniff(b"\x16\x02"), Sniff::Other);
        assert_eq!(sniff(b"PRI * HTTP/2.0"), Sniff::Undecided);
        assert_eq!(sniff(b"PRI * HTTP/2.0\r\n\r\nSM"), Sniff::Http);
        assert_eq!(sniff(b"EHLO a.example\r\n"), Sniff::Other);
        assert_eq!(sniff(b"GETX"), Sniff::Other);
    }

    #[test]
    fn only_a_server_of_http2_begins_with_settings() {
        assert!(is_settings([0, 0, 18, 4, 0, 0, 0, 0, 0]));
        assert!(!is_settings([0, 0, 0, 4, 1, 0, 0, 0, 0]), "an acknowledgement");
        assert!(!is_settings(*b"220 mail."));
    }
}
