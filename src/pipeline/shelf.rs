//! The cache's second level, which all pods share: asked by calls for which this pod has no answer of its own, and told
//! beside them.
//!
//! **Asking** is the only thing here that a call waits for: at most `shared_state.timeout`, its place in the line
//! included. What comes may be large, and other questions share the connection, so the bytes that may be on
//! their way at once are bounded, each question counted by the most that it may bring. A place is waited for,
//! since a batch of calls begins with a batch of questions, of which none takes long. Where answers come
//! too late three times in a row nobody asks for a while: they may be too large for the time that there is, which a
//! server that is quick with small ones does not show.
//!
//! **Telling** is done by tasks that nobody waits for. There is a bound on them too, and what goes beyond it is not done:
//! the next answer will be written, and what is not forgotten runs out.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::Proxy;
use super::errand::Errand;
use super::recall::asked;
use crate::config::{Cache, FallbackStep, Stages};
use crate::fleet::{Fault, Link};
use crate::policy::cache::Entry;
use crate::policy::cache::shared::{self, Spot};
use crate::upstream::registry::Lane;

/// KiB that may be on their way at once, and as many again in the other direction.
const ON_THE_WAY: usize = 16 << 10;
/// Words at once.
const WORDS: usize = 256;
/// Answers that come too late in a row, and for how long nobody asks then.
const STRIKES: u32 = 3;
const REST: Duration = Duration::from_secs(10);

/// Bounds what goes to and fro.
#[derive(Debug)]
pub struct Shelf {
    asking: Semaphore,
    writing: Arc<Semaphore>,
    telling: Arc<Semaphore>,
    rest: Mutex<Rest>,
}

/// Why nobody asks.
#[derive(Debug, Default)]
struct Rest {
    strikes: u32,
    until: Option<Instant>,
}

impl Default for Shelf {
    /// With all places free.
    fn default() -> Self {
        Self {
            asking: Semaphore::new(ON_THE_WAY),
            writing: Arc::new(Semaphore::new(ON_THE_WAY)),
            telling: Arc::new(Semaphore::new(WORDS)),
            rest: Mutex::default(),
        }
    }
}

impl Shelf {
    fn is_resting(&self, now: Instant) -> bool {
        self.rest.lock().until.is_some_and(|until| now < until)
    }

    /// What came of a question.
    fn note(&self, is_late: bool, now: Instant) {
        let mut rest = self.rest.lock();
        rest.strikes = if is_late { rest.strikes + 1 } else { 0 };
        if rest.strikes >= STRIKES {
            *rest = Rest { strikes: 0, until: Some(now + REST) };
        }
    }

    /// Does something that nobody waits for, if there is a place for it.
    fn tell<F>(&self, work: impl FnOnce() -> F)
    where
        F: Future<Output = Result<(), Fault>> + Send + 'static,
    {
        match self.telling.clone().try_acquire_owned() {
            Ok(place) => aside(place, work()),
            Err(_) => tracing::debug!("other pods are not told what was forgotten: too much is being told"),
        }
    }
}

/// What the pods keep for a call; nothing where they share nothing, or nobody answers in time.
pub async fn find(errand: &Errand) -> Option<Entry> {
    let (shelf, now) = (errand.proxy.shelf(), Instant::now());
    let (rules, link) = sharing(&errand.proxy, &errand.lane)?;
    let asked = asked(&errand.lane, &errand.call);
    if !link.may_be_asked() || shelf.is_resting(now) || !shared::may_suffice(asked) {
        return None;
    }
    let (progress, deadline) = (&errand.call.progress, errand.deadline.as_ref().map(|deadline| deadline.at));
    let end = progress.asks_until(link.settings().timeout, now, deadline);
    let question = async {
        let place = shelf.asking.acquire_many(places(shared::most_bytes(rules)));
        let _place = timeout_at(end, place).await.ok()?.ok()?;
        Some(shared::find(&link, &Spot::of(asked, rules), asked, rules, end).await)
    };
    let found = question.await;
    let ended = Instant::now();
    progress.asked(ended - now);
    let found = found?;
    shelf.note(matches!(found, Err(Fault::Late(_))), ended);
    found.unwrap_or_else(|fault| {
        tracing::debug!(%fault, "the answers that pods share cannot be asked for");
        None
    })
}

