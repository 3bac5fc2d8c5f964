//! The answer on its way to the client: the head at once, the body as it comes.
//!
//! The permit, the deadline, the verdict and the account live in the body until it ends, however it
//! ends. A body that cannot be completed ends in an error, which the listener turns into a message
//! that is visibly incomplete; an event stream says so in its own words first.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{Response, StatusCode, Version, response};
use http_body::{Body, Frame, SizeHint};
use tokio::time::Instant;

use super::attempt::Head;
use super::feed::LeaderBody;
use super::found::{Found, Led, Live, Note, Opened, Whole};
use super::ledger::Ledger;
use super::record::Recorder;
use super::tail::Tail;
use crate::call::Tried;
use crate::error::Error;
use crate::policy::bulkhead::Permit;
use crate::policy::deadline::Deadline;
use crate::respond;
use crate::respond::headers::{self, HedgeEnd, Passage};
use crate::upstream::connection::Exchange;
use crate::upstream::registry::Lane;
use crate::wire::event_stream::EventStream;
use crate::wire::hop_by_hop;

/// The body of any answer that a client gets.
pub enum AnswerBody {
    /// One of hedgerow's own, or none.
    Full(Option<Bytes>),
    /// An upstream's, streamed.
    Stream(Box<Streaming>),
    /// One of hedgerow's own, made as it goes out.
    Made(Pin<Box<dyn Body<Data = Bytes, Error = Error> + Send>>),
}

impl AnswerBody {
    /// A body that is all there.
    pub fn full(bytes: Bytes) -> Self {
        Self::Full(Some(bytes).filter(|bytes| !bytes.is_empty()))
    }

    /// No body.
    pub fn empty() -> Self {
        Self::Full(None)
    }

    /// Takes the content of an answer to HEAD away. One of an upstream has none in the first place.
    pub fn withhold(&mut self) {
        if let Self::Full(content) = self {
            *content = None;
        }
    }

    /// The reader has what it wants and gives up the rest: the answer is judged by its head.
    pub fn suffices(self) {
        if let Self::Stream(mut streaming) = self {
            streaming.ledger.progress().suffice();
            streaming.ledger.complete();
        }
    }
}

/// A response, and what bounds its delivery where the client does not read.
pub struct Answer {
    /// What to send.
    pub response: Response<AnswerBody>,
    /// The body must have gone out by then.
    pub end: Option<Instant>,
    /// A client that takes nothing for so long is given up.
    pub stall: Duration,
    /// When the answer is an error of hedgerow's own.
    pub refusal: Option<Refusal>,
}

/// An error that is answered, whatever form the answer has.
#[derive(Clone, Copy)]
pub struct Refusal {
    /// The error's word.
    pub word: &'static str,
    /// Its status, which a gRPC client does not see as such.
    pub status: StatusCode,
}

impl Answer {
    /// An answer of hedgerow's own, all there.
    pub fn own(response: Response<AnswerBody>, refusal: Option<Refusal>) -> Self {
        Self { response, end: None, stall: OWN_STALL, refusal }
    }
}

/// A client that does not take an answer of a few hundred bytes is given up after this.
const OWN_STALL: Duration = Duration::from_secs(60);

/// An upstream that has agreed to change the protocol.
pub struct Upgraded {
    /// The 101 for the client.
    pub response: Response<AnswerBody>,
    /// The upstream's end.
    pub exchange: Exchange,
    /// What holds while the tunnel is open.
    pub held: Held,
}

/// What a tunnel holds until it closes.
pub struct Held {
    /// Its account.
    pub ledger: Ledger,
    /// Its place among the calls at once.
    pub permit: Option<Permit>,
    /// Its rules.
    pub lane: Lane,
}

/// Makes the answer of a call from what was found for it.
pub fn deliver(found: Found, deadline: Option<&Deadline>, ledger: Ledger) -> Answer {
    match found {
        Found::Live(live) => {
            let Opened { response, tail, hedge, elapsed, at, note, recorder } = live.open(deadline);
            let told = Told { elapsed: Some(elapsed), at, hedge, note };
            stream(response, Source::Upstream(tail), told, recorder, ledger)
        }
        Found::Led(led) => {
            let Led { response, body, hedge, elapsed, at, note, .. } = *led;
            let told = Told { elapsed: Some(elapsed), at, hedge, note };
            stream(response, Source::Led(body), told, None, ledger)
        }
        Found::Whole(whole) => {
            let Whole { response, elapsed, hedge, note, .. } = *whole;
            let told = Told { elapsed, at: Instant::now(), hedge, note };
            let policy = ledger.stages().and_then(|stages| stages.deadline.as_ref());
            let end = deadline.and_then(|end| end.of_body(policy, false));
            whole_answer(response, end.map(|end| end.at), told, ledger)
        }
    }
}

/// What is told about an answer beside its head and body.
struct Told {
    elapsed: Option<Duration>,
    at: Instant,
    hedge: Option<HedgeEnd>,
    note: Note,
}

