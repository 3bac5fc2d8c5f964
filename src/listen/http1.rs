//! One client connection that speaks HTTP/1, from its first byte to its last.
//!
//! While requests come, the HTTP library runs it; one timer watches over slow heads, idle time and
//! clients that do not read. A connection that lies idle is parked: the library's state and buffers
//! go and the bare socket stays, since an agent holds many more connections than it uses. An upgrade
//! or a CONNECT takes the socket over for good.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{self, HeaderValue};
use http::{Method, Request, Response, Version};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::ext::ReasonPhrase;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, sleep_until, timeout};

use super::connection::{Inbound, Reply, Takeover};
use super::downstream::{Downstream, Phase, Shared};
use super::forward;
use super::socket::ClientSocket;
use crate::call::{InterimSink, RequestId};
use crate::config::Limits;
use crate::error::Error;
use crate::pipeline::Proxy;
use crate::pipeline::answer::{self, Answer, AnswerBody};
use crate::pipeline::ledger::Ledger;
use crate::policy::deadline::Arrival;
use crate::respond;
use crate::respond::error::ends_connection;
use crate::wire::incoming::IncomingBody;

/// Idle for so long, a connection gives its buffers back. Short, so that a burst of connections never
/// holds all its buffers at once; making the state anew costs about a microsecond.
const PARK_AFTER: Duration = Duration::from_millis(100);
/// How often a connection with a request on it is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A connection that ends is read for so long, so that unread bytes do not turn its last answer into
/// a reset (RFC 9112 section 9.6).
const LINGER: Duration = Duration::from_secs(2);
/// Room to see that a head is over its limit; also for what a client sends behind a head.
const READ_BEYOND_HEAD: usize = 8192;

/// What the parts of one connection share.
struct Exchanges {
    inbound: Inbound,
    shared: Arc<Shared>,
    /// Left here by a request that takes the connection over.
    takeover: Mutex<Option<Takeover>>,
}

/// Serves one client connection, which came into being at `since`, to its end.
pub async fn serve(socket: ClientSocket, inbound: Inbound, since: Instant) {
    let limits = inbound.proxy.snapshot().limits.clone();
    let exchanges = Arc::new(Exchanges { inbound, shared: Shared::since(since), takeover: Mutex::default() });
    let proxy = &exchanges.inbound.proxy;
    let mut socket = socket;
    loop {
        let mut running = Running::start(socket, &exchanges, &limits);
        let end = running.run(&exchanges, &limits).await;
        let (rest, read_ahead) = running.stop();
        socket = rest;
        socket.unread(read_ahead);
        match end {
            // A connection that only waits costs its socket.
            End::Parked if wait_parked(&mut socket, &exchanges.shared, &limits).await => {}
            End::Parked => return,
            End::Done(_) if exchanges.takeover.lock().is_some() => break,
            End::Done(outcome) => return close(socket, &exchanges, outcome.err()).await,
            End::TimedOut(Phase::Head) => return last_words(socket, proxy, Error::RequestTimeout).await,
            End::TimedOut(_) => return,
            End::GivenUp => return socket.reset_on_close(),
        }
    }
    let takeover = exchanges.takeover.lock().take();
    if let Some(takeover) = takeover {
        takeover.run(socket, proxy.clone()).await;
    }
}

/// Waits on the bare socket for the next request; false when it is time to close.
async fn wait_parked(socket: &mut ClientSocket, shared: &Shared, limits: &Limits) -> bool {
    let (phase, since) = shared.phase();
    let limit = if phase == Phase::Fresh { limits.header_timeout } else { limits.keep_alive };
    tokio::select! {
        biased;
        readable = socket.readable() => readable.is_ok(),
        () = sleep_until(since + limit) => false,
    }
}

