//! Answers kept for later: an HTTP cache (RFC 9111) as a recorder and a decider.
//!
//! Nothing here waits or sends. The pipeline asks [`Store::find`] for what is kept, [`Entry::judge`] for
//! what may be done with it, and gives [`Entry::answer`] or goes upstream; there it takes
//! [`Entry::validators`] along, makes a [`Candidate`] of what comes back and feeds it the body. An entry
//! is never changed: what a 304 brings makes a new one ([`Entry::refreshed`]).
//!
//! **Whose cache.** A [`Key`](super::identity::Key) holds the caller's credentials, so each credential has
//! a partition of its own that nobody else ever meets. There the cache acts as the caller's private one:
//! `private` answers are kept and `s-maxage` comes last. Without a credential it acts as a shared one.
//! That is stricter than RFC 9111 section 3.5, which would let `public` answers out of the partition: an
//! origin that says `public` by habit must not show one caller the other's answer.
//!
//! **Why no library.** The rules are in `freshness`, `directives` and `verdict`, each by its clause.
//! `http-cache-semantics` 3.0.0 was read and tried first, and would have needed all of them beside it: an
//! answer with `Age: 18446744073709551615` makes it panic; `No-Store` and `Max-Age` are not known in any
//! but lower case; a comma inside a quoted string begins a new directive; of a field that is repeated
//! (`Link`) the last line alone is kept; `Date` is rewritten, and not in the form of HTTP; fields that
//! a 304 adds are lost; a `max-age` above 64 bits is 0; it has no `stale-while-revalidate`,
//! `stale-if-error` or `must-understand`; and it keeps the whole request, credentials included.
//!
//! **What is kept.** Whole answers to GET, of final statuses that say something of the resource and not of
//! this one request (so no 206, 304, 412, 416 or 429), without `Set-Cookie`, in one piece of memory of
//! their own. An answer that is stale from the start is kept as well, if it can be validated or can stand
//! in for a failure. Answers to HEAD are given from what a GET brought and never kept.
//!
//! **Time.** Ages are counted on the monotonic clock. The wall clock is read once, when an answer comes in,
//! for the fields that are dates; a jump of it later changes nothing.

mod answer;
mod candidate;
mod directives;
mod entry;
mod freshness;
mod invalidation;
pub mod shared;
mod store;
mod variant;
mod verdict;

#[cfg(test)]
mod tests;

use std::time::SystemTime;

use http::Method;
use http::header::{self, HeaderMap};
use tokio::time::Instant;

pub use candidate::Candidate;
pub use entry::Entry;
pub use invalidation::touched;
pub use store::Store;
pub use verdict::{Verdict, Why, is_only_if_cached};

use super::identity::Place;
use crate::wire::hop_by_hop;

/// A request as it arrived.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// Its method.
    pub method: &'a Method,
    /// Where it goes.
    pub place: Place<'a>,
    /// Its fields as the client sent them, conditions and `Range` included.
    pub headers: &'a HeaderMap,
}

impl Asked<'_> {
    /// Why the cache has no part in the request, if so. It knows GET and HEAD; a request that would change
    /// the protocol, or that demands a state of the resource (`If-Match`, which is for the origin to judge,
    /// RFC 9110 section 13.1.1), passes by. So does one whose `Connection` takes a field away, since the
    /// origin would answer another request than the one that the answer is kept for. So should one with a
    /// body, which only the caller can tell.
    pub fn passes_by(&self) -> Option<Why> {
        if !matches!(*self.method, Method::GET | Method::HEAD) {
            return Some(Why::Method);
        }
        let is_special =
            [header::UPGRADE, header::IF_MATCH, header::IF_UNMODIFIED_SINCE, header::TRANSFER_ENCODING]
                .iter()
                .any(|name| self.headers.contains_key(name));
        (is_special || hop_by_hop::takes_away(self.headers)).then_some(Why::Bypass)
    }
}

/// When a request went out and the head of its answer came.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// The attempt was sent.
    pub sent: Instant,
    /// The head of its answer was read.
    pub received: Instant,
    /// The same moment on the wall clock.
    pub wall: SystemTime,
}
