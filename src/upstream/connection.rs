//! A connection to an upstream with room for one request, of whichever version of HTTP, and the answer
//! that comes on it.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, Version};
use http_body::{Frame, SizeHint};
use tokio::time::Instant;

use super::http1::{self, Prepared};
use super::http2::{self, Slot};
use super::pool::Pool;
use super::socket::Socket;
use crate::call::InterimSink;
use crate::error::{Cause, Error};
use crate::tls::client::ClientTls;
use crate::wire::authority::Authority;
use crate::wire::body::{Continue, RequestBody};
use crate::wire::incoming::IncomingBody;
use crate::wire::replay::BodyLost;

/// What a connection was made for, and so which requests may use it.
#[derive(Clone)]
pub struct Origin {
    /// What was dialled, which a reload may have changed since.
    pub to: Authority,
    /// The address at the other end.
    pub peer: SocketAddr,
    /// The TLS client that verified it; `None` for clear text. A connection that was made under other
    /// roots, or with another certificate of ours, is not for this policy.
    pub tls: Option<Arc<ClientTls>>,
    /// The address was the client's choice, not the name's: no request may use it that only names the
    /// host.
    pub is_pinned: bool,
}

impl Origin {
    /// The address, where it was the client's choice.
    pub fn pinned(&self) -> Option<IpAddr> {
        self.is_pinned.then(|| self.peer.ip())
    }
}

/// Which connection will do.
#[derive(Clone, Copy)]
pub struct Wanted<'a> {
    /// To this host and port.
    pub to: &'a Authority,
    /// The TLS client to speak with; `None` for clear text.
    pub tls: Option<&'a Arc<ClientTls>>,
    /// To this address and no other.
    pub pinned: Option<IpAddr>,
    /// Not to this address, as another attempt is there.
    pub avoid: Option<IpAddr>,
    /// Not this shared connection, as another attempt is on it.
    pub beside: Option<u64>,
    /// None that was opened before this, as such a one has turned out to be dead.
    pub since: Option<Instant>,
    /// For a hedge, which is there because something takes too long: it waits for nobody's dial.
    pub is_hedge: bool,
}

impl Wanted<'_> {
    /// Whether a connection made for `origin` will do.
    pub fn takes(&self, origin: &Origin) -> bool {
        let is_same_tls = match (self.tls, &origin.tls) {
            (None, None) => true,
            (Some(wanted), Some(own)) => Arc::ptr_eq(wanted, own),
            _ => false,
        };
        let address = origin.peer.ip();
        let is_avoided = self.pinned.is_none() && self.avoid == Some(address);
        is_same_tls && *self.to == origin.to && self.pinned == origin.pinned() && !is_avoided
    }
}

/// A connection with room for one request.
pub enum Connection {
    /// All of an HTTP/1 connection.
    Http1(Prepared),
    /// A stream of a shared HTTP/2 connection.
    Http2(Slot),
}

impl Connection {
    /// What it was made for.
    pub fn origin(&self) -> &Origin {
        match self {
            Self::Http1(connection) => connection.origin(),
            Self::Http2(slot) => slot.shared().origin(),
        }
    }

    /// The version that is spoken.
    pub fn version(&self) -> Version {
        match self {
            Self::Http1(_) => Version::HTTP_11,
            Self::Http2(_) => Version::HTTP_2,
        }
    }

    /// Whether an earlier request was on it, so that the peer may be closing it right now.
    pub fn is_reused(&self) -> bool {
        match self {
            Self::Http1(connection) => connection.is_reused(),
            Self::Http2(slot) => slot.is_reused(),
        }
    }

    /// Sends a request and waits for the head of its answer. Dropping the future cancels the request:
    /// by closing an HTTP/1 connection, by resetting an HTTP/2 stream.
    ///
    /// # Errors
    /// [`SendFailure`], which knows whether the request can have had an effect.
    pub async fn send(
        self,
        request: Request<RequestBody>,
        interim: Option<Interim>,
    ) -> Result<(Response<()>, Exchange), SendFailure> {
        match self {
            Self::Http1(connection) => {
                let (head, answering) = connection.send(request, interim).await?;
                Ok((head, Exchange::Http1(answering)))
            }
            // Boxed: the room would be part of every request.
            Self::Http2(slot) => {
                let (head, answering) = Box::pin(slot.send(request, interim)).await?;
                Ok((head, Exchange::Http2(answering)))
            }
        }
    }
}

