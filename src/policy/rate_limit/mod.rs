//! The rate limit of one upstream: so many calls in each second, so many more at once, and none while the
//! upstream itself asks for a pause.
//!
//! A token is waited for in order of arrival, and only if it will come before the deadline. That time is
//! known, not guessed: the bucket says when it will have brought a token for each of those ahead and one
//! more. So a call that would be late is told at once when to come back, and the rule bounds the line by
//! itself where the rate is low. Where it is high a number does.
//!
//! An upstream that has had enough of one credential says so to every call that shows it. Its pause stops these
//! calls here, instead of a storm of further 429s, and nobody else: they wait for its end beside the
//! line, those already in line step out of it, and when it is over they join at the end, in their order.
//! To put them back in front would break what those who came meanwhile were told. A pause of everyone
//! is waited out in the line. Either way the surge that was held back goes through the bucket like all else.
//!
//! Nobody is woken but who has something to do: the first in line, who sleeps until its token; the first of
//! those held by each pause; and who has to hear that it will be late. A call takes its token itself, in the
//! step in which it returns. So there is no token on its way to somebody who has just gone, and who leaves
//! the line only makes it shorter. The lock is held for one step at a time, never across a wait.
//!
//! The governor crate was rejected. Its settings are fixed when it is made, so that a reload would start
//! with a full bucket. Those who wait there poll on timers of their own: the order is luck, newcomers overtake, the time
//! of a token is not known, and it advises jitter against the herd.

mod bucket;
mod line;
mod pauses;
mod shared;

#[cfg(test)]
pub(crate) mod simulated;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use self::bucket::Bucket;
use self::line::{Line, Waiter};
use self::pauses::{Group, Pauses};
use self::shared::Share;
use crate::config::RateLimit;
use crate::fleet::Member;
use crate::policy::identity::Credential;

/// Calls that wait, in line and for pauses together. At a thousand calls a second it is a wait of a
/// quarter of a minute; at a million the wait for the deadline would bound nothing.
const MOST_WAITING: usize = 16_384;
/// What a call without a deadline waits for: as long as the longest deadline that a policy grants by
/// default. At `1/h` the third in line would otherwise sit there for hours.
const LONGEST_WAIT: Duration = Duration::from_secs(15 * 60);

/// No token in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooLate {
    /// When a token could be had, as things are now.
    pub retry_at: Instant,
}

/// To whom an upstream says that it wants a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whom {
    /// To all calls: the upstream is overloaded.
    Everyone,
    /// To calls with this credential, or to those without any: they have used up what they may.
    Credential(Option<Credential>),
}

/// What `/status` shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// Whole tokens at hand.
    pub tokens: u32,
    /// When the bucket is full, if nobody takes any.
    pub full_at: Instant,
    /// Calls that wait for a token.
    pub in_line: usize,
    /// Calls that wait for the end of their credential's pause.
    pub held: usize,
    /// Credentials that are paused.
    pub paused: usize,
    /// The end of the longest pause, everyone's included.
    pub paused_until: Option<Instant>,
}

/// Tokens, the line for them, and pauses.
#[derive(Debug, Default)]
pub struct RateLimiter {
    state: Mutex<State>,
    /// Its part in the fleet.
    member: Option<Member>,
    /// For the one who asks for a share.
    asking: Arc<tokio::sync::Mutex<()>>,
}

impl RateLimiter {
    /// One whose rate other pods may have a part in.
    pub fn of(member: Member) -> Arc<Self> {
        Arc::new(Self { member: Some(member), ..Self::default() })
    }

    /// A token, if one is free now, nobody waits for it and `who` is not paused; for a hedge, which
    /// never waits.
    pub fn try_acquire(&self, cfg: &RateLimit, who: Option<Credential>, now: Instant) -> bool {
        self.try_acquire_for(cfg, || who, now)
    }

    /// The same; who asks is found out only if anybody is paused at all.
    pub fn try_acquire_for(
        &self,
        cfg: &RateLimit,
        who: impl FnOnce() -> Option<Credential>,
        now: Instant,
    ) -> bool {
        let mut state = self.serve(cfg, now);
        let is_taken = match state.pauses.are_over(now) {
            true => state.take_unpaused(now),
            false => state.take_free(&who(), now),
        };
        if is_taken && cfg.is_shared {
            state.share.count(now);
        }
        is_taken
    }

