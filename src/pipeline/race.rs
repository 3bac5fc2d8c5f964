//! One try: a primary attempt and, when it is slow, a hedge. The first acceptable head wins.
//!
//! All waiting of a try up to its head happens here, on one timer: it stands at the hedge's start
//! first and at the deadline then. Attempts are futures of this one; the ones that have not won are
//! dropped, which cancels them on the wire.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::attempt::{self, Failure, Head, Try};
use super::gate::{self, Closed, Pass};
use crate::call::Fate;
use crate::error::{Cause, Error};
use crate::policy::deadline::end_of;
use crate::policy::hedge::Plan;
use crate::respond::headers::HedgeEnd;
use crate::telemetry::metrics::{AttemptKind, HedgeOutcome};
use crate::upstream::registry::Lane;
use crate::wire::push_back::is_push_back;

/// The answer of a try, and how its hedge ended.
pub struct Outcome {
    /// The head that won.
    pub head: Box<Head>,
    /// Whether a hedge was sent, and whether it won.
    pub hedge: Option<HedgeEnd>,
}

/// Sends `this.call` to `lane`, hedged as the policy says, until the deadline. `kind` is what the try's
/// first attempt is: the call's primary, or another try.
///
/// # Errors
/// The first attempt's failure when none got an answer; the deadline's when it struck.
pub async fn run(this: Try<'_>, lane: &Lane, kind: AttemptKind) -> Result<Outcome, Failure> {
    let progress = &this.call.progress;
    progress.begin_try();
    let end = end_of(this.deadline);
    let mut timer = pin!(sleep_until(end));

    let pass = tokio::select! {
        biased;
        pass = gate::enter(lane, progress, Some(&this.call.headers), this.deadline.map(|end| end.at)) => pass?,
        () = timer.as_mut() => return Err(expired(this).into()),
    };
    if kind == AttemptKind::Primary {
        lane.upstream.budget.deposit(&lane.stages().extra_load, pass.at);
    }
    let mut hedging = Hedging::plan(this, lane, &pass, end);
    if let Some(at) = hedging.next {
        timer.as_mut().reset(at.min(end));
    }

    let primary = pin!(attempt::run(this, lane.clone(), pass, kind));
    let mut runners = Runners { primary: Some((kind, primary)), hedges: Vec::new() };
    let mut kept = Kept::default();
    loop {
        let ended = poll_fn(|cx| {
            if let Poll::Ready(ended) = runners.poll(cx) {
                return Poll::Ready(Some(ended));
            }
            timer.as_mut().poll(cx).map(|()| None)
        })
        .await;
        match ended {
            Some((kind, Ok(head))) if head.is_acceptable() => {
                progress.decide(Fate::Superseded);
                return Ok(hedging.won(kind, head));
            }
            Some((kind, ended)) => {
                if ended.as_ref().is_ok_and(|head| is_push_back(head.response.headers())) {
                    progress.push_back();
                    hedging.disarm();
                }
                if kind == AttemptKind::Hedge {
                    hedging.failed();
                }
                kept.keep(kind, ended);
                if runners.is_empty() {
                    // What is kept beside the answer is given up as not good enough.
                    progress.decide(Fate::Superseded);
                    return kept.into_answer().map(|(kind, head)| hedging.settled(kind, head));
                }
            }
            None if Instant::now() >= end => {
                let error = expired(this);
                // An answer that was not good enough is better than none.
                return match kept.into_answer() {
                    Ok((kind, head)) => Ok(hedging.settled(kind, head)),
                    Err(_) => {
                        hedging.give_up();
                        Err(error.into())
                    }
                };
            }
            None => {
                if let Some(hedge) = hedging.start(this, lane, end) {
                    runners.hedges.push(hedge);
                }
                timer.as_mut().reset(hedging.next.map_or(end, |at| at.min(end)));
            }
        }
    }
}

fn expired(this: Try<'_>) -> Error {
    this.call.progress.decide(Fate::Expired);
    // Whatever the caller gets now, it has no time left for another try either.
    this.call.progress.give_up();
    let stage = this.call.progress.stage();
    this.deadline.map_or(Error::Internal(Cause::NONE), |deadline| deadline.exceeded(stage))
}

