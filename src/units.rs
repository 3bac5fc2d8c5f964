//! Small value types of the policy: durations, sizes, ratios and rates as a person writes them.
//!
//! Each parses from one notation and prints back to it, so that an error message, `explain` and
//! `/config` speak as the policy file does.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

/// A value that is not in the notation its type asks for. The text says what was expected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("expected {0}")]
pub struct UnitError(pub &'static str);

/// A length of time in the policy: `250ms`, `1.5s`, `2m`, `1h`. Never negative, at most a year.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span(pub Duration);

impl Span {
    /// What a duration looks like, for error messages.
    pub const EXPECTED: &'static str = "a duration such as 250ms, 1.5s, 2m or 1h";
    const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
}

impl FromStr for Span {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let error = UnitError(Self::EXPECTED);
        let (number, unit) = split_unit(text).ok_or(error.clone())?;
        let seconds = number
            * match unit {
                "us" => 0.000_001,
                "ms" => 0.001,
                "s" => 1.0,
                "m" => 60.0,
                "h" => 3600.0,
                _ => return Err(error),
            };
        let span = Duration::try_from_secs_f64(seconds).map_err(|_| error)?;
        if span > Self::LONGEST {
            return Err(UnitError("a duration of at most one year (8760h)"));
        }
        Ok(Self(span))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.0.as_micros();
        match micros {
            0 => f.write_str("0s"),
            m if m % 3_600_000_000 == 0 => write!(f, "{}h", m / 3_600_000_000),
            m if m % 60_000_000 == 0 => write!(f, "{}m", m / 60_000_000),
            m if m >= 1_000_000 => write!(f, "{}s", Trimmed(m as f64 / 1e6)),
            m if m >= 1_000 => write!(f, "{}ms", Trimmed(m as f64 / 1e3)),
            m => write!(f, "{m}us"),
        }
    }
}

/// A number of bytes in the policy: `4096`, `64KiB`, `1MiB`, `2GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub usize);

impl ByteSize {
    /// What a size looks like, for error messages.
    pub const EXPECTED: &'static str = "a size such as 512B, 64KiB, 1MiB or 2GiB";
}

impl FromStr for ByteSize {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let error = UnitError(Self::EXPECTED);
        let (number, unit) = split_unit(text).ok_or(error.clone())?;
        let bytes = number
            * match unit {
                "" | "B" => 1.0,
                "KiB" => 1024.0,
                "MiB" => 1024.0 * 1024.0,
                "GiB" => 1024.0 * 1024.0 * 1024.0,
                _ => return Err(error),
            };
        if bytes.fract() != 0.0 || bytes > (1u64 << 40) as f64 {
            return Err(error);
        }
        Ok(Self(bytes as usize))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("0B"),
            n if n % (1 << 30) == 0 => write!(f, "{}GiB", n >> 30),
            n if n % (1 << 20) == 0 => write!(f, "{}MiB", n >> 20),
            n if n % (1 << 10) == 0 => write!(f, "{}KiB", n >> 10),
            n => write!(f, "{n}B"),
        }
    }
}

/// A share of a whole, from `0%` to `100%`.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Percent(f64);

impl Percent {
    /// What a ratio looks like, for error messages.
    pub const EXPECTED: &'static str = "a ratio from 0% to 100%, such as 10%";

    /// The share that `part` in a hundred is; clamped to 0..=100.
    pub fn new(part: f64) -> Self {
        Self(if part.is_finite() { part.clamp(0.0, 100.0) } else { 0.0 })
    }

    /// The share as a fraction of one.
    pub fn fraction(self) -> f64 {
        self.0 / 100.0
    }

    /// The share in hundredths, as written.
    pub fn hundredths(self) -> f64 {
        self.0
    }
}

impl FromStr for Percent {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        match split_unit(text) {
            Some((number, "%")) if number <= 100.0 => Ok(Self(number)),
            _ => Err(UnitError(Self::EXPECTED)),
        }
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", Trimmed(self.0))
    }
}

/// So many events in each second: `200/s`, `30/m`, `0.5/s`.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Rate {
    per_second: f64,
}

impl Rate {
    /// What a rate looks like, for error messages.
    pub const EXPECTED: &'static str = "a rate such as 200/s, 30/m or 0.5/s";

    /// A rate of `n` each second; negative and unbounded rates become zero.
    pub fn per_second(n: f64) -> Self {
        Self { per_second: if n.is_finite() { n.max(0.0) } else { 0.0 } }
    }

    /// Events in one second.
    pub fn in_a_second(self) -> f64 {
        self.per_second
    }
}

impl FromStr for Rate {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let (number, unit) = split_unit(text).ok_or(UnitError(Self::EXPECTED))?;
        let seconds = match unit {
            "/s" => 1.0,
            "/m" => 60.0,
            "/h" => 3600.0,
            _ => return Err(UnitError(Self::EXPECTED)),
        };
        if number > 1e9 {
            return Err(UnitError("a rate of at most 1000000000/s"));
        }
        Ok(Self { per_second: number / seconds })
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.per_second;
        if n == 0.0 || (n * 100.0).fract() == 0.0 {
            write!(f, "{}/s", Trimmed(n))
        } else if (n * 60.0 * 100.0).round() / 100.0 == n * 60.0 {
            write!(f, "{}/m", Trimmed(n * 60.0))
        } else {
            write!(f, "{}/h", Trimmed(n * 3600.0))
        }
    }
}

/// Splits `1.5s` into 1.5 and `s`. Only plain decimal digits and one dot count as the number.
fn split_unit(text: &str) -> Option<(f64, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    if number.starts_with('.') || number.ends_with('.') {
        return None;
    }
    Some((number.parse().ok()?, unit))
}

/// Prints a float without a trailing `.0` and with at most three places.
struct Trimmed(f64);

impl fmt::Display for Trimmed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{:.3}", self.0);
        f.write_str(text.trim_end_matches('0').trim_end_matches('.'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_written() {
        for (text, micros) in
            [("250ms", 250_000), ("1.5s", 1_500_000), ("2m", 120_000_000), ("1h", 3_600_000_000), ("0s", 0)]
        {
            assert_eq!(text.parse(), Ok(Span(Duration::from_micros(micros))), "{text}");
            assert_eq!(Span(Duration::from_micros(micros)).to_string(), text);
        }
    }

    #[test]
    fn what_is_no_duration_is_refused() {
        for text in ["", "5", "-5s", "5 s", "1e3s", ".5s", "5.s", "5d", "NaNs", "infs", "1.2.3s", "9999999h"]
        {
            assert!(text.parse::<Span>().is_err(), "{text:?} was taken");
        }
    }

    #[test]
    fn sizes_are_read_as_written() {
        for (text, bytes) in [("512B", 512), ("64KiB", 65_536), ("1MiB", 1 << 20), ("2GiB", 2 << 30)] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
        for text in ["", "1MB", "-1KiB", "0.3B", "9999999GiB", "KiB"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text:?} was taken");
        }
    }

    #[test]
    fn ratios_and_rates_are_read_as_written() {
        assert_eq!("10%".parse(), Ok(Percent(10.0)));
        assert_eq!(Percent(12.5).to_string(), "12.5%");
        assert!("101%".parse::<Percent>().is_err());
        assert!("0.1".parse::<Percent>().is_err());
        assert_eq!("30/m".parse(), Ok(Rate { per_second: 0.5 }));
        assert_eq!("1/s".parse::<Rate>().map(|r| r.to_string()), Ok("1/s".into()));
        assert!("5".parse::<Rate>().is_err());
    }
}
