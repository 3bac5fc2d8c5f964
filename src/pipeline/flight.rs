//! Step four of the journey: equal calls that are under way share one flight.
//!
//! The work of a flight runs in a task of its own, which reads the answer as fast as it comes whoever
//! waits for it: a slow leader holds nobody up, and one that leaves fails nobody. The leader gets its head at
//! once and its body as it comes. Followers get the answer when it is whole, never a part of one; what turns
//! out to be too large, a stream, or for one pair of eyes sends them on their own ways.

use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::Method;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http_body::{Frame, SizeHint};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use super::errand::{Errand, fall_back, pursue};
use super::found::{Found, Led, Live, Opened, Whole};
use super::judge::is_stream;
use super::recall::{self, Recall};
use super::record::Recorder;
use super::tail::Tail;
use crate::call::{Call, CallBody, Fate, Progress, expects_continue};
use crate::error::{Cause, Error, Stage};
use crate::policy::deadline::end_of;
use crate::policy::identity::{self, BodyDigest, Key};
use crate::policy::singleflight::{Joined, Landing, Lead, Member};
use crate::respond::headers::CacheStatus;
use crate::wire::cache_control;
use crate::wire::replay::BodyLost;

/// What a flight brings to all of its members.
#[derive(Clone)]
pub struct Brought(Arc<Goods>);

struct Goods {
    result: Result<Whole, Error>,
    /// The leader's.
    progress: Arc<Progress>,
    /// The fields that the answer varies by, as the leader sent them.
    varies: Vec<(HeaderName, Vec<HeaderValue>)>,
}

/// Finds an answer together with all equal calls that are under way.
///
/// # Errors
/// Those of [`pursue`], the call's own or its leader's.
pub async fn join(errand: Errand) -> Result<Found, Error> {
    let key = match key(&errand).await {
        Ok(Some(key)) => key,
        Ok(None) => return pursue(&errand).await,
        Err(error) => return fall_back(&errand, Err(error)).await,
    };
    loop {
        let mut member = match errand.proxy.flights().join(key) {
            Joined::Leader(member, lead) => return fly(errand, member, lead).await,
            Joined::Follower(member) => member,
        };
        errand.call.progress.enter(Stage::Head);
        let landing = match until_deadline(&errand, member.landed()).await {
            Ok(landing) => landing,
            // Its deadline is its own, and so is what stands in for the answer then.
            Err(error) => return fall_back(&errand, Err(error)).await,
        };
        match landing {
            Landing::Shared(brought) => match brought.share(&errand.call) {
                Some(shared) => {
                    errand.lane.metrics().coalesced();
                    return shared.map(Found::whole);
                }
                None => return pursue(&errand).await,
            },
            Landing::Alone => return pursue(&errand).await,
            Landing::Again => {}
        }
    }
}

/// What tells the call from others under way, if it may share their answer; `None` when it goes its own way.
/// A body is read for it, as far as it is kept for replay.
async fn key(errand: &Errand) -> Result<Option<Key>, Error> {
    let (call, lane) = (&errand.call, &errand.lane);
    let Some(rules) = lane.stages().coalesce.as_ref() else { return Ok(None) };
    let is_safe = matches!(call.method, Method::GET | Method::HEAD);
    let is_idempotent = is_safe || lane.route().is_some_and(|route| route.idempotent);
    if !is_idempotent || call.upgrade.is_some() || expects_continue(&call.headers) {
        return Ok(None);
    }
    let Some(body) = until_deadline(errand, digest(call)).await?? else { return Ok(None) };
    let fields = rules.vary.iter().chain([&header::RANGE]);
    Ok(Some(Key::of(errand.place(), &call.method, &call.headers, fields, Some(&body))))
}

