//! A quota that the upstream counts, where an answer says that it is used up.
//!
//! There is no standard yet, and four families are met in the wild:
//!
//! - `RateLimit: "default";r=0;t=30`, as the IETF's draft has it since its eighth version
//!   (draft-ietf-httpapi-ratelimit-headers), one member for each quota;
//! - `RateLimit: limit=100, remaining=0, reset=50`, the same draft's seventh;
//! - `RateLimit-Remaining: 0` with `RateLimit-Reset: 50`, its earlier ones;
//! - what everybody had before: `x-ratelimit-remaining` with `-reset`, by kind
//!   (`x-ratelimit-remaining-tokens`, `anthropic-ratelimit-requests-remaining`), or as lists of one place
//!   for each quota (`x-ratelimit-remaining: 0, 14523`).
//!
//! The last two have one rule here instead of a table of providers: a field that says what *remains* has a
//! sister that says when it is *reset*, of the same name but for that word. What stands in it is as varied:
//! seconds, Unix time in seconds or milliseconds, RFC 3339, `6m0s`. They can be told apart by their looks
//! and size; only seconds from milliseconds cannot, and nobody is known to send the latter without a unit.
//!
//! A library for structured fields was rejected: it builds maps of all members where two numbers are
//! wanted, and it has to refuse the whole field for one bad member.
//!
//! The fields come with good answers too, and every answer is looked at where rates are kept. So there is
//! one pass over the names, and nothing is allocated until a count has come to nought.

use std::time::{Duration, SystemTime};

use http::header::{AsHeaderName, HeaderMap, HeaderName};

use super::{decimal, seconds};
use crate::wire::deadline_header::parse_deadline;

/// What the names of the fields begin with, where they say what remains and when it is reset.
const FAMILIES: [&str; 4] = ["x-ratelimit-", "ratelimit-", "anthropic-ratelimit-", "x-rate-limit-"];

/// From here on a number is a point in time: as a wait it would be of thirty years, as Unix seconds it is
/// the year 2001.
const FIRST_UNIX_SECOND: f64 = 1e9;

/// When a quota that the upstream counts is used up: until it is filled again, at most
/// [`super::LONGEST`] and never zero. The longest of several that are used up. `None` where none is, and
/// where it is not said when it will be filled.
pub fn exhausted(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let until_filled = |name: &HeaderName| match name.as_str() {
        "ratelimit" => draft(headers),
        _ => sisters(headers, name, now),
    };
    headers.keys().filter_map(until_filled).filter(|wait| !wait.is_zero()).max()
}

/// The longest wait of the quotas that `remaining`, the name of a field, says to be used up. Places of
/// lists belong together; lists of different lengths do not.
fn sisters(headers: &HeaderMap, remaining: &HeaderName, now: SystemTime) -> Option<Duration> {
    let name = remaining.as_str();
    let kind = FAMILIES.iter().find_map(|family| name.strip_prefix(family))?;
    let is_count = kind.starts_with("remaining") || kind.ends_with("-remaining");
    if !is_count || !list(headers, remaining).any(is_nought) {
        return None;
    }
    let reset = name.replacen("remaining", "reset", 1);
    if list(headers, remaining).count() != list(headers, &*reset).count() {
        return None;
    }
    list(headers, remaining)
        .zip(list(headers, &*reset))
        .filter(|(count, _)| is_nought(count))
        .filter_map(|(_, reset)| until(reset, now))
        .max()
}

/// The members of all fields of a name, as one list (RFC 9110 section 5.3).
fn list<N: AsHeaderName>(headers: &HeaderMap, name: N) -> impl Iterator<Item = &str> + use<'_, N> {
    let values = headers.get_all(name).iter().map(|value| value.to_str().unwrap_or_default());
    values.flat_map(|value| value.split(',')).map(str::trim)
}

fn is_nought(count: &str) -> bool {
    count.starts_with('0') && decimal(count) == Some(0.0)
}

