//! The ways in which a caller says how long it will wait, read and written.
//!
//! `x-request-deadline` is a point in time, so that it survives queues and hops without arithmetic; the
//! others are what unmodified SDKs send. Reading is strict where the field is ours or gRPC's, because a
//! deadline that was misread is worse than one that was refused, and lenient for the SDKs' hints, which
//! nobody wrote with hedgerow in mind: an unusable hint counts as absent.
//!
//! HTTP-dates are refused although HTTP has them: their second is coarser than many deadlines.
//! Everything here is a pure function of the bytes; which of several bounds counts is policy.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use time::format_description::well_known::Rfc3339;
use time::macros::format_description;
use time::{OffsetDateTime, PrimitiveDateTime};

/// What `x-request-deadline` may be, in words for whoever sent something else.
const EXPECTED: &str =
    "x-request-deadline takes an RFC 3339 date and time, Unix seconds or Unix milliseconds";

/// From here on a whole number is milliseconds: as seconds it would lie in the year 5138, as
/// milliseconds in 1973.
const FIRST_MILLIS: u64 = 100_000_000_000;

/// The longest text that can be a deadline. Bounds the work on hostile input.
const MAX_LEN: usize = 64;

/// Reads `x-request-deadline`: RFC 3339 with any offset, Unix seconds with up to nine decimals, or Unix
/// milliseconds (a whole number from 10^11 on). White space around it is the caller's to trim.
///
/// # Errors
/// What is expected, in words for the caller.
pub fn parse_deadline(value: &[u8]) -> Result<SystemTime, &'static str> {
    let text = std::str::from_utf8(value).map_err(|_| EXPECTED)?;
    if text.len() > MAX_LEN {
        return Err(EXPECTED);
    }
    let since_epoch = match parse_decimal(text) {
        Some((whole, None)) if whole >= FIRST_MILLIS => Duration::from_millis(whole),
        // A fraction makes it seconds, and seconds that far off are a mistake of units.
        Some((whole, Some(_))) if whole >= FIRST_MILLIS => return Err(EXPECTED),
        Some((whole, nanos)) => Duration::new(whole, nanos.unwrap_or(0)),
        None => return parse_rfc3339(text).ok_or(EXPECTED),
    };
    UNIX_EPOCH.checked_add(since_epoch).ok_or(EXPECTED)
}

/// RFC 3339 section 5.6: `T` and `Z` in either case, a fraction of up to nine digits, any offset.
fn parse_rfc3339(text: &str) -> Option<SystemTime> {
    // The library also takes other separators, and longer fractions, which it cuts off.
    let is_separated = text.as_bytes().get(10).is_some_and(|b| matches!(b, b'T' | b't'));
    let fraction = text.split_once('.').map_or(0, |(_, rest)| leading_digits(rest));
    if !is_separated || fraction > 9 {
        return None;
    }
    let instant = OffsetDateTime::parse(text, &Rfc3339).ok()?;
    let seconds = u64::try_from(instant.unix_timestamp()).ok()?;
    UNIX_EPOCH.checked_add(Duration::new(seconds, instant.nanosecond()))
}

fn leading_digits(text: &str) -> usize {
    text.bytes().take_while(u8::is_ascii_digit).count()
}

/// Digits, or digits, a point and one to nine digits: the whole part and, where there is a fraction,
/// its nanoseconds. `None` for all else, an overflow included.
fn parse_decimal(text: &str) -> Option<(u64, Option<u32>)> {
    let (whole, fraction) = match text.split_once('.') {
        None => (text, None),
        Some((whole, fraction)) => (whole, Some(fraction)),
    };
    let whole = parse_digits(whole)?;
    let nanos = match fraction {
        None => None,
        Some(digits) if digits.len() > 9 => return None,
        Some(digits) => {
            let scale = 10_u32.pow(9 - digits.len() as u32);
            Some(u32::try_from(parse_digits(digits)?).ok()? * scale)
        }
    };
    Some((whole, nanos))
}

/// `u64::from_str` alone would take a leading `+`.
fn parse_digits(text: &str) -> Option<u64> {
    if text.bytes().all(|b| b.is_ascii_digit()) { text.parse().ok() } else { None }
}

