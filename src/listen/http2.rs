//! One client connection that speaks HTTP/2: its streams are requests like any other, each a task of
//! its own, bounded by what the connection lets a client open.
//!
//! A stream that its client resets is dropped with all that it was waiting for. A connection on which
//! nothing has been for the keep-alive time ends with a GOAWAY; one on which no request ever comes gets
//! the time of a head. When the process begins to drain every connection is told so by a GOAWAY at once,
//! as the process may leave within a second: what is on it is served to its end, and what its client has
//! yet to ask goes elsewhere.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use h2::ext::Protocol;
use h2::server::{Builder, SendResponse};
use h2::{Reason, RecvStream, SendStream};
use http::header::{self, HeaderMap, HeaderValue};
use http::{Method, Request, Response, StatusCode, request, response};
use http_body::Body;
use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};

use super::connection::{Inbound, Reply, Takeover};
use super::forward;
use super::socket::{ClientSocket, Http2Stream};
use crate::call::{ExtendedConnect, InterimSink, expects_continue};
use crate::config::Limits;
use crate::error::{Cause, Error};
use crate::pipeline::Proxy;
use crate::pipeline::answer::{self, Answer, AnswerBody};
use crate::wire::hop_by_hop::{self, Forwarded};
use crate::wire::incoming::{IncomingBody, StreamBody};
use crate::wire::outflow::Outflow;
use crate::wire::websocket::{SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, WebSocketKey};

/// What one request body may have on its way to an upstream that does not read.
const STREAM_WINDOW: u32 = 64 * 1024;
/// The same for all of a connection.
const CONNECTION_WINDOW: u32 = 1024 * 1024;
/// What small frames of bodies may cost while they wait, at up to 256 bytes each. Frames of forty bytes, such
/// as messages of gRPC, fill the window before this and so are held back; the library would take them for an
/// attack sooner and end the connection.
const SMALL_FRAMES: usize = 6 * CONNECTION_WINDOW as usize;
/// Bytes of one answer that wait in the connection for the socket.
const SEND_BUFFER: usize = 64 * 1024;
/// Streams that we had to reset for a client's faults on one connection (CVE-2025-8671).
const MAX_FAULTS: usize = 100;
/// Streams of the last second that we ended before their client did. What is still on its way on one that is
/// forgotten counts as a fault, and a fan-out of uploads that is refused at once is none.
const REMEMBERED_RESETS: usize = 1024;
/// How often a connection is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// For the last frames of a connection to go out.
const LINGER: Duration = Duration::from_secs(2);

/// Serves one client connection to its end. Dropping the future cancels what is on it.
pub async fn serve(client: ClientSocket, inbound: Inbound) {
    // Boxed: the room would be part of every connection.
    Box::pin(run(client, inbound)).await;
}

async fn run(client: ClientSocket, inbound: Inbound) {
    let limits = inbound.proxy.snapshot().limits.clone();
    let proxy = inbound.proxy.clone();
    let inbound = Arc::new(inbound);
    let opened = Instant::now();
    let handshake = Builder::new()
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .data_frame_budget(SMALL_FRAMES)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_streams(limits.streams)
        .max_header_list_size(limits.head.try_into().unwrap_or(u32::MAX))
        // All that a client may have open it may give up in one breath, before we have looked at any. Beyond that
        // it is an attack (CVE-2023-44487) and the connection is ended.
        .max_pending_accept_reset_streams(limits.streams as usize)
        .max_local_error_reset_streams(Some(MAX_FAULTS))
        .max_concurrent_reset_streams(REMEMBERED_RESETS)
        .enable_connect_protocol()
        .handshake(client);
    let Ok(Ok(mut http)) = timeout_at(opened + limits.header_timeout, handshake).await else { return };

    // Dropped with the connection, and all its streams with it.
    let mut streams = JoinSet::new();
    let mut quiet = Quiet { since: opened, has_served: false };
    let mut closing: Option<Instant> = None;
    let mut draining = pin!(proxy.draining());
    loop {
        let look = Instant::now() + LOOK_EVERY;
        tokio::select! {
            biased;
            accepted = http.accept() => match accepted {
                Some(Ok((request, respond))) => {
                    quiet.has_served = true;
                    streams.spawn(stream(inbound.clone(), request, respond));
                }
                Some(Err(error)) => {
                    tracing::debug!(%error, "an HTTP/2 connection of a client ended");
                    return;
                }
                None => return,
            },
            Some(_) = streams.join_next() => quiet.since = Instant::now(),
            () = &mut draining, if closing.is_none() => {}
            () = sleep_until(look) => {}
        }
        if closing.is_none() && (proxy.is_draining() || (streams.is_empty() && quiet.is_over(&limits))) {
            http.graceful_shutdown();
            closing = Some(Instant::now());
        }
        if streams.is_empty() && closing.is_some_and(|since| since.elapsed() > LINGER) {
            return;
        }
    }
}

