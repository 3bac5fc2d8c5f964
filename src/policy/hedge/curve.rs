//! P(X > t): the share of attempts that are still without a response head after `t`.
//!
//! Estimated after Kaplan and Meier ("Nonparametric estimation from incomplete observations", 1958): at
//! each time, of those still running, what share answers then? A cancelled attempt is among those
//! running up to its age and then leaves the count. So it says what is known of it and no more, and what
//! hedging does to the samples does not bend the estimate: which attempt is cut short is decided by the
//! other attempt's luck, not its own.
//!
//! Where the longest times seen are all of cancelled attempts, the curve ends above zero, and quantiles
//! beyond its end are not known. They are `None` rather than a guess.

use std::time::Duration;

use super::window::{BUCKETS, bucket_of, start_of};

/// The estimate, one value for each bucket's end, linear between.
#[derive(Debug)]
pub(super) struct Curve {
    after: [f64; BUCKETS],
    /// The last bucket with a sample.
    last: usize,
}

impl Curve {
    /// From the numbers of answered and of cancelled attempts in each bucket; `total` is their sum.
    pub(super) fn estimate(total: u32, counts: impl Fn(usize) -> (u32, u32)) -> Self {
        let mut after = [1.0; BUCKETS];
        let (mut running, mut share, mut last) = (total, 1.0, 0);
        for (bucket, value) in after.iter_mut().enumerate() {
            let (answered, cancelled) = counts(bucket);
            if answered > 0 {
                share *= f64::from(running - answered) / f64::from(running);
            }
            if answered + cancelled > 0 {
                running -= answered + cancelled;
                last = bucket;
            }
            *value = share;
        }
        Self { after, last }
    }

    /// The share still running after `time`.
    pub(super) fn survival(&self, time: Duration) -> f64 {
        let bucket = bucket_of(time);
        let (start, end) = (start_of(bucket), start_of(bucket + 1));
        let before = self.before(bucket);
        let part = time.saturating_sub(start).as_secs_f64() / (end - start).as_secs_f64();
        before + (self.after[bucket] - before) * part.min(1.0)
    }

    /// The time after which a share `q` has answered; `None` where that was not seen.
    pub(super) fn quantile(&self, q: f64) -> Option<Duration> {
        let left = (1.0 - q).max(0.0);
        let bucket = self.after.partition_point(|share| *share > left + ROUNDING);
        (bucket < BUCKETS).then(|| between(bucket, self.before(bucket), self.after[bucket], left))
    }

    /// The quantile of calls that start a second attempt after `delay`, where the first answer counts
    /// and the two are independent: P(T > t) = P(X > t) · P(X > t − delay) from `delay` on.
    pub(super) fn hedged_quantile(&self, q: f64, delay: Duration) -> Option<Duration> {
        let left = (1.0 - q).max(0.0);
        let hedged = |time: Duration| {
            self.survival(time) * time.checked_sub(delay).map_or(1.0, |since| self.survival(since))
        };
        let (mut low, mut high) = (0, BUCKETS);
        while low < high {
            let middle = (low + high) / 2;
            if hedged(start_of(middle + 1)) > left + ROUNDING { low = middle + 1 } else { high = middle }
        }
        (low < BUCKETS).then(|| between(low, hedged(start_of(low)), hedged(start_of(low + 1)), left))
    }

    /// No sample was longer.
    pub(super) fn longest(&self) -> Duration {
        start_of(self.last + 1)
    }

    fn before(&self, bucket: usize) -> f64 {
        if bucket == 0 { 1.0 } else { self.after[bucket - 1] }
    }
}

/// Many small factors add up to less than this.
const ROUNDING: f64 = 1e-9;

/// The time within the bucket at which the share falls to `left`.
fn between(bucket: usize, before: f64, after: f64, left: f64) -> Duration {
    let (start, end) = (start_of(bucket), start_of(bucket + 1));
    let part = if before > after { ((before - left) / (before - after)).clamp(0.0, 1.0) } else { 1.0 };
    start + (end - start).mul_f64(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(answered: &[u64], cancelled: &[u64]) -> Curve {
        let count = |list: &[u64], bucket| {
            list.iter().filter(|millis| bucket_of(Duration::from_millis(**millis)) == bucket).count() as u32
        };
        let total = (answered.len() + cancelled.len()) as u32;
        Curve::estimate(total, |bucket| (count(answered, bucket), count(cancelled, bucket)))
    }

    fn is_near(found: Option<Duration>, millis: f64) -> bool {
        found.is_some_and(|found| (found.as_secs_f64() * 1e3 / millis - 1.0).abs() < 0.033)
    }

    /// The example of two that answer, one that leaves, two that answer.
    #[test]
    fn a_cancelled_attempt_counts_as_running_up_to_its_age() {
        let curve = curve(&[10, 20, 40, 50], &[30]);
        for (millis, share) in [(5, 1.0), (15, 0.8), (25, 0.6), (35, 0.6), (45, 0.3), (60, 0.0)] {
            let found = curve.survival(Duration::from_millis(millis));
            assert!((found - share).abs() < 1e-6, "{found} at {millis} ms");
        }
    }

    #[test]
    fn what_was_not_seen_is_not_known() {
        let curve = curve(&[10; 9], &[30]);
        assert!(is_near(curve.quantile(0.5), 10.0));
        assert_eq!(curve.quantile(0.95), None);
        assert!(is_near(Some(curve.longest()), 30.0));
    }

    #[test]
    fn early_losers_do_not_pull_a_percentile_down() {
        let answered: Vec<u64> = (1..=100).map(|n| n * 10).collect();
        let with_losers = curve(&answered, &[2; 50]);
        assert!(is_near(with_losers.quantile(0.9), 900.0));
    }

    /// Nine in ten take 10 ms, the tenth 1 s: both are slow once in a hundred.
    #[test]
    fn a_hedge_cuts_a_heavy_tail_to_its_delay_and_a_fast_answer() {
        let mut answered = vec![10; 900];
        answered.extend([1_000; 100]);
        let curve = curve(&answered, &[]);
        assert!(is_near(curve.quantile(0.985), 1_000.0));
        assert!(is_near(curve.hedged_quantile(0.985, Duration::from_millis(20)), 30.0));
        assert!(is_near(curve.hedged_quantile(0.995, Duration::from_millis(20)), 1_000.0));
        assert!(is_near(curve.hedged_quantile(0.5, Duration::from_millis(20)), 10.0));
    }
}