fn stream(
    response: Response<()>,
    source: Source,
    told: Told,
    recorder: Option<Box<Recorder>>,
    mut ledger: Ledger,
) -> Answer {
    let events = EventStream::of(&response);
    let (mut head, ()) = response.into_parts();
    pass_on(&mut head, &told, &mut ledger);
    let (stall, end) = (source.stall(), source.end());
    let mut streaming = Streaming { source, ledger, events, recorder, broken: None };
    let body = if streaming.source.is_end_stream() {
        streaming.complete();
        AnswerBody::empty()
    } else {
        AnswerBody::Stream(Box::new(streaming))
    };
    Answer { response: Response::from_parts(head, body), end, stall, refusal: None }
}

/// One that goes out at once closes its account; a larger one is a body like any other.
fn whole_answer(response: Response<Bytes>, end: Option<Instant>, told: Told, mut ledger: Ledger) -> Answer {
    if response.body().len() > PIECE {
        let (head, body) = response.into_parts();
        let source = Source::Kept { body, end };
        return stream(Response::from_parts(head, ()), source, told, None, ledger);
    }
    let (mut head, body) = response.into_parts();
    pass_on(&mut head, &told, &mut ledger);
    ledger.sent(body.len());
    ledger.complete();
    Answer::own(Response::from_parts(head, AnswerBody::full(body)), None)
}

/// What is passed on at once of a body that is all here.
const PIECE: usize = 64 << 10;

/// Makes a head ours.
fn pass_on(head: &mut response::Parts, told: &Told, ledger: &mut Ledger) {
    let progress = ledger.progress();
    headers::pass_on(
        &mut head.headers,
        &Passage {
            attempts: progress.attempts(),
            queued: progress.queue_time(),
            upstream: told.elapsed,
            hedge: told.hedge,
            cache: told.note.cache,
            stand_in: told.note.stand_in,
            tried: &progress.tried(),
            is_final: progress.is_final() && is_failure(head.status),
        },
    );
    head.version = Version::HTTP_11;
    ledger.answers(head.status, told.hedge, told.note, told.at);
}

fn is_failure(status: StatusCode) -> bool {
    status.is_client_error() || status.is_server_error()
}

/// Passes a 101 on. The fields that agree on the protocol are hop-by-hop, and this is the one answer
/// that must keep them (RFC 9110 section 7.8).
pub fn upgrade(live: Live, mut ledger: Ledger) -> Upgraded {
    let Head { response, exchange, mut judge, permit, lane, .. } = *live.head;
    judge.complete(Instant::now());
    ledger.tunnels();
    let (mut parts, _) = response.into_parts();
    let protocol = parts.headers.get(header::UPGRADE).cloned();
    hop_by_hop::strip(&mut parts.headers);
    parts.headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    if let Some(protocol) = protocol {
        parts.headers.insert(header::UPGRADE, protocol);
    }
    parts.headers.append(header::VIA, headers::VIA);
    parts.version = Version::HTTP_11;
    let response = Response::from_parts(parts, AnswerBody::empty());
    Upgraded { response, exchange, held: Held { ledger, permit, lane } }
}

/// The answer to a call that ends in an error; closes its account.
pub fn refuse(error: Error, ledger: Ledger, deadline: Option<Instant>) -> Answer {
    let told = Refusal { word: error.word(), status: error.status() };
    Answer::own(refusal(error, ledger, deadline).map(AnswerBody::full), Some(told))
}

/// The response to a call that ends in an error; closes its account.
pub fn refusal(error: Error, mut ledger: Ledger, deadline: Option<Instant>) -> Response<Bytes> {
    let tried = ledger.progress().tried();
    let response = respond::error::response(&error, context(&ledger, deadline, &tried));
    if let Error::Internal(cause) = &error {
        tracing::error!(request_id = %ledger.id(), cause = cause.as_str().unwrap_or("-"), "internal error");
    }
    ledger.fails(error);
    response
}

/// The problem JSON of an answer that breaks off with `error`.
pub fn problem(error: &Error, ledger: &Ledger, deadline: Option<Instant>) -> Bytes {
    respond::error::problem(error, context(ledger, deadline, &[]))
}

fn context<'a>(
    ledger: &'a Ledger,
    deadline: Option<Instant>,
    tried: &'a [Tried],
) -> respond::error::Context<'a> {
    respond::error::Context {
        upstream: ledger.upstream(),
        request_id: ledger.id(),
        is_grpc: ledger.is_grpc(),
        now: Instant::now(),
        deadline,
        tried,
        is_final: ledger.progress().is_final(),
        rate_limit: ledger.stages().and_then(|stages| stages.rate_limit.as_ref()),
    }
}

/// A body on its way to the client, with the request's account.
pub struct Streaming {
    source: Source,
    ledger: Ledger,
    /// Where an event stream stands, which can say that it is cut.
    events: Option<EventStream>,
    /// Keeps the body for the cache as it passes.
    recorder: Option<Box<Recorder>>,
    /// What the body ends in, once the stream's last words are out.
    broken: Option<Error>,
}

