//! The breaker's part in the fleet as a simulation plays it, which carries questions and answers itself.

use std::sync::atomic::Ordering;

use tokio::time::Instant;

use super::shared::{LEASE, Leave, News, Word, prolonging};
use super::{BreakerCell, State};
use crate::fleet::{Fault, Reply};

pub(crate) use super::shared::Question;

pub(crate) fn read() -> Question {
    ("read", Vec::new())
}

pub(crate) fn probe() -> Question {
    ("probe", vec![LEASE.as_millis().to_string()])
}

pub(crate) fn prolong(since: u64) -> Question {
    ("prolong", prolonging(since))
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

    /// The leave that must be prolonged, by when it began.
    pub(crate) fn must_prolong(&self) -> Option<u64> {
        self.core.lock().lease_in_use().map(|lease| lease.since)
    }

    pub(crate) fn prolonged(&self, answer: Result<Reply, Fault>, asked_at: Instant) {
        let Ok(word) = answer.map(|reply| Word::read(&reply)) else { return };
        let mut core = self.core.lock();
        core.prolong(word.since, asked_at + LEASE);
        core.hear_quietly(word, asked_at);
    }

    pub(crate) fn is_leased(&self) -> bool {
        self.core.lock().lease().is_some()
    }
}
