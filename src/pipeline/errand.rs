//! A call with all that it takes to find an answer for it: done by the task of its connection, or handed
//! to a flight that several calls wait for.

use std::sync::Arc;

use http::header;

use super::attempt::Try;
use super::found::Found;
use super::recall::{self, Learned, Recall};
use super::{Proxy, fallback, tries};
use crate::call::Call;
use crate::error::Error;
use crate::policy::deadline::Deadline;
use crate::policy::identity::Place;
use crate::upstream::registry::Lane;

/// What one call is about.
pub struct Errand {
    /// The process.
    pub proxy: Arc<Proxy>,
    /// The upstream, its rules and guards.
    pub lane: Lane,
    /// The call.
    pub call: Call,
    /// When it ends.
    pub deadline: Option<Deadline>,
    /// What the cache knows; `None` where it has no part in the call.
    pub recall: Option<Box<Recall>>,
    /// It renews what is kept, and nobody waits for it.
    pub is_renewal: bool,
}

impl Errand {
    /// What attempts need of it.
    pub fn as_try(&self) -> Try<'_> {
        Try {
            proxy: &self.proxy,
            call: &self.call,
            deadline: self.deadline.as_ref(),
            validators: self.recall.as_ref().map_or(&[], |recall| recall.validators()),
        }
    }

    /// Where the call goes.
    pub fn place(&self) -> Place<'_> {
        place(&self.lane, &self.call)
    }
}

/// Where a call goes.
pub fn place<'a>(lane: &'a Lane, call: &'a Call) -> Place<'a> {
    // As the head is made that attempts send.
    let keeps_host = call.is_unaware && !lane.is_elsewhere();
    let host = call.headers.get(header::HOST).filter(|_| keeps_host);
    Place {
        scheme: call.scheme,
        authority: lane.upstream.authority().key(),
        host: host.map_or(b"", |host| host.as_bytes()),
        passage: lane.passage(),
        pinned: call.pinned,
        target: &call.target,
    }
}

/// Steps five and six of the journey: tries, and the best thing instead when they bring nothing
/// acceptable. What may be kept of an answer is kept on its way.
///
/// # Errors
/// What went wrong when nothing could be found.
pub async fn pursue(errand: &Errand) -> Result<Found, Error> {
    // 5. Tries: attempts, hedged when slow, and again when they fail.
    let found = ask(errand).await;

    // 6. Fallback: what the policy has instead.
    fall_back(errand, found).await
}

/// Step five alone.
///
/// # Errors
/// What went wrong when no attempt got an answer.
pub async fn ask(errand: &Errand) -> Result<Found, Error> {
    let tried = tries::run(errand.as_try(), &errand.lane).await;
    match recall::learn(errand, tried, true) {
        Learned::Found(found) => found,
        Learned::Mistaken => Box::pin(ask_plainly(errand)).await,
    }
}

/// Step six alone, for a call whose tries were another one's.
///
/// # Errors
/// Those of `found`, when nothing stands in for it.
pub async fn fall_back(errand: &Errand, found: Result<Found, Error>) -> Result<Found, Error> {
    match fallback::is_called_for(errand, &found) {
        // Boxed: the room would be part of every request.
        true => Box::pin(fallback::run(errand, found)).await,
        false => found,
    }
}

/// Without the cache's conditions.
async fn ask_plainly(errand: &Errand) -> Result<Found, Error> {
    let tried = tries::run(Try { validators: &[], ..errand.as_try() }, &errand.lane).await;
    match recall::learn(errand, tried, false) {
        Learned::Found(found) => found,
        Learned::Mistaken => Err(Error::UpstreamInvalid("a 304 that nothing had asked for".into())),
    }
}
