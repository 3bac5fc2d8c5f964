//! Where a message ends.

use hedgerow::wire::framing::{check_request, check_response};
use http::HeaderMap;

use crate::Target;
use crate::fields::fields;

/// Header fields: a message is taken exactly if it says in one way where it ends.
pub const FRAMING: Target = Target {
    check,
    inputs: 40_000,
    seeds: &[
        "content-length: 5",
        "content-length: 5\nContent-Length: 5",
        "content-length: 5\ncontent-length: 05",
        "content-length: +5",
        "content-length: 5, 5",
        "content-length:",
        "transfer-encoding: chunked",
        "transfer-encoding: Chunked\ntransfer-encoding: identity",
        "transfer-encoding: gzip, chunked\ncontent-length: 0",
        "transfer-encoding: chunked \ncontent-length: 18446744073709551616",
    ],
};

fn check(data: &[u8]) {
    let headers = fields(data);
    let expected = has_one_end(&headers);
    assert_eq!(check_request(&headers).is_ok(), expected, "request {headers:?}");
    assert_eq!(check_response(&headers).is_ok(), expected, "answer {headers:?}");
}

/// RFC 9112 section 6, as a reader would say it.
fn has_one_end(headers: &HeaderMap) -> bool {
    let all = |name| headers.get_all(name).iter().map(|value| value.as_bytes()).collect::<Vec<_>>();
    let (codings, lengths) = (all("transfer-encoding"), all("content-length"));
    match (codings.as_slice(), lengths.as_slice()) {
        ([], []) => true,
        ([coding], []) => coding.eq_ignore_ascii_case(b"chunked"),
        ([], [first, rest @ ..]) => {
            let is_number = !first.is_empty() && first.iter().all(u8::is_ascii_digit);
            is_number && rest.iter().all(|length| length == first)
        }
        _ => false,
    }
}
