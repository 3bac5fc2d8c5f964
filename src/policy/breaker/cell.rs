//! The breaker as calls share it: a lock around the core, and a guard for each admitted attempt.
//!
//! The lock is held for tens of nanoseconds and never across an await. Atomics for the closed case were
//! rejected: failures in a row, window and epoch must change together.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::{Breaker, Open, Snapshot, State, Ticket, Verdict};
use crate::config;
use crate::fleet::Member;

/// One upstream's breaker, shared by its calls.
#[derive(Debug, Default)]
pub struct BreakerCell {
    pub(super) core: Mutex<Breaker>,
    /// Its part in the fleet.
    pub(super) member: Option<Member>,
    /// The turn in which it last heard how things are.
    pub(super) turn: AtomicU64,
    /// For the call that asks how things are.
    pub(super) catching_up: tokio::sync::Mutex<()>,
    /// For the call that asks whether it may probe.
    pub(super) asking: Arc<tokio::sync::Mutex<()>>,
}

impl BreakerCell {
    /// A closed breaker of a pod on its own.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// A closed breaker that other pods may have, too.
    pub fn of(member: Member) -> Arc<Self> {
        Arc::new(Self { member: Some(member), ..Self::default() })
    }

    /// Changes the core, and rings when it has news for the fleet. What only takes in news needs no bell.
    fn with<T>(&self, change: impl FnOnce(&mut Breaker) -> T) -> T {
        let mut core = self.core.lock();
        let had_news = core.news.is_some();
        let result = change(&mut core);
        let has_news = core.news.is_some() && !had_news;
        drop(core);
        if has_news && let Some(member) = &self.member {
            member.fleet.ring(&member.id);
        }
        result
    }

    /// Whether an attempt would be let through now. Takes nothing: for the question before the
    /// bulkhead's queue. A hedge asks [`state`](Self::state) as well, since it must not be a probe.
    ///
    /// # Errors
    ///
    /// [`Open`] when it would not.
    pub fn check(&self, cfg: &config::Breaker, now: Instant) -> Result<(), Open> {
        self.with(|core| core.check(cfg, now))
    }

    /// Lets an attempt through; the guard hands back its place, however the attempt ends.
    ///
    /// # Errors
    ///
    /// [`Open`] when no attempt may pass.
    pub fn admit(self: &Arc<Self>, cfg: &config::Breaker, now: Instant) -> Result<Admission, Open> {
        let ticket = self.with(|core| core.admit(cfg, now))?;
        Ok(Admission { cell: Arc::clone(self), ticket, is_finished: false })
    }

    /// Its state now.
    pub fn state(&self) -> State {
        self.core.lock().state()
    }

    /// What there is to see at `now`.
    pub fn snapshot(&self, now: Instant) -> Snapshot {
        self.core.lock().snapshot(now)
    }

    /// Refuses everything until told otherwise. Returns the state if it changed.
    pub fn force_open(&self) -> Option<State> {
        self.with(Breaker::force_open)
    }

    /// Whether forgetting it loses nothing: it is closed, nobody holds it there, and no failure is fresh.
    pub fn is_at_rest(&self, now: Instant) -> bool {
        let seen = self.snapshot(now);
        seen.state == State::Closed && !seen.is_forced && seen.failures_in_row == 0
    }

    /// Lets everything pass until told otherwise. Returns the state if it changed.
    pub fn force_closed(&self) -> Option<State> {
        self.with(Breaker::force_closed)
    }

    /// Back to closed with nothing counted. Returns the state if it changed.
    pub fn reset(&self) -> Option<State> {
        self.with(Breaker::reset)
    }
}

/// An attempt that the breaker let through.
///
/// Dropped without [`finish`](Self::finish) it counts as cancelled: a probe's place is free again and
/// nothing is decided, but an attempt that had passed `slow_after` counts as slow.
#[derive(Debug)]
#[must_use = "dropping it means that the attempt was cancelled"]
pub struct Admission {
    cell: Arc<BreakerCell>,
    ticket: Ticket,
    is_finished: bool,
}

impl Admission {
    /// Whether the attempt is to find out if the upstream is back.
    pub fn is_probe(&self) -> bool {
        self.ticket.is_probe
    }

    /// The state that the breaker moved to by admitting this, or before it without anybody being told;
    /// for metrics and log.
    pub fn moved(&self) -> Option<State> {
        self.ticket.moved
    }

    /// Tells how the attempt ended. Returns the state that the breaker moved to, if it did.
    pub fn finish(mut self, cfg: &config::Breaker, verdict: Verdict, now: Instant) -> Option<State> {
        self.is_finished = true;
        self.cell.with(|core| core.finish(self.ticket, cfg, verdict, now))
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        if !self.is_finished {
            self.cell.with(|core| core.abandon(self.ticket, Instant::now()));
        }
    }
}
