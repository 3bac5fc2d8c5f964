//! One call of a fan-out, from its start to its result.
//!
//! It goes on the journey of any request. A call may name a backup, another URL, which is asked when the first
//! one has failed; where asking twice does no harm also when the first has used half of the time, since one
//! that hangs until the deadline would leave none for the second. The first acceptable answer counts, and
//! the other request is cancelled.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use futures_util::FutureExt as _;
use http::header::{HeaderMap, HeaderValue};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use tokio::time::{Instant, sleep_until};

use super::content::Content;
use super::plan::{Ask, Place};
use crate::call::{Fate, Progress, RequestId};
use crate::config::Config;
use crate::error::{Bound, Error};
use crate::pipeline::answer::AnswerBody;
use crate::pipeline::found::Found;
use crate::pipeline::ledger::Ledger;
use crate::pipeline::{Arrived, Intake, Proxy, travel};
use crate::policy::deadline::{Arrival, Deadline};
use crate::policy::room::{Gathered, Room};
use crate::telemetry::metrics::Source;
use crate::wire::incoming::IncomingBody;
use crate::wire::push_back;

/// What came of a call.
#[derive(Debug)]
pub enum Outcome {
    /// An acceptable answer, or what the policy has stand in for one.
    Result(Box<CallResult>),
    /// None.
    Missing(Missing),
}

/// An answer, as much of it as is wanted.
#[derive(Debug)]
pub struct CallResult {
    /// Its status.
    pub status: StatusCode,
    /// Its fields.
    pub headers: HeaderMap,
    /// Its body.
    pub content: Content,
    /// There was more of the body than the call wanted or memory had room for.
    pub is_truncated: bool,
    /// Since the call started.
    pub elapsed: Duration,
    /// Where it comes from.
    pub source: Source,
    /// Hold its memory: the fields', and the body's.
    pub rooms: (Room, Option<Room>),
}

/// Why a call has no result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// `deadline`, `not_awaited`, `upstream_status`, or the word of an [`Error`].
    pub error: &'static str,
    /// For a person.
    pub message: String,
    /// What the upstream answered, where that is why.
    pub status: Option<StatusCode>,
    /// When another call may do better, where that is known.
    pub retry_after: Option<Duration>,
}

impl Outcome {
    /// Whether it is an upstream's answer, and nothing that stands in for one.
    pub fn is_real(&self) -> bool {
        matches!(self, Self::Result(result) if !matches!(result.source, Source::Stale | Source::Degraded))
    }

    /// The same from a call's backup, whose own answers stand in.
    fn by_backup(mut self) -> Self {
        let is_real = self.is_real();
        if let Self::Result(result) = &mut self
            && is_real
        {
            result.source = Source::Backup;
        }
        self
    }
}

impl Missing {
    /// For no more reason than these words.
    pub fn because(error: &'static str, message: impl Into<String>) -> Self {
        Self { error, message: message.into(), status: None, retry_after: None }
    }

    /// The fan-out's deadline came first.
    pub fn deadline(message: impl Into<String>) -> Self {
        Self::because(DEADLINE, message)
    }

    /// Whether the fan-out's deadline came first.
    pub fn is_deadline(&self) -> bool {
        self.error == DEADLINE
    }

    /// `policy` is the upstream's name there.
    fn of(error: &Error, policy: Option<&str>, place: &Place) -> Self {
        let now = Instant::now();
        let (word, name) = match error {
            Error::DeadlineExceeded { bound: Bound::FanOut, .. } => (DEADLINE, ""),
            // The name is a part of the key to edit.
            Error::DeadlineExceeded { .. } => (error.word(), policy.unwrap_or(DEFAULT)),
            error => (error.word(), place.name(policy)),
        };
        Self {
            retry_after: error.retry_at().map(|at| at.saturating_duration_since(now)),
            ..Self::because(word, error.detail(name, now))
        }
    }

    fn status(found: &Found, policy: Option<&str>, place: &Place) -> Self {
        let message = format!("{} answered {}", place.name(policy), found.status().as_u16());
        Self {
            status: Some(found.status()),
            retry_after: push_back::wait(found.headers(), SystemTime::now()),
            ..Self::because("upstream_status", message)
        }
    }
}

