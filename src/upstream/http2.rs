//! One HTTP/2 connection to an upstream, shared by the requests that are on it.
//!
//! The connection itself is a task, since what comes on it is for many; each stream is polled by its
//! own request, and dropping the request resets the stream. A request needs a [`Slot`]: the peer says
//! how many streams it takes at once (RFC 9113 section 5.1.2), and opening more ends the connection
//! with some peers, so the slots are counted here and the pool opens another connection instead.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use h2::client::{Builder, Connection, ResponseFuture, SendRequest};
use h2::{Ping, PingPong, Reason, RecvStream};
use http::{Method, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep, sleep, timeout};

use super::connection::{Interim, Origin, SendFailure, client_body_error, is_tls_refusal};
use super::socket::{Socket, Traffic};
use crate::error::{Cause, Error};
use crate::wire::body::RequestBody;
use crate::wire::incoming::{IncomingBody, StreamBody};
use crate::wire::outflow::{Outflow, Stopped};

/// Streams that we open on one connection, whatever the peer would take: so many windows make up the
/// connection's, and a stream whose client does not read never takes its neighbours' share.
const MAX_STREAMS: usize = 64;
/// Streams on a connection until the peer has said how many it takes: RFC 9113 section 5.1.2 lets it say one.
const FIRST_STREAMS: usize = 1;
/// What one stream may have on its way to a client that does not read.
const STREAM_WINDOW: u32 = 256 * 1024;
/// What all streams of a connection may have on their way.
const CONNECTION_WINDOW: u32 = MAX_STREAMS as u32 * STREAM_WINDOW;
/// What small frames of bodies may cost while they wait, at up to 256 bytes each. Events of forty bytes for
/// clients that do not read fill their windows before this; the library would sooner take them for an attack,
/// and the connection from those who share it.
const SMALL_FRAMES: usize = 6 * CONNECTION_WINDOW as usize;
/// Streams of the last second that we reset. An answer that is still on its way on one that is forgotten counts
/// as a fault of the peer, and too many of them end the connection; cancelled requests are none.
const REMEMBERED_RESETS: usize = 1024;
/// A larger response head is a fault of the upstream, as with HTTP/1.
const MAX_RESPONSE_HEAD: u32 = 64 * 1024;
/// Bytes of request bodies that wait in the connection for the socket, for each stream.
const SEND_BUFFER: usize = 64 * 1024;
/// A request that waited so long while not one byte came on the connection says that it is dead.
const DEAD_AFTER: Duration = Duration::from_secs(1);

/// The length of an answer to a PING. Peers that count the pings of a client while they have nothing to say,
/// as servers of gRPC do, are not asked again before they have said something else.
const PONG: u64 = 17;
/// How long the last frames of a stream or a connection are waited for.
const GOODBYE: Duration = Duration::from_secs(2);

/// Tells connections apart.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// A connection. Dropping the last reference, slots included, ends it with a GOAWAY.
pub struct Shared {
    id: u64,
    sender: SendRequest<Bytes>,
    vitals: Arc<Vitals>,
    traffic: Arc<Traffic>,
    origin: Origin,
    opened: Instant,
}

/// What the connection's task and its users tell each other.
struct Vitals {
    in_flight: AtomicUsize,
    /// Streams that the peer takes, as its settings last said: asking the library takes a lock that all who
    /// use the connection share.
    limit: AtomicUsize,
    /// The peer has said how many streams it takes.
    is_settled: AtomicBool,
    is_retired: AtomicBool,
    has_served: AtomicBool,
    /// When the last request left it, counted from its opening.
    left_ms: AtomicU64,
    /// A request was given up while the connection said nothing.
    is_in_doubt: AtomicBool,
    /// Its last user has gone.
    is_left: AtomicBool,
    /// Wakes the connection's task for one of the two.
    look: Notify,
    /// Told whenever there may be room for a stream that there was none for.
    changed: Arc<Notify>,
}

impl Vitals {
    fn take_limit(&self, limit: usize) {
        self.limit.store(limit.min(MAX_STREAMS), Ordering::Relaxed);
        if limit != FIRST_STREAMS {
            self.settle();
        }
    }

