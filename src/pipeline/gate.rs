//! The gates that every attempt passes at the upstream it goes to: breaker, bulkhead, and the
//! breaker once more, since it may have opened while the attempt waited for its permit.

use tokio::time::Instant;

use super::judge::breaker_moved;
use crate::call::Progress;
use crate::error::{Error, Stage};
use crate::policy::breaker::{Admission, Open, State};
use crate::policy::bulkhead::{Permit, Refused};
use crate::upstream::registry::Lane;

/// What an attempt holds once it has passed. Dropping it gives all back.
pub struct Pass {
    /// A place among the calls at once.
    pub permit: Option<Permit>,
    /// The breaker's leave.
    pub admission: Option<Admission>,
    /// When it had all of them.
    pub at: Instant,
}

/// Passes the gates, waiting in the bulkhead's queue when it must. Cancel-safe: dropping the future
/// leaves the queue.
///
/// # Errors
/// [`Error::CircuitOpen`] or [`Error::BulkheadFull`], at once.
pub async fn enter(lane: &Lane, progress: &Progress, deadline: Option<Instant>) -> Result<Pass, Error> {
    let now = Instant::now();
    let stages = lane.stages();
    if let Some(breaker) = &stages.breaker {
        lane.breaker().check(breaker, now).map_err(|refusal| open(lane, refusal))?;
    }
    let mut at = now;
    let permit = match &stages.bulkhead {
        None => None,
        Some(bulkhead) => Some(match lane.bulkhead().try_acquire(bulkhead) {
            Some(permit) => permit,
            None => {
                progress.enter(Stage::Queue);
                let permit = lane.bulkhead().acquire(bulkhead, now, deadline).await.map_err(|refused| {
                    lane.metrics().bulkhead_rejected();
                    match refused {
                        Refused::Full | Refused::TooLate => Error::BulkheadFull,
                    }
                })?;
                at = Instant::now();
                progress.queued(at.saturating_duration_since(now));
                permit
            }
        }),
    };
    let admission = admit(lane, at)?;
    Ok(Pass { permit, admission, at })
}

/// Passes the gates only if all of them are open now: a hedge never waits.
pub fn try_enter(lane: &Lane, now: Instant) -> Result<Pass, Closed> {
    let stages = lane.stages();
    // Not half-open either: its probes are for calls that would not be made otherwise.
    if stages.breaker.is_some() && lane.breaker().state() != State::Closed {
        return Err(Closed::Breaker);
    }
    let permit = match &stages.bulkhead {
        None => None,
        Some(bulkhead) => Some(lane.bulkhead().try_acquire(bulkhead).ok_or(Closed::Bulkhead)?),
    };
    let admission = admit(lane, now).map_err(|_| Closed::Breaker)?;
    Ok(Pass { permit, admission, at: now })
}

/// Which gate a hedge found closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    /// The breaker is open.
    Breaker,
    /// No permit is free.
    Bulkhead,
}

fn admit(lane: &Lane, now: Instant) -> Result<Option<Admission>, Error> {
    let Some(breaker) = &lane.stages().breaker else { return Ok(None) };
    let admission = lane.breaker().admit(breaker, now).map_err(|refusal| open(lane, refusal))?;
    if let Some(state) = admission.moved() {
        breaker_moved(lane, state);
    }
    Ok(Some(admission))
}

fn open(lane: &Lane, refusal: Open) -> Error {
    if let Some(state) = refusal.moved {
        breaker_moved(lane, state);
    }
    Error::CircuitOpen { retry_at: refusal.retry_at }
}
