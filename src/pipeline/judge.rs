//! What an attempt owes at its end, however it ends: a verdict for the breaker, a sample for the
//! hedge's memory, a count.
//!
//! A guard, because most ways to end an attempt are to drop it: the client leaves, the deadline
//! strikes, another attempt wins. Why it is dropped stands in the call's [`Progress`].
//!
//! How a gRPC call went stands in the trailers, so its attempt is judged like one whose status comes
//! last: until then it counts as well begun.

use std::sync::Arc;
use std::time::SystemTime;

use http::StatusCode;
use http::header::HeaderMap;
use tokio::time::Instant;

use crate::call::{Fate, Progress};
use crate::error::{Error, Stage};
use crate::policy::breaker::{Admission, Verdict};
use crate::telemetry::metrics::{AttemptKind, AttemptResult};
use crate::upstream::registry::Lane;
use crate::wire::event_stream::is_event_stream;
use crate::wire::{grpc, push_back};

/// One attempt's guard.
pub struct Judge {
    lane: Lane,
    progress: Arc<Progress>,
    admission: Option<Admission>,
    kind: AttemptKind,
    started: Instant,
    /// Whether the request has gone out, so that time says something about the upstream.
    is_sent: bool,
    /// The upstream has refused to look at the request, as one that is restarted or full does: an attempt
    /// that it never accepted is not its failure.
    is_refused: bool,
    head: Option<Head>,
    is_done: bool,
}

#[derive(Clone, Copy)]
struct Head {
    /// As HTTP says it, also where gRPC has said it in its own way.
    status: StatusCode,
    push_back: Option<Instant>,
    /// gRPC has not said yet how the call went.
    awaits_trailers: bool,
    at: Instant,
}

impl Head {
    fn of(status: StatusCode, headers: &HeaderMap, now: Instant) -> Self {
        // Nothing else is done with it, and most answers need not be searched.
        let push_back = match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                push_back::wait(headers, SystemTime::now()).map(|wait| now + wait)
            }
            _ => None,
        };
        let mut head = Self { status, push_back, awaits_trailers: false, at: now };
        if status == StatusCode::OK && grpc::is_grpc(headers) {
            head.awaits_trailers = true;
            head.read_grpc(headers, now);
        }
        head
    }

    /// Takes the status from fields that have one.
    fn read_grpc(&mut self, fields: &HeaderMap, now: Instant) {
        if let Some(status) = grpc::Status::of(fields) {
            self.status = status.to_http();
            let wait = push_back::wait(fields, SystemTime::now()).map(|wait| now + wait);
            self.push_back = wait.or(self.push_back);
            self.awaits_trailers = false;
        }
    }
}

impl Judge {
    /// Watches an attempt that has passed its gates at `started`.
    pub fn new(
        lane: Lane,
        progress: Arc<Progress>,
        admission: Option<Admission>,
        kind: AttemptKind,
        started: Instant,
    ) -> Self {
        Self {
            lane,
            progress,
            admission,
            kind,
            started,
            is_sent: false,
            is_refused: false,
            head: None,
            is_done: false,
        }
    }

    /// When the attempt passed its gates.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// The request goes out now.
    pub fn sent(&mut self) {
        self.is_sent = true;
    }

    /// Whether it has gone out.
    pub fn is_sent(&self) -> bool {
        self.is_sent
    }

    /// The upstream has refused to look at the request, and it will not be sent again.
    pub fn refused(&mut self) {
        self.is_refused = true;
    }

    /// The head has come: a sample, unless it is a failure that came fast. A probe that turns out to
    /// be a stream is judged by its head, or the breaker would stay half-open as long as it lasts.
    pub fn head(&mut self, status: StatusCode, headers: &HeaderMap, now: Instant) {
        let head = Head::of(status, headers, now);
        self.head = Some(head);
        if self.status_result(head.status) == AttemptResult::Ok {
            self.sample(now);
        }
        if self.is_probe() && !head.awaits_trailers && is_stream(headers) {
            self.complete(now);
        }
    }

    /// Whether the answer, as far as it is known, is good enough not to look for a better one.
    pub fn is_acceptable(&self) -> bool {
        self.head.is_some_and(|head| self.status_result(head.status) == AttemptResult::Ok)
    }

    /// The answer's trailers have come.
    pub fn trailers(&mut self, trailers: &HeaderMap, now: Instant) {
        if let Some(head) = self.head.as_mut().filter(|head| head.awaits_trailers) {
            head.read_grpc(trailers, now);
        }
    }

    /// When [`Self::settle`] is due: for a gRPC probe, whose head does not tell a short answer from a
    /// stream. The status of the former comes right behind it; the latter must not keep the breaker
    /// half-open.
    pub fn settles_at(&self) -> Option<Instant> {
        let head = self.head.filter(|head| head.awaits_trailers && self.is_probe())?;
        self.lane.stages().breaker.as_ref().map(|breaker| head.at + breaker.fair_chance)
    }

    /// The probe has become a stream that lasts: it is judged by its head.
    pub fn settle(&mut self, now: Instant) {
        if let Some(head) = &mut self.head {
            head.awaits_trailers = false;
        }
        self.complete(now);
    }

    /// The answer has come whole.
    pub fn complete(&mut self, now: Instant) {
        let (verdict, result) = match self.head {
            Some(head) => {
                let status = match head.awaits_trailers {
                    true => grpc::Status::UNKNOWN.to_http(),
                    false => head.status,
                };
                (self.by_status(Head { status, ..head }), self.status_result(status))
            }
            None => (Verdict::Success, AttemptResult::Ok),
        };
        self.close(verdict, result, now);
    }

