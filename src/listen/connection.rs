//! A client's connection: what its requests have in common, and which version of HTTP it speaks.

use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use http::Response;
use tokio::time::{Instant, timeout_at};

use super::intercept::{self, Inside};
use super::sniff::PREFACE;
use super::socket::ClientSocket;
use super::{http1, http2, tunnel};
use crate::pipeline::Proxy;
use crate::pipeline::answer::{Answer, AnswerBody, Upgraded};
use crate::wire::authority::Authority;

/// What all requests of one connection have in common.
pub struct Inbound {
    /// The process.
    pub proxy: Arc<Proxy>,
    /// How they came here, which decides where they may go.
    pub way: Way,
}

/// How a request came to us.
pub enum Way {
    /// To the proxy port: its target names the upstream.
    Proxy,
    /// In clear text through a tunnel to this upstream.
    Tunnel(Authority),
    /// Inside TLS that ends here.
    Intercepted {
        /// The one upstream that it may name.
        authority: Authority,
        /// The address that the client wanted to go to, where it is the client's own choice.
        pinned: Option<IpAddr>,
    },
    /// In clear text, redirected on its way to this address.
    Redirected(Authority),
}

impl Way {
    /// Whether the client knows of no proxy.
    pub fn is_unaware(&self) -> bool {
        !matches!(self, Self::Proxy)
    }

    /// Where a request goes that names no host, as HTTP/1.0 need not.
    pub fn leads_to(&self) -> Option<&str> {
        match self {
            Self::Proxy => None,
            Self::Tunnel(to) | Self::Intercepted { authority: to, .. } | Self::Redirected(to) => {
                Some(to.key())
            }
        }
    }

    /// The address that the client wanted to go to, where it chose it.
    pub fn pinned(&self) -> Option<IpAddr> {
        match self {
            Self::Proxy | Self::Tunnel(_) => None,
            Self::Intercepted { pinned, .. } => *pinned,
            Self::Redirected(to) => to.ip(),
        }
    }
}

/// What comes of a request.
pub enum Reply {
    /// An answer.
    Answer(Answer),
    /// An answer's head, behind which what carried the request is no HTTP any more.
    Takeover(Response<AnswerBody>, Takeover),
}

/// What a connection or a stream becomes when HTTP on it is over.
pub enum Takeover {
    /// The protocol that a 101 agreed on.
    Upgraded(Box<Upgraded>),
    /// A tunnel that a CONNECT opened.
    Tunnel(Box<tunnel::Opened>),
    /// A tunnel to an upstream whose TLS we end.
    Intercept(Box<Inside>),
}

impl Takeover {
    /// Runs it to its end. Boxed by hand: serving requests leads here, and this to serving requests.
    pub fn run(self, client: ClientSocket, proxy: Arc<Proxy>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        match self {
            Self::Upgraded(upgraded) => Box::pin(tunnel::upgraded(client, *upgraded)),
            Self::Tunnel(opened) => Box::pin(tunnel::opened(client, *opened, proxy)),
            Self::Intercept(inside) => Box::pin(intercept::listen_first(client, *inside, proxy)),
        }
    }
}

/// Serves one client connection to its end, in the version of HTTP that its first bytes speak.
pub async fn serve(mut client: ClientSocket, inbound: Inbound) {
    let since = Instant::now();
    let limit = since + inbound.proxy.snapshot().limits.header_timeout;
    match timeout_at(limit, is_http2(&mut client)).await {
        Ok(Ok(true)) => http2::serve(client, inbound).await,
        Ok(Ok(false)) => http1::serve(client, inbound, since).await,
        // Nothing was asked, so nothing is answered.
        Ok(Err(_)) | Err(_) => {}
    }
}

async fn is_http2(client: &mut ClientSocket) -> io::Result<bool> {
    let mut space = [0; PREFACE.len()];
    let mut verdict = speaks_http2(client.peek(&mut space).await?);
    loop {
        match verdict {
            Some(verdict) => return Ok(verdict),
            None => verdict = client.hear().await?.map_or(Some(false), speaks_http2),
        }
    }
}

/// What the first bytes say, as soon as they do.
fn speaks_http2(first: &[u8]) -> Option<bool> {
    let is_undecided = !first.is_empty() && first.len() < PREFACE.len() && PREFACE.starts_with(first);
    (!is_undecided).then(|| first.starts_with(PREFACE))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What one idle connection holds beside its socket: an agent has thousands.
    #[test]
    fn the_room_of_a_connection_is_that_of_its_waiting() {
        fn room<F: Future>(_: impl Fn(ClientSocket, Inbound) -> F) -> usize {
            std::mem::size_of::<F>()
        }
        assert!(room(serve) <= 1536, "{} bytes", room(serve));
    }

    #[test]
    fn the_first_bytes_tell_the_version() {
        assert_eq!(speaks_http2(b"GET /"), Some(false));
        assert_eq!(speaks_http2(b"PRI * HTT"), None);
        assert_eq!(speaks_http2(b"PRI * HTTP/2.0\r\n\r\nSM"), Some(true));
        assert_eq!(speaks_http2(b"PRI /x HTTP/1.1"), Some(false));
        assert_eq!(speaks_http2(b""), Some(false));
    }
}
