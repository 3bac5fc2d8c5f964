//! The token bucket itself: plain arithmetic, without waiters and pauses.
//!
//! It is GCRA seen from its other end: what is kept is the time that was saved up, of which a token costs the
//! interval between two. The textbook keeps the time at which the bucket would be full again; but a change of the
//! rate would stretch that debt, and a caller who raised 1/s to 100/s would wait at the old pace for
//! minutes. What is at hand is carried over in tokens: a reload neither gives nor takes any, except
//! those beyond a smaller burst. So no sequence of reloads lets more through than the largest burst and
//! what the rates brought meanwhile.
//!
//! Amounts are whole picoseconds. In nanoseconds the interval of 700,000/s would be off by 0.03 %, and
//! floating point gains or loses a token in the course of days. What does not divide is rounded against
//! the caller.

use std::time::Duration;

use tokio::time::Instant;

use crate::config::RateLimit;

const PICOS_IN_A_SECOND: f64 = 1e12;
const PICOS_IN_A_NANO: u128 = 1000;
/// Beyond it, when a token comes is of no interest to anybody; and it can be added to any time.
const FAR: Duration = Duration::from_secs(30 * 365 * 86_400);

/// How fast tokens come back and how many are kept.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pace {
    /// Picoseconds from one token to the next; never zero once set.
    interval: u64,
    burst: u32,
}

impl Pace {
    pub(super) fn of(cfg: &RateLimit) -> Self {
        // Reading `60/h` and dividing are each off by a rounding, which must not add a whole picosecond.
        let exact = PICOS_IN_A_SECOND / cfg.rate.in_a_second() * (1.0 - 2.0 * f64::EPSILON);
        // The cast ends at 213 days between two tokens, for a rate of zero as well.
        Self { interval: (exact.ceil() as u64).max(1), burst: cfg.burst.max(1) }
    }

    fn cost(self, tokens: u64) -> u128 {
        u128::from(tokens) * u128::from(self.interval)
    }

    fn most(self) -> u128 {
        self.cost(self.burst.into())
    }
}

/// Tokens at hand. Full when its first pace is set.
#[derive(Debug, Default)]
pub(super) struct Bucket {
    /// The settings as last seen: amounts are in its intervals, and those who wait bring no newer ones.
    pace: Pace,
    /// Picoseconds; at most the burst's worth.
    saved: u128,
    /// Up to when time is saved up; `None` before the first pace.
    at: Option<Instant>,
}

impl Bucket {
    /// Takes up the settings; whether they are others than before.
    pub(super) fn set_pace(&mut self, pace: Pace, now: Instant) -> bool {
        self.advance(now);
        if self.pace == pace {
            return false;
        }
        let old = u128::from(self.pace.interval);
        self.saved = match old {
            0 => pace.most(),
            // Whole tokens and the rest apart, so that no product exceeds 128 bits.
            old => {
                let (tokens, rest) = (self.saved / old, self.saved % old);
                let new = u128::from(pace.interval);
                (tokens * new + rest * new / old).min(pace.most())
            }
        };
        self.pace = pace;
        true
    }

    /// Adds tokens from elsewhere; what is beyond the burst is lost.
    pub(super) fn add(&mut self, tokens: u32, now: Instant) {
        self.advance(now);
        self.saved = (self.saved + self.pace.cost(tokens.into())).min(self.pace.most());
    }

    /// Drops what is at hand. A bucket without a pace yet will not start full.
    pub(super) fn empty(&mut self) {
        self.saved = 0;
        if self.pace.interval == 0 {
            self.pace = Pace { interval: 1, burst: 1 };
        }
    }

    /// Takes a token, if one is at hand.
    pub(super) fn take(&mut self, now: Instant) -> bool {
        self.advance(now);
        let cost = self.pace.cost(1);
        let is_there = self.saved >= cost;
        if is_there {
            self.saved -= cost;
        }
        is_there
    }

    /// When the last of `count` tokens comes, none of which is taken before `from`: until then no more
    /// than the burst is saved up. `now` at the earliest.
    pub(super) fn time_of(&mut self, count: u64, from: Instant, now: Instant) -> Instant {
        self.advance(now);
        let missing = self.pace.cost(count).saturating_sub(self.saved);
        let beyond = self.pace.cost(count).saturating_sub(self.pace.most());
        later(self.now(now), missing).max(later(from, beyond))
    }

    /// Whole tokens at hand.
    pub(super) fn at_hand(&mut self, now: Instant) -> u32 {
        self.advance(now);
        // At most the burst.
        (self.saved / u128::from(self.pace.interval.max(1))) as u32
    }

    /// When the bucket is full, if nobody takes any.
    pub(super) fn full_at(&mut self, now: Instant) -> Instant {
        self.time_of(self.pace.burst.into(), now, now)
    }

    /// Another thread may have been here with a later `now`: then nothing is added.
    fn advance(&mut self, now: Instant) {
        let passed = self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        self.saved = (self.saved + passed.as_nanos() * PICOS_IN_A_NANO).min(self.pace.most());
        self.at = Some(self.now(now));
    }

    fn now(&self, now: Instant) -> Instant {
        self.at.map_or(now, |at| at.max(now))
    }
}

