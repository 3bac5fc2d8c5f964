//! The circuit breaker of one upstream: when to stop calling it, and how to find out that it is back.
//!
//! **Why several signals.** A count of failures in a row sees a dead host within five calls at any rate,
//! but a host that fails every second call never. A failure rate sees that one, but needs enough calls
//! to mean something. Slowness is neither: a hung host fails only when deadlines pass, long after the
//! agents have lost their time. So any of three opens the breaker: failures in a row, failure rate, and
//! the share of calls slower than `slow_after`.
//!
//! **When a call is slow.** When it passes the mark, not when it ends: a call that hangs for a minute
//! must not be news a minute late, and a hedge that wins cancels exactly the slow calls, which would
//! blind the rule. The start times of running attempts are kept in order for that, only while the rule
//! is on, and looked at lazily, at the next question asked. There is no timer.
//!
//! **One address is enough.** The meshes eject one endpoint among many and, when it is the only one,
//! route to it anyway. An agent's provider is one name; here open means that nothing is sent.
//!
//! **Coming back.** After `open_for`, doubled with each failed return up to `max_open_for` and spread by
//! a tenth either way so that many sidecars do not probe in step, `half_open_probes` real calls pass.
//! A ramp of traffic was rejected: it turns more calls than needed into sacrifices. With the slow rule
//! on, a probe that passes the mark has failed; otherwise a breaker that opened on slowness would close
//! on it.
//!
//! **Late news.** Each change of state starts an epoch. What an attempt of an earlier epoch has to say
//! is dropped: a failure that was sent before the breaker opened must not count against the recovered
//! host, and an old success must not close what just opened.
//!
//! **One of many.** With `shared` the pods of a fleet stop together and send one probe between them; what is told
//! and heard for that is in [`shared`]. The state machine here works the same without them.
//!
//! Settings arrive with each question, see [`policy`](crate::policy): thresholds changed by a reload
//! hold at once and the counts stay.

mod cell;
pub mod shared;
#[cfg(test)]
mod shared_tests;
#[cfg(test)]
pub(crate) mod simulated;
#[cfg(test)]
mod tests;
mod window;

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use self::shared::{Lease, News};
use self::window::{Counts, Window};
use crate::config;
use crate::units::Percent;

pub use self::cell::{Admission, BreakerCell};

/// What a breaker does with calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// All pass.
    Closed,
    /// None passes.
    Open,
    /// A few pass, to see whether the upstream is back.
    HalfOpen,
}

impl State {
    /// The word for metrics, logs and `/status`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half_open",
        }
    }
}

/// How an attempt ended, as far as the breaker cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The upstream did its work; a 4xx too, since it was there to say so.
    Success,
    /// The upstream failed.
    Failure,
    /// There was no way to it: no address, no connection, no TLS session. A failure here, but none that other
    /// pods need share.
    Unreached,
    /// The upstream is there and asks for patience: a 429, or on a probe a 503 with `Retry-After`.
    /// While half-open no probe goes out before `until` (at most `max_open_for` from now); with `None`
    /// the place is free at once. While closed it is neither failure nor success.
    PushBack {
        /// When it may be asked again.
        until: Option<Instant>,
    },
    /// Says nothing about the upstream: a client that left, a local refusal, a deadline too short.
    Neutral,
}

/// The refusal of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Open {
    /// When a probe may pass; `None` while probes are under way or an operator holds it open.
    pub retry_at: Option<Instant>,
    /// Its time is up, and the fleet decides who probes.
    pub is_due: bool,
    /// The state that the breaker moved to and that nobody was told of yet.
    pub moved: Option<State>,
}

/// What `/status` shows.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Its state. One whose time is up stays open until a call comes to probe.
    pub state: State,
    /// Whether an operator holds it there.
    pub is_forced: bool,
    /// Whether the fleet opened it, or left the probing to this pod.
    pub is_fleets: bool,
    /// Failures since the last success.
    pub failures_in_row: u32,
    /// Calls that ended within the window.
    pub requests: u32,
    /// Share of failures in them; `None` without calls.
    pub failure_rate: Option<Percent>,
    /// Share of slow calls in the window; `None` without calls or with the rule off.
    pub slow_rate: Option<Percent>,
    /// When a probe may pass.
    pub retry_at: Option<Instant>,
    /// Probes under way.
    pub probes: u32,
}

/// An admitted attempt, to be handed back when it ends.
#[derive(Debug, Clone, Copy)]
pub struct Ticket {
    sequence: u64,
    epoch: u64,
    is_probe: bool,
    /// The state that the breaker moved to by the admission.
    moved: Option<State>,
}

