//! Memory for answers on their way in.
//!
//! A store's own bound knows an answer once it is whole. Until then its body lies beside the store, and three
//! hundred slow answers at once would be three hundred megabytes whatever the bound. So they share a second
//! allowance of the same size, and an answer that finds none left passes on unkept. One allowance for both was
//! rejected: the map gives nothing back on demand, so a full store would never take anything new.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What all answers on their way into one store may hold together.
#[derive(Debug)]
pub(super) struct Allowance {
    taken: Arc<AtomicU64>,
    most: u64,
}

impl Allowance {
    /// Of so many bytes.
    pub(super) fn new(most: u64) -> Self {
        Self { taken: Arc::default(), most }
    }

    /// A share of it, empty as yet.
    pub(super) fn share(&self) -> Room {
        Room { taken: self.taken.clone(), most: self.most, own: 0 }
    }
}

/// One answer's share of an [`Allowance`]. Dropped, it gives back what it took.
#[derive(Debug)]
pub(super) struct Room {
    taken: Arc<AtomicU64>,
    most: u64,
    own: u64,
}

impl Room {
    /// Takes so many bytes more. `false`: there are not as many left, and none is taken.
    #[must_use]
    pub(super) fn take(&mut self, bytes: usize) -> bool {
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
