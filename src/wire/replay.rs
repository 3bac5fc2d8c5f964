//! Request bodies that can be sent more than once.
//!
//! The body is kept as it passes, never ahead of the attempt that sends it: the first reader pulls a
//! chunk from the client and leaves it for the others, so that back-pressure reaches the client and a
//! hedge can start before the client has finished. Past the limit of the route, or the allowance of
//! the process, what was kept is given up and the body can only go on in the attempt that has it.
//!
//! That attempt is the first one of its try. A hedge is there to help it, and often reads ahead of it: it never
//! takes the body away, but gives itself up at the limit and leaves what it has read. That the furthest should
//! keep the body was rejected: the hedge may fail in its turn, and the healthy attempt would be gone by then.
//! The next try comes when all readers of the one before have gone, and its first attempt is no different.
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
    store: Store,
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
    has_failed: bool,
}

/// What becomes of the chunks that pass.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Store {
    /// They are kept.
    Open,
    /// The last one was one too many. It is here, and not accounted for; whoever reads on loses what was kept.
    Full,
    /// They have gone with the attempt that reads them.
    GivenUp,
}

impl Replay {
    /// Keeps up to `limit` bytes of `source`, while the process holds no more than `total`.
    pub fn new(source: IncomingBody, limit: usize, total: usize, allowance: Arc<ReplayAllowance>) -> Self {
        let size = source.size_hint();
        let store = if size.lower() > limit as u64 { Store::GivenUp } else { Store::Open };
        Self(Arc::new(Mutex::new(Kept {
            source: Some(source),
            store,
            chunks: Vec::new(),
            passed: 0,
            trailers: None,
            size,
            bytes: 0,
            limit,
            total,
            allowance,
            has_failed: false,
        })))
    }

    /// Whether all of the body that has passed is there, so that an attempt after the others can send the whole.
    pub fn is_whole(&self) -> bool {
        let kept = self.0.lock();
        kept.store != Store::GivenUp && !kept.has_failed
    }

    /// Whether more of it is kept, so that an attempt beside the others can send the whole, as far as is known.
    pub fn has_room(&self) -> bool {
        let kept = self.0.lock();
        kept.store == Store::Open && !kept.has_failed
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
        Reader { kept: self.0.clone(), next: 0, yields: false, is_done: false }
    }
}

/// One attempt's way through the body.
pub struct Reader {
    kept: Arc<Mutex<Kept>>,
    next: usize,
    yields: bool,
    is_done: bool,
}

