//! What pods tell each other of a breaker that they share.
//!
//! **Who opens it.** Each pod's state machine goes by what the pod itself has seen. One that opens on evident
//! failures (answers, resets, silence after the request had gone out; not a name that cannot be resolved or a
//! connection that cannot be made) says so, and when as many pods as `quorum` say so at the same time, all
//! open. So one pod with a bad node cuts off nobody else. To add up the failures of all pods was rejected:
//! in a fleet of thousands there are always enough for any sum, and to set them against the successes would cost a
//! message for each. Nothing is lost by it: the first pods of many to have seen enough have seen it when most
//! have met no failure yet.
//!
//! **Who probes.** When the wait is over, the pod that has a call to make asks for leave and gets it until its
//! probes are judged; a lease, since a pod can vanish. The others stay as they are and hear what came of it.
//!
//! **What counts.** All that is decided for the fleet is decided in one script, `breaker.lua`, by Redis's clock: pods
//! tell and are told how long something lasts, never when. Each state carries the time at which it came about, by which
//! a pod tells news from what it has heard already, in whatever order it arrives.

use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::time::Instant;

use super::{Breaker, BreakerCell, Phase, Probes, State};
use crate::fleet::{Fault, Id, Link, Member, Reply, Script};

/// How long a pod may leave its probing without a sign of life.
pub(super) const LEASE: Duration = Duration::from_secs(10);
/// How long after its wait a pod's failure counts for the quorum: others see theirs a little later.
const GRACE: Duration = Duration::from_secs(10);

static SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("breaker.lua")));

/// What the fleet is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// This pod has opened its breaker on failures that any pod would have met.
    Tripped {
        /// How many.
        failures: u32,
        /// When it will probe, if it stays alone with that.
        until: Instant,
    },
    /// It has found the upstream well again, by a probe of its own.
    Recanted,
    /// The probes that the fleet left to it succeeded.
    Closed,
    /// They failed.
    Reopened {
        /// When the next probe may pass.
        until: Instant,
        /// Failed returns so far.
        reopens: u32,
    },
    /// They decided nothing: they were cancelled, pushed back, or too few yet.
    HandedBack {
        /// When the next probe may pass.
        until: Instant,
        /// Those that succeeded.
        succeeded: u32,
    },
}

/// What the fleet says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Word {
    /// The state of its breaker; `None` when there is none.
    pub state: Option<State>,
    /// When it came about, in milliseconds of Redis's clock.
    pub since: u64,
    /// How long until a probe may pass, or until the one who probes has to be done.
    pub remaining: Duration,
    /// Failed returns so far.
    pub reopens: u32,
}

/// The answer to a pod that wants to probe.
pub(super) enum Leave {
    /// It may.
    Granted {
        /// Probes that have succeeded already.
        succeeded: u32,
        since: u64,
    },
    /// This is how things are.
    Told(Word),
}

impl Word {
    /// Reads what was published: the pod that did, the guards' id, the state.
    pub fn parse(text: &str) -> Option<(&str, Id, Self)> {
        let mut parts = text.splitn(7, ' ');
        let pod = parts.next()?;
        let state = state_of(parts.next()?);
        let since = parts.next()?.parse().ok()?;
        let remaining = Duration::from_millis(parts.next()?.parse().ok()?);
        let reopens = parts.next()?.parse().ok()?;
        let authority = parts.next()?.into();
        let id = Id { authority, route: parts.next().filter(|route| !route.is_empty()).map(Arc::from) };
        Some((pod, id, Self { state, since, remaining, reopens }))
    }

    pub(super) fn read(reply: &Reply) -> Self {
        Self {
            state: state_of(reply.text(0)),
            since: reply.number(1) as u64,
            // Negative would be no duration; from another version it may be anything.
            remaining: Duration::from_millis(reply.number(2) as u64),
            reopens: reply.number(3) as u32,
        }
    }
}

impl Leave {
    pub(super) fn read(reply: &Reply) -> Self {
        match reply.text(0) {
            "granted" => Self::Granted { since: reply.number(1) as u64, succeeded: reply.number(2) as u32 },
            _ => Self::Told(Word::read(reply)),
        }
    }
}

impl News {
    /// The script's op for it, and what that takes. `quorum` pods must agree to open.
    pub(super) fn question(self, quorum: u32, now: Instant) -> (&'static str, [String; 4]) {
        let millis = |until: Instant| until.saturating_duration_since(now).as_millis().to_string();
        match self {
            Self::Tripped { failures, until } => {
                ("trip", [quorum.to_string(), failures.to_string(), millis(until), millis(until + GRACE)])
            }
            Self::Recanted => ("recant", <[String; 4]>::default()),
            Self::Closed => ("settle", ["closed".into(), "0".into(), "0".into(), "0".into()]),
            Self::Reopened { until, reopens } => {
                ("settle", ["open".into(), millis(until), reopens.to_string(), "0".into()])
            }
            Self::HandedBack { until, succeeded } => {
                ("hand_back", [millis(until), succeeded.to_string(), String::new(), String::new()])
            }
        }
    }
}