    /// Whether who asks is paused; found out only if anybody is.
    pub fn is_paused(&self, who: impl FnOnce() -> Option<Credential>, now: Instant) -> bool {
        let mut state = self.state.lock();
        !state.pauses.are_over(now) && state.pauses.find(&who()).is_some_and(|pause| pause.until > now)
    }

    /// A token, after a wait in line if need be. Without a deadline it waits for up to 15 minutes. Settings
    /// that a reload brings meanwhile count, as soon as any call comes with them.
    ///
    /// Cancel-safe: a dropped waiter leaves the line and has taken nothing.
    ///
    /// # Errors
    ///
    /// [`TooLate`] at once when the token is not expected before the deadline, or too many wait; later
    /// only when a pause or a reload came between.
    pub async fn acquire(
        &self,
        cfg: &RateLimit,
        who: Option<Credential>,
        now: Instant,
        deadline: Option<Instant>,
    ) -> Result<(), TooLate> {
        if self.try_acquire(cfg, who, now) {
            return Ok(());
        }
        if cfg.is_shared {
            self.state.lock().share.count(now);
        }
        let waiter = Waiter::new(who, deadline.unwrap_or(now + LONGEST_WAIT));
        let place = Place { limiter: self, waiter };
        let mut now = now;
        loop {
            let step = self.state.lock().step(&place.waiter, now);
            match step {
                Step::Taken => return Ok(()),
                Step::Refused(too_late) => return Err(too_late),
                Step::WaitUntil(at) => {
                    tokio::select! {
                        () = tokio::time::sleep_until(at) => {}
                        () = place.waiter.woken() => {}
                    }
                }
                Step::Wait => place.waiter.woken().await,
            }
            now = Instant::now();
        }
    }

    /// The upstream wants no calls of `whom` before `until`, at most `max_pause` from now. A later end
    /// extends a pause, an earlier one does not shorten it.
    pub fn pause(&self, cfg: &RateLimit, whom: Whom, until: Instant, now: Instant) {
        let until = now.checked_add(cfg.max_pause).map_or(until, |most| until.min(most));
        if until > now {
            self.state.lock().pause(whom, until, now);
        }
    }

    /// What there is, for `/status`.
    pub fn view(&self, cfg: &RateLimit, now: Instant) -> View {
        let mut state = self.serve(cfg, now);
        let (paused, longest) = state.pauses.live(now);
        View {
            tokens: state.bucket.at_hand(now),
            full_at: state.bucket.full_at(now),
            in_line: state.line.len(),
            held: state.waiting - state.line.len(),
            paused,
            paused_until: state.everyone.filter(|until| *until > now).max(longest),
        }
    }

    /// Takes up the settings. When they are new, the first in line may be in time sooner, or no more.
    fn serve(&self, cfg: &RateLimit, now: Instant) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        let pace = state.pace(cfg, self.member.as_ref(), now);
        if state.bucket.set_pace(pace, now) {
            state.line.wake_first();
        }
        state
    }
}

/// Stands where the waiter stands; leaves when dropped.
struct Place<'a> {
    limiter: &'a RateLimiter,
    waiter: Waiter,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.limiter.state.lock().leave(&self.waiter);
    }
}

/// What a waiter does next.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Taken,
    Refused(TooLate),
    WaitUntil(Instant),
    /// Until it is woken: another one looks at the clock.
    Wait,
}

/// Everything that is decided, without a wait. A waiter stands in the pause of its group as long as there is
/// one, otherwise in line; nowhere only before its first step and after a move that made it late.
#[derive(Debug, Default)]
struct State {
    bucket: Bucket,
    line: Line,
    /// The end of everyone's last pause.
    everyone: Option<Instant>,
    pauses: Pauses,
    /// In line and in pauses.
    waiting: usize,
    share: Share,
    /// The settings of a rate that others have a part in, as last seen: those who wait bring no newer ones.
    whole: Option<RateLimit>,
}

impl State {
    fn take_free(&mut self, group: &Group, now: Instant) -> bool {
        self.end_pause_if_over(group, now);
        self.pauses.find(group).is_none() && self.take_unpaused(now)
    }

    fn take_unpaused(&mut self, now: Instant) -> bool {
        self.line.len() == 0 && self.opens(now) <= now && self.bucket.take(now)
    }

    fn step(&mut self, waiter: &Waiter, now: Instant) -> Step {
        self.end_pause_if_over(&waiter.group, now);
        if !self.stands(waiter)
            && let Err(too_late) = self.enter(waiter, now)
        {
            return Step::Refused(too_late);
        }
        match self.pauses.find(&waiter.group) {
            Some(pause) if !pause.held.is_first(waiter) => Step::Wait,
            Some(pause) => {
                let until = pause.until;
                self.wait_or_leave(waiter, until)
            }
            None if !self.line.is_first(waiter) => Step::Wait,
            None => self.step_of_first(waiter, now),
        }
    }

