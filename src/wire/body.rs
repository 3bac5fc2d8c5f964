//! The body that an attempt sends, and the gate before it.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::Sleep;

use super::incoming::IncomingBody;
use super::replay::{BodyLost, Reader};

/// How long an upstream may stay silent on `Expect: 100-continue` before the body goes out anyway
/// (RFC 9110 section 10.1.1 lets a sender wait no longer than it likes).
const CONTINUE_WAIT: Duration = Duration::from_secs(1);

/// The body of one attempt's request.
pub struct RequestBody {
    source: Source,
    gate: Option<Gate>,
    has_begun: bool,
}

enum Source {
    Empty,
    Once(IncomingBody),
    Replayed(Reader),
}

impl RequestBody {
    /// No body.
    pub fn empty() -> Self {
        Self::of(Source::Empty)
    }

    /// A body that passes once, straight from the client.
    pub fn once(body: IncomingBody) -> Self {
        Self::of(Source::Once(body))
    }

    /// A body that may be sent by several attempts.
    pub fn replayed(reader: Reader) -> Self {
        Self::of(Source::Replayed(reader))
    }

    fn of(source: Source) -> Self {
        Self { source, gate: None, has_begun: false }
    }

    /// A body that passes once, if nothing of it has been read: another attempt can send all of it.
    pub fn into_unread(self) -> Option<IncomingBody> {
        match self.source {
            Source::Once(body) if !self.has_begun => Some(body),
            Source::Empty | Source::Once(_) | Source::Replayed(_) => None,
        }
    }

    /// It is a hedge's: where not both attempts can have the body, it is left to the other one.
    pub fn yields(&mut self) {
        if let Source::Replayed(reader) = &mut self.source {
            reader.yields();
        }
    }

    /// Holds the body back until the upstream has said `100 Continue`, or nothing for a second.
    pub fn after_continue(mut self) -> (Self, Continue) {
        let opened = Continue(Arc::new(AtomicU8::new(WAITING)));
        self.gate = Some(Gate { opened: opened.clone(), wait: None });
        (self, opened)
    }
}

/// Opens the gate of a body that waits for `100 Continue`. The upstream's connection and the body
/// are polled by one task, and the connection reads before it writes: no wake-up is needed.
#[derive(Clone)]
pub struct Continue(Arc<AtomicU8>);

const WAITING: u8 = 0;
const OPEN: u8 = 1;
const SHUT: u8 = 2;

impl Continue {
    /// The upstream wants the body.
    pub fn open(&self) {
        self.0.store(OPEN, Ordering::Relaxed);
    }

    /// The upstream has answered without it: what has not begun to go out by now never does (RFC 9110
    /// section 10.1.1).
    pub fn shut(&self) {
        let _ = self.0.compare_exchange(WAITING, SHUT, Ordering::Relaxed, Ordering::Relaxed);
    }
}

struct Gate {
    opened: Continue,
    wait: Option<Pin<Box<Sleep>>>,
}

impl Gate {
    fn poll_open(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match self.opened.0.load(Ordering::Relaxed) {
            OPEN => return Poll::Ready(()),
            // Dropped with its attempt.
            SHUT => return Poll::Pending,
            _ => {}
        }
        self.wait.get_or_insert_with(|| Box::pin(tokio::time::sleep(CONTINUE_WAIT))).as_mut().poll(cx)
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyLost;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyLost>>> {
        if let Some(gate) = &mut self.gate {
            ready!(gate.poll_open(cx));
            self.gate = None;
        }
        let frame = ready!(match &mut self.source {
            Source::Empty => Poll::Ready(None),
            Source::Once(body) => Pin::new(body).poll_frame(cx).map_err(BodyLost::Client),
            Source::Replayed(reader) => Pin::new(reader).poll_frame(cx),
        });
        self.has_begun = true;
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Empty => true,
            Source::Once(body) => body.is_end_stream(),
            Source::Replayed(reader) => reader.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Empty => SizeHint::with_exact(0),
            Source::Once(body) => body.size_hint(),
            Source::Replayed(reader) => reader.size_hint(),
        }
    }
}