impl Reader {
    /// It is a hedge's: where not both attempts can have the body, it is left to the other one.
    pub fn yields(&mut self) {
        self.yields = true;
    }
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
        if this.yields && kept.store != Store::Open {
            this.is_done = true;
            return Poll::Ready(Some(Err(BodyLost::NotKept)));
        }
        match ready!(Pin::new(source).poll_frame(cx)) {
            Some(Ok(frame)) => match frame.into_data() {
                Ok(chunk) => {
                    this.next += 1;
                    if !kept.keep(&chunk) {
                        if this.yields {
                            kept.set_aside(chunk);
                            this.is_done = true;
                            return Poll::Ready(Some(Err(BodyLost::NotKept)));
                        }
                        kept.give_up();
                    }
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
        if self.store != Store::Open || self.has_failed {
            return Poll::Ready(Err(BodyLost::NotKept));
        }
        while let Some(source) = &mut self.source {
            match ready!(Pin::new(source).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(chunk) if self.keep(&chunk) => {}
                    Ok(chunk) => {
                        self.set_aside(chunk);
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

    /// Counts a chunk that has passed, and keeps it where there is room; whether there was.
    fn keep(&mut self, chunk: &Bytes) -> bool {
        self.passed += 1;
        let fits = self.store == Store::Open
            && self.bytes + chunk.len() <= self.limit
            && self.allowance.take(chunk.len(), self.total);
        if fits {
            self.bytes += chunk.len();
            self.chunks.push(chunk.clone());
        }
        fits
    }

    /// Leaves a chunk without room to the attempt that sends the body, which would miss it.
    fn set_aside(&mut self, chunk: Bytes) {
        self.store = Store::Full;
        self.chunks.push(chunk);
    }

    /// The rest goes with its reader.
    fn give_up(&mut self) {
        self.store = Store::GivenUp;
        self.chunks = Vec::new();
        self.allowance.give_back(std::mem::take(&mut self.bytes));
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use http_body_util::BodyExt;
    use tokio::io::{AsyncWriteExt, duplex};
    use tokio::sync::mpsc;

    use super::*;

    /// A request body as it comes from a client that sends it in these chunks, each by itself.
    async fn sent(chunks: &'static [&'static str]) -> IncomingBody {
        let (mut client, server) = duplex(64 * 1024);
        let (tell, mut told) = mpsc::channel(1);
        tokio::spawn(async move {
            let service = hyper::service::service_fn(move |request: http::Request<hyper::body::Incoming>| {
                let _ = tell.try_send(request.into_body());
                std::future::pending::<Result<http::Response<String>, std::convert::Infallible>>()
            });
            let io = hyper_util::rt::TokioIo::new(server);
            let _ = hyper::server::conn::http1::Builder::new().serve_connection(io, service).await;
        });
        tokio::spawn(async move {
            client.write_all(b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n").await.unwrap();
            for chunk in chunks {
                client.write_all(format!("{:x}\r\n{chunk}\r\n", chunk.len()).as_bytes()).await.unwrap();
            }
            client.write_all(b"0\r\n\r\n").await.unwrap();
            std::future::pending::<()>().await;
        });
        IncomingBody::Http1(told.recv().await.unwrap())
    }

    async fn chunk(reader: &mut Reader) -> Option<Result<Bytes, BodyLost>> {
        let frame = reader.frame().await?;
        Some(frame.map(|frame| frame.into_data().unwrap()))
    }

    async fn rest(reader: Reader) -> Result<Bytes, BodyLost> {
        reader.collect().await.map(http_body_util::Collected::to_bytes)
    }

    /// Between the question whether a chunk may be kept and its keeping another call took the last of the
    /// allowance: what had passed was given up, and the body was taken for an empty one.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_body_that_is_read_through_is_whole_or_left_to_its_attempt() {
        let allowance = ReplayAllowance::new();
        let is_over = Arc::new(AtomicBool::new(false));
        let others = std::thread::spawn({
            let (allowance, is_over) = (allowance.clone(), is_over.clone());
            move || {
                while !is_over.load(Ordering::Relaxed) {
                    if allowance.take(1, 9) {
                        allowance.give_back(1);
                    }
                }
            }
        });
        for _ in 0..1000 {
            let replay = Replay::new(sent(&["some", "bytes"]).await, 1024, 9, allowance.clone());
            match replay.read_through().await {
                Ok(chunks) => assert_eq!(chunks.concat(), b"somebytes"),
                Err(lost) => assert!(matches!(lost, BodyLost::NotKept), "{lost:?}"),
            }
            assert_eq!(rest(replay.reader()).await.unwrap(), "somebytes");
        }
        is_over.store(true, Ordering::Relaxed);
        others.join().unwrap();
        assert_eq!(allowance.held(), 0);
    }

    fn replay(source: IncomingBody, limit: usize) -> (Replay, Arc<ReplayAllowance>) {
        let allowance = ReplayAllowance::new();
        (Replay::new(source, limit, 1024, allowance.clone()), allowance)
    }

    /// A hedge that read ahead of a slow primary used up the limit, and then neither had the body: when the hedge
    /// failed too, the client got an error of ours.
    #[tokio::test]
    async fn a_hedge_that_comes_to_the_limit_leaves_the_body_to_the_first_attempt() {
        let (body, allowance) = replay(sent(&["one", "two", "three", "four"]).await, 8);
        let mut primary = body.reader();
        assert_eq!(chunk(&mut primary).await.unwrap().unwrap(), "one");
        let [mut hedge, mut other] = [body.reader(), body.reader()];
        hedge.yields();
        other.yields();
        assert_eq!(chunk(&mut hedge).await.unwrap().unwrap(), "one");
        assert_eq!(chunk(&mut hedge).await.unwrap().unwrap(), "two");
        assert!(matches!(chunk(&mut hedge).await, Some(Err(BodyLost::NotKept))));
        assert!(hedge.is_end_stream());
        assert!(!body.has_room(), "another hedge would come to the same end");
        assert!(body.is_whole(), "nothing is lost yet");
        // One that was on its way gets as far as the body is there.
        for part in ["one", "two", "three"] {
            assert_eq!(chunk(&mut other).await.unwrap().unwrap(), part);
        }
        assert!(matches!(chunk(&mut other).await, Some(Err(BodyLost::NotKept))));

        // The first attempt may fail before it comes to the limit, and then there is another try.
        drop(primary);
        let mut retry = body.reader();
        for part in ["one", "two", "three", "four"] {
            assert!(!retry.is_end_stream());
            assert_eq!(chunk(&mut retry).await.unwrap().unwrap(), part);
        }
        assert!(!body.is_whole());
        assert_eq!(allowance.held(), 0, "what is given up is given back");
        assert!(chunk(&mut retry).await.is_none());
    }

    #[tokio::test]
    async fn a_hedge_behind_the_first_attempt_loses_the_body_at_the_limit() {
        let (body, _allowance) = replay(sent(&["one", "two", "three"]).await, 8);
        let (primary, mut hedge) = (body.reader(), body.reader());
        hedge.yields();
        assert_eq!(chunk(&mut hedge).await.unwrap().unwrap(), "one");
        assert_eq!(rest(primary).await.unwrap(), "onetwothree");
        assert!(matches!(chunk(&mut hedge).await, Some(Err(BodyLost::NotKept))));
    }

    #[tokio::test]
    async fn a_body_that_was_read_through_and_is_too_large_is_sent_by_one_attempt_after_another() {
        let (body, allowance) = replay(sent(&["one", "two", "three", "four"]).await, 8);
        assert!(matches!(body.read_through().await, Err(BodyLost::NotKept)));
        assert!(matches!(body.read_through().await, Err(BodyLost::NotKept)));
        assert!(body.is_whole() && !body.has_room());
        let mut first = body.reader();
        assert_eq!(chunk(&mut first).await.unwrap().unwrap(), "one");
        drop(first);
        assert_eq!(rest(body.reader()).await.unwrap(), "onetwothreefour");
        assert!(!body.is_whole());
        assert_eq!(allowance.held(), 0);
    }
}
