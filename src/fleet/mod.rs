//! What a pod has to do with the other pods: the connection to what they know together, its own name among
//! them, and how many they are.
//!
//! Nothing here decides anything. Each guard has a state machine of its own that works without a fleet, and
//! a part that says what others are to be told and what of their words counts ([`crate::policy::breaker`],
//! [`crate::policy::rate_limit`]). Redis is told and listened to beside the requests
//! ([`crate::liaison`]); the few questions that a request itself asks are bounded by
//! `shared_state.timeout`, and none is asked while nobody answers.
//!
//! **Turns.** A word that was published while this pod was not listening is lost. So whenever that may have
//! been so, after each new connection and after a time in which the whole process stood still, a new turn
//! begins: what was known before counts as old news until it has been read again.

mod connect;
mod link;
mod script;

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use crate::config::SharedState;

#[cfg(test)]
pub(crate) use self::link::PATIENCE;
pub use self::link::{Fault, Link, Status};
pub use self::script::{Reply, Script};

/// Words of others that wait to be taken in. When there are more, a new turn begins instead.
const MOST_WAITING: usize = 1024;
/// After a silence of the liaison of this length the process is taken to have stood still. It ticks four times
/// a second.
const STANDSTILL: Duration = Duration::from_secs(3);

/// The fleet as this pod sees it. There is one even where nothing is shared: then it has no link.
pub struct Fleet {
    pod: String,
    link: ArcSwapOption<Link>,
    turn: AtomicU64,
    /// Milliseconds since `epoch` at which the liaison was last seen at work.
    ticked: AtomicU64,
    epoch: Instant,
    heard: (mpsc::Sender<String>, Mutex<Option<mpsc::Receiver<String>>>),
    rung: Mutex<HashSet<Id>>,
    bell: Notify,
}

/// Which of its guards a pod speaks of: those of an upstream, or of a named route of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Id {
    /// The upstream's host and port.
    pub authority: Arc<str>,
    /// The route's name.
    pub route: Option<Arc<str>>,
}

impl Id {
    /// As it stands in what pods publish: an authority holds no space.
    pub fn in_words(&self) -> String {
        format!("{} {}", self.authority, self.route.as_deref().unwrap_or_default())
    }

    /// The same, read.
    pub fn from_words(text: &str) -> Self {
        let (authority, route) = text.split_once(' ').unwrap_or((text, ""));
        Self {
            authority: authority.into(),
            route: Some(route).filter(|route| !route.is_empty()).map(Arc::from),
        }
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.authority)?;
        self.route.as_ref().map_or(Ok(()), |route| write!(f, ":{route}"))
    }
}

/// One guard's part in the fleet.
#[derive(Clone)]
pub struct Member {
    /// The fleet.
    pub fleet: Arc<Fleet>,
    /// What the others call this guard.
    pub id: Id,
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Member({})", self.id)
    }
}

impl Fleet {
    /// A pod on its own, with a name that no other pod has and that tells nothing about it.
    pub fn new() -> Arc<Self> {
        let (sender, receiver) = mpsc::channel(MOST_WAITING);
        Arc::new(Self {
            pod: format!("{:016x}", fastrand::u64(..)),
            link: ArcSwapOption::empty(),
            turn: AtomicU64::new(1),
            ticked: AtomicU64::new(0),
            epoch: Instant::now(),
            heard: (sender, Mutex::new(Some(receiver))),
            rung: Mutex::default(),
            bell: Notify::new(),
        })
    }

    /// A pod of a simulation.
    #[cfg(test)]
    pub(crate) fn simulated(link: Arc<Link>) -> Arc<Self> {
        let fleet = Self::new();
        fleet.link.store(Some(link));
        fleet
    }

    /// The name of this pod among the others.
    pub fn pod(&self) -> &str {
        &self.pod
    }

    /// Takes up the settings. When they are new, the link is made anew, and nobody waits for that. To be called
    /// where tasks can be spawned.
    pub fn follow(self: &Arc<Self>, settings: Option<&SharedState>) {
        let current = self.link.load();
        if current.as_ref().map(|link| link.settings()) == settings {
            return;
        }
        let pods = self.pods();
        let link = settings.map(|settings| Link::start(settings.clone(), Arc::downgrade(self), pods));
        self.link.store(link);
        self.begin_turn();
    }

    /// The link, whether anybody answers there or not; `None` where the policy names none.
    pub fn link(&self) -> Option<Arc<Link>> {
        self.link.load_full()
    }

    /// The link, when it is up.
    pub fn up(&self) -> Option<Arc<Link>> {
        self.link.load_full().filter(|link| link.is_up())
    }

    /// Pods of the fleet as last counted, this one included.
    pub fn pods(&self) -> u32 {
        self.link.load().as_ref().map_or(1, |link| link.pods())
    }

    /// The number of the turn at `now`.
    pub fn turn(&self, now: Instant) -> u64 {
        let ticked = self.ticked.load(Ordering::Relaxed);
        let stood_still = self.millis(now).saturating_sub(ticked) > STANDSTILL.as_millis() as u64;
        if ticked > 0 && stood_still && self.claims_tick(ticked, now) {
            self.begin_turn();
        }
        self.turn.load(Ordering::Relaxed)
    }

    /// The liaison is at work; to be told four times a second while there is a link.
    pub fn tick(&self, now: Instant) {
        self.turn(now);
        self.ticked.store(self.millis(now).max(1), Ordering::Relaxed);
    }

    /// Words may have been lost.
    pub fn begin_turn(&self) {
        self.turn.fetch_add(1, Ordering::Relaxed);
        self.bell.notify_one();
    }

    /// The guards of `id` have something to tell.
    pub fn ring(&self, id: &Id) {
        self.rung.lock().insert(id.clone());
        self.bell.notify_one();
    }

    /// Whose bell was rung, each once.
    pub fn answer(&self) -> HashSet<Id> {
        std::mem::take(&mut *self.rung.lock())
    }

    /// Has the liaison look whether something is to be done.
    pub fn nudge(&self) {
        self.bell.notify_one();
    }

    /// Resolves when somebody has rung, a turn has begun or there may be new settings. Cancel-safe.
    pub async fn rung(&self) {
        self.bell.notified().await;
    }

    /// The words of others, for the one who takes them in; `None` when somebody has them already.
    pub fn ears(&self) -> Option<mpsc::Receiver<String>> {
        self.heard.1.lock().take()
    }

    /// A word of another pod, from the link.
    fn hear(&self, word: String) {
        if self.heard.0.try_send(word).is_err() {
            self.begin_turn();
        }
    }

    /// One of those who notice a standstill at once is to act on it.
    fn claims_tick(&self, ticked: u64, now: Instant) -> bool {
        let now = self.millis(now);
        self.ticked.compare_exchange(ticked, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    fn millis(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.epoch).as_millis() as u64
    }
}
