//! A body that a flight reads for all who wait, and that its leader gets as it comes.
//!
//! What has come lies in one buffer, from which the leader takes at its own pace: a leader that does not read
//! costs the bytes of the answer and no more, however small the pieces are in which they came. Parts for
//! each piece in a channel were tried, and an answer in single bytes took a hundred times its size. All
//! buffers of the process draw on one allowance; when that is spent an answer is not gathered but left to the
//! leader alone, as one is that turns out to be too large.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::{Frame, SizeHint};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::flight::Brought;
use super::record::Recorder;
use super::tail::Tail;
use crate::error::{Cause, Error};
use crate::policy::singleflight::Member;

/// What all flights of the process may gather together.
const MOST_GATHERED: usize = 256 << 20;

/// What a leader is given at once.
const PIECE: usize = 64 << 10;

/// What all flights have gathered now.
#[derive(Debug, Default)]
pub struct Gathered(AtomicUsize);

impl Gathered {
    fn take(&self, bytes: usize) -> bool {
        let take = |held: usize| held.checked_add(bytes).filter(|sum| *sum <= MOST_GATHERED);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.0.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The flight's end. Dropped without an end, as in a panic, the leader's body is broken.
pub struct Feed {
    shared: Arc<Mutex<Shared>>,
    gathered: Arc<Gathered>,
    limit: usize,
}

/// The leader's way through the body.
pub struct LeaderBody {
    shared: Arc<Mutex<Shared>>,
    taken: usize,
    /// From `Content-Length`.
    left: Option<u64>,
    is_over: bool,
    rest: Option<Box<Rest>>,
    end: Option<Instant>,
    stream_idle: Duration,
    /// As long as the leader reads it belongs to the flight.
    pub(super) member: Option<Member<Brought>>,
}

struct Shared {
    body: Body,
    end: Option<End>,
    reader: Option<Waker>,
}

enum Body {
    Growing(BytesMut),
    Whole(Bytes),
}

enum End {
    /// All has come.
    Whole,
    /// There is more, which only the leader reads.
    Rest(Box<Rest>),
    /// The body ends here, and it is not whole.
    Broken(Error),
}

/// What only the leader reads, and what keeps it for the cache.
pub struct Rest {
    /// Read, and not gathered any more.
    pub frame: Option<Frame<Bytes>>,
    /// What follows.
    pub tail: Tail,
    /// Has had all before.
    pub recorder: Option<Box<Recorder>>,
}

/// For the body behind `tail`, of which at most `limit` bytes are gathered.
pub fn feed(tail: &Tail, limit: usize, gathered: &Arc<Gathered>) -> (Feed, LeaderBody) {
    let body = Body::Growing(BytesMut::new());
    let shared = Arc::new(Mutex::new(Shared { body, end: None, reader: None }));
    let reader = LeaderBody {
        shared: shared.clone(),
        taken: 0,
        left: tail.size_hint().exact(),
        is_over: tail.is_end_stream(),
        rest: None,
        end: tail.end(),
        stream_idle: tail.stream_idle(),
        member: None,
    };
    (Feed { shared, gathered: gathered.clone(), limit }, reader)
}

impl Feed {
    /// Gathers a piece; false when there is no room for it.
    pub fn push(&self, data: &Bytes) -> bool {
        let mut shared = self.shared.lock();
        let Body::Growing(body) = &mut shared.body else { return false };
        if body.len() + data.len() > self.limit || !self.gathered.take(data.len()) {
            return false;
        }
        body.extend_from_slice(data);
        shared.wake();
        true
    }

    /// All that was gathered.
    pub fn whole(&self) -> Bytes {
        let mut shared = self.shared.lock();
        let whole = match &mut shared.body {
            Body::Growing(body) => body.split().freeze(),
            Body::Whole(whole) => whole.clone(),
        };
        shared.body = Body::Whole(whole.clone());
        whole
    }

    /// The body is whole.
    pub fn finish(self) {
        self.shared.lock().finish(End::Whole);
    }

    /// The leader reads on alone.
    pub fn hand_over(self, rest: Rest) {
        self.shared.lock().finish(End::Rest(Box::new(rest)));
    }

    /// There is no more, and it is not whole.
    pub fn fail(self, error: Error) {
        self.shared.lock().finish(End::Broken(error));
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        let mut shared = self.shared.lock();
        self.gathered.give_back(shared.body.len());
        if shared.end.is_none() {
            shared.finish(End::Broken(Error::Internal(Cause::from("a flight was lost"))));
        }
    }
}

impl Shared {
    fn finish(&mut self, end: End) {
        self.end = Some(end);
        self.wake();
    }

    fn wake(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }
}

impl Body {
    fn len(&self) -> usize {
        match self {
            Self::Growing(body) => body.len(),
            Self::Whole(body) => body.len(),
        }
    }

    /// What lies behind `from`, or a part of it.
    fn piece(&self, from: usize) -> Option<Bytes> {
        let end = self.len().min(from + PIECE);
        (from < end).then(|| match self {
            Self::Growing(body) => Bytes::copy_from_slice(&body[from..end]),
            Self::Whole(body) => body.slice(from..end),
        })
    }
}

impl LeaderBody {
    /// Reads on.
    pub fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        loop {
            if self.is_over {
                return Poll::Ready(None);
            }
            if let Some(rest) = &mut self.rest {
                let frame = ready!(rest.poll_frame(cx));
                self.is_over = !matches!(frame, Some(Ok(_))) || rest.is_over();
                return Poll::Ready(frame);
            }
            let mut shared = self.shared.lock();
            if let Some(data) = shared.body.piece(self.taken) {
                self.taken += data.len();
                self.left = self.left.map(|left| left.saturating_sub(data.len() as u64));
                self.is_over = self.left == Some(0);
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            match shared.end.take() {
                None => {
                    shared.reader = Some(cx.waker().clone());
                    return Poll::Pending;
                }
                Some(End::Whole) => self.is_over = true,
                Some(End::Rest(rest)) => {
                    drop(shared);
                    self.rest = Some(rest);
                }
                Some(End::Broken(error)) => {
                    self.is_over = true;
                    return Poll::Ready(Some(Err(error)));
                }
            }
        }
    }

    /// All of it has been passed on. The leader does not leave yet where the upstream has still to say that this is
    /// the end: that would cancel the request, and what came whole would count as broken off.
    pub fn complete(&mut self) {
        if let Some(mut member) = self.member.take_if(|member| !member.has_landed()) {
            tokio::spawn(async move { member.landed().await });
        }
    }

    /// Whether nothing is left to read.
    pub fn is_end_stream(&self) -> bool {
        self.is_over
    }

    /// How much is to come.
    pub fn size_hint(&self) -> SizeHint {
        match (self.is_over, &self.rest, self.left) {
            (true, ..) => SizeHint::with_exact(0),
            (false, None, Some(left)) => SizeHint::with_exact(left),
            (false, ..) => SizeHint::default(),
        }
    }

    /// When the body must have come and gone out.
    pub fn end(&self) -> Option<Instant> {
        self.end
    }

    /// The longest silence of a body that no deadline covers.
    pub fn stream_idle(&self) -> Duration {
        self.stream_idle
    }
}

impl Rest {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let polled = match self.frame.take() {
            Some(frame) => Some(Ok(frame)),
            None => ready!(self.tail.poll_frame(cx)),
        };
        match &polled {
            Some(Ok(frame)) => {
                let data = frame.data_ref();
                let kept = |mut recorder: Box<Recorder>| {
                    data.is_none_or(|data| recorder.keep(data)).then_some(recorder)
                };
                self.recorder = self.recorder.take().and_then(kept);
            }
            Some(Err(_)) => self.recorder = None,
            None => {}
        }
        if (polled.is_none() || self.tail.is_end_stream())
            && let Some(recorder) = self.recorder.take()
        {
            recorder.complete();
        }
        Poll::Ready(polled)
    }

    fn is_over(&self) -> bool {
        self.frame.is_none() && self.tail.is_end_stream()
    }
}