    fn step_of_first(&mut self, waiter: &Waiter, now: Instant) -> Step {
        let opens = self.opens(now);
        // Behind a reload to a lower rate one may come to be first with its deadline over.
        if opens <= now && now < waiter.deadline && self.bucket.take(now) {
            self.leave(waiter);
            return Step::Taken;
        }
        let at = self.time_of(1, opens, now);
        self.wait_or_leave(waiter, at)
    }

    /// What was in time when the waiter came may be late by now, through a pause or a reload.
    fn wait_or_leave(&mut self, waiter: &Waiter, at: Instant) -> Step {
        if at < waiter.deadline {
            return Step::WaitUntil(at);
        }
        self.leave(waiter);
        Step::Refused(TooLate { retry_at: at })
    }

    /// Joins those who wait for the group's pause, or the line, at its end.
    fn enter(&mut self, waiter: &Waiter, now: Instant) -> Result<(), TooLate> {
        let at = self.time_of_newcomer(&waiter.group, now);
        if at >= waiter.deadline || self.waiting >= MOST_WAITING {
            return Err(TooLate { retry_at: at });
        }
        self.waiting += 1;
        match self.pauses.find(&waiter.group) {
            Some(pause) => pause.held.push(waiter.clone()),
            None => self.line.push(waiter.clone()),
        }
        Ok(())
    }

    fn leave(&mut self, waiter: &Waiter) {
        let was_held = self.pauses.find(&waiter.group).is_some_and(|pause| pause.held.remove(waiter));
        if was_held || self.line.remove(waiter) {
            self.waiting -= 1;
        }
    }

    fn stands(&mut self, waiter: &Waiter) -> bool {
        self.line.contains(waiter)
            || self.pauses.find(&waiter.group).is_some_and(|pause| pause.held.contains(waiter))
    }

    fn is_first(&mut self, waiter: &Waiter) -> bool {
        self.line.is_first(waiter)
            || self.pauses.find(&waiter.group).is_some_and(|pause| pause.held.is_first(waiter))
    }

    /// When a newcomer's token comes, as far as can be known: whoever arrives in a pause goes ahead of those
    /// whom it holds.
    fn time_of_newcomer(&mut self, group: &Group, now: Instant) -> Instant {
        let opens = self.opens(now);
        let in_line = self.line.len() as u64;
        let Some(pause) = self.pauses.find(group) else {
            return self.time_of(in_line + 1, opens, now);
        };
        let (held, until) = (pause.held.len() as u64, pause.until);
        let after_line = self.time_of(in_line + held + 1, opens, now);
        after_line.max(self.time_of(held + 1, until, now))
    }

    /// The end of everyone's pause; `now` without one.
    fn opens(&self, now: Instant) -> Instant {
        self.everyone.map_or(now, |until| until.max(now))
    }

    fn pause(&mut self, whom: Whom, until: Instant, now: Instant) {
        match whom {
            Whom::Everyone if self.everyone < Some(until) => {
                self.everyone = Some(until);
                self.waiting -= self.line.dismiss_late(until);
            }
            Whom::Everyone => {}
            Whom::Credential(group) => self.pause_group(group, until, now),
        }
    }

    fn pause_group(&mut self, group: Group, until: Instant, now: Instant) {
        self.end_pause_if_over(&group, now);
        if let Some(late) = self.pauses.extend(&group, until) {
            self.waiting -= late;
            return;
        }
        let (has_begun, led_back) = self.pauses.begin(group, until, now);
        for held in led_back {
            self.enter_again(held, now);
        }
        if has_begun {
            let stepped_out = self.line.remove_group(&group);
            self.enter_again(stepped_out, now);
        }
    }

    fn end_pause_if_over(&mut self, group: &Group, now: Instant) {
        if let Some(held) = self.pauses.end_if_over(group, now) {
            self.enter_again(held, now);
        }
    }

    /// Moves waiters to where they belong now. Who is late there is woken to hear it, who is first, to
    /// look at the clock.
    fn enter_again(&mut self, waiters: impl IntoIterator<Item = Waiter>, now: Instant) {
        for waiter in waiters {
            self.waiting -= 1;
            if self.enter(&waiter, now).is_err() || self.is_first(&waiter) {
                waiter.wake();
            }
        }
    }
}
