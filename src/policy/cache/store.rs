//! Where the entries are: a map that is bounded in bytes.
//!
//! moka's own policy is kept, which lets a newcomer in only when it is asked for more often than what would
//! have to go: agents ask for many things once, and those would sweep out what is asked for all the time.
//! Its housekeeping is done whenever a sixty-fourth of the bound has been put: left to moka's own schedule, some
//! hundred answers could be in memory beyond the bound, and at each put it is a lock that all of them wait for,
//! on every 304 too.
//!
//! **Forgetting** (RFC 9111 section 4.4) has to reach the entries of a resource in every partition, and one
//! that is still on its way. So it leaves a mark with its time, and what was asked for before that time must
//! be validated. The table of marks has a fixed size: a mark that has to make room leaves behind that all
//! resources of its place may have been changed, which costs a validation and never shows an old answer. A
//! table of times alone, without the resources, was tried: with some hundred marks in eight thousand places
//! it already cost hits. An index from resources to keys would not reach what is on its way.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use http::header::HeaderMap;
use moka::ops::compute::{CompResult, Op};
use moka::sync::Cache as Map;
use parking_lot::RwLock;
use tokio::time::Instant;

use super::entry::Entry;
use super::verdict::Why;
use crate::policy::identity::Key;
use crate::policy::room::{Allowance, Room};

/// Answers of one key that differ by what `Vary` names.
const VARIANTS: usize = 16;

/// Newest first.
type Variants = Arc<[Arc<Entry>]>;

/// All answers that are kept of one policy.
#[derive(Debug)]
pub struct Store {
    kept: Map<Key, Variants>,
    max_bytes: u64,
    coming: Allowance,
    arrears: Arrears,
    marks: Marks,
    adopted: AtomicU64,
}

impl Store {
    /// A store of at most so many bytes, bodies, heads and its own tables included. As many again may be on
    /// their way into it.
    pub fn new(max_bytes: u64) -> Self {
        let kept = Map::builder()
            .max_capacity(max_bytes)
            .weigher(|_, variants: &Variants| u32::try_from(weight(variants)).unwrap_or(u32::MAX))
            .build();
        let (coming, arrears) = (Allowance::new(max_bytes), Arrears::new(max_bytes));
        let marks = Marks::new(Instant::now());
        Self { kept, max_bytes, coming, arrears, marks, adopted: AtomicU64::new(0) }
    }

    /// Memory for one more answer on its way in.
    pub(super) fn room(&self) -> Room {
        self.coming.share()
    }

    /// What is kept for a request, by the fields that `Vary` names.
    ///
    /// # Errors
    /// Why there is nothing: [`Why::UriMiss`] or [`Why::VaryMiss`].
    pub fn find(&self, key: &Key, request: &HeaderMap) -> Result<Arc<Entry>, Why> {
        let variants = self.kept.get(key).ok_or(Why::UriMiss)?;
        let is_chosen =
            |entry: &&Arc<Entry>| entry.selection().is_some_and(|selection| selection.matches(request));
        let entry = variants.iter().find(is_chosen).ok_or(Why::VaryMiss)?;
        self.heed_marks(entry);
        Ok(Arc::clone(entry))
    }

    /// Keeps an entry in the place of what was kept for such requests. An entry whose refreshing told that
    /// it is not to be kept takes that away. What was asked for earlier than what is there changes nothing: then it is
    /// `false`.
    pub fn put(&self, key: Key, entry: impl Into<Arc<Entry>>) -> bool {
        let entry = entry.into();
        let is_due = self.arrears.is_due(entry.weight() as u64);
        let done = self.kept.entry(key).and_compute_with(|old| {
            let old = old.map(moka::Entry::into_value).unwrap_or_default();
            self.with(&old, &entry)
        });
        if is_due {
            self.kept.run_pending_tasks();
        }
        !matches!(done, CompResult::Unchanged(_))
    }

    /// Keeps what another pod had kept, and gives it as [`Store::find`] would, even where there is no room for it.
    pub fn adopt(&self, key: Key, entry: Entry) -> Arc<Entry> {
        let entry = Arc::new(entry);
        self.heed_marks(&entry);
        if self.put(key, entry.clone()) {
            self.adopted.fetch_add(1, Ordering::Relaxed);
        }
        entry
    }

    /// Something was done to a resource: what is kept of it, whoever asked, has to be validated before it is
    /// given again. See [`touched`](super::touched).
    pub fn forget(&self, resource: &[u8; 32], now: Instant) {
        self.marks.set(resource, now);
    }

    /// The number of keys. Does the housekeeping first, so it is for looking at and not for each call.
    pub fn len(&self) -> u64 {
        self.kept.run_pending_tasks();
        self.kept.entry_count()
    }

    /// Whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The memory that they take, nearly; as [`Store::len`].
    pub fn bytes(&self) -> u64 {
        self.kept.run_pending_tasks();
        self.kept.weighted_size()
    }

    /// How many came from other pods, those included that are gone.
    pub fn adopted(&self) -> u64 {
        self.adopted.load(Ordering::Relaxed)
    }