/// Reads `grpc-timeout`: one to eight digits and a unit of `H`, `M`, `S`, `m`, `u` or `n` (gRPC over
/// HTTP/2, "Timeout").
///
/// # Errors
/// What is expected, in words for the caller.
pub fn parse_grpc_timeout(value: &[u8]) -> Result<Duration, &'static str> {
    const EXPECTED: &str = "grpc-timeout takes up to eight digits and one of H, M, S, m, u, n";
    let (unit, digits) = value.split_last().ok_or(EXPECTED)?;
    let digits = std::str::from_utf8(digits).map_err(|_| EXPECTED)?;
    if digits.len() > 8 {
        return Err(EXPECTED);
    }
    let amount = parse_digits(digits).ok_or(EXPECTED)?;
    // Eight digits of hours are 3.6 * 10^11 seconds: no product here overflows.
    Ok(match unit {
        b'H' => Duration::from_secs(amount * 3600),
        b'M' => Duration::from_secs(amount * 60),
        b'S' => Duration::from_secs(amount),
        b'm' => Duration::from_millis(amount),
        b'u' => Duration::from_micros(amount),
        b'n' => Duration::from_nanos(amount),
        _ => return Err(EXPECTED),
    })
}

/// Writes `grpc-timeout` in the finest unit that fits eight digits, rounded down, so that the next hop
/// never gets more than there is. Anything beyond 99,999,999 hours becomes that.
pub fn format_grpc_timeout(left: Duration) -> String {
    const MOST: u128 = 99_999_999;
    const UNITS: [(u128, char); 6] = [
        (1, 'n'),
        (1_000, 'u'),
        (1_000_000, 'm'),
        (1_000_000_000, 'S'),
        (60_000_000_000, 'M'),
        (3_600_000_000_000, 'H'),
    ];
    let nanos = left.as_nanos();
    for (size, unit) in UNITS {
        let amount = nanos / size;
        if amount <= MOST {
            return format!("{amount}{unit}");
        }
    }
    format!("{MOST}H")
}

/// Writes a point in time as RFC 3339 in UTC with milliseconds, rounded down: `2026-11-29T10:00:30.250Z`.
/// Times outside the years 1970 to 9999 become the nearest end of that range.
pub fn format_rfc3339_millis(at: SystemTime) -> String {
    const LAST_SECOND: i64 = 253_402_300_799;
    let since_epoch = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since_epoch.as_secs()).unwrap_or(LAST_SECOND).min(LAST_SECOND);
    let date = OffsetDateTime::from_unix_timestamp(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    // Every attempt tells its deadline: digits by hand take a tenth of what formatting does.
    let mut text = *b"0000-00-00T00:00:00.000Z";
    for (at, digits, value) in [
        (0, 4, date.year().unsigned_abs()),
        (5, 2, u8::from(date.month()).into()),
        (8, 2, date.day().into()),
        (11, 2, date.hour().into()),
        (14, 2, date.minute().into()),
        (17, 2, date.second().into()),
        (20, 3, since_epoch.subsec_millis()),
    ] {
        write_digits(&mut text[at..at + digits], value);
    }
    text.iter().map(|digit| char::from(*digit)).collect()
}

/// Fills `out` with the last digits of `value`, leading zeros included.
fn write_digits(out: &mut [u8], mut value: u32) {
    for digit in out.iter_mut().rev() {
        *digit = b'0' + (value % 10) as u8;
        value /= 10;
    }
}

/// Reads `x-stainless-read-timeout` or `x-stainless-timeout` of the OpenAI and Anthropic SDKs: seconds,
/// whole or decimal. `None` for what is unusable, such as `NOT_GIVEN`, or zero.
pub fn parse_stainless_timeout(value: &[u8]) -> Option<Duration> {
    let text = std::str::from_utf8(value).ok()?.trim_matches([' ', '\t']);
    if text.len() > MAX_LEN {
        return None;
    }
    // Python prints floats in full precision: digits beyond the ninth are cut off here.
    let text = match text.split_once('.') {
        Some((whole, fraction)) if fraction.len() > 9 && leading_digits(fraction) == fraction.len() => {
            &text[..whole.len() + 10]
        }
        _ => text,
    };
    let (whole, nanos) = parse_decimal(text)?;
    let timeout = Duration::new(whole, nanos.unwrap_or(0));
    (!timeout.is_zero()).then_some(timeout)
}

