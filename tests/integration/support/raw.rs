//! A port whose connections are the test's to speak on byte by byte: for upstreams that are no HTTP, or that
//! close, reset and talk out of turn in ways that a well-behaved one never does.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::TcpListener;
use tokio_rustls::{TlsAcceptor, TlsStream};

use super::client::Agent;
use super::h1::{self, RequestHead};
use super::socket::Socket;
use super::soon;

/// A listening port and nothing behind it.
pub struct RawPort {
    listener: TcpListener,
}

impl RawPort {
    /// A free port of 127.0.0.1.
    pub async fn bind() -> Self {
        Self::on(Ipv4Addr::LOCALHOST).await
    }

    /// A free port of another address.
    pub async fn on(ip: impl Into<IpAddr>) -> Self {
        Self { listener: TcpListener::bind((ip.into(), 0)).await.expect("a local address can be bound") }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.listener.local_addr().expect("a bound listener has an address")
    }

    /// An absolute URL of the given path here.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address())
    }

    /// The next connection. The peer is the one that answers here, so its end is the same tool as an agent's.
    #[track_caller]
    pub fn accept(&self) -> impl Future<Output = Agent> {
        let accepted = soon(self.listener.accept());
        async { Agent::over(accepted.await.expect("a loopback listener accepts").0) }
    }
}

impl Agent {
    /// TLS as the server of this connection.
    pub async fn accept_tls(self, acceptor: &TlsAcceptor) -> Self {
        let Socket::Plain(tcp) = self.into_socket() else { panic!("TLS inside TLS") };
        let tls = soon(acceptor.accept(tcp)).await.expect("the client takes the handshake");
        Self { stream: BufReader::new(Socket::Tls(Box::new(tls.into()))) }
    }

    /// FIN below the TLS, without the close_notify that would make it a proper end.
    pub async fn cut(mut self) {
        let Socket::Tls(tls) = self.stream.get_mut() else { panic!("no TLS to cut") };
        // The server's half of the union; `TcpStream` shuts its own direction down.
        match tls.as_mut() {
            TlsStream::Server(tls) => tls.get_mut().0.shutdown().await.expect("an open socket"),
            TlsStream::Client(tls) => tls.get_mut().0.shutdown().await.expect("an open socket"),
        }
    }

    /// The head of a request that comes from the other side; `None` when it closes first.
    pub async fn try_request(&mut self) -> Option<RequestHead> {
        let raw = h1::read_head(&mut self.stream).await.ok()??;
        Some(h1::parse_request(raw).expect("a well-formed request"))
    }

    /// The same, where one has to come.
    #[track_caller]
    pub fn read_request(&mut self) -> impl Future<Output = RequestHead> {
        let request = soon(self.try_request());
        async { request.await.expect("a request before the end of the connection") }
    }
}
