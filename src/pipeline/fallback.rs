//! Step six of the journey: what is given instead, when there is no acceptable answer.
//!
//! The policy's steps are taken in their order inside the same deadline. A backup is an upstream with guards of
//! its own, so its failures are booked there; its own fallback is not followed, or two that stand in for each other
//! would send a call round in circles. A kept answer and a fixed one cost no time, so they are there even when the
//! deadline has struck. When all of it fails the caller gets what the upstream itself said, or the error.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::attempt::Try;
use super::errand::Errand;
use super::found::{Found, Note, Whole};
use super::tries;
use crate::call::{Fate, TriedEnd};
use crate::config::{Degraded, FallbackStep};
use crate::error::Error;
use crate::policy::deadline::end_of;
use crate::respond::degraded;
use crate::respond::headers::CacheStatus;
use crate::telemetry::metrics::StandIn;
use crate::upstream::registry::Lane;
use crate::wire::{grpc, push_back};

/// Whether something else is to be looked for, and there is anything to look for.
pub fn is_called_for(errand: &Errand, found: &Result<Found, Error>) -> bool {
    let is_wanting = match found {
        Ok(found) => !found.is_acceptable(),
        Err(error) => error.may_be_stood_in_for(),
    };
    is_wanting
        && (!errand.lane.stages().fallback.is_empty()
            || errand.recall.as_ref().is_some_and(|recall| recall.has_entry()))
}

/// Goes through the steps of the policy. `failed` is what the upstream itself had.
///
/// # Errors
/// The upstream's, when nothing can stand in for its answer.
pub async fn run(errand: &Errand, mut failed: Result<Found, Error>) -> Result<Found, Error> {
    let (lane, progress) = (&errand.lane, &errand.call.progress);
    // Its breaker need not wait for what a backup takes.
    if let Ok(Found::Live(live)) = &mut failed {
        live.head.judge.turn_down(Instant::now());
    }
    progress.note_tried(lane.policy().name.clone(), end(&failed));
    let mut may_be_stale = true;
    for step in lane.stages().fallback.iter() {
        match step {
            FallbackStep::Upstream(name) => {
                // Nor need others, for its permit. The answer itself stays as it is, in case nothing better comes:
                // read ahead it would have to be waited for, or be lost when its rest is late.
                if let Ok(Found::Live(live)) = &mut failed {
                    live.head.permit = None;
                }
                if let Some(found) = backup(errand, name).await {
                    count(errand, StandIn::Backup, &failed);
                    return Ok(found);
                }
                // The fate of the backup's attempts is not that of the answer that is still held.
                progress.decide(Fate::Superseded);
            }
            FallbackStep::Stale(allowance) => {
                may_be_stale = false;
                if let Some(found) = stale(errand, *allowance, &failed) {
                    return Ok(found);
                }
            }
            FallbackStep::Degraded(payload) => {
                // What the cache's own rules allow comes before a payload that says nothing.
                if may_be_stale && let Some(found) = stale(errand, Duration::ZERO, &failed) {
                    return Ok(found);
                }
                if may_be_fixed(errand, payload) {
                    return Ok(fixed(errand, payload, &failed));
                }
            }
        }
    }
    if may_be_stale && let Some(found) = stale(errand, Duration::ZERO, &failed) {
        return Ok(found);
    }
    failed
}

/// The backup's answer, if it is acceptable.
async fn backup(errand: &Errand, name: &str) -> Option<Found> {
    let (call, registry) = (&errand.call, errand.proxy.registry());
    let now = Instant::now();
    if now >= end_of(errand.deadline.as_ref()) || !call.body.can_be_sent_again() || call.upgrade.is_some() {
        return None;
    }
    let upstream = registry.by_name(errand.lane.config(), name)?;
    registry.touch(&upstream, now);
    let lane = Lane::find(registry, errand.lane.config(), upstream, &call.method, call.target.path());
    match tries::run(Try { validators: &[], ..errand.as_try() }, &lane).await {
        Ok(mut found) if found.is_acceptable() => {
            let note = found.note_mut();
            note.stand_in = Some(StandIn::Backup);
            note.cache = forwarded(errand);
            Some(found)
        }
        in_vain => {
            call.progress.note_tried(lane.policy().name.clone(), end(&in_vain));
            None
        }
    }
}

/// A kept answer whose freshness has ended, if it may be given.
fn stale(errand: &Errand, allowance: Duration, failed: &Result<Found, Error>) -> Option<Found> {
    let recall = errand.recall.as_ref()?;
    let mut answer = recall.stand_in(errand, allowance)?;
    answer.note.is_for_one = is_for_one(failed);
    count(errand, StandIn::Stale, failed);
    Some(Found::whole(answer))
}

/// Whether the client can read the policy's payload: gRPC has no place for it, and who asks for a tunnel by
/// an extended CONNECT (RFC 8441) takes any success for one.
fn may_be_fixed(errand: &Errand, payload: &Degraded) -> bool {
    let call = &errand.call;
    let opens_tunnel = call.is_extended_connect && payload.status.is_success();
    !opens_tunnel && !grpc::is_call(&call.method, &call.headers)
}

/// The policy's payload.
fn fixed(errand: &Errand, payload: &Degraded, failed: &Result<Found, Error>) -> Found {
    let progress = &errand.call.progress;
    let tried = progress.tried();
    let wait = match failed {
        Ok(found) => push_back::wait(found.headers(), SystemTime::now()),
        Err(error) => error.retry_at().map(|at| at.saturating_duration_since(Instant::now())),
    };
    count(errand, StandIn::Static, failed);
    Found::whole(Whole {
        response: degraded::response(
            payload,
            &degraded::Context {
                upstream: &errand.lane.policy().name,
                error: end(failed).error(),
                wait,
                tried: &tried,
            },
        ),
        is_acceptable: true,
        elapsed: None,
        hedge: None,
        note: Note {
            cache: forwarded(errand),
            stand_in: Some(StandIn::Static),
            is_for_one: is_for_one(failed),
        },
    })
}

/// What the cache had to do with it, where there is one: nothing that was kept would do.
fn forwarded(errand: &Errand) -> Option<CacheStatus> {
    errand.recall.as_ref().map(|recall| recall.forwarded(None, false))
}

/// A deadline that has struck is counted here too, since the call does not end in it.
fn count(errand: &Errand, kind: StandIn, failed: &Result<Found, Error>) {
    let metrics = errand.lane.metrics();
    metrics.fallback(kind);
    if let Err(Error::DeadlineExceeded { stage, .. }) = failed {
        metrics.deadline_exceeded(*stage);
    }
}

fn is_for_one(failed: &Result<Found, Error>) -> bool {
    failed.as_ref().is_err_and(|error| !error.is_everyones())
}

fn end(failed: &Result<Found, Error>) -> TriedEnd {
    match failed {
        // In the terms of the policy, which names statuses of HTTP for those of gRPC too.
        Ok(found) => TriedEnd::Status(grpc::status_of(found.status(), found.headers())),
        Err(error) => TriedEnd::Error(error.word()),
    }
}
