//! The gates that every attempt passes at the upstream it goes to: breaker, bulkhead, rate token, and the
//! breaker once more, since it may have opened while the attempt waited.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, Response, StatusCode};
use tokio::time::Instant;

use crate::call::{Call, Progress};
use crate::config::RateLimit;
use crate::error::{Error, Stage};
use crate::fleet::Fault;
use crate::policy::breaker::{Admission, Open, State};
use crate::policy::bulkhead::{Permit, Refused};
use crate::policy::identity::Credential;
use crate::policy::rate_limit::{TooLate, Whom};
use crate::telemetry::metrics::RateLimited;
use crate::upstream::registry::Lane;
use crate::upstream::rewrite;
use crate::wire::credentials::is_credential;
use crate::wire::push_back;

/// What an attempt holds once it has passed. Dropping it gives all back.
pub struct Pass {
    /// A place among the calls at once.
    pub permit: Option<Permit>,
    /// The breaker's leave.
    pub admission: Option<Admission>,
    /// When it had all of them.
    pub at: Instant,
}

/// Passes the gates, waiting in the bulkhead's queue and for a rate token when it must. Cancel-safe:
/// dropping the future leaves the queue and takes no token. `request` are the fields of the request that
/// takes the token; a tunnel has none and takes none.
///
/// # Errors
/// [`Error::CircuitOpen`], [`Error::BulkheadFull`] or [`Error::RateLimited`], at once.
pub async fn enter(
    lane: &Lane,
    progress: &Progress,
    request: Option<&HeaderMap>,
    deadline: Option<Instant>,
) -> Result<Pass, Error> {
    let now = Instant::now();
    let stages = lane.stages();
    if let Some(breaker) = &stages.breaker {
        if breaker.is_shared && lane.breaker().is_behind(now) {
            let caught_up = ask(lane, progress, deadline, |end| lane.breaker().catch_up(now, end)).await;
            note(lane, caught_up);
        }
        // Who probes is asked when the rest is passed.
        if let Err(refusal) = lane.breaker().check(breaker, now) {
            let is_due = refusal.is_due;
            let error = open(lane, refusal);
            if !is_due {
                return Err(error);
            }
        }
    }
    let mut at = now;
    let mut tokens = request.and_then(|headers| Some((stages.rate_limit.as_ref()?, headers)));
    if let Some((rate, _)) = tokens
        && rate.is_shared
        && lane.rate().must_ask(rate, now)
    {
        let asked = ask(lane, progress, deadline, |end| lane.rate().ask(rate, end)).await;
        note(lane, asked);
        at = Instant::now();
    }
    // Who is paused waits for that in front of the bulkhead: the permits are for those who may go.
    if let Some((rate, headers)) = tokens
        && lane.rate().is_paused(|| who(lane, headers), now)
    {
        at = Box::pin(wait_for_token(lane, rate, headers, progress, at, deadline)).await?;
        tokens = None;
    }
    let permit = match &stages.bulkhead {
        None => None,
        Some(bulkhead) => Some(match lane.bulkhead().try_acquire(bulkhead) {
            Some(permit) => permit,
            None => {
                progress.enter(Stage::Queue);
                let since = at;
                let permit = lane.bulkhead().acquire(bulkhead, since, deadline).await.map_err(|refused| {
                    lane.metrics().bulkhead_rejected();
                    match refused {
                        Refused::Full | Refused::TooLate => Error::BulkheadFull,
                    }
                })?;
                at = Instant::now();
                progress.queued(at.saturating_duration_since(since));
                permit
            }
        }),
    };
    if let Some((rate, headers)) = tokens
        && !lane.rate().try_acquire_for(rate, || who(lane, headers), at)
    {
        // Boxed: the room would be part of every request.
        at = Box::pin(wait_for_token(lane, rate, headers, progress, at, deadline)).await?;
    }
    let admission = match admit(lane, at) {
        Err(refusal) if refusal.is_due => {
            ask(lane, progress, deadline, |end| lane.breaker().ask_to_probe(end)).await;
            at = Instant::now();
            admit(lane, at)
        }
        admitted => admitted,
    };
    let admission = admission.map_err(|refusal| open(lane, refusal))?;
    Ok(Pass { permit, admission, at })
}

