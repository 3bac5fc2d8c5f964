//! From the times that were seen to the delay, and whether it is worth it.

use std::time::Duration;

use super::curve::Curve;
use crate::config::{Hedge, HedgeAfter};
use crate::units::Percent;

/// Below this a percentile is an accident.
pub(super) const ENOUGH_FOR_A_PERCENTILE: usize = 20;
/// Below this the p99 rests on one call, and says nothing about the worth of hedging.
pub(super) const ENOUGH_FOR_A_PREDICTION: usize = 200;
/// The least cut of the p99 that is worth extra load.
const LEAST_CUT: f64 = 0.05;

/// The percentile that a hedge waits for, as a share of one; `None` for a fixed delay.
pub(super) fn percentile(after: HedgeAfter, ratio: Percent) -> Option<f64> {
    match after {
        HedgeAfter::Fixed(_) => None,
        HedgeAfter::Percentile(percentile) => Some(percentile.fraction()),
        // The share of calls that outlast this percentile is the share that may be repeated. A smaller
        // delay would spend the budget on calls that are about to answer, a greater one leaves it unused.
        HedgeAfter::Auto => Some(1.0 - ratio.fraction()),
    }
}

/// The delay: fixed, or that percentile (`initial` before there is a curve) within `min` and `max`.
pub(super) fn delay(cfg: &Hedge, ratio: Percent, curve: Option<&Curve>) -> Duration {
    if let HedgeAfter::Fixed(delay) = cfg.after {
        return delay;
    }
    let seen = percentile(cfg.after, ratio)
        .zip(curve)
        .map(|(percentile, curve)| curve.quantile(percentile).unwrap_or_else(|| curve.longest()));
    // Not `clamp`, which panics when the bounds are crossed.
    seen.unwrap_or(cfg.initial).max(cfg.min).min(cfg.max)
}

/// Whether a hedge after `delay` would leave the p99 as it is. In a thin tail a second attempt takes as
/// long as the rest of the first.
///
/// A p99 that was not seen, since all attempts that would tell were cut short by winners, is no
/// ground to stop them.
pub(super) fn is_pointless(curve: &Curve, delay: Duration) -> bool {
    match (curve.quantile(0.99), curve.hedged_quantile(0.99, delay)) {
        (Some(without), Some(with)) => with.as_secs_f64() > without.as_secs_f64() * (1.0 - LEAST_CUT),
        _ => false,
    }
}
