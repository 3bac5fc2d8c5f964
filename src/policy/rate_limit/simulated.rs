//! The rate limit as a simulation plays it, which carries questions and answers itself and steps those who wait.

use tokio::time::Instant;

use super::line::Waiter;
use super::{RateLimiter, Step, shared};
use crate::config::RateLimit;
use crate::fleet::{Fault, Reply};

/// What `rate.lua` is asked.
#[derive(Debug)]
pub(crate) struct Question(shared::Question);

impl Question {
    /// What it takes beside the pod; `channel` and `id` are what it may publish.
    pub(crate) fn arguments(&self, channel: &str, id: &str) -> Vec<String> {
        let mut arguments = self.0.numbers().to_vec();
        arguments.extend([channel.to_owned(), id.to_owned(), self.0.pause()]);
        arguments
    }
}

/// A call that waits for a token.
#[derive(Debug)]
pub(crate) struct Caller(Waiter);

/// What becomes of one that waits.
pub(crate) enum Turn {
    Taken,
    Refused,
    /// It looks again then.
    At(Instant),
    /// It is not the first.
    Later,
}

impl RateLimiter {
    /// The question of a call, or of the liaison, which asks for all who wait.
    pub(crate) fn ask_for(&self, cfg: &RateLimit, is_of_call: bool, now: Instant) -> Question {
        let want = if is_of_call { 1 } else { self.state.lock().line.len() as u64 };
        Question(self.question(cfg, want, now))
    }

    pub(crate) fn answered(
        &self,
        cfg: &RateLimit,
        question: &Question,
        answer: Result<Reply, Fault>,
        now: Instant,
    ) {
        self.take_up(cfg, &question.0, answer, now);
    }

    /// As [`acquire`](Self::acquire) begins: a token, or one who waits.
    pub(crate) fn arrive(&self, cfg: &RateLimit, now: Instant, deadline: Instant) -> Option<Caller> {
        if self.try_acquire(cfg, None, now) {
            return None;
        }
        if cfg.is_shared {
            self.state.lock().share.count(now);
        }
        Some(Caller(Waiter::new(None, deadline)))
    }

    /// As it goes on, each time that it wakes.
    pub(crate) fn step(&self, caller: &Caller, now: Instant) -> Turn {
        match self.state.lock().step(&caller.0, now) {
            Step::Taken => Turn::Taken,
            Step::Refused(_) => Turn::Refused,
            Step::WaitUntil(at) => Turn::At(at),
            Step::Wait => Turn::Later,
        }
    }

    pub(crate) fn leave(&self, caller: &Caller) {
        self.state.lock().leave(&caller.0);
    }
}
