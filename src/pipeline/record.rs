//! Keeps an answer for the cache while it passes.
//!
//! Nothing is kept of an answer that does not come whole, that grows too large, or whose client leaves
//! in its middle: a recorder that is dropped leaves no trace. Only the answer that was chosen for the call has
//! one, so hedges and retries never store twice.

use std::sync::Arc;

use bytes::Bytes;

use super::shelf::Placing;
use crate::policy::cache::{Candidate, Store};
use crate::policy::identity::Key;

/// One answer on its way into the cache.
pub struct Recorder {
    store: Arc<Store>,
    key: Key,
    candidate: Candidate,
    placing: Option<Placing>,
}

impl Recorder {
    /// Will put `candidate` under `key`, and where `placing` says for other pods.
    pub fn new(store: Arc<Store>, key: Key, candidate: Candidate, placing: Option<Placing>) -> Self {
        Self { store, key, candidate, placing }
    }

    /// Keeps a part of the body; false when it has become too large to be kept.
    pub fn keep(&mut self, data: &Bytes) -> bool {
        self.candidate.push(data)
    }

    /// The answer has come whole.
    pub fn complete(self) {
        let entry = Arc::new(self.candidate.complete());
        if self.store.put(self.key, entry.clone())
            && let Some(placing) = self.placing
        {
            placing.place(entry);
        }
    }
}
