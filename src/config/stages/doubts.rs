//! Combinations of keys that defeat themselves: each is possible, and does not do what it was written for.
//!
//! They are told as warnings, at the line that sets the value, and only where somebody wrote it: a hedge
//! that is on by default and finds no token where a person limits the rate is nobody's mistake.

use std::time::Duration;

use super::Resolver;
use super::attempts::MOST_ATTEMPTS;
use crate::config::{Hedge, HedgeAfter, RateLimit, Retry, Stages};
use crate::units::{Percent, Span};

impl Resolver<'_> {
    pub(super) fn doubt(&self, stages: &Stages) {
        self.doubt_percentile(stages);
        self.doubt_budget(stages);
        self.doubt_acceptance(stages);
        if let Some(hedge) = stages.hedge.as_ref().filter(|_| self.hedge_is_written()) {
            self.doubt_hedge(stages, hedge);
        }
        if let Some(retry) = &stages.retry {
            self.doubt_waits(stages, retry);
        }
        if let Some(limit) = &stages.rate_limit {
            self.doubt_tokens(stages, limit);
        }
        self.doubt_attempt(stages);
        self.doubt_replay(stages);
    }

    fn hedge_is_written(&self) -> bool {
        self.inherited.hedge.is_on == Some(true)
    }

    /// A percentile sends a hedge for all calls above it; a budget for fewer is the bound that counts.
    fn doubt_percentile(&self, stages: &Stages) {
        let Some(HedgeAfter::Percentile(percentile)) = stages.hedge.as_ref().map(|hedge| hedge.after) else {
            return;
        };
        let (wanted, paid) = (100.0 - percentile.hundredths(), stages.extra_load.ratio.hundredths());
        if wanted > paid + 0.001 {
            let message = format!(
                "p{} hedges {} of the calls, but extra_load.ratio pays for {}",
                percentile.to_string().trim_end_matches('%'),
                Percent::new(wanted),
                stages.extra_load.ratio
            );
            self.warning(&["hedge.after", "extra_load.ratio"], message);
        }
    }

    /// A hedge that is never due, or that its own call keeps from starting.
    fn doubt_hedge(&self, stages: &Stages, hedge: &Hedge) {
        let ends = [
            ("attempt_timeout", stages.attempt_timeout),
            ("deadline.default", stages.deadline.as_ref().map(|deadline| deadline.default)),
        ];
        if let HedgeAfter::Fixed(delay) = hedge.after {
            for (key, end) in ends {
                if let Some(end) = end.filter(|end| delay >= *end) {
                    let message = format!(
                        "a hedge is due after {}, when {key} ({}) has struck",
                        Span(delay),
                        Span(end)
                    );
                    self.warning(&["hedge.after", key], message);
                    return;
                }
            }
        }
        // A backup has permits of its own.
        if hedge.to.is_none() && stages.bulkhead.is_some_and(|bulkhead| bulkhead.max_concurrent == 1) {
            let message = "the call itself holds the one permit, and a hedge waits for none";
            self.warning(&["bulkhead.max_concurrent", "hedge"], message);
        }
    }

    /// Hedges and retries are paid from a budget; with nothing coming in there is none.
    fn doubt_budget(&self, stages: &Stages) {
        let is_empty =
            stages.extra_load.ratio.fraction() == 0.0 && stages.extra_load.floor.in_a_second() == 0.0;
        if !is_empty {
            return;
        }
        let of = "extra_load (ratio 0%, floor 0/s) pays for none";
        if stages.retry.is_some() {
            let keys = ["retry.max_attempts", "retry", "extra_load.ratio", "extra_load.floor"];
            self.warning(&keys, format!("nothing is tried again: {of}"));
        }
        // A percentile that is not paid has been told.
        let is_percentile = |hedge: &Hedge| matches!(hedge.after, HedgeAfter::Percentile(_));
        if stages.hedge.as_ref().is_some_and(|hedge| !is_percentile(hedge)) && self.hedge_is_written() {
            self.warning(&["hedge.after", "hedge"], format!("no hedge starts: {of}"));
        }
    }

    /// Where every answer is good enough, none is tried again or replaced.
    fn doubt_acceptance(&self, stages: &Stages) {
        if stages.unacceptable.iter().next().is_some() {
            return;
        }
        let what = match (stages.retry.is_some(), stages.fallback.is_empty()) {
            (true, true) => "retry helps",
            (true, false) => "retry and fallback help",
            (false, false) => "fallback helps",
            (false, true) => return,
        };
        let message = format!("every answer is good enough, so {what} only where none comes");
        self.warning(&["unacceptable", "retry", "fallback"], message);
    }

    /// Tries that the deadline leaves no time for. A caller may bring a longer one, so it is not certain.
    fn doubt_waits(&self, stages: &Stages, retry: &Retry) {
        let Some(deadline) = &stages.deadline else { return };
        let tries = retry.max_attempts;
        // What is impossible has been told.
        if !(2..=MOST_ATTEMPTS).contains(&tries) {
            return;
        }
        let of_deadline = format!("more than deadline.default ({})", Span(deadline.default));
        let waits = longest_waits(retry.backoff, retry.max_backoff, tries);
        if waits > deadline.default {
            let message =
                format!("the waits between {tries} tries come to up to {}, {of_deadline}", Span(waits));
            self.warning(&WAITS, message);
            return;
        }
        // An attempt that outlasts the deadline by itself is told of by itself.
        let Some(timeout) = stages.attempt_timeout.filter(|timeout| *timeout < deadline.default) else {
            return;
        };
        let in_all = timeout.saturating_mul(tries);
        let with_waits = in_all.saturating_add(waits);
        let what = format!("{tries} tries of attempt_timeout ({})", Span(timeout));
        if in_all > deadline.default {
            self.warning(&WAITS, format!("{what} come to {}, {of_deadline}", Span(in_all)));
        // What the last try would lack of its time is not worth a word when it is little.
        } else if with_waits > deadline.default.saturating_add(timeout / 10) {
            let sum = Span(with_waits);
            self.warning(
                &WAITS,
                format!("{what} and the waits between them come to up to {sum}, {of_deadline}"),
            );
        }
    }

    /// A bound on an attempt beyond that on all of them. A caller may bring a longer deadline.
    fn doubt_attempt(&self, stages: &Stages) {
        let (Some(timeout), Some(deadline)) = (stages.attempt_timeout, &stages.deadline) else { return };
        if timeout >= deadline.default {
            let message = format!(
                "attempt_timeout ({}) never strikes where a call has deadline.default ({})",
                Span(timeout),
                Span(deadline.default)
            );
            self.warning(&["attempt_timeout", "deadline.default"], message);
        }
    }

    /// With a burst of 1 the call itself has taken the token that its hedge or retry needs.
    fn doubt_tokens(&self, stages: &Stages, limit: &RateLimit) {
        if limit.burst > 1 || limit.rate.in_a_second() <= 0.0 {
            return;
        }
        let refill = Duration::try_from_secs_f64(limit.rate.in_a_second().recip()).unwrap_or(Duration::MAX);
        let token = format!("the next token comes after {}", Span(refill));
        if let Some(hedge) = &stages.hedge
            && self.hedge_is_written()
            // A backup has tokens of its own.
            && hedge.to.is_none()
        {
            let delay = match hedge.after {
                HedgeAfter::Fixed(delay) => delay,
                HedgeAfter::Percentile(_) | HedgeAfter::Auto => hedge.max,
            };
            if refill > delay {
                let message = format!("{token}, and a hedge, due within {}, waits for none", Span(delay));
                self.warning(&["rate_limit.burst", "rate_limit.rate", "hedge"], message);
            }
        }
        if let (Some(_), Some(deadline)) = (&stages.retry, &stages.deadline)
            && refill > deadline.default
        {
            let message = format!(
                "{token}, later than deadline.default ({}): no retry gets it",
                Span(deadline.default)
            );
            self.warning(&["rate_limit.burst", "rate_limit.rate", "retry"], message);
        }
    }

    /// A body that is not kept cannot be sent again.
    fn doubt_replay(&self, stages: &Stages) {
        let has_put = |methods: &[http::Method]| methods.contains(&http::Method::PUT);
        let repeats_put = stages.hedge.as_ref().is_some_and(|hedge| has_put(&hedge.methods))
            || stages.retry.as_ref().is_some_and(|retry| has_put(&retry.methods));
        if stages.replay_limit == 0 && repeats_put {
            let message = "no request body is kept, so that no PUT with one is ever sent twice";
            self.warning(&["replay_limit", "retry.methods", "hedge.methods"], message);
        }
    }
}

/// What makes tries too long for their deadline.
const WAITS: [&str; 6] = [
    "retry.max_attempts",
    "retry.backoff",
    "retry.max_backoff",
    "attempt_timeout",
    "deadline.default",
    "retry",
];

/// All waits between `tries` tries, each at its longest.
fn longest_waits(backoff: Duration, max_backoff: Duration, tries: u32) -> Duration {
    let waits = (0..tries.saturating_sub(1)).scan(backoff, |next, _| {
        let wait = *next;
        *next = next.saturating_mul(2);
        Some(wait.min(max_backoff))
    });
    waits.fold(Duration::ZERO, Duration::saturating_add)
}