/// How an attempt ended.
type Ended = (AttemptKind, Result<Box<Head>, Failure>);

type HedgeFuture<'a> = Pin<Box<dyn Future<Output = Result<Box<Head>, Failure>> + Send + 'a>>;

/// The attempts that run.
struct Runners<'a, P> {
    primary: Option<(AttemptKind, Pin<&'a mut P>)>,
    hedges: Vec<HedgeFuture<'a>>,
}

impl<P: Future<Output = Result<Box<Head>, Failure>>> Runners<'_, P> {
    fn poll(&mut self, cx: &mut std::task::Context<'_>) -> Poll<Ended> {
        if let Some((kind, primary)) = &mut self.primary
            && let Poll::Ready(ended) = primary.as_mut().poll(cx)
        {
            let kind = *kind;
            self.primary = None;
            return Poll::Ready((kind, ended));
        }
        for at in 0..self.hedges.len() {
            if let Poll::Ready(ended) = self.hedges[at].as_mut().poll(cx) {
                drop(self.hedges.swap_remove(at));
                return Poll::Ready((AttemptKind::Hedge, ended));
            }
        }
        Poll::Pending
    }

    fn is_empty(&self) -> bool {
        self.primary.is_none() && self.hedges.is_empty()
    }
}

/// What came that was not good enough, in case nothing better does.
#[derive(Default)]
struct Kept {
    primary: Option<Result<Box<Head>, Failure>>,
    hedge: Option<Box<Head>>,
}

impl Kept {
    fn keep(&mut self, kind: AttemptKind, ended: Result<Box<Head>, Failure>) {
        match (kind, ended) {
            (AttemptKind::Hedge, Ok(head)) => self.hedge = self.hedge.take().or(Some(head)),
            (AttemptKind::Hedge, Err(_)) => {}
            (_, ended) => self.primary = Some(ended),
        }
    }

    /// The primary's answer; a hedge's only where the primary has none.
    fn into_answer(self) -> Result<(AttemptKind, Box<Head>), Failure> {
        match (self.primary, self.hedge) {
            (Some(Ok(head)), _) => Ok((AttemptKind::Primary, head)),
            (_, Some(head)) => Ok((AttemptKind::Hedge, head)),
            (Some(Err(failure)), None) => Err(failure),
            (None, None) => Err(Error::Internal(Cause::from("a try ended without an outcome")).into()),
        }
    }
}

/// When the next hedge starts, and what became of those that did.
struct Hedging<'a> {
    lane: &'a Lane,
    next: Option<Instant>,
    spacing: Duration,
    pays: bool,
    left: usize,
    running: usize,
    started: usize,
}

impl<'l> Hedging<'l> {
    fn plan(this: Try<'_>, lane: &'l Lane, pass: &Pass, end: Instant) -> Self {
        let mut this_plan =
            Self { lane, next: None, spacing: Duration::ZERO, pays: true, left: 0, running: 0, started: 0 };
        let stages = lane.stages();
        // A probe is alone by design, an upgrade cannot be taken back, and who was asked to wait before this
        // try does not come in double then.
        let is_probe = pass.admission.as_ref().is_some_and(|admission| admission.is_probe());
        if let Some(hedge) = &stages.hedge
            && !is_probe
            && this.call.upgrade.is_none()
            && !this.call.progress.was_pushed_back()
            && this.call.is_idempotent(&hedge.methods, lane.route())
        {
            let plan = lane.hedge().plan(hedge, stages.extra_load.ratio, pass.at);
            let (delay, pays) = match plan {
                Plan::After(delay) => (delay, true),
                Plan::NoGain(delay) => (delay, false),
            };
            this_plan.spacing = delay;
            this_plan.pays = pays;
            this_plan.left = hedge.max_extra;
            this_plan.next = Some(pass.at + delay).filter(|at| *at < end);
        }
        this_plan
    }

