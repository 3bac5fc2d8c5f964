//! Times to the response head of the last 30 to 60 seconds.
//!
//! Two histograms of 30 s each: the older is forgotten as a whole when the newer is full. A decaying
//! average has no percentiles, and a list of samples either grows with the rate or forgets a slow
//! minute in a fast second.
//!
//! Buckets are log-linear, 32 for each doubling from 131 µs to 137 s, so that a percentile is off by at
//! most three parts in a hundred. Many histograms for this purpose end at a few seconds, which switches
//! hedging off for exactly the slow tools. Counters are 16 bits wide: when one is full, its whole
//! histogram is halved, which keeps its shape. All in all 5.5 KiB, had at the first sample, since most
//! of the routes in a policy see no traffic.
//!
//! **Cancelled attempts** are counted apart. All that is known of one is that it would have taken longer
//! than its age when it was cancelled. Taken for an answer at that age, a hedge that ran for 2 ms before
//! its primary answered would pull the percentile down, and a primary that hung until its hedge won
//! would hide the very tail that hedging is for. See [`Curve`](super::curve::Curve) for how they count.

use std::time::Duration;

use tokio::time::Instant;

use super::curve::Curve;

/// How long one of the two halves collects.
const HALF: Duration = Duration::from_secs(30);
/// Buckets for each doubling.
const STEPS: usize = 32;
/// Times are counted in units of 2^11 ns; the first 64 buckets are one unit wide.
const UNIT_BITS: u32 = 11;
/// Up to 2^26 units, 137 s; longer times are taken for that.
pub(super) const BUCKETS: usize = 22 * STEPS;

/// The rolling histogram.
#[derive(Debug, Default)]
pub struct LatencyWindow {
    halves: Option<Box<Halves>>,
}

#[derive(Debug)]
struct Halves {
    /// When the newer half began.
    since: Instant,
    newer: Half,
    older: Half,
}

#[derive(Debug)]
struct Half {
    answered: [u16; BUCKETS],
    cancelled: [u16; BUCKETS],
    len: u32,
}

/// How an attempt ended whose time is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Answered,
    Cancelled,
}

impl LatencyWindow {
    /// Counts a response head that came after `elapsed`.
    pub fn record(&mut self, elapsed: Duration, now: Instant) {
        self.count(elapsed, End::Answered, now);
    }

    /// Counts an attempt that was cancelled at the age of `elapsed` without a head.
    pub fn record_cancelled(&mut self, elapsed: Duration, now: Instant) {
        self.count(elapsed, End::Cancelled, now);
    }

    /// Samples in the window, both kinds.
    pub fn len(&mut self, now: Instant) -> usize {
        self.roll(now).map_or(0, |halves| (halves.newer.len + halves.older.len) as usize)
    }

    /// Whether the window has no sample.
    pub fn is_empty(&mut self, now: Instant) -> bool {
        self.len(now) == 0
    }

    /// The time within which a share `q` (from 0 to 1) of attempts has its head; `None` without
    /// samples. Where so many were cancelled that it is not known, the longest time seen.
    pub fn quantile(&mut self, q: f64, now: Instant) -> Option<Duration> {
        self.curve(now).map(|curve| curve.quantile(q).unwrap_or(curve.longest()))
    }

    /// The share of attempts still without a head, over time; `None` without samples.
    pub(super) fn curve(&mut self, now: Instant) -> Option<Curve> {
        let Halves { newer, older, .. } = self.roll(now)?;
        let total = newer.len + older.len;
        (total > 0).then(|| {
            Curve::estimate(total, |bucket| {
                let answered = u32::from(newer.answered[bucket]) + u32::from(older.answered[bucket]);
                let cancelled = u32::from(newer.cancelled[bucket]) + u32::from(older.cancelled[bucket]);
                (answered, cancelled)
            })
        })
    }

    fn count(&mut self, elapsed: Duration, end: End, now: Instant) {
        if self.halves.is_none() {
            self.halves = Some(Box::new(Halves { since: now, newer: Half::EMPTY, older: Half::EMPTY }));
        }
        if let Some(halves) = self.roll(now) {
            halves.newer.count(bucket_of(elapsed), end);
        }
    }

    fn roll(&mut self, now: Instant) -> Option<&mut Halves> {
        let halves = self.halves.as_deref_mut()?;
        let age = now.saturating_duration_since(halves.since);
        if age >= HALF {
            if age < 2 * HALF {
                std::mem::swap(&mut halves.newer, &mut halves.older);
                halves.since += HALF;
            } else {
                halves.older = Half::EMPTY;
                halves.since = now;
            }
            halves.newer = Half::EMPTY;
        }
        Some(halves)
    }
}

impl Half {
    const EMPTY: Self = Self { answered: [0; BUCKETS], cancelled: [0; BUCKETS], len: 0 };

