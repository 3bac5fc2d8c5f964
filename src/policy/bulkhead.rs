//! The bulkhead of one upstream: so many calls at once, so many more in a bounded queue.
//!
//! One hung upstream must hold only its own share of the process. The queue is strictly first come,
//! first served, and a call enters it only if its turn will come in time: the expected wait is its
//! place in the queue times the recent time that attempts take, over how many permits there are. A call that
//! would be late is told at once, while its caller can still do something else.
//!
//! A permit that comes back without an attempt, for want of a rate token or of budget, was held for no time
//! at all; one that waits for a token, as long as the upstream's pause. Neither tells how long the upstream
//! takes, so the clock starts with the attempt ([`Permit::begins`]).
//!
//! A permit travels to a waiter inside a oneshot channel. So there is no moment in which it belongs to
//! nobody: a waiter that is dropped while a permit is on its way drops the channel, the channel drops
//! the permit, and the permit goes to the next in line. tokio's semaphore was rejected, since its number
//! of permits cannot follow a reload downwards without waiting, and its queue has no bound.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::config;

/// Why no permit was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// All permits are out and the queue has no place.
    Full,
    /// The turn would come after the deadline.
    TooLate,
}

/// Permits and the queue for them.
#[derive(Debug, Default)]
pub struct Bulkhead {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    in_flight: usize,
    /// `max_concurrent` as last seen, for releases, which bring no settings.
    limit: usize,
    queue: VecDeque<Waiter>,
    next_id: u64,
    hold: HoldTime,
}

#[derive(Debug)]
struct Waiter {
    /// Ascends through the queue.
    id: u64,
    hand: oneshot::Sender<Permit>,
}

impl Bulkhead {
    /// A bulkhead with nothing in flight.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// A permit that is free now while nobody queues for it; for a hedge, which never waits.
    pub fn try_acquire(self: &Arc<Self>, cfg: &config::Bulkhead) -> Option<Permit> {
        let is_free = self.serve(cfg).take_free();
        is_free.then(|| Permit::new(self))
    }

    /// A permit, after a wait in the queue if need be. The caller bounds the wait by dropping the
    /// future at its deadline; `now` and `deadline` serve to refuse what cannot be in time.
    ///
    /// Cancel-safe: a dropped waiter leaves the queue, and a permit on its way to it goes on to the next.
    ///
    /// # Errors
    ///
    /// At once, never after a wait: [`Refused::Full`] without a place in the queue, [`Refused::TooLate`]
    /// when the turn is not expected before the deadline.
    pub async fn acquire(
        self: &Arc<Self>,
        cfg: &config::Bulkhead,
        now: Instant,
        deadline: Option<Instant>,
    ) -> Result<Permit, Refused> {
        let mut place = {
            let mut inner = self.serve(cfg);
            if inner.take_free() {
                return Ok(Permit::new(self));
            }
            if inner.queue.len() >= cfg.max_queue {
                return Err(Refused::Full);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(now));
            if left.is_some_and(|left| inner.expected_wait() > left.as_secs_f64()) {
                return Err(Refused::TooLate);
            }
            let (id, turn) = inner.enqueue();
            Place { bulkhead: self, id, turn }
        };
        Ok((&mut place.turn).await.expect("a sender leaves the queue only by being used or with its waiter"))
    }

    /// Permits out.
    pub fn in_flight(&self) -> usize {
        self.inner.lock().in_flight
    }

    /// Calls in the queue.
    pub fn queued(&self) -> usize {
        self.inner.lock().queue.len()
    }