fn state_of(word: &str) -> Option<State> {
    [State::Closed, State::Open, State::HalfOpen].into_iter().find(|state| state.word() == word)
}

impl Breaker {
    /// Takes in what the fleet says, unless it has been heard or an operator holds the breaker. Returns the state
    /// that it moved to, if it did.
    pub fn hear(&mut self, word: Word, now: Instant) -> Option<State> {
        if word.since <= self.heard {
            return None;
        }
        self.heard = word.since;
        if self.is_forced {
            return None;
        }
        match word.state {
            Some(State::Closed) if self.is_fleets() => self.start_anew(),
            Some(State::Open | State::HalfOpen) => {
                self.has_accused = false;
                self.reopens = word.reopens;
                self.enter(Phase::Open { until: Some(now + word.remaining), is_fleets: true });
            }
            Some(State::Closed) | None => {}
        }
        self.moved.take()
    }

    /// The fleet leaves the probing to this pod until `lease`.
    pub(super) fn take_lease(&mut self, lease: Instant, succeeded: u32, since: u64) {
        self.heard = self.heard.max(since);
        if matches!(self.phase, Phase::Open { is_fleets: true, .. }) && !self.is_forced {
            let lease = Some(lease);
            self.enter(Phase::HalfOpen(Probes { lease, succeeded, ..Probes::default() }));
        }
    }

    /// There is no fleet to ask: the pod decides for itself when its wait is over.
    pub(super) fn stand_alone(&mut self) {
        if let Phase::Open { is_fleets, .. } = &mut self.phase {
            *is_fleets = false;
        }
    }

    /// Gives the leave to probe back when no probe is under way and nothing is decided.
    pub(super) fn hand_back(&mut self, now: Instant) {
        let Phase::HalfOpen(probes) = &self.phase else { return };
        if probes.lease.is_none() || probes.under_way > 0 {
            return;
        }
        let until = probes.wait_until.map_or(now, |until| until.max(now));
        self.news = Some(News::HandedBack { until, succeeded: probes.succeeded });
        self.enter(Phase::Open { until: Some(until), is_fleets: true });
    }

    /// What the fleet may count on is taken back, since an operator has the last word here.
    pub(super) fn give_up_part(&mut self) {
        match &self.phase {
            Phase::HalfOpen(Probes { lease: Some(until), .. }) => {
                self.news = Some(News::HandedBack { until: *until, succeeded: 0 });
            }
            _ => self.recant(),
        }
    }

    pub(super) fn accuse(&mut self, until: Instant) {
        let counts = self.window.sum();
        let failures = self.evident_in_row.max(counts.failed - counts.unreached);
        self.news = Some(News::Tripped { failures, until });
        self.has_accused = true;
    }

    pub(super) fn recant(&mut self) {
        if std::mem::take(&mut self.has_accused) {
            self.news = Some(News::Recanted);
        }
    }

    pub(super) fn is_leased(&self) -> bool {
        matches!(self.phase, Phase::HalfOpen(Probes { lease: Some(_), .. }))
    }

    fn is_fleets(&self) -> bool {
        self.is_leased() || matches!(self.phase, Phase::Open { is_fleets: true, .. })
    }

    /// Whether the leave to probe must be prolonged.
    pub(super) fn probes_on_lease(&self) -> bool {
        matches!(&self.phase, Phase::HalfOpen(probes) if probes.lease.is_some() && probes.under_way > 0)
    }
}

impl BreakerCell {
    /// Whether others may have said something that this pod has not heard.
    pub fn is_behind(&self, now: Instant) -> bool {
        let Some(member) = &self.member else { return false };
        self.turn.load(Ordering::Relaxed) != member.fleet.turn(now)
    }

    /// Asks how things are, for a call that would go on with old news; waits no longer than
    /// `shared_state.timeout`. Whatever comes of it, nobody asks again in this turn.
    pub async fn catch_up(&self, now: Instant) {
        let Some(member) = &self.member else { return };
        let turn = member.fleet.turn(now);
        if let Some(link) = member.fleet.link()
            && let Ok(reply) = ask(&link, member, "read", [""; 4]).await
        {
            self.core.lock().hear_quietly(Word::read(&reply), Instant::now());
        }
        self.turn.store(turn, Ordering::Relaxed);
    }

