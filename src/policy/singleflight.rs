//! One flight for many equal calls: the first leads, the others follow and share what it brings.
//!
//! Two things go wrong in the usual singleflight. The leader does the work in its own task, so that its
//! leaving fails everyone who waits; and a call that leaves takes the key with it, so that the next one
//! begins a second flight beside the first. Here the work belongs to nobody: the pipeline runs it in a task of its
//! own, members only wait, and the key lives until the flight lands. A member that leaves, the leader too, takes
//! nothing with it but itself. When the last one has left the work is aborted, since nobody waits for it any more.
//!
//! Whether an answer may be shared is the pipeline's to say; a flight that lands with [`Landing::Alone`] sends its
//! followers on their own ways. Waiting is the pipeline's too, so that each member waits as long as its own
//! deadline lets it.
//!
//! Joining and leaving happen under the lock of the key's shard, so that a call can never join a flight
//! that is just being given up.

use std::sync::Arc;

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::identity::Key;

/// The flights under way: at most as many as there are calls and renewals, which are bounded too.
pub struct Flights<T> {
    map: Arc<DashMap<Key, Arc<Flight<T>>>>,
}

struct Flight<T> {
    landing: watch::Sender<Option<Landing<T>>>,
    /// How many wait. Changed under the lock of the key's shard alone.
    members: Mutex<usize>,
    work: Mutex<Option<AbortHandle>>,
}

/// How a flight ended, as its followers see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Landing<T> {
    /// With something for all.
    Shared(T),
    /// With something for the leader alone: each follower goes its own way.
    Alone,
    /// For a reason that is the leader's, such as its deadline: the followers fly again.
    Again,
}

/// What a call is to its flight.
pub enum Joined<T> {
    /// Nobody is under way with this key: the call leads.
    Leader(Member<T>, Lead<T>),
    /// The call waits for another one's flight.
    Follower(Member<T>),
}

impl<T: Clone> Flights<T> {
    /// None under way.
    pub fn new() -> Self {
        Self { map: Arc::default() }
    }

    /// Joins the flight of this key, or begins one.
    pub fn join(&self, key: Key) -> Joined<T> {
        let member = |flight: &Arc<Flight<T>>| Member {
            map: self.map.clone(),
            key,
            landing: flight.landing.subscribe(),
            flight: flight.clone(),
        };
        match self.map.entry(key) {
            Entry::Occupied(flight) => {
                *flight.get().members.lock() += 1;
                Joined::Follower(member(flight.get()))
            }
            Entry::Vacant(place) => {
                let flight = Arc::new(Flight {
                    landing: watch::Sender::new(None),
                    members: Mutex::new(1),
                    work: Mutex::default(),
                });
                place.insert(flight.clone());
                let lead = Lead { map: self.map.clone(), key, flight: flight.clone(), has_landed: false };
                Joined::Leader(member(&flight), lead)
            }
        }
    }

    /// How many flights are under way.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }
}

impl<T: Clone> Default for Flights<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// A call's place in a flight. Dropping it leaves; the last to leave aborts the work.
pub struct Member<T> {
    map: Arc<DashMap<Key, Arc<Flight<T>>>>,
    key: Key,
    landing: watch::Receiver<Option<Landing<T>>>,
    flight: Arc<Flight<T>>,
}

impl<T: Clone> Member<T> {
    /// How the flight ends. Cancel-safe.
    pub async fn landed(&mut self) -> Landing<T> {
        match self.landing.wait_for(Option::is_some).await {
            Ok(landing) => landing.clone().unwrap_or(Landing::Again),
            // The sender lives in the flight, which this member holds.
            Err(_) => Landing::Again,
        }
    }

    /// Whether the flight has ended.
    pub fn has_landed(&self) -> bool {
        self.landing.borrow().is_some()
    }

    /// Hands over the work, so that it can be aborted when nobody waits any more.
    pub fn works(&self, work: AbortHandle) {
        *self.flight.work.lock() = Some(work);
    }
}

impl<T> Drop for Member<T> {
    fn drop(&mut self) {
        let mut is_last = false;
        let is_same = |flight: &Arc<Flight<T>>| Arc::ptr_eq(flight, &self.flight);
        self.map.remove_if(&self.key, |_, flight| {
            if !is_same(flight) {
                return false;
            }
            let mut members = flight.members.lock();
            *members -= 1;
            is_last = *members == 0;
            is_last
        });
        if is_last && let Some(work) = self.flight.work.lock().take() {
            work.abort();
        }
    }
}

/// The work's end of a flight. Dropped without a landing, as in a panic, the followers fly again.
pub struct Lead<T> {
    map: Arc<DashMap<Key, Arc<Flight<T>>>>,
    key: Key,
    flight: Arc<Flight<T>>,
    has_landed: bool,
}

impl<T> Lead<T> {
    /// Ends the flight. Whoever comes from now on begins another one.
    pub fn land(mut self, landing: Landing<T>) {
        self.end(landing);
    }

    fn end(&mut self, landing: Landing<T>) {
        if std::mem::replace(&mut self.has_landed, true) {
            return;
        }
        // First the key, then the news: a follower that flies again must not meet this flight.
        self.map.remove_if(&self.key, |_, flight| Arc::ptr_eq(flight, &self.flight));
        self.flight.landing.send_replace(Some(landing));
    }
}

impl<T> Drop for Lead<T> {
    fn drop(&mut self) {
        self.end(Landing::Again);
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, Method};
    use proptest::prelude::*;

