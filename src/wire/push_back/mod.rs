//! What an answer's fields say about the next request: how long to wait for it, and whether there
//! should be one.
//!
//! The same wish has many spellings. HTTP has `Retry-After` (RFC 9110 section 10.2.3), which counts in
//! whole seconds, so the providers of models added `retry-after-ms` and, for "never", `x-should-retry`;
//! gRPC has one field for both (gRFC A6). The quotas that an upstream counts are a larger family and
//! have [`exhausted`].
//!
//! What cannot be read says nothing, as if the field were not there: a client that took `-1` or the year
//! 9999999 at its word has hung or crashed over it. But whatever is a number has its meaning, however
//! large: ten thousand years are capped, not ignored, or the upstream that asks for the longest rest
//! would get none. Gentle on the other side too: `Retry-After: 1.5` is outside the grammar, but there are
//! servers that send it and SDKs that read it, and ignoring it means coming back too soon.
//!
//! The fields may stand in a head or, as gRPC's do, in trailers. Everything here is a pure function of
//! them and of the time; what is made of it is policy.

mod quota;

use std::time::{Duration, SystemTime};

use http::header::{self, HeaderMap, HeaderName};

use super::grpc::GRPC_PUSHBACK;

pub use self::quota::exhausted;

/// `false` tells the OpenAI and Anthropic SDKs, and us, not to try again.
pub static X_SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

static RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// The longest wait that is believed; more than that becomes this.
pub const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// How long until the next request may come, at most [`LONGEST`]. The finest field counts: first
/// `retry-after-ms`, then `Retry-After` (seconds or a date), then `grpc-retry-pushback-ms`. `None` where
/// none of them can be used; several values that differ cannot, nor can a date that has passed.
pub fn wait(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let millis = || decimal(only(headers, &RETRY_AFTER_MS)?).map(millis);
    let seconds_or_date = || retry_after(only(headers, &header::RETRY_AFTER)?, now);
    let pushback = || grpc_pushback(only(headers, &GRPC_PUSHBACK)?);
    millis().or_else(seconds_or_date).or_else(pushback)
}

/// Whether the answer asks for no further attempt of this call: `x-should-retry: false`, or a
/// `grpc-retry-pushback-ms` that is negative or no number, which gRPC gives the same meaning (gRFC A6,
/// "Pushback").
pub fn is_final(headers: &HeaderMap) -> bool {
    let is_final_in_grpc = || {
        headers.contains_key(&GRPC_PUSHBACK)
            && only(headers, &GRPC_PUSHBACK).and_then(grpc_pushback).is_none()
    };
    headers.get_all(&X_SHOULD_RETRY).iter().any(|value| value == "false") || is_final_in_grpc()
}

/// Whether the upstream asks for less: a further attempt now, such as a hedge, would be against its
/// wish. `Retry-After` says so by being there, whatever its value.
pub fn is_push_back(headers: &HeaderMap) -> bool {
    headers.contains_key(header::RETRY_AFTER) || is_final(headers)
}

fn retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    match decimal(value) {
        Some(number) => Some(seconds(number)),
        None => Some(httpdate::parse_http_date(value).ok()?.duration_since(now).ok()?.min(LONGEST)),
    }
}

/// Whole milliseconds; `None` asks for no retry.
fn grpc_pushback(value: &str) -> Option<Duration> {
    if value.contains('.') { None } else { decimal(value).map(millis) }
}

/// The value of a field that can have but one: `None` without it, and where it comes with several that
/// differ or with bytes that are not ASCII.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let first = values.next()?;
    if values.any(|other| other != first) { None } else { first.to_str().ok().map(str::trim) }
}

/// Digits, or digits, a point and digits: no sign, no exponent, no `inf`. Infinite where there are too
/// many of them.
fn decimal(text: &str) -> Option<f64> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let has_ends = !text.starts_with('.') && !text.ends_with('.');
    if is_plain && has_ends { text.parse().ok() } else { None }
}

fn seconds(number: f64) -> Duration {
    Duration::try_from_secs_f64(number).unwrap_or(LONGEST).min(LONGEST)
}

