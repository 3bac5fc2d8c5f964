//! The client's socket as the HTTP library sees it, with what the library does not do by itself.
//!
//! The library reads and writes messages well, but it answers a bad head with an empty body, sends no
//! interim answers, and its header timeout also counts the idle time between requests. All three can
//! be had by watching the bytes: the phase of the connection is known, an interim answer is written
//! ahead of the final one, and what the library writes while no request is with us is its own answer
//! to a bad head, which is held back for one in our shape. Writing a second HTTP/1 codec for the sake
//! of these three was rejected.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::{HeaderMap, StatusCode};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use super::socket::ClientSocket;
use crate::call::InterimSink;
use crate::wire::authority::bracket_ipv6;
use crate::wire::hop_by_hop::Forwarded;
use crate::wire::target::asks_whole_server;

/// Interim answers waiting to be written: more than this is dropped.
const MAX_INTERIM: usize = 64 * 1024;

/// Where a connection is in its exchange of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Nothing has come yet.
    Fresh,
    /// Between requests.
    Idle,
    /// A head has begun to arrive.
    Head,
    /// A request is with us, up to the end of its answer.
    Busy,
}

/// What the parts of one connection tell each other.
pub struct Shared {
    epoch: Instant,
    phase: AtomicU8,
    since_ms: AtomicU64,
    /// The answer must be out by then; 0 for no such bound.
    end_ms: AtomicU64,
    stall_ms: AtomicU64,
    blocked_since_ms: AtomicU64,
    withheld: AtomicU16,
    is_close_delimited: AtomicBool,
    is_for_server: AtomicBool,
    has_interim: AtomicBool,
    interim: Mutex<Vec<u8>>,
}

impl Shared {
    /// For a connection that has come into being at `epoch`.
    pub fn since(epoch: Instant) -> Arc<Self> {
        Arc::new(Self {
            epoch,
            phase: AtomicU8::new(Phase::Fresh as u8),
            since_ms: AtomicU64::new(0),
            end_ms: AtomicU64::new(0),
            stall_ms: AtomicU64::new(0),
            blocked_since_ms: AtomicU64::new(0),
            withheld: AtomicU16::new(0),
            is_close_delimited: AtomicBool::new(false),
            is_for_server: AtomicBool::new(false),
            has_interim: AtomicBool::new(false),
            interim: Mutex::default(),
        })
    }

    /// The phase, and since when.
    pub fn phase(&self) -> (Phase, Instant) {
        let phase = match self.phase.load(Ordering::Relaxed) {
            p if p == Phase::Fresh as u8 => Phase::Fresh,
            p if p == Phase::Idle as u8 => Phase::Idle,
            p if p == Phase::Head as u8 => Phase::Head,
            _ => Phase::Busy,
        };
        (phase, self.at(self.since_ms.load(Ordering::Relaxed)))
    }

    /// A request's head has come.
    pub fn begin(&self) {
        self.enter(Phase::Busy);
    }

