//! The HTTP/2 connections of one upstream, and who dials the next one.
//!
//! A request goes where there is room. Where there is none it waits for the dials that run already, as
//! long as what they will bring is enough for all who wait, and dials itself otherwise. A connection
//! carries 64 streams at most, so a burst of a hundred requests at a peer that takes as many costs two
//! handshakes; at a peer that takes two streams it costs fifty, at once and not one after the other. A
//! dial that fails lets everybody who waited for it dial by himself, so that nobody waits out the connect
//! timeouts of others in a row; one that is given up with its client is taken over by one of them. Nor
//! does anybody wait for a dial to an address that a client chose, unless he means the same one, and a
//! hedge waits for nobody: it is there because something takes too long.
//!
//! Over TLS nobody knows before the first handshake whether the upstream speaks HTTP/2, and at one that
//! does not all but one would have waited in vain. So the very first burst costs a handshake for each of
//! its requests, as with HTTP/1, and so does the first one behind a connection that spoke HTTP/1.1.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::connection::Wanted;
use super::http2::{Shared, Slot};
use crate::error::Error;

/// What a connection is taken to bring before the upstream has shown how many streams it takes.
const EXPECTED_STREAMS: usize = 64;
/// How long requests wait for a new connection's settings before they look elsewhere, and how often
/// one that waits for a dial looks up.
const PATIENCE: Duration = Duration::from_millis(250);
/// How long an upstream that asked for HTTP/1.1 is not offered HTTP/2: one request may want what the others
/// do not, and a server is not configured for ever.
const GIVEN_UP_FOR: Duration = Duration::from_secs(5 * 60);
/// Connections kept for one upstream.
const MAX_COUNT: usize = 128;

/// The shared connections of one upstream.
pub struct SharedPool {
    state: Mutex<State>,
    changed: Arc<Notify>,
    /// The last connection with TLS spoke HTTP/2, so that it is worth waiting for the next.
    speaks_http2: AtomicBool,
    /// When it last asked for HTTP/1.1 instead.
    gave_up: Mutex<Option<Instant>>,
}

struct State {
    connections: Vec<Arc<Shared>>,
    /// One entry for each dial, by the address that its client chose.
    dialing: Vec<Option<IpAddr>>,
    /// The same for those who wait.
    waiting: Vec<Option<IpAddr>>,
    failures: u64,
    streams: usize,
}

impl Default for SharedPool {
    fn default() -> Self {
        let state = State {
            connections: Vec::new(),
            dialing: Vec::new(),
            waiting: Vec::new(),
            failures: 0,
            streams: EXPECTED_STREAMS,
        };
        Self {
            state: Mutex::new(state),
            changed: Arc::default(),
            speaks_http2: AtomicBool::new(false),
            gave_up: Mutex::new(None),
        }
    }
}

/// What a request gets of the pool.
pub enum Claim<'a> {
    /// A place on a connection.
    Slot(Slot),
    /// The task to dial one.
    Dial(Dialing<'a>),
}

/// A dial that others may wait for. Dropping it says that it was given up, so that one of them takes over.
pub struct Dialing<'a> {
    pool: &'a SharedPool,
    pinned: Option<IpAddr>,
    is_awaited: bool,
}

