//! An answer on its way into the cache: decided on at its head, gathered with its body.

use bytes::Bytes;
use http::header::{self, HeaderMap};
use http::{Method, StatusCode};

use super::directives::ResponseControl;
use super::entry::{Entry, Head};
use super::store::Store;
use super::{Asked, Times};
use crate::config::Cache;
use crate::policy::room::Gathered;
use crate::wire::event_stream;

/// An answer that will be kept when it comes to its end. Dropped before, it leaves nothing.
#[derive(Debug)]
pub struct Candidate {
    head: Head,
    body: Gathered,
}

impl Candidate {
    /// `None` when the answer is not to be kept, or too much is on its way into `store` already. `answer` is
    /// the upstream's head without its hop-by-hop fields; `has_credential` tells whose partition the key is in.
    pub fn of(
        asked: Asked<'_>,
        status: StatusCode,
        answer: &HeaderMap,
        cfg: &Cache,
        has_credential: bool,
        times: Times,
        store: &Store,
    ) -> Option<Self> {
        // A stream of events has no end that would make it an answer.
        let has_part = *asked.method == Method::GET && asked.passes_by().is_none();
        if !has_part || event_stream::is_event_stream(answer) {
            return None;
        }
        let length = content_length(answer);
        if length.is_some_and(|length| length > cfg.max_body as u64) {
            return None;
        }
        // Most answers that are not kept say so aloud, and then nothing has to be copied first.
        let control = ResponseControl::of(answer);
        if control.no_store && !control.must_understand {
            return None;
        }
        let head = Head::of(asked, status, answer, control, has_credential, times);
        if !head.may_be_kept() {
            return None;
        }
        let known = length.and_then(|length| usize::try_from(length).ok()).unwrap_or_default();
        let mut room = store.room();
        let body =
            room.take(head.weight()).then(|| Gathered::new(cfg.max_body, known.min(FIRST_PIECE), room));
        Some(Self { head, body: body.flatten()? })
    }

    /// Copies a piece of the body. `false`: the answer is larger than what is kept, or too much is on its way
    /// in, so give it up.
    #[must_use]
    pub fn push(&mut self, piece: &[u8]) -> bool {
        self.body.push(piece)
    }

    /// The entry, once the body has come to its proper end. Trailers are not kept, as RFC 9110 section 6.5.1
    /// leaves it to any recipient.
    pub fn complete(self) -> Entry {
        let (body, _) = self.body.finish();
        Entry::new(self.head, Bytes::from(body))
    }
}

/// What is set aside on the word of `Content-Length` alone.
const FIRST_PIECE: usize = 64 * 1024;

fn content_length(answer: &HeaderMap) -> Option<u64> {
    answer.get(header::CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}