/// The digest of the call's body; `None` when it cannot be kept.
async fn digest(call: &Call) -> Result<Option<BodyDigest>, Error> {
    match &call.body {
        CallBody::Empty => Ok(Some(BodyDigest::of([[]; 0]))),
        CallBody::Once(_) => Ok(None),
        CallBody::Replay(replay) => match replay.read_through().await {
            Ok(chunks) => Ok(Some(BodyDigest::of(chunks))),
            Err(BodyLost::NotKept) => Ok(None),
            Err(BodyLost::Client(error)) if error.is_framing() => {
                Err(Error::InvalidRequest("the request body breaks its framing"))
            }
            Err(BodyLost::Client(_)) => Err(Error::BodyBrokenOff),
        },
    }
}

/// Leads a flight: its work goes on in a task of its own.
async fn fly(errand: Errand, member: Member<Brought>, lead: Lead<Brought>) -> Result<Found, Error> {
    let (leader, mine) = oneshot::channel();
    let work = tokio::spawn(work(errand, lead, leader));
    member.works(work.abort_handle());
    let mut found = mine.await.unwrap_or_else(|_| Err(Error::Internal(Cause::from("a flight was lost"))))?;
    if let Found::Led(led) = &mut found {
        led.body.member = Some(member);
    }
    Ok(found)
}

/// Renews a kept answer that was given although it is stale, unless that is being done already, or too much
/// of it: the next call for the answer will see to it.
pub fn renew(errand: Errand, recall: Option<Box<Recall>>) {
    let Some(recall) = recall else { return };
    let Some(place) = errand.proxy.place_for_renewal() else { return };
    let key = recall.key();
    let errand = recall::renewal(Errand { recall: Some(recall), ..errand });
    let Joined::Leader(member, lead) = errand.proxy.flights().join(key) else { return };
    let deadline = errand.deadline.clone();
    tokio::spawn(async move {
        let _place = place;
        if let Ok(found) = fly(errand, member, lead).await {
            found.drain(deadline.as_ref()).await;
        }
    });
}

async fn work(errand: Errand, lead: Lead<Brought>, leader: oneshot::Sender<Result<Found, Error>>) {
    let found = pursue(&errand).await;
    // Where the leader has left, what was sent to it is dropped.
    let _ = match found {
        Ok(Found::Live(live)) if may_be_shared(&errand, &live) => {
            return read(&errand, live, lead, leader).await;
        }
        // Others may have more time, or find a permit.
        Ok(Found::Whole(whole)) if whole.note.is_for_one => {
            lead.land(Landing::Again);
            leader.send(Ok(Found::Whole(whole)))
        }
        Ok(Found::Whole(whole)) => {
            lead.land(Landing::Shared(Brought::of(&errand, Ok((*whole).clone()))));
            leader.send(Ok(Found::Whole(whole)))
        }
        Err(error) if error.is_everyones() => {
            lead.land(Landing::Shared(Brought::of(&errand, Err(error.clone()))));
            leader.send(Err(error))
        }
        Ok(found @ (Found::Live(_) | Found::Led(_))) => {
            lead.land(Landing::Alone);
            leader.send(Ok(found))
        }
        Err(error) => {
            lead.land(Landing::Again);
            leader.send(Err(error))
        }
    };
}

/// Reads an answer for all, and lets the leader have it meanwhile.
async fn read(
    errand: &Errand,
    live: Live,
    lead: Lead<Brought>,
    leader: oneshot::Sender<Result<Found, Error>>,
) {
    let Opened { response, mut tail, hedge, elapsed, at, note, mut recorder } =
        live.open(errand.deadline.as_ref());
    let (pass, body) = Reader::of(&tail);
    let led = Led { response: response.clone(), body, hedge, elapsed, at, note };
    let _ = leader.send(Ok(Found::Led(Box::new(led))));

    let limit = max_body(errand);
    let mut body = BytesMut::new();
    while !tail.is_end_stream() {
        match tail.frame().await {
            None => break,
            Some(Ok(frame)) => {
                let data = frame.data_ref().filter(|data| body.len() + data.len() <= limit);
                let Some(data) = data else {
                    // Too large, or with trailers: the leader goes on alone.
                    lead.land(Landing::Alone);
                    pass.send(Part::Frame(frame));
                    return pass.send(Part::Rest(Box::new((tail, recorder))));
                };
                body.extend_from_slice(data);
                recorder = recorder.and_then(|mut recorder| recorder.keep(data).then_some(recorder));
                pass.send(Part::Frame(frame));
            }
            Some(Err(error)) => {
                lead.land(Landing::Shared(Brought::of(errand, Err(error.clone()))));
                return pass.send(Part::Broken(error));
            }
        }
    }
    tail.complete();
    if let Some(recorder) = recorder {
        recorder.complete();
    }
    let response = response.map(|()| body.freeze());
    // Only what an upstream has just said is read here, and it is as good as it is to the leader.
    let whole = Whole { response, is_acceptable: true, elapsed: None, hedge: None, note };
    lead.land(Landing::Shared(Brought::of(errand, Ok(whole))));
    pass.send(Part::End);
}