impl SharedPool {
    /// A place on a connection that is `wanted`, or the task to dial one. Waits for the dials of others no
    /// longer than `patience`. Cancel-safe.
    ///
    /// # Errors
    /// [`Error::ConnectTimeout`] when they have brought nothing by then.
    pub async fn claim(
        &self,
        wanted: Wanted<'_>,
        now: Instant,
        patience: Duration,
    ) -> Result<Claim<'_>, Error> {
        let mut end = None;
        let failures = self.state.lock().failures;
        loop {
            let notified = self.changed.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            let _waiting = {
                let mut state = self.state.lock();
                if let Some(slot) = state.slot(wanted) {
                    return Ok(Claim::Slot(slot));
                }
                // In clear text there is no other version to turn out to be spoken.
                let is_awaited = wanted.tls.is_none() || self.speaks_http2();
                let is_enough = count(&state.waiting, wanted.pinned) < state.expected(wanted, now);
                if wanted.is_hedge || !is_awaited || !is_enough || state.failures != failures {
                    if is_awaited {
                        state.dialing.push(wanted.pinned);
                    }
                    return Ok(Claim::Dial(Dialing { pool: self, pinned: wanted.pinned, is_awaited }));
                }
                state.waiting.push(wanted.pinned);
                Waiting { pool: self, pinned: wanted.pinned }
            };
            let waited = Instant::now();
            let end = *end.get_or_insert(waited + patience);
            // Whatever came of it is seen at the next look.
            if timeout_at(end.min(waited + PATIENCE), notified).await.is_err() && Instant::now() >= end {
                return Err(Error::ConnectTimeout);
            }
        }
    }

    /// Whether the last connection with TLS spoke HTTP/2.
    pub fn speaks_http2(&self) -> bool {
        self.speaks_http2.load(Ordering::Relaxed)
    }

    /// The upstream has asked for HTTP/1.1 instead; it is not offered HTTP/2 for a while.
    pub fn give_up(&self, now: Instant) {
        *self.gave_up.lock() = Some(now);
    }

    /// Whether the upstream has asked for HTTP/1.1 instead, not long ago.
    pub fn is_given_up(&self, now: Instant) -> bool {
        self.gave_up.lock().is_some_and(|at| now.saturating_duration_since(at) < GIVEN_UP_FOR)
    }

    /// Told when there may be room.
    pub fn changed(&self) -> Arc<Notify> {
        self.changed.clone()
    }

    /// Retires what is too old or long unused, and forgets what takes no more requests.
    pub fn sweep(&self, now: Instant, max_idle: Duration, max_age: Duration) {
        let gone: Vec<Arc<Shared>> = {
            let mut state = self.state.lock();
            let (gone, kept) = std::mem::take(&mut state.connections).into_iter().partition(|shared| {
                let age = now.saturating_duration_since(shared.opened());
                shared.is_retired() || age >= max_age || shared.is_idle_for(max_idle, now)
            });
            state.connections = kept;
            gone
        };
        drop(gone);
    }

    /// How many connections there are.
    pub fn len(&self) -> usize {
        self.state.lock().connections.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl State {
    /// The fullest connection that has room, so that the others can fall idle and go.
    fn slot(&mut self, wanted: Wanted<'_>) -> Option<Slot> {
        self.connections.retain(|shared| !shared.is_retired());
        if let Some(shared) = self.connections.iter().rev().find(|shared| shared.is_settled()) {
            self.streams = shared.limit().max(1);
        }
        loop {
            let fullest = self
                .connections
                .iter()
                .filter(|shared| wanted.beside != Some(shared.id()) && wanted.takes(shared.origin()))
                .filter(|shared| wanted.since.is_none_or(|since| shared.opened() >= since))
                .filter(|shared| !shared.is_retired() && shared.in_flight() < shared.limit())
                .max_by_key(|shared| shared.in_flight())?;
            // One that turns out to take no more is retired by the asking; the next one may.
            if let Some(slot) = fullest.claim() {
                return Some(slot);
            }
        }
    }

    /// How many requests the dials that run, and the connections that have not said yet how much they
    /// take, will have room for.
    fn expected(&self, wanted: Wanted<'_>, now: Instant) -> usize {
        let is_young = |shared: &&Arc<Shared>| {
            !shared.is_settled()
                && shared.origin().pinned() == wanted.pinned
                && now.saturating_duration_since(shared.opened()) < PATIENCE
        };
        (count(&self.dialing, wanted.pinned) + self.connections.iter().filter(is_young).count())
            * self.streams
    }
}

fn count(those: &[Option<IpAddr>], pinned: Option<IpAddr>) -> usize {
    those.iter().filter(|other| **other == pinned).count()
}

fn remove(those: &mut Vec<Option<IpAddr>>, pinned: Option<IpAddr>) {
    if let Some(at) = those.iter().position(|other| *other == pinned) {
        those.swap_remove(at);
    }
}

/// One who waits.
struct Waiting<'a> {
    pool: &'a SharedPool,
    pinned: Option<IpAddr>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        remove(&mut self.pool.state.lock().waiting, self.pinned);
    }
}

