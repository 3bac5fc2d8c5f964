//! The connections of one upstream that a request may use: the idle ones of HTTP/1 here, the shared ones
//! of HTTP/2 beside them.
//!
//! Last in, first out: the warm ones are used and the rest grow old and go. Bounded in number, in
//! idle time and in age; the age bound makes a change of DNS reach an upstream that is never idle.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::connection::Wanted;
use super::http1::Idle;
use super::shared::SharedPool;

/// Longer than the pauses of an agent at work, shorter than what most servers keep.
const MAX_IDLE: Duration = Duration::from_secs(55);
/// How long a change of the name's addresses may go unnoticed.
const MAX_AGE: Duration = Duration::from_secs(5 * 60);
/// Idle connections kept for one upstream.
const MAX_COUNT: usize = 128;

/// The connections of one upstream.
#[derive(Default)]
pub struct Pool {
    /// Newest last.
    idle: Mutex<VecDeque<Pooled>>,
    /// Those that take several requests at once.
    pub shared: SharedPool,
}

struct Pooled {
    connection: Idle,
    since: Instant,
}

impl Pool {
    /// The warmest connection that is wanted and that its peer has left open.
    pub fn take(&self, wanted: Wanted<'_>, now: Instant) -> Option<Idle> {
        loop {
            let mut connection = {
                let mut idle = self.idle.lock();
                let at = idle.iter().rposition(|idle| wanted.takes(idle.connection.origin()))?;
                let found = idle.remove(at)?;
                if !is_fresh(&found, now) {
                    continue;
                }
                found.connection
            };
            if connection.is_usable() {
                return Some(connection);
            }
        }
    }

    /// Keeps a connection for the next request; the oldest gives way when there are too many.
    pub fn put(&self, connection: Idle, now: Instant) {
        if now.saturating_duration_since(connection.opened()) >= MAX_AGE {
            return;
        }
        let mut idle = self.idle.lock();
        idle.push_back(Pooled { connection, since: now });
        let surplus = if idle.len() > MAX_COUNT { idle.pop_front() } else { None };
        drop(idle);
        drop(surplus);
    }

    /// Closes what has been idle too long, is too old, or was closed by its peer.
    pub fn sweep(&self, now: Instant) {
        self.shared.sweep(now, MAX_IDLE, MAX_AGE);
        let (fresh, stale): (VecDeque<Pooled>, VecDeque<Pooled>) = {
            let mut idle = self.idle.lock();
            std::mem::take(&mut *idle).into_iter().partition(|idle| is_fresh(idle, now))
        };
        drop(stale);
        let open: VecDeque<Pooled> =
            fresh.into_iter().filter_map(|mut idle| idle.connection.is_usable().then_some(idle)).collect();
        let mut idle = self.idle.lock();
        // What came back meanwhile is newer.
        let newer = std::mem::replace(&mut *idle, open);
        idle.extend(newer);
    }

    /// How many connections of HTTP/1 lie idle.
    pub fn idle(&self) -> usize {
        self.idle.lock().len()
    }
}

fn is_fresh(idle: &Pooled, now: Instant) -> bool {
    now.saturating_duration_since(idle.since) < MAX_IDLE
        && now.saturating_duration_since(idle.connection.opened()) < MAX_AGE
}
