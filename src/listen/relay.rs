//! Copying bytes both ways between two ends, in one task.
//!
//! A direction has a buffer only while bytes are in it: most tunnels lie idle most of the time, and an
//! agent holds many. The buffer grows for a direction whose reads fill it, so that a bulk transfer
//! costs few system calls, and is small again for one that talks in short messages.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::time::{Instant, sleep_until};

/// What a direction reads at first: a TLS record.
const SMALL: usize = 16 * 1024;
/// What one reads that fills its buffer: beyond, fewer system calls no longer pay for the cache misses.
const LARGE: usize = 256 * 1024;

/// How long nothing may move.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// While both directions are open.
    pub idle: Duration,
    /// Once one of them has ended.
    pub half_closed: Duration,
}

/// A relay between `a` and `b`, and what has passed it.
pub struct Relay {
    up: Direction,
    down: Direction,
}

impl Relay {
    /// A relay that begins with what was read from `b` `early`.
    pub fn new(early: Bytes) -> Self {
        let mut down = Direction::new();
        down.buffer = early.into();
        Self { up: Direction::new(), down }
    }

    /// Bytes that have gone from `b` to `a`.
    pub fn bytes_down(&self) -> u64 {
        self.down.bytes
    }

    /// Copies until both directions have ended, one has failed, or nothing has moved for too long. The end
    /// of one direction is passed on while the other goes on.
    ///
    /// # Errors
    /// Those of either end; [`io::ErrorKind::TimedOut`] when nothing has moved.
    pub async fn run<A, B>(&mut self, a: &mut A, b: &mut B, limits: Limits) -> io::Result<()>
    where
        A: AsyncRead + AsyncWrite + Unpin,
        B: AsyncRead + AsyncWrite + Unpin,
    {
        let Self { up, down } = self;
        let mut timer = pin!(sleep_until(Instant::now() + limits.idle));
        poll_fn(|cx| {
            // `b` is read before it is written: a write to an upstream that fails waits, unwoken, until the
            // reader has seen the end (see `Socket`). The other way round nobody would ask it again.
            let down_ended = down.poll(cx, b, a)?;
            let up_ended = up.poll(cx, a, b)?;
            if up_ended.is_ready() && down_ended.is_ready() {
                return Poll::Ready(Ok(()));
            }
            let is_half_closed = up_ended.is_ready() || down_ended.is_ready();
            let limit = if is_half_closed { limits.half_closed } else { limits.idle };
            let due = up.moved.max(down.moved) + limit;
            // The timer is not moved with every byte: it looks when it strikes. A limit that has become
            // shorter does move it.
            if due < timer.deadline() {
                timer.as_mut().reset(due);
            }
            while timer.as_mut().poll(cx).is_ready() {
                if Instant::now() >= due {
                    return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                }
                timer.as_mut().reset(due);
            }
            Poll::Pending
        })
        .await
    }
}

/// One way.
struct Direction {
    buffer: BytesMut,
    size: usize,
    stage: Stage,
    is_unflushed: bool,
    bytes: u64,
    moved: Instant,
}

#[derive(PartialEq, Eq)]
enum Stage {
    Open,
    /// The reader has come to its end; the writer has not been told yet.
    Ending,
    Ended,
}

impl Direction {
    fn new() -> Self {
        Self {
            buffer: BytesMut::new(),
            size: SMALL,
            stage: Stage::Open,
            is_unflushed: false,
            bytes: 0,
            moved: Instant::now(),
        }
    }

