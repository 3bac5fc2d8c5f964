//! One HTTP/1 connection to an upstream, driven by whoever uses it.
//!
//! A connection is a value, not a task: the task of the request that is on it polls it, and nobody
//! polls one that is idle. So a request crosses no task on its way, and dropping it closes the socket in
//! the same instant, which is how losers and left clients are cancelled.
//!
//! An [`Idle`] connection is its bare socket. The library's state and buffers, some thirty KiB, are made
//! anew for each request: that takes less time than finding them cold in memory when there are a
//! thousand upstreams, and costs none of it while they are idle.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::time::Instant;

use super::connection::{Interim, Origin, SendFailure, client_body_error, is_tls_refusal};
use super::socket::{Socket, Traffic};
use crate::error::{Cause, Error};
use crate::wire::body::RequestBody;

/// A response head larger than this is `upstream_invalid`.
const MAX_RESPONSE_HEAD: usize = 64 * 1024;
/// The most that one read of a body takes, and so the most that lies between an upstream and a client
/// that does not read. Reads grow to it as long as they are filled.
const MAX_READ: usize = 256 * 1024;
/// Fields of a response head.
const MAX_RESPONSE_FIELDS: usize = 200;

/// A connection that no request is on.
pub struct Idle {
    socket: Socket,
    origin: Origin,
    opened: Instant,
}

impl Idle {
    /// A connection that was opened just now.
    pub fn new(socket: Socket, origin: Origin) -> Self {
        Self { socket, origin, opened: Instant::now() }
    }

    /// What it was made for.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// When it was opened.
    pub fn opened(&self) -> Instant {
        self.opened
    }

    /// Sees what the peer did while the connection lay idle: closed it, or sent bytes that nobody
    /// asked for, which must never become the answer to the next request.
    pub fn is_usable(&mut self) -> bool {
        let mut space = [0; 1];
        let mut cx = Context::from_waker(Waker::noop());
        Pin::new(&mut self.socket).poll_read(&mut cx, &mut ReadBuf::new(&mut space)).is_pending()
    }

    /// Readies it for one request. `is_reused` when an earlier one was on it, so that the peer may be
    /// closing it right now.
    ///
    /// # Errors
    /// [`Error::Internal`]: preparing does no I/O and has no reason to fail.
    pub async fn prepare(self, is_reused: bool) -> Result<Prepared, Error> {
        let Self { socket, origin, opened } = self;
        let traffic = socket.traffic();
        let (sender, driver) = http1::Builder::new()
            .preserve_header_case(true)
            .max_header_size(MAX_RESPONSE_HEAD)
            .max_buf_size(MAX_READ)
            .max_headers(MAX_RESPONSE_FIELDS)
            .handshake(TokioIo::new(socket))
            .await
            .map_err(|error| Error::Internal(Cause::chain(&error)))?;
        Ok(Prepared { sender, driver: Box::new(driver), traffic, origin, opened, is_reused })
    }
}

/// A connection that is ready for a request, or has one on it.
pub struct Prepared {
    sender: http1::SendRequest<RequestBody>,
    driver: Box<http1::Connection<TokioIo<Socket>, RequestBody>>,
    traffic: Arc<Traffic>,
    origin: Origin,
    opened: Instant,
    is_reused: bool,
}

impl Prepared {
    /// What it was made for.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Whether an earlier request was on it.
    pub fn is_reused(&self) -> bool {
        self.is_reused
    }

    /// Sends a request and waits for the head of its answer. Dropping the future closes the
    /// connection.
    ///
    /// # Errors
    /// [`SendFailure`], which knows whether the request can have had an effect.
    pub async fn send(
        mut self,
        request: Request<RequestBody>,
        interim: Option<Interim>,
    ) -> Result<(Response<()>, Answering), SendFailure> {
        let mut request = request;
        if let Some(interim) = interim {
            hyper::ext::on_informational(&mut request, move |answer| {
                interim.pass(answer.status(), answer.headers());
            });
        }
        let (read, written) = (self.traffic.read(), self.traffic.written());
        let mut has_ended = false;
        let outcome = {
            let mut answer = pin!(self.sender.try_send_request(request));
            poll_fn(|cx| {
                if let Poll::Ready(outcome) = answer.as_mut().poll(cx) {
                    return Poll::Ready(outcome);
                }
                // An error of the driver comes out of `answer`, which is ready then.
                has_ended = has_ended || self.driver.poll_without_shutdown(cx).is_ready();
                answer.as_mut().poll(cx)
            })
            .await
        };
        match outcome {
            Ok(response) => {
                let (head, body) = response.into_parts();
                Ok((Response::from_parts(head, ()), Answering { body, connection: Some(self), has_ended }))
            }
            Err(mut failure) => {
                let given_back = failure.take_message();
                Err(SendFailure {
                    is_unanswered: self.traffic.read() == read,
                    is_unsent: given_back.is_some() || self.traffic.written() == written,
                    is_refused: false,
                    wants_http1: false,
                    error: classify(failure.error()),
                    body: given_back.and_then(|request| request.into_body().into_unread()),
                })
            }
        }
    }
}

