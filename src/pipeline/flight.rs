//! Step four of the journey: equal calls that are under way share one flight.
//!
//! The work of a flight runs in a task of its own, which reads the answer as fast as it comes whoever
//! waits for it: a slow leader holds nobody up, and one that leaves fails nobody. The leader gets its head at
//! once and its body as it comes. Followers get the answer when it is whole, never a part of one; what turns
//! out to be too large, a stream, or for one pair of eyes sends them on their own ways.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Response, StatusCode};
use tokio::sync::oneshot;
use tokio::time::sleep_until;

use super::errand::{Errand, ask, fall_back, pursue};
use super::feed::{Rest, feed};
use super::found::{Found, Led, Live, Opened, Whole};
use super::judge::is_stream;
use super::recall::{self, Recall};
use crate::call::{Call, CallBody, Fate, Progress, expects_continue};
use crate::error::{Cause, Error, Stage};
use crate::policy::deadline::end_of;
use crate::policy::identity::{self, BodyDigest, Key};
use crate::policy::singleflight::{Joined, Landing, Lead, Member};
use crate::respond::headers::CacheStatus;
use crate::telemetry::metrics::StandIn;
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
        Ok(None) => return alone(&errand).await,
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
                None => return alone(&errand).await,
            },
            Landing::Alone => return alone(&errand).await,
            Landing::Again => {}
        }
    }
}

/// Boxed: hundreds may wait for one flight, and few ever need the room of one.
fn alone(errand: &Errand) -> Pin<Box<impl Future<Output = Result<Found, Error>>>> {
    Box::pin(pursue(errand))
}

/// What decides, beside the credentials, whether one call's answer does for another: how it may be coded, which part
/// of it is wanted, what the caller has of it already (a 304 or 412 is for nobody else), how new it has to be, as what
/// a body is read, and what is to be done with it.
static DECISIVE: [HeaderName; 14] = [
    header::ACCEPT_ENCODING,
    header::RANGE,
    header::IF_RANGE,
    header::IF_MATCH,
    header::IF_NONE_MATCH,
    header::IF_MODIFIED_SINCE,
    header::IF_UNMODIFIED_SINCE,
    header::CACHE_CONTROL,
    header::PRAGMA,
    header::CONTENT_TYPE,
    header::CONTENT_ENCODING,
    HeaderName::from_static("idempotency-key"),
    HeaderName::from_static("x-amz-target"),
    HeaderName::from_static("soapaction"),
];

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
    let fields = rules.vary.iter().chain(&DECISIVE);
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
    let Some(key) = recall.key() else { return };
    let errand = recall::renewal(Errand { recall: Some(recall), ..errand });
    let Joined::Leader(member, lead) = errand.proxy.flights().join(key) else { return };
    let deadline = errand.deadline.clone();
    tokio::spawn(async move {
        let _place = place;
        if recall::is_renewed(&errand).await {
            return;
        }
        if let Ok(found) = fly(errand, member, lead).await {
            found.read_out(deadline.as_ref()).await;
        }
    });
}

async fn work(errand: Errand, lead: Lead<Brought>, leader: oneshot::Sender<Result<Found, Error>>) {
    let found = match errand.is_renewal {
        // Nobody waits for it, so nothing need stand in.
        true => ask(&errand).await,
        false => pursue(&errand).await,
    };
    // Where the leader has left, what was sent to it is dropped.
    let _ = match found {
        Ok(Found::Live(live)) if is_small(&errand, &live) && may_be_shared(&errand, &live.head.response) => {
            return read(&errand, live, lead, leader).await;
        }
        // Others may have more time, or find a permit.
        Ok(Found::Whole(whole)) if whole.note.is_for_one => {
            lead.land(Landing::Again);
            leader.send(Ok(Found::Whole(whole)))
        }
        // The policy's own words are for everyone, whatever they say to caches.
        Ok(Found::Whole(whole))
            if whole.note.stand_in == Some(StandIn::Static) || may_be_shared(&errand, &whole.response) =>
        {
            lead.land(Landing::Shared(Brought::of(&errand, Ok((*whole).clone()))));
            leader.send(Ok(Found::Whole(whole)))
        }
        Err(error) if error.is_everyones() => {
            lead.land(Landing::Shared(Brought::of(&errand, Err(error.clone()))));
            leader.send(Err(error))
        }
        Ok(found) => {
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
    let is_acceptable = live.head.is_acceptable();
    let Opened { response, mut tail, hedge, elapsed, at, note, mut recorder } =
        live.open(errand.deadline.as_ref());
    let (feed, body) = feed(&tail, max_body(errand), errand.proxy.gathered());
    let led = Led { response: response.clone(), body, is_acceptable, hedge, elapsed, at, note };
    // Where the leader has left, others wait.
    let _ = leader.send(Ok(Found::Led(Box::new(led))));

    while !tail.is_end_stream() {
        match tail.frame().await {
            None => break,
            Some(Ok(frame)) => match frame.data_ref() {
                Some(data) if feed.push(data) => {
                    recorder = recorder.and_then(|mut recorder| recorder.keep(data).then_some(recorder));
                }
                // Too large, or with trailers: the leader goes on alone.
                _ => {
                    lead.land(Landing::Alone);
                    return feed.hand_over(Rest { frame: Some(frame), tail, recorder });
                }
            },
            Some(Err(error)) => {
                lead.land(match error.is_everyones() {
                    true => Landing::Shared(Brought::of(errand, Err(error.clone()))),
                    false => Landing::Again,
                });
                return feed.fail(error);
            }
        }
    }
    tail.complete();
    if let Some(recorder) = recorder {
        recorder.complete();
    }
    let response = response.map(|()| feed.whole());
    let whole = Whole { response, is_acceptable, elapsed: None, hedge: None, note };
    lead.land(Landing::Shared(Brought::of(errand, Ok(whole))));
    feed.finish();
}

fn max_body(errand: &Errand) -> usize {
    let stages = errand.lane.stages();
    let rules = stages.coalesce.as_ref().map(|rules| rules.max_body);
    rules.or(stages.cache.as_ref().map(|cache| cache.max_body)).unwrap_or(0)
}

/// Whether the answer has room in a flight, as far as its head tells.
fn is_small(errand: &Errand, live: &Live) -> bool {
    live.head.exchange.size_hint().lower() <= max_body(errand) as u64
}

/// Whether an answer with this head may be given to others with the same key: they have sent the same credentials,
/// but it may be for nobody's eyes but one caller's.
fn may_be_shared<T>(errand: &Errand, response: &Response<T>) -> bool {
    let headers = response.headers();
    let is_private = || cache_control::has(headers, "private") && !identity::is_shown(&errand.call.headers);
    response.status() != StatusCode::SWITCHING_PROTOCOLS
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
            // Unless it is no upstream's: one that is kept says so itself.
            if matches!(whole.note.stand_in, None | Some(StandIn::Backup)) {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// There may be hundreds for each flight.
    #[test]
    fn the_room_of_a_follower_is_that_of_its_waiting() {
        fn room<F: Future>(_: impl Fn(Errand) -> F) -> usize {
            size_of::<F>()
        }
        assert!(room(join) <= 2048, "{} bytes", room(join));
    }
}
