//! Calls in their order, the first of which looks at the clock while the others sleep.
//!
//! Each has its own bell, a [`Notify`], which keeps one ring for who is not listening yet: whoever
//! becomes first learns it, whatever it is about. One bell for all would wake all.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;
use tokio::time::Instant;

use super::pauses::Group;

/// Stands in no line.
const NOWHERE: u64 = 0;

/// A call that waits.
#[derive(Debug, Clone)]
pub(super) struct Waiter {
    pub(super) group: Group,
    /// From when on a token is of no use.
    pub(super) deadline: Instant,
    seat: Arc<Seat>,
}

#[derive(Debug)]
struct Seat {
    /// Its key in the line in which it stands. Changed under the limiter's lock only, which makes relaxed
    /// order enough.
    place: AtomicU64,
    wake: Notify,
}

impl Waiter {
    pub(super) fn new(group: Group, deadline: Instant) -> Self {
        let seat = Seat { place: AtomicU64::new(NOWHERE), wake: Notify::new() };
        Self { group, deadline, seat: Arc::new(seat) }
    }

    /// Has it look again; never lost, even if it does not sleep yet.
    pub(super) fn wake(&self) {
        self.seat.wake.notify_one();
    }

    /// Until the next [`Self::wake`]. Cancel-safe.
    pub(super) async fn woken(&self) {
        self.seat.wake.notified().await;
    }

    fn place(&self) -> u64 {
        self.seat.place.load(Ordering::Relaxed)
    }
}

/// Waiters in order of their arrival here. A map, not a queue: in a rush of calls that give up, each
/// finds its place without a search.
#[derive(Debug, Default)]
pub(super) struct Line {
    waiters: BTreeMap<u64, Waiter>,
    last: u64,
}

impl Line {
    pub(super) fn len(&self) -> usize {
        self.waiters.len()
    }

    pub(super) fn push(&mut self, waiter: Waiter) {
        self.last += 1;
        waiter.seat.place.store(self.last, Ordering::Relaxed);
        self.waiters.insert(self.last, waiter);
    }

    pub(super) fn contains(&self, waiter: &Waiter) -> bool {
        self.waiters.get(&waiter.place()).is_some_and(|there| Arc::ptr_eq(&there.seat, &waiter.seat))
    }

    pub(super) fn is_first(&self, waiter: &Waiter) -> bool {
        self.waiters.first_key_value().is_some_and(|(_, first)| Arc::ptr_eq(&first.seat, &waiter.seat))
    }

    /// Takes it out, if it stands here; who becomes first is woken.
    pub(super) fn remove(&mut self, waiter: &Waiter) -> bool {
        if !self.contains(waiter) {
            return false;
        }
        let was_first = self.is_first(waiter);
        self.waiters.remove(&waiter.place());
        waiter.seat.place.store(NOWHERE, Ordering::Relaxed);
        if was_first {
            self.wake_first();
        }
        true
    }

    /// Takes out all of a group, in their order; who becomes first is woken.
    pub(super) fn remove_group(&mut self, group: &Group) -> Vec<Waiter> {
        let gone: Vec<_> = self.waiters.values().filter(|waiter| waiter.group == *group).cloned().collect();
        let first_goes = gone.first().is_some_and(|waiter| self.is_first(waiter));
        for waiter in &gone {
            self.waiters.remove(&waiter.place());
        }
        if first_goes {
            self.wake_first();
        }
        gone
    }

    /// Takes out all to whom a token from `at` on is of no use, and wakes them to hear it; returns how many.
    pub(super) fn dismiss_late(&mut self, at: Instant) -> usize {
        let before = self.len();
        self.waiters.retain(|_, waiter| {
            let is_late = waiter.deadline <= at;
            if is_late {
                waiter.wake();
            }
            !is_late
        });
        self.wake_first();
        before - self.len()
    }

    pub(super) fn wake_first(&self) {
        if let Some((_, first)) = self.waiters.first_key_value() {
            first.wake();
        }
    }
}

impl IntoIterator for Line {
    type Item = Waiter;
    type IntoIter = std::collections::btree_map::IntoValues<u64, Waiter>;

    fn into_iter(self) -> Self::IntoIter {
        self.waiters.into_values()
    }
}