    /// Asks to be the one who probes, for a call that found the wait over, and waits for the answer no longer than
    /// `shared_state.timeout`. One call asks at a time. Where nobody answers, the pod is left to itself.
    pub async fn ask_to_probe(self: &Arc<Self>) {
        let Some(member) = &self.member else { return self.core.lock().stand_alone() };
        let Some(link) = member.fleet.link() else { return self.core.lock().stand_alone() };
        if self.is_asking.swap(true, Ordering::Relaxed) {
            return;
        }
        // In a task of its own: a client that leaves would leave a lease behind that nobody uses.
        let (cell, member) = (self.clone(), member.clone());
        let asked = tokio::spawn(async move {
            let asked_at = Instant::now();
            let leave = probe(&link, &member).await;
            cell.take_leave(leave, asked_at, Instant::now());
            cell.is_asking.store(false, Ordering::Relaxed);
        });
        // It ends when the question does.
        let _ = asked.await;
    }

    /// What the answer to the question of `asked_at` changes.
    pub(super) fn take_leave(&self, leave: Result<Leave, Fault>, asked_at: Instant, now: Instant) {
        let mut core = self.core.lock();
        match leave {
            Ok(Leave::Granted { succeeded, since }) => core.take_lease(asked_at + LEASE, succeeded, since),
            Ok(Leave::Told(word)) => core.hear_quietly(word, now),
            Err(_) => core.stand_alone(),
        }
    }

    /// What the fleet is to be told, once.
    pub fn take_news(&self) -> Option<News> {
        self.core.lock().news.take()
    }

    /// The fleet may have forgotten that this pod has opened its breaker: it is news again.
    pub fn accuse_again(&self) {
        let mut core = self.core.lock();
        if let Phase::Open { until: Some(until), is_fleets: false } = core.phase
            && core.has_accused
        {
            core.accuse(until);
        }
    }

    /// Takes in what the fleet says. Returns the state that the breaker moved to, if it did.
    pub fn hear(&self, word: Word, now: Instant) -> Option<State> {
        self.core.lock().hear(word, now)
    }

    /// Tells the fleet, and hears how things are then. `quorum` pods must agree to open.
    ///
    /// # Errors
    /// Why it could not be told.
    pub async fn tell(&self, link: &Link, news: News, quorum: u32) -> Result<Word, Fault> {
        let Some(member) = &self.member else { return Err(Fault::Down) };
        let (op, arguments) = news.question(quorum, Instant::now());
        tell(link, member, op, arguments.each_ref().map(String::as_str)).await
    }

    /// Prolongs the leave to probe while probes are under way.
    ///
    /// # Errors
    /// Why it could not be asked.
    pub async fn prolong(&self, link: &Link) -> Result<(), Fault> {
        let Some(member) = &self.member else { return Ok(()) };
        if !self.core.lock().probes_on_lease() {
            return Ok(());
        }
        let (asked_at, lease) = (Instant::now(), LEASE.as_millis().to_string());
        tell(link, member, "prolong", [&lease, "", "", ""]).await?;
        if let Phase::HalfOpen(Probes { lease: Some(until), .. }) = &mut self.core.lock().phase {
            *until = asked_at + LEASE;
        }
        Ok(())
    }

    /// Reads how things are.
    ///
    /// # Errors
    /// Why that is not known.
    pub async fn read(&self, link: &Link) -> Result<Word, Fault> {
        let Some(member) = &self.member else { return Err(Fault::Down) };
        let turn = member.fleet.turn(Instant::now());
        let word = tell(link, member, "read", [""; 4]).await?;
        self.turn.store(turn, Ordering::Relaxed);
        Ok(word)
    }
}

impl Breaker {
    /// As [`Self::hear`]; the next call tells of the change.
    pub(super) fn hear_quietly(&mut self, word: Word, now: Instant) {
        if let moved @ Some(_) = self.hear(word, now) {
            self.moved = moved;
        }
    }
}

async fn probe(link: &Link, member: &Member) -> Result<Leave, Fault> {
    let lease = LEASE.as_millis().to_string();
    Ok(Leave::read(&ask(link, member, "probe", [&lease, "", "", ""]).await?))
}

async fn ask(link: &Link, member: &Member, op: &str, arguments: [&str; 4]) -> Result<Reply, Fault> {
    let (key, channel, id) = names(link, member);
    link.ask(&SCRIPT, &key, &all(op, member, &channel, &id, &arguments)).await
}

async fn tell(link: &Link, member: &Member, op: &str, arguments: [&str; 4]) -> Result<Word, Fault> {
    let (key, channel, id) = names(link, member);
    let reply = link.tell(&SCRIPT, &key, &all(op, member, &channel, &id, &arguments)).await?;
    Ok(Word::read(&reply))
}

fn names(link: &Link, member: &Member) -> (String, String, String) {
    let Id { authority, route } = &member.id;
    let words = format!("{authority} {}", route.as_deref().unwrap_or_default());
    (link.key("cb", &member.id), link.channel(), words)
}

fn all<'a>(
    op: &'a str,
    member: &'a Member,
    channel: &'a str,
    id: &'a str,
    own: &[&'a str; 4],
) -> [&'a [u8]; 8] {
    [op, member.fleet.pod(), channel, id, own[0], own[1], own[2], own[3]].map(str::as_bytes)
}