    /// How long the answer may take to be delivered.
    pub fn bound(&self, end: Option<Instant>, stall: Duration) {
        self.end_ms.store(end.map_or(0, |end| self.ms(end).max(1)), Ordering::Relaxed);
        self.stall_ms.store(stall.as_millis().try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// The answer has been handed over whole, or given up.
    pub fn finish(&self) {
        self.end_ms.store(0, Ordering::Relaxed);
        self.enter(Phase::Idle);
    }

    /// When a client that does not take its answer is to be given up; `None` while nothing hinders.
    pub fn gives_up_at(&self) -> Option<Instant> {
        let end = Some(self.end_ms.load(Ordering::Relaxed)).filter(|ms| *ms > 0);
        let stalled = Some(self.blocked_since_ms.load(Ordering::Relaxed))
            .filter(|ms| *ms > 0)
            .map(|ms| ms.saturating_add(self.stall_ms.load(Ordering::Relaxed)));
        let ms = match (end, stalled) {
            (Some(end), Some(stalled)) => end.min(stalled),
            (end, stalled) => end.or(stalled)?,
        };
        Some(self.at(ms))
    }

    /// Whether the client has room for more than it was sent.
    pub fn is_blocked(&self) -> bool {
        self.blocked_since_ms.load(Ordering::Relaxed) > 0
    }

    /// Whether the head that has just come asks about the server as a whole; forgotten when told.
    pub fn take_is_for_server(&self) -> bool {
        self.is_for_server.swap(false, Ordering::Relaxed)
    }

    /// Notes whether the end of the answer is the end of the connection.
    pub fn set_close_delimited(&self, is_close_delimited: bool) {
        self.is_close_delimited.store(is_close_delimited, Ordering::Relaxed);
    }

    /// Whether an ordinary close would make the answer look whole.
    pub fn is_close_delimited(&self) -> bool {
        self.is_close_delimited.load(Ordering::Relaxed)
    }

    /// The status that the library wanted to answer a bad head with.
    pub fn withheld(&self) -> Option<StatusCode> {
        StatusCode::from_u16(self.withheld.load(Ordering::Relaxed)).ok()
    }

    fn enter(&self, phase: Phase) {
        self.since_ms.store(self.ms(Instant::now()), Ordering::Relaxed);
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    fn ms(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.epoch).as_millis() as u64
    }

    fn at(&self, ms: u64) -> Instant {
        // A year away stands for everything further, so that the sum stays in range.
        self.epoch + Duration::from_millis(ms.min(365 * 24 * 3600 * 1000))
    }
}

impl InterimSink for Shared {
    fn interim(&self, status: StatusCode, headers: &HeaderMap) {
        let mut out = self.interim.lock();
        if out.len() > MAX_INTERIM {
            return;
        }
        out.extend_from_slice(b"HTTP/1.1 ");
        out.extend_from_slice(status.as_str().as_bytes());
        out.push(b' ');
        out.extend_from_slice(status.canonical_reason().unwrap_or("Interim").as_bytes());
        out.extend_from_slice(b"\r\n");
        for (name, value) in Forwarded::of(headers).iter() {
            out.extend_from_slice(name.as_str().as_bytes());
            out.extend_from_slice(b": ");
            out.extend_from_slice(value.as_bytes());
            out.extend_from_slice(b"\r\n");
        }
        out.extend_from_slice(b"\r\n");
        self.has_interim.store(true, Ordering::Relaxed);
    }
}

/// A client's socket under the HTTP library.
pub struct Downstream {
    io: ClientSocket,
    shared: Arc<Shared>,
}

impl Downstream {
    /// Puts the watch on a socket.
    pub fn new(io: ClientSocket, shared: Arc<Shared>) -> Self {
        Self { io, shared }
    }

    /// The socket.
    pub fn into_inner(self) -> ClientSocket {
        self.io
    }
}

impl AsyncRead for Downstream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
        let is_between = self.shared.phase.load(Ordering::Relaxed) < Phase::Head as u8;
        if is_between && buf.filled().len() > before {
            self.shared.enter(Phase::Head);
            bracket_ipv6(buf, before);
            self.shared.is_for_server.store(asks_whole_server(&buf.filled()[before..]), Ordering::Relaxed);
        }
        Poll::Ready(Ok(()))
    }
}

impl Downstream {
    /// Holds the library's own answer to a bad head back.
    fn withholds(&self, buf: &[u8]) -> bool {
        if self.shared.phase.load(Ordering::Relaxed) != Phase::Head as u8 {
            return false;
        }
        let Some(status) = librarys_answer(buf) else { return false };
        self.shared.withheld.store(status.as_u16(), Ordering::Relaxed);
        true
    }

    fn poll_interim(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.shared.has_interim.load(Ordering::Relaxed) {
            return Poll::Ready(Ok(()));
        }
        let mut out = self.shared.interim.lock();
        while !out.is_empty() {
            let taken = ready!(Pin::new(&mut self.io).poll_write(cx, &out))?;
            if taken == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            out.drain(..taken);
        }
        self.shared.has_interim.store(false, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }

    fn note_blocked(&self, is_blocked: bool) {
        let was_blocked = self.shared.is_blocked();
        if is_blocked && !was_blocked {
            let now = self.shared.ms(Instant::now()).max(1);
            self.shared.blocked_since_ms.store(now, Ordering::Relaxed);
        } else if was_blocked && !is_blocked {
            self.shared.blocked_since_ms.store(0, Ordering::Relaxed);
        }
    }
}

impl AsyncWrite for Downstream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.withholds(buf) {
            return Poll::Ready(Ok(buf.len()));
        }
        ready!(self.poll_interim(cx))?;
        let polled = Pin::new(&mut self.io).poll_write(cx, buf);
        self.note_blocked(polled.is_pending());
        polled
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.withholds(bufs.first().map_or(&[][..], |buf| buf)) {
            return Poll::Ready(Ok(bufs.iter().map(|buf| buf.len()).sum()));
        }
        ready!(self.poll_interim(cx))?;
        let polled = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.note_blocked(polled.is_pending());
        polled
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_interim(cx))?;
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// The status of an answer that the library makes by itself: small, whole, without the `Via` that
/// every answer of ours has.
fn librarys_answer(buf: &[u8]) -> Option<StatusCode> {
    const LONGEST: usize = 200;
    if buf.len() > LONGEST || !buf.starts_with(b"HTTP/1.1 4") || !buf.ends_with(b"\r\n\r\n") {
        return None;
    }
    let text = std::str::from_utf8(buf).ok()?;
    if text.contains("via:") || !text.contains("content-length: 0\r\n") {
        return None;
    }
    StatusCode::from_bytes(&buf[9..12]).ok()
}