/// Asks what other pods know, which a call waits for as long as it may.
async fn ask<F: Future>(
    lane: &Lane,
    progress: &Progress,
    deadline: Option<Instant>,
    question: impl FnOnce(Instant) -> F,
) -> F::Output {
    let patience = lane.config().shared_state.as_ref().map_or(Duration::ZERO, |shared| shared.timeout);
    let since = Instant::now();
    // Boxed: hardly a call asks, and the room would be part of each.
    let answer = Box::pin(question(progress.asks_until(patience, since, deadline))).await;
    progress.asked(since.elapsed());
    answer
}

fn note(lane: &Lane, asked: Result<(), Fault>) {
    if let Err(fault) = asked {
        lane.upstream.is_refused_by_fleet(&fault);
    }
}

/// Who asks in the upstream's eyes: by the caller's credentials, unless the policy puts its own in their place.
fn who(lane: &Lane, headers: &HeaderMap) -> Option<Credential> {
    let rules = lane.policy().rewrite.as_ref().filter(|rules| {
        let set = rules.set.iter().map(|(name, _)| name);
        set.chain(&rules.remove).any(is_credential)
    });
    match rules {
        None => Credential::of(headers),
        Some(rules) => {
            let mut sent = headers.clone();
            rewrite::fields(rules, &mut sent);
            Credential::of(&sent)
        }
    }
}

/// Waits for a rate token where one comes in time; when it had it.
async fn wait_for_token(
    lane: &Lane,
    rate: &RateLimit,
    headers: &HeaderMap,
    progress: &Progress,
    now: Instant,
    deadline: Option<Instant>,
) -> Result<Instant, Error> {
    progress.enter(Stage::Queue);
    match lane.rate().acquire(rate, who(lane, headers), now, deadline).await {
        Ok(()) => {
            lane.metrics().rate_limited(RateLimited::Waited);
            let at = Instant::now();
            progress.queued(at.saturating_duration_since(now));
            Ok(at)
        }
        Err(TooLate { retry_at }) => {
            lane.metrics().rate_limited(RateLimited::Refused);
            Err(Error::RateLimited { retry_at })
        }
    }
}

/// An upstream that asks for fewer calls is given its pause: the caller's credential for a 429 or a
/// quota that is used up, everyone for a 503 that says until when (RFC 9110 sections 10.2.3 and 15.6.4).
pub fn heed(lane: &Lane, call: &Call, response: &Response<()>, now: Instant) {
    let Some(rate) = &lane.stages().rate_limit else { return };
    let (headers, wall) = (response.headers(), SystemTime::now());
    let told = match response.status() {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => push_back::wait(headers, wall),
        _ => None,
    };
    // To come back at once is no pause.
    let told = told.filter(|wait| !wait.is_zero());
    let (whom, wait) = match (response.status(), told) {
        (StatusCode::SERVICE_UNAVAILABLE, Some(wait)) => (Whom::Everyone, wait),
        _ => {
            let Some(wait) = told.or_else(|| push_back::exhausted(headers, wall)) else { return };
            (Whom::Credential(who(lane, &call.headers)), wait)
        }
    };
    lane.rate().pause(rate, whom, now + wait, now);
    lane.metrics().rate_limited(RateLimited::Paused);
}

/// Passes breaker and bulkhead only if both are open now: a hedge never waits.
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

/// A rate token if one is free now. Taken last, since it cannot be given back.
pub fn try_token(lane: &Lane, headers: &HeaderMap, now: Instant) -> bool {
    let rate = lane.stages().rate_limit.as_ref();
    rate.is_none_or(|rate| lane.rate().try_acquire_for(rate, || who(lane, headers), now))
}

/// Which gate a hedge found closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    /// The breaker is open.
    Breaker,
    /// No permit is free.
    Bulkhead,
}

fn admit(lane: &Lane, now: Instant) -> Result<Option<Admission>, Open> {
    let Some(breaker) = &lane.stages().breaker else { return Ok(None) };
    let admission = lane.breaker().admit(breaker, now)?;
    if let Some(state) = admission.moved() {
        lane.upstream.breaker_moved(state, "pod");
    }
    Ok(Some(admission))
}

fn open(lane: &Lane, refusal: Open) -> Error {
    if let Some(state) = refusal.moved {
        lane.upstream.breaker_moved(state, "pod");
    }
    Error::CircuitOpen { retry_at: refusal.retry_at }
}
