//! How many of the last hundred hedges won.

use crate::units::Percent;

const KEPT: u32 = 100;

/// The outcomes, the newest in the lowest bit.
#[derive(Debug, Default)]
pub(super) struct Wins {
    outcomes: u128,
    len: u32,
}

impl Wins {
    pub(super) fn record(&mut self, won: bool) {
        self.outcomes = (self.outcomes << 1 | u128::from(won)) & ((1 << KEPT) - 1);
        self.len = (self.len + 1).min(KEPT);
    }

    /// The share of wins among those kept; `None` before the first hedge.
    pub(super) fn share(&self) -> Option<Percent> {
        (self.len > 0)
            .then(|| Percent::new(100.0 * f64::from(self.outcomes.count_ones()) / f64::from(self.len)))
    }

    /// The share, once there are a hundred: of twenty hedges, none wins in every third case although
    /// one in twenty does.
    pub(super) fn settled_share(&self) -> Option<Percent> {
        self.share().filter(|_| self.len == KEPT)
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn just_the_last_hundred_count() {
        let mut wins = Wins::default();
        assert_eq!(wins.share(), None);
        for _ in 0..50 {
            wins.record(true);
        }
        assert_eq!(wins.share(), Some(Percent::new(100.0)));
        assert_eq!(wins.settled_share(), None);
        for _ in 0..96 {
            wins.record(false);
        }
        assert_eq!(wins.settled_share(), Some(Percent::new(4.0)));
        wins.clear();
        assert_eq!(wins.share(), None);
    }
}
