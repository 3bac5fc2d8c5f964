//! A client's end of a connection as bytes, whatever carries it: TCP, TLS that ends here, or a stream of
//! an HTTP/2 connection. What was read too early can be put back.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use h2::{Reason, RecvStream, SendStream};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

/// A client's socket, with bytes that were read ahead of it.
pub struct ClientSocket {
    stream: Stream,
    ahead: BytesMut,
}

enum Stream {
    Tcp(TcpStream),
    Tls(Box<TlsStream<ClientSocket>>),
    Http2(Box<Http2Stream>),
}

impl Stream {
    /// Cancel-safe.
    async fn read(&mut self, into: &mut BytesMut) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read_buf(into).await,
            Self::Tls(stream) => stream.read_buf(into).await,
            Self::Http2(stream) => stream.read_buf(into).await,
        }
    }
}

impl From<TcpStream> for ClientSocket {
    fn from(stream: TcpStream) -> Self {
        Self { stream: Stream::Tcp(stream), ahead: BytesMut::new() }
    }
}

impl From<TlsStream<Self>> for ClientSocket {
    fn from(stream: TlsStream<Self>) -> Self {
        Self { stream: Stream::Tls(Box::new(stream)), ahead: BytesMut::new() }
    }
}

impl From<Http2Stream> for ClientSocket {
    fn from(stream: Http2Stream) -> Self {
        Self { stream: Stream::Http2(Box::new(stream)), ahead: BytesMut::new() }
    }
}

impl ClientSocket {
    /// What a look ahead reads at first. Small, since an idle connection keeps it.
    const LOOK: usize = 1024;
    /// What one reads at least that goes on.
    const LOOK_ON: usize = 8 * 1024;

    /// Puts back what was read too early. Bytes of no length are dropped, as they can hold the whole
    /// buffer that they were read into.
    pub fn unread(&mut self, bytes: Bytes) {
        if bytes.is_empty() {
            return;
        }
        let later = std::mem::replace(&mut self.ahead, bytes.into());
        self.ahead.extend_from_slice(&later);
    }

    /// Resolves when there is something to read, the end included. TCP is peeked, since the runtime
    /// takes a new socket for readable until a read has found nothing. Cancel-safe.
    pub async fn readable(&mut self) -> io::Result<()> {
        match &self.stream {
            _ if !self.ahead.is_empty() => Ok(()),
            Stream::Tcp(stream) => stream.peek(&mut [0]).await.map(drop),
            Stream::Tls(_) | Stream::Http2(_) => self.hear().await.map(drop),
        }
    }

    /// What the client has said that nobody has read yet, up to the length of `space`; waits for the
    /// first of it. Empty at the end. Cancel-safe.
    pub async fn peek<'a>(&'a mut self, space: &'a mut [u8]) -> io::Result<&'a [u8]> {
        if self.ahead.is_empty() {
            if let Stream::Tcp(stream) = &self.stream {
                let heard = stream.peek(space).await?;
                return Ok(&space[..heard]);
            }
            self.hear().await?;
        }
        Ok(&self.ahead[..self.ahead.len().min(space.len())])
    }

    /// Reads more ahead: all that was read and not taken, or `None` at the end. Cancel-safe.
    pub async fn hear(&mut self) -> io::Result<Option<&[u8]>> {
        let read = if self.ahead.is_empty() {
            // Room of its own, which goes with a look that is given up.
            let mut heard = BytesMut::with_capacity(Self::LOOK);
            let read = self.stream.read(&mut heard).await?;
            self.ahead = heard;
            read
        } else {
            self.ahead.reserve(Self::LOOK_ON);
            self.stream.read(&mut self.ahead).await?
        };
        if read == 0 {
            return Ok(None);
        }
        Ok(Some(&self.ahead))
    }

    /// What was read ahead.
    pub fn ahead(&self) -> &[u8] {
        &self.ahead
    }

    /// Makes the coming close a reset, for an answer whose end would otherwise look whole.
    pub fn reset_on_close(&mut self) {
        match &mut self.stream {
            // Without it the close is an ordinary one: nothing better can be done.
            Stream::Tcp(stream) => drop(SockRef::from(&*stream).set_linger(Some(Duration::ZERO))),
            Stream::Tls(stream) => stream.get_mut().0.reset_on_close(),
            Stream::Http2(stream) => stream.outgoing.send_reset(Reason::INTERNAL_ERROR),
        }
    }
}

impl AsyncRead for ClientSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.ahead.is_empty() {
            return match &mut self.stream {
                Stream::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
                Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_read(cx, buf),
                Stream::Http2(stream) => Pin::new(stream.as_mut()).poll_read(cx, buf),
            };
        }
        let taken = self.ahead.len().min(buf.remaining());
        buf.put_slice(&self.ahead[..taken]);
        self.ahead.advance(taken);
        if self.ahead.is_empty() {
            self.ahead = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ClientSocket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Stream::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, buf),
            Stream::Http2(stream) => Pin::new(stream.as_mut()).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Stream::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_write_vectored(cx, bufs),
            Stream::Http2(stream) => Pin::new(stream.as_mut()).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            Stream::Tcp(stream) => stream.is_write_vectored(),
            Stream::Tls(stream) => stream.is_write_vectored(),
            Stream::Http2(_) => false,
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
            Stream::Http2(_) => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
            Stream::Http2(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
        }
    }
}

/// One HTTP/2 stream that carries bytes of another protocol (RFC 9113 section 8.5, RFC 8441).
pub struct Http2Stream {
    incoming: RecvStream,
    outgoing: SendStream<Bytes>,
    /// Came in a frame that was larger than the reader's buffer.
    rest: Bytes,
}

impl Http2Stream {
    /// Both directions of a stream.
    pub fn new(incoming: RecvStream, outgoing: SendStream<Bytes>) -> Self {
        Self { incoming, outgoing, rest: Bytes::new() }
    }
}

impl AsyncRead for Http2Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.rest.is_empty() {
            match ready!(self.incoming.poll_data(cx)) {
                Some(data) => self.rest = data.map_err(broken)?,
                None => return Poll::Ready(Ok(())),
            }
        }
        let taken = self.rest.len().min(buf.remaining());
        buf.put_slice(&self.rest.split_to(taken));
        self.incoming.flow_control().release_capacity(taken).map_err(broken)?;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Http2Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.outgoing.reserve_capacity(buf.len());
        let room = match self.outgoing.capacity() {
            0 => match ready!(self.outgoing.poll_capacity(cx)) {
                Some(room) => room.map_err(broken)?,
                None => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
            },
            room => room,
        };
        let taken = room.min(buf.len());
        self.outgoing.send_data(Bytes::copy_from_slice(&buf[..taken]), false).map_err(broken)?;
        Poll::Ready(Ok(taken))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.outgoing.send_data(Bytes::new(), true).map_err(broken))
    }
}

fn broken(error: h2::Error) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, error)
}
