//! Step three of the journey: what the cache knows about a call, and what it learns from the answer.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::header::{self, HeaderName, HeaderValue};
use http::{HeaderMap, Method, StatusCode};
use tokio::time::Instant;

use super::errand::{Errand, place};
use super::found::{Found, Live, Note, Opened, Whole};
use super::record::Recorder;
use super::shelf::{self, Placing};
use crate::call::{Call, CallBody, Progress};
use crate::config;
use crate::error::Error;
use crate::policy::cache::{self, Asked, Candidate, Entry, Store, Times, Verdict, Why};
use crate::policy::deadline::{Arrival, Deadline};
use crate::policy::identity::{self, Key};
use crate::respond::headers::CacheStatus;
use crate::telemetry::metrics::{CacheResult, StandIn};
use crate::upstream::registry::Lane;
use crate::wire::hop_by_hop;

/// What the cache knows about a call that goes on to the upstream.
pub struct Recall {
    /// Where an answer is kept; `None` where the cache has no part in the call.
    kept_in: Option<(Arc<Store>, Key)>,
    /// Kept, but not to be given unasked.
    entry: Option<Arc<Entry>>,
    /// Why the upstream is asked.
    why: Why,
    validators: Vec<(HeaderName, HeaderValue)>,
}

/// What came of looking.
pub enum Recalled {
    /// The cache has no part in the call.
    Nothing,
    /// An answer. With a recall it is stale, and to be renewed meanwhile.
    Answer(Box<Whole>, Option<Box<Recall>>),
    /// The upstream has to be asked.
    Ask(Box<Recall>),
}

/// Looks for a kept answer to the call: here, and if that will not do, at what other pods keep.
///
/// # Errors
/// [`Error::NotCached`] when there is none and the caller wants no other.
pub async fn look(errand: &Errand) -> Result<Recalled, Error> {
    let (lane, call) = (&errand.lane, &errand.call);
    let (Some(rules), Some(store)) = (&lane.stages().cache, lane.cache()) else {
        return Ok(Recalled::Nothing);
    };
    if call.upgrade.is_some() {
        return Ok(Recalled::Nothing);
    }
    let asked = asked(lane, call);
    let mut recall = Recall { kept_in: None, entry: None, why: Why::UriMiss, validators: Vec::new() };
    if let Some(why) = passes_by(asked, call) {
        lane.metrics().cache(CacheResult::Bypass);
        recall.why = why;
        return Ok(Recalled::Ask(Box::new(recall)));
    }
    let key = Key::of(asked.place, &Method::GET, &call.headers, &rules.vary, None);
    recall.kept_in = Some((store.clone(), key));
    let mut kept = store.find(&key, &call.headers).map(|entry| Kept::of(entry, asked, rules));
    if rules.is_shared && !kept.as_ref().is_ok_and(Kept::is_answer) {
        // Boxed: the room would be part of every request.
        kept = Box::pin(or_of_others(kept, errand, (store, key), rules)).await;
    }
    match kept {
        Ok(kept) => match kept.verdict {
            Verdict::Fresh => {
                lane.metrics().cache(CacheResult::Hit);
                return Ok(Recalled::Answer(Box::new(kept.given(asked, rules)), None));
            }
            Verdict::StaleUsable => {
                lane.metrics().cache(CacheResult::Stale);
                let answer = kept.given(asked, rules);
                recall.validate(kept.entry, Why::Stale);
                return Ok(Recalled::Answer(Box::new(answer), Some(Box::new(recall))));
            }
            Verdict::Validate(why) => recall.validate(kept.entry, why),
            Verdict::Miss(why) => recall.why = why,
        },
        Err(why) => recall.why = why,
    }
    if cache::is_only_if_cached(&call.headers) {
        return Err(Error::NotCached);
    }
    Ok(Recalled::Ask(Box::new(recall)))
}

/// What is kept, and what may be done with it.
struct Kept {
    entry: Arc<Entry>,
    verdict: Verdict,
    /// Another pod had it.
    is_shared: bool,
}

impl Kept {
    fn of(entry: Arc<Entry>, asked: Asked<'_>, rules: &config::Cache) -> Self {
        let verdict = entry.judge(asked, rules, Instant::now());
        Self { entry, verdict, is_shared: false }
    }

    fn is_answer(&self) -> bool {
        matches!(self.verdict, Verdict::Fresh | Verdict::StaleUsable)
    }

    fn given(&self, asked: Asked<'_>, rules: &config::Cache) -> Whole {
        let now = Instant::now();
        let mut answer = given(&self.entry, asked, rules, now);
        answer.note.cache =
            Some(CacheStatus::Hit { ttl: self.entry.ttl(rules, now), is_shared: self.is_shared });
        answer
    }
}