    /// The most that they may take.
    pub fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    fn heed_marks(&self, entry: &Entry) {
        if self.marks.is_before(entry.resource(), entry.sent()) {
            entry.invalidate();
        }
    }

    fn with(&self, old: &Variants, entry: &Arc<Entry>) -> Op<Variants> {
        let is_same = |other: &Entry| other.selection() == entry.selection();
        if old.iter().any(|other| is_same(other) && other.sent() > entry.sent()) {
            return Op::Nop;
        }
        let newest = entry.may_be_kept().then_some(entry);
        let others = old.iter().filter(|other| !is_same(other));
        let mut room = self.max_bytes;
        let variants: Variants = newest
            .into_iter()
            .chain(others)
            .take(VARIANTS)
            // Beyond the bound the map would let go of them all.
            .take_while(|variant| {
                let left = room.checked_sub(weight(std::slice::from_ref(variant)) as u64);
                room = left.unwrap_or_default();
                left.is_some()
            })
            .cloned()
            .collect();
        if variants.is_empty() { Op::Remove } else { Op::Put(variants) }
    }
}

fn weight(variants: &[Arc<Entry>]) -> usize {
    variants.iter().map(|entry| entry.weight()).sum()
}

/// What has been put since the last housekeeping.
#[derive(Debug)]
struct Arrears {
    bytes: AtomicU64,
    most: u64,
}

impl Arrears {
    fn new(max_bytes: u64) -> Self {
        Self { bytes: AtomicU64::new(0), most: max_bytes / 64 }
    }

    /// Adds what is put now. `true` when it is time, and then it begins anew.
    fn is_due(&self, bytes: u64) -> bool {
        let sum = self.bytes.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let is_due = sum > self.most;
        if is_due {
            self.bytes.store(0, Ordering::Relaxed);
        }
        is_due
    }
}

/// When something was last done to which resource: the latest of each place of a table exactly, and of the
/// others that they are no later than what pushed them out.
#[derive(Debug)]
struct Marks {
    start: Instant,
    /// Most policies see no unsafe method, and have no table.
    table: OnceLock<RwLock<Box<[Place]>>>,
}

#[derive(Debug, Clone, Default)]
struct Place {
    /// Newest first.
    marks: [Mark; Self::MARKS],
    /// What was asked for up to here is older than a mark that is lost.
    floor: u64,
}

/// Nanoseconds since the table's start; 0 for never.
#[derive(Debug, Clone, Copy, Default)]
struct Mark {
    resource: u64,
    at: u64,
}

impl Marks {
    /// With ten unsafe calls a second to ever new resources, what is kept for a quarter of an hour begins to
    /// be validated for others' sake. 136 KiB.
    const PLACES: usize = 1024;

    fn new(start: Instant) -> Self {
        Self { start, table: OnceLock::new() }
    }

    fn set(&self, resource: &[u8; 32], now: Instant) {
        let table = self.table.get_or_init(|| RwLock::new(vec![Place::default(); Self::PLACES].into()));
        let (place, resource) = split(resource);
        let at = self.since_start(now).max(1);
        table.write()[place].set(Mark { resource, at });
    }

    /// Whether `sent` is not later than the resource's mark.
    fn is_before(&self, resource: &[u8; 32], sent: Instant) -> bool {
        self.table.get().is_some_and(|table| {
            let (place, resource) = split(resource);
            self.since_start(sent) <= table.read()[place].last(resource)
        })
    }

    /// From 1 on, so that the marks of never are before everything.
    fn since_start(&self, time: Instant) -> u64 {
        let since = time.saturating_duration_since(self.start).as_nanos();
        u64::try_from(since).unwrap_or(u64::MAX).max(1)
    }
}

impl Place {
    const MARKS: usize = 8;

    fn set(&mut self, mark: Mark) {
        let known = self.marks.iter().position(|other| other.resource == mark.resource);
        let leaving = known.unwrap_or(Self::MARKS - 1);
        if known.is_none() {
            self.floor = self.floor.max(self.marks[leaving].at);
        }
        // A thread that was here before may have had a later `now`.
        let at = mark.at.max(known.map_or(0, |known| self.marks[known].at));
        self.marks[..=leaving].rotate_right(1);
        self.marks[0] = Mark { at, ..mark };
    }

    fn last(&self, resource: u64) -> u64 {
        let mark = self.marks.iter().find(|mark| mark.resource == resource);
        mark.map_or(0, |mark| mark.at).max(self.floor)
    }
}

/// The place of a resource, and what tells it from the others there.
fn split(resource: &[u8; 32]) -> (usize, u64) {
    let [a, b, c, d, e, f, g, h, i, j, ..] = *resource;
    (usize::from(u16::from_be_bytes([a, b])) % Marks::PLACES, u64::from_be_bytes([c, d, e, f, g, h, i, j]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn housekeeping_is_due_with_each_sixty_fourth_of_the_bound() {
        let arrears = Arrears::new(6400);
        let due = |bytes: &[u64]| bytes.iter().map(|bytes| arrears.is_due(*bytes)).collect::<Vec<_>>();
        assert_eq!(due(&[30, 70, 1, 100, 1, 5000, 99]), [false, false, true, false, true, true, false]);
    }
}