    fn settle(&self) {
        if !self.is_settled.swap(true, Ordering::Relaxed) {
            self.changed.notify_waiters();
        }
    }

    fn retire(&self) {
        self.is_retired.store(true, Ordering::Relaxed);
        self.changed.notify_waiters();
    }
}

impl Shared {
    /// Begins HTTP/2 on `socket`. `changed` is told when there is room for more streams.
    ///
    /// # Errors
    /// [`Error::UpstreamReset`] when the socket fails at the preface.
    pub async fn start(socket: Socket, origin: Origin, changed: Arc<Notify>) -> Result<Arc<Self>, Error> {
        let traffic = socket.traffic();
        let (sender, mut connection) = Builder::new()
            .enable_push(false)
            .initial_max_send_streams(FIRST_STREAMS)
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .data_frame_budget(SMALL_FRAMES)
            .max_concurrent_reset_streams(REMEMBERED_RESETS)
            .max_header_list_size(MAX_RESPONSE_HEAD)
            .max_send_buffer_size(SEND_BUFFER)
            .handshake(socket)
            .await
            .map_err(|error| classify(&error))?;
        let vitals = Arc::new(Vitals {
            in_flight: AtomicUsize::new(0),
            limit: AtomicUsize::new(FIRST_STREAMS),
            is_settled: AtomicBool::new(false),
            is_retired: AtomicBool::new(false),
            has_served: AtomicBool::new(false),
            left_ms: AtomicU64::new(0),
            is_in_doubt: AtomicBool::new(false),
            is_left: AtomicBool::new(false),
            look: Notify::new(),
            changed,
        });
        let pings = connection.ping_pong();
        // Ends with the connection: when the peer closes it, or the last user has gone.
        tokio::spawn(Task { connection, vitals: vitals.clone(), traffic: traffic.clone(), pings }.run());
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(Self { id, sender, vitals, traffic, origin, opened: Instant::now() }))
    }

    /// Its number in this process; never 0.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// What it was made for.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// When it was opened.
    pub fn opened(&self) -> Instant {
        self.opened
    }

    /// Whether the peer has said how many streams it takes at once.
    pub fn is_settled(&self) -> bool {
        self.vitals.is_settled.load(Ordering::Relaxed)
    }

    /// Whether no new request may use it.
    pub fn is_retired(&self) -> bool {
        self.vitals.is_retired.load(Ordering::Relaxed)
    }

    /// Lets the requests on it finish and takes no new ones.
    pub fn retire(&self) {
        self.vitals.retire();
    }

    /// Whether no request has been on it for so long.
    pub fn is_idle_for(&self, limit: Duration, now: Instant) -> bool {
        let left = self.opened + Duration::from_millis(self.vitals.left_ms.load(Ordering::Relaxed));
        self.in_flight() == 0 && now.saturating_duration_since(left) >= limit
    }

    /// Requests on it now.
    pub fn in_flight(&self) -> usize {
        self.vitals.in_flight.load(Ordering::Relaxed)
    }

    /// How many streams it takes at once.
    pub fn limit(&self) -> usize {
        self.vitals.limit.load(Ordering::Relaxed)
    }

    /// A place for one request, if there is one. To be called by one at a time.
    ///
    /// A connection whose peer has said GOAWAY lasts as long as what is on it, but takes nothing more: it
    /// is found out here, since a request that fails on it may have a body that passes only once.
    pub fn claim(self: &Arc<Self>) -> Option<Slot> {
        if self.is_retired() || self.in_flight() >= self.limit() {
            return None;
        }
        let mut sender = self.sender.clone();
        if let Poll::Ready(Err(_)) = sender.poll_ready(&mut Context::from_waker(Waker::noop())) {
            self.retire();
            return None;
        }
        self.vitals.in_flight.fetch_add(1, Ordering::Relaxed);
        let is_reused = self.vitals.has_served.swap(true, Ordering::Relaxed);
        Some(Slot {
            shared: self.clone(),
            sender,
            read_before: self.traffic.read(),
            claimed: Instant::now(),
            is_reused,
            is_answered: false,
        })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.vitals.is_left.store(true, Ordering::Relaxed);
        self.vitals.look.notify_one();
    }
}