fn later(from: Instant, picos: u128) -> Instant {
    let nanos = u64::try_from(picos.div_ceil(PICOS_IN_A_NANO)).unwrap_or(u64::MAX);
    from + Duration::from_nanos(nanos).min(FAR)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Rate;

    fn pace(rate: &str, burst: u32) -> Pace {
        let rate: Rate = rate.parse().unwrap();
        Pace::of(&RateLimit { rate, burst, max_pause: Duration::ZERO, is_shared: false })
    }

    fn bucket(rate: &str, burst: u32, now: Instant) -> Bucket {
        let mut bucket = Bucket::default();
        bucket.set_pace(pace(rate, burst), now);
        bucket
    }

    fn take_all(bucket: &mut Bucket, now: Instant) -> u32 {
        (0..).take_while(|_| bucket.take(now)).count() as u32
    }

    #[test]
    fn it_starts_full_and_a_token_comes_back_to_the_nanosecond() {
        for (rate, nanos) in [
            ("1/h", 3_600_000_000_000),
            ("60/h", 60_000_000_000),
            ("700/h", 5_142_857_143),
            ("30/m", 2_000_000_000),
            ("3/s", 333_333_334),
            ("200/s", 5_000_000),
            ("1000000/s", 1_000),
        ] {
            let now = Instant::now();
            let mut bucket = bucket(rate, 5, now);
            assert_eq!(take_all(&mut bucket, now), 5, "{rate}");
            let next = bucket.time_of(1, now, now);
            assert_eq!(next - now, Duration::from_nanos(nanos), "{rate}");
            assert!(!bucket.take(next - Duration::from_nanos(1)), "{rate}");
            assert!(bucket.take(next), "{rate}");
            assert!(!bucket.take(next), "{rate}");
        }
    }

    #[test]
    fn a_rate_that_does_not_divide_keeps_its_pace() {
        // 7/s for a day, 700,000/s for a second in ten looks.
        for (rate, step, steps, due) in [("7/s", 1_000, 86_400, 604_800), ("700000/s", 100, 10, 700_000)] {
            let start = Instant::now();
            let mut bucket = bucket(rate, 100_000, start);
            take_all(&mut bucket, start);
            let taken: u32 =
                (1..=steps).map(|n| take_all(&mut bucket, start + Duration::from_millis(step * n))).sum();
            assert!((due - 1..=due).contains(&taken), "{taken} of {due} at {rate}");
        }
    }

    #[test]
    fn the_last_of_many_is_known_beforehand() {
        let now = Instant::now();
        let mut bucket = bucket("10/s", 3, now);
        let millis = |n| now + Duration::from_millis(n);
        assert_eq!(bucket.time_of(3, now, now), now);
        assert_eq!(bucket.time_of(5, now, now), millis(200));
        // By then the bucket is as full as it gets.
        assert_eq!(bucket.time_of(5, millis(1000), now), millis(1200));
        assert!(bucket.take(now) && bucket.take(now) && bucket.take(now));
        assert_eq!(bucket.time_of(2, millis(150), now), millis(200));
        assert_eq!(bucket.full_at(now), millis(300));
    }

    #[test]
    fn a_clock_that_seems_to_step_back_adds_nothing() {
        let start = Instant::now();
        let mut bucket = bucket("1/s", 2, start);
        let later = start + Duration::from_secs(60);
        assert_eq!(take_all(&mut bucket, later), 2);
        assert!(!bucket.take(start));
        assert!(!bucket.take(later));
        assert!(bucket.take(later + Duration::from_secs(1)));
    }

    #[test]
    fn a_reload_carries_over_what_is_at_hand() {
        let now = Instant::now();
        let mut bucket = bucket("1/h", 10, now);
        for _ in 0..6 {
            bucket.take(now);
        }
        assert!(bucket.set_pace(pace("1000/s", 100), now));
        assert_eq!(bucket.at_hand(now), 4);
        assert!(!bucket.set_pace(pace("1000/s", 100), now));
        bucket.set_pace(pace("1000/s", 3), now);
        bucket.set_pace(pace("1000/s", 100), now);
        assert_eq!(bucket.at_hand(now), 3, "a smaller burst takes what is beyond it");
        assert_eq!(take_all(&mut bucket, now), 3);
        bucket.set_pace(pace("1/h", 10), now);
        bucket.set_pace(pace("100/s", 10), now);
        assert_eq!(bucket.time_of(1, now, now) - now, Duration::from_millis(10), "no debt of the slow days");
    }

    #[test]
    fn extremes_do_not_overflow() {
        let now = Instant::now();
        for rate in ["0/s", "0.0001/h", "1/h", "1000000000/s"] {
            let mut bucket = bucket(rate, u32::MAX, now);
            assert_eq!(bucket.at_hand(now), u32::MAX, "{rate}");
            assert!(bucket.take(now));
            assert!(bucket.time_of(u64::from(u32::MAX) + 20_000, now, now) > now);
            bucket.set_pace(pace("0/s", u32::MAX), now);
            assert!(bucket.at_hand(now) >= u32::MAX - 1, "{rate}");
        }
    }
}