impl Place {
    /// What a person calls it: the policy's name, or its own where no policy names it.
    fn name<'a>(&'a self, policy: Option<&'a str>) -> &'a str {
        policy.filter(|name| ![DEFAULT, "direct"].contains(name)).unwrap_or(&self.authority)
    }
}

/// The policy's name for upstreams that it does not name.
const DEFAULT: &str = "default";

/// The fan-out's deadline came first.
pub const DEADLINE: &str = "deadline";
/// Enough others had come.
pub const NOT_AWAITED: &str = "not_awaited";

/// What all calls of a fan-out share.
#[derive(Clone)]
pub struct Common {
    /// The process.
    pub proxy: Arc<Proxy>,
    /// The one snapshot of the policy.
    pub config: Arc<Config>,
    /// When the fan-out ends.
    pub deadline: Deadline,
    /// The trace context that every request gets which has none of its own.
    pub trace: Arc<HeaderMap>,
    /// The fan-out needs no more: what is dropped from now on is not left by its client.
    pub is_over: Arc<AtomicBool>,
}

/// Makes the call with this number in the list, whose requests are known by `id` in the log. Dropping the future
/// cancels it.
pub async fn run(common: Common, number: usize, ask: Ask, id: String) -> Outcome {
    // So many at once that a wait here means a fault elsewhere; it ends with the fan-out.
    let _place = common.proxy.fan_out_places().acquire().await;
    let deadline = match ask.timeout {
        Some(timeout) => {
            let own = Deadline::after(Arrival::now(), timeout, Duration::ZERO, Bound::FanOutCall);
            // Whoever gives a call a time says that it may take so long.
            Deadline { is_callers: true, ..common.deadline.clone().or_earlier(own) }
        }
        None => common.deadline.clone(),
    };
    let started = Instant::now();
    let call = Call {
        common: &common,
        number,
        ask: &ask,
        deadline: &deadline,
        id: &id,
        is_decided: AtomicBool::new(false),
    };
    let mut outcome = match &ask.backup {
        None => call.fetch(call.first()).await,
        Some((place, headers)) => {
            let id = format!("{}.backup", call.id);
            let backup = Leg { key: "backup", place, headers, id: &id, is_first: false };
            Box::pin(call.with_backup(backup)).await
        }
    };
    if let Outcome::Result(result) = &mut outcome {
        result.elapsed = started.elapsed();
    }
    outcome
}

/// One call under way.
struct Call<'a> {
    common: &'a Common,
    number: usize,
    ask: &'a Ask,
    deadline: &'a Deadline,
    id: &'a str,
    /// One of its two places has answered.
    is_decided: AtomicBool,
}

/// One of the places that a call is sent to.
#[derive(Clone, Copy)]
struct Leg<'a> {
    /// The call's key that names it.
    key: &'static str,
    place: &'a Place,
    headers: &'a HeaderMap,
    /// Its requests in the log.
    id: &'a str,
    is_first: bool,
}

