//! Counts over the last `window`, in ten buckets.
//!
//! Each bucket covers a tenth of the window and forgets itself when the ring comes round to it, so the
//! counts are exact for the last nine to ten tenths, at any rate of calls. A window of the last N calls
//! was rejected: on a quiet upstream it judges by what happened hours ago.

use std::time::Duration;

use tokio::time::Instant;

const BUCKETS: u64 = 10;

/// What is counted. A call is `judged` when it ends and `timed` when its speed is known: at its end, or
/// when it passes the slow mark while it still runs. So the two totals differ.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Calls that ended in success or failure.
    pub(super) judged: u32,
    /// Of these, the failures.
    pub(super) failed: u32,
    /// Of these, the ones in which there was no way to the upstream.
    pub(super) unreached: u32,
    /// Calls whose speed is known.
    pub(super) timed: u32,
    /// Of these, the slow ones.
    pub(super) slow: u32,
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.judged += other.judged;
        self.failed += other.failed;
        self.unreached += other.unreached;
        self.timed += other.timed;
        self.slow += other.slow;
    }

    fn take_away(&mut self, other: Self) {
        self.judged -= other.judged;
        self.failed -= other.failed;
        self.unreached -= other.unreached;
        self.timed -= other.timed;
        self.slow -= other.slow;
    }
}

/// The ring. Buckets are numbered from the first instant seen; the sum is kept, so reading is cheap.
#[derive(Debug, Default)]
pub(super) struct Window {
    anchor: Option<Instant>,
    /// Nanoseconds of one bucket.
    width: u64,
    /// Number of the newest bucket.
    newest: u64,
    ring: [Counts; BUCKETS as usize],
    sum: Counts,
}

impl Window {
    /// Moves on to `now` under a window of `length`, dropping what has left it.
    pub(super) fn roll(&mut self, length: Duration, now: Instant) {
        let width = (nanos(length) / BUCKETS).max(1);
        if width != self.width {
            self.resize(width, now);
        }
        self.advance_to(self.bucket_at(now));
    }

    /// Counts what happened at `at`. What happened before the window is left out.
    ///
    /// Must follow a [`roll`](Self::roll) to the present.
    pub(super) fn record(&mut self, counts: Counts, at: Instant) {
        let bucket = self.bucket_at(at);
        self.advance_to(bucket);
        if bucket + BUCKETS > self.newest {
            self.ring[slot(bucket)].add(counts);
            self.sum.add(counts);
        }
    }

    /// The counts of the window as of the last roll.
    pub(super) fn sum(&self) -> Counts {
        self.sum
    }

    /// The counts that are still inside the window at `now`.
    pub(super) fn sum_at(&self, now: Instant) -> Counts {
        let newest = self.bucket_at(now).max(self.newest);
        let mut sum = Counts::default();
        for bucket in self.oldest()..=self.newest {
            if bucket + BUCKETS > newest {
                sum.add(self.ring[slot(bucket)]);
            }
        }
        sum
    }

    /// Forgets all counts.
    pub(super) fn clear(&mut self) {
        self.ring = Default::default();
        self.sum = Counts::default();
    }

    fn advance_to(&mut self, bucket: u64) {
        if bucket <= self.newest {
            return;
        }
        let steps = (bucket - self.newest).min(BUCKETS);
        for passed in 1..=steps {
            let gone = std::mem::take(&mut self.ring[slot(self.newest + passed)]);
            self.sum.take_away(gone);
        }
        self.newest = bucket;
    }

    /// A reload changed the window's length: each old bucket's counts move to the new bucket that holds
    /// its middle, so that what is known is neither lost nor counted twice.
    fn resize(&mut self, width: u64, now: Instant) {
        let anchor = *self.anchor.get_or_insert(now);
        let old = std::mem::take(self);
        self.anchor = Some(anchor);
        self.width = width;
        self.newest = self.bucket_at(now);
        for bucket in old.oldest()..=old.newest {
            let middle = bucket * old.width + old.width / 2;
            let counts = old.ring[slot(bucket)];
            self.record(counts, anchor + Duration::from_nanos(middle.min(nanos(now - anchor))));
        }
    }

    fn oldest(&self) -> u64 {
        self.newest.saturating_sub(BUCKETS - 1)
    }

    fn bucket_at(&self, at: Instant) -> u64 {
        match self.anchor {
            Some(anchor) => nanos(at.saturating_duration_since(anchor)) / self.width,
            None => 0,
        }
    }
}

fn slot(bucket: u64) -> usize {
    (bucket % BUCKETS) as usize
}

/// Enough for 584 years, and a division of `u64` is several times faster than one of `u128`.
fn nanos(length: Duration) -> u64 {
    u64::try_from(length.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEN_SECONDS: Duration = Duration::from_secs(10);
    const FAILURE: Counts = Counts { judged: 1, failed: 1, unreached: 0, timed: 0, slow: 0 };

    #[test]
    fn counts_leave_the_window_bucket_by_bucket() {
        let start = Instant::now();
        let mut window = Window::default();
        for second in 0..10 {
            let now = start + Duration::from_secs(second);
            window.roll(TEN_SECONDS, now);
            window.record(FAILURE, now);
        }
        for (second, left) in [(9, 10), (10, 9), (15, 4), (18, 1), (19, 0), (500, 0)] {
            let now = start + Duration::from_secs(second);
            assert_eq!(window.sum_at(now).failed, left, "read only, after {second} s");
        }
        window.roll(TEN_SECONDS, start + Duration::from_secs(15));
        assert_eq!(window.sum().failed, 4);
    }

    #[test]
    fn a_new_length_keeps_what_lies_within_it() {
        let start = Instant::now();
        let now = start + Duration::from_secs(9);
        let mut window = Window::default();
        for second in 0..10 {
            let at = start + Duration::from_secs(second);
            window.roll(TEN_SECONDS, at);
            window.record(FAILURE, at);
        }
        window.roll(Duration::from_secs(60), now);
        assert_eq!(window.sum().failed, 10, "a longer window keeps all");
        window.roll(Duration::from_secs(60), start + Duration::from_secs(59));
        assert_eq!(window.sum().failed, 10, "and keeps it longer");
        window.roll(Duration::from_secs(5), start + Duration::from_secs(59));
        assert_eq!(window.sum().failed, 0, "a shorter one forgets at once");
    }

    proptest! {
        #[test]
        fn sums_equal_a_naive_recount(
            gaps in prop::collection::vec(0u64..4_000, 1..200),
            lengths in prop::collection::vec(prop_oneof![Just(1_000u64), Just(7_000), Just(60_000)], 1),
        ) {
            let start = Instant::now();
            let length = Duration::from_millis(lengths[0]);
            let width = lengths[0] / BUCKETS;
            let mut window = Window::default();
            let mut seen: Vec<u64> = Vec::new();
            let mut at = 0;
            for gap in gaps {
                at += gap;
                let now = start + Duration::from_millis(at);
                window.roll(length, now);
                // The anchor is the first instant seen.
                let first = *seen.first().unwrap_or(&at);
                window.record(FAILURE, now);
                seen.push(at);
                let newest = (at - first) / width;
                let naive = seen.iter().filter(|t| (*t - first) / width + BUCKETS > newest).count();
                prop_assert_eq!(window.sum().judged as usize, naive);
                prop_assert_eq!(window.sum_at(now), window.sum());
            }
        }
    }
}