fn max_body(errand: &Errand) -> usize {
    let stages = errand.lane.stages();
    let rules = stages.coalesce.as_ref().map(|rules| rules.max_body);
    rules.or(stages.cache.as_ref().map(|cache| cache.max_body)).unwrap_or(0)
}

/// Whether the answer, as far as its head tells, may be given to others with the same key: they have sent
/// the same credentials, but it may be for nobody's eyes but one caller's.
fn may_be_shared(errand: &Errand, live: &Live) -> bool {
    let headers = live.head.response.headers();
    let length = live.head.exchange.size_hint().lower();
    let is_private = || cache_control::has(headers, "private") && !identity::is_shown(&errand.call.headers);
    length <= max_body(errand) as u64
        && live.head.response.status() != http::StatusCode::SWITCHING_PROTOCOLS
        && !is_stream(headers)
        && !headers.contains_key(header::SET_COOKIE)
        && !cache_control::has(headers, "no-store")
        && !is_private()
        && varies_by(headers).is_some()
}

/// The fields that `Vary` names; `None` for `*`, by which no two requests are the same (RFC 9111 section 4.1).
fn varies_by(headers: &HeaderMap) -> Option<Vec<HeaderName>> {
    let values = headers.get_all(header::VARY).iter();
    let names = values.flat_map(|value| value.as_bytes().split(|b| *b == b',')).map(|name| name.trim_ascii());
    names
        .filter(|name| !name.is_empty())
        .map(|name| HeaderName::from_bytes(name).ok().filter(|name| name != "*"))
        .collect()
}

impl Brought {
    fn of(errand: &Errand, result: Result<Whole, Error>) -> Self {
        let headers = &errand.call.headers;
        let names = result.as_ref().ok().and_then(|whole| varies_by(whole.response.headers()));
        let sent = |name: HeaderName| {
            let values = headers.get_all(&name).iter().cloned().collect();
            (name, values)
        };
        let varies = names.unwrap_or_default().into_iter().map(sent).collect();
        Self(Arc::new(Goods { result, progress: errand.call.progress.clone(), varies }))
    }

    /// What a follower gets of it; `None` when the answer differs by something that the follower has sent
    /// otherwise.
    fn share(&self, call: &Call) -> Option<Result<Whole, Error>> {
        let Goods { result, progress, varies } = &*self.0;
        if !varies.iter().all(|(name, sent)| call.headers.get_all(name).iter().eq(sent)) {
            return None;
        }
        call.progress.follow(progress);
        Some(result.clone().map(|mut whole| {
            let stored = matches!(whole.note.cache, Some(CacheStatus::Forwarded { stored: true, .. }));
            if whole.note.stand_in.is_none() {
                let forwarded = CacheStatus::Forwarded { why: "miss", status: None, stored, collapsed: true };
                whole.note.cache = Some(forwarded);
            }
            Whole { elapsed: None, hedge: None, ..whole }
        }))
    }
}