    /// Takes up the settings; when a reload brought more permits, the queue gets them first.
    fn serve<'a>(self: &'a Arc<Self>, cfg: &config::Bulkhead) -> MutexGuard<'a, Inner> {
        let mut inner = self.inner.lock();
        inner.limit = cfg.max_concurrent;
        self.hand_on(inner)
    }

    fn release(self: &Arc<Self>, held: Option<Duration>) {
        let mut inner = self.inner.lock();
        if let Some(held) = held {
            inner.hold.record(held);
        }
        inner.in_flight -= 1;
        drop(self.hand_on(inner));
    }

    /// Gives permits to waiters, in their order, as long as there are both. Each is sent with the lock
    /// open: a waiter that has just gone makes its permit come straight back to `release`.
    fn hand_on<'a>(self: &'a Arc<Self>, mut inner: MutexGuard<'a, Inner>) -> MutexGuard<'a, Inner> {
        while let Some(waiter) = inner.next_waiter() {
            MutexGuard::unlocked(&mut inner, || {
                // A permit that comes back is dropped here, which serves the next in line.
                drop(waiter.hand.send(Permit::new(self)));
            });
        }
        inner
    }
}

impl Inner {
    /// Counts a permit as taken, if one is free and nobody was there before.
    fn take_free(&mut self) -> bool {
        let is_free = self.in_flight < self.limit && self.queue.is_empty();
        self.in_flight += usize::from(is_free);
        is_free
    }

    /// Counts a permit as taken for the first waiter, if there are both.
    fn next_waiter(&mut self) -> Option<Waiter> {
        if self.in_flight >= self.limit {
            return None;
        }
        let waiter = self.queue.pop_front()?;
        self.in_flight += 1;
        Some(waiter)
    }

    fn enqueue(&mut self) -> (u64, oneshot::Receiver<Permit>) {
        let (hand, turn) = oneshot::channel();
        let id = self.next_id;
        self.next_id += 1;
        self.queue.push_back(Waiter { id, hand });
        (id, turn)
    }

    /// Seconds until a newcomer's turn: as many releases as there are calls before it, and its own.
    fn expected_wait(&self) -> f64 {
        let releases = (self.queue.len() + 1) as f64;
        // Permits may be out beyond a limit that was lowered; those come back first.
        let excess = self.in_flight.saturating_sub(self.limit) as f64;
        (releases + excess) * self.hold.seconds / self.in_flight.max(1) as f64
    }
}

/// A moving average of how long attempts take, their bodies included.
#[derive(Debug, Default)]
struct HoldTime {
    /// Zero until the first of them ends: without knowledge a call may queue.
    seconds: f64,
    is_known: bool,
}

impl HoldTime {
    /// The weight of one of them: half of the average is the last eleven.
    const WEIGHT: f64 = 1.0 / 16.0;

    fn record(&mut self, held: Duration) {
        let held = held.as_secs_f64();
        if self.is_known {
            self.seconds += (held - self.seconds) * Self::WEIGHT;
        } else {
            self.seconds = held;
            self.is_known = true;
        }
    }
}

/// A place in the queue; leaves it when dropped.
struct Place<'a> {
    bulkhead: &'a Bulkhead,
    id: u64,
    turn: oneshot::Receiver<Permit>,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut inner = self.bulkhead.inner.lock();
        if let Ok(index) = inner.queue.binary_search_by_key(&self.id, |waiter| waiter.id) {
            inner.queue.remove(index);
        }
    }
}

/// The right to one call. Freed on drop, for the first in the queue if there is one.
#[derive(Debug)]
#[must_use = "dropping it frees the place"]
pub struct Permit {
    bulkhead: Arc<Bulkhead>,
    /// When its attempt began.
    since: Option<Instant>,
}

impl Permit {
    fn new(bulkhead: &Arc<Bulkhead>) -> Self {
        Self { bulkhead: Arc::clone(bulkhead), since: None }
    }

    /// The attempt that it is for begins now, and lasts as long as the permit.
    pub fn begins(&mut self, now: Instant) {
        self.since = Some(now);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.bulkhead.release(self.since.map(|since| since.elapsed()));
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll, Waker};

    use proptest::prelude::*;

    use super::*;

    fn config(max_concurrent: usize, max_queue: usize) -> config::Bulkhead {
        config::Bulkhead { max_concurrent, max_queue }
    }