/// A connection with an answer on it: drives the connection while the body is read.
pub struct Answering {
    body: Incoming,
    connection: Option<Prepared>,
    has_ended: bool,
}

impl Answering {
    /// Reads on in the answer's body.
    pub fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let mut polled = Pin::new(&mut self.body).poll_frame(cx);
        if polled.is_pending() && self.drive(cx) {
            polled = Pin::new(&mut self.body).poll_frame(cx);
        }
        polled.map_err(|error| Error::UpstreamIncomplete(Cause::chain(&error)))
    }

    /// Whether all of the body has been read.
    pub fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    /// How much of the body is to come.
    pub fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }

    /// True when the driver was polled and so may have brought something.
    fn drive(&mut self, cx: &mut Context<'_>) -> bool {
        match &mut self.connection {
            Some(connection) if !self.has_ended => {
                self.has_ended = connection.driver.poll_without_shutdown(cx).is_ready();
                true
            }
            _ => false,
        }
    }

    /// The connection, when the answer has been read to its end and the peer keeps it open. With a
    /// request still being sent, or bytes behind the answer, it is not fit for another and is dropped.
    pub fn into_idle(mut self) -> Option<Idle> {
        let mut connection = self.connection.take()?;
        let mut cx = Context::from_waker(Waker::noop());
        let is_over = self.has_ended || connection.driver.poll_without_shutdown(&mut cx).is_ready();
        if is_over || !connection.sender.is_ready() {
            return None;
        }
        let parts = connection.driver.into_parts();
        let socket = parts.io.into_inner();
        let (origin, opened) = (connection.origin, connection.opened);
        parts.read_buf.is_empty().then_some(Idle { socket, origin, opened })
    }

    /// The bare socket after a 101, with what the upstream has sent behind it.
    ///
    /// # Errors
    /// [`Error::UpstreamReset`] when the connection has gone.
    pub async fn into_upgraded(mut self) -> Result<(Socket, Bytes), Error> {
        let Some(mut connection) = self.connection.take() else {
            return Err(Error::UpstreamReset(Cause::NONE));
        };
        if !self.has_ended {
            poll_fn(|cx| connection.driver.poll_without_shutdown(cx))
                .await
                .map_err(|error| Error::UpstreamReset(Cause::chain(&error)))?;
        }
        let parts = connection.driver.into_parts();
        Ok((parts.io.into_inner(), parts.read_buf))
    }
}

fn classify(error: &hyper::Error) -> Error {
    if let Some(lost) = client_body_error(error) {
        return lost;
    }
    let cause = Cause::chain(error);
    if error.is_parse() || error.is_parse_too_large() || error.is_parse_status() {
        Error::UpstreamInvalid(cause)
    } else if source::<io::Error>(error).is_some_and(is_tls_refusal) {
        Error::TlsFailed(cause)
    } else {
        Error::UpstreamReset(cause)
    }
}

/// The first error of this type among the sources of `error`.
fn source<T: std::error::Error + 'static>(error: &hyper::Error) -> Option<&T> {
    let mut next = std::error::Error::source(error);
    while let Some(source) = next {
        match source.downcast_ref() {
            Some(found) => return Some(found),
            None => next = source.source(),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use tokio::net::{TcpListener, TcpStream};

    use super::super::socket::OwnSockets;
    use super::*;
    use crate::wire::authority::Authority;
    use crate::wire::incoming::IncomingBody;

    /// A connection that its peer closed after it was found usable: the library gives the request back, and its body
    /// used to be dropped, so that a POST which had provably not left ended in an error.
    #[tokio::test]
    async fn a_body_that_never_left_comes_back_with_the_failure() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let peer = listener.local_addr().unwrap();
        let stream = TcpStream::connect(peer).await.unwrap();
        let (far, _) = listener.accept().await.unwrap();
        let mark = Arc::new(OwnSockets::default()).mark(&stream);
        let to = Authority::from_ip(peer.ip(), peer.port());
        let origin = Origin { to, peer, tls: None, is_pinned: false };
        let mut idle = Idle::new(Socket::plain(stream, peer, mark), origin);
        assert!(idle.is_usable());
        drop(far);
        idle.socket.peek(&mut [0; 1]).await.unwrap();

        let body = RequestBody::once(IncomingBody::Empty);
        let request = Request::post("/").header("content-length", "4").body(body).unwrap();
        let Err(failure) = idle.prepare(true).await.unwrap().send(request, None).await else {
            panic!("the peer has gone")
        };
        assert!(failure.is_unsent && failure.is_unanswered, "{failure:?}");
        let body = failure.body.expect("the body comes back");
        assert!(body.collect().await.unwrap().to_bytes().is_empty());
    }
}