impl Dialing<'_> {
    /// The dial has brought a connection for many: a place on it.
    pub fn succeeded(mut self, shared: &Arc<Shared>) -> Option<Slot> {
        let slot = shared.claim();
        self.end(|state| {
            if state.connections.len() < MAX_COUNT {
                state.connections.push(shared.clone());
            }
        });
        self.pool.speaks_http2.store(true, Ordering::Relaxed);
        slot
    }

    /// The dial has failed, and so may those that others would wait for.
    pub fn failed(mut self) {
        self.end(|state| state.failures += 1);
    }

    /// The dial has brought a connection for one alone.
    pub fn was_for_one(mut self) {
        self.pool.speaks_http2.store(false, Ordering::Relaxed);
        self.end(|_| {});
    }

    fn end(&mut self, change: impl FnOnce(&mut State)) {
        let mut state = self.pool.state.lock();
        if std::mem::take(&mut self.is_awaited) {
            remove(&mut state.dialing, self.pinned);
        }
        change(&mut state);
        drop(state);
        self.pool.changed.notify_waiters();
    }
}

impl Drop for Dialing<'_> {
    fn drop(&mut self) {
        if self.is_awaited {
            self.end(|_| {});
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::sync::LazyLock;
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::wire::authority::Authority;

    fn wanted() -> Wanted<'static> {
        static TO: LazyLock<Authority> = LazyLock::new(|| Authority::from_ip([10, 0, 0, 1].into(), 80));
        Wanted { to: &TO, tls: None, pinned: None, avoid: None, beside: None, since: None, is_hedge: false }
    }
    const LONG: Duration = Duration::from_secs(3);

    async fn dial<'a>(pool: &'a SharedPool, wanted: Wanted<'a>) -> Result<Dialing<'a>, Error> {
        match pool.claim(wanted, Instant::now(), LONG).await? {
            Claim::Dial(dialing) => Ok(dialing),
            Claim::Slot(_) => panic!("there is no connection"),
        }
    }

    fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[tokio::test(start_paused = true)]
    async fn http2_is_offered_again_some_time_after_it_was_given_up() {
        let (pool, now) = (SharedPool::default(), Instant::now());
        assert!(!pool.is_given_up(now));
        pool.give_up(now);
        assert!(pool.is_given_up(now + Duration::from_secs(299)));
        assert!(!pool.is_given_up(now + Duration::from_secs(300)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_hedge_does_not_wait_for_the_dial_of_its_own_call() {
        let pool = SharedPool::default();
        let _first = dial(&pool, wanted()).await;
        assert!(poll(pin!(dial(&pool, wanted()))).is_pending());
        assert!(poll(pin!(dial(&pool, Wanted { is_hedge: true, ..wanted() }))).is_ready());
    }

    #[tokio::test(start_paused = true)]
    async fn one_alone_takes_over_a_dial_that_was_given_up() {
        let pool = SharedPool::default();
        let first = dial(&pool, wanted()).await;
        let (mut one, mut two) = (pin!(dial(&pool, wanted())), pin!(dial(&pool, wanted())));
        assert!(poll(one.as_mut()).is_pending() && poll(two.as_mut()).is_pending());
        drop(first);
        let next = poll(one.as_mut());
        assert!(next.is_ready() && poll(two.as_mut()).is_pending());
    }

    #[tokio::test(start_paused = true)]
    async fn all_dial_for_themselves_once_one_has_failed() {
        let pool = SharedPool::default();
        let first = dial(&pool, wanted()).await;
        let (mut one, mut two) = (pin!(dial(&pool, wanted())), pin!(dial(&pool, wanted())));
        assert!(poll(one.as_mut()).is_pending() && poll(two.as_mut()).is_pending());
        first.unwrap_or_else(|error| panic!("{error}")).failed();
        let dials = (poll(one.as_mut()), poll(two.as_mut()));
        assert!(dials.0.is_ready() && dials.1.is_ready());
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_the_dial_of_another_longer_than_for_his_own() {
        let pool = SharedPool::default();
        let _first = dial(&pool, wanted()).await;
        let began = Instant::now();
        assert_eq!(dial(&pool, wanted()).await.err(), Some(Error::ConnectTimeout));
        assert_eq!(began.elapsed(), LONG);
    }
}