/// What becomes of interim answers (1xx).
pub struct Interim {
    /// Lets the request's body go on a `100 Continue`.
    pub gate: Option<Continue>,
    /// Passes all others to the client.
    pub sink: Option<Arc<dyn InterimSink>>,
}

impl Interim {
    /// Takes one.
    pub fn pass(&self, status: StatusCode, headers: &HeaderMap) {
        if status == StatusCode::CONTINUE {
            if let Some(gate) = &self.gate {
                gate.open();
            }
        } else if let Some(sink) = &self.sink {
            sink.interim(status, headers);
        }
    }
}

/// A request that got no answer.
#[derive(Debug)]
pub struct SendFailure {
    /// What to tell the caller.
    pub error: Error,
    /// The connection has gone, and no byte of an answer came.
    pub is_unanswered: bool,
    /// The upstream has done nothing with it: no byte of it left, or the upstream said so.
    pub is_unsent: bool,
    /// The upstream itself refused to look at it, which says nothing against its health.
    pub is_refused: bool,
    /// It refused because it takes such a request on HTTP/1.1 alone (RFC 9113 section 7).
    pub wants_http1: bool,
    /// The request's body, where it passes only once and nothing of it has been read.
    pub body: Option<IncomingBody>,
}

/// An answer that is being received.
pub enum Exchange {
    /// On a connection of its own.
    Http1(http1::Answering),
    /// On a stream.
    Http2(http2::Answering),
}

impl Exchange {
    /// The version of the answer.
    pub fn version(&self) -> Version {
        match self {
            Self::Http1(_) => Version::HTTP_11,
            Self::Http2(_) => Version::HTTP_2,
        }
    }

    /// Reads on in the answer's body.
    pub fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match self {
            Self::Http1(answering) => answering.poll_frame(cx),
            Self::Http2(answering) => answering.poll_frame(cx),
        }
    }

    /// Whether all of the body has been read.
    pub fn is_end_stream(&self) -> bool {
        match self {
            Self::Http1(answering) => answering.is_end_stream(),
            Self::Http2(answering) => answering.is_end_stream(),
        }
    }

    /// How much of the body is to come.
    pub fn size_hint(&self) -> SizeHint {
        match self {
            Self::Http1(answering) => answering.size_hint(),
            Self::Http2(answering) => answering.size_hint(),
        }
    }

    /// After the last byte of the answer: leaves the connection for the next request.
    pub fn finish(self, pool: &Pool, now: Instant) {
        match self {
            Self::Http1(answering) => {
                if let Some(idle) = answering.into_idle() {
                    pool.put(idle, now);
                }
            }
            Self::Http2(answering) => answering.finish(),
        }
    }

    /// The bare socket after a 101, with what the upstream has sent behind it.
    ///
    /// # Errors
    /// [`Error::UpstreamReset`] when the connection has gone; [`Error::UpstreamInvalid`] for a 101 on a
    /// stream, which HTTP/2 does not have (RFC 9113 section 8.6).
    pub async fn into_upgraded(self) -> Result<(Socket, Bytes), Error> {
        match self {
            Self::Http1(answering) => answering.into_upgraded().await,
            Self::Http2(_) => Err(Error::UpstreamInvalid(Cause::from("a 101 on an HTTP/2 stream"))),
        }
    }
}

/// Whether TLS has broken the connection off. With TLS 1.3 a client is through with the handshake before its
/// certificate is looked at (RFC 8446 section 4.4.2.4), so the alert that refuses it comes in the place of
/// an answer. Our sockets have no other reason for this kind.
pub(super) fn is_tls_refusal(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData
}

/// The client's own body failed: the caller's fault, not the upstream's.
pub(super) fn client_body_error(error: &(dyn std::error::Error + 'static)) -> Option<Error> {
    let mut next = Some(error);
    while let Some(source) = next {
        match source.downcast_ref::<BodyLost>() {
            Some(BodyLost::Client(error)) if error.is_framing() => {
                return Some(Error::InvalidRequest("the request body breaks its framing"));
            }
            Some(BodyLost::Client(_)) => return Some(Error::BodyBrokenOff),
            Some(BodyLost::NotKept) => {
                return Some(Error::Internal(Cause::from("body not kept for a replay")));
            }
            None => next = source.source(),
        }
    }
    None
}
