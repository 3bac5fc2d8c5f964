//! One call of a fan-out, from its start to its result.
//!
//! It goes on the journey of any request. A call may name a backup, another URL, which is asked when the first
//! one has failed; where asking twice does no harm also when the first has used half of the time, since one
//! that hangs until the deadline would leave none for the second. The first acceptable answer counts, and
//! the other request is cancelled.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::header::{HeaderMap, HeaderValue};
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use tokio::time::{Instant, sleep_until};

use super::content::Content;
use super::plan::{Ask, Place};
use crate::call::{Progress, RequestId};
use crate::config::Config;
use crate::error::{Bound, Error};
use crate::pipeline::answer::AnswerBody;
use crate::pipeline::ledger::Ledger;
use crate::pipeline::{Arrived, Intake, Proxy, travel};
use crate::policy::deadline::{Arrival, Deadline};
use crate::policy::room::Room;
use crate::telemetry::metrics::Source;
use crate::wire::incoming::IncomingBody;

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
    /// Holds its memory.
    pub room: Room,
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

    fn of(error: &Error, upstream: &str) -> Self {
        let now = Instant::now();
        let word = match error {
            Error::DeadlineExceeded { bound: Bound::FanOut, .. } => DEADLINE,
            error => error.word(),
        };
        Self {
            retry_after: error.retry_at().map(|at| at.saturating_duration_since(now)),
            ..Self::because(word, error.detail(upstream, now))
        }
    }

    fn status(status: StatusCode, upstream: &str) -> Self {
        let message = format!("{upstream} answered {}", status.as_u16());
        Self { status: Some(status), ..Self::because("upstream_status", message) }
    }
}

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
    /// Fields that every request gets where it has none of the name.
    pub trace: Arc<HeaderMap>,
    /// Enough has come: what is dropped now, nobody has left.
    pub has_enough: Arc<AtomicBool>,
}

/// Makes the call, whose requests are known by `id` in the log. Dropping the future cancels it.
pub async fn run(common: Common, ask: Ask, id: String) -> Outcome {
    // So many at once that a wait here means a fault elsewhere; it ends with the fan-out.
    let _place = common.proxy.fan_out_places().acquire().await;
    let deadline = match ask.timeout {
        Some(timeout) => {
            let own = Deadline::after(Arrival::now(), timeout, Duration::ZERO, Bound::FanOutCall);
            common.deadline.clone().or_earlier(own)
        }
        None => common.deadline.clone(),
    };
    let started = Instant::now();
    let call =
        Call { common: &common, ask: &ask, deadline: &deadline, id: &id, is_decided: AtomicBool::new(false) };
    let mut outcome = match &ask.backup {
        None => call.fetch(&ask.place).await,
        Some(backup) => Box::pin(call.with_backup(backup)).await,
    };
    if let Outcome::Result(result) = &mut outcome {
        result.elapsed = started.elapsed();
    }
    outcome
}

/// One call under way.
struct Call<'a> {
    common: &'a Common,
    ask: &'a Ask,
    deadline: &'a Deadline,
    id: &'a str,
    /// One of its two places has answered.
    is_decided: AtomicBool,
}

