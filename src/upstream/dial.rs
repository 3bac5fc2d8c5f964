//! From an upstream's name to a connected socket: guard, resolve, guard again, connect, TLS.
//!
//! Names are resolved once and the addresses that were checked are the ones dialled, so that a name
//! that changes its mind between the check and the dial gains nothing. Every dial comes through here:
//! first attempts, hedges, backups and tunnels.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::time::timeout;

use super::connect;
use super::egress::{self, OwnAddresses};
use super::resolve::Resolver;
use super::socket::{OwnSockets, Socket};
use crate::call::Progress;
use crate::config::{Dns, Egress};
use crate::error::{Cause, Error, Stage};
use crate::tls::client::{ClientTls, Offer};
use crate::wire::authority::Authority;

/// What one dial needs to know.
#[derive(Clone, Copy)]
pub struct Destination<'a> {
    /// Where to.
    pub authority: &'a Authority,
    /// Where the client itself wanted to go, instead of where the name leads.
    pub pinned: Option<IpAddr>,
    /// Speak TLS, as this client.
    pub tls: Option<&'a Arc<ClientTls>>,
    /// The versions of HTTP to offer in the handshake.
    pub offer: Offer,
    /// Which addresses may be dialled.
    pub egress: &'a Egress,
    /// For all of it together.
    pub timeout: Duration,
    /// Another attempt's address, to be tried last.
    pub avoid: Option<IpAddr>,
}

/// Makes connections.
pub struct Dialer {
    resolver: ArcSwap<(Dns, Resolver)>,
    own_addresses: OwnAddresses,
    own_sockets: Arc<OwnSockets>,
}

impl Dialer {
    /// A dialer that never dials the process's own listening `ports`.
    ///
    /// # Errors
    /// When no resolver can be made of `dns`.
    pub fn new(dns: &Dns, ports: Vec<u16>) -> Result<Self, Error> {
        Ok(Self {
            resolver: ArcSwap::from_pointee((dns.clone(), Resolver::new(dns)?)),
            own_addresses: OwnAddresses::new(ports),
            own_sockets: Arc::default(),
        })
    }

    /// Takes up the name servers of a new policy; look-ups that run go on with the old ones.
    ///
    /// # Errors
    /// When no resolver can be made of `dns`; the old one stays.
    pub fn set_dns(&self, dns: &Dns) -> Result<(), Error> {
        if self.resolver.load().0 != *dns {
            self.resolver.store(Arc::new((dns.clone(), Resolver::new(dns)?)));
        }
        Ok(())
    }

    /// Our ends of the connections that are open.
    pub fn own_sockets(&self) -> &Arc<OwnSockets> {
        &self.own_sockets
    }

    /// Whether `address` is one of the process's own ports.
    pub fn is_own(&self, address: SocketAddr) -> bool {
        self.own_addresses.is_own(address)
    }

    /// Whether what a client named, `host` or `host:port`, is the process itself. Nearly always the
    /// port alone answers that.
    pub fn is_named_own(&self, text: &str, default_port: u16) -> bool {
        let port = text.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(default_port);
        self.own_addresses.has_port(port)
            && Authority::parse(text, Some(default_port)).is_ok_and(|named| self.is_own_authority(&named))
    }

    /// Whether a host that needs no look-up is the process itself.
    pub fn is_own_authority(&self, authority: &Authority) -> bool {
        let ip = match authority.ip() {
            Some(ip) => ip,
            None if authority.host() == "localhost" => IpAddr::from([127, 0, 0, 1]),
            None => return false,
        };
        self.is_own(SocketAddr::new(ip, authority.port()))
    }

    /// A connected socket, with TLS when the destination says so. Cancel-safe: dropping the future ends
    /// all that was begun.
    ///
    /// # Errors
    /// The guard's refusal, or what went wrong in resolving, connecting or the handshake.
    pub async fn socket(&self, to: Destination<'_>, progress: &Progress) -> Result<Socket, Error> {
        let verdict = egress::check_name(to.egress, to.authority)?;
        match timeout(to.timeout, self.connect(to, verdict, progress)).await {
            Ok(connected) => connected,
            Err(_) if progress.stage() == Stage::Dns => Err(Error::DnsTimeout),
            Err(_) => Err(Error::ConnectTimeout),
        }
    }

