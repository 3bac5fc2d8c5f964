//! The account of one request: what the metrics count and the access log tells, written when the
//! request ends, however it ends.
//!
//! A guard that travels with the request, from its arrival into the body of its answer. What is
//! dropped without an end was left by its client.

use std::sync::Arc;
use std::time::Duration;

use http::{Method, StatusCode};
use tokio::time::Instant;

use super::Proxy;
use super::found::Note;
use crate::call::{Progress, RequestId};
use crate::config::{AccessLog, Stages};
use crate::error::Error;
use crate::policy::deadline::Arrival;
use crate::respond::headers::HedgeEnd;
use crate::telemetry::log::{AccessRecord, path_of};
use crate::telemetry::metrics::{HedgeOutcome, Outcome, Source, UpstreamMetrics};
use crate::upstream::registry::Lane;

/// nginx's code for a client that left before its answer was complete.
const CLIENT_LEFT: u16 = 499;

/// One request's account.
pub struct Ledger {
    proxy: Arc<Proxy>,
    arrival: Arrival,
    id: RequestId,
    method: Option<Method>,
    is_grpc: bool,
    lane: Option<Lane>,
    path: Option<String>,
    progress: Arc<Progress>,
    code: u16,
    outcome: Outcome,
    error: Option<Error>,
    hedge: Option<HedgeEnd>,
    source: Option<Source>,
    is_stand_in: bool,
    head_after: Option<Duration>,
    end: Option<Instant>,
    bytes_out: u64,
    is_own: bool,
    is_void: bool,
}

impl Ledger {
    /// Opens the account of a request that has arrived. One whose head could not be read has no method.
    pub fn open(proxy: &Arc<Proxy>, arrival: Arrival, id: RequestId, method: Option<Method>) -> Self {
        proxy.enter();
        Self {
            proxy: proxy.clone(),
            arrival,
            id,
            method,
            is_grpc: false,
            lane: None,
            path: None,
            progress: Arc::default(),
            code: CLIENT_LEFT,
            outcome: Outcome::ClientLeft,
            error: None,
            hedge: None,
            source: None,
            is_stand_in: false,
            head_after: None,
            end: None,
            bytes_out: 0,
            is_own: false,
            is_void: false,
        }
    }

    /// The request's id.
    pub fn id(&self) -> &RequestId {
        &self.id
    }

    /// The request is a gRPC call: errors are to be told in that way. They count as what they are.
    pub fn speaks_grpc(&mut self) {
        self.is_grpc = true;
    }

    /// Whether it is a gRPC call.
    pub fn is_grpc(&self) -> bool {
        self.is_grpc
    }

    /// What the call and its attempts share with the account.
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// The process.
    pub fn proxy(&self) -> &Arc<Proxy> {
        &self.proxy
    }

    /// The policy name of the upstream, once it is known.
    pub fn upstream(&self) -> Option<&str> {
        self.lane.as_ref().map(|lane| &*lane.policy().name)
    }

    /// The upstream's stages, once it is known.
    pub fn stages(&self) -> Option<&Stages> {
        self.lane.as_ref().map(Lane::stages)
    }

    /// The request goes to this upstream.
    pub fn goes_to(&mut self, lane: &Lane, target: &str) {
        if lane.config().telemetry.access_log != AccessLog::Off {
            self.path = Some(path_of(target));
        }
        self.lane = Some(lane.clone());
    }

    /// Hedgerow itself answers, at this path. Then it is no request to any upstream, and not counted as one.
    pub fn is_served_here(&mut self, path: &str) {
        self.is_own = true;
        self.path = Some(path_of(path));
    }

    /// The call ends at `end` at the latest.
    pub fn bounded_by(&mut self, end: Option<Instant>) {
        self.end = end;
    }

    /// A head is passed on.
    pub fn answers(&mut self, status: StatusCode, hedge: Option<HedgeEnd>, note: Note, now: Instant) {
        self.code = status.as_u16();
        self.hedge = hedge;
        self.source = (!self.is_own).then(|| note.source(hedge));
        self.is_stand_in = note.stand_in.is_some();
        self.head_after = (!self.is_own).then(|| now.saturating_duration_since(self.arrival.now));
    }

