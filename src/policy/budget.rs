//! The extra-load budget of one upstream: what hedges and retries together may add to its load.
//!
//! A bound for each call ("at most two attempts") doubles the load exactly when the upstream is slow or
//! failing, and three such layers make it eight times. A share of the calls cannot: each call deposits
//! `ratio` of a token, each second deposits `floor`, so that a quiet caller may have an extra attempt
//! at all, and an extra attempt withdraws one token when it is decided, before any back-off.
//!
//! Savings are capped at ten seconds' worth of deposits, so an hour of calm does not pay for a storm.
//! That is `ratio` times the calls of the last ten seconds plus ten times `floor`: a figure that
//! follows the rate by itself and is exact from a call in five seconds to many thousands in one. A fixed
//! cap fits one rate alone. The calls are counted for each second; of the second that is leaving
//! the ten, the part that is still inside counts.
//!
//! Amounts are whole billionths of a token: ten deposits of a tenth make one token, which they do not
//! in floating point.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::config::ExtraLoad;

/// Billionths of a token.
type Amount = u64;

const TOKEN: Amount = 1_000_000_000;
const SECOND: u64 = 1_000_000_000;
/// What may be saved up.
const SAVED_SECONDS: u64 = 10;
/// The seconds that are wholly or partly inside the last ten.
const SLOTS: u64 = SAVED_SECONDS + 1;

/// The tokens for extra attempts.
///
/// Withdrawing never waits: `false` means no hedge and no retry.
#[derive(Debug, Default)]
pub struct ExtraLoadBudget {
    account: Mutex<Option<Account>>,
}

impl ExtraLoadBudget {
    /// Counts a call, which pays for its share of an extra attempt.
    pub fn deposit(&self, cfg: &ExtraLoad, now: Instant) {
        let mut account = self.account.lock();
        let account = account.get_or_insert_with(|| Account::open(cfg, now));
        account.advance(cfg, now);
        account.count_call();
        account.balance += ratio(cfg);
        account.cap(cfg);
    }

    /// Takes a token, if there is one.
    pub fn withdraw(&self, cfg: &ExtraLoad, now: Instant) -> bool {
        let mut account = self.account.lock();
        let account = account.get_or_insert_with(|| Account::open(cfg, now));
        account.advance(cfg, now);
        account.cap(cfg);
        let is_paid = account.balance >= TOKEN;
        if is_paid {
            account.balance -= TOKEN;
        }
        is_paid
    }

    /// Returns a token whose attempt was not made after all.
    pub fn give_back(&self, cfg: &ExtraLoad, now: Instant) {
        let mut account = self.account.lock();
        let account = account.get_or_insert_with(|| Account::open(cfg, now));
        account.balance += TOKEN;
        account.advance(cfg, now);
        account.cap(cfg);
    }

    /// The tokens at hand, for `/status`.
    pub fn balance(&self, cfg: &ExtraLoad, now: Instant) -> f64 {
        let mut account = self.account.lock();
        let account = account.get_or_insert_with(|| Account::open(cfg, now));
        account.advance(cfg, now);
        account.cap(cfg);
        account.balance as f64 / TOKEN as f64
    }
}

#[derive(Debug)]
struct Account {
    balance: Amount,
    opened: Instant,
    /// Nanoseconds from the opening up to which the floor is paid.
    paid_until: u64,
    /// Calls of each second since the opening, by its number modulo the slots.
    calls: [u32; SLOTS as usize],
    /// The sum of `calls`.
    recent: u64,
    /// The number of the present second.
    second: u64,
}

impl Account {
    /// Starts with one second's floor, or a process's first slow call could never be hedged.
    fn open(cfg: &ExtraLoad, now: Instant) -> Self {
        Self {
            balance: floor(cfg, Duration::from_secs(1)),
            opened: now,
            paid_until: 0,
            calls: [0; SLOTS as usize],
            recent: 0,
            second: 0,
        }
    }