/// Ends a connection that the library is done with, after an answer of ours when its head was bad.
async fn close(mut socket: ClientSocket, exchanges: &Exchanges, error: Option<hyper::Error>) {
    let Exchanges { inbound, shared, .. } = exchanges;
    let (phase, _) = shared.phase();
    match error {
        Some(error) if phase == Phase::Head => match bad_head(&error, shared) {
            Some(error) => last_words(socket, &inbound.proxy, error).await,
            None => drop(socket),
        },
        Some(error) if error.is_user() && shared.is_close_delimited() => socket.reset_on_close(),
        Some(error) if error.is_user() => drop(socket),
        _ => linger(socket).await,
    }
}

fn bad_head(error: &hyper::Error, shared: &Shared) -> Option<Error> {
    if error.is_parse_too_large() {
        return Some(Error::HeadersTooLarge);
    }
    match shared.withheld() {
        Some(http::StatusCode::URI_TOO_LONG) => Some(Error::UriTooLong),
        Some(http::StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE) => Some(Error::HeadersTooLarge),
        Some(_) => Some(Error::InvalidRequest("the request head is no valid HTTP/1.1")),
        None if error.is_parse() => Some(Error::InvalidRequest("the request head is no valid HTTP/1.1")),
        None => None,
    }
}

/// Answers outside the library, and closes.
async fn last_words(mut socket: ClientSocket, proxy: &Arc<Proxy>, error: Error) {
    let ledger = Ledger::open(proxy, Arrival::now(), RequestId::Ours(fastrand::u64(..)), None);
    let bytes = respond::error::on_the_wire(&answer::refusal(error, ledger, None));
    if timeout(LINGER, socket.write_all(&bytes)).await.is_ok() {
        linger(socket).await;
    }
}

/// Closes our side and reads on for a moment: a close with unread bytes is a reset, which can take
/// the answer away that the client has not read yet.
async fn linger(mut socket: ClientSocket) {
    if socket.shutdown().await.is_err() {
        return;
    }
    let mut scrap = BytesMut::with_capacity(4096);
    let drain = async {
        while socket.read_buf(&mut scrap).await.is_ok_and(|n| n > 0) {
            scrap.clear();
        }
    };
    // At the bound the socket is closed with whatever is unread.
    let _ = timeout(LINGER, drain).await;
}

enum End {
    Done(Result<(), hyper::Error>),
    Parked,
    TimedOut(Phase),
    GivenUp,
}

/// The library at work on a connection.
struct Running {
    http: Box<http1::Connection<TokioIo<Downstream>, Requests>>,
}

impl Running {
    fn start(socket: ClientSocket, exchanges: &Arc<Exchanges>, limits: &Limits) -> Self {
        let mut builder = http1::Builder::new();
        builder
            .preserve_header_case(true)
            .header_read_timeout(None)
            .max_header_size(limits.head)
            .max_buf_size(limits.head + READ_BEYOND_HEAD);
        // The library has room for a hundred fields at no cost.
        if limits.fields != 100 {
            builder.max_headers(limits.fields);
        }
        let io = TokioIo::new(Downstream::new(socket, exchanges.shared.clone()));
        Self { http: Box::new(builder.serve_connection(io, Requests(exchanges.clone()))) }
    }

    async fn run(&mut self, Exchanges { inbound, shared, .. }: &Exchanges, limits: &Limits) -> End {
        let proxy = &inbound.proxy;
        let mut timer = pin!(sleep_until(Instant::now() + PARK_AFTER));
        let mut ending = pin!(proxy.ending());
        let mut is_told = false;
        poll_fn(|cx| {
            // Once is enough to be woken, and what runs here looks for itself then.
            if !std::mem::replace(&mut is_told, true) {
                let _ = ending.as_mut().poll(cx);
            }
            if let Poll::Ready(outcome) = self.http.poll_without_shutdown(cx) {
                return Poll::Ready(End::Done(outcome));
            }
            while timer.as_mut().poll(cx).is_ready() {
                match check(shared, limits, Instant::now()) {
                    Ok(next) => timer.as_mut().reset(next),
                    Err(end) => return Poll::Ready(end),
                }
            }
            Poll::Pending
        })
        .await
    }

