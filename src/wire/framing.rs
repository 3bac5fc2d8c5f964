//! Message framing that the HTTP library reads one way and another reader could read in another.
//!
//! A proxy that passes such a message on makes two parsers disagree about where it ends: that is
//! request smuggling (RFC 9112 section 11.2). So a request is refused, and of a response only what
//! has one meaning goes on.

use http::header::{self, HeaderMap};

/// # Errors
/// What is wrong with the framing of a request (RFC 9112 section 6).
pub fn check_request(headers: &HeaderMap) -> Result<(), &'static str> {
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    if let Some(coding) = codings.next() {
        if codings.next().is_some() || !coding.as_bytes().eq_ignore_ascii_case(b"chunked") {
            return Err("Transfer-Encoding must be exactly one chunked");
        }
        if headers.contains_key(header::CONTENT_LENGTH) {
            return Err("Transfer-Encoding and Content-Length exclude each other");
        }
    }
    check_one_length(headers)
}

/// # Errors
/// What is wrong with the framing of a response (RFC 9112 section 6.3).
pub fn check_response(headers: &HeaderMap) -> Result<(), &'static str> {
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    if let Some(coding) = codings.next() {
        if codings.next().is_some() || !coding.as_bytes().eq_ignore_ascii_case(b"chunked") {
            return Err("a transfer coding other than one chunked");
        }
        if headers.contains_key(header::CONTENT_LENGTH) {
            return Err("both Transfer-Encoding and Content-Length");
        }
    }
    check_one_length(headers)
}

fn check_one_length(headers: &HeaderMap) -> Result<(), &'static str> {
    let mut lengths = headers.get_all(header::CONTENT_LENGTH).iter();
    let Some(length) = lengths.next() else { return Ok(()) };
    if lengths.any(|other| other != length) {
        return Err("Content-Length fields that differ");
    }
    let digits = length.as_bytes();
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return Err("Content-Length is no plain number");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    fn check(fields: &[(&'static str, &'static str)]) -> Result<(), &'static str> {
        let headers: HeaderMap = fields
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect();
        check_request(&headers)
    }

    #[test]
    fn only_one_meaning_is_taken() {
        assert_eq!(check(&[("transfer-encoding", "Chunked")]), Ok(()));
        assert_eq!(check(&[("content-length", "5")]), Ok(()));
        assert_eq!(check(&[]), Ok(()));
        for fields in [
            &[("transfer-encoding", "chunked, chunked")][..],
            &[("transfer-encoding", "gzip, chunked")],
            &[("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")],
            &[("transfer-encoding", "chunked"), ("content-length", "5")],
            &[("content-length", "5"), ("content-length", "6")],
            &[("content-length", "+5")],
            &[("content-length", "5, 5")],
            &[("content-length", "")],
        ] {
            assert!(check(fields).is_err(), "{fields:?} was taken");
        }
    }
}
