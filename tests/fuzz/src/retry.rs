//! What fields of requests and answers say about retries.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hedgerow::wire::push_back::{LONGEST, exhausted, is_final, is_push_back, wait};
use hedgerow::wire::retry_mark::{X_HEDGEROW_ATTEMPT, is_retry, number};
use http::{HeaderMap, HeaderValue};

use crate::Target;
use crate::fields::fields;

/// Header fields: waits are bounded, a quota that is used up is filled later and not sooner as time goes by,
/// a message without these fields asks for nothing, and a retry is one for the next hop too.
pub const RETRY: Target = Target {
    check,
    inputs: 40_000,
    seeds: &[
        "retry-after: 90\nretry-after-ms: 1500.75\nx-should-retry: false",
        "retry-after: Fri, 15 Jan 2027 08:01:00 GMT\nretry-after: Fri, 15 Jan 2027 08:01:00 GMT",
        "retry-after: 1e400\nretry-after-ms: -1\nretry-after-ms: 99999999999999999999999999",
        "retry-after: Fri, 31 Dec 9999999 23:59:59 GMT",
        "grpc-retry-pushback-ms: 250\ngrpc-status: 14",
        "grpc-retry-pushback-ms: -1",
        "ratelimit: \"burst\";r=0;t=2, \"a,b;\\\"\";t=600;r=0;pk=:cHNkZg==:",
        "ratelimit: limit=100, remaining=0, reset=50\nratelimit: \"x\";r=0;t=1",
        "ratelimit-remaining: 0\nratelimit-reset: 30",
        "x-ratelimit-remaining: 0, 14523\nx-ratelimit-reset: 1, 1419704",
        "x-ratelimit-remaining: 0\nx-ratelimit-reset: 1800000060\nx-rate-limit-remaining: 0",
        "x-rate-limit-reset: 1800000060500\nx-rate-limit-remaining: 0",
        "x-ratelimit-remaining-requests: 0\nx-ratelimit-reset-requests: 6m0s",
        "x-ratelimit-remaining-tokens: 0\nx-ratelimit-reset-tokens: 1h2m59.56s20ms",
        "anthropic-ratelimit-requests-remaining: 0\nanthropic-ratelimit-requests-reset: 2027-01-15T08:01:00Z",
        "x-stainless-retry-count: 1\nx-envoy-attempt-count: 2\nx-retry-attempt: 1",
        "amz-sdk-request: ttl=20270115T080003Z; attempt=2; max=3\ngrpc-previous-rpc-attempts: 1",
        "x-hedgerow-attempt: 2\nx-hedgerow-attempt: 4294967295",
    ],
};

fn check(data: &[u8]) {
    let headers = fields(data);
    let now = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
    check_waits(&headers, now);
    check_silence(&headers, now);
    check_mark(&headers);
}

fn check_waits(headers: &HeaderMap, now: SystemTime) {
    assert!(wait(headers, now).is_none_or(|wait| wait <= LONGEST), "more than is believed");
    assert!(!is_final(headers) || is_push_back(headers), "a last word is a push-back");
    let until_filled = exhausted(headers, now);
    assert!(until_filled.is_none_or(|wait| !wait.is_zero() && wait <= LONGEST), "{until_filled:?}");
    let later = exhausted(headers, now + Duration::from_secs(7));
    assert!(later <= until_filled, "{until_filled:?} became {later:?} as time went by");
}

/// Without any of their fields there is nothing to be read.
fn check_silence(headers: &HeaderMap, now: SystemTime) {
    let says = |part: &str| headers.keys().any(|name| name.as_str().contains(part));
    if !says("retry") {
        assert!(wait(headers, now).is_none() && !is_push_back(headers));
    }
    if !says("ratelimit") && !says("rate-limit") {
        assert!(exhausted(headers, now).is_none());
    }
    if !says("retry") && !says("attempt") && !says("amz-sdk-request") {
        assert!(!is_retry(headers));
    }
}

fn check_mark(headers: &HeaderMap) {
    for own in [1, 2, 5] {
        let told = number(headers, own);
        assert!(own <= told && told <= 1000, "{own} became {told}");
        let mut next = headers.clone();
        next.insert(&X_HEDGEROW_ATTEMPT, HeaderValue::from(told));
        assert_eq!(is_retry(&next), is_retry(headers) || own > 1, "{own} became {told}");
        assert_eq!(number(&next, own), told, "the next hop would tell another number");
    }
}