/// What is kept here, or by other pods if that is newer.
async fn or_of_others(
    kept: Result<Kept, Why>,
    errand: &Errand,
    (store, key): (&Store, Key),
    rules: &config::Cache,
) -> Result<Kept, Why> {
    let Some(brought) = shelf::find(errand).await.map(|entry| store.adopt(key, entry)) else { return kept };
    match kept {
        Ok(own) if own.entry.sent() >= brought.sent() => Ok(own),
        _ => Ok(Kept { is_shared: true, ..Kept::of(brought, asked(&errand.lane, &errand.call), rules) }),
    }
}

/// Whether another pod has renewed meanwhile what this call is to renew.
pub async fn is_renewed(errand: &Errand) -> bool {
    let kept_in = errand.recall.as_ref().and_then(|recall| recall.kept_in.as_ref());
    let (Some((store, key)), Some(rules)) = (kept_in, &errand.lane.stages().cache) else { return false };
    let Some(brought) = shelf::find(errand).await.map(|entry| store.adopt(*key, entry)) else { return false };
    brought.judge(asked(&errand.lane, &errand.call), rules, Instant::now()) == Verdict::Fresh
}

/// Why the cache has no part in the call, if so.
fn passes_by(asked: Asked<'_>, call: &Call) -> Option<Why> {
    asked.passes_by().or((!matches!(call.body, CallBody::Empty)).then_some(Why::Bypass))
}

/// The request, as the cache sees it.
pub(super) fn asked<'a>(lane: &'a Lane, call: &'a Call) -> Asked<'a> {
    Asked { method: &call.method, place: place(lane, call), headers: &call.headers }
}

/// The answer that an entry gives.
fn given(entry: &Entry, asked: Asked<'_>, rules: &config::Cache, now: Instant) -> Whole {
    let cache = Some(CacheStatus::Hit { ttl: entry.ttl(rules, now), is_shared: false });
    Whole {
        response: entry.answer(asked, now),
        is_acceptable: true,
        elapsed: None,
        hedge: None,
        note: Note { cache, ..Note::default() },
    }
}

impl Recall {
    fn validate(&mut self, entry: Arc<Entry>, why: Why) {
        self.validators = entry.validators().collect();
        self.entry = Some(entry);
        self.why = why;
    }

    /// What asks the upstream whether the kept answer still holds.
    pub fn validators(&self) -> &[(HeaderName, HeaderValue)] {
        &self.validators
    }

    /// Whether something is kept that might stand in for a failure.
    pub fn has_entry(&self) -> bool {
        self.entry.is_some()
    }

    /// The kept answer instead of a failure, as far as its staleness is within `allowance` or what the policy and
    /// the origin allow.
    pub fn stand_in(&self, errand: &Errand, allowance: Duration) -> Option<Whole> {
        let (rules, now) = (errand.lane.stages().cache.as_ref()?, Instant::now());
        let entry = self.entry.as_ref()?;
        let allowance = allowance.max(rules.stale_if_error);
        if !entry.may_stand_in(allowance, &errand.call.headers, rules, now) {
            return None;
        }
        let mut answer = given(entry, asked(&errand.lane, &errand.call), rules, now);
        answer.note.stand_in = Some(StandIn::Stale);
        Some(answer)
    }

    /// The key under which a renewal is told from others.
    pub fn key(&self) -> Option<Key> {
        self.kept_in.as_ref().map(|(_, key)| *key)
    }

    /// That the upstream was asked, and why.
    pub fn forwarded(&self, status: Option<StatusCode>, stored: bool) -> CacheStatus {
        CacheStatus::Forwarded { why: self.why.as_str(), status, stored, collapsed: false }
    }
}

/// What came of looking at an answer.
pub enum Learned {
    /// This is the answer.
    Found(Result<Found, Error>),
    /// The upstream says that something has not changed which is not what is kept: it has to be asked
    /// without conditions.
    Mistaken,
}

/// Looks at what the upstream has answered: confirms what is kept, keeps what may be kept, and forgets
/// what a request has changed.
pub fn learn(errand: &Errand, tried: Result<Found, Error>, was_validated: bool) -> Learned {
    let mut live = match tried {
        // What another upstream says, as a hedge may have it, says nothing about what is kept of this one.
        Ok(Found::Live(live)) if !live.head.lane.is_stand_in() => live,
        other => return Learned::Found(other),
    };
    forget_what_changed(errand, &live);
    let Some(recall) = &errand.recall else { return Learned::Found(Ok(Found::Live(live))) };
    let is_confirmed = was_validated && live.head.response.status() == StatusCode::NOT_MODIFIED;
    if let (Some((store, key)), Some(entry)) = (&recall.kept_in, &recall.entry)
        && is_confirmed
        && !recall.validators.is_empty()
    {
        return confirm(errand, recall, (store, *key, entry), live);
    }
    live.note.cache = Some(recall.forwarded(None, false));
    if let Some((store, key)) = &recall.kept_in {
        count(errand, CacheResult::Miss);
        keep(errand, recall, (store, *key), &mut live);
    }
    Learned::Found(Ok(Found::Live(live)))
}

