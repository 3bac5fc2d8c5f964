//! Both sides of a proxy under test: an agent that speaks raw bytes, upstreams that a test drives step by step.
//!
//! Real sockets and real time. A paused clock does not work with sockets: the runtime looks idle while the
//! kernel still carries the bytes, and every timer fires at once. Hence two rules. A test waits for an event
//! ([`within`] bounds the wait and names what did not happen), it never sleeps to let something happen. And
//! it asserts order and counts, with times only as wide bounds: an upper one lies between what a machine ten
//! times slower takes and what would be waited for without the feature, which the policy moves far away. A
//! lower one is measured from before the request goes out, since hedgerow's clock begins later than that.
//!
//! HTTP is read strictly here and by hand: a library on either side would repair, reorder or hide exactly what a
//! proxy's tests are about (the case of names, a length that lies, bytes after the end).

pub mod client;
pub mod command;
pub mod dns;
pub mod fanout;
pub mod footprint;
pub mod forwarder;
pub mod h1;
pub mod hedgerow;
pub mod http2;
pub mod intercept;
pub mod netns;
pub mod pki;
pub mod policy;
pub mod port;
pub mod raw;
pub mod redis;
pub mod road;
pub mod socket;
pub mod upstream;

use std::future::Future;
use std::panic::Location;
use std::time::Duration;

use tokio::time::Instant;

/// Long enough for a loaded machine with two cores, short enough that a test that hangs says so soon.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Waits for `event`, at most `limit`. Panics at the caller's line when it does not come.
#[track_caller]
pub fn within<F: Future>(limit: Duration, event: F) -> impl Future<Output = F::Output> {
    let caller = Location::caller();
    async move {
        match tokio::time::timeout(limit, event).await {
            Ok(value) => value,
            Err(_) => panic!("what {caller} waits for did not happen within {limit:?}"),
        }
    }
}

/// [`within`] the usual [`PATIENCE`].
#[track_caller]
pub fn soon<F: Future>(event: F) -> impl Future<Output = F::Output> {
    within(PATIENCE, event)
}

/// Does something that takes less than `limit` at one of several tries.
///
/// For a limit that is a constant of hedgerow's and cannot be moved away. A loaded machine may hold up any one
/// try; what waits for a timer of that length takes so long in each.
#[track_caller]
pub fn at_best_within(limit: Duration, mut attempt: impl AsyncFnMut()) -> impl Future<Output = ()> {
    const TRIES: usize = 5;
    let caller = Location::caller();
    async move {
        let mut took = Vec::new();
        for _ in 0..TRIES {
            let began = Instant::now();
            attempt().await;
            took.push(began.elapsed());
            if took.last() < Some(&limit) {
                return;
            }
        }
        panic!("what {caller} does took {took:?}, never less than {limit:?}");
    }
}