    /// Polls once, as a runtime would that was woken.
    fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn permits_are_bounded_and_come_back() {
        let bulkhead = Bulkhead::new();
        let two = config(2, 0);
        let first = bulkhead.try_acquire(&two).expect("one of two");
        let second = bulkhead.try_acquire(&two).expect("two of two");
        assert!(bulkhead.try_acquire(&two).is_none());
        assert_eq!(bulkhead.in_flight(), 2);
        drop(first);
        assert_eq!(bulkhead.in_flight(), 1);
        assert!(bulkhead.try_acquire(&two).is_some());
        drop(second);
        assert_eq!(bulkhead.in_flight(), 0);
    }

    #[tokio::test]
    async fn a_call_without_a_place_in_the_queue_is_refused_at_once() {
        let bulkhead = Bulkhead::new();
        let no_queue = config(1, 0);
        let now = Instant::now();
        let _held = bulkhead.acquire(&no_queue, now, None).await.unwrap();
        assert_eq!(bulkhead.acquire(&no_queue, now, None).await.unwrap_err(), Refused::Full);

        let one_place = config(1, 1);
        let mut waiting = pin!(bulkhead.acquire(&one_place, now, None));
        assert!(poll_once(waiting.as_mut()).is_pending());
        assert_eq!(bulkhead.queued(), 1);
        assert_eq!(bulkhead.acquire(&one_place, now, None).await.unwrap_err(), Refused::Full);
    }

    #[test]
    fn waiters_are_served_in_their_order_and_before_newcomers() {
        let bulkhead = Bulkhead::new();
        let one = config(1, 10);
        let now = Instant::now();
        let held = bulkhead.try_acquire(&one).unwrap();
        let mut first = Box::pin(bulkhead.acquire(&one, now, None));
        let mut second = Box::pin(bulkhead.acquire(&one, now, None));
        assert!(poll_once(first.as_mut()).is_pending());
        assert!(poll_once(second.as_mut()).is_pending());
        drop(held);
        assert!(bulkhead.try_acquire(&one).is_none(), "the permit belongs to the first in the queue");
        assert!(poll_once(second.as_mut()).is_pending());
        let Poll::Ready(Ok(permit)) = poll_once(first.as_mut()) else { panic!("it was its turn") };
        drop(permit);
        assert!(matches!(poll_once(second.as_mut()), Poll::Ready(Ok(_))));
    }