/// The state machine alone; [`BreakerCell`] shares it.
#[derive(Debug)]
pub struct Breaker {
    phase: Phase,
    is_forced: bool,
    /// Counts the changes of phase.
    epoch: u64,
    failures_in_row: u32,
    /// Of these, the ones that any pod would have met.
    evident_in_row: u32,
    /// Failed returns since it was last closed.
    reopens: u32,
    window: Window,
    /// Start times of attempts that have not passed the slow mark, by sequence, which is by time.
    running: BTreeMap<u64, Instant>,
    next_sequence: u64,
    /// As last seen, for the cancellation of an attempt, which brings no settings.
    slow_after: Duration,
    /// The window has counts that the rates were not looked at with.
    is_unsettled: bool,
    /// A change of state that no caller was told of yet.
    moved: Option<State>,
    /// From 0 to 1.
    jitter: fn() -> f64,
    /// When the last state of the fleet's breaker came about that was heard of, in Redis's milliseconds.
    heard: u64,
    /// What the fleet was not told yet.
    news: Option<News>,
    /// The fleet was told of a failure here that has not ended yet.
    has_accused: bool,
}

#[derive(Debug)]
enum Phase {
    Closed,
    Open {
        /// `None`: until an operator says otherwise.
        until: Option<Instant>,
        /// The fleet has opened it, and decides who probes.
        is_fleets: bool,
    },
    HalfOpen(Probes),
}

#[derive(Debug, Default)]
struct Probes {
    under_way: u32,
    succeeded: u32,
    /// The fleet's leave to probe, where it decides.
    lease: Option<Lease>,
    /// The upstream asked for patience.
    wait_until: Option<Instant>,
    /// One of them passed the slow mark.
    has_slow: bool,
}

impl Default for Breaker {
    fn default() -> Self {
        Self::with_jitter(fastrand::f64)
    }
}

impl Breaker {
    /// A closed breaker whose waits are spread by `jitter`, which gives numbers from 0 to 1.
    pub fn with_jitter(jitter: fn() -> f64) -> Self {
        Self {
            phase: Phase::Closed,
            is_forced: false,
            epoch: 0,
            failures_in_row: 0,
            evident_in_row: 0,
            reopens: 0,
            window: Window::default(),
            running: BTreeMap::new(),
            next_sequence: 0,
            slow_after: Duration::ZERO,
            is_unsettled: false,
            moved: None,
            jitter,
            heard: 0,
            news: None,
            has_accused: false,
        }
    }

    /// Its state now.
    pub fn state(&self) -> State {
        match self.phase {
            Phase::Closed => State::Closed,
            Phase::Open { .. } => State::Open,
            Phase::HalfOpen(_) => State::HalfOpen,
        }
    }

    /// Whether an attempt would be let through now. Takes nothing.
    ///
    /// # Errors
    ///
    /// [`Open`] when it would not.
    pub fn check(&mut self, cfg: &config::Breaker, now: Instant) -> Result<(), Open> {
        self.settle(cfg, now);
        let (retry_at, is_due) = match &self.phase {
            Phase::Closed => return Ok(()),
            Phase::Open { until: Some(until), is_fleets } if *until <= now => {
                match *is_fleets && cfg.is_shared {
                    false => return Ok(()),
                    true => (None, true),
                }
            }
            Phase::Open { until, .. } => (*until, false),
            Phase::HalfOpen(probes) => match probes.place(cfg, now) {
                Ok(()) => return Ok(()),
                Err(retry_at) => (retry_at, false),
            },
        };
        Err(Open { retry_at, is_due, moved: self.moved.take() })
    }

    /// Lets an attempt through, as a probe when half-open; the first after the wait makes it so.
    ///
    /// # Errors
    ///
    /// [`Open`] when no attempt may pass.
    pub fn admit(&mut self, cfg: &config::Breaker, now: Instant) -> Result<Ticket, Open> {
        self.check(cfg, now)?;
        if matches!(self.phase, Phase::Open { .. }) {
            self.enter(Phase::HalfOpen(Probes::default()));
        }
        let is_probe = match &mut self.phase {
            Phase::HalfOpen(probes) => {
                probes.under_way += 1;
                true
            }
            Phase::Closed | Phase::Open { .. } => false,
        };
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        if cfg.slow_rate.is_some() {
            self.running.insert(sequence, now);
        }
        Ok(Ticket { sequence, epoch: self.epoch, is_probe, moved: self.moved.take() })
    }