/// How long until `reset`, in any of the notations that are met.
fn until(reset: &str, now: SystemTime) -> Option<Duration> {
    if let Some(number) = decimal(reset).filter(|number| *number < FIRST_UNIX_SECOND) {
        return Some(seconds(number));
    }
    if let Some(number) = with_units(reset) {
        return Some(seconds(number));
    }
    let at = parse_deadline(reset.as_bytes()).ok()?;
    Some(at.duration_since(now).ok()?.min(super::LONGEST))
}

/// Seconds, out of `6m0s`, `7.66s` or `20ms`: as Go prints a duration.
fn with_units(mut text: &str) -> Option<f64> {
    let mut seconds = None;
    while !text.is_empty() {
        let (number, rest) = text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.')?);
        let (unit, rest) = rest.split_at(rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len()));
        let unit = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" => 1e-6,
            "ns" => 1e-9,
            _ => return None,
        };
        seconds = Some(seconds.unwrap_or(0.0) + decimal(number)? * unit);
        text = rest;
    }
    seconds
}

/// The field of the IETF's draft, in its present form (a list of quotas) and that of its seventh version
/// (one quota as a dictionary).
fn draft(headers: &HeaderMap) -> Option<Duration> {
    let (mut remaining, mut reset) = (None, None);
    let mut longest = None;
    let values = headers.get_all("ratelimit").iter().filter_map(|value| value.to_str().ok());
    for member in values.flat_map(|value| split(value, ',')) {
        match member.trim().split_once('=') {
            Some(("remaining", count)) => remaining = decimal(count),
            Some(("reset", wait)) => reset = decimal(wait),
            _ => longest = longest.max(of_member(member)),
        }
    }
    longest.max(wait_if_nought(remaining, reset))
}

/// `"default";r=0;t=30`: what remains and in how many seconds it is filled. Of a parameter that comes
/// twice the last counts (RFC 9651 section 4.2.3.2).
fn of_member(member: &str) -> Option<Duration> {
    let (mut remaining, mut reset) = (None, None);
    for parameter in split(member, ';').skip(1) {
        match parameter.trim().split_once('=') {
            Some(("r", count)) => remaining = decimal(count),
            Some(("t", wait)) => reset = decimal(wait),
            _ => {}
        }
    }
    wait_if_nought(remaining, reset)
}

fn wait_if_nought(remaining: Option<f64>, reset: Option<f64>) -> Option<Duration> {
    if remaining == Some(0.0) { reset.map(seconds) } else { None }
}