/// How long nothing has been on a connection.
struct Quiet {
    since: Instant,
    has_served: bool,
}

impl Quiet {
    fn is_over(&self, limits: &Limits) -> bool {
        let limit = if self.has_served { limits.keep_alive } else { limits.header_timeout };
        self.since.elapsed() >= limit
    }
}

/// One request, from its head to the end of its answer.
async fn stream(inbound: Arc<Inbound>, request: Request<RecvStream>, respond: SendResponse<Bytes>) {
    let (mut head, incoming) = request.into_parts();
    let (is_tunnel, is_head) = (head.method == Method::CONNECT, head.method == Method::HEAD);
    let key = normalise(&mut head);
    let respond = Arc::new(Responder::new(respond));
    // Behind a CONNECT comes what the tunnel carries.
    let (body, tunnel) = match is_tunnel {
        true => (IncomingBody::Empty, Some(incoming)),
        false => (IncomingBody::Http2(content(incoming, &head.headers, &respond)), None),
    };
    let interim: Arc<dyn InterimSink> = respond.clone();
    let answered = forward::answer(&inbound, Request::from_parts(head, body), Some(interim), false);
    match respond.unless_reset(&inbound.proxy, answered).await {
        Some(Reply::Answer(mut answer)) => {
            // One of our own is made as if for a GET (RFC 9110 section 9.3.2).
            if is_head {
                answer.response.body_mut().withhold();
            }
            respond.deliver(&inbound.proxy, answer).await;
        }
        Some(Reply::Takeover(response, Takeover::Upgraded(upgraded)))
            if key.is_some_and(|key| !key.is_accepted_by(response.headers())) =>
        {
            let error = Error::UpstreamInvalid(Cause::from("the 101 does not accept the WebSocket's key"));
            let refused = answer::refuse(error, upgraded.held.ledger, None);
            respond.deliver(&inbound.proxy, refused).await;
        }
        Some(Reply::Takeover(response, next)) => {
            if let Some(incoming) = tunnel {
                respond.become_tunnel(&inbound.proxy, response, next, incoming).await;
            }
        }
        None => {}
    }
}

/// The content of a request, whose client may want to be told that it is wanted (RFC 9110 section 10.1.1).
fn content(incoming: RecvStream, headers: &HeaderMap, respond: &Arc<Responder>) -> StreamBody {
    let content = StreamBody::new(incoming, headers);
    if !expects_continue(headers) {
        return content;
    }
    let respond = respond.clone();
    content.asked_for(move || respond.interim(StatusCode::CONTINUE, &HeaderMap::new()))
}

/// Brings a head into the form that the rest of the proxy knows from HTTP/1. The key is what the answer of a
/// WebSocket has to prove that it has read.
fn normalise(head: &mut request::Parts) -> Option<WebSocketKey> {
    let mut key = None;
    // RFC 8441 section 4: what a GET with `Upgrade` is in HTTP/1.1.
    if let Some(protocol) = head.extensions.remove::<Protocol>()
        && let Ok(upgrade) = HeaderValue::from_str(protocol.as_str())
    {
        head.method = Method::GET;
        head.extensions.insert(ExtendedConnect);
        head.headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        head.headers.insert(header::UPGRADE, upgrade);
        if protocol.as_str().eq_ignore_ascii_case("websocket") {
            let own = key.insert(WebSocketKey::random());
            head.headers.insert(SEC_WEBSOCKET_KEY.clone(), own.to_value());
        }
    }
    // RFC 9113 section 8.3.1: the authority is what `Host` says elsewhere.
    if let Some(authority) = head.uri.authority().filter(|_| head.method != Method::CONNECT)
        && let Ok(host) = HeaderValue::from_str(authority.as_str())
    {
        head.headers.insert(header::HOST, host);
    }
    // RFC 9113 section 8.2.3: a cookie may come in pieces.
    if head.headers.get_all(header::COOKIE).iter().nth(1).is_some() {
        let crumbs: Vec<&[u8]> =
            head.headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect();
        if let Ok(cookie) = HeaderValue::from_bytes(&crumbs.join(&b"; "[..])) {
            head.headers.insert(header::COOKIE, cookie);
        }
    }
    key
}

