//! The calls of a fan-out, run side by side until all have ended, enough have, or the time is up.
//!
//! A state machine without a task of its own: whoever owns it drives it, and dropping it cancels every call at
//! once. Each call ends at the fan-out's deadline by itself, on the same instant, so that what it was waiting for
//! is judged as late and not as left by its client. The batch's own timer ends the wait for those that
//! have not begun; a moment later it ends whatever should still be there.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::time::{Instant, Sleep, sleep_until};

use super::item::{self, Common, Missing, NOT_AWAITED, Outcome};
use super::plan::{Ask, Plan, Planned};
use super::summary::{Language, Summary, Tally};
use super::{Ready, millis_since};
use crate::config::Config;
use crate::pipeline::Proxy;
use crate::policy::deadline::Arrival;
use crate::policy::room::Room;
use crate::telemetry::metrics::{FanoutOutcome, Metrics};

/// Calls end at the deadline by themselves; what has not after this is dropped.
const OVERTIME: Duration = Duration::from_millis(10);

/// What happens in a batch.
#[derive(Debug)]
pub enum Event {
    /// The call with this number in the list has ended, for another reason than the deadline.
    Settled(usize, Outcome),
    /// The deadline has struck for these.
    Struck(Vec<usize>),
    /// That was all.
    Over,
}

type Running = Pin<Box<dyn Future<Output = (usize, Outcome)> + Send>>;

/// A fan-out under way.
pub struct Batch {
    common: Common,
    request_id: String,
    arrival: Arrival,
    waiting: VecDeque<(usize, Ask)>,
    /// Calls that cannot be made.
    faulty: VecDeque<(usize, Missing)>,
    running: FuturesUnordered<Running>,
    max_concurrent: usize,
    min_results: Option<usize>,
    grace: Duration,
    tally: Tally,
    timer: Pin<Box<Sleep>>,
    /// What the timer stands for.
    until: Until,
    late: Vec<usize>,
    account: Account,
    _room: Room,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Until {
    /// All there is to wait for.
    Deadline,
    /// Enough has come; the rest may still come.
    Grace,
    /// The deadline has struck.
    Overtime,
    /// The process leaves.
    Leaving,
    /// Nothing.
    Over,
}

impl Batch {
    /// A fan-out that begins when it is asked for its first event.
    pub fn new(
        proxy: &Arc<Proxy>,
        config: Arc<Config>,
        ready: Ready,
        arrival: Arrival,
        request_id: &str,
        language: Language,
    ) -> Self {
        let Ready { plan, deadline, trace, room } = ready;
        let total = deadline.total(arrival);
        let Plan { max_concurrent, min_results, grace, wants_prompt, calls, .. } = plan;
        let (mut waiting, mut faulty) = (VecDeque::new(), VecDeque::new());
        let mut names = Vec::with_capacity(calls.len());
        for (at, Planned { id, is_optional, ask }) in calls.into_iter().enumerate() {
            names.push((id, is_optional));
            match ask {
                Ok(ask) => waiting.push_back((at, ask)),
                Err(fault) => faulty.push_back((at, Missing::because("invalid_request", fault))),
            }
        }
        Self {
            timer: Box::pin(sleep_until(deadline.at)),
            account: Account {
                metrics: proxy.metrics().clone(),
                arrival,
                outcome: FanoutOutcome::ClientLeft,
            },
            common: Common {
                proxy: proxy.clone(),
                config,
                deadline,
                trace: Arc::new(trace),
                has_enough: Arc::default(),
            },
            request_id: request_id.to_owned(),
            arrival,
            waiting,
            faulty,
            running: FuturesUnordered::new(),
            max_concurrent,
            min_results,
            grace,
            tally: Tally::new(names, total, language, wants_prompt),
            until: Until::Deadline,
            late: Vec::new(),
            _room: room,
        }
    }