/// What runs a connection, and looks whether its peer is still there.
struct Task {
    connection: Connection<Socket, Bytes>,
    vitals: Arc<Vitals>,
    traffic: Arc<Traffic>,
    pings: Option<PingPong>,
}

/// What the peer's silence means at the end of a wait.
struct Wait {
    timer: Pin<Box<Sleep>>,
    /// Bytes that had come before; `None` when the connection is to end whatever comes.
    read: Option<u64>,
}

impl Task {
    /// Lasts as long as the connection.
    async fn run(self) {
        let Self { mut connection, vitals, traffic, mut pings } = self;
        let mut wait: Option<Wait> = None;
        // Bytes that were there when the peer was last asked, its answer included.
        let mut asked_at: Option<u64> = None;
        loop {
            let run = poll_fn(|cx| {
                let polled = Pin::new(&mut connection).poll(cx);
                vitals.take_limit(connection.max_concurrent_send_streams());
                polled
            });
            tokio::select! {
                biased;
                ended = run => {
                    if let Err(error) = ended {
                        tracing::debug!(%error, "an HTTP/2 connection to an upstream ended");
                    }
                    break;
                }
                () = vitals.look.notified() => {
                    let is_in_doubt = vitals.is_in_doubt.swap(false, Ordering::Relaxed);
                    let read = traffic.read();
                    if vitals.is_left.load(Ordering::Relaxed) {
                        wait = Some(Wait { timer: Box::pin(sleep(GOODBYE)), read: None });
                    } else if is_in_doubt && wait.is_none() && asked_at.is_none_or(|then| read > then) {
                        ask(pings.as_mut());
                        asked_at = Some(read + PONG);
                        wait = Some(Wait { timer: Box::pin(sleep(DEAD_AFTER)), read: Some(read) });
                    }
                }
                () = elapsed(&mut wait) => match wait.take().and_then(|wait| wait.read) {
                    None => break,
                    Some(read) if traffic.read() == read => vitals.retire(),
                    Some(_) => {}
                }
            }
        }
        vitals.retire();
    }
}

/// Sends a PING. Any byte that comes is answer enough, so the library's own is only fetched to make room for
/// the next.
fn ask(pings: Option<&mut PingPong>) {
    if let Some(pings) = pings {
        let _ = pings.poll_pong(&mut Context::from_waker(Waker::noop()));
        let _ = pings.send_ping(Ping::opaque());
    }
}

async fn elapsed(wait: &mut Option<Wait>) {
    match wait {
        Some(wait) => wait.timer.as_mut().await,
        None => std::future::pending().await,
    }
}

/// One request's place on a connection; given back when dropped.
pub struct Slot {
    shared: Arc<Shared>,
    sender: SendRequest<Bytes>,
    read_before: u64,
    claimed: Instant,
    is_reused: bool,
    is_answered: bool,
}

impl Slot {
    /// The connection.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Whether an earlier request was on the connection, so that the peer may be closing it right now.
    pub fn is_reused(&self) -> bool {
        self.is_reused
    }

