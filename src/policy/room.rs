//! Memory for bodies that are held until they are whole.
//!
//! However small the bound of one body, a thousand at once are a thousand times that. So all that are held for
//! one purpose share an allowance, and a body that finds none left is not held: what that means is for its
//! owner to say.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What all bodies of one purpose may hold together.
#[derive(Debug, Clone)]
pub struct Allowance {
    taken: Arc<AtomicU64>,
    most: u64,
}

impl Allowance {
    /// Of so many bytes.
    pub fn new(most: u64) -> Self {
        Self { taken: Arc::default(), most }
    }

    /// A share of it, empty as yet.
    pub fn share(&self) -> Room {
        Room { taken: self.taken.clone(), most: self.most, own: 0 }
    }
}

/// One body's share of an [`Allowance`]. Dropped, it gives back what it took.
#[derive(Debug)]
pub struct Room {
    taken: Arc<AtomicU64>,
    most: u64,
    own: u64,
}

impl Room {
    /// Takes so many bytes more. `false`: there are not as many left, and none is taken.
    #[must_use]
    pub fn take(&mut self, bytes: usize) -> bool {
        let bytes = bytes as u64;
        let fits = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= self.most);
        let is_taken = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok();
        if is_taken {
            self.own += bytes;
        }
        is_taken
    }
}

/// A body that is being gathered within its room.
#[derive(Debug)]
pub struct Gathered {
    bytes: Vec<u8>,
    most: usize,
    room: Room,
}

impl Gathered {
    /// One of `most` bytes at most, with `known` of them made ready; `None` where there is no room for those.
    pub fn new(most: usize, known: usize, mut room: Room) -> Option<Self> {
        let first = known.min(most);
        room.take(first).then(|| Self { bytes: Vec::with_capacity(first), most, room })
    }

    /// Copies a piece. `false`, and nothing is copied: the body would be too large, or there is no room for it.
    #[must_use]
    pub fn push(&mut self, piece: &[u8]) -> bool {
        let length = self.bytes.len() + piece.len();
        let fits = length <= self.most && self.has_room(length);
        if fits {
            self.bytes.extend_from_slice(piece);
        }
        fits
    }

    /// How many bytes more it would take, room aside.
    pub fn left(&self) -> usize {
        self.most - self.bytes.len()
    }

    /// Grows as a `Vec` does, by doubling, where there is room for it.
    fn has_room(&mut self, length: usize) -> bool {
        let capacity = self.bytes.capacity();
        if length <= capacity {
            return true;
        }
        let doubled = capacity.saturating_mul(2).min(self.most).max(length);
        let grown = [doubled, length].into_iter().find(|grown| self.room.take(grown - capacity));
        if let Some(grown) = grown {
            self.bytes.reserve_exact(grown - self.bytes.len());
        }
        grown.is_some()
    }

    /// The body with no room to spare, and what it takes.
    pub fn finish(self) -> (Box<[u8]>, Room) {
        (self.bytes.into_boxed_slice(), self.room)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.own, Ordering::Relaxed);
    }
}