    fn poll<R, W>(&mut self, cx: &mut Context<'_>, from: &mut R, to: &mut W) -> Poll<io::Result<()>>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        while self.stage != Stage::Ended {
            let is_dry = self.fill(cx, from)?.is_pending();
            ready!(self.drain(cx, to))?;
            if self.stage == Stage::Ending {
                ready!(Pin::new(&mut *to).poll_shutdown(cx))?;
                self.stage = Stage::Ended;
            } else if is_dry {
                self.buffer = BytesMut::new();
                if self.is_unflushed {
                    self.is_unflushed = Pin::new(to).poll_flush(cx)?.is_pending();
                }
                return Poll::Pending;
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Reads all that is there, or as much as the buffer takes, so that little writes become one. Pending
    /// when there was no more.
    fn fill<R: AsyncRead + Unpin>(&mut self, cx: &mut Context<'_>, from: &mut R) -> Poll<io::Result<()>> {
        while self.stage == Stage::Open && self.buffer.len() < self.size {
            self.buffer.reserve(self.size - self.buffer.len());
            let read = match pin!(from.read_buf(&mut self.buffer)).poll(cx) {
                Poll::Ready(read) => read?,
                Poll::Pending => {
                    if self.buffer.len() < self.size / 4 {
                        self.size = SMALL;
                    }
                    return Poll::Pending;
                }
            };
            self.moved = Instant::now();
            if read == 0 {
                self.stage = Stage::Ending;
            }
        }
        if self.buffer.len() >= self.size {
            self.size = (self.size * 4).min(LARGE);
        }
        Poll::Ready(Ok(()))
    }

    /// Writes what has been read.
    fn drain<W: AsyncWrite + Unpin>(&mut self, cx: &mut Context<'_>, to: &mut W) -> Poll<io::Result<()>> {
        while self.buffer.has_remaining() {
            let written = ready!(Pin::new(&mut *to).poll_write(cx, &self.buffer))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.buffer.advance(written);
            self.bytes += written as u64;
            self.is_unflushed = true;
            self.moved = Instant::now();
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncWriteExt, DuplexStream, duplex};

    use super::*;

    const LIMITS: Limits = Limits { idle: Duration::from_secs(60), half_closed: Duration::from_secs(5) };

    /// Both outer ends of a relay, and what comes of it beside the bytes that went down.
    fn relayed() -> (DuplexStream, DuplexStream, tokio::task::JoinHandle<(io::Result<()>, u64)>) {
        relayed_after(b"")
    }

    fn relayed_after(
        early: &'static [u8],
    ) -> (DuplexStream, DuplexStream, tokio::task::JoinHandle<(io::Result<()>, u64)>) {
        let (client, mut a) = duplex(1024);
        let (server, mut b) = duplex(1024);
        let end = tokio::spawn(async move {
            let mut relay = Relay::new(Bytes::from_static(early));
            (relay.run(&mut a, &mut b, LIMITS).await, relay.bytes_down())
        });
        (client, server, end)
    }

    #[tokio::test]
    async fn bytes_pass_both_ways_in_order_whatever_their_number() {
        let (client, server, end) = relayed();
        let sent: Vec<u8> = (0..1_000_000_u32).map(|n| n as u8).collect();
        let (mut from_server, mut to_server) = tokio::io::split(client);
        let (mut from_client, mut to_client) = tokio::io::split(server);
        let send = async {
            to_server.write_all(&sent).await.unwrap();
            to_server.shutdown().await.unwrap();
        };
        let echo = async {
            tokio::io::copy(&mut from_client, &mut to_client).await.unwrap();
            to_client.shutdown().await.unwrap();
        };
        let mut got = Vec::new();
        let (_, _, read) = tokio::join!(send, echo, from_server.read_to_end(&mut got));
        read.unwrap();
        assert!(got == sent);
        assert!(matches!(end.await.unwrap(), (Ok(()), 1_000_000)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_one_direction_is_passed_on_and_the_other_goes_on() {
        let (mut client, mut server, end) = relayed();
        client.shutdown().await.unwrap();
        assert_eq!(server.read(&mut [0; 1]).await.unwrap(), 0);
        server.write_all(b"still here").await.unwrap();
        let mut got = [0; 10];
        client.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"still here");
        server.shutdown().await.unwrap();
        assert!(matches!(end.await.unwrap(), (Ok(()), 10)));
    }

    #[tokio::test(start_paused = true)]
    async fn what_does_not_move_is_given_up_sooner_when_half_closed() {
        let started = Instant::now();
        let (mut client, _server, end) = relayed();
        tokio::time::sleep(Duration::from_secs(50)).await;
        client.write_all(b"x").await.unwrap();
        tokio::time::sleep(Duration::from_secs(50)).await;
        client.shutdown().await.unwrap();
        assert_eq!(end.await.unwrap().0.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(started.elapsed().as_secs(), 105);
    }

    #[tokio::test(start_paused = true)]
    async fn an_open_relay_that_does_not_move_is_given_up() {
        let started = Instant::now();
        let (_client, _server, end) = relayed();
        assert_eq!(end.await.unwrap().0.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(started.elapsed().as_secs(), 60);
    }

    #[tokio::test(start_paused = true)]
    async fn what_came_early_goes_first_and_a_client_that_does_not_take_it_is_given_up() {
        let (mut client, mut server, end) = relayed_after(b"first, ");
        server.write_all(b"second").await.unwrap();
        let mut got = [0; 13];
        client.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"first, second");
        drop((client, server));
        assert_eq!(end.await.unwrap().1, 13);

        let started = Instant::now();
        let (_client, _server, end) = relayed_after(&[b'x'; 1025]);
        let (outcome, bytes_down) = end.await.unwrap();
        assert_eq!((outcome.unwrap_err().kind(), bytes_down), (io::ErrorKind::TimedOut, 1024));
        assert_eq!(started.elapsed().as_secs(), 60);
    }

    #[tokio::test]
    async fn an_idle_direction_holds_no_buffer() {
        let (mut client, mut a) = duplex(64);
        let (_server, mut b) = duplex(64);
        let mut up = Direction::new();
        client.write_all(b"hello").await.unwrap();
        let polled = poll_fn(|cx| Poll::Ready(up.poll(cx, &mut a, &mut b))).await;
        assert!(polled.is_pending());
        assert_eq!((up.bytes, up.buffer.capacity()), (5, 0));
    }
}