/// Reads the `ttl` of `amz-sdk-request: ttl=20261129T100030Z; attempt=1; max=3`, the point in time after
/// which an AWS SDK will not wait any more. `None` when there is none, or none that can be used.
pub fn parse_amz_ttl(value: &[u8]) -> Option<SystemTime> {
    let text = std::str::from_utf8(value).ok()?;
    let ttl = text.split(';').find_map(|part| part.trim().strip_prefix("ttl="))?;
    let form = format_description!("[year][month][day]T[hour][minute][second]Z");
    let at = PrimitiveDateTime::parse(ttl.trim(), form).ok()?.assume_utc();
    let seconds = u64::try_from(at.unix_timestamp()).ok()?;
    UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn nanos(value: &str) -> Option<u128> {
        let at = parse_deadline(value.as_bytes()).ok()?;
        Some(at.duration_since(UNIX_EPOCH).unwrap().as_nanos())
    }

    #[test]
    fn four_spellings_of_one_instant_agree() {
        for text in [
            "2026-11-29T10:00:30.250Z",
            "2026-11-29t10:00:30.25z",
            "2026-11-29T15:30:30.250000000+05:30",
            "2026-11-29T09:00:30.25-01:00",
            "1795946430.25",
            "1795946430250",
        ] {
            assert_eq!(nanos(text), Some(1_795_946_430_250_000_000), "{text}");
        }
        assert_eq!(nanos("1796119230"), Some(1_796_119_230_000_000_000));
    }

    #[test]
    fn the_border_between_seconds_and_milliseconds_is_ten_to_the_eleventh() {
        assert_eq!(nanos("99999999999"), Some(99_999_999_999_000_000_000));
        assert_eq!(nanos("100000000000"), Some(100_000_000_000_000_000));
    }

    #[test]
    fn what_is_no_deadline_is_refused() {
        for text in [
            "",
            " ",
            "-1",
            "+1",
            "1e9",
            "1.",
            ".5",
            "1.2.3",
            "0x10",
            "NaN",
            "inf",
            "99999999999999999999",
            "1796119230,25",
            "1796 119230",
            "1796119230 ",
            "1796119230s",
            "1796119230.1234567891",
            "100000000000.5",
            "Sun, 29 Nov 2026 10:00:30 GMT",
            "2026-11-29",
            "2026-11-29T10:00:30",
            "2026-11-29 10:00:30Z",
            "2026-11-29T10:00:30.Z",
            "2026-11-29T10:00:30.1234567891Z",
            "2026-11-29T10:00:30Z trailing",
            "2026-13-29T10:00:30Z",
            "2026-11-29T25:00:30Z",
            "1969-12-31T23:59:59Z",
            "-2026-11-29T10:00:30Z",
            "2026-11-29_10:00:30Z",
            "1796119230\u{0}",
            "१७९६११९२३०",
        ] {
            assert_eq!(parse_deadline(text.as_bytes()), Err(EXPECTED), "{text:?}");
        }
        assert_eq!(parse_deadline(b"\xff1796119230"), Err(EXPECTED));
        assert_eq!(parse_deadline(&[b'1'; 100_000]), Err(EXPECTED));
    }

    #[test]
    fn grpc_units_are_read_and_written() {
        for (text, expected) in [
            ("1H", Duration::from_secs(3600)),
            ("2M", Duration::from_secs(120)),
            ("3S", Duration::from_secs(3)),
            ("4m", Duration::from_millis(4)),
            ("5u", Duration::from_micros(5)),
            ("6n", Duration::from_nanos(6)),
            ("99999999H", Duration::from_secs(99_999_999 * 3600)),
            ("0n", Duration::ZERO),
        ] {
            assert_eq!(parse_grpc_timeout(text.as_bytes()), Ok(expected), "{text}");
        }
        for text in ["", "S", "1", "1s", "1h", "-1S", "+1S", "1.5S", "123456789n", "1 S", "1SS"] {
            assert!(parse_grpc_timeout(text.as_bytes()).is_err(), "{text:?}");
        }
        assert_eq!(format_grpc_timeout(Duration::from_millis(1500)), "1500000u");
        assert_eq!(format_grpc_timeout(Duration::ZERO), "0n");
        assert_eq!(format_grpc_timeout(Duration::MAX), "99999999H");
    }

    #[test]
    fn sdk_hints_are_read_and_unusable_ones_ignored() {
        assert_eq!(parse_stainless_timeout(b"600"), Some(Duration::from_secs(600)));
        assert_eq!(parse_stainless_timeout(b"2.5"), Some(Duration::from_millis(2500)));
        assert_eq!(parse_stainless_timeout(b"0.1000000000000001"), Some(Duration::from_millis(100)));
        for hint in
            ["NOT_GIVEN", "", "-1", "0", "0.0", "1e3", "99999999999999999999", "1.x", "1.12345678901x"]
        {
            assert_eq!(parse_stainless_timeout(hint.as_bytes()), None, "{hint:?}");
        }
        let ttl = UNIX_EPOCH + Duration::from_secs(1_704_103_810);
        assert_eq!(parse_amz_ttl(b"ttl=20240101T101010Z; attempt=1; max=3"), Some(ttl));
        assert_eq!(parse_amz_ttl(b"attempt=1; max=3; ttl=20240101T101010Z"), Some(ttl));
        for hint in ["attempt=1; max=3", "ttl=", "ttl=2024", "ttl=20241301T101010Z", "ttl=19600101T000000Z"] {
            assert_eq!(parse_amz_ttl(hint.as_bytes()), None, "{hint:?}");
        }
    }

    #[test]
    fn written_times_stay_in_four_digit_years() {
        let at = UNIX_EPOCH + Duration::from_millis(1_795_946_430_250);
        assert_eq!(format_rfc3339_millis(at), "2026-11-29T10:00:30.250Z");
        assert_eq!(format_rfc3339_millis(UNIX_EPOCH - Duration::from_secs(1)), "1970-01-01T00:00:00.000Z");
        let far = UNIX_EPOCH + Duration::from_secs(1 << 40);
        assert_eq!(format_rfc3339_millis(far), "9999-12-31T23:59:59.000Z");
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_parser_panic(value in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = parse_deadline(&value);
            let _ = parse_grpc_timeout(&value);
            let _ = parse_stainless_timeout(&value);
            let _ = parse_amz_ttl(&value);
        }

        #[test]
        fn near_misses_do_not_panic(value in "[0-9TZtz:.+-]{0,32}") {
            let _ = parse_deadline(value.as_bytes());
        }

        #[test]
        fn a_written_instant_is_read_back(millis in 0_u64..253_402_300_799_999) {
            let at = UNIX_EPOCH + Duration::from_millis(millis);
            prop_assert_eq!(parse_deadline(format_rfc3339_millis(at).as_bytes()), Ok(at));
            if millis >= FIRST_MILLIS {
                prop_assert_eq!(parse_deadline(millis.to_string().as_bytes()), Ok(at));
            }
            let seconds = format!("{}.{:03}", millis / 1000, millis % 1000);
            if millis / 1000 < FIRST_MILLIS {
                prop_assert_eq!(parse_deadline(seconds.as_bytes()), Ok(at));
            }
        }

        #[test]
        fn a_written_grpc_timeout_is_never_longer(seconds in 0_u64..1 << 40, nanos in 0_u32..1_000_000_000) {
            let left = Duration::new(seconds, nanos);
            let read = parse_grpc_timeout(format_grpc_timeout(left).as_bytes()).unwrap();
            prop_assert!(read <= left);
            // Seven digits are used at least, until the hours run out.
            let is_in_range = seconds < 99_999_999 * 3600;
            prop_assert!(!is_in_range || left - read <= left / 100_000 + Duration::from_nanos(1));
        }
    }
}
