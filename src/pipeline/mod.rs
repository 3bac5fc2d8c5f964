//! The journey of a request, top to bottom in one function: [`journey`].
//!
//! Each step is a stage with its own file, and no stage knows another; their order is decided here
//! alone, and this is why it is as it is:
//!
//! 1. **Target** comes first since everything else is looked up by it. The caller took one snapshot of
//!    the policy, and it serves the whole journey.
//! 2. **Deadline** before anything waits, so that all waits are bounded by one instant.
//! 3. **Cache** ([`recall`]): what is kept and fresh costs nobody anything, so it is looked for before
//!    anything is taken. What pods keep for each other ([`shelf`]) is asked for when this pod has nothing.
//! 4. **Coalesce** ([`flight`]): who finds an equal call under way waits for its answer, and takes no
//!    permit, token or connection.
//! 5. **Tries** ([`tries`]): each is a [`race`] of a primary [`attempt`] and, when it is slow, a hedge. Every
//!    attempt passes the gates ([`gate`]) of the upstream it goes to, and owes a verdict at its end ([`judge`]).
//! 6. **Fallback** ([`fallback`]) only when all tries have brought nothing acceptable. It belongs to the flight, or a
//!    hundred followers of a failed one would meet at the backup.
//! 7. **Answer** ([`answer`]): the head goes out at once and the body is streamed. Permit, deadline,
//!    verdict and account last until the body ends. Once a byte has been passed on there is no other
//!    attempt: what breaks, breaks visibly.

pub mod answer;
pub mod attempt;
pub mod errand;
pub mod fallback;
pub mod feed;
pub mod flight;
pub mod found;
pub mod gate;
pub mod judge;
pub mod ledger;
pub mod outgoing;
mod proxy;
pub mod race;
pub mod recall;
pub mod record;
pub mod shelf;
pub mod tail;
pub mod target;
pub mod tries;

use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;

use futures_util::FutureExt as _;

use self::answer::{Answer, Upgraded};
use self::errand::Errand;
use self::found::Found;
use self::ledger::Ledger;
pub use self::proxy::Proxy;
use self::recall::Recalled;
use crate::call::InterimSink;
use crate::config::Config;
use crate::error::Error;
use crate::policy::deadline::{Arrival, Deadline};
use crate::upstream::egress;
use crate::wire::incoming::IncomingBody;
use crate::wire::target::Scheme;

/// What comes of a call.
pub enum Arrived {
    /// An answer.
    Answer(Answer),
    /// The connection changes its protocol, and is the client's and the upstream's from now on.
    Upgraded(Box<Upgraded>),
}

/// A request as a listener hands it on: readable, and for some upstream.
pub struct Intake {
    /// Its head.
    pub head: http::request::Parts,
    /// Its body.
    pub body: IncomingBody,
    /// The upstream, as the client or its tunnel named it.
    pub authority: String,
    /// The scheme that the client named.
    pub scheme: Scheme,
    /// Whether it asks about the server as a whole: `OPTIONS *`.
    pub is_for_server: bool,
    /// Whether the client knows of no proxy.
    pub is_unaware: bool,
    /// The address that the client itself wanted to go to.
    pub pinned: Option<IpAddr>,
    /// The snapshot that serves the whole journey.
    pub config: Arc<Config>,
    /// When it arrived.
    pub arrival: Arrival,
    /// The deadline of what the call is a part of.
    pub within: Option<Box<Deadline>>,
    /// Where interim answers go.
    pub interim: Option<Arc<dyn InterimSink>>,
}

/// Takes a request from its arrival to the head of its answer. Dropping the future cancels all that
/// the call alone was waiting for, requests at upstreams included.
pub fn journey(proxy: &Arc<Proxy>, intake: Intake, ledger: Ledger) -> impl Future<Output = Arrived> + Send {
    // An async function around it would hold all that it moves twice.
    travel(proxy, intake, ledger).map(Travelled::deliver)
}

/// Where a request stands when all that is left is to deliver what has been found for it.
pub struct Travelled {
    /// The answer, or why there is none.
    pub found: Result<Found, Error>,
    /// Bounds the delivery too.
    pub deadline: Option<Deadline>,
    /// The request's account.
    pub ledger: Ledger,
}

/// The journey up to its last step. Dropping the future cancels as with [`journey`].
pub async fn travel(proxy: &Arc<Proxy>, intake: Intake, mut ledger: Ledger) -> Travelled {
    let mut deadline = None;
    let travel = async {
        // 1. Target: the upstream, its policy and route, and whether the name may be called at all.
        let (upstream, target) = target::find(proxy, &intake)?;
        let lane = target::lane(proxy, &intake, upstream, &target);
        ledger.goes_to(&lane, target.as_str());
        egress::check_name(&lane.config().egress, lane.dialled())?;

        // 2. Deadline: one instant for everything below.
        let policy = lane.stages().deadline.as_ref();
        deadline =
            Deadline::of(policy, &intake.head.headers, intake.arrival, intake.within.as_deref().cloned())?;
        let call = target::call(proxy, intake, &lane, target, &ledger);
        let mut errand = Errand {
            proxy: proxy.clone(),
            lane,
            call,
            deadline: deadline.clone(),
            recall: None,
            is_renewal: false,
        };

        // 3. Cache: a fresh answer at once, kept here or by another pod.
        match recall::look(&errand).await? {
            Recalled::Nothing => {}
            Recalled::Answer(answer, renewed) => {
                flight::renew(errand, renewed);
                return Ok(Found::Whole(answer));
            }
            Recalled::Ask(recall) => errand.recall = Some(recall),
        }

        // 4. Coalesce: an equal call that is under way brings the answer. Boxed: the room would be part of
        // every request.
        if errand.lane.stages().coalesce.is_some() {
            return Box::pin(flight::join(errand)).await;
        }

        // 5. Tries, and 6. Fallback.
        errand::pursue(&errand).await
    };
    let found = proxy.until_ending(pin!(travel)).await;
    ledger.bounded_by(deadline.as_ref().map(|deadline| deadline.at));
    Travelled { found, deadline, ledger }
}

impl Travelled {
    /// 7. Answer: the head at once, the body as it comes.
    pub fn deliver(self) -> Arrived {
        let Self { found, deadline, ledger } = self;
        match found {
            Ok(Found::Live(live)) if live.is_upgrade() => {
                Arrived::Upgraded(Box::new(answer::upgrade(live, ledger)))
            }
            Ok(found) => Arrived::Answer(answer::deliver(found, deadline.as_ref(), ledger)),
            Err(error) => Arrived::Answer(answer::refuse(error, ledger, deadline.map(|end| end.at))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The future is moved when it is made, and lies in memory for each request under way: its size is
    /// a number that somebody chose. What few requests come to is boxed.
    #[test]
    fn the_future_of_a_request_is_no_larger_than_it_was() {
        fn size<A, B, C, F>(_: impl Fn(A, B, C) -> F) -> usize {
            size_of::<F>()
        }
        let size = size(|proxy: &'static Arc<Proxy>, intake, ledger| journey(proxy, intake, ledger));
        assert!(size <= 6 << 10, "{size} bytes");
    }
}
