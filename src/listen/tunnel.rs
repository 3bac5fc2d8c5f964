//! Tunnels: what a CONNECT or an upgrade leaves of the proxy is the copying of bytes both ways.
//!
//! Before a CONNECT's bytes are copied they are looked at: HTTP in clear text is served as HTTP, with
//! all its policies. A client that says nothing for a second, or an upstream that speaks first, gets
//! the plain tunnel.

use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf, copy_bidirectional_with_sizes};
use tokio::time::{Instant, sleep, sleep_until};

use super::connection::{self, Inbound, Way};
use super::hello;
use super::intercept::{self, Inside};
use super::sniff::{Sniff, sniff};
use super::socket::ClientSocket;
use crate::pipeline::Proxy;
use crate::pipeline::answer::{Held, Upgraded};
use crate::policy::deadline::Arrival;
use crate::upstream::connection::Origin;
use crate::upstream::http1::Idle;
use crate::upstream::socket::Socket;
use crate::wire::authority::Authority;

/// How long a client may take to say what it speaks.
const SNIFF_WAIT: Duration = Duration::from_secs(1);
/// For each direction. A tunnel costs both from its first byte to its end.
const COPY_BUFFER: usize = 32 * 1024;

/// A tunnel that is ready to begin.
pub struct Opened {
    /// The upstream's end.
    pub socket: Socket,
    /// Where it leads.
    pub authority: Authority,
    /// The address that the client brought along.
    pub pinned: Option<IpAddr>,
    /// What holds while it is open.
    pub held: Held,
}

/// Runs what a CONNECT has opened: a tunnel, or requests that can be read.
pub async fn opened(mut client: ClientSocket, opened: Opened, proxy: Arc<Proxy>) {
    let Opened { socket, authority, pinned, held } = opened;
    let Ok(heard) = listen_in(&mut client, &socket).await else { return };
    match heard {
        Sniff::Http => {
            // Its requests pass the guards one by one, and the first finds this connection idle.
            let lane = held.lane.clone();
            drop(held.permit);
            held.ledger.void();
            let origin = Origin { peer: socket.peer(), tls: None, is_pinned: pinned.is_some() };
            lane.upstream.pool.put(Idle::new(socket, origin), Instant::now());
            connection::serve(client, Inbound { proxy, way: Way::Tunnel(authority) }).await;
        }
        Sniff::Tls if intercept::applies(&proxy, &held.lane) => {
            // Nor does this tunnel count: its requests take their places one by one.
            let lane = held.lane.clone();
            drop(held.permit);
            held.ledger.void();
            let config = lane.config().clone();
            drop(socket);
            let inside = Inside { authority, pinned, lane, config, arrival: Arrival::now() };
            intercept::terminate(client, inside, proxy).await;
        }
        Sniff::Tls if !may_pass(&mut client, &authority, &held).await => {
            tracing::warn!(%authority, "a tunnel's TLS names another host under an allow-list; closed");
        }
        _ => copy(client, socket, Bytes::new(), held).await,
    }
}

/// Under an allow-list, a tunnel to an allowed name must not become one to another host behind the same
/// front.
async fn may_pass(client: &mut ClientSocket, authority: &Authority, held: &Held) -> bool {
    if !held.lane.config().egress.deny_by_default {
        return true;
    }
    match hello::server_name(client).await {
        Ok(Some(name)) => name == authority.host(),
        Ok(None) => true,
        Err(_) => false,
    }
}

/// Runs the protocol that both ends have changed to.
pub async fn upgraded(client: ClientSocket, upgraded: Upgraded) {
    let Upgraded { exchange, held, .. } = upgraded;
    // An upstream that has gone meanwhile shows as a tunnel that closes at once.
    if let Ok((socket, early)) = exchange.into_upgraded().await {
        copy(client, socket, early, held).await;
    }
}

/// Reads the client's first bytes ahead, until they tell what they are; gives up after a second, or
/// when the upstream speaks first.
async fn listen_in(client: &mut ClientSocket, upstream: &Socket) -> io::Result<Sniff> {
    tokio::select! {
        biased;
        heard = client_speaks(client) => heard,
        _ = upstream.readable() => Ok(Sniff::Other),
        () = sleep(SNIFF_WAIT) => Ok(Sniff::Other),
    }
}

/// What the client's first bytes are, once they tell. Cancel-safe.
pub async fn client_speaks(client: &mut ClientSocket) -> io::Result<Sniff> {
    loop {
        match sniff(client.ahead()) {
            Sniff::Undecided => {}
            verdict => return Ok(verdict),
        }
        if client.hear().await?.is_none() {
            return Ok(Sniff::Other);
        }
    }
}

/// Copies both ways until both ends have closed, one has failed, nothing has moved for too long, or the
/// process ends.
async fn copy(client: ClientSocket, upstream: Socket, early: Bytes, mut held: Held) {
    let (idle, half_closed_idle) = {
        let stages = held.lane.stages();
        (stages.tunnel_idle, stages.stream_idle)
    };
    let meter =
        Meter { epoch: Instant::now(), moved_ms: AtomicU64::new(0), is_half_closed: AtomicBool::new(false) };
    let mut client = Metered { io: client, meter: &meter };
    let mut upstream = Metered { io: upstream, meter: &meter };
    let copied = async {
        client.write_all(&early).await?;
        copy_bidirectional_with_sizes(&mut client, &mut upstream, COPY_BUFFER, COPY_BUFFER).await
    };
    tokio::pin!(copied);
    let proxy = held.ledger.proxy().clone();
    let ending = proxy.ending();
    tokio::pin!(ending);
    let limit = || if meter.is_half_closed.load(Ordering::Relaxed) { half_closed_idle } else { idle };
    loop {
        let due = meter.last_moved() + limit();
        tokio::select! {
            biased;
            copied = &mut copied => {
                if let Ok((_, down)) = copied {
                    held.ledger.sent(down as usize + early.len());
                }
                return;
            }
            () = &mut ending => return,
            () = sleep_until(due.min(Instant::now() + half_closed_idle)) => {
                if Instant::now() >= meter.last_moved() + limit() {
                    return;
                }
            }
        }
    }
}

/// When a byte last moved, in either direction.
struct Meter {
    epoch: Instant,
    moved_ms: AtomicU64,
    is_half_closed: AtomicBool,
}

impl Meter {
    fn last_moved(&self) -> Instant {
        self.epoch + Duration::from_millis(self.moved_ms.load(Ordering::Relaxed))
    }

    fn read(&self, bytes: usize) {
        if bytes == 0 {
            self.is_half_closed.store(true, Ordering::Relaxed);
        }
        let ms = Instant::now().saturating_duration_since(self.epoch).as_millis() as u64;
        self.moved_ms.store(ms, Ordering::Relaxed);
    }
}

struct Metered<'a, S> {
    io: S,
    meter: &'a Meter,
}

impl<S: AsyncRead + Unpin> AsyncRead for Metered<'_, S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
        self.meter.read(buf.filled().len() - before);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Metered<'_, S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
