//! Taking connections: bounded in number, from whom the policy lets in, one task each.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep};

use super::connection::{self, Inbound, Way};
use super::socket::ClientSocket;
use super::transparent;
use crate::pipeline::Proxy;
use crate::telemetry::metrics::Listener;
use crate::upstream::egress;

/// The first pause after an accept that failed for want of something; it doubles up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LAST_PAUSE: Duration = Duration::from_secs(1);
/// At most one message a second about failing accepts.
const MESSAGE_EVERY: Duration = Duration::from_secs(1);

/// A port and who may use it.
pub struct Door {
    /// The port.
    pub listener: TcpListener,
    /// What comes there.
    pub kind: Listener,
    /// Who may connect beside loopback.
    pub clients: Vec<IpNet>,
    /// A place for each connection at once. With none free, clients wait in the kernel's backlog:
    /// closing them unanswered would make some of them reconnect without end.
    pub places: Arc<Semaphore>,
}

/// Accepts connections until the future is dropped.
pub async fn run(door: Door, proxy: Arc<Proxy>) {
    let mut pause = FIRST_PAUSE;
    let mut last_message: Option<Instant> = None;
    loop {
        // Waited for but not held: a place that nobody has come for counts as free.
        let Ok(_) = door.places.acquire().await else { return };
        match door.listener.accept().await {
            Ok((stream, peer)) => {
                pause = FIRST_PAUSE;
                let Ok(place) = door.places.clone().acquire_owned().await else { return };
                admit(&door, &proxy, stream, peer, place);
            }
            // The client was gone before we got to it: nothing is wrong here.
            Err(error) if is_clients_own(&error) => {}
            Err(error) => {
                let now = Instant::now();
                if last_message.is_none_or(|last| now - last >= MESSAGE_EVERY) {
                    tracing::warn!(%error, "cannot accept connections; trying again");
                    last_message = Some(now);
                }
                // Out of descriptors or memory: accepting in a loop would only burn the processor.
                sleep(pause).await;
                pause = (pause * 2).min(LAST_PAUSE);
            }
        }
    }
}

fn admit(door: &Door, proxy: &Arc<Proxy>, stream: TcpStream, peer: SocketAddr, place: OwnedSemaphorePermit) {
    // A port that is open to both families shows IPv4 clients in mapped form.
    let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
    if !may_connect(peer.ip(), door.kind, &door.clients) {
        tracing::debug!(%peer, "connection from outside listen.clients closed");
        return;
    }
    let meant = original_destination(&stream);
    if meant.is_some_and(|meant| is_loop(proxy, peer, meant)) {
        return;
    }
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "client left before its connection was served");
        return;
    }
    let kind = door.kind;
    let redirected = match (kind, meant) {
        (Listener::Transparent, Some(to)) if !proxy.registry().dialer().is_own(to) => Some(to),
        (Listener::Transparent, _) => {
            tracing::warn!(%peer, "a connection to the transparent port that was not redirected; closed");
            return;
        }
        (Listener::Proxy | Listener::Admin, _) => None,
    };
    let proxy = proxy.clone();
    tokio::spawn(async move {
        let held = (place, proxy.metrics().connection(kind));
        let client = ClientSocket::from(stream);
        match redirected {
            // Boxed: its room would be part of every idle connection.
            Some(to) => Box::pin(transparent::serve(client, peer, to, proxy)).await,
            None => connection::serve(client, Inbound { proxy, way: Way::Proxy }).await,
        }
        drop(held);
    });
}

/// Whether the connection from `peer`, which `meant` to go elsewhere, is one of our own that a redirect rule
/// has caught.
pub fn is_loop(proxy: &Proxy, peer: SocketAddr, meant: SocketAddr) -> bool {
    let is_ours = proxy.registry().dialer().own_sockets().holds(peer, meant);
    if is_ours {
        tracing::error!(%peer, %meant, "loop: a connection of our own was redirected back to us; closed");
    }
    is_ours
}

/// Where the client meant to go; another place than this port when a redirect rule sent it here. `None`
/// where the kernel tracks no connections, so that there is no such rule.
fn original_destination(stream: &TcpStream) -> Option<SocketAddr> {
    let socket = SockRef::from(stream);
    let meant = match stream.local_addr().ok()?.ip().to_canonical() {
        IpAddr::V4(_) => socket.original_dst_v4(),
        IpAddr::V6(_) => socket.original_dst_v6(),
    };
    meant.ok()?.as_socket()
}

/// An agent that is redirected comes from the address that it took to go outside, not from loopback, though
/// it is on this machine all the same.
fn may_connect(peer: IpAddr, kind: Listener, clients: &[IpNet]) -> bool {
    peer.is_loopback()
        || clients.iter().any(|range| range.contains(&peer))
        || (kind == Listener::Transparent && egress::is_local(peer))
}

fn is_clients_own(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_and_the_listed_may_connect() {
        let clients = ["10.0.0.0/8".parse().unwrap()];
        for (peer, may) in [("127.0.0.1", true), ("::1", true), ("10.1.2.3", true), ("192.0.2.1", false)] {
            for kind in [Listener::Proxy, Listener::Transparent] {
                assert_eq!(may_connect(peer.parse().unwrap(), kind, &clients), may, "{peer}");
            }
        }
        assert!(!may_connect("10.1.2.3".parse().unwrap(), Listener::Proxy, &[]));
    }
}
