//! Step five of the journey: tries, until one brings an acceptable answer or another one would be wrong.
//!
//! The first try is all there is where the policy has no `retry`. Between two tries the answer that was not
//! good enough is read to its end: then its connection is free for others, and the answer can still be
//! given when nothing better comes. An answer that was not good enough is better than none, and what the
//! upstream did is better told than what a guard made of it.

use std::time::SystemTime;

use tokio::time::{Instant, sleep_until, timeout_at};

use super::attempt::{Failure, Try};
use super::found::{Found, Whole};
use super::race::{self, Outcome};
use crate::call::Fate;
use crate::config::Retry;
use crate::error::{Error, Origin};
use crate::policy::retry::{self, Next, Stop, Tried};
use crate::telemetry::metrics::{AttemptKind, RetryResult};
use crate::upstream::registry::Lane;
use crate::wire::{push_back, retry_mark};

/// What an answer that was not good enough may have to be kept, in case nothing better comes.
const MAX_KEPT: usize = 64 << 10;

/// Sends the call to `lane` until there is an acceptable answer, or the policy, the budget or the
/// deadline lets there be no other try.
///
/// # Errors
/// What went wrong when no try got an answer.
pub async fn run(this: Try<'_>, lane: &Lane) -> Result<Found, Error> {
    let first = race::run(this, lane, AttemptKind::Primary).await;
    match &lane.stages().retry {
        // Boxed: the room would be part of every request.
        Some(retry) if is_wanting(&first) => Box::pin(again(this, lane, retry, first)).await,
        _ => first.map(Found::from).map_err(|failure| failure.error),
    }
}

async fn again(
    this: Try<'_>,
    lane: &Lane,
    retry: &Retry,
    first: Result<Outcome, Failure>,
) -> Result<Found, Error> {
    let mut ended = first;
    let mut kept: Option<Kept> = None;
    let mut tries = 1;
    while is_wanting(&ended) {
        let wait = match next(this, lane, retry, tries, &ended) {
            Next::After(wait) => wait,
            Next::Stop(stop) => {
                note_stop(this, lane, stop);
                break;
            }
        };
        let last = settle(this, ended, Instant::now() + wait).await;
        kept = Some(last.or(kept));
        tries += 1;
        ended = race::run(this, lane, AttemptKind::Retry).await;
        lane.metrics().retry(result(lane, &ended));
    }
    match (ended, kept) {
        (Ok(outcome), _) => Ok(outcome.into()),
        (Err(_), Some(Kept { answer: Some(answer), .. })) => Ok(Found::whole(answer)),
        (Err(failure), Some(Kept { error: Some(error), .. })) if failure.error.origin() == Origin::Guard => {
            Err(error)
        }
        (Err(failure), _) => Err(failure.error),
    }
}

/// Whether another try may bring something better.
fn is_wanting(ended: &Result<Outcome, Failure>) -> bool {
    match ended {
        Ok(outcome) => !outcome.head.is_acceptable(),
        Err(failure) => failure.error.is_worth_another_try(),
    }
}

/// Whether and when there is another try. Its token is withdrawn here, when it is decided: while it waits
/// others know that it will come.
fn next(this: Try<'_>, lane: &Lane, retry: &Retry, tries: u32, ended: &Result<Outcome, Failure>) -> Next {
    let call = this.call;
    let headers = ended.as_ref().ok().map(|outcome| outcome.head.response.headers());
    let now = Instant::now();
    let tried = Tried {
        tries,
        never_reached: ended.as_ref().is_err_and(|failure| failure.is_unsent),
        is_idempotent: call.is_idempotent(&retry.methods, lane.route()),
        is_callers_retry: retry_mark::is_retry(&call.headers),
        can_be_sent: call.body.can_be_sent_again(),
        told: headers.and_then(|headers| push_back::wait(headers, SystemTime::now())),
        is_final: headers.is_some_and(push_back::is_final),
    };
    let left = this.deadline.map(|deadline| deadline.at.saturating_duration_since(now));
    match retry::decide(retry, &tried, left, fastrand::f64()) {
        Next::After(_) if !lane.upstream.budget.withdraw(&lane.stages().extra_load, now) => {
            Next::Stop(Stop::Budget)
        }
        next => next,
    }
}

fn note_stop(this: Try<'_>, lane: &Lane, stop: Stop) {
    match stop {
        // Its failures have been counted one by one.
        Stop::Attempts => {}
        Stop::PushBack => lane.metrics().retry(RetryResult::SuppressedPushBack),
        Stop::CallersRetry => lane.metrics().retry(RetryResult::SuppressedCallersRetry),
        Stop::NotIdempotent => lane.metrics().retry(RetryResult::SuppressedNotIdempotent),
        Stop::Body => lane.metrics().retry(RetryResult::SuppressedBody),
        Stop::Deadline => lane.metrics().retry(RetryResult::SuppressedDeadline),
        Stop::Budget => lane.metrics().retry(RetryResult::SuppressedBudget),
    }
    // A layer above would only add to a load that is too much already.
    if matches!(stop, Stop::Attempts | Stop::Budget) {
        this.call.progress.give_up();
    }
}

/// What came of a try beyond the first. One that a guard did not let out has cost the upstream nothing.
fn result(lane: &Lane, ended: &Result<Outcome, Failure>) -> RetryResult {
    match ended {
        Ok(outcome) if outcome.head.is_acceptable() => RetryResult::Succeeded,
        Err(failure) if failure.error.origin() == Origin::Guard => {
            lane.upstream.budget.give_back(&lane.stages().extra_load, Instant::now());
            RetryResult::SuppressedGuard
        }
        _ => RetryResult::Failed,
    }
}

/// The best of what earlier tries brought.
struct Kept {
    answer: Option<Whole>,
    error: Option<Error>,
}

impl Kept {
    fn or(self, earlier: Option<Self>) -> Self {
        let Some(earlier) = earlier else { return self };
        Self { answer: self.answer.or(earlier.answer), error: self.error.or(earlier.error) }
    }
}

/// Waits until then, and reads what is left of an answer meanwhile.
async fn settle(this: Try<'_>, ended: Result<Outcome, Failure>, until: Instant) -> Kept {
    let kept = match ended {
        Err(failure) => Kept { answer: None, error: Some(failure.error) },
        Ok(outcome) => {
            this.call.progress.decide(Fate::Superseded);
            let read = Found::from(outcome).read(this.deadline, MAX_KEPT);
            Kept { answer: timeout_at(until, read).await.ok().flatten(), error: None }
        }
    };
    sleep_until(until).await;
    kept
}