    /// The next hedge, if one is due and every gate is open to it.
    fn start<'a>(&mut self, this: Try<'a>, lane: &Lane, end: Instant) -> Option<HedgeFuture<'a>> {
        // The timer still strikes for a hedge that was disarmed after it was set.
        self.next.take()?;
        let now = Instant::now();
        self.lane.metrics().hedge_delay(self.spacing);
        match self.admit(this, lane, now, end) {
            Ok((lane, pass)) => {
                self.left -= 1;
                self.running += 1;
                self.started += 1;
                if self.left > 0 {
                    self.next = Some(now + self.spacing);
                }
                Some(Box::pin(attempt::run(this, lane, pass, AttemptKind::Hedge)))
            }
            Err(reason) => {
                self.lane.metrics().hedge(reason);
                None
            }
        }
    }

    fn admit(
        &self,
        this: Try<'_>,
        lane: &Lane,
        now: Instant,
        end: Instant,
    ) -> Result<(Lane, Pass), HedgeOutcome> {
        if !self.pays {
            return Err(HedgeOutcome::SuppressedNoGain);
        }
        if !this.call.body.can_be_sent() {
            return Err(HedgeOutcome::SuppressedBody);
        }
        // With less left than half of what a slow answer takes by now, the hedge comes too late too.
        if end.saturating_duration_since(now) < self.spacing / 2 {
            return Err(HedgeOutcome::SuppressedDeadline);
        }
        let target = self.target(this, lane);
        let pass = gate::try_enter(&target, now).map_err(|closed| match closed {
            Closed::Breaker => HedgeOutcome::SuppressedBreaker,
            Closed::Bulkhead => HedgeOutcome::SuppressedBulkhead,
        })?;
        let (budget, ratio) = (&lane.upstream.budget, &lane.stages().extra_load);
        if !budget.withdraw(ratio, now) {
            return Err(HedgeOutcome::SuppressedBudget);
        }
        if !gate::try_token(&target, &this.call.headers, now) {
            budget.give_back(ratio, now);
            return Err(HedgeOutcome::SuppressedRate);
        }
        Ok((target, pass))
    }

    /// The backup that the policy names, or the same upstream again.
    fn target(&self, this: Try<'_>, lane: &Lane) -> Lane {
        let named = lane.stages().hedge.as_ref().and_then(|hedge| hedge.to.as_ref());
        let registry = this.proxy.registry();
        match named.and_then(|name| registry.by_name(lane.config(), name)) {
            Some(backup) => {
                registry.touch(&backup, Instant::now());
                Lane::find(registry, lane.config(), backup, &this.call.method, this.call.target.path())
            }
            None => lane.clone(),
        }
    }

    /// The upstream asked for no more: no hedge of this call starts.
    fn disarm(&mut self) {
        if self.next.take().is_some() {
            self.lane.metrics().hedge(HedgeOutcome::SuppressedPushBack);
        }
    }

    fn failed(&mut self) {
        self.running -= 1;
        self.lane.metrics().hedge(HedgeOutcome::Failed);
        self.lane.hedge().record_outcome(false);
    }

    /// The deadline has struck while hedges ran.
    fn give_up(mut self) {
        while self.running > 0 {
            self.failed();
        }
    }

    /// An acceptable head of an attempt of this kind has come.
    fn won(mut self, kind: AttemptKind, head: Box<Head>) -> Outcome {
        if kind == AttemptKind::Hedge {
            self.running -= 1;
            self.lane.metrics().hedge(HedgeOutcome::Won);
            self.lane.hedge().record_outcome(true);
        }
        self.settled(kind, head)
    }

    /// The answer that is passed on: hedges that still run have lost.
    fn settled(self, kind: AttemptKind, head: Box<Head>) -> Outcome {
        for _ in 0..self.running {
            self.lane.metrics().hedge(HedgeOutcome::Lost);
            self.lane.hedge().record_outcome(false);
        }
        let hedge = (self.started > 0).then_some(match kind {
            AttemptKind::Hedge => HedgeEnd::Won,
            _ => HedgeEnd::Lost,
        });
        Outcome { head, hedge }
    }
}
