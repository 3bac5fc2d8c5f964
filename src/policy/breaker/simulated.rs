//! The breaker's part in the fleet as a simulation plays it, which carries questions and answers itself.

use std::sync::atomic::Ordering;

use tokio::time::Instant;

use super::shared::{LEASE, Leave, News, Word};
use super::{BreakerCell, Phase, Probes, State};
use crate::fleet::{Fault, Reply};

/// An op of `breaker.lua` and what it takes.
pub(crate) type Question = (&'static str, [String; 4]);

pub(crate) fn read() -> Question {
    ("read", Default::default())
}

pub(crate) fn probe() -> Question {
    let lease = LEASE.as_millis().to_string();
    ("probe", [lease, String::new(), String::new(), String::new()])
}

pub(crate) fn prolong() -> Question {
    ("prolong", probe().1)
}

pub(crate) fn news(news: News, quorum: u32, now: Instant) -> Question {
    news.question(quorum, now)
}

impl BreakerCell {
    /// The answer to a call that was behind.
    pub(crate) fn caught_up(&self, turn: u64, answer: Result<Reply, Fault>, now: Instant) {
        if let Ok(reply) = answer {
            self.core.lock().hear_quietly(Word::read(&reply), now);
        }
        self.turn.store(turn, Ordering::Relaxed);
    }

    /// The answer to a call that asked to probe; whether it may.
    pub(crate) fn may_probe(&self, answer: Result<Reply, Fault>, asked_at: Instant, now: Instant) -> bool {
        let leave = answer.map(|reply| Leave::read(&reply));
        let is_granted = matches!(leave, Ok(Leave::Granted { .. }));
        self.take_leave(leave, asked_at, now);
        is_granted
    }

    /// The answer to news or to a look at how things are.
    pub(crate) fn told(&self, answer: Result<Reply, Fault>, now: Instant) -> Option<State> {
        self.hear(Word::read(&answer.ok()?), now)
    }

    pub(crate) fn must_prolong(&self) -> bool {
        self.core.lock().probes_on_lease()
    }

    pub(crate) fn prolonged(&self, answer: Result<Reply, Fault>, asked_at: Instant) {
        if answer.is_ok()
            && let Phase::HalfOpen(Probes { lease: Some(until), .. }) = &mut self.core.lock().phase
        {
            *until = asked_at + LEASE;
        }
    }

    pub(crate) fn is_leased(&self) -> bool {
        self.core.lock().is_leased()
    }
}