/// What an unsafe request has changed must be validated before it is given again, wherever the policy keeps
/// answers (RFC 9111 section 4.4).
fn forget_what_changed(errand: &Errand, live: &Live) {
    let (lane, call) = (&errand.lane, &errand.call);
    if call.method.is_safe() || lane.caches().next().is_none() {
        return;
    }
    let (status, headers) = (live.head.response.status(), live.head.response.headers());
    let resources = cache::touched(asked(lane, call), status, headers);
    for resource in &resources {
        lane.caches().for_each(|store| store.forget(resource, Instant::now()));
    }
    shelf::forget(errand, &resources);
}

/// Counts a call by what the cache had for it. A renewal is nobody's call.
fn count(errand: &Errand, result: CacheResult) {
    if !errand.is_renewal {
        errand.lane.metrics().cache(result);
    }
}

/// Renews an entry by a 304 (RFC 9111 section 4.3.4), and answers from it.
fn confirm(errand: &Errand, recall: &Recall, kept: (&Store, Key, &Entry), live: Live) -> Learned {
    let ((store, key, entry), lane, times) = (kept, &errand.lane, times(&live));
    let asked = asked(lane, &errand.call);
    let Opened { response, mut tail, hedge, elapsed, .. } = live.open(errand.deadline.as_ref());
    if tail.is_end_stream() {
        tail.complete();
    }
    let (head, ()) = response.into_parts();
    let (Some(renewed), Some(rules)) = (entry.refreshed(asked, &head, times), &lane.stages().cache) else {
        return Learned::Mistaken;
    };
    count(errand, CacheResult::Revalidated);
    let mut answer = given(&renewed, asked, rules, Instant::now());
    answer.note.cache = Some(recall.forwarded(Some(head.status), true));
    let renewed = Arc::new(renewed);
    if store.put(key, renewed.clone())
        && let Some(placing) = Placing::of(errand)
    {
        placing.place(renewed);
    }
    Learned::Found(Ok(Found::whole(Whole { elapsed: Some(elapsed), hedge, ..answer })))
}

/// Has an answer kept on its way, if it may be.
fn keep(errand: &Errand, recall: &Recall, (store, key): (&Arc<Store>, Key), live: &mut Live) {
    let (lane, call) = (&errand.lane, &errand.call);
    // A failure that says it is fresh must not take the place of what could stand in for it.
    let Some(rules) = lane.stages().cache.as_ref().filter(|_| live.head.is_acceptable()) else { return };
    hop_by_hop::strip(live.head.response.headers_mut());
    let (status, headers) = (live.head.response.status(), live.head.response.headers());
    let has_credential = identity::is_shown(&call.headers);
    match Candidate::of(asked(lane, call), status, headers, rules, has_credential, times(live), store) {
        Some(candidate) => {
            let placing = Placing::of(errand);
            live.recorder = Some(Box::new(Recorder::new(store.clone(), key, candidate, placing)));
            live.note.cache = Some(recall.forwarded(None, true));
        }
        // What the upstream says now, and will not have kept, ends what it said before.
        None if call.method == Method::GET && status != StatusCode::PARTIAL_CONTENT => {
            if let Some(entry) = &recall.entry {
                entry.invalidate();
                if let Some(placing) = Placing::of(errand) {
                    placing.clear();
                }
            }
        }
        None => {}
    }
}

fn times(live: &Live) -> Times {
    Times { sent: live.head.judge.started(), received: live.at(), wall: SystemTime::now() }
}

/// Bounds a renewal where the policy bounds nothing: there is no client whose leaving would.
const UNBOUNDED: config::Deadline =
    config::Deadline { covers: config::Covers::Body, ..config::Deadline::BUILT_IN };

/// The same call once more, to renew a stale answer that has been given: nobody waits for it, so its deadline
/// is the policy's own, and what the client had of the answer plays no part.
pub fn renewal(errand: Errand) -> Errand {
    let Errand { proxy, lane, mut call, recall, .. } = errand;
    call.progress = Arc::new(Progress::default());
    call.interim = None;
    call.method = Method::GET;
    for name in [
        header::RANGE,
        header::IF_RANGE,
        header::IF_NONE_MATCH,
        header::IF_MODIFIED_SINCE,
        header::CACHE_CONTROL,
        header::PRAGMA,
    ] {
        call.headers.remove(name);
    }
    let policy = lane.stages().deadline.as_ref().unwrap_or(&UNBOUNDED);
    let deadline = Deadline::by(policy, &HeaderMap::new(), Arrival::now()).ok();
    Errand { proxy, lane, call, deadline, recall, is_renewal: true }
}
