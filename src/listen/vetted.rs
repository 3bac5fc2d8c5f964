//! The client of a tunnel under an allow-list: a tunnel to an allowed name must not become one to another
//! host behind the same front, which a client could reach by naming it in its TLS handshake.
//!
//! What the client says first is looked at whenever it comes, since whoever wants past the list can wait.
//! The look is part of reading from the client, so that an upstream that speaks first is copied meanwhile.
//! A tunnel to an address has no name to hold the handshake against: the list has the address itself.

use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use super::hello;
use super::sniff::Sniff;
use super::socket::ClientSocket;
use super::tunnel::client_speaks;
use crate::tls::hello::HelloReader;
use crate::wire::authority::Authority;

/// A client whose first words are looked at before they are passed on.
pub struct Vetted {
    client: ClientSocket,
    /// `None` once they may pass.
    vetting: Option<Box<Vetting>>,
}

struct Vetting {
    authority: Authority,
    reader: HelloReader,
    patience: Duration,
    /// Runs from the first byte on.
    timer: Option<Pin<Box<Sleep>>>,
}

impl Vetted {
    /// The client of a tunnel to `authority`, which has `patience` for all of its hello once that has begun.
    pub fn new(client: ClientSocket, authority: Authority, patience: Duration) -> Self {
        let vetting = Vetting { authority, reader: HelloReader::default(), patience, timer: None };
        Self { client, vetting: Some(Box::new(vetting)) }
    }
}

impl Vetting {
    /// Ready when what the client has begun to say may pass.
    fn poll(&mut self, cx: &mut Context<'_>, client: &mut ClientSocket) -> Poll<io::Result<()>> {
        // Both looks leave what they have read ahead in the socket, so they can be made anew each time.
        let heard = pin!(client_speaks(client)).poll(cx);
        let named = match heard {
            Poll::Ready(heard) => match heard? {
                Sniff::Tls => pin!(hello::server_name(client, &mut self.reader)).poll(cx),
                Sniff::Http | Sniff::Other | Sniff::Undecided => Poll::Ready(Ok(None)),
            },
            Poll::Pending => Poll::Pending,
        };
        match named {
            Poll::Ready(Ok(Some(name))) if name != self.authority.host() => {
                let authority = &self.authority;
                tracing::warn!(%authority, name, "a tunnel's TLS names another host under an allow-list; closed");
                Poll::Ready(Err(io::ErrorKind::PermissionDenied.into()))
            }
            Poll::Ready(named) => Poll::Ready(named.map(drop)),
            Poll::Pending if client.ahead().is_empty() => Poll::Pending,
            Poll::Pending => {
                let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(self.patience)));
                ready!(timer.as_mut().poll(cx));
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
        }
    }
}

impl AsyncRead for Vetted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { client, vetting } = &mut *self;
        if let Some(own) = vetting {
            ready!(own.poll(cx, client))?;
            *vetting = None;
        }
        Pin::new(client).poll_read(cx, buf)
    }
}

impl AsyncWrite for Vetted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.client).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.client).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.client).poll_shutdown(cx)
    }
}