/// Waits for `work` until the call's deadline.
async fn until_deadline<T>(errand: &Errand, work: impl Future<Output = T>) -> Result<T, Error> {
    let Some(deadline) = &errand.deadline else { return Ok(work.await) };
    tokio::select! {
        biased;
        done = work => Ok(done),
        () = sleep_until(end_of(Some(deadline))) => {
            errand.call.progress.decide(Fate::Expired);
            Err(deadline.exceeded(Stage::Head))
        }
    }
}

/// The leader's way through a body that a flight reads.
pub struct Reader {
    parts: UnboundedReceiver<Part>,
    /// From `Content-Length`.
    left: Option<u64>,
    is_over: bool,
    rest: Option<Box<(Tail, Option<Box<Recorder>>)>>,
    end: Option<Instant>,
    stream_idle: Duration,
    /// As long as the leader reads it belongs to the flight.
    member: Option<Member<Brought>>,
}

enum Part {
    Frame(Frame<Bytes>),
    /// All has been said.
    End,
    /// There is more, which only the leader reads.
    Rest(Box<(Tail, Option<Box<Recorder>>)>),
    /// The body ends here, and it is not whole.
    Broken(Error),
}

/// The flight's end. What waits in it is bounded by what a flight reads: `max_body`.
struct Pass(UnboundedSender<Part>);

impl Pass {
    /// Where the leader has left, what was sent to it is dropped.
    fn send(&self, part: Part) {
        let _ = self.0.send(part);
    }
}

impl Reader {
    fn of(tail: &Tail) -> (Pass, Self) {
        let (pass, parts) = unbounded_channel();
        let reader = Self {
            parts,
            left: tail.size_hint().exact(),
            is_over: tail.is_end_stream(),
            rest: None,
            end: tail.end(),
            stream_idle: tail.stream_idle(),
            member: None,
        };
        (Pass(pass), reader)
    }

    /// Reads on.
    pub fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        loop {
            if self.is_over {
                return Poll::Ready(None);
            }
            if let Some(rest) = &mut self.rest {
                let (tail, recorder) = &mut **rest;
                let frame = ready!(tail.poll_frame(cx));
                self.is_over = !matches!(frame, Some(Ok(_))) || tail.is_end_stream();
                *recorder = match (recorder.take(), &frame) {
                    (Some(mut recorder), Some(Ok(frame))) => {
                        let is_kept = frame.data_ref().is_some_and(|data| recorder.keep(data));
                        Some(recorder).filter(|_| is_kept)
                    }
                    (recorder, _) => recorder,
                };
                if self.is_over
                    && !matches!(frame, Some(Err(_)))
                    && let Some(recorder) = recorder.take()
                {
                    recorder.complete();
                }
                return Poll::Ready(frame);
            }
            match ready!(self.parts.poll_recv(cx)) {
                Some(Part::Frame(frame)) => {
                    let length = frame.data_ref().map_or(0, Bytes::len) as u64;
                    self.left = self.left.map(|left| left.saturating_sub(length));
                    self.is_over = self.left == Some(0) || frame.is_trailers();
                    return Poll::Ready(Some(Ok(frame)));
                }
                Some(Part::Rest(rest)) => self.rest = Some(rest),
                Some(Part::End) => self.is_over = true,
                Some(Part::Broken(error)) => {
                    self.is_over = true;
                    return Poll::Ready(Some(Err(error)));
                }
                None => {
                    self.is_over = true;
                    return Poll::Ready(Some(Err(Error::Internal(Cause::from("a flight was lost")))));
                }
            }
        }
    }

    /// Whether nothing is left to read.
    pub fn is_end_stream(&self) -> bool {
        self.is_over
    }

    /// How much is to come.
    pub fn size_hint(&self) -> SizeHint {
        match (self.is_over, self.left) {
            (true, _) => SizeHint::with_exact(0),
            (false, Some(left)) => SizeHint::with_exact(left),
            (false, None) => SizeHint::default(),
        }
    }

    /// When the body must have come and gone out.
    pub fn end(&self) -> Option<Instant> {
        self.end
    }

    /// The longest silence of a body that no deadline covers.
    pub fn stream_idle(&self) -> Duration {
        self.stream_idle
    }
}
