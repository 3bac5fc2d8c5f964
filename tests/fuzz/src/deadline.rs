//! What callers say about how long they will wait.

use std::sync::LazyLock;
use std::time::{Duration, UNIX_EPOCH};

use hedgerow::config;
use hedgerow::policy::deadline::{Arrival, Deadline};
use hedgerow::wire::deadline_header::{
    format_grpc_timeout, format_rfc3339_millis, parse_amz_ttl, parse_deadline, parse_grpc_timeout,
    parse_stainless_timeout,
};

use crate::Target;
use crate::fields::fields;

/// Each notation by itself, and header fields together: what is understood can be written and is read
/// back as no later, and no caller gets more time than the policy's most.
pub const DEADLINE: Target = Target {
    check,
    inputs: 40_000,
    seeds: &[
        "2026-11-29T10:00:30.250Z",
        "2026-11-29t15:30:30.250000000+05:30",
        "9999-12-31T23:59:59.999999999-23:59",
        "1970-01-01T00:00:00Z",
        "1796119230",
        "1796119230.25",
        "1796119230250",
        "99999999999",
        "18446744073709551615",
        "15S",
        "99999999H",
        "250m",
        "600.0",
        "0.1000000000000001",
        "ttl=20261129T100030Z; attempt=1; max=3",
        "x-request-deadline: 2027-01-15T08:00:30Z\ngrpc-timeout: 2S",
        "x-request-deadline: 1800000001\nx-request-deadline: 1800000001.0\nx-stainless-timeout: 600",
        "x-stainless-timeout: 18446744073709551615\ngrpc-timeout: 99999999H",
        "x-stainless-read-timeout: 2.5\namz-sdk-request: ttl=20270115T080003Z",
    ],
};

/// The last instant that RFC 3339 can write.
const LAST_SECOND: u64 = 253_402_300_799;

static POLICY: LazyLock<config::Deadline> = LazyLock::new(|| {
    let stages = &config::embedded().defaults.stages;
    stages.deadline.clone().expect("the embedded policy has deadlines")
});

fn check(data: &[u8]) {
    if let Ok(at) = parse_deadline(data) {
        let written = parse_deadline(format_rfc3339_millis(at).as_bytes());
        let written = written.expect("what is written can be read");
        let lost = at.duration_since(written).expect("writing rounds down");
        let is_far = at >= UNIX_EPOCH + Duration::from_secs(LAST_SECOND);
        assert!(lost < Duration::from_millis(1) || is_far, "writing lost {lost:?}");
    }
    if let Ok(timeout) = parse_grpc_timeout(data) {
        let written = parse_grpc_timeout(format_grpc_timeout(timeout).as_bytes());
        assert_eq!(written, Ok(timeout), "eight digits hold what eight digits said");
    }
    if let Some(timeout) = parse_stainless_timeout(data) {
        assert!(!timeout.is_zero(), "zero is no time to wait");
    }
    if let Some(at) = parse_amz_ttl(data) {
        let since = at.duration_since(UNIX_EPOCH).expect("not before the epoch");
        assert_eq!(since.subsec_nanos(), 0, "its notation has whole seconds");
    }
    check_together(data);
}

fn check_together(data: &[u8]) {
    let arrival = Arrival { wall: UNIX_EPOCH + Duration::from_secs(1_800_000_000), ..Arrival::now() };
    let Ok(Some(deadline)) = Deadline::of(Some(&*POLICY), &fields(data), arrival, None) else { return };
    assert!(deadline.at > arrival.now, "a deadline that has passed was let in");
    assert!(deadline.at <= arrival.now + POLICY.max, "more than the policy's most");
    let told = parse_deadline(deadline.told().as_bytes()).expect("the next hop can read it");
    assert!(told <= arrival.wall + POLICY.max, "the next hop is told more than the policy's most");
}