    /// Takes an attempt's end into account. Returns the state that the breaker moved to, if it did.
    pub fn finish(
        &mut self,
        ticket: Ticket,
        cfg: &config::Breaker,
        verdict: Verdict,
        now: Instant,
    ) -> Option<State> {
        self.settle(cfg, now);
        if ticket.epoch == self.epoch {
            // Still there: it ended before the slow mark, or the mark would have taken it.
            let is_timed = self.running.remove(&ticket.sequence).is_some();
            match &mut self.phase {
                Phase::HalfOpen(probes) => {
                    probes.under_way -= 1;
                    match verdict {
                        Verdict::Success => probes.succeeded += 1,
                        Verdict::Failure => self.trip(cfg, true, now),
                        Verdict::Unreached => self.trip(cfg, false, now),
                        Verdict::PushBack { until } => {
                            let until = until.map(|until| until.min(now + cfg.max_open_for));
                            probes.wait_until = probes.wait_until.max(until);
                        }
                        Verdict::Neutral => {}
                    }
                }
                Phase::Closed | Phase::Open { .. } => self.count(cfg, verdict, is_timed, now),
            }
            self.settle(cfg, now);
            self.hand_back(now);
        }
        self.moved.take()
    }

    /// Forgets an attempt that was cancelled. A probe's place is free again and nothing is decided;
    /// but if it had passed the slow mark, it counts as slow.
    pub fn abandon(&mut self, ticket: Ticket, now: Instant) {
        if ticket.epoch != self.epoch {
            return;
        }
        if let Some(started) = self.running.remove(&ticket.sequence) {
            let mark = started + self.slow_after;
            if mark <= now {
                self.pass_mark(mark);
            }
        }
        if let Phase::HalfOpen(probes) = &mut self.phase {
            probes.under_way -= 1;
        }
        self.hand_back(now);
    }

    /// An operator's word: refuse everything until told otherwise. Returns the state if it changed.
    pub fn force_open(&mut self) -> Option<State> {
        self.set(Phase::Open { until: None, is_fleets: false }, true)
    }

    /// An operator's word: let everything pass, whatever fails, until told otherwise. Returns the state
    /// if it changed.
    pub fn force_closed(&mut self) -> Option<State> {
        self.set(Phase::Closed, true)
    }

    /// Back to closed with nothing counted, free of any operator's hold. Returns the state if it changed.
    pub fn reset(&mut self) -> Option<State> {
        self.set(Phase::Closed, false)
    }

    /// What there is to see at `now`.
    pub fn snapshot(&self, now: Instant) -> Snapshot {
        let counts = self.window.sum_at(now);
        let (retry_at, probes, is_fleets) = match &self.phase {
            Phase::Closed => (None, 0, false),
            Phase::Open { until, is_fleets } => (*until, 0, *is_fleets),
            Phase::HalfOpen(probes) => {
                let retry_at = probes.wait_until.filter(|until| *until > now);
                (retry_at, probes.under_way, probes.lease.is_some())
            }
        };
        Snapshot {
            state: self.state(),
            is_forced: self.is_forced,
            is_fleets,
            failures_in_row: self.failures_in_row,
            requests: counts.judged,
            failure_rate: share(counts.failed, counts.judged),
            slow_rate: share(counts.slow, counts.timed),
            retry_at,
            probes,
        }
    }

    /// Draws the conclusions that time and new counts call for.
    fn settle(&mut self, cfg: &config::Breaker, now: Instant) {
        if !cfg.is_shared {
            self.news = None;
            self.has_accused = false;
        }
        if cfg.slow_rate.is_some() {
            self.slow_after = cfg.slow_after;
            self.sweep(cfg, now);
        } else if !self.running.is_empty() {
            self.running.clear();
        }
        match &self.phase {
            Phase::Closed => {
                if !self.is_forced && self.should_trip(cfg, now) {
                    self.trip(cfg, self.is_evident(cfg), now);
                }
            }
            Phase::HalfOpen(probes) if probes.has_slow && cfg.slow_rate.is_some() => {
                self.trip(cfg, false, now);
            }
            Phase::HalfOpen(probes) if probes.has_lapsed(now) => self.hand_back(now),
            Phase::HalfOpen(probes) if probes.succeeded >= cfg.half_open_probes.max(1) => self.close(),
            Phase::HalfOpen(_) | Phase::Open { .. } => {}
        }
    }

    /// Counts the running attempts that have passed the slow mark, at the instant when they did.
    fn sweep(&mut self, cfg: &config::Breaker, now: Instant) {
        while let Some(oldest) = self.running.first_entry() {
            let mark = *oldest.get() + cfg.slow_after;
            if mark > now {
                break;
            }
            oldest.remove();
            self.window.roll(cfg.window, now);
            self.pass_mark(mark);
        }
    }

    fn pass_mark(&mut self, mark: Instant) {
        match &mut self.phase {
            Phase::HalfOpen(probes) => probes.has_slow = true,
            Phase::Closed | Phase::Open { .. } => {
                self.window.record(Counts { timed: 1, slow: 1, ..Counts::default() }, mark);
                self.is_unsettled = true;
            }
        }
    }