    #[test]
    fn a_waiter_dropped_with_a_permit_on_its_way_passes_it_on() {
        let bulkhead = Bulkhead::new();
        let one = config(1, 10);
        let now = Instant::now();
        let held = bulkhead.try_acquire(&one).unwrap();
        let mut first = Box::pin(bulkhead.acquire(&one, now, None));
        let mut second = Box::pin(bulkhead.acquire(&one, now, None));
        assert!(poll_once(first.as_mut()).is_pending());
        assert!(poll_once(second.as_mut()).is_pending());
        drop(held);
        drop(first);
        assert!(matches!(poll_once(second.as_mut()), Poll::Ready(Ok(_))));
        assert_eq!(bulkhead.in_flight(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_after_the_deadline_is_refused_at_once() {
        let bulkhead = Bulkhead::new();
        let two = config(2, 10);
        // Permits are held for 400 ms.
        let mut known = bulkhead.try_acquire(&two).unwrap();
        known.begins(Instant::now());
        tokio::time::advance(Duration::from_millis(400)).await;
        drop(known);

        let _held = [bulkhead.try_acquire(&two).unwrap(), bulkhead.try_acquire(&two).unwrap()];
        let now = Instant::now();
        let in_time = |millis| Some(now + Duration::from_millis(millis));
        // Two permits of 400 ms each: one comes free every 200 ms.
        assert_eq!(bulkhead.acquire(&two, now, in_time(199)).await.unwrap_err(), Refused::TooLate);
        let mut first = pin!(bulkhead.acquire(&two, now, in_time(201)));
        assert!(poll_once(first.as_mut()).is_pending());
        assert_eq!(bulkhead.acquire(&two, now, in_time(399)).await.unwrap_err(), Refused::TooLate);
        let mut second = pin!(bulkhead.acquire(&two, now, in_time(401)));
        assert!(poll_once(second.as_mut()).is_pending());
        assert_eq!(bulkhead.queued(), 2);
    }

    /// Permits that were given back for want of a rate token made the expected wait nought, and those that waited
    /// for one made it as long as the upstream's pause.
    #[tokio::test(start_paused = true)]
    async fn only_the_time_of_attempts_tells_how_long_the_queue_takes() {
        let bulkhead = Bulkhead::new();
        let one = config(1, 10);
        let mut known = bulkhead.try_acquire(&one).unwrap();
        tokio::time::advance(Duration::from_secs(60)).await;
        known.begins(Instant::now());
        tokio::time::advance(Duration::from_millis(400)).await;
        drop(known);
        for _ in 0..100 {
            drop(bulkhead.try_acquire(&one).unwrap());
        }

        let _held = bulkhead.try_acquire(&one).unwrap();
        let now = Instant::now();
        let in_time = |millis| Some(now + Duration::from_millis(millis));
        let mut late = pin!(bulkhead.acquire(&one, now, in_time(399)));
        assert!(matches!(poll_once(late.as_mut()), Poll::Ready(Err(Refused::TooLate))));
        let mut waiting = pin!(bulkhead.acquire(&one, now, in_time(401)));
        assert!(poll_once(waiting.as_mut()).is_pending());
    }

    #[test]
    fn a_raised_bound_wakes_waiters_and_a_lowered_one_holds_permits_back() {
        let bulkhead = Bulkhead::new();
        let now = Instant::now();
        let held = bulkhead.try_acquire(&config(1, 10)).unwrap();
        let one = config(1, 10);
        let mut waiting = Box::pin(bulkhead.acquire(&one, now, None));
        assert!(poll_once(waiting.as_mut()).is_pending());

        let third = bulkhead.try_acquire(&config(3, 10)).expect("two new permits, one waiter");
        let Poll::Ready(Ok(second)) = poll_once(waiting.as_mut()) else { panic!("a permit is there") };
        assert_eq!(bulkhead.in_flight(), 3);

        assert!(bulkhead.try_acquire(&one).is_none());
        let mut late = Box::pin(bulkhead.acquire(&one, now, None));
        assert!(poll_once(late.as_mut()).is_pending());
        drop((held, second));
        assert!(poll_once(late.as_mut()).is_pending(), "one is still out, and one is the bound");
        drop(third);
        assert!(matches!(poll_once(late.as_mut()), Poll::Ready(Ok(_))));
    }

    /// Capacity once leaked where waiters that had timed out were handed permits later.
    #[tokio::test(start_paused = true)]
    async fn rounds_of_timed_out_waiters_leave_all_permits() {
        let bulkhead = Bulkhead::new();
        let eight = config(8, 8);
        for _ in 0..10 {
            let holders: Vec<_> = (0..8).map(|_| bulkhead.try_acquire(&eight).unwrap()).collect();
            let waiters: Vec<_> = (0..8)
                .map(|_| {
                    let bulkhead = Arc::clone(&bulkhead);
                    tokio::spawn(async move {
                        let turn = bulkhead.acquire(&eight, Instant::now(), None);
                        tokio::time::timeout(Duration::from_millis(100), turn).await.map(drop)
                    })
                })
                .collect();
            for waiter in waiters {
                waiter.await.unwrap().expect_err("no permit within 100 ms");
            }
            tokio::time::advance(Duration::from_millis(900)).await;
            drop(holders);
            assert_eq!((bulkhead.in_flight(), bulkhead.queued()), (0, 0));
        }
        let all: Vec<_> = (0..9).map_while(|_| bulkhead.try_acquire(&eight)).collect();
        assert_eq!(all.len(), 8);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn cancellations_on_all_threads_leak_nothing() {
        let bulkhead = Bulkhead::new();
        let three = config(3, 64);
        let tasks: Vec<_> = (0..64)
            .map(|seed| {
                let bulkhead = Arc::clone(&bulkhead);
                tokio::spawn(async move {
                    let mut random = fastrand::Rng::with_seed(seed);
                    for _ in 0..200 {
                        let patience = Duration::from_micros(random.u64(..200));
                        let turn = bulkhead.acquire(&three, Instant::now(), None);
                        if let Ok(Ok(permit)) = tokio::time::timeout(patience, turn).await {
                            assert!(bulkhead.in_flight() <= 3);
                            tokio::task::yield_now().await;
                            drop(permit);
                        }
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!((bulkhead.in_flight(), bulkhead.queued()), (0, 0));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Arrive,
        Poll(usize),
        Leave(usize),
        Release(usize),
        Limit(usize),
    }

    type Call = Pin<Box<dyn Future<Output = Result<Permit, Refused>>>>;

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => Just(Step::Arrive),
            3 => (0usize..100).prop_map(Step::Poll),
            2 => (0usize..100).prop_map(Step::Leave),
            3 => (0usize..100).prop_map(Step::Release),
            1 => (1usize..6).prop_map(Step::Limit),
        ];
        prop::collection::vec(step, 1..120)
    }

    proptest! {
        #[test]
        fn no_permit_is_lost_or_made_up(steps in steps()) {
            let bulkhead = Bulkhead::new();
            let mut limit = 2;
            let mut most = 2;
            let mut waiting: Vec<Call> = Vec::new();
            let mut held: Vec<Permit> = Vec::new();
            for step in steps {
                match step {
                    Step::Arrive => {
                        let bulkhead = Arc::clone(&bulkhead);
                        let cfg = config(limit, 8);
                        let mut call = Box::pin(async move {
                            bulkhead.acquire(&cfg, Instant::now(), None).await
                        });
                        match poll_once(call.as_mut()) {
                            Poll::Ready(Ok(permit)) => held.push(permit),
                            Poll::Ready(Err(refused)) => prop_assert_eq!(refused, Refused::Full),
                            Poll::Pending => waiting.push(call),
                        }
                    }
                    Step::Poll(n) if !waiting.is_empty() => {
                        let n = n % waiting.len();
                        if let Poll::Ready(permit) = poll_once(waiting[n].as_mut()) {
                            held.push(permit.unwrap());
                            drop(waiting.remove(n));
                        }
                    }
                    Step::Leave(n) if !waiting.is_empty() => drop(waiting.remove(n % waiting.len())),
                    Step::Release(n) if !held.is_empty() => drop(held.remove(n % held.len())),
                    Step::Limit(n) => {
                        limit = n;
                        most = most.max(n);
                    }
                    Step::Poll(_) | Step::Leave(_) | Step::Release(_) => {}
                }
                prop_assert!(bulkhead.queued() <= 8);
                prop_assert!(held.len() <= bulkhead.in_flight() && bulkhead.in_flight() <= most);
                prop_assert_eq!(bulkhead.in_flight() + bulkhead.queued(), held.len() + waiting.len());
            }
            // Whoever still waits gets through once the others let go: no wake-up was lost.
            while !waiting.is_empty() {
                held.clear();
                let before = waiting.len();
                waiting.retain_mut(|call| match poll_once(call.as_mut()) {
                    Poll::Ready(permit) => {
                        held.push(permit.unwrap());
                        false
                    }
                    Poll::Pending => true,
                });
                prop_assert!(waiting.len() < before, "stuck with {before} waiting");
            }
            held.clear();
            prop_assert_eq!((bulkhead.in_flight(), bulkhead.queued()), (0, 0));
        }
    }
}
