//! Request bodies that can be sent more than once.
//!
//! The body is kept as it passes, never ahead of the attempt that sends it: the first reader pulls a
//! chunk from the client and leaves it for the others, so that back-pressure reaches the client and a
//! hedge can start before the client has finished. Past the limit of the route, or the allowance of
//! the process, what was kept is given up and the body can only go on in the attempt that has it.
//!
//! All attempts of a call are polled by one task, so whichever waits for the client is woken by it.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;

use super::incoming::{BodyError, IncomingBody};

/// What all bodies kept for replay may hold together: `limits.replay_total`.
#[derive(Debug)]
pub struct ReplayAllowance {
    held: AtomicUsize,
}

impl ReplayAllowance {
    /// Nothing is held yet.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { held: AtomicUsize::new(0) })
    }

    fn take(&self, bytes: usize, total: usize) -> bool {
        self.held
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
                held.checked_add(bytes).filter(|sum| *sum <= total)
            })
            .is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Bytes held now.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }
}

/// The request body of one call, from which each attempt takes its own reader.
#[derive(Clone)]
pub struct Replay(Arc<Mutex<Kept>>);

struct Kept {
    source: Option<IncomingBody>,
    /// All that has passed, until it is given up.
    chunks: Vec<Bytes>,
    /// How many chunks have passed.
    passed: usize,
    trailers: Option<HeaderMap>,
    size: SizeHint,
    bytes: usize,
    limit: usize,
    total: usize,
    allowance: Arc<ReplayAllowance>,
    is_given_up: bool,
    has_failed: bool,
}

impl Replay {
    /// Keeps up to `limit` bytes of `source`, while the process holds no more than `total`.
    pub fn new(source: IncomingBody, limit: usize, total: usize, allowance: Arc<ReplayAllowance>) -> Self {
        let size = source.size_hint();
        let is_given_up = size.lower() > limit as u64;
        Self(Arc::new(Mutex::new(Kept {
            source: Some(source),
            chunks: Vec::new(),
            passed: 0,
            trailers: None,
            size,
            bytes: 0,
            limit,
            total,
            allowance,
            is_given_up,
            has_failed: false,
        })))
    }

    /// Whether one more attempt can send the whole body.
    pub fn is_whole(&self) -> bool {
        let kept = self.0.lock();
        !kept.is_given_up && !kept.has_failed
    }

    /// Whether nothing of the body has been read yet, so that a reader can have all of it however large
    /// it is; but not two.
    pub fn is_untouched(&self) -> bool {
        let kept = self.0.lock();
        kept.passed == 0 && kept.source.is_some()
    }

    /// Reads the body to its end before anything is sent, and gives all of it. It stays with the attempts,
    /// also when it is too large to be kept. Cancel-safe.
    ///
    /// # Errors
    /// [`BodyLost::NotKept`] when it is too large, or not the first to be read; [`BodyLost::Client`] when the
    /// client broke it off.
    pub async fn read_through(&self) -> Result<Vec<Bytes>, BodyLost> {
        poll_fn(|cx| self.0.lock().poll_through(cx)).await
    }

    /// A reader that starts at the first byte. Taken when [`Self::is_whole`] is false it fails,
    /// unless nothing has been read yet.
    pub fn reader(&self) -> Reader {
        Reader { kept: self.0.clone(), next: 0, is_done: false }
    }
}

/// One attempt's way through the body.
pub struct Reader {
    kept: Arc<Mutex<Kept>>,
    next: usize,
    is_done: bool,
}

impl Body for Reader {
    type Data = Bytes;
    type Error = BodyLost;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyLost>>> {
        let this = &mut *self;
        if this.is_done {
            return Poll::Ready(None);
        }
        let kept = &mut *this.kept.lock();
        if this.next < kept.passed {
            let Some(chunk) = kept.chunks.get(this.next) else {
                this.is_done = true;
                return Poll::Ready(Some(Err(BodyLost::NotKept)));
            };
            this.next += 1;
            return Poll::Ready(Some(Ok(Frame::data(chunk.clone()))));
        }
        let Some(source) = &mut kept.source else {
            this.is_done = true;
            if kept.has_failed {
                return Poll::Ready(Some(Err(BodyLost::NotKept)));
            }
            return Poll::Ready(kept.trailers.clone().map(|trailers| Ok(Frame::trailers(trailers))));
        };
        match ready!(Pin::new(source).poll_frame(cx)) {
            Some(Ok(frame)) => match frame.into_data() {
                Ok(chunk) => {
                    this.next += 1;
                    kept.keep(chunk.clone());
                    Poll::Ready(Some(Ok(Frame::data(chunk))))
                }
                Err(frame) => {
                    kept.source = None;
                    this.is_done = true;
                    kept.trailers = frame.into_trailers().ok();
                    Poll::Ready(kept.trailers.clone().map(|trailers| Ok(Frame::trailers(trailers))))
                }
            },
            Some(Err(error)) => {
                kept.has_failed = true;
                kept.source = None;
                this.is_done = true;
                Poll::Ready(Some(Err(BodyLost::Client(error))))
            }
            None => {
                kept.source = None;
                this.is_done = true;
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.is_done || {
            let kept = self.kept.lock();
            self.next == kept.passed
                && kept.trailers.is_none()
                && !kept.has_failed
                && kept.source.as_ref().is_none_or(Body::is_end_stream)
        }
    }

    fn size_hint(&self) -> SizeHint {
        self.kept.lock().size
    }
}

impl Kept {
    fn poll_through(&mut self, cx: &mut Context<'_>) -> Poll<Result<Vec<Bytes>, BodyLost>> {
        if self.is_given_up || self.has_failed {
            return Poll::Ready(Err(BodyLost::NotKept));
        }
        while let Some(source) = &mut self.source {
            match ready!(Pin::new(source).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(chunk) if self.fits(&chunk) => self.keep(chunk),
                    Ok(chunk) => {
                        // One that is not accounted for, or the attempt that sends the body would miss it.
                        self.passed += 1;
                        self.chunks.push(chunk);
                        return Poll::Ready(Err(BodyLost::NotKept));
                    }
                    Err(frame) => {
                        self.source = None;
                        self.trailers = frame.into_trailers().ok();
                    }
                },
                Some(Err(error)) => {
                    self.has_failed = true;
                    self.source = None;
                    return Poll::Ready(Err(BodyLost::Client(error)));
                }
                None => self.source = None,
            }
        }
        Poll::Ready(Ok(self.chunks.clone()))
    }

    fn fits(&self, chunk: &Bytes) -> bool {
        let is_allowed = self.allowance.held() + chunk.len() <= self.total;
        is_allowed && self.bytes + chunk.len() <= self.limit
    }

    fn keep(&mut self, chunk: Bytes) {
        self.passed += 1;
        if self.is_given_up {
            return;
        }
        let fits = self.bytes + chunk.len() <= self.limit;
        if fits && self.allowance.take(chunk.len(), self.total) {
            self.bytes += chunk.len();
            self.chunks.push(chunk);
        } else {
            self.is_given_up = true;
            self.chunks = Vec::new();
            self.allowance.give_back(std::mem::take(&mut self.bytes));
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.allowance.give_back(self.bytes);
    }
}

/// Why a request body ended early.
#[derive(Debug, thiserror::Error)]
pub enum BodyLost {
    /// The client broke it off, or broke its framing.
    #[error("the client's request body failed")]
    Client(#[source] BodyError),
    /// Another attempt has had bytes that were too many to keep.
    #[error("the request body was not kept for another attempt")]
    NotKept,
}
