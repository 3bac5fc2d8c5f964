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

impl Drop for Room {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.own, Ordering::Relaxed);
    }
}
