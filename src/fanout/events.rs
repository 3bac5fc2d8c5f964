//! The answer as a stream of events (WHATWG HTML, "Server-sent events"): each result as it comes, then the
//! deadline if it struck, then the summary and `[DONE]`.
//!
//! The calls run on a task of their own, so that a client that is slow to read holds up nothing but its own
//! stream: their deadline strikes all the same. The task ends with the stream. In a silence a comment is sent
//! every two seconds, since some clients give up on a connection after five.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http::header::{HeaderName, HeaderValue};
use http_body::{Body, Frame};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep, sleep};

use super::batch::{Batch, Event};
use super::item::{CallResult, Missing, Outcome};
use super::{EVENTS, ok};
use crate::error::{Cause, Error};
use crate::pipeline::answer::{Answer, AnswerBody};
use crate::pipeline::found::Note;
use crate::pipeline::ledger::Ledger;
use crate::policy::room::Room;

const HEARTBEAT: Duration = Duration::from_secs(2);

static X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Answers at once, and runs the calls as long as the answer's body is there.
pub fn answer(batch: Batch, mut ledger: Ledger) -> Answer {
    ledger.answers(StatusCode::OK, None, Note::default(), Instant::now());
    let language = batch.tally().language();
    // Room for all that can happen: the task never waits for the client.
    let (sender, pieces) = mpsc::channel(batch.tally().len() + 3);
    let mut task = JoinSet::new();
    task.spawn(drive(batch, sender));
    let body = Events { pieces, _task: task, heartbeat: Box::pin(sleep(HEARTBEAT)), ledger, is_whole: false };
    let mut response = ok(EVENTS, AnswerBody::Made(Box::pin(body)), language);
    response.headers_mut().insert(X_ACCEL_BUFFERING.clone(), HeaderValue::from_static("no"));
    Answer::own(response, None)
}

/// Some of the stream's text.
struct Piece {
    text: Bytes,
    is_last: bool,
    /// Held until the text is on its way.
    _room: Option<Room>,
}

async fn drive(mut batch: Batch, sender: mpsc::Sender<Piece>) {
    let proxy = batch.proxy().clone();
    let mut leaving = std::pin::pin!(proxy.ending());
    let mut number = 0;
    loop {
        let event = tokio::select! {
            biased;
            event = batch.next() => event,
            // Then the batch ends, which it has to be asked about.
            () = &mut leaving, if !proxy.is_ending() => continue,
        };
        let is_last = matches!(event, Event::Over);
        number += 1;
        let (mut text, room) = match event {
            Event::Settled(at, Outcome::Result(result)) => {
                let text = told(number, "result", &Named { id: batch.tally().id(at), what: &*result });
                (text, Some(result.room))
            }
            Event::Settled(at, Outcome::Missing(missing)) => {
                (told(number, "missing", &Named { id: batch.tally().id(at), what: &missing }), None)
            }
            Event::Struck(late) => {
                let pending = late.iter().map(|at| batch.tally().id(*at)).collect();
                (
                    told(number, "deadline", &Struck { deadline_ms: batch.tally().deadline_ms(), pending }),
                    None,
                )
            }
            Event::Over => (told(number, "complete", &batch.summary()), None),
        };
        if is_last {
            text.extend_from_slice(b"data: [DONE]\n\n");
        }
        if sender.send(Piece { text: text.into(), is_last, _room: room }).await.is_err() || is_last {
            return;
        }
    }
}

/// One event. JSON of ours has no line ends.
fn told(number: u64, name: &str, data: &impl Serialize) -> Vec<u8> {
    let mut text = format!("id: {number}\nevent: {name}\ndata: ").into_bytes();
    // Text, numbers and what was JSON before always serialise.
    let _ = serde_json::to_writer(&mut text, data);
    text.extend_from_slice(b"\n\n");
    text
}

/// What came of a call, with its name.
struct Named<'a, T> {
    id: &'a str,
    what: &'a T,
}

impl Serialize for Named<'_, CallResult> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("id", self.id)?;
        self.what.serialize_into(&mut map)?;
        map.end()
    }
}

impl Serialize for Named<'_, Missing> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("id", self.id)?;
        self.what.serialize_into(&mut map)?;
        map.end()
    }
}

/// The deadline has struck for what was still under way.
#[derive(Serialize)]
struct Struck<'a> {
    deadline_ms: u64,
    pending: Vec<&'a str>,
}

/// The stream on its way to the client.
struct Events {
    pieces: mpsc::Receiver<Piece>,
    /// Dropped with the stream, and the calls with it.
    _task: JoinSet<()>,
    heartbeat: Pin<Box<Sleep>>,
    ledger: Ledger,
    is_whole: bool,
}

impl Body for Events {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let text = match self.pieces.poll_recv(cx) {
            Poll::Ready(Some(piece)) => {
                self.is_whole = piece.is_last;
                piece.text
            }
            Poll::Ready(None) if self.is_whole => {
                self.ledger.complete();
                return Poll::Ready(None);
            }
            Poll::Ready(None) => {
                let error =
                    Error::Internal(Cause::from("the fan-out's task has ended before its last event"));
                self.ledger.cut(error.clone());
                return Poll::Ready(Some(Err(error)));
            }
            Poll::Pending => {
                std::task::ready!(self.heartbeat.as_mut().poll(cx));
                Bytes::from_static(b": still working\n\n")
            }
        };
        self.heartbeat.as_mut().reset(Instant::now() + HEARTBEAT);
        self.ledger.sent(text.len());
        Poll::Ready(Some(Ok(Frame::data(text))))
    }
}
