//! Interception: a client's TLS ends here, under a certificate of the pod's own CA, and the requests
//! inside pass every policy.
//!
//! The CONNECT is answered before anything is dialled: an error that refuses it shows in almost no
//! client, while one inside the TLS is an ordinary answer. What turns out to be no TLS is treated as in
//! any tunnel, whose upstream is dialled then.

use std::net::IpAddr;
use std::sync::Arc;

use rustls::server::Acceptor;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::LazyConfigAcceptor;

use super::connect::{self, Asked};
use super::connection::{Inbound, Takeover, Way};
use super::sniff::Sniff;
use super::socket::ClientSocket;
use super::{connection, hello, http2, tunnel};
use crate::config::Config;
use crate::pipeline::Proxy;
use crate::policy::deadline::Arrival;
use crate::tls::hello::{HelloReader, named};
use crate::tls::interceptor::is_declined;
use crate::upstream::registry::Lane;
use crate::wire::authority::Authority;

/// A tunnel whose inside is to be read.
pub struct Inside {
    /// Where it leads.
    pub authority: Authority,
    /// The address that the client brought along.
    pub pinned: Option<IpAddr>,
    /// The policy that says so.
    pub lane: Lane,
    /// The snapshot that it is of.
    pub config: Arc<Config>,
    /// When it was asked for.
    pub arrival: Arrival,
}

/// Whether TLS to this upstream ends here.
pub fn applies(proxy: &Proxy, lane: &Lane) -> bool {
    lane.policy().intercept
        && proxy.interceptor().is_some_and(|own| own.serves(lane.upstream.authority().host()))
}

/// Runs a tunnel whose client has been told that it has one.
pub async fn listen_first(mut client: ClientSocket, inside: Inside, proxy: Arc<Proxy>) {
    match timeout(tunnel::CLIENT_FIRST, tunnel::client_speaks(&mut client)).await {
        Ok(Ok(heard @ (Sniff::Tls | Sniff::Http))) => serve(heard, client, inside, proxy).await,
        Ok(Err(_)) => {}
        // It has left without a word, so there is nothing to dial for.
        Ok(Ok(_)) if client.ahead().is_empty() => {}
        Ok(Ok(Sniff::Other | Sniff::Undecided)) | Err(_) => connect_late(client, inside, proxy).await,
    }
}

/// Serves the requests that a client has begun to send, in TLS or in clear text.
async fn serve(heard: Sniff, client: ClientSocket, inside: Inside, proxy: Arc<Proxy>) {
    match heard {
        Sniff::Tls => terminate(client, inside, proxy).await,
        _ => connection::serve(client, Inbound { proxy, way: Way::Tunnel(inside.authority) }).await,
    }
}

/// Opens the tunnel that the client believes it has.
async fn connect_late(mut client: ClientSocket, inside: Inside, proxy: Arc<Proxy>) {
    let (asked, ledger) = Asked::tacitly(&proxy, inside.authority.clone(), inside.pinned, inside.arrival);
    if let Ok(opened) = connect::connect(&proxy, &inside.config, asked, ledger).await {
        return Takeover::Tunnel(Box::new(opened)).run(client, proxy).await;
    }
    // To a client that was only slow to speak, its requests can be told why.
    match timeout(tunnel::CLIENT_FIRST, tunnel::client_speaks(&mut client)).await {
        Ok(Ok(heard @ (Sniff::Tls | Sniff::Http))) if applies(&proxy, &inside.lane) => {
            Box::pin(serve(heard, client, inside, proxy)).await;
        }
        // Any other knows of a tunnel already: that there is none shows as its end.
        _ => client.reset_on_close(),
    }
}

/// Ends the client's TLS and serves the requests inside.
pub async fn terminate(mut client: ClientSocket, inside: Inside, proxy: Arc<Proxy>) {
    let Some(interceptor) = proxy.interceptor() else { return };
    let limit = Instant::now() + proxy.snapshot().limits.header_timeout;
    let inside = match timeout_at(limit, inside.named(&mut client, &proxy)).await {
        Ok(inside) if applies(&proxy, &inside.lane) => inside,
        Ok(inside) => return connect_late(client, inside, proxy).await,
        Err(_) => return,
    };
    let acceptor = LazyConfigAcceptor::new(Acceptor::default(), client);
    let started = match timeout_at(limit, acceptor).await {
        Ok(Ok(started)) => started,
        Ok(Err(error)) => return tracing::debug!(authority = %inside.authority, %error, "no TLS handshake"),
        Err(_) => return,
    };
    let named = named(&started.client_hello());
    let host = named.as_deref().unwrap_or(inside.authority.host());
    let config = match interceptor.config_for(host) {
        Ok(config) => config,
        Err(error) => {
            let cause = error.cause().unwrap_or("-");
            return tracing::error!(authority = %inside.authority, cause, "no certificate could be made");
        }
    };
    // Boxed: handshakes are rare, and the room would be part of every tunnel.
    match timeout_at(limit, Box::pin(started.into_stream(config))).await {
        Ok(Ok(stream)) => {
            let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
            let way = Way::Intercepted { authority: inside.authority, pinned: inside.pinned };
            let inbound = Inbound { proxy: proxy.clone(), way };
            match is_http2 {
                true => http2::serve(stream.into(), inbound).await,
                false => connection::serve(stream.into(), inbound).await,
            }
        }
        Ok(Err(error)) if is_declined(&error) => {
            inside.lane.metrics().intercept_declined();
            if interceptor.step_down(inside.lane.upstream.authority().host()) {
                tracing::warn!(
                    upstream = %inside.lane.policy().name,
                    authority = %inside.authority,
                    %error,
                    "a client does not trust the pod's CA: its host is tunnelled for ten minutes; \
                     `intercept: false` exempts it for good"
                );
            }
        }
        Ok(Err(error)) => tracing::debug!(authority = %inside.authority, %error, "TLS handshake failed"),
        Err(_) => {}
    }
}

impl Inside {
    /// A client that looked the name up itself asks for an address and names the host in its hello: then
    /// that name has the policy, and the address is where it is dialled. Cancel-safe.
    async fn named(self, client: &mut ClientSocket, proxy: &Proxy) -> Self {
        let Some(ip) = self.authority.ip() else { return self };
        // What is no hello is told so by the handshake.
        let Ok(Some(name)) = hello::server_name(client, &mut HelloReader::default()).await else {
            return self;
        };
        let named = Authority::parse(&name, Some(self.authority.port())).ok();
        let Some(authority) = named.filter(|named| named.ip().is_none()) else { return self };
        match connect::lane(proxy.registry(), &self.config, &authority, self.arrival.now) {
            Ok(lane) => Self { authority, pinned: self.pinned.or(Some(ip)), lane, ..self },
            Err(_) => self,
        }
    }
}
