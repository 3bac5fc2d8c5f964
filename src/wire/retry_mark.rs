//! Which try of the layer above a request is.
//!
//! Layers that retry multiply: three of them with three tries each make twenty-seven requests of one, just
//! when the upstream can bear the least. Only one may do it, and those that say which try they are at can
//! be told apart from those that do not retry. Nobody agrees on the field, so each that is met in the wild
//! is read; ours is written, for the next hedgerow on the way.
//!
//! What is no number says nothing: such a field was not written by what it is named for.

use http::header::{HeaderMap, HeaderName, HeaderValue};

/// Which attempt of a call a request is, for the next hop: 1 is the first.
pub static X_HEDGEROW_ATTEMPT: HeaderName = HeaderName::from_static("x-hedgerow-attempt");

/// Which try it is and how long it may take, as AWS SDKs say it.
pub static AMZ_SDK_REQUEST: HeaderName = HeaderName::from_static("amz-sdk-request");

/// Fields that hold a number, and the least that makes the request a retry: some count the tries, the
/// present one included, others those that failed before.
static NUMBERS: [(HeaderName, u32); 4] = [
    // The SDKs of OpenAI and Anthropic.
    (HeaderName::from_static("x-stainless-retry-count"), 1),
    (HeaderName::from_static("x-envoy-attempt-count"), 2),
    // gRFC A6, "Exposed Retry Metadata".
    (HeaderName::from_static("grpc-previous-rpc-attempts"), 1),
    (HeaderName::from_static("x-retry-attempt"), 1),
];

/// The largest number that is taken over from a caller. No honest one has so many tries behind it.
const LARGEST: u32 = 1000;

/// Whether the request is itself a retry of the layer above, and so not retried here. One field that says
/// so is enough.
pub fn is_retry(headers: &HeaderMap) -> bool {
    let says = |name: &HeaderName, least: u32, read: fn(&HeaderValue) -> Option<u32>| {
        headers.get_all(name).iter().filter_map(read).any(|number| number >= least)
    };
    NUMBERS.iter().any(|(name, least)| says(name, *least, whole))
        || says(&X_HEDGEROW_ATTEMPT, 2, whole)
        || says(&AMZ_SDK_REQUEST, 2, amz_attempt)
}

/// The number that our next attempt carries in [`X_HEDGEROW_ATTEMPT`]: `own`, which is 1 for the first,
/// but never less than what the caller's field says. Else a retry would pass for a first try with the next
/// layer.
pub fn number(headers: &HeaderMap, own: u32) -> u32 {
    let said = headers.get_all(&X_HEDGEROW_ATTEMPT).iter().filter_map(whole).max();
    own.max(said.unwrap_or(1).min(LARGEST)).max(1)
}

fn whole(value: &HeaderValue) -> Option<u32> {
    digits(value.to_str().ok()?)
}

/// `attempt=2; max=3`, in any order and with others (AWS SDKs).
fn amz_attempt(value: &HeaderValue) -> Option<u32> {
    let parts = value.to_str().ok()?.split(';');
    digits(parts.filter_map(|part| part.trim().strip_prefix("attempt=")).next()?)
}

/// `u32::from_str` alone would take a leading `+`.
fn digits(text: &str) -> Option<u32> {
    let text = text.trim();
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fields<const N: usize>(fields: [(&'static str, &str); N]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(name, HeaderValue::from_str(value).unwrap());
        }
        headers
    }

    #[test]
    fn each_layer_counts_in_its_own_way() {
        for (name, first, second) in [
            ("x-stainless-retry-count", "0", "1"),
            ("x-envoy-attempt-count", "1", "2"),
            ("amz-sdk-request", "attempt=1", "attempt=2; max=3"),
            ("amz-sdk-request", "ttl=20261129T100030Z; attempt=1; max=3", "ttl=x;attempt=2;max=3"),
            ("grpc-previous-rpc-attempts", "0", "1"),
            ("x-retry-attempt", "0", "1"),
            ("x-hedgerow-attempt", "1", "2"),
        ] {
            assert!(!is_retry(&fields([(name, first)])), "{name}: {first}");
            assert!(is_retry(&fields([(name, second)])), "{name}: {second}");
            assert!(is_retry(&fields([(name, first), (name, second)])), "{name}: both");
        }
        assert!(!is_retry(&HeaderMap::new()));
    }

    #[test]
    fn garbage_is_no_retry() {
        for value in ["", "-1", "+2", "2.0", "0x2", "two", "1e3", "2, 3", "99999999999", "attempt=2"] {
            for name in NUMBERS.iter().map(|(name, _)| name).chain([&X_HEDGEROW_ATTEMPT]) {
                assert!(!is_retry(&fields([(name.as_str(), value)])), "{name}: {value:?}");
            }
        }
        for value in ["", "attempt=", "attempt=-2", "attempt", "max=3", "attempts=2", "2"] {
            assert!(!is_retry(&fields([("amz-sdk-request", value)])), "{value:?}");
        }
    }

    #[test]
    fn an_attempt_is_never_numbered_below_what_the_caller_says() {
        assert_eq!(number(&HeaderMap::new(), 1), 1);
        assert_eq!(number(&HeaderMap::new(), 3), 3);
        assert_eq!(number(&fields([("x-hedgerow-attempt", "2")]), 1), 2);
        assert_eq!(number(&fields([("x-hedgerow-attempt", "2")]), 4), 4);
        assert_eq!(number(&fields([("x-hedgerow-attempt", "4294967295")]), 1), LARGEST);
        assert_eq!(number(&fields([("x-hedgerow-attempt", "many")]), 1), 1);
        assert_eq!(number(&fields([("x-stainless-retry-count", "5")]), 1), 1);
    }

    proptest! {
        #[test]
        fn the_next_layer_sees_a_retry_where_we_saw_one_or_made_one(said in "[0-9]{0,12}", own in 1_u32..9) {
            let headers = fields([("x-hedgerow-attempt", said.as_str())]);
            let told = number(&headers, own).to_string();
            let next = fields([("x-hedgerow-attempt", told.as_str())]);
            prop_assert_eq!(is_retry(&next), is_retry(&headers) || own >= 2);
        }
    }
}
