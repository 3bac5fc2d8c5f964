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
use super::{Account, Ready, millis_since};
use crate::config::Config;
use crate::pipeline::Proxy;
use crate::policy::room::Room;

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
    waiting: VecDeque<(usize, Ask)>,
    /// Calls that have no result, and of which that has still to be said.
    failed: VecDeque<(usize, Missing)>,
    running: FuturesUnordered<Running>,
    max_concurrent: usize,
    min_results: Option<usize>,
    grace: Option<Duration>,
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
        account: Account,
        request_id: &str,
        language: Language,
    ) -> Self {
        let Ready { plan, deadline, trace, room } = ready;
        let total = deadline.total(account.arrival);
        let Plan { max_concurrent, min_results, grace, wants_prompt, calls, .. } = plan;
        let (mut waiting, mut failed) = (VecDeque::new(), VecDeque::new());
        let mut names = Vec::with_capacity(calls.len());
        for (at, Planned { id, is_optional, ask }) in calls.into_iter().enumerate() {
            names.push((id, is_optional));
            match ask {
                Ok(ask) => waiting.push_back((at, ask)),
                Err(fault) => failed.push_back((at, Missing::because("invalid_request", fault))),
            }
        }
        Self {
            timer: Box::pin(sleep_until(deadline.at)),
            account,
            common: Common {
                proxy: proxy.clone(),
                config,
                deadline,
                trace: Arc::new(trace),
                is_over: Arc::default(),
            },
            request_id: request_id.to_owned(),
            waiting,
            failed,
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

    /// The language of what is said, and when the last of it is known.
    pub fn terms(&self) -> (Language, Instant) {
        (self.tally.language(), self.common.deadline.at)
    }

    /// What has come of it so far.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// What is told of the whole.
    pub fn summary(&self) -> Summary<'_> {
        self.tally.summary(millis_since(self.account.arrival.now))
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        if self.common.proxy.is_ending() && !matches!(self.until, Until::Leaving | Until::Over) {
            self.leave();
        }
        loop {
            if let Some((at, missing)) = self.failed.pop_front() {
                return Poll::Ready(self.settle(at, Outcome::Missing(missing)));
            }
            if self.until == Until::Deadline && self.has_enough() {
                self.until = Until::Grace;
                let end = Instant::now() + self.grace.unwrap_or_default();
                self.timer.as_mut().reset(end.min(self.common.deadline.at));
            }
            let has_time = self.until == Until::Grace && Instant::now() < self.timer.deadline();
            if has_time || self.until == Until::Deadline {
                self.start_waiting();
            }
            match self.running.poll_next_unpin(cx) {
                Poll::Ready(Some((at, Outcome::Missing(missing)))) if missing.is_deadline() => {
                    self.tally.misses(at, missing);
                    self.late.push(at);
                }
                Poll::Ready(Some((at, outcome))) => return Poll::Ready(self.settle(at, outcome)),
                Poll::Ready(None) if self.fail_open() => {}
                Poll::Ready(None) => return Poll::Ready(self.end()),
                Poll::Pending => {
                    std::task::ready!(self.timer.as_mut().poll(cx));
                    self.time_is_up();
                }
            }
        }
    }

    fn start_waiting(&mut self) {
        if !self.waiting.is_empty() && self.is_late() {
            self.drop_waiting();
        }
        while self.running.len() < self.max_concurrent
            && let Some((at, ask)) = self.waiting.pop_front()
        {
            let id = format!("{}.{at}", self.request_id);
            let call = item::run(self.common.clone(), at, ask, id);
            self.running.push(Box::pin(async move { (at, call.await) }));
        }
    }

    fn settle(&mut self, at: usize, outcome: Outcome) -> Event {
        match &outcome {
            Outcome::Result(result) => {
                self.tally.results(at, result.source, result.status, result.is_truncated)
            }
            Outcome::Missing(missing) => self.tally.misses(at, missing.clone()),
        }
        Event::Settled(at, outcome)
    }

    /// Whether the answer is not to wait much longer for those that are still open: as many results have come as
    /// were asked for, or, where a grace was given, all calls have ended that are not optional.
    fn has_enough(&self) -> bool {
        match self.min_results {
            Some(least) => self.tally.good_results() >= least,
            None => self.grace.is_some() && self.tally.only_optional_are_open(),
        }
    }

    /// The process leaves: each call is told so when it is asked how it is.
    fn leave(&mut self) {
        self.until = Until::Leaving;
        self.waiting.clear();
        let running = std::mem::take(&mut self.running);
        self.running.extend(running);
    }

    fn time_is_up(&mut self) {
        if self.is_late() && matches!(self.until, Until::Deadline | Until::Grace) {
            self.drop_waiting();
            self.until = Until::Overtime;
            self.timer.as_mut().reset(self.common.deadline.at + OVERTIME);
            return;
        }
        self.common.is_over.store(true, Ordering::Relaxed);
        self.waiting.clear();
        self.running.clear();
    }

    fn is_late(&self) -> bool {
        Instant::now() >= self.common.deadline.at
    }

    /// Calls that have not begun by the deadline never will.
    fn drop_waiting(&mut self) {
        for (at, _) in std::mem::take(&mut self.waiting) {
            let message = format!("not begun: max_concurrent ({}) calls were under way", self.max_concurrent);
            self.tally.misses(at, Missing::deadline(message));
            self.late.push(at);
        }
    }

    /// Nothing is under way any more: what has not ended will not. Whether there is any of that.
    fn fail_open(&mut self) -> bool {
        let open: Vec<usize> = self.tally.open().collect();
        for at in &open {
            let why = match self.until {
                Until::Leaving => Missing::because("shutting_down", "hedgerow is leaving"),
                Until::Grace if self.min_results.is_some() => {
                    Missing::because(NOT_AWAITED, "enough other results had come")
                }
                Until::Grace => Missing::because(NOT_AWAITED, "all calls that are not optional had ended"),
                Until::Deadline | Until::Overtime | Until::Over => {
                    self.tally.misses(*at, Missing::deadline("the fan-out's deadline struck"));
                    self.late.push(*at);
                    continue;
                }
            };
            self.failed.push_back((*at, why));
        }
        !open.is_empty()
    }

    fn end(&mut self) -> Event {
        if !self.late.is_empty() {
            self.late.sort_unstable();
            return Event::Struck(std::mem::take(&mut self.late));
        }
        self.until = Until::Over;
        self.account.outcome = self.tally.outcome();
        Event::Over
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        let metrics = self.common.proxy.metrics();
        self.tally.calls().for_each(|result| metrics.fanout_call(result));
    }
}