    fn count(&mut self, cfg: &config::Breaker, verdict: Verdict, is_timed: bool, now: Instant) {
        let (failed, unreached) = match verdict {
            Verdict::Success => {
                self.failures_in_row = 0;
                self.evident_in_row = 0;
                (0, 0)
            }
            Verdict::Failure => {
                self.failures_in_row = self.failures_in_row.saturating_add(1);
                self.evident_in_row = self.evident_in_row.saturating_add(1);
                (1, 0)
            }
            Verdict::Unreached => {
                self.failures_in_row = self.failures_in_row.saturating_add(1);
                (1, 1)
            }
            Verdict::PushBack { .. } | Verdict::Neutral => return,
        };
        self.window.roll(cfg.window, now);
        self.window.record(Counts { judged: 1, failed, unreached, timed: is_timed.into(), slow: 0 }, now);
        self.is_unsettled = true;
    }

    fn should_trip(&mut self, cfg: &config::Breaker, now: Instant) -> bool {
        if cfg.consecutive_failures.is_some_and(|most| self.failures_in_row >= most) {
            return true;
        }
        if !std::mem::take(&mut self.is_unsettled) {
            return false;
        }
        self.window.roll(cfg.window, now);
        let counts = self.window.sum();
        reaches(cfg.failure_rate, counts.failed, counts.judged, cfg.min_requests)
            || reaches(cfg.slow_rate, counts.slow, counts.timed, cfg.min_requests)
    }

    /// Whether what opens it would have done so without what may be this pod's own trouble.
    fn is_evident(&self, cfg: &config::Breaker) -> bool {
        let counts = self.window.sum();
        let (failed, judged) = (counts.failed - counts.unreached, counts.judged - counts.unreached);
        cfg.consecutive_failures.is_some_and(|most| self.evident_in_row >= most)
            || reaches(cfg.failure_rate, failed, judged, cfg.min_requests)
    }

    fn trip(&mut self, cfg: &config::Breaker, is_evident: bool, now: Instant) {
        let lease = self.lease();
        self.reopens = match self.phase {
            Phase::HalfOpen(_) => self.reopens.saturating_add(1),
            Phase::Closed | Phase::Open { .. } => 0,
        };
        // 2^20 times any wait worth setting is beyond any bound worth setting.
        let wait = cfg.open_for.saturating_mul(1 << self.reopens.min(20)).min(cfg.max_open_for);
        // A tenth either way around the bound too: sidecars that have reached it must not meet there.
        let spread = 0.9 + 0.2 * (self.jitter)();
        let until = now + wait.mul_f64(spread);
        self.enter(Phase::Open { until: Some(until), is_fleets: lease.is_some() });
        if let Some(Lease { since, .. }) = lease {
            self.news = Some(News::Reopened { since, until, reopens: self.reopens });
        } else if cfg.is_shared && is_evident {
            self.accuse(until);
        }
    }

    fn close(&mut self) {
        match self.lease() {
            Some(Lease { since, .. }) => self.news = Some(News::Closed { since }),
            None => self.recant(),
        }
        self.start_anew();
    }

    fn start_anew(&mut self) {
        self.enter(Phase::Closed);
        self.failures_in_row = 0;
        self.evident_in_row = 0;
        self.reopens = 0;
        self.window.clear();
        self.is_unsettled = false;
    }

    fn set(&mut self, phase: Phase, is_forced: bool) -> Option<State> {
        let before = self.state();
        self.give_up_part();
        self.start_anew();
        self.enter(phase);
        self.is_forced = is_forced;
        self.moved = None;
        (self.state() != before).then(|| self.state())
    }

    /// Starts an epoch.
    fn enter(&mut self, phase: Phase) {
        let before = self.state();
        self.phase = phase;
        self.epoch += 1;
        self.running.clear();
        if self.state() != before {
            self.moved = Some(self.state());
        }
    }
}

impl Probes {
    /// Whether the fleet's leave has ended while nobody probed.
    fn has_lapsed(&self, now: Instant) -> bool {
        self.under_way == 0 && self.lease.is_some_and(|lease| lease.until <= now)
    }

    /// Whether there is a place for one more, or when there may be.
    fn place(&self, cfg: &config::Breaker, now: Instant) -> Result<(), Option<Instant>> {
        match self.wait_until {
            Some(until) if until > now => Err(Some(until)),
            _ if self.under_way + self.succeeded < cfg.half_open_probes.max(1) => Ok(()),
            _ => Err(None),
        }
    }
}

/// Whether `part` of `whole` is at least `rate`. In hundredths, where whole percents compare exactly.
fn reaches(rate: Option<Percent>, part: u32, whole: u32, enough: u32) -> bool {
    rate.is_some_and(|rate| {
        part > 0 && whole >= enough && f64::from(part) * 100.0 >= rate.hundredths() * f64::from(whole)
    })
}

fn share(part: u32, whole: u32) -> Option<Percent> {
    (whole > 0).then(|| Percent::new(f64::from(part) * 100.0 / f64::from(whole)))
}