impl<'a> Call<'a> {
    fn first(&self) -> Leg<'a> {
        Leg { key: "url", place: &self.ask.place, headers: &self.ask.headers, id: self.id, is_first: true }
    }

    async fn with_backup(&self, backup: Leg<'_>) -> Outcome {
        let now = Instant::now();
        let half = now + self.deadline.at.saturating_duration_since(now) / 2;
        let mut first = pin!(self.fetch(self.first()));
        let mut ended = tokio::select! {
            biased;
            outcome = &mut first => Some(outcome),
            () = sleep_until(half), if self.ask.method.is_idempotent() => None,
        };
        if let Some(outcome) = ended.take_if(|outcome| outcome.is_real() || !self.may_begin()) {
            return outcome;
        }
        let mut second = pin!(self.fetch(backup));
        let mut second_ended: Option<Outcome> = None;
        loop {
            tokio::select! {
                biased;
                outcome = &mut first, if ended.is_none() => match outcome.is_real() {
                    true => return self.decided(outcome),
                    false => ended = Some(outcome),
                },
                outcome = &mut second, if second_ended.is_none() => match outcome.by_backup() {
                    outcome if outcome.is_real() => return self.decided(outcome),
                    outcome => second_ended = Some(outcome),
                },
            }
            // What stands in is better than nothing; of two that failed both say why.
            (ended, second_ended) = match (ended, second_ended) {
                (Some(Outcome::Missing(_)), Some(result @ Outcome::Result(_))) => return result,
                (Some(Outcome::Missing(own)), Some(Outcome::Missing(its))) => {
                    let message = format!("{}; its backup: {}", own.message, its.message);
                    return Outcome::Missing(Missing { message, ..own });
                }
                (Some(outcome), Some(_)) => return outcome,
                undecided => undecided,
            };
        }
    }

    /// What is sent when there is no time left for its answer may have its effect all the same.
    fn may_begin(&self) -> bool {
        Instant::now() < self.deadline.at && !self.common.proxy.is_ending()
    }

    fn decided(&self, outcome: Outcome) -> Outcome {
        self.is_decided.store(true, Ordering::Relaxed);
        outcome
    }

    /// Nobody waits for a request of this call any more, but not because its client has left.
    fn is_superseded(&self) -> bool {
        self.is_decided.load(Ordering::Relaxed) || self.common.is_over.load(Ordering::Relaxed)
    }

    async fn fetch(&self, leg: Leg<'_>) -> Outcome {
        let Leg { key, place, .. } = leg;
        let (proxy, arrival) = (&self.common.proxy, Arrival::now());
        if proxy.registry().dialer().is_named_own(&place.authority, place.scheme.default_port()) {
            let message = format!("calls[{}].{key}: names hedgerow itself", self.number);
            return Outcome::Missing(Missing::because("invalid_request", message));
        }
        let request_id =
            HeaderValue::from_str(leg.id).map_or(RequestId::Ours(fastrand::u64(..)), RequestId::Theirs);
        let ledger = Ledger::open(proxy, arrival, request_id, Some(self.ask.method.clone()));
        let progress = ledger.progress().clone();
        let intake = self.intake(leg, arrival);
        let travelled = self.unless_superseded(leg, &progress, travel(proxy, intake, ledger)).await;

        let policy: Option<Arc<str>> = travelled.ledger.upstream().map(Arc::from);
        let policy = policy.as_deref();
        let (missing, source) = match &travelled.found {
            Err(error) => (Some(Missing::of(error, policy, place)), Source::Primary),
            Ok(found) if !found.is_acceptable() => {
                (Some(Missing::status(found, policy, place)), Source::Primary)
            }
            Ok(found) => (None, found.source()),
        };
        let Arrived::Answer(answer) = travelled.deliver() else {
            let message = format!("{} changed the protocol unasked", place.name(policy));
            return Outcome::Missing(Missing::because("upstream_invalid", message));
        };
        if let Some(missing) = missing {
            read_what_is_there(answer.response.into_body());
            return Outcome::Missing(missing);
        }
        match self.unless_superseded(leg, &progress, self.collect(answer.response, source)).await {
            Ok(result) => Outcome::Result(Box::new(result)),
            Err(error) => Outcome::Missing(Missing::of(&error, policy, place)),
        }
    }

    /// The call as a listener would hand it on.
    fn intake(&self, Leg { place, headers, .. }: Leg<'_>, arrival: Arrival) -> Intake {
        let Self { common, ask, .. } = self;
        let mut request = Request::new(());
        *request.method_mut() = ask.method.clone();
        *request.uri_mut() = place.target.clone().into();
        *request.headers_mut() = headers.clone();
        // A state is that of its parent alone: a call with a context of its own gets no part of another.
        if !common.trace.keys().any(|name| headers.contains_key(name)) {
            request.headers_mut().extend((*common.trace).clone());
        }
        Intake {
            head: request.into_parts().0,
            body: match ask.body.is_empty() {
                true => IncomingBody::Empty,
                false => IncomingBody::Whole(ask.body.clone()),
            },
            authority: place.authority.clone(),
            scheme: place.scheme,
            is_for_server: false,
            is_unaware: false,
            pinned: None,
            config: common.config.clone(),
            arrival,
            within: Some(Box::new(self.deadline.clone())),
            interim: None,
        }
    }

    /// Reads an answer, as much of it as is wanted and has room.
    async fn collect(&self, answer: Response<AnswerBody>, source: Source) -> Result<CallResult, Error> {
        let memory = self.common.proxy.fan_out_memory();
        let (head, body) = answer.into_parts();
        let mut room = memory.share();
        if !room.take(weight(&head.headers)) {
            body.suffices();
            return Err(Error::FanOutsFull);
        }
        let (read, is_truncated) = read(body, self.ask.max_body, memory.share()).await?;
        let (bytes, body_room) = read.map(Gathered::finish).unzip();
        let bytes = bytes.unwrap_or_default().into_vec();
        let (content, headers) = content(bytes, is_truncated, head.headers).await;
        let elapsed = Duration::ZERO;
        let rooms = (room, body_room);
        Ok(CallResult { status: head.status, headers, content, is_truncated, elapsed, source, rooms })
    }

    /// Waits for `work`; when that is dropped, it says first where nobody needs it any more.
    async fn unless_superseded<T>(
        &self,
        leg: Leg<'_>,
        progress: &Arc<Progress>,
        work: impl Future<Output = T>,
    ) -> T {
        let mut work = pin!(work);
        // Made later, so it is dropped earlier.
        let _leave = Leave { call: self, is_first: leg.is_first, progress: progress.clone() };
        work.as_mut().await
    }
}