    fn stop(self) -> (ClientSocket, Bytes) {
        let parts = self.http.into_parts();
        (parts.io.into_inner().into_inner(), parts.read_buf)
    }
}

/// Looks whether the connection has run out of some time; else says when to look again.
fn check(shared: &Shared, limits: &Limits, now: Instant) -> Result<Instant, End> {
    let (phase, since) = shared.phase();
    let (due, end) = match phase {
        Phase::Fresh | Phase::Head => (since + limits.header_timeout, End::TimedOut(phase)),
        Phase::Idle if shared.is_blocked() => (since + limits.keep_alive, End::TimedOut(phase)),
        Phase::Idle => (since + PARK_AFTER, End::Parked),
        Phase::Busy => match shared.gives_up_at() {
            Some(at) => (at + LOOK_EVERY, End::GivenUp),
            None => (now + LOOK_EVERY, End::Parked),
        },
    };
    match now >= due {
        true => Err(end),
        // A phase can change without a word to the timer, so it looks again soon.
        false => Ok(due.min(now + LOOK_EVERY)),
    }
}

/// The requests of one connection, for the library.
struct Requests(Arc<Exchanges>);

impl Service<Request<Incoming>> for Requests {
    type Response = Response<Delivery>;
    type Error = Infallible;
    // Boxed, so that an idle connection does not hold the room of a whole journey.
    type Future = Pin<Box<dyn Future<Output = Result<Response<Delivery>, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        self.0.shared.begin();
        let exchanges = self.0.clone();
        Box::pin(async move {
            let Exchanges { inbound, shared, takeover } = &*exchanges;
            let (version, is_connect) = (request.version(), request.method() == Method::CONNECT);
            let interim = (version == Version::HTTP_11).then(|| shared.clone() as Arc<dyn InterimSink>);
            let is_for_server = shared.take_is_for_server();
            let request = request.map(IncomingBody::Http1);
            let response = match forward::answer(inbound, request, interim, is_for_server).await {
                Reply::Answer(answer) => finish(&exchanges, answer, version, is_connect),
                Reply::Takeover(response, next) => {
                    *takeover.lock() = Some(next);
                    response
                }
            };
            Ok(response.map(|body| Delivery { body, broken: None, shared: shared.clone() }))
        })
    }
}

/// The last touches that depend on the connection.
fn finish(exchanges: &Exchanges, answer: Answer, version: Version, is_connect: bool) -> Response<AnswerBody> {
    let Answer { mut response, end, stall, refusal } = answer;
    let Exchanges { inbound, shared, .. } = exchanges;
    shared.bound(end, stall);
    if let Some(refusal) = refusal.filter(|_| is_connect) {
        // The one part of a refused CONNECT that every client shows its user.
        response.extensions_mut().insert(ReasonPhrase::from_static(refusal.word.as_bytes()));
    }
    let is_broken = refusal.is_some_and(|refusal| ends_connection(refusal.status));
    if is_connect || is_broken || inbound.proxy.is_draining() {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    let is_close_delimited = version == Version::HTTP_10 && response.body().size_hint().exact().is_none();
    shared.set_close_delimited(is_close_delimited);
    response
}

/// An answer's body that tells the connection when it is over.
struct Delivery {
    body: AnswerBody,
    /// What the body has broken with, while all that came before it is written: at an error the
    /// library throws away what it has not written yet, and that may be the head.
    broken: Option<Error>,
    shared: Arc<Shared>,
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.shared.finish();
    }
}

impl Body for Delivery {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if self.broken.is_some() {
            // The socket wakes the connection when the client has taken something.
            if self.shared.is_blocked() {
                return Poll::Pending;
            }
            return Poll::Ready(self.broken.take().map(Err));
        }
        match Pin::new(&mut self.body).poll_frame(cx) {
            Poll::Ready(Some(Err(error))) => {
                self.broken = Some(error);
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            polled => polled,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.broken.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
