//! A connection to an upstream as bytes: clear text or TLS, with its traffic counted.
//!
//! The counts tell two things that the HTTP library does not: whether any byte of a request was
//! written and whether any byte of an answer came. A request may go out again on another connection
//! only by that evidence (RFC 9110 section 9.2.2).
//!
//! A write that fails is not the end: an upstream that refuses a large upload answers and closes while
//! we still write, and its answer lies in our receive buffer (RFC 9112 section 9.5). So the reading
//! side alone says when a connection is over.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use dashmap::DashSet;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

/// All connections that are open to upstreams, by both of their ends: ours and the other. A client whose
/// connection is one of them is ourselves, sent back by a redirect rule.
///
/// Our end alone would not tell: the kernel gives one local port to several connections at once as long
/// as they lead to different places. So an agent on this machine may well connect from the address of a
/// socket of ours.
#[derive(Debug, Default)]
pub struct OwnSockets(DashSet<(SocketAddr, SocketAddr)>);

impl OwnSockets {
    /// Whether the connection that was made from `near` to `far` is one of ours.
    pub fn holds(&self, near: SocketAddr, far: SocketAddr) -> bool {
        self.0.contains(&(near, far))
    }

    /// Remembers `stream` until the mark is dropped.
    pub fn mark(self: &Arc<Self>, stream: &TcpStream) -> OwnMark {
        let ends = stream.local_addr().ok().zip(stream.peer_addr().ok());
        if let Some(ends) = ends {
            self.0.insert(ends);
        }
        OwnMark { sockets: self.clone(), ends }
    }
}

/// Keeps one connection in [`OwnSockets`].
pub struct OwnMark {
    sockets: Arc<OwnSockets>,
    ends: Option<(SocketAddr, SocketAddr)>,
}

impl Drop for OwnMark {
    fn drop(&mut self) {
        if let Some(ends) = self.ends {
            self.sockets.0.remove(&ends);
        }
    }
}

/// Bytes that went each way.
#[derive(Debug, Default)]
pub struct Traffic {
    read: AtomicU64,
    written: AtomicU64,
}

impl Traffic {
    /// Bytes that came from the upstream.
    pub fn read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Bytes that the operating system took for the upstream.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }
}

/// A connected socket, with or without TLS.
pub struct Socket {
    stream: Stream,
    traffic: Arc<Traffic>,
    peer: SocketAddr,
    /// Somebody reads, and so learns of whatever goes wrong.
    is_being_read: bool,
    /// Reading has come to the end, or failed.
    is_read_out: bool,
    // Dropped after the stream: an address is given up only once its socket is closed.
    _mark: OwnMark,
}

enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Socket {
    /// Clear text.
    pub fn plain(stream: TcpStream, peer: SocketAddr, mark: OwnMark) -> Self {
        Self::new(Stream::Plain(stream), peer, mark)
    }

    /// TLS, after its handshake.
    pub fn tls(stream: TlsStream<TcpStream>, peer: SocketAddr, mark: OwnMark) -> Self {
        Self::new(Stream::Tls(Box::new(stream)), peer, mark)
    }

    fn new(stream: Stream, peer: SocketAddr, mark: OwnMark) -> Self {
        let traffic = Arc::default();
        Self { stream, traffic, peer, is_being_read: false, is_read_out: false, _mark: mark }
    }

    /// The address at the other end.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Whether the TLS handshake agreed on HTTP/2 (RFC 7301).
    pub fn agreed_on_http2(&self) -> bool {
        matches!(&self.stream, Stream::Tls(stream) if stream.get_ref().1.alpn_protocol() == Some(b"h2"))
    }

    /// What the upstream has said that nobody has read yet, without taking it away: how much of it is in
    /// `space` now, none at its end. Waits for the first of it. Only ever asked of clear text, where no
    /// layer can have read ahead; TLS says no more than that something has come. Cancel-safe.
    ///
    /// # Errors
    /// When the connection has failed.
    pub async fn peek(&self, space: &mut [u8]) -> io::Result<usize> {
        match &self.stream {
            Stream::Plain(stream) => stream.peek(space).await,
            Stream::Tls(stream) => stream.get_ref().0.readable().await.map(|()| 0),
        }
    }

    /// The counts, to be looked at from outside.
    pub fn traffic(&self) -> Arc<Traffic> {
        self.traffic.clone()
    }

    /// What a write came to. One that failed stays pending until reading has told all; the reader is
    /// woken by what made the write fail. Where nobody reads yet, as before the preface of HTTP/2 is out,
    /// nobody would be woken.
    fn wrote(&self, outcome: io::Result<usize>) -> Poll<io::Result<usize>> {
        match outcome {
            Ok(taken) => {
                self.traffic.written.fetch_add(taken as u64, Ordering::Relaxed);
                Poll::Ready(Ok(taken))
            }
            Err(_) if self.is_being_read && !self.is_read_out => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.is_being_read = true;
        let before = buf.filled().len();
        let outcome = ready!(match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_read(cx, buf),
        });
        let taken = buf.filled().len() - before;
        self.is_read_out |= taken == 0;
        self.traffic.read.fetch_add(taken as u64, Ordering::Relaxed);
        Poll::Ready(outcome)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = ready!(match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, buf),
        });
        self.wrote(outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = ready!(match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_write_vectored(cx, bufs),
        });
        self.wrote(outcome)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            Stream::Plain(stream) => stream.is_write_vectored(),
            Stream::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;

    /// A socket that its peer has reset.
    async fn reset() -> Socket {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        socket2::SockRef::from(&accepted).set_linger(Some(Duration::ZERO)).unwrap();
        drop(accepted);
        stream.readable().await.unwrap();
        let mark = Arc::new(OwnSockets::default()).mark(&stream);
        Socket::plain(stream, listener.local_addr().unwrap(), mark)
    }

    #[tokio::test]
    async fn a_write_that_fails_before_anyone_reads_is_told_at_once() {
        let mut socket = reset().await;
        let written = timeout(Duration::from_secs(5), socket.write_all(b"preface")).await;
        assert!(written.expect("nobody else would tell").is_err());
    }

    #[tokio::test]
    async fn a_write_that_fails_beside_a_reader_waits_for_what_it_reads() {
        let mut socket = reset().await;
        socket.is_being_read = true;
        assert!(timeout(Duration::from_millis(20), socket.write(b"x")).await.is_err());
        // The failed write has taken the reset; what is left is the end.
        assert_eq!(socket.read(&mut [0; 1]).await.unwrap_or(0), 0);
        assert!(socket.write(b"x").await.is_err());
    }

    #[tokio::test]
    async fn a_connection_is_ours_by_both_of_its_ends_and_while_it_is_open() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (near, far) = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
        let elsewhere = SocketAddr::new(far.ip(), 1);

        let sockets = Arc::new(OwnSockets::default());
        let mark = sockets.mark(&stream);
        assert!(sockets.holds(near, far));
        assert!(!sockets.holds(near, elsewhere), "an agent that shares our port was taken for us");
        drop(mark);
        assert!(!sockets.holds(near, far));
    }
}