/// Says on the way out, where it is so, that a request is not given up because its client has left.
struct Leave<'a> {
    call: &'a Call<'a>,
    is_first: bool,
    progress: Arc<Progress>,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        if self.call.is_superseded() {
            self.progress.give_way();
            // The backup was asked since the time was up that the first place had: it is judged as late.
            if self.is_first && self.call.is_decided.load(Ordering::Relaxed) {
                self.progress.decide(Fate::Expired);
            }
        }
    }
}

/// Bytes of memory, nearly, of a head that is kept.
fn weight(headers: &HeaderMap) -> usize {
    const FIELD: usize = 128;
    headers.iter().map(|(name, value)| name.as_str().len() + value.len() + FIELD).sum()
}

/// A body that nobody is shown: when all of it has come with its head, the connection can be used again.
fn read_what_is_there(mut body: AnswerBody) {
    const FRAMES: usize = 16;
    for _ in 0..FRAMES {
        match body.frame().now_or_never() {
            Some(Some(Ok(_))) => {}
            Some(None | Some(Err(_))) => return,
            None => break,
        }
    }
    body.suffices();
}

/// Reads at most `limit` bytes, and whether there are more or had no room.
async fn read(mut body: AnswerBody, limit: usize, room: Room) -> Result<(Option<Gathered>, bool), Error> {
    /// Memory is made ready for so much on an upstream's word alone.
    const PREPARED: usize = 64 << 10;
    let length = usize::try_from(http_body::Body::size_hint(&body).lower()).unwrap_or(PREPARED);
    let Some(mut gathered) = Gathered::new(limit, length.min(PREPARED), room) else {
        body.suffices();
        return Ok((None, true));
    };
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        let fits = &data[..data.len().min(gathered.left())];
        if !gathered.push(fits) || fits.len() < data.len() {
            body.suffices();
            return Ok((Some(gathered), true));
        }
    }
    Ok((Some(gathered), false))
}

/// Looks what the body is. A large one elsewhere: meanwhile the other calls of the fan-out go on.
async fn content(body: Vec<u8>, is_truncated: bool, headers: HeaderMap) -> (Content, HeaderMap) {
    const LARGE: usize = 256 << 10;
    if body.len() < LARGE {
        return (Content::of(body, is_truncated, &headers), headers);
    }
    let look = move || (Content::of(body, is_truncated, &headers), headers);
    // It fails only with the process.
    tokio::task::spawn_blocking(look).await.unwrap_or((Content::Empty, HeaderMap::new()))
}