    /// Sends a request and waits for the head of its answer. Dropping the future resets the stream.
    ///
    /// # Errors
    /// [`SendFailure`], which knows whether the request can have had an effect.
    pub async fn send(
        mut self,
        request: Request<RequestBody>,
        interim: Option<Interim>,
    ) -> Result<(Response<()>, Answering), SendFailure> {
        let (head, body) = request.into_parts();
        let is_bodiless = body.is_end_stream();
        let is_head = head.method == Method::HEAD;
        let begun = match poll_fn(|cx| self.sender.poll_ready(cx)).await {
            Ok(()) => self.sender.send_request(Request::from_parts(head, ()), is_bodiless),
            Err(error) => Err(error),
        };
        let (mut answer, stream) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                // What takes no stream any more would refuse the next one as well.
                self.shared.retire();
                return Err(SendFailure {
                    is_unanswered: true,
                    is_unsent: true,
                    is_refused: is_unprocessed(&error),
                    wants_http1: false,
                    error: classify(&error),
                    body: body.into_unread(),
                });
            }
        };
        let mut outflow = (!is_bodiless).then(|| Outflow::new(body, stream));
        let mut has_begun = false;
        let outcome = poll_fn(|cx| {
            // The answer is asked for only once it is there: asked before, it would throw away interim ones
            // that come in the same moment.
            loop {
                match answer.poll_informational(cx) {
                    Poll::Ready(Some(Ok(early))) => {
                        has_begun = true;
                        pass_early(&early, interim.as_ref())?;
                    }
                    Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(Failed::Stream(error))),
                    Poll::Ready(None) => return poll_answer(&mut answer, cx).map_err(Failed::Stream),
                    Poll::Pending => break,
                }
            }
            match send_on(&mut outflow, cx) {
                Ok(()) => Poll::Pending,
                Err(lost) => Poll::Ready(Err(Failed::Exchange(lost))),
            }
        })
        .await;
        match outcome {
            Ok(response) => {
                self.is_answered = true;
                self.shared.vitals.settle();
                let (head, stream) = response.into_parts();
                let (body, ending) = match is_head || has_no_content(head.status) {
                    true => (IncomingBody::Empty, Some(stream).filter(|stream| !stream.is_end_stream())),
                    false => (IncomingBody::Http2(StreamBody::new(stream, &head.headers)), None),
                };
                Ok((Response::from_parts(head, ()), Answering { body, ending, outflow, slot: Some(self) }))
            }
            Err(Failed::Exchange(error)) => Err(SendFailure {
                error,
                is_unanswered: false,
                is_unsent: false,
                is_refused: false,
                wants_http1: false,
                body: None,
            }),
            Err(Failed::Stream(error)) => {
                let is_refused = is_unprocessed(&error) && !has_begun;
                if error.is_go_away() || error.is_io() {
                    self.shared.retire();
                }
                Err(SendFailure {
                    // A reset speaks of a request that was looked at; only a connection that went away may
                    // have gone before.
                    is_unanswered: is_refused || (error.is_io() && !has_begun),
                    is_unsent: is_refused,
                    is_refused,
                    wants_http1: error.reason() == Some(Reason::HTTP_1_1_REQUIRED),
                    error: classify(&error),
                    body: outflow.and_then(|outflow| outflow.into_body().into_unread()),
                })
            }
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let is_mute = !self.is_answered && self.shared.traffic.read() == self.read_before;
        let Shared { vitals, opened, .. } = &*self.shared;
        if is_mute && self.claimed.elapsed() >= DEAD_AFTER {
            self.shared.retire();
        } else if is_mute {
            // A hedge may have answered in its place, as it would every time.
            vitals.is_in_doubt.store(true, Ordering::Relaxed);
            vitals.look.notify_one();
        }
        vitals.left_ms.store(opened.elapsed().as_millis() as u64, Ordering::Relaxed);
        vitals.in_flight.fetch_sub(1, Ordering::Relaxed);
        vitals.changed.notify_one();
    }
}

enum Failed {
    /// What was said, or the client's own body, is at fault.
    Exchange(Error),
    Stream(h2::Error),
}

/// Passes an interim answer on.
fn pass_early(early: &Response<()>, interim: Option<&Interim>) -> Result<(), Failed> {
    // RFC 9113 section 8.6: passed on, an HTTP/1 client would take its connection for switched.
    if early.status() == StatusCode::SWITCHING_PROTOCOLS {
        let cause = Cause::from("a 101 on an HTTP/2 stream");
        return Err(Failed::Exchange(Error::UpstreamInvalid(cause)));
    }
    if let Some(interim) = interim {
        interim.pass(early.status(), early.headers());
    }
    Ok(())
}

/// Whether an answer of this status never has content (RFC 9110 sections 15.3.5 and 15.4.5).
fn has_no_content(status: StatusCode) -> bool {
    matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
}

fn poll_answer(
    answer: &mut ResponseFuture,
    cx: &mut Context<'_>,
) -> Poll<Result<Response<RecvStream>, h2::Error>> {
    Pin::new(answer).poll(cx)
}

