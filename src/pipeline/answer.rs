//! The answer on its way to the client: the head at once, the body as it comes.
//!
//! The permit, the deadline, the verdict and the account live in the body until it ends, however it
//! ends. A body that cannot be completed ends in an error, which the listener turns into a message
//! that is visibly incomplete; an event stream says so in its own words first.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{Response, StatusCode, Version};
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};

use super::attempt::Head;
use super::judge::{Judge, is_stream};
use super::ledger::Ledger;
use super::race::Outcome;
use crate::error::{Bound, Error, Stage};
use crate::policy::bulkhead::Permit;
use crate::policy::deadline::Deadline;
use crate::respond;
use crate::respond::headers::{self, Passage};
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

/// Makes the answer of a call from the head that won.
pub fn deliver(deadline: Option<Deadline>, outcome: Outcome, mut ledger: Ledger) -> Answer {
    let Outcome { head, hedge } = outcome;
    let Head { response, exchange, judge, permit, lane, elapsed, .. } = head;
    let now = judge.started() + elapsed;
    let events = EventStream::of(&response);
    let (mut parts, ()) = response.into_parts();
    let stream = is_stream(&parts.headers);
    let end = deadline.filter(|deadline| covers_body(deadline, &lane, stream));
    headers::pass_on(
        &mut parts.headers,
        &Passage {
            attempts: ledger.progress().attempts(),
            queued: ledger.progress().queue_time(),
            upstream: elapsed,
            hedge,
        },
    );
    parts.version = Version::HTTP_11;
    ledger.answers(parts.status, hedge, now);
    let stall = lane.stages().stream_idle;
    let body_end = end.as_ref().map(|deadline| deadline.at);
    let mut streaming = Streaming {
        exchange: Some(exchange),
        judge,
        permit,
        lane,
        ledger,
        end,
        moved: now,
        timer: None,
        events,
        broken: None,
    };
    let body = if streaming.is_end_stream() {
        streaming.complete();
        AnswerBody::empty()
    } else {
        AnswerBody::Stream(Box::new(streaming))
    };
    Answer { response: Response::from_parts(parts, body), end: body_end, stall, refusal: None }
}

fn covers_body(deadline: &Deadline, lane: &Lane, is_stream: bool) -> bool {
    lane.stages().deadline.as_ref().is_some_and(|policy| deadline.covers_body(policy.covers, is_stream))
}

/// Passes a 101 on. The fields that agree on the protocol are hop-by-hop, and this is the one answer
/// that must keep them (RFC 9110 section 7.8).
pub fn upgrade(outcome: Outcome, mut ledger: Ledger) -> Upgraded {
    let Head { response, exchange, mut judge, permit, lane, .. } = outcome.head;
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
    let response = respond::error::response(&error, context(&ledger, deadline));
    if let Error::Internal(cause) = &error {
        tracing::error!(request_id = %ledger.id(), cause = cause.as_str().unwrap_or("-"), "internal error");
    }
    ledger.fails(error);
    response
}

fn context(ledger: &Ledger, deadline: Option<Instant>) -> respond::error::Context<'_> {
    respond::error::Context {
        upstream: ledger.upstream(),
        request_id: ledger.id(),
        is_grpc: ledger.is_grpc(),
        now: Instant::now(),
        deadline,
    }
}

/// An upstream's body with all that is held until it ends.
pub struct Streaming {
    /// Taken when the body has ended.
    exchange: Option<Exchange>,
    judge: Judge,
    permit: Option<Permit>,
    lane: Lane,
    ledger: Ledger,
    end: Option<Deadline>,
    /// When the last byte came.
    moved: Instant,
    /// Made only when the body has to be waited for.
    timer: Option<Pin<Box<Sleep>>>,
    /// Where an event stream stands, which can say that it is cut.
    events: Option<EventStream>,
    /// What the body ends in, once the stream's last words are out.
    broken: Option<Error>,
}

