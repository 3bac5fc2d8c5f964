//! Tunnels: what a CONNECT or an upgrade leaves of the proxy is the copying of bytes both ways.
//!
//! Before a CONNECT's bytes are copied they are looked at: HTTP in clear text is served as HTTP, with
//! all its policies. An upstream that speaks first gets the plain tunnel.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, sleep, timeout};

use super::connection::{self, Inbound, Way};
use super::intercept::{self, Inside};
use super::relay::{Limits, Relay};
use super::sniff::{FRAME_HEAD, Sniff, is_settings, sniff};
use super::socket::ClientSocket;
use super::vetted::Vetted;
use crate::pipeline::Proxy;
use crate::pipeline::answer::{Held, Upgraded};
use crate::policy::deadline::Arrival;
use crate::upstream::connection::Origin;
use crate::upstream::http1::Idle;
use crate::upstream::socket::Socket;
use crate::wire::authority::Authority;

/// Clients that speak first do so at once. One that has not spoken after this is connected to where it wants
/// to go, so that a server that speaks first is heard within the second that a client may keep silent.
pub const CLIENT_FIRST: Duration = Duration::from_millis(300);

/// How long a client may take from its first byte until it is known what it speaks.
const SNIFF_WAIT: Duration = Duration::from_secs(1);

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
    let Ok(heard) = listen_in(&mut client, &socket, &held).await else { return };
    match heard {
        Sniff::Http => {
            // Its requests pass the guards one by one, and the first finds this connection idle.
            let lane = held.lane.clone();
            drop(held.permit);
            held.ledger.void();
            // Where the policy has an endpoint they go there, and this host must see none of them.
            if !lane.is_elsewhere() {
                let (to, peer) = (lane.dialled().clone(), socket.peer());
                let origin = Origin { to, peer, tls: None, is_pinned: pinned.is_some() };
                lane.upstream.pool.put(Idle::new(socket, origin), Instant::now());
            }
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
        _ if held.lane.config().egress.deny_by_default && authority.ip().is_none() => {
            let patience = held.lane.config().limits.header_timeout;
            copy(Vetted::new(client, authority, patience), socket, Bytes::new(), held).await;
        }
        _ => copy(client, socket, Bytes::new(), held).await,
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

/// Reads the client's first bytes ahead, until they tell what they are: at most a second, once there are any, or
/// when the upstream speaks first. One of HTTP/2 does so too, and is no less one to be spoken to in
/// requests: its client's preface is on its way (RFC 9113 section 3.4), and gets a second for that. As long as neither speaks there is nothing to
/// copy, so a client that is slow to begin, as in a pod that gets no processor, loses none of its policy.
///
/// # Errors
/// When the client's connection has failed, both have been silent for the tunnel's idle bound, or the process ends.
pub async fn listen_in(client: &mut ClientSocket, upstream: &Socket, held: &Held) -> io::Result<Sniff> {
    let proxy = held.ledger.proxy();
    let client_begins = async {
        client.readable().await?;
        timeout(SNIFF_WAIT, client_speaks(client)).await.unwrap_or(Ok(Sniff::Other))
    };
    let upstream_speaks = async {
        let mut first = [0; FRAME_HEAD];
        match upstream.peek(&mut first).await {
            Ok(FRAME_HEAD) if is_settings(first) => sleep(SNIFF_WAIT).await,
            _ => {}
        }
    };
    tokio::select! {
        biased;
        heard = client_begins => heard,
        () = upstream_speaks => Ok(Sniff::Other),
        () = sleep(held.lane.stages().tunnel_idle) => Err(io::ErrorKind::TimedOut.into()),
        () = proxy.ending() => Err(io::ErrorKind::Interrupted.into()),
    }
}

/// What the client's first bytes are, once they tell. Cancel-safe.
///
/// # Errors
/// When the client's connection has failed.
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
/// process ends. What the upstream has sent `early` goes first.
pub async fn copy<C>(mut client: C, mut upstream: Socket, early: Bytes, held: Held)
where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let stages = held.lane.stages();
    let limits = Limits { idle: stages.tunnel_idle, half_closed: stages.stream_idle };
    let proxy = held.ledger.proxy().clone();
    let mut tunnel = Open { relay: Relay::new(early), held };
    tokio::select! {
        biased;
        // Both ends are told all the same, whichever way it ended.
        _ = tunnel.relay.run(&mut client, &mut upstream, limits) => {}
        () = proxy.ending() => {}
    }
}

/// A tunnel that is open. It is counted when it is dropped, since that is how it ends where its client's
/// HTTP/2 connection goes.
struct Open {
    relay: Relay,
    held: Held,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.held.ledger.sent(self.relay.bytes_down() as usize);
    }
}
