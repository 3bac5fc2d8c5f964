//! The `RateLimit` fields of a refusal for want of a token (draft-ietf-httpapi-ratelimit-headers, since
//! its version 08: structured fields, one item for each limit).
//!
//! Only what hedgerow refuses itself carries them. The fields of an upstream's answers are the
//! upstream's word about its own limit, and a second opinion in them would be read as that.

use bytes::Bytes;
use http::header::{HeaderName, HeaderValue};
use tokio::time::Instant;

use super::headers::{RATELIMIT, RATELIMIT_POLICY};
use crate::config::RateLimit;

/// The largest integer of a structured field (RFC 8941 section 3.3.1).
const LARGEST: u64 = 999_999_999_999_999;

/// What the limit is, and that a token can be had at `retry_at`.
///
/// `RateLimit-Policy` has the burst as its quota and, as its window, the time in which as many tokens
/// come back. A window is whole seconds and at least one, so a fast limit looks slower than it is, never
/// faster. `RateLimit` has no quota left until the token comes, in a second at the soonest: 0 would
/// ask for another try at once.
pub fn fields(cfg: &RateLimit, retry_at: Instant, now: Instant) -> [(HeaderName, HeaderValue); 2] {
    let (quota, window) = (cfg.burst, window(cfg));
    let wait = retry_at.saturating_duration_since(now).as_nanos().div_ceil(1_000_000_000);
    let wait = u64::try_from(wait).unwrap_or(LARGEST).clamp(1, LARGEST);
    [
        (RATELIMIT_POLICY.clone(), value(format!("\"hedgerow\";q={quota};w={window}"))),
        (RATELIMIT.clone(), value(format!("\"hedgerow\";r=0;t={wait}"))),
    ]
}

fn window(cfg: &RateLimit) -> u64 {
    // `10/m` and the quotient are each off by a rounding, which must not make a minute 61 seconds.
    let exact = f64::from(cfg.burst) / cfg.rate.in_a_second() * (1.0 - 2.0 * f64::EPSILON);
    // The cast ends at the largest number, for a rate of zero as well.
    (exact.ceil() as u64).clamp(1, LARGEST)
}

fn value(text: String) -> HeaderValue {
    HeaderValue::from_maybe_shared(Bytes::from(text)).unwrap_or(HeaderValue::from_static("\"hedgerow\""))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::HeaderMap;

    use super::*;
    use crate::units::Rate;

    fn told(rate: &str, burst: u32, wait: Duration) -> (String, String) {
        let rate: Rate = rate.parse().unwrap();
        let cfg = RateLimit { rate, burst, max_pause: Duration::ZERO, is_shared: false };
        let now = Instant::now();
        let headers = HeaderMap::from_iter(fields(&cfg, now + wait, now));
        let text =
            |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok()).unwrap().to_owned();
        (text("ratelimit-policy"), text("ratelimit"))
    }

    #[test]
    fn the_fields_tell_the_burst_its_window_and_the_wait_in_whole_seconds() {
        for (rate, burst, millis, policy, left) in [
            ("200/s", 50, 5, "\"hedgerow\";q=50;w=1", "\"hedgerow\";r=0;t=1"),
            ("200/s", 500, 1_000, "\"hedgerow\";q=500;w=3", "\"hedgerow\";r=0;t=1"),
            ("10/m", 10, 6_001, "\"hedgerow\";q=10;w=60", "\"hedgerow\";r=0;t=7"),
            ("7/h", 7, 0, "\"hedgerow\";q=7;w=3600", "\"hedgerow\";r=0;t=1"),
            ("1/h", 1, 3_600_000, "\"hedgerow\";q=1;w=3600", "\"hedgerow\";r=0;t=3600"),
        ] {
            let expected = (policy.to_owned(), left.to_owned());
            assert_eq!(told(rate, burst, Duration::from_millis(millis)), expected, "{rate}, {burst}");
        }
    }

    #[test]
    fn no_rate_makes_a_number_that_a_structured_field_cannot_hold() {
        let (policy, left) = told("0/s", u32::MAX, Duration::from_secs(86_400 * 365));
        assert_eq!(policy, "\"hedgerow\";q=4294967295;w=999999999999999");
        assert_eq!(left, "\"hedgerow\";r=0;t=31536000");
    }
}
