//! The answer as one JSON object: the summary first, so that a reader that cuts it short has read the warning,
//! then the results in the order of the calls.
//!
//! Results are written one by one as the client takes them, and each gives its memory back when it has been.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::StatusCode;
use http::header::{HeaderMap, HeaderValue};
use http_body::{Body, Frame};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use tokio::time::Instant;

use super::batch::{Batch, Event};
use super::content::write_json;
use super::item::{CallResult, Outcome};
use super::{JSON, millis, ok};
use crate::error::Error;
use crate::pipeline::answer::{Answer, AnswerBody};
use crate::pipeline::found::Note;
use crate::pipeline::ledger::Ledger;

/// Results up to this size together go out in one piece, which says how long it is.
const ONE_PIECE: usize = 64 << 10;

/// Runs the calls and answers with what came. Dropping the future cancels them.
pub async fn answer(mut batch: Batch, mut ledger: Ledger) -> Answer {
    let mut came: Vec<(usize, Box<CallResult>)> = Vec::new();
    loop {
        match batch.next().await {
            Event::Settled(at, Outcome::Result(result)) => came.push((at, result)),
            Event::Settled(_, Outcome::Missing(_)) | Event::Struck(_) => {}
            Event::Over => break,
        }
    }
    came.sort_unstable_by_key(|(at, _)| *at);
    let mut head = serde_json::to_vec(&batch.summary()).unwrap_or_default();
    // The object goes on with the results.
    head.pop();
    head.extend_from_slice(br#","results":{"#);
    let size: usize = came.iter().map(|(_, result)| result.size()).sum();
    let results = came.into_iter().map(|(at, result)| (batch.tally().id(at).to_owned(), result)).collect();
    let terms = batch.terms();
    drop(batch);
    let pieces = Pieces { head: Some(head), results, is_first: true, is_over: false };

    ledger.answers(StatusCode::OK, None, Note::default(), Instant::now());
    let body = match size <= ONE_PIECE {
        true => {
            let mut body = Vec::with_capacity(2 * size);
            pieces.for_each(|piece| body.extend_from_slice(&piece));
            ledger.sent(body.len());
            ledger.complete();
            AnswerBody::full(body.into())
        }
        false => AnswerBody::Made(Box::pin(Written { pieces, ledger })),
    };
    ok(JSON, body, terms)
}

/// The object's text, cut between its members.
struct Pieces {
    head: Option<Vec<u8>>,
    results: VecDeque<(String, Box<CallResult>)>,
    is_first: bool,
    is_over: bool,
}

impl Iterator for Pieces {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        if let Some(head) = self.head.take() {
            return Some(head);
        }
        if let Some((id, result)) = self.results.pop_front() {
            let mut piece = Vec::with_capacity(result.size() + result.size() / 2);
            if !std::mem::take(&mut self.is_first) {
                piece.push(b',');
            }
            write_json(&mut piece, &id);
            piece.extend_from_slice(b":{");
            result.write(&mut piece);
            piece.push(b'}');
            return Some(piece);
        }
        (!std::mem::replace(&mut self.is_over, true)).then(|| b"}}".to_vec())
    }
}

/// The object on its way to the client.
struct Written {
    pieces: Pieces,
    ledger: Ledger,
}

impl Body for Written {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let piece = self.pieces.next();
        match &piece {
            Some(piece) => self.ledger.sent(piece.len()),
            None => self.ledger.complete(),
        }
        Poll::Ready(piece.map(|piece| Ok(Frame::data(piece.into()))))
    }
}

impl CallResult {
    /// About how many bytes are written of it.
    fn size(&self) -> usize {
        let fields: usize =
            self.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 8).sum();
        self.content.len() + fields + 128
    }

    /// Writes its keys, as they stand in an object.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"\"status\":");
        write_json(out, &self.status.as_u16());
        out.extend_from_slice(b",\"source\":");
        write_json(out, self.source.word());
        out.extend_from_slice(b",\"elapsed_ms\":");
        write_json(out, &millis(self.elapsed));
        if self.is_truncated {
            out.extend_from_slice(b",\"truncated\":true");
        }
        out.extend_from_slice(b",\"headers\":");
        write_json(out, &Fields(&self.headers));
        self.content.write(&self.headers, out);
    }
}

/// Fields by their names: a text, or a list of them for a name that came more than once.
struct Fields<'a>(&'a HeaderMap);

impl Serialize for Fields<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.keys_len()))?;
        for name in self.0.keys() {
            let values: Vec<_> = self.0.get_all(name).iter().map(text).collect();
            match &*values {
                [only] => map.serialize_entry(name.as_str(), only)?,
                all => map.serialize_entry(name.as_str(), all)?,
            }
        }
        map.end()
    }
}

/// What is no UTF-8 loses the bytes that are none.
fn text(value: &HeaderValue) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(value.as_bytes())
}
