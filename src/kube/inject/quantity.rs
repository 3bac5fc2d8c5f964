//! Amounts of processor and memory as Kubernetes writes them: `250m`, `128Mi`, `1.5`, `1e3`.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

/// What was expected, for a person.
pub(super) const EXPECTED: &str = "an amount such as 250m, 0.5, 128Mi or 1G";

/// An amount, kept as it was written.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Quantity {
    text: Cow<'static, str>,
    amount: f64,
}

impl Quantity {
    /// One that is known to be right.
    pub(super) const fn new(text: &'static str, amount: f64) -> Self {
        Self { text: Cow::Borrowed(text), amount }
    }

    /// Whether it is more than `other`.
    pub(super) fn exceeds(&self, other: &Self) -> bool {
        self.amount > other.amount
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Quantity {
    type Err = ();

    /// The grammar of `resource.Quantity`, without its signs: nobody needs a negative amount.
    fn from_str(text: &str) -> Result<Self, ()> {
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, suffix) = text.split_at(end);
        let number: f64 = number.parse().map_err(|_| ())?;
        let factor = match suffix {
            "n" => 1e-9,
            "u" => 1e-6,
            "m" => 1e-3,
            "" => 1.0,
            "k" => 1e3,
            "M" => 1e6,
            "G" => 1e9,
            "T" => 1e12,
            "P" => 1e15,
            "E" => 1e18,
            "Ki" => 2f64.powi(10),
            "Mi" => 2f64.powi(20),
            "Gi" => 2f64.powi(30),
            "Ti" => 2f64.powi(40),
            "Pi" => 2f64.powi(50),
            "Ei" => 2f64.powi(60),
            _ => 10f64.powi(exponent(suffix).ok_or(())?),
        };
        Ok(Self { text: text.to_owned().into(), amount: number * factor })
    }
}

/// `e3`, `E-6`.
fn exponent(suffix: &str) -> Option<i32> {
    let digits = suffix.strip_prefix(['e', 'E'])?;
    digits.parse().ok().filter(|exponent| (-18..=18).contains(exponent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_kubernetes_takes_is_taken() {
        for (text, amount) in [
            ("250m", 0.25),
            ("0.5", 0.5),
            ("2", 2.0),
            ("128Mi", 134_217_728.0),
            ("1G", 1e9),
            ("1e3", 1e3),
            ("5.", 5.0),
        ] {
            let quantity: Quantity = text.parse().unwrap();
            assert_eq!((quantity.amount, quantity.to_string().as_str()), (amount, text));
        }
    }

    #[test]
    fn anything_else_is_not() {
        for text in ["", "lots", "1.2.3", "Mi", "1 Gi", "1gb", "-1", "1Mi ", "1e", "1e99", "NaN", "inf", "."]
        {
            assert!(text.parse::<Quantity>().is_err(), "{text}");
        }
    }
}