/// Where the answer of a stream goes, interim ones included.
struct Responder(Mutex<Answering>);

struct Answering {
    respond: SendResponse<Bytes>,
    /// The final head has gone out. The library would still send interim ones, which mean nothing then.
    is_answered: bool,
}

impl InterimSink for Responder {
    fn interim(&self, status: StatusCode, headers: &HeaderMap) {
        let mut early = Response::new(());
        *early.status_mut() = status;
        for (name, value) in Forwarded::of(headers).iter() {
            early.headers_mut().append(name, value.clone());
        }
        let mut answering = self.0.lock();
        if !answering.is_answered {
            // A client that has gone shows at the next turn.
            let _ = answering.respond.send_informational(early);
        }
    }
}

impl Responder {
    fn new(respond: SendResponse<Bytes>) -> Self {
        Self(Mutex::new(Answering { respond, is_answered: false }))
    }

    /// Sends the final head.
    fn answer(&self, head: Response<()>, is_bodiless: bool) -> Result<SendStream<Bytes>, h2::Error> {
        let mut answering = self.0.lock();
        answering.is_answered = true;
        answering.respond.send_response(head, is_bodiless)
    }

    /// Works until the client resets the stream: `None` then.
    async fn unless_reset<T>(&self, proxy: &Proxy, work: impl Future<Output = T>) -> Option<T> {
        let mut work = pin!(work);
        let mut ending = pin!(proxy.ending());
        poll_fn(|cx| {
            // What runs here looks for itself whether calls are being ended; it must be woken for that.
            let _ = ending.as_mut().poll(cx);
            if self.0.lock().respond.poll_reset(cx).is_ready() {
                return Poll::Ready(None);
            }
            work.as_mut().poll(cx).map(Some)
        })
        .await
    }

    /// Sends an answer, no longer than its bounds let a client take.
    async fn deliver(&self, proxy: &Proxy, answer: Answer) {
        let Answer { response, end, stall, .. } = answer;
        let (parts, body) = response.into_parts();
        let is_bodiless = body.is_end_stream();
        let Ok(stream) = self.answer(head(parts), is_bodiless) else { return };
        if is_bodiless {
            return;
        }
        let mut outflow = Outflow::new(body, stream);
        let mut patience = Patience { end, stall, blocked_since: None, timer: None };
        let mut ending = pin!(proxy.ending());
        poll_fn(|cx| {
            let _ = ending.as_mut().poll(cx);
            // However it ends, the stream's own end or reset has told the client.
            if outflow.poll(cx).is_ready() {
                return Poll::Ready(());
            }
            std::task::ready!(patience.poll(outflow.is_blocked(), cx));
            outflow.reset(Reason::CANCEL);
            Poll::Ready(())
        })
        .await;
    }

    /// Turns the stream into the tunnel that was asked for.
    async fn become_tunnel(
        &self,
        proxy: &Arc<Proxy>,
        response: Response<AnswerBody>,
        next: Takeover,
        incoming: RecvStream,
    ) {
        let (mut parts, _) = response.into_parts();
        // What is a 101 in HTTP/1.1 is a success here (RFC 8441 section 5).
        parts.status = StatusCode::OK;
        parts.headers.remove(&SEC_WEBSOCKET_ACCEPT);
        if let Ok(outgoing) = self.answer(head(parts), false) {
            next.run(Http2Stream::new(incoming, outgoing).into(), proxy.clone()).await;
        }
    }
}

/// The head of an answer without what HTTP/2 has no place for (RFC 9113 section 8.2.2).
fn head(parts: response::Parts) -> Response<()> {
    let mut head = Response::new(());
    *head.status_mut() = parts.status;
    *head.headers_mut() = parts.headers;
    hop_by_hop::strip(head.headers_mut());
    head
}

/// How long a client may leave an answer waiting.
struct Patience {
    end: Option<Instant>,
    stall: Duration,
    blocked_since: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Patience {
    /// Ready when a client that does not take what is there has been waited for long enough.
    fn poll(&mut self, is_blocked: bool, cx: &mut Context<'_>) -> Poll<()> {
        if !is_blocked {
            self.blocked_since = None;
            return Poll::Pending;
        }
        let since = *self.blocked_since.get_or_insert_with(Instant::now);
        let due = self.end.map_or(since + self.stall, |end| end.min(since + self.stall));
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
        if timer.deadline() != due {
            timer.as_mut().reset(due);
        }
        timer.as_mut().poll(cx)
    }
}