/// Goes on sending the request's body. A peer that wants no more of it answers all the same
/// (RFC 9113 section 8.1), so only a fault of the client's own ends the exchange.
fn send_on(outflow: &mut Option<Outflow<RequestBody>>, cx: &mut Context<'_>) -> Result<(), Error> {
    let Some(sending) = outflow else { return Ok(()) };
    match sending.poll(cx) {
        Poll::Pending => return Ok(()),
        Poll::Ready(Ok(()) | Err(Stopped::Peer(_))) => {}
        Poll::Ready(Err(Stopped::Body(lost))) => {
            let lost = client_body_error(&lost).unwrap_or_else(|| Error::Internal(Cause::chain(&lost)));
            return Err(lost);
        }
    }
    *outflow = None;
    Ok(())
}

/// A stream with an answer on it.
pub struct Answering {
    body: IncomingBody,
    /// The end of an answer without content, which some peers send in a frame of its own.
    ending: Option<RecvStream>,
    outflow: Option<Outflow<RequestBody>>,
    slot: Option<Slot>,
}

impl Answering {
    /// Reads on in the answer's body, and sends on what is left of the request's.
    pub fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if let Err(lost) = send_on(&mut self.outflow, cx) {
            return Poll::Ready(Some(Err(lost)));
        }
        Pin::new(&mut self.body)
            .poll_frame(cx)
            .map_err(|error| Error::UpstreamIncomplete(Cause::chain(&error)))
    }

    /// Whether all of the body has been read.
    pub fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    /// How much of the body is to come.
    pub fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }

    /// Gives the place on the connection back. All that was promised has come, but the peer may say that this was all
    /// in a frame of its own.
    pub fn finish(self) {
        let Self { mut body, ending, slot, .. } = self;
        if ending.is_none() && body.is_end_stream() {
            return;
        }
        // Given up before its end, the stream would be reset.
        tokio::spawn(async move {
            let _place = slot;
            let end = async {
                match ending {
                    Some(mut ending) => drop(ending.data().await),
                    None => drop(poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await),
                }
            };
            let _ = timeout(GOODBYE, end).await;
        });
    }
}

/// Whether the peer says that it has not looked at the request (RFC 9113 section 8.7): the stream was
/// refused, or lies above the last one of a GOAWAY.
fn is_unprocessed(error: &h2::Error) -> bool {
    let is_refused = error.is_reset()
        && matches!(error.reason(), Some(Reason::REFUSED_STREAM | Reason::HTTP_1_1_REQUIRED));
    error.is_remote() && (is_refused || error.is_go_away())
}

fn classify(error: &h2::Error) -> Error {
    let cause = Cause::chain(error);
    if error.get_io().is_some_and(is_tls_refusal) {
        return Error::TlsFailed(cause);
    }
    // What the library complains about by itself is what the peer did wrong.
    if error.is_library() { Error::UpstreamInvalid(cause) } else { Error::UpstreamReset(cause) }
}

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpStream};

    use super::super::socket::OwnSockets;
    use super::*;
    use crate::wire::authority::Authority;

    #[tokio::test]
    async fn a_connection_that_nobody_uses_any_more_ends_whatever_is_left_on_it() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let peer = listener.local_addr().unwrap();
        let stream = TcpStream::connect(peer).await.unwrap();
        let near = stream.local_addr().unwrap();
        let sockets = Arc::new(OwnSockets::default());
        let mark = sockets.mark(&stream);
        let to = Authority::from_ip(peer.ip(), peer.port());
        let origin = Origin { to, peer, tls: None, is_pinned: false };
        let shared = Shared::start(Socket::plain(stream, peer, mark), origin, Arc::default()).await.unwrap();
        // Keeps the library from ending it, as a peer does that takes nothing.
        let _left = shared.sender.clone();
        drop(shared);
        assert!(sockets.holds(near, peer), "the last frames may still go out");
        let closed = async {
            while sockets.holds(near, peer) {
                tokio::task::yield_now().await;
            }
        };
        timeout(GOODBYE * 3, closed).await.expect("the connection ends");
    }
}
