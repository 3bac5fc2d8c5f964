//! Connections that a redirect rule sent here: the client knows of no proxy and meant another address.
//!
//! That address is what is dialled, whatever name the client gives: the name, from `Host` or the TLS
//! handshake, only selects the policy. So a name that a client makes up reaches nothing that it could
//! not have reached without us.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, Method};
use tokio::time::timeout;

use super::connect::{self, Asked};
use super::connection::{Inbound, Takeover, Way};
use super::sniff::Sniff;
use super::socket::ClientSocket;
use super::{connection, hello, tunnel};
use crate::call::RequestId;
use crate::pipeline::Proxy;
use crate::pipeline::ledger::Ledger;
use crate::policy::deadline::Arrival;
use crate::wire::authority::Authority;

/// Clients that speak first do so at once; after this, one is connected to where it meant to go, so
/// that a server that speaks first is heard.
const CLIENT_FIRST: Duration = Duration::from_millis(300);

/// Serves a client that meant to connect `to`.
pub async fn serve(mut client: ClientSocket, to: SocketAddr, proxy: Arc<Proxy>) {
    let address = Authority::from_ip(to.ip(), to.port());
    let authority = match timeout(CLIENT_FIRST, tunnel::client_speaks(&mut client)).await {
        Ok(Ok(Sniff::Http)) => {
            return connection::serve(client, Inbound { proxy, way: Way::Redirected(address) }).await;
        }
        Ok(Ok(Sniff::Tls)) => {
            let limit = proxy.snapshot().limits.header_timeout;
            match timeout(limit, hello::server_name(&mut client)).await {
                Ok(Ok(Some(name))) => Authority::parse(&name, Some(to.port())).unwrap_or(address),
                // What is no hello after all is the upstream's to judge.
                Ok(Ok(None) | Err(_)) => address,
                Err(_) => return,
            }
        }
        Ok(Ok(Sniff::Other | Sniff::Undecided)) | Err(_) => address,
        Ok(Err(_)) => return,
    };
    let arrival = Arrival::now();
    let ledger = Ledger::open(&proxy, arrival, RequestId::Ours(fastrand::u64(..)), Some(Method::CONNECT));
    let asked = Asked { headers: &HeaderMap::new(), authority, pinned: Some(to.ip()), arrival };
    match connect::open(&proxy, proxy.snapshot(), asked, ledger).await {
        // What was heard is TLS; nothing is waited for again.
        Ok(Takeover::Intercept(inside)) if !client.ahead().is_empty() => {
            super::intercept::terminate(client, *inside, proxy).await;
        }
        Ok(next) => next.run(client, proxy).await,
        // There is nobody to tell: the client believes it has its server.
        Err(_) => client.reset_on_close(),
    }
}