fn millis(number: f64) -> Duration {
    seconds(number / 1e3)
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    /// Sun, 29 Nov 2026 10:00:30 GMT.
    pub(super) fn now() -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(1_795_946_430)
    }

    pub(super) fn fields<'a>(fields: impl IntoIterator<Item = (&'static str, &'a str)>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(name, HeaderValue::from_str(value).unwrap());
        }
        headers
    }

    fn wait_ms(lines: &[(&'static str, &str)]) -> Option<u128> {
        wait(&fields(lines.iter().copied()), now()).map(|wait| wait.as_millis())
    }

    #[test]
    fn every_spelling_of_a_wait_is_read() {
        for (name, value, millis) in [
            ("retry-after", "3", 3_000),
            ("retry-after", "0", 0),
            ("retry-after", "1.5", 1_500),
            ("retry-after", "Sun, 29 Nov 2026 10:02:00 GMT", 90_000),
            ("retry-after", "Sunday, 29-Nov-26 10:02:00 GMT", 90_000),
            ("retry-after", "Sun Nov 29 10:02:00 2026", 90_000),
            ("retry-after-ms", "50", 50),
            ("retry-after-ms", "1500.75", 1_500),
            ("grpc-retry-pushback-ms", "250", 250),
            ("grpc-retry-pushback-ms", "0", 0),
        ] {
            assert_eq!(wait_ms(&[(name, value)]), Some(millis), "{name}: {value}");
        }
    }

    #[test]
    fn the_finest_field_that_can_be_used_counts() {
        let (millis, seconds) = (("retry-after-ms", "1200"), ("retry-after", "2"));
        let pushback = ("grpc-retry-pushback-ms", "700");
        assert_eq!(wait_ms(&[pushback, seconds, millis]), Some(1_200));
        assert_eq!(wait_ms(&[pushback, seconds, ("retry-after-ms", "soon")]), Some(2_000));
        assert_eq!(wait_ms(&[pushback, ("retry-after", "-1")]), Some(700));
    }

    #[test]
    fn c063_a_wait_is_never_read_shorter_than_told() {
        assert_eq!(wait_ms(&[("retry-after", "90")]), Some(90_000));
        for long in ["86400", "86401", "4294967296", "99999999999999999999999", &"9".repeat(400)] {
            assert_eq!(wait_ms(&[("retry-after", long)]), Some(LONGEST.as_millis()), "{long}");
            assert_eq!(wait_ms(&[("retry-after-ms", &format!("{long}000"))]), Some(LONGEST.as_millis()));
        }
        let far = "Fri, 31 Dec 9999 23:59:59 GMT";
        assert_eq!(wait_ms(&[("retry-after", far)]), Some(LONGEST.as_millis()));
    }

    #[test]
    fn c064_what_cannot_be_used_says_nothing() {
        for value in [
            "",
            "abc",
            "-1",
            "+1",
            "1e400",
            "1e3",
            "inf",
            "NaN",
            "0x10",
            ".5",
            "5.",
            ".",
            "1.2.3",
            "1, 2",
            "1;2",
            "3 s",
            "3s",
            "Fri, 31 Dec 9999999 23:59:59 GMT",
            "9999999-12-31T23:59:59Z",
            "Sun, 29 Nov 2026 10:00:29 GMT",
            "Sun, 29 Nov 2026 25:00:00 GMT",
            "Thu, 01 Jan 1970 00:00:00 GMT",
            "Sun, 29 Nov 2026 10:02:00 CET",
        ] {
            for name in ["retry-after", "retry-after-ms", "grpc-retry-pushback-ms"] {
                assert_eq!(wait_ms(&[(name, value)]), None, "{name}: {value:?}");
            }
        }
        let mut odd = HeaderMap::new();
        odd.insert(header::RETRY_AFTER, HeaderValue::from_bytes(b"\xd9\xa3").unwrap());
        assert_eq!(wait(&odd, now()), None);
    }

    #[test]
    fn of_several_values_only_equal_ones_are_believed() {
        assert_eq!(wait_ms(&[("retry-after", "3"), ("retry-after", "3")]), Some(3_000));
        assert_eq!(wait_ms(&[("retry-after", "3"), ("retry-after", "4")]), None);
    }

    #[test]
    fn an_answer_can_ask_for_no_other_attempt() {
        for (name, value, expected) in [
            ("x-should-retry", "false", true),
            ("x-should-retry", "true", false),
            ("x-should-retry", "", false),
            ("grpc-retry-pushback-ms", "-1", true),
            ("grpc-retry-pushback-ms", "soon", true),
            ("grpc-retry-pushback-ms", "1.5", true),
            ("grpc-retry-pushback-ms", "", true),
            ("grpc-retry-pushback-ms", "0", false),
            ("grpc-retry-pushback-ms", "250", false),
            ("retry-after", "-1", false),
            ("retry-after-ms", "-1", false),
        ] {
            assert_eq!(is_final(&fields([(name, value)])), expected, "{name}: {value:?}");
        }
        assert!(!is_final(&HeaderMap::new()));
    }

    #[test]
    fn any_retry_after_is_a_push_back_and_so_is_a_last_word() {
        for (name, value, expected) in [
            ("retry-after", "1", true),
            ("retry-after", "abc", true),
            ("x-should-retry", "false", true),
            ("x-should-retry", "true", false),
            ("grpc-retry-pushback-ms", "-1", true),
            ("grpc-retry-pushback-ms", "250", false),
        ] {
            assert_eq!(is_push_back(&fields([(name, value)])), expected, "{name}: {value:?}");
        }
        assert!(!is_push_back(&HeaderMap::new()));
    }

    proptest! {
        #[test]
        fn no_value_makes_a_wait_that_is_not_believed(
            name in prop_oneof![Just("retry-after"), Just("retry-after-ms"), Just("grpc-retry-pushback-ms")],
            value in prop_oneof!["[ -~]{0,40}", "-?[0-9]{0,30}(\\.[0-9]{0,30})?(e[0-9]{1,3})?"],
        ) {
            let headers = fields([(name, value.as_str())]);
            if let Some(wait) = wait(&headers, now()) {
                prop_assert!(wait <= LONGEST);
                prop_assert!(!is_final(&headers));
            }
        }

        #[test]
        fn a_larger_number_is_never_a_shorter_wait(one in any::<u64>(), other in any::<u64>()) {
            let read = |number: u64| wait(&fields([("retry-after", number.to_string().as_str())]), now());
            prop_assert!(read(one.min(other)) <= read(one.max(other)));
            prop_assert_eq!(read(one), Some(Duration::from_secs(one).min(LONGEST)));
        }

        #[test]
        fn a_date_is_a_wait_until_then(ahead in 1_u64..200_000) {
            let at = httpdate::fmt_http_date(now() + Duration::from_secs(ahead));
            let expected = Duration::from_secs(ahead).min(LONGEST);
            prop_assert_eq!(wait(&fields([("retry-after", at.as_str())]), now()), Some(expected));
        }
    }
}