    /// The next thing that happens. After [`Event::Over`] there is no more. Cancel-safe.
    pub async fn next(&mut self) -> Event {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// The process.
    pub fn proxy(&self) -> &Arc<Proxy> {
        &self.common.proxy
    }

    /// What has come of it so far.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// What is told of the whole.
    pub fn summary(&self) -> Summary<'_> {
        self.tally.summary(millis_since(self.arrival.now))
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        if let Some((at, missing)) = self.faulty.pop_front() {
            return Poll::Ready(self.settle(at, Outcome::Missing(missing)));
        }
        if self.common.proxy.is_ending() && self.until != Until::Over {
            self.until = Until::Leaving;
            self.waiting.clear();
            self.running.clear();
        }
        loop {
            self.start_waiting();
            match self.running.poll_next_unpin(cx) {
                Poll::Ready(Some((at, Outcome::Missing(missing)))) if missing.is_deadline() => {
                    self.tally.misses(at, missing);
                    self.late.push(at);
                }
                Poll::Ready(Some((at, outcome))) => return Poll::Ready(self.settle(at, outcome)),
                Poll::Ready(None) if self.waiting.is_empty() => return Poll::Ready(self.end()),
                Poll::Ready(None) | Poll::Pending => {
                    if self.has_enough() {
                        self.wait_for_grace();
                    }
                    match self.timer.as_mut().poll(cx) {
                        Poll::Pending => return Poll::Pending,
                        Poll::Ready(()) => self.time_is_up(),
                    }
                }
            }
        }
    }

    fn start_waiting(&mut self) {
        while self.running.len() < self.max_concurrent
            && let Some((at, ask)) = self.waiting.pop_front()
        {
            let id = format!("{}.{at}", self.request_id);
            let call = item::run(self.common.clone(), ask, id);
            self.running.push(Box::pin(async move { (at, call.await) }));
        }
    }

    fn settle(&mut self, at: usize, outcome: Outcome) -> Event {
        match &outcome {
            Outcome::Result(result) => self.tally.results(at, result.source),
            Outcome::Missing(missing) => self.tally.misses(at, missing.clone()),
        }
        Event::Settled(at, outcome)
    }

    /// Whether the answer is not to wait for those that are still under way.
    fn has_enough(&self) -> bool {
        self.min_results.is_some_and(|least| self.tally.result_count() >= least)
            || self.tally.only_optional_are_open()
    }

    fn wait_for_grace(&mut self) {
        if self.until == Until::Deadline {
            self.until = Until::Grace;
            let end = self.common.deadline.at.min(Instant::now() + self.grace);
            self.timer.as_mut().reset(end);
        }
    }

    fn time_is_up(&mut self) {
        let is_late = Instant::now() >= self.common.deadline.at;
        match self.until {
            Until::Deadline => {
                self.drop_waiting(is_late);
                self.until = Until::Overtime;
                self.timer.as_mut().reset(self.common.deadline.at + OVERTIME);
            }
            Until::Grace | Until::Overtime | Until::Leaving | Until::Over => {
                self.drop_waiting(is_late);
                self.common.has_enough.store(!is_late, Ordering::Relaxed);
                self.running.clear();
            }
        }
    }

    /// Calls that have not begun never will.
    fn drop_waiting(&mut self, is_late: bool) {
        for (at, _) in std::mem::take(&mut self.waiting) {
            if is_late {
                let message =
                    format!("not begun: max_concurrent ({}) calls were under way", self.max_concurrent);
                self.tally.misses(at, Missing::deadline(message));
                self.late.push(at);
            }
        }
    }

    /// Nothing is under way any more.
    fn end(&mut self) -> Event {
        let dropped: Vec<usize> = self.tally.open().collect();
        for at in dropped {
            let why = match self.until {
                Until::Overtime => Missing::deadline("the fan-out's deadline struck"),
                Until::Leaving => Missing::because("shutting_down", "hedgerow is leaving"),
                Until::Deadline | Until::Grace | Until::Over => {
                    Missing::because(NOT_AWAITED, "enough other results had come")
                }
            };
            if why.is_deadline() {
                self.late.push(at);
            }
            self.tally.misses(at, why);
        }
        if !self.late.is_empty() {
            self.late.sort_unstable();
            return Event::Struck(std::mem::take(&mut self.late));
        }
        self.until = Until::Over;
        self.account.outcome = self.tally.outcome();
        Event::Over
    }
}

/// The fan-out in the metrics.
struct Account {
    metrics: Arc<Metrics>,
    arrival: Arrival,
    outcome: FanoutOutcome,
}

impl Drop for Batch {
    fn drop(&mut self) {
        let Account { metrics, arrival, outcome } = &self.account;
        metrics.fanout(*outcome, arrival.now.elapsed());
        self.tally.calls().for_each(|result| metrics.fanout_call(result));
    }
}
