//! One client connection that speaks HTTP/2: its streams are requests like any other, each a task of
//! its own, bounded by what the connection lets a client open.
//!
//! A stream that its client resets is dropped with all that it was waiting for. A connection ends with a
//! GOAWAY when nothing has been on it for the keep-alive time or the process drains; one on which no
//! request ever comes gets the time of a head.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use h2::ext::Protocol;
use h2::server::{Builder, SendResponse};
use h2::{Reason, RecvStream};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
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
use crate::pipeline::Proxy;
use crate::pipeline::answer::{Answer, AnswerBody};
use crate::wire::hop_by_hop::{self, Forwarded};
use crate::wire::incoming::{IncomingBody, StreamBody};
use crate::wire::outflow::Outflow;

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

static SEC_WEBSOCKET_KEY: HeaderName = HeaderName::from_static("sec-websocket-key");
static SEC_WEBSOCKET_ACCEPT: HeaderName = HeaderName::from_static("sec-websocket-accept");

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
    let is_tunnel = head.method == Method::CONNECT;
    normalise(&mut head);
    let respond = Arc::new(Responder(Mutex::new(respond)));
    // Behind a CONNECT comes what the tunnel carries.
    let (body, tunnel) = match is_tunnel {
        true => (IncomingBody::Empty, Some(incoming)),
        false => (IncomingBody::Http2(content(incoming, &head.headers, &respond)), None),
    };
    let interim: Arc<dyn InterimSink> = respond.clone();
    let answered = forward::answer(&inbound, Request::from_parts(head, body), Some(interim), false);
    match respond.unless_reset(&inbound.proxy, answered).await {
        Some(Reply::Answer(answer)) => respond.deliver(&inbound.proxy, answer).await,
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

/// Brings a head into the form that the rest of the proxy knows from HTTP/1.
fn normalise(head: &mut request::Parts) {
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
    // RFC 8441 section 4: what a GET with `Upgrade` is in HTTP/1.1.
    if let Some(protocol) = head.extensions.remove::<Protocol>()
        && let Ok(protocol) = HeaderValue::from_str(protocol.as_str())
    {
        head.method = Method::GET;
        head.extensions.insert(ExtendedConnect);
        if let Some(host) = head.uri.authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok()) {
            head.headers.insert(header::HOST, host);
        }
        head.headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        head.headers.insert(header::UPGRADE, protocol);
        head.headers.insert(SEC_WEBSOCKET_KEY.clone(), websocket_key());
    }
}

/// Sixteen random bytes in base64 (RFC 6455 section 4.1), which say no more than that this is a new
/// handshake.
fn websocket_key() -> HeaderValue {
    let alphabet = |_| fastrand::alphanumeric();
    // The last digit holds two bits.
    let key: String =
        (0..21).map(alphabet).chain(fastrand::choice(['A', 'Q', 'g', 'w'])).chain("==".chars()).collect();
    HeaderValue::try_from(key).unwrap_or(HeaderValue::from_static("AAAAAAAAAAAAAAAAAAAAAA=="))
}

/// Where the answer of a stream goes, interim ones included.
struct Responder(Mutex<SendResponse<Bytes>>);

impl InterimSink for Responder {
    fn interim(&self, status: StatusCode, headers: &HeaderMap) {
        let mut early = Response::new(());
        *early.status_mut() = status;
        for (name, value) in Forwarded::of(headers).iter() {
            early.headers_mut().append(name, value.clone());
        }
        // A client that has gone shows at the next turn.
        let _ = self.0.lock().send_informational(early);
    }
}

impl Responder {
    /// Works until the client resets the stream: `None` then.
    async fn unless_reset<T>(&self, proxy: &Proxy, work: impl Future<Output = T>) -> Option<T> {
        let mut work = pin!(work);
        let mut ending = pin!(proxy.ending());
        poll_fn(|cx| {
            // What runs here looks for itself whether calls are being ended; it must be woken for that.
            let _ = ending.as_mut().poll(cx);
            if self.0.lock().poll_reset(cx).is_ready() {
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
        let Ok(stream) = self.0.lock().send_response(head(parts), is_bodiless) else { return };
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
        let sent = self.0.lock().send_response(head(parts), false);
        if let Ok(outgoing) = sent {
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