    /// Bytes of the body have been passed on.
    pub fn sent(&mut self, bytes: usize) {
        self.bytes_out += bytes as u64;
    }

    /// The answer is whole.
    pub fn complete(&mut self) {
        self.outcome = if self.is_stand_in { Outcome::Degraded } else { Outcome::Answered };
    }

    /// The answer was cut after its head.
    pub fn cut(&mut self, error: Error) {
        self.outcome = Outcome::Incomplete;
        if let Error::DeadlineExceeded { stage, .. } = error {
            self.count_deadline(stage);
        }
        self.error = Some(error);
    }

    /// hedgerow answers with an error of its own.
    pub fn fails(&mut self, error: Error) {
        self.code = error.status().as_u16();
        self.outcome = match error {
            Error::BodyBrokenOff => Outcome::ClientLeft,
            _ => Outcome::Error,
        };
        if let Error::DeadlineExceeded { stage, .. } = error {
            self.count_deadline(stage);
        }
        self.error = Some(error);
    }

    /// The request has become a tunnel; its account stays open until that closes.
    pub fn tunnels(&mut self) {
        self.code = 200;
        self.outcome = Outcome::Tunnel;
    }

    /// The connection goes on as HTTP: its requests have accounts of their own.
    pub fn void(mut self) {
        self.is_void = true;
    }

    fn count_deadline(&self, stage: crate::error::Stage) {
        if !self.is_own {
            self.metrics().deadline_exceeded(stage);
        }
    }

    /// The upstream's metrics; those of `default` while no upstream is known.
    fn metrics(&self) -> &UpstreamMetrics {
        match &self.lane {
            Some(lane) => lane.metrics(),
            None => self.proxy.default_metrics(),
        }
    }

    fn line(&mut self, code: u16, elapsed: Duration) -> AccessRecord {
        AccessRecord {
            at: Some(self.arrival.wall),
            request_id: Some(self.id.to_string().into()),
            upstream: self.lane.as_ref().map(|lane| lane.policy().name.clone()),
            route: self.lane.as_ref().and_then(|lane| lane.route()).and_then(|route| route.name.clone()),
            method: self.method.clone(),
            authority: self.lane.as_ref().map(|lane| lane.upstream.authority().clone()),
            path: self.path.take(),
            status: Some(code),
            outcome: Some(self.outcome),
            error: self.error.as_ref().map(Error::word),
            cause: self.error.as_ref().and_then(Error::cause).map(Arc::from),
            duration: Some(elapsed),
            queue: Some(self.progress.queue_time()).filter(|wait| !wait.is_zero()),
            upstream_time: self.head_after,
            deadline: self.end.map(|end| end.saturating_duration_since(self.arrival.now)),
            attempts: (!self.is_own).then(|| self.progress.attempts()),
            source: self.source.map(Source::word),
            hedge: self.hedge.map(|end| match end {
                HedgeEnd::Won => HedgeOutcome::Won,
                HedgeEnd::Lost => HedgeOutcome::Lost,
            }),
            peer: self.progress.peer(),
            bytes_out: Some(self.bytes_out),
        }
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        if self.outcome == Outcome::ClientLeft && self.progress.has_given_way() {
            self.outcome = Outcome::NotAwaited;
        }
        if !self.is_void {
            let elapsed = Instant::now().saturating_duration_since(self.arrival.now);
            let is_whole = !matches!(self.outcome, Outcome::ClientLeft | Outcome::NotAwaited);
            let code = if is_whole { self.code } else { CLIENT_LEFT };
            if !self.is_own {
                self.metrics().request(code, self.outcome, elapsed);
            }
            let form = match &self.lane {
                Some(lane) => lane.config().telemetry.access_log,
                None => self.proxy.snapshot().telemetry.access_log,
            };
            if form != AccessLog::Off {
                let line = self.line(code, elapsed);
                self.proxy.log().record(form, line);
            }
        }
        self.proxy.leave();
    }
}
