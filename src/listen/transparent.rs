//! Connections that a redirect rule sent here: the client knows of no proxy and meant another address.
//!
//! The name that the client gives, in `Host` or in its TLS handshake, selects the policy, and nobody
//! vouches for it. What is dialled is the address that it meant, so that a name which a client makes up
//! reaches no other address than it would have without us. The exception is a policy with an `endpoint`:
//! its requests go there, from whichever client they come.
//!
//! Who speaks first is not known beforehand. A client that is silent for a moment is connected, so that
//! a server that greets is heard; one that then speaks after all is served as if it had at once.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use tokio::time::timeout;

use super::connect::{self, Asked};
use super::connection::{Inbound, Takeover, Way};
use super::sniff::Sniff;
use super::socket::ClientSocket;
use super::tunnel::Opened;
use super::{accept, connection, hello, intercept, tunnel};
use crate::pipeline::Proxy;
use crate::policy::deadline::Arrival;
use crate::tls::hello::HelloReader;
use crate::upstream::egress;
use crate::wire::authority::Authority;

/// Serves a client at `from` that meant to connect `to`.
pub async fn serve(mut client: ClientSocket, from: SocketAddr, to: SocketAddr, proxy: Arc<Proxy>) {
    let heard = match timeout(tunnel::CLIENT_FIRST, tunnel::client_speaks(&mut client)).await {
        Ok(Ok(heard)) => Some(heard),
        Ok(Err(_)) => return,
        Err(_) => None,
    };
    // A dial of ours that was caught can be accepted here before it is known as ours there. It is by the
    // time that it speaks, or that this wait is over.
    if accept::is_loop(&proxy, from, to) {
        return;
    }
    let (heard, opened) = match heard {
        Some(heard) => (heard, None),
        None => match still_silent(&mut client, to, &proxy).await {
            Some(next) => next,
            None => return client.reset_on_close(),
        },
    };
    match heard {
        Sniff::Http => {
            opened.into_iter().for_each(void);
            let way = Way::Redirected(Authority::from_ip(to.ip(), to.port()));
            connection::serve(client, Inbound { proxy, way }).await;
        }
        Sniff::Tls => {
            opened.into_iter().for_each(void);
            tls(client, to, proxy).await;
        }
        Sniff::Other | Sniff::Undecided => {
            let opened = match opened {
                Some(opened) => Some(opened),
                None => connect(&proxy, to).await,
            };
            match opened {
                Some(Opened { socket, held, .. }) => tunnel::copy(client, socket, Bytes::new(), held).await,
                None => client.reset_on_close(),
            }
        }
    }
}

/// Connects a client that has not spoken yet, and listens on: what it says after all, and its connection;
/// `None` when it gets none. Where the bare address is closed no server is to be heard, but the name that
/// the client has yet to say may open it: a runtime that starts cold can take its time for that.
async fn still_silent(
    client: &mut ClientSocket,
    to: SocketAddr,
    proxy: &Arc<Proxy>,
) -> Option<(Sniff, Option<Opened>)> {
    let config = proxy.snapshot();
    if egress::check_bare(&config.egress, to).is_err() {
        let heard = timeout(config.limits.header_timeout, tunnel::client_speaks(client)).await;
        return Some((heard.ok()?.ok()?, None));
    }
    let opened = connect(proxy, to).await?;
    let heard = tunnel::listen_in(client, &opened.socket, &opened.held).await.ok()?;
    Some((heard, Some(opened)))
}

/// Serves a client whose hello is on its way: under the policy of the host that it names.
async fn tls(mut client: ClientSocket, to: SocketAddr, proxy: Arc<Proxy>) {
    let address = Authority::from_ip(to.ip(), to.port());
    let limit = proxy.snapshot().limits.header_timeout;
    let authority = match timeout(limit, hello::server_name(&mut client, &mut HelloReader::default())).await {
        Ok(Ok(Some(name))) => Authority::parse(&name, Some(to.port())).unwrap_or(address),
        // What is no hello after all is the upstream's to judge.
        Ok(Ok(None) | Err(_)) => address,
        Err(_) => return,
    };
    let (asked, ledger) = Asked::tacitly(&proxy, authority, Some(to.ip()), Arrival::now());
    match connect::open(&proxy, proxy.snapshot(), asked, ledger).await {
        // What was heard is TLS; nothing is waited for again.
        Ok(Takeover::Intercept(inside)) => intercept::terminate(client, *inside, proxy).await,
        Ok(next) => next.run(client, proxy).await,
        // There is nobody to tell: the client believes it has its server.
        Err(_) => client.reset_on_close(),
    }
}

/// A connection to where the client meant to go, under the policy of the bare address; `None` when it
/// cannot or may not be had.
async fn connect(proxy: &Arc<Proxy>, to: SocketAddr) -> Option<Opened> {
    let authority = Authority::from_ip(to.ip(), to.port());
    let (asked, ledger) = Asked::tacitly(proxy, authority, Some(to.ip()), Arrival::now());
    connect::connect(proxy, &proxy.snapshot(), asked, ledger).await.ok()
}

/// Gives up a connection that its client had no use for.
fn void(opened: Opened) {
    opened.held.ledger.void();
}