/// Where an answer goes that this pod keeps.
pub struct Placing {
    proxy: Arc<Proxy>,
    lane: Lane,
    spot: Spot,
}

impl Placing {
    /// For the answer to a call; `None` where the pods share nothing.
    pub fn of(errand: &Errand) -> Option<Self> {
        let rules = errand.lane.stages().cache.as_ref().filter(|rules| rules.is_shared)?;
        let spot = Spot::of(asked(&errand.lane, &errand.call), rules);
        Some(Self { proxy: errand.proxy.clone(), lane: errand.lane.clone(), spot })
    }

    /// Has it kept for the other pods too, if it is of use to them.
    pub fn place(self, entry: Arc<Entry>) {
        if !entry.may_be_kept() {
            return self.clear();
        }
        let Self { proxy, lane, spot } = self;
        let Some((rules, link)) = sharing(&proxy, &lane).filter(|(_, link)| link.is_up()) else { return };
        let (size, stages) = (entry.shared_size(), lane.stages());
        let life = entry.shared_life(longest_stale(stages), rules, Instant::now());
        if life.is_zero() || size > shared::most_bytes(rules) {
            return;
        }
        match proxy.shelf().writing.clone().try_acquire_many_owned(places(size)) {
            Ok(place) => aside(place, async move { shared::keep(&link, &spot, &entry, life).await }),
            Err(_) => tracing::debug!("an answer is not kept for other pods: too much is on its way"),
        }
    }

    /// Has what is kept there taken away.
    pub fn clear(self) {
        let Some((_, link)) = sharing(&self.proxy, &self.lane).filter(|(_, link)| link.is_up()) else {
            return;
        };
        let spot = self.spot;
        self.proxy.shelf().tell(|| async move { shared::remove(&link, &spot).await });
    }
}

/// Tells the pods that something was done to resources, if the upstream's policy has them share answers.
pub fn forget(errand: &Errand, resources: &[[u8; 32]]) {
    if !errand.lane.policy().shares_answers() {
        return;
    }
    let Some(link) = errand.proxy.registry().fleet().up() else { return };
    for resource in resources {
        let (link, resource) = (link.clone(), *resource);
        errand.proxy.shelf().tell(|| async move { shared::forget(&link, &resource).await });
    }
}

/// The rules and the connection, where pods share what they keep.
fn sharing<'a>(proxy: &Proxy, lane: &'a Lane) -> Option<(&'a Cache, Arc<Link>)> {
    let rules = lane.stages().cache.as_ref().filter(|rules| rules.is_shared)?;
    Some((rules, proxy.registry().fleet().link()?))
}

/// The longest staleness that a step of the fallback takes.
fn longest_stale(stages: &Stages) -> Duration {
    let steps = stages.fallback.iter().filter_map(|step| match step {
        FallbackStep::Stale(allowance) => Some(*allowance),
        FallbackStep::Upstream(_) | FallbackStep::Degraded(_) => None,
    });
    steps.max().unwrap_or_default()
}

/// KiB, of which each question and answer has one at least.
fn places(bytes: usize) -> u32 {
    u32::try_from(bytes / 1024 + 1).unwrap_or(u32::MAX)
}

fn aside(place: OwnedSemaphorePermit, work: impl Future<Output = Result<(), Fault>> + Send + 'static) {
    tokio::spawn(async move {
        let _place = place;
        if let Err(fault) = work.await {
            tracing::debug!(%fault, "the answers that pods share cannot be changed");
        }
    });
}