    /// Pays the floor for the time since the last visit and drops the seconds that are over.
    fn advance(&mut self, cfg: &ExtraLoad, now: Instant) {
        let elapsed = now.saturating_duration_since(self.opened).as_nanos();
        let elapsed = u64::try_from(elapsed).unwrap_or(u64::MAX);
        // Another thread may have been here with a later `now`.
        let unpaid = elapsed.saturating_sub(self.paid_until).min(SAVED_SECONDS * SECOND);
        self.balance += floor(cfg, Duration::from_nanos(unpaid));
        self.paid_until = self.paid_until.max(elapsed);

        let second = self.paid_until / SECOND;
        for passed in 1..=(second - self.second).min(SLOTS) {
            let over = &mut self.calls[((self.second + passed) % SLOTS) as usize];
            self.recent -= u64::from(std::mem::take(over));
        }
        self.second = second;
    }

    fn count_call(&mut self) {
        let present = &mut self.calls[(self.second % SLOTS) as usize];
        if let Some(more) = present.checked_add(1) {
            *present = more;
            self.recent += 1;
        }
    }

    /// Forgets what exceeds ten seconds' worth of deposits.
    fn cap(&mut self, cfg: &ExtraLoad) {
        let leaving = u64::from(self.calls[((self.second + 1) % SLOTS) as usize]);
        let gone = (self.paid_until % SECOND) as f64 / SECOND as f64;
        let calls = self.recent as f64 - leaving as f64 * gone;
        let most = floor(cfg, Duration::from_secs(SAVED_SECONDS)) + (calls * ratio(cfg) as f64) as Amount;
        self.balance = self.balance.min(most);
    }
}

fn ratio(cfg: &ExtraLoad) -> Amount {
    (cfg.ratio.fraction() * TOKEN as f64).round() as Amount
}