    /// Something better is looked for: the answer is judged by its head, whatever becomes of the rest.
    pub fn turn_down(&mut self, now: Instant) {
        if let Some(head) = self.head {
            self.close(self.by_status(head), self.status_result(head.status), now);
        }
    }

    /// The attempt has failed.
    pub fn fail(&mut self, error: &Error, now: Instant) {
        let verdict = match error {
            Error::DeadlineExceeded { .. } => self.by_deadline(now),
            _ if self.is_refused => Verdict::Neutral,
            error if error.counts_against_upstream() => match result_of(error) {
                // A name, a route or a trusted root may be missing in this pod alone.
                AttemptResult::Connect | AttemptResult::Tls | AttemptResult::Timeout => Verdict::Unreached,
                _ => self.failure(),
            },
            _ => Verdict::Neutral,
        };
        self.close(verdict, result_of(error), now);
    }

    /// The deadline struck while the body was coming.
    pub fn expire(&mut self, now: Instant) {
        self.close(self.by_deadline(now), AttemptResult::Timeout, now);
    }

    fn by_status(&self, head: Head) -> Verdict {
        let Some(breaker) = &self.lane.stages().breaker else { return Verdict::Neutral };
        match (head.status, head.push_back) {
            (StatusCode::TOO_MANY_REQUESTS, until) => Verdict::PushBack { until },
            (StatusCode::SERVICE_UNAVAILABLE, until @ Some(_)) if self.is_probe() => {
                Verdict::PushBack { until }
            }
            (status, _) if breaker.failure_statuses.contains(status) => Verdict::Failure,
            _ => Verdict::Success,
        }
    }

    fn is_probe(&self) -> bool {
        self.admission.as_ref().is_some_and(Admission::is_probe)
    }

    /// A deadline says something about the upstream only when it had its fair chance.
    fn by_deadline(&self, now: Instant) -> Verdict {
        let Some(breaker) = &self.lane.stages().breaker else { return Verdict::Neutral };
        let chance = breaker.fair_chance.min(breaker.slow_after);
        if now.saturating_duration_since(self.started) >= chance { self.failure() } else { Verdict::Neutral }
    }

    /// What came of a request that went out; or there was no way for it, as this pod sees it.
    fn failure(&self) -> Verdict {
        match self.progress.stage() {
            Stage::Dns | Stage::Connect => Verdict::Unreached,
            _ if self.is_sent => Verdict::Failure,
            _ => Verdict::Unreached,
        }
    }

    fn status_result(&self, status: StatusCode) -> AttemptResult {
        if self.lane.stages().unacceptable.contains(status) {
            AttemptResult::Status
        } else {
            AttemptResult::Ok
        }
    }

    fn sample(&self, now: Instant) {
        if self.lane.stages().hedge.is_some() {
            self.lane.hedge().record(now.saturating_duration_since(self.started), now);
        }
    }

    /// It would have taken at least so long.
    fn sample_cancelled(&self, now: Instant) {
        if self.lane.stages().hedge.is_some() {
            self.lane.hedge().record_cancelled(now.saturating_duration_since(self.started), now);
        }
    }

    fn close(&mut self, verdict: Verdict, result: AttemptResult, now: Instant) {
        if std::mem::replace(&mut self.is_done, true) {
            return;
        }
        let metrics = self.lane.metrics();
        if let (Some(admission), Some(breaker)) = (self.admission.take(), &self.lane.stages().breaker)
            && let Some(state) = admission.finish(breaker, verdict, now)
        {
            self.lane.upstream.breaker_moved(state, "pod");
        }
        metrics.attempt(self.kind, result);
    }
}

impl Drop for Judge {
    fn drop(&mut self) {
        if self.is_done {
            return;
        }
        let now = Instant::now();
        if self.head.is_some() && self.progress.is_sufficient() {
            return self.turn_down(now);
        }
        if let Some(head) = self.head
            && self.progress.fate() != Fate::ClientLeft
            && self.status_result(head.status) == AttemptResult::Status
        {
            // An answer that was not good enough, given up for a better one or none.
            let verdict = self.by_status(head);
            return self.close(verdict, AttemptResult::Status, now);
        }
        match self.progress.fate() {
            Fate::Expired => {
                if self.is_sent && self.head.is_none() {
                    self.sample_cancelled(now);
                }
                let verdict = if self.is_sent { self.by_deadline(now) } else { Verdict::Neutral };
                self.close(verdict, AttemptResult::Timeout, now);
            }
            Fate::Superseded => {
                if self.head.is_none() {
                    self.sample_cancelled(now);
                }
                // Dropping the admission, not finishing it, lets an old attempt count as slow.
                self.admission = None;
                self.close(Verdict::Neutral, AttemptResult::Cancelled, now);
            }
            Fate::ClientLeft => {
                self.admission = None;
                self.close(Verdict::Neutral, AttemptResult::Cancelled, now);
            }
        }
    }
}

fn result_of(error: &Error) -> AttemptResult {
    match error {
        Error::DeadlineExceeded { .. } | Error::ConnectTimeout | Error::DnsTimeout => AttemptResult::Timeout,
        Error::ConnectFailed(_) | Error::DnsFailed(_) => AttemptResult::Connect,
        Error::TlsFailed(_) | Error::CertificateInvalid { .. } => AttemptResult::Tls,
        Error::UpstreamReset(_) | Error::UpstreamIncomplete(_) | Error::UpstreamInvalid(_) => {
            AttemptResult::Reset
        }
        _ => AttemptResult::Cancelled,
    }
}

/// Whether the answer's body has no end that one waits for: its deadline follows other rules.
pub fn is_stream(headers: &HeaderMap) -> bool {
    is_event_stream(headers) || grpc::is_grpc_or_web(headers)
}