    async fn connect(
        &self,
        to: Destination<'_>,
        verdict: egress::NameVerdict,
        progress: &Progress,
    ) -> Result<Socket, Error> {
        let addresses = self.allowed_addresses(to, verdict, progress).await?;
        progress.enter(Stage::Connect);
        let addresses = connect::order(&addresses, to.avoid);
        let stream = connect::connect(&addresses, to.authority.port(), to.timeout).await?;
        let peer = stream.peer_addr().map_err(|error| Error::ConnectFailed(Cause::chain(&error)))?;
        let mark = self.own_sockets.mark(&stream);
        match to.tls {
            None => Ok(Socket::plain(stream, peer, mark)),
            Some(tls) => {
                Ok(Socket::tls(tls.handshake(stream, to.authority.host(), to.offer).await?, peer, mark))
            }
        }
    }

    async fn allowed_addresses(
        &self,
        to: Destination<'_>,
        verdict: egress::NameVerdict,
        progress: &Progress,
    ) -> Result<Vec<IpAddr>, Error> {
        let (mut addresses, verdict) = match to.pinned {
            None => (self.addresses(to.authority, progress).await?, verdict),
            Some(ip) => (vec![ip], self.verdict_on_pinned(to.authority, verdict, ip, progress).await),
        };
        let mut refusal = None;
        addresses.retain(|ip| match self.check(to, verdict, *ip) {
            Ok(()) => true,
            Err(error) => {
                refusal = Some(error);
                false
            }
        });
        match refusal {
            Some(refusal) if addresses.is_empty() => Err(refusal),
            _ => Ok(addresses),
        }
    }

    /// The verdict on the name, for one address. A client that brings the address along can give it any
    /// name: only one that leads there opens what `egress.allow` opens for it.
    pub async fn verdict_on_pinned(
        &self,
        authority: &Authority,
        verdict: egress::NameVerdict,
        ip: IpAddr,
        progress: &Progress,
    ) -> egress::NameVerdict {
        if verdict == egress::NameVerdict::Unnamed {
            return verdict;
        }
        match self.leads_to(authority, ip, progress).await {
            Ok(true) => verdict,
            Ok(false) | Err(_) => egress::NameVerdict::Unnamed,
        }
    }

    /// Whether a host has this address.
    ///
    /// # Errors
    /// [`Error::DnsFailed`] or [`Error::DnsTimeout`].
    pub async fn leads_to(
        &self,
        authority: &Authority,
        ip: IpAddr,
        progress: &Progress,
    ) -> Result<bool, Error> {
        if let Some(own) = authority.ip() {
            return Ok(own == ip);
        }
        progress.enter(Stage::Dns);
        let resolver = self.resolver.load_full();
        resolver.1.leads_to(authority.host(), ip).await
    }

    fn check(&self, to: Destination<'_>, verdict: egress::NameVerdict, ip: IpAddr) -> Result<(), Error> {
        if self.is_own(SocketAddr::new(ip, to.authority.port())) {
            return Err(Error::EgressDenied { rule: "hedgerow's own address".into(), by_address: true });
        }
        egress::check_address(to.egress, to.authority, verdict, ip)
    }

    /// The addresses of a host, in the resolver's order.
    ///
    /// # Errors
    /// [`Error::DnsFailed`] or [`Error::DnsTimeout`].
    pub async fn addresses(&self, authority: &Authority, progress: &Progress) -> Result<Vec<IpAddr>, Error> {
        if let Some(ip) = authority.ip() {
            return Ok(vec![ip]);
        }
        progress.enter(Stage::Dns);
        let resolver = self.resolver.load_full();
        resolver.1.lookup(authority.host()).await
    }
}