    fn count(&mut self, bucket: usize, end: End) {
        if self.counter(bucket, end).checked_add(1).is_none() {
            self.halve();
        }
        *self.counter(bucket, end) += 1;
        self.len += 1;
    }

    fn counter(&mut self, bucket: usize, end: End) -> &mut u16 {
        match end {
            End::Answered => &mut self.answered[bucket],
            End::Cancelled => &mut self.cancelled[bucket],
        }
    }

    /// Every second odd count is rounded up: rounding all of them one way would cut off or double a
    /// thin tail.
    fn halve(&mut self) {
        self.len = 0;
        for counts in [&mut self.answered, &mut self.cancelled] {
            for (bucket, count) in counts.iter_mut().enumerate() {
                *count = (*count - *count % 2) / 2 + *count % 2 * (bucket % 2) as u16;
                self.len += u32::from(*count);
            }
        }
    }
}

/// The bucket of a time.
pub(super) fn bucket_of(time: Duration) -> usize {
    let units = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX) >> UNIT_BITS;
    if units < STEPS as u64 {
        return units as usize;
    }
    let doublings = units.ilog2() - STEPS.ilog2();
    let bucket = doublings as usize * STEPS + (units >> doublings) as usize;
    bucket.min(BUCKETS - 1)
}

/// The least time that falls into the bucket. That of the bucket after the last is the range's end.
pub(super) fn start_of(bucket: usize) -> Duration {
    let doublings = (bucket / STEPS).saturating_sub(1);
    let units = (bucket - doublings * STEPS) as u64;
    Duration::from_nanos((units << doublings) << UNIT_BITS)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn millis(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn buckets_meet_without_gaps_from_a_tenth_of_a_millisecond_to_two_minutes() {
        for bucket in 0..BUCKETS {
            let (start, end) = (start_of(bucket), start_of(bucket + 1));
            assert_eq!(bucket_of(start), bucket);
            assert_eq!(bucket_of(end - Duration::from_nanos(1)), bucket);
            if start >= Duration::from_micros(100) {
                assert!((end - start).as_secs_f64() <= start.as_secs_f64() * 0.032, "bucket {bucket}");
            }
        }
        assert!(start_of(BUCKETS) >= Duration::from_secs(120));
        assert_eq!(bucket_of(Duration::from_secs(86_400)), BUCKETS - 1);
    }

    #[test]
    fn it_takes_six_kibibytes_at_most_and_none_without_samples() {
        assert!(size_of::<Halves>() <= 6 * 1024, "{}", size_of::<Halves>());
        assert!(LatencyWindow::default().halves.is_none());
    }

    #[test]
    fn samples_leave_after_30_to_60_seconds() {
        let start = Instant::now();
        let mut window = LatencyWindow::default();
        assert_eq!(window.quantile(0.5, start), None);
        window.record(millis(10), start);
        window.record(millis(20), start + Duration::from_secs(29));
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(window.len(at(29)), 2);
        assert_eq!(window.len(at(30)), 2, "the half is full, but it still counts");
        window.record_cancelled(millis(30), at(45));
        assert_eq!(window.len(at(59)), 3);
        assert_eq!(window.len(at(60)), 1);
        assert_eq!(window.len(at(90)), 0);
        window.record(millis(10), at(91));
        assert_eq!(window.len(at(500)), 0, "silence empties it too");
    }

    #[test]
    fn a_full_counter_halves_the_histogram_and_keeps_its_shape() {
        let now = Instant::now();
        let mut window = LatencyWindow::default();
        for _ in 0..60 {
            for _ in 0..9_000 {
                window.record(millis(20), now);
            }
            for _ in 0..1_000 {
                window.record(millis(200), now);
            }
        }
        let near = |q, expected: f64| {
            let found = window.quantile(q, now).unwrap().as_secs_f64();
            assert!((found / expected - 1.0).abs() < 0.032, "{found} at {q}");
        };
        let mut near = near;
        near(0.5, 0.02);
        near(0.89, 0.02);
        near(0.92, 0.2);
        assert!(window.len(now) < 200_000);
    }

    proptest! {
        #[test]
        fn quantiles_are_within_three_hundredths(
            times in prop::collection::vec(100.0f64..1e8, 1..300),
            q in 0.01f64..0.999,
        ) {
            let now = Instant::now();
            let mut window = LatencyWindow::default();
            let mut sorted: Vec<f64> = times.iter().map(|micros| micros / 1e6).collect();
            sorted.sort_by(f64::total_cmp);
            for seconds in &sorted {
                window.record(Duration::from_secs_f64(*seconds), now);
            }
            let found = window.quantile(q, now).unwrap().as_secs_f64();
            let rank = (q * sorted.len() as f64 - 1e-9).ceil() as usize;
            let exact = sorted[rank.clamp(1, sorted.len()) - 1];
            prop_assert!((found / exact - 1.0).abs() <= 0.033, "{found} for {exact}");
        }
    }
}