impl Streaming {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if let Some(error) = self.broken.take() {
            return Poll::Ready(Some(Err(error)));
        }
        let Some(exchange) = &mut self.exchange else { return Poll::Ready(None) };
        match exchange.poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                self.moved = Instant::now();
                // Nothing follows trailers, and whoever gets them does not ask again.
                let is_last = frame.is_trailers() || exchange.is_end_stream();
                // A body that never has to be waited for does not get to the timer.
                if let Some(deadline) = self.end.as_ref().filter(|end| !is_last && self.moved >= end.at) {
                    let error = deadline.exceeded(Stage::Body);
                    self.judge.expire(self.moved);
                    return Poll::Ready(Some(self.cut(error)));
                }
                if let Some(data) = frame.data_ref() {
                    self.ledger.sent(data.len());
                    if let Some(events) = &mut self.events {
                        events.pass(data);
                    }
                } else if let Some(trailers) = frame.trailers_ref() {
                    self.judge.trailers(trailers, self.moved);
                }
                if is_last {
                    self.complete();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(None) => {
                self.complete();
                Poll::Ready(None)
            }
            Poll::Ready(Some(Err(error))) => {
                self.judge.fail(&error, Instant::now());
                Poll::Ready(Some(self.cut(error)))
            }
            Poll::Pending if self.ledger.proxy().is_ending() => {
                Poll::Ready(Some(self.cut(Error::ShuttingDown)))
            }
            Poll::Pending => self.poll_timer(cx).map(|error| {
                self.judge.expire(Instant::now());
                Some(self.cut(error))
            }),
        }
    }

    /// Strikes at the deadline, or where none covers the body when nothing has come for too long.
    fn poll_timer(&mut self, cx: &mut Context<'_>) -> Poll<Error> {
        loop {
            let end = match &self.end {
                Some(deadline) => deadline.at,
                None => self.moved + self.lane.stages().stream_idle,
            };
            let settles_at = self.judge.settles_at().filter(|at| *at < end);
            let due = settles_at.unwrap_or(end);
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
            if timer.deadline() < due && timer.is_elapsed() {
                timer.as_mut().reset(due);
            }
            std::task::ready!(timer.as_mut().poll(cx));
            let now = Instant::now();
            if settles_at.is_some_and(|at| now >= at) {
                self.judge.settle(now);
            } else if now >= end {
                return Poll::Ready(match &self.end {
                    Some(deadline) => deadline.exceeded(Stage::Body),
                    None => {
                        Error::DeadlineExceeded { stage: Stage::Body, bound: Bound::StreamIdle, skew: None }
                    }
                });
            }
        }
    }

    fn complete(&mut self) {
        let now = Instant::now();
        self.judge.complete(now);
        self.ledger.complete();
        self.permit = None;
        if let Some(exchange) = self.exchange.take() {
            exchange.finish(&self.lane.upstream.pool, now);
        }
    }

    fn is_end_stream(&self) -> bool {
        self.exchange.as_ref().is_none_or(Exchange::is_end_stream)
    }

    /// Lets go of all that is held. What comes of it is the error, or the last words before it.
    fn cut(&mut self, error: Error) -> Result<Frame<Bytes>, Error> {
        self.ledger.cut(error.clone());
        self.permit = None;
        self.exchange = None;
        let Some(words) = self.last_words(&error) else { return Err(error) };
        self.ledger.sent(words.len());
        self.broken = Some(error);
        Ok(Frame::data(words))
    }

    fn last_words(&self, error: &Error) -> Option<Bytes> {
        let deadline = self.end.as_ref().map(|deadline| deadline.at);
        self.events?.last_words(&respond::error::problem(error, context(&self.ledger, deadline)))
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
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Full(bytes) => bytes.is_none(),
            Self::Stream(streaming) => streaming.exchange.is_none() && streaming.broken.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Stream(streaming) => match &streaming.exchange {
                Some(exchange) => exchange.size_hint(),
                None => SizeHint::with_exact(0),
            },
        }
    }
}
