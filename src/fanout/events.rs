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
use super::content::write_json;
use super::item::{CallResult, Missing, Outcome};
use super::ok;
use crate::error::{Cause, Error};
use crate::pipeline::answer::{self, Answer, AnswerBody};
use crate::pipeline::found::Note;
use crate::pipeline::ledger::Ledger;

/// With its charset, since some clients take text without one for Latin-1.
const EVENT_STREAM: &str = "text/event-stream; charset=utf-8";

const HEARTBEAT: Duration = Duration::from_secs(2);

static X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Answers at once, and runs the calls as long as the answer's body is there.
pub fn answer(batch: Batch, mut ledger: Ledger) -> Answer {
    ledger.answers(StatusCode::OK, None, Note::default(), Instant::now());
    let terms = batch.terms();
    // Room for all that can happen: the task never waits for the client.
    let (sender, told) = mpsc::channel(batch.tally().len() + 2);
    let mut task = JoinSet::new();
    task.spawn(drive(batch, sender));
    let heartbeat = Box::pin(sleep(HEARTBEAT));
    let body = Events { told, _task: task, heartbeat, ledger, number: 0, end: End::Open };
    let mut answer = ok(EVENT_STREAM, AnswerBody::Made(Box::pin(body)), terms);
    answer.response.headers_mut().insert(X_ACCEL_BUFFERING.clone(), HeaderValue::from_static("no"));
    answer
}

/// What is told, in a form that is no larger than what it tells of.
enum Told {
    Result(String, Box<CallResult>),
    Missing(String, Missing),
    /// The data of `deadline`.
    Struck(Vec<u8>),
    /// The data of `complete`.
    Over(Vec<u8>),
}

async fn drive(mut batch: Batch, sender: mpsc::Sender<Told>) {
    let proxy = batch.proxy().clone();
    let mut leaving = std::pin::pin!(proxy.ending());
    loop {
        let event = tokio::select! {
            biased;
            event = batch.next() => event,
            // Then the batch ends, which it has to be asked about.
            () = &mut leaving, if !proxy.is_ending() => continue,
        };
        let told = Told::of(event, &batch);
        let is_last = matches!(told, Told::Over(_));
        if sender.send(told).await.is_err() || is_last {
            return;
        }
    }
}

impl Told {
    fn of(event: Event, batch: &Batch) -> Self {
        let tally = batch.tally();
        let id = |at| tally.id(at).to_owned();
        let mut data = Vec::new();
        match event {
            Event::Settled(at, Outcome::Result(result)) => Self::Result(id(at), result),
            Event::Settled(at, Outcome::Missing(missing)) => Self::Missing(id(at), missing),
            Event::Struck(late) => {
                let pending = late.iter().map(|at| tally.id(*at)).collect();
                write_json(&mut data, &Struck { deadline_ms: tally.deadline_ms(), pending });
                Self::Struck(data)
            }
            Event::Over => {
                write_json(&mut data, &batch.summary());
                Self::Over(data)
            }
        }
    }

    /// The event's name and its data.
    fn event(self) -> (&'static str, Vec<u8>) {
        let mut data = Vec::new();
        match self {
            Self::Result(id, result) => {
                data.reserve(result.content.len() + result.content.len() / 2);
                data.extend_from_slice(b"{\"id\":");
                write_json(&mut data, &id);
                data.push(b',');
                result.write(&mut data);
                data.push(b'}');
                ("result", data)
            }
            Self::Missing(id, missing) => {
                write_json(&mut data, &Named { id: &id, missing: &missing });
                ("missing", data)
            }
            Self::Struck(data) => ("deadline", data),
            Self::Over(data) => ("complete", data),
        }
    }
}

struct Named<'a> {
    id: &'a str,
    missing: &'a Missing,
}

impl Serialize for Named<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("id", self.id)?;
        self.missing.serialize_into(&mut map)?;
        map.end()
    }
}

/// One event in the stream's text. JSON of ours has no line ends but those within texts that only some readers
/// of lines take for such (U+2028, U+2029, U+0085), and they are escaped.
fn text(number: u64, (name, data): (&str, Vec<u8>)) -> Vec<u8> {
    let mut text = Vec::with_capacity(data.len() + 64);
    text.extend_from_slice(format!("id: {number}\nevent: {name}\ndata: ").as_bytes());
    let mut rest = &data[..];
    while let Some(at) = rest.windows(2).position(|pair| matches!(pair, [0xE2, 0x80] | [0xC2, 0x85])) {
        let (escaped, length): (&[u8], _) = match rest[at..] {
            [0xE2, 0x80, 0xA8, ..] => (b"\\u2028", 3),
            [0xE2, 0x80, 0xA9, ..] => (b"\\u2029", 3),
            [0xC2, 0x85, ..] => (b"\\u0085", 2),
            _ => (&rest[at..at + 2], 2),
        };
        text.extend_from_slice(&rest[..at]);
        text.extend_from_slice(escaped);
        rest = &rest[at + length..];
    }
    text.extend_from_slice(rest);
    text.extend_from_slice(b"\n\n");
    text
}

/// The deadline has struck for what was still under way.
#[derive(Serialize)]
struct Struck<'a> {
    deadline_ms: u64,
    pending: Vec<&'a str>,
}

/// The stream on its way to the client.
struct Events {
    told: mpsc::Receiver<Told>,
    /// Dropped with the stream, and the calls with it.
    _task: JoinSet<()>,
    heartbeat: Pin<Box<Sleep>>,
    ledger: Ledger,
    /// Of the last event.
    number: u64,
    end: End,
}

enum End {
    /// There is more.
    Open,
    /// All is told.
    Whole,
    /// The stream breaks off, as it has said.
    Broken(Error),
}

impl Events {
    fn pass(&mut self, text: Vec<u8>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        self.heartbeat.as_mut().reset(Instant::now() + HEARTBEAT);
        self.ledger.sent(text.len());
        Poll::Ready(Some(Ok(Frame::data(text.into()))))
    }
}

impl Body for Events {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match std::mem::replace(&mut self.end, End::Whole) {
            End::Open => self.end = End::Open,
            End::Whole => return Poll::Ready(None),
            End::Broken(error) => return Poll::Ready(Some(Err(error))),
        }
        match self.told.poll_recv(cx) {
            Poll::Ready(Some(told)) => {
                self.number += 1;
                let is_last = matches!(told, Told::Over(_));
                let mut text = text(self.number, told.event());
                if is_last {
                    text.extend_from_slice(b"data: [DONE]\n\n");
                    self.end = End::Whole;
                    self.ledger.complete();
                }
                self.pass(text)
            }
            // A fault of ours, which some clients would take for the end.
            Poll::Ready(None) => {
                let error =
                    Error::Internal(Cause::from("the fan-out's task has ended before its last event"));
                self.ledger.cut(error.clone());
                let problem = answer::problem(&error, &self.ledger, None);
                self.end = End::Broken(error);
                self.pass([b"event: error\ndata: ", &problem[..], b"\n\n"].concat())
            }
            Poll::Pending => {
                std::task::ready!(self.heartbeat.as_mut().poll(cx));
                self.pass(b": still working\n\n".to_vec())
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.end, End::Whole)
    }
}