/// Splits at each separator that is outside a quoted string (RFC 9651 section 3.3.3).
fn split(text: &str, separator: char) -> impl Iterator<Item = &str> {
    let (mut is_quoted, mut is_escaped) = (false, false);
    text.split(move |c: char| {
        if std::mem::take(&mut is_escaped) {
            return false;
        }
        match c {
            '\\' => is_escaped = is_quoted,
            '"' => is_quoted = !is_quoted,
            _ => return c == separator && !is_quoted,
        }
        false
    })
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use proptest::prelude::*;

    use super::super::LONGEST;
    use super::super::tests::{fields, now};
    use super::*;

    fn millis(lines: &[(&'static str, &str)]) -> Option<u128> {
        exhausted(&fields(lines.iter().copied()), now()).map(|wait| wait.as_millis())
    }

    #[test]
    fn the_draft_is_read_in_its_present_form() {
        for (value, expected) in [
            (r#""default";r=0;t=30"#, Some(30_000)),
            (r#""default" ; r=0 ; t=30"#, Some(30_000)),
            (r#""default";t=30;r=0;pk=:cHNkZg==:"#, Some(30_000)),
            (r#""burst";r=0;t=2, "daily";r=0;t=600, "hourly";r=5;t=900"#, Some(600_000)),
            (r#""a,b;r=5;t=9\"";r=0;t=3"#, Some(3_000)),
            (r#""remaining=0";r=5;t=9"#, None),
            ("default;r=0;t=30", Some(30_000)),
            (r#""default";r=1;t=30"#, None),
            (r#""default";r=0"#, None),
            (r#""default";r=0;t=0"#, None),
            (r#""default";r=-1;t=30"#, None),
            (r#""default";r=0;t=-30"#, None),
            (r#""default";r=0;t=soon"#, None),
            (r#""open;r=0;t=30"#, None),
            (r#""bad";r=?;t=, "good";r=0;t=4"#, Some(4_000)),
        ] {
            assert_eq!(millis(&[("ratelimit", value)]), expected, "{value}");
        }
        let two = [("ratelimit", r#""a";r=0;t=3"#), ("ratelimit", r#""b";r=0;t=7"#)];
        assert_eq!(millis(&two), Some(7_000));
    }

    #[test]
    fn the_draft_is_read_in_its_older_forms() {
        assert_eq!(millis(&[("ratelimit", "limit=100, remaining=0, reset=50")]), Some(50_000));
        assert_eq!(millis(&[("ratelimit", "limit=100,remaining=3,reset=50")]), None);
        assert_eq!(millis(&[("ratelimit", "limit=100, remaining=0")]), None);
        let lines = [("ratelimit-limit", "100"), ("ratelimit-remaining", "0"), ("ratelimit-reset", "30")];
        assert_eq!(millis(&lines), Some(30_000));
        assert_eq!(millis(&[("ratelimit-policy", r#""default";q=100;w=60"#)]), None);
    }

    #[test]
    fn what_providers_send_is_read() {
        for (remaining, reset, value, expected) in [
            ("x-ratelimit-remaining", "x-ratelimit-reset", "20", 20_000),
            ("x-ratelimit-remaining", "x-ratelimit-reset", "1795946490", 60_000),
            ("x-ratelimit-remaining", "x-ratelimit-reset", "1795946430.250", 250),
            ("x-ratelimit-remaining", "x-ratelimit-reset", "1795946490500", 60_500),
            ("x-rate-limit-remaining", "x-rate-limit-reset", "1795946490", 60_000),
            ("x-ratelimit-requests-remaining", "x-ratelimit-requests-reset", "90", 90_000),
            ("x-ratelimit-remaining-requests", "x-ratelimit-reset-requests", "6m0s", 360_000),
            ("x-ratelimit-remaining-requests", "x-ratelimit-reset-requests", "20ms", 20),
            ("x-ratelimit-remaining-requests", "x-ratelimit-reset-requests", "1s", 1_000),
            ("x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens", "1h2m59.56s", 3_779_560),
            (
                "anthropic-ratelimit-requests-remaining",
                "anthropic-ratelimit-requests-reset",
                "2026-11-29T10:01:00Z",
                30_000,
            ),
            (
                "anthropic-ratelimit-input-tokens-remaining",
                "anthropic-ratelimit-input-tokens-reset",
                "2026-11-29T12:01:00+02:00",
                30_000,
            ),
        ] {
            assert_eq!(millis(&[(reset, value), (remaining, "0")]), Some(expected), "{reset}: {value}");
            assert_eq!(millis(&[(reset, value), (remaining, "1")]), None, "{reset}: {value}");
            assert_eq!(millis(&[(remaining, "0")]), None, "{remaining} alone");
            assert_eq!(millis(&[(reset, value)]), None, "{reset} alone");
        }
    }

    #[test]
    fn lists_have_one_place_for_each_quota() {
        let lists =
            |remaining, reset| millis(&[("x-ratelimit-remaining", remaining), ("x-ratelimit-reset", reset)]);
        assert_eq!(lists("0, 14523", "1, 1419704"), Some(1_000));
        assert_eq!(lists("1, 0", "1, 3600"), Some(3_600_000));
        assert_eq!(lists("0, 0", "1, 3600"), Some(3_600_000));
        assert_eq!(lists("0, 5", "1"), None);
        let lines =
            [("x-ratelimit-remaining", "0"), ("x-ratelimit-remaining", "5"), ("x-ratelimit-reset", "9")];
        assert_eq!(millis(&lines), None);
    }

    #[test]
    fn of_several_kinds_the_longest_that_is_used_up_counts() {
        let lines = [
            ("x-ratelimit-remaining-requests", "0"),
            ("x-ratelimit-reset-requests", "2s"),
            ("x-ratelimit-remaining-tokens", "0"),
            ("x-ratelimit-reset-tokens", "5s"),
            ("x-ratelimit-remaining-images", "4"),
            ("x-ratelimit-reset-images", "9s"),
        ];
        assert_eq!(millis(&lines), Some(5_000));
    }

    #[test]
    fn garbage_says_nothing() {
        for value in [
            "",
            "soon",
            "-5",
            "1e400",
            "1e3",
            "NaN",
            "inf",
            "6m0",
            "m",
            "1d",
            "1.s",
            "5.",
            "0",
            "0s",
            "1795946430",
            "1795946429000",
            "2026-11-29T10:00:00Z",
            "2026-11-29",
            "99999999999999999999999999",
            "Sun, 29 Nov 2026 10:02:00 GMT",
        ] {
            assert_eq!(
                millis(&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", value)]),
                None,
                "reset {value:?}"
            );
        }
        for count in ["", "none", "-1", "-0", "0x0", "1", "unlimited"] {
            assert_eq!(
                millis(&[("x-ratelimit-remaining", count), ("x-ratelimit-reset", "9")]),
                None,
                "remaining {count:?}"
            );
        }
        assert_eq!(millis(&[("x-ratelimit-limit", "0"), ("x-ratelimit-reset", "9")]), None);
        assert_eq!(millis(&[("x-remaining", "0"), ("x-reset", "9")]), None);
        assert_eq!(millis(&[("content-type", "application/json"), ("date", "x")]), None);
    }

    #[test]
    fn a_far_reset_is_capped() {
        for far in ["90000", "999999999", "9999999999", "25h", "99999999999999h", "9999-12-31T23:59:59Z"] {
            assert_eq!(
                millis(&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", far)]),
                Some(LONGEST.as_millis()),
                "{far}"
            );
        }
    }

    proptest! {
        #[test]
        fn what_is_read_is_a_wait_and_bounded(
            draft in "[a-z\"\\\\;=, 0-9rt]{0,40}",
            count in "0{0,2}[0-9, ]{0,4}",
            reset in "[0-9TZ:.,hms+ -]{0,30}",
        ) {
            let lines = [("ratelimit", draft.as_str()), ("ratelimit-remaining", &count), ("ratelimit-reset", &reset)];
            if let Some(wait) = exhausted(&fields(lines), now()) {
                prop_assert!(!wait.is_zero() && wait <= LONGEST);
            }
        }

        #[test]
        fn a_duration_is_read_as_go_prints_it(hours in 0_u32..20, minutes in 0_u32..60, millis in 1_u32..60_000) {
            let text = format!("{hours}h{minutes}m{}.{:03}s", millis / 1000, millis % 1000);
            let expected = Duration::from_millis(u64::from(hours * 3_600_000 + minutes * 60_000 + millis));
            let read = until(&text, now()).unwrap();
            prop_assert!(read.abs_diff(expected) < Duration::from_micros(1), "{text}: {read:?}");
        }

        #[test]
        fn a_point_in_time_is_the_same_in_every_notation(ahead in 1_u64..80_000) {
            let since_epoch = now().duration_since(UNIX_EPOCH).unwrap().as_secs() + ahead;
            let expected = Some(Duration::from_secs(ahead));
            prop_assert_eq!(until(&since_epoch.to_string(), now()), expected);
            prop_assert_eq!(until(&(since_epoch * 1000).to_string(), now()), expected);
            let at = crate::wire::deadline_header::format_rfc3339_millis(now() + Duration::from_secs(ahead));
            prop_assert_eq!(until(&at, now()), expected);
            prop_assert_eq!(until(&ahead.to_string(), now()), expected);
        }
    }
}