    use super::*;
    use crate::policy::identity::{Passage, Place};
    use crate::wire::target::Scheme;

    fn key(target: &'static str) -> Key {
        let target = http::uri::PathAndQuery::from_static(target);
        let place = Place {
            scheme: Scheme::Http,
            authority: "a.example:80",
            host: b"",
            passage: &Passage::NONE,
            pinned: None,
            target: &target,
        };
        Key::of(place, &Method::GET, &HeaderMap::new(), [], None)
    }

    fn lead<T: Clone>(flights: &Flights<T>, key: Key) -> (Member<T>, Lead<T>) {
        match flights.join(key) {
            Joined::Leader(member, lead) => (member, lead),
            Joined::Follower(_) => panic!("somebody leads already"),
        }
    }

    fn follow<T: Clone>(flights: &Flights<T>, key: Key) -> Member<T> {
        match flights.join(key) {
            Joined::Follower(member) => member,
            Joined::Leader(..) => panic!("nobody leads"),
        }
    }

    #[tokio::test]
    async fn all_members_see_the_landing_and_the_next_call_leads_anew() {
        let flights = Flights::new();
        let (mut leader, work) = lead(&flights, key("/x"));
        let mut followers = [(); 3].map(|()| follow(&flights, key("/x")));
        work.land(Landing::Shared(7));
        assert_eq!(leader.landed().await, Landing::Shared(7));
        for follower in &mut followers {
            assert_eq!(follower.landed().await, Landing::Shared(7));
        }
        assert!(flights.is_empty());
        lead(&flights, key("/x"));
    }

    #[tokio::test]
    async fn the_leader_leaves_and_the_work_goes_on() {
        let flights = Flights::new();
        let (leader, work) = lead(&flights, key("/x"));
        let task = tokio::spawn(std::future::pending::<()>());
        leader.works(task.abort_handle());
        let mut follower = follow(&flights, key("/x"));
        drop(leader);
        tokio::task::yield_now().await;
        assert!(!task.is_finished());
        work.land(Landing::Shared(1));
        assert_eq!(follower.landed().await, Landing::Shared(1));
    }

    #[tokio::test]
    async fn the_key_lives_although_a_member_leaves() {
        let flights = Flights::<u8>::new();
        let (_leader, _work) = lead(&flights, key("/x"));
        drop(follow(&flights, key("/x")));
        follow(&flights, key("/x"));
        assert_eq!(flights.len(), 1);
    }

    #[tokio::test]
    async fn the_last_to_leave_aborts_the_work() {
        let flights = Flights::<u8>::new();
        let (leader, work) = lead(&flights, key("/x"));
        let task = tokio::spawn(async move {
            let _work = work;
            std::future::pending::<()>().await;
        });
        leader.works(task.abort_handle());
        drop(leader);
        assert!(task.await.unwrap_err().is_cancelled());
        assert!(flights.is_empty());
    }

    #[tokio::test]
    async fn a_member_that_outlives_its_flight_does_no_harm_to_the_next() {
        let flights = Flights::<u8>::new();
        let (old, work) = lead(&flights, key("/x"));
        work.land(Landing::Alone);
        let (_leader, _work) = lead(&flights, key("/x"));
        drop(old);
        follow(&flights, key("/x"));
    }

    #[tokio::test]
    async fn work_that_panics_lets_the_followers_fly_again() {
        let flights = Flights::<u8>::new();
        let (_leader, work) = lead(&flights, key("/x"));
        let mut follower = follow(&flights, key("/x"));
        drop(work);
        assert_eq!(follower.landed().await, Landing::Again);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Join(usize),
        Leave(usize),
        Land(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0..3usize).prop_map(Step::Join),
            2 => any::<usize>().prop_map(Step::Leave),
            1 => any::<usize>().prop_map(Step::Land),
        ]
    }

    proptest! {
        /// Over any order of joining, leaving and landing: never two flights of a key at once, no answer
        /// for a call of another key, and nothing left when all have gone.
        #[test]
        fn answers_stay_with_their_keys(steps in proptest::collection::vec(step(), 1..80)) {
            const TARGETS: [&str; 3] = ["/a", "/b", "/c"];
            let flights = Flights::<usize>::new();
            let mut members: Vec<(usize, Member<usize>)> = Vec::new();
            let mut leads: Vec<(usize, Lead<usize>)> = Vec::new();
            for step in steps {
                match step {
                    Step::Join(which) => match flights.join(key(TARGETS[which])) {
                        Joined::Leader(member, lead) => {
                            members.push((which, member));
                            leads.push((which, lead));
                        }
                        Joined::Follower(member) => members.push((which, member)),
                    },
                    Step::Leave(at) if !members.is_empty() => {
                        members.swap_remove(at % members.len());
                    }
                    Step::Land(at) if !leads.is_empty() => {
                        let (which, lead) = leads.swap_remove(at % leads.len());
                        lead.land(Landing::Shared(which));
                    }
                    Step::Leave(_) | Step::Land(_) => {}
                }
                prop_assert!(flights.len() <= TARGETS.len());
                for (which, member) in &members {
                    if let Some(Landing::Shared(answer)) = &*member.landing.borrow() {
                        prop_assert_eq!(answer, which);
                    }
                }
            }
            members.clear();
            leads.clear();
            prop_assert!(flights.is_empty());
        }
    }
}