impl Call<'_> {
    async fn with_backup(&self, backup: &Place) -> Outcome {
        let now = Instant::now();
        let patience = match self.ask.method.is_idempotent() {
            true => now + self.deadline.at.saturating_duration_since(now) / 2,
            false => self.deadline.at,
        };
        let mut first = pin!(self.fetch(&self.ask.place));
        let failed = tokio::select! {
            biased;
            outcome = &mut first => match outcome {
                Outcome::Result(_) => return outcome,
                Outcome::Missing(missing) => Some(missing),
            },
            () = sleep_until(patience) => None,
        };
        let mut second = pin!(self.fetch(backup));
        let (mut failed, mut has_second_failed) = (failed, false);
        // The first result wins. When there is none, the call's own place says why.
        loop {
            tokio::select! {
                biased;
                outcome = &mut first, if failed.is_none() => match outcome {
                    Outcome::Missing(missing) => failed = Some(missing),
                    result @ Outcome::Result(_) => return self.decided(result),
                },
                outcome = &mut second, if !has_second_failed => match outcome {
                    Outcome::Missing(_) => has_second_failed = true,
                    Outcome::Result(mut result) => {
                        result.source = Source::Backup;
                        return self.decided(Outcome::Result(result));
                    }
                },
            }
            if let (Some(missing), true) = (&failed, has_second_failed) {
                return Outcome::Missing(missing.clone());
            }
        }
    }

    fn decided(&self, outcome: Outcome) -> Outcome {
        self.is_decided.store(true, Ordering::Relaxed);
        outcome
    }

    /// Nobody waits for a request of this call any more, but not because its client has left.
    fn is_superseded(&self) -> bool {
        self.is_decided.load(Ordering::Relaxed) || self.common.has_enough.load(Ordering::Relaxed)
    }

    async fn fetch(&self, place: &Place) -> Outcome {
        let Common { proxy, config, trace, .. } = self.common;
        let (ask, arrival) = (self.ask, Arrival::now());
        if proxy.registry().dialer().is_named_own(&place.authority, place.scheme.default_port()) {
            return Outcome::Missing(Missing::because("invalid_request", "the URL names hedgerow itself"));
        }
        let request_id =
            HeaderValue::from_str(self.id).map_or(RequestId::Ours(fastrand::u64(..)), RequestId::Theirs);
        let ledger = Ledger::open(proxy, arrival, request_id, Some(ask.method.clone()));
        let progress = ledger.progress().clone();
        let mut request = Request::new(());
        *request.method_mut() = ask.method.clone();
        *request.uri_mut() = place.target.clone().into();
        *request.headers_mut() = ask.headers.clone();
        for (name, value) in &**trace {
            request.headers_mut().entry(name).or_insert_with(|| value.clone());
        }
        let intake = Intake {
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
            config: config.clone(),
            arrival,
            within: Some(self.deadline.clone()),
            interim: None,
        };
        let travelling = pin!(travel(proxy, intake, ledger));
        // Dropped before what it speaks for.
        let leave = Leave { call: self, progress };
        let travelled = travelling.await;

        let upstream: Arc<str> = match travelled.ledger.upstream() {
            None | Some("default") => place.authority.as_str().into(),
            Some(name) => name.into(),
        };
        let missing = match &travelled.found {
            Err(error) => Some(Missing::of(error, &upstream)),
            Ok(found) if !found.is_acceptable() => Some(Missing::status(found.status(), &upstream)),
            Ok(_) => None,
        };
        let source = travelled.found.as_ref().map_or(Source::Primary, |found| found.source());
        let Arrived::Answer(answer) = travelled.deliver() else {
            return Outcome::Missing(Missing::because(
                "upstream_invalid",
                "the upstream changed the protocol unasked",
            ));
        };
        let (head, body) = answer.response.into_parts();
        let mut room = proxy.fan_out_memory().share();
        if let Some(missing) = missing {
            // Read for the connection's sake, which otherwise could not be used again.
            let _ = read(body, ODD_BODY, &mut room).await;
            return Outcome::Missing(missing);
        }
        let read = read(body, ask.max_body, &mut room).await;
        drop(leave);
        match read {
            Err(error) => Outcome::Missing(Missing::of(&error, &upstream)),
            Ok((body, is_truncated)) => Outcome::Result(Box::new(CallResult {
                status: head.status,
                content: Content::of(body, is_truncated, &head.headers),
                headers: head.headers,
                is_truncated,
                elapsed: Duration::ZERO,
                source,
                room,
            })),
        }
    }
}

/// Says on the way out, where it is so, that a request is not given up because its client has left.
struct Leave<'a> {
    call: &'a Call<'a>,
    progress: Arc<Progress>,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        if self.call.is_superseded() {
            self.progress.give_way();
        }
    }
}

/// What is read of a body that nobody is shown.
const ODD_BODY: usize = 16 << 10;

/// Reads at most `limit` bytes, and whether there are more.
async fn read(mut body: AnswerBody, limit: usize, room: &mut Room) -> Result<(Vec<u8>, bool), Error> {
    let length = http_body::Body::size_hint(&body).lower();
    let mut read = Vec::with_capacity(limit.min(usize::try_from(length).unwrap_or(limit)).min(PREPARED));
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        let fits = data.len().min(limit - read.len());
        if !room.take(fits) {
            body.suffices();
            return Ok((read, true));
        }
        read.extend_from_slice(&data[..fits]);
        if fits < data.len() {
            body.suffices();
            return Ok((read, true));
        }
    }
    Ok((read, false))
}

/// Memory is made ready for so much on an upstream's word alone.
const PREPARED: usize = 64 << 10;