/// Where a body comes from.
#[expect(clippy::large_enum_variant, reason = "nearly all are the largest, and lie in a box")]
enum Source {
    /// An upstream.
    Upstream(Tail),
    /// A flight, which reads it for others too.
    Led(LeaderBody),
    /// Here: it was kept, or read for several.
    Kept {
        /// What is still to go out.
        body: Bytes,
        /// It must have gone out by then.
        end: Option<Instant>,
    },
    /// Nowhere any more.
    Over,
}

impl Source {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match self {
            Self::Upstream(tail) => tail.poll_frame(cx),
            Self::Led(body) => body.poll_frame(cx),
            Self::Kept { body, .. } => {
                let piece = body.split_to(body.len().min(PIECE));
                Poll::Ready(Some(piece).filter(|piece| !piece.is_empty()).map(|piece| Ok(Frame::data(piece))))
            }
            Self::Over => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Upstream(tail) => tail.is_end_stream(),
            Self::Led(body) => body.is_end_stream(),
            Self::Kept { body, .. } => body.is_empty(),
            Self::Over => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Upstream(tail) => tail.size_hint(),
            Self::Led(body) => body.size_hint(),
            Self::Kept { body, .. } => SizeHint::with_exact(body.len() as u64),
            Self::Over => SizeHint::with_exact(0),
        }
    }

    /// All of it has been read.
    fn complete(&mut self) {
        match self {
            Self::Upstream(tail) => tail.complete(),
            Self::Led(body) => body.complete(),
            Self::Kept { .. } | Self::Over => {}
        }
        *self = Self::Over;
    }

    /// The body must have gone out by then.
    fn end(&self) -> Option<Instant> {
        match self {
            Self::Upstream(tail) => tail.end(),
            Self::Led(body) => body.end(),
            Self::Kept { end, .. } => *end,
            Self::Over => None,
        }
    }

    /// A client that takes nothing for so long is given up.
    fn stall(&self) -> Duration {
        match self {
            Self::Upstream(tail) => tail.stream_idle(),
            Self::Led(body) => body.stream_idle(),
            Self::Kept { .. } | Self::Over => OWN_STALL,
        }
    }
}

impl Streaming {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if let Some(error) = self.broken.take() {
            return Poll::Ready(Some(Err(error)));
        }
        if matches!(self.source, Source::Over) {
            return Poll::Ready(None);
        }
        match self.source.poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(data) = frame.data_ref() {
                    self.pass(data);
                }
                if frame.is_trailers() || self.source.is_end_stream() {
                    self.complete();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(self.cut(error))),
            Poll::Ready(None) => {
                self.complete();
                Poll::Ready(None)
            }
            Poll::Pending if self.ledger.proxy().is_ending() => {
                Poll::Ready(Some(self.cut(Error::ShuttingDown)))
            }
            Poll::Pending => Poll::Pending,
        }
    }

    fn pass(&mut self, data: &Bytes) {
        self.ledger.sent(data.len());
        if let Some(events) = &mut self.events {
            events.pass(data);
        }
        if let Some(recorder) = &mut self.recorder
            && !recorder.keep(data)
        {
            self.recorder = None;
        }
    }

    fn complete(&mut self) {
        self.source.complete();
        self.ledger.complete();
        if let Some(recorder) = self.recorder.take() {
            recorder.complete();
        }
    }

    /// Lets go of all that is held. What comes of it is the error, or the last words before it.
    fn cut(&mut self, error: Error) -> Result<Frame<Bytes>, Error> {
        let words = self.last_words(&error);
        self.source = Source::Over;
        self.recorder = None;
        self.ledger.cut(error.clone());
        let Some(words) = words else { return Err(error) };
        self.ledger.sent(words.len());
        self.broken = Some(error);
        Ok(Frame::data(words))
    }

    fn last_words(&self, error: &Error) -> Option<Bytes> {
        let events = self.events?;
        events.last_words(&problem(error, &self.ledger, self.source.end()))
    }
}

/// On a connection of HTTP/1 nobody asks for more once all bytes that were promised have been passed on, although an
/// upstream of HTTP/2 may have to say yet that this is all. The answer is whole all the same.
impl Drop for Streaming {
    fn drop(&mut self) {
        if !matches!(self.source, Source::Over) && self.source.size_hint().exact() == Some(0) {
            self.complete();
        }
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match &mut *self {
            Self::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Stream(streaming) => streaming.poll_frame(cx),
            Self::Made(body) => body.as_mut().poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Full(bytes) => bytes.is_none(),
            Self::Stream(streaming) => matches!(streaming.source, Source::Over) && streaming.broken.is_none(),
            Self::Made(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Stream(streaming) => streaming.source.size_hint(),
            Self::Made(body) => body.size_hint(),
        }
    }
}