/// A token a second is a billionth a nanosecond.
fn floor(cfg: &ExtraLoad, time: Duration) -> Amount {
    (cfg.floor.in_a_second() * time.as_nanos() as f64) as Amount
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::units::{Percent, Rate};

    fn config(ratio: f64, floor: f64) -> ExtraLoad {
        ExtraLoad { ratio: Percent::new(ratio), floor: Rate::per_second(floor) }
    }

    fn withdraw_all(budget: &ExtraLoadBudget, cfg: &ExtraLoad, now: Instant) -> u64 {
        let mut taken = 0;
        while budget.withdraw(cfg, now) {
            taken += 1;
        }
        taken
    }

    /// Calls at a steady rate from second 0 on, the last at the end; returns the end.
    fn calls(budget: &ExtraLoadBudget, cfg: &ExtraLoad, per_second: f64, seconds: f64) -> Instant {
        let start = Instant::now();
        let count = (per_second * seconds).round() as u32;
        let mut now = start;
        for call in 0..=count {
            now = start + Duration::from_secs_f64(f64::from(call) / per_second);
            budget.deposit(cfg, now);
        }
        now
    }

    #[test]
    fn it_starts_with_one_second_of_the_floor() {
        let now = Instant::now();
        let budget = ExtraLoadBudget::default();
        assert_eq!(withdraw_all(&budget, &config(10.0, 3.0), now), 3);
        let budget = ExtraLoadBudget::default();
        assert_eq!(withdraw_all(&budget, &config(10.0, 0.0), now), 0);
    }

    #[test]
    fn ten_calls_at_a_tenth_pay_for_exactly_one() {
        let cfg = config(10.0, 0.0);
        let now = Instant::now();
        let budget = ExtraLoadBudget::default();
        for _ in 0..9 {
            budget.deposit(&cfg, now);
        }
        assert!(!budget.withdraw(&cfg, now));
        budget.deposit(&cfg, now);
        assert!(budget.withdraw(&cfg, now));
        assert!(!budget.withdraw(&cfg, now));
    }

    #[test]
    fn savings_are_ten_seconds_worth_at_any_rate() {
        for (per_second, ratio, floor, worth) in [
            // Two calls of a half each, and ten from the floor.
            (0.2, 50.0, 1.0, 11),
            (0.2, 10.0, 0.0, 0),
            (1.0, 10.0, 0.0, 1),
            (1.0, 10.0, 1.0, 11),
            (10.0, 10.0, 1.0, 20),
            (500.0, 10.0, 1.0, 510),
            (500.0, 1.0, 0.2, 52),
        ] {
            for seconds in [30.0, 60.0, 85.0] {
                let cfg = config(ratio, floor);
                let budget = ExtraLoadBudget::default();
                let end = calls(&budget, &cfg, per_second, seconds);
                let taken = withdraw_all(&budget, &cfg, end);
                assert_eq!(taken, worth, "{per_second}/s, {ratio} %, floor {floor}/s, {seconds} s");
            }
        }
    }

    #[test]
    fn a_steady_rate_gets_its_share_and_the_floor() {
        for per_second in [0.2, 1.0, 10.0, 500.0] {
            let cfg = config(10.0, 1.0);
            let budget = ExtraLoadBudget::default();
            let start = Instant::now();
            let seconds = 1_000.0;
            let count = (per_second * seconds) as u32;
            let mut taken = 0;
            for call in 0..=count {
                let now = start + Duration::from_secs_f64(f64::from(call) / per_second);
                budget.deposit(&cfg, now);
                taken += withdraw_all(&budget, &cfg, now);
            }
            let due = 0.1 * f64::from(count + 1) + seconds + 1.0;
            assert!((due - 1.001..=due).contains(&(taken as f64)), "{taken} of {due} at {per_second}/s");
        }
    }

    #[test]
    fn an_hour_of_silence_saves_no_more_than_ten_seconds_of_floor() {
        let cfg = config(10.0, 1.0);
        let budget = ExtraLoadBudget::default();
        let end = calls(&budget, &cfg, 500.0, 30.0);
        assert_eq!(withdraw_all(&budget, &cfg, end + Duration::from_secs(3600)), 10);
    }

    #[test]
    fn what_the_last_ten_seconds_brought_leaves_evenly() {
        let cfg = config(10.0, 0.0);
        for (after, left) in [(0.0, 100.0), (2.5, 75.0), (9.0, 10.0), (10.5, 0.0)] {
            let budget = ExtraLoadBudget::default();
            let end = calls(&budget, &cfg, 100.0, 30.0);
            let balance = budget.balance(&cfg, end + Duration::from_secs_f64(after));
            assert!((balance - left).abs() <= 0.11, "{balance} after {after} s");
        }
    }

    proptest! {
        #[test]
        fn it_never_grants_more_than_was_deposited(
            ratio in 0.0f64..100.0,
            floor in 0.0f64..5.0,
            steps in prop::collection::vec((0u64..3_000, 0u8..4, 0u8..4), 1..200),
        ) {
            let cfg = config(ratio, floor);
            let budget = ExtraLoadBudget::default();
            let start = Instant::now();
            let mut now = start;
            let (mut calls, mut taken) = (Vec::new(), 0u32);
            for (gap, arrivals, extras) in steps {
                now += Duration::from_millis(gap);
                for _ in 0..arrivals {
                    budget.deposit(&cfg, now);
                    calls.push(now);
                }
                let recent = calls.iter().filter(|at| now - **at < Duration::from_secs(11)).count();
                let most = ratio / 100.0 * recent as f64 + floor * 10.0;
                let balance = budget.balance(&cfg, now);
                prop_assert!((0.0..=most + 1e-6).contains(&balance), "{balance} of at most {most}");
                for _ in 0..extras {
                    taken += u32::from(budget.withdraw(&cfg, now));
                }
                let seconds = (now - start).as_secs_f64();
                let deposited = ratio / 100.0 * calls.len() as f64 + floor * (seconds + 1.0);
                prop_assert!(f64::from(taken) <= deposited + 1e-6);
            }
        }
    }
}
