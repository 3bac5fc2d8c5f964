//! What pods tell each other of a breaker that they share.
//!
//! **Who opens it.** Each pod's state machine goes by what the pod itself has seen. One that opens on evident
//! failures (answers, resets, silence after the request had gone out; not a name that cannot be resolved or a
//! connection that cannot be made) says so, and when enough pods say so at the same time (`quorum`), all
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

use tokio::time::{Instant, timeout_at};

use super::{Breaker, BreakerCell, Phase, Probes, State};
use crate::config::LARGEST_QUORUM;
use crate::fleet::{Fault, Id, Link, Member, Reply, Script};

/// How long a pod may leave its probing without a sign of life.
pub(super) const LEASE: Duration = Duration::from_secs(10);
/// How long after its wait a pod's failure counts for the quorum: others see theirs a little later.
const GRACE: Duration = Duration::from_secs(10);
/// Of so many pods one must have seen it.
const ONE_IN: u32 = 200;

/// How many of `pods` must have seen an upstream fail before all open: `least`, or all where fewer live, and of many
/// pods a share. Where one call in ten fails, a pod meets five failures in a row by chance now and then, so of ten
/// thousand pods there are always some that have just done so, and an upstream that nine calls in ten get through to must
/// not be lost to all for their sake.
pub(crate) fn quorum(least: u32, pods: u32) -> u32 {
    least.min(pods).max(pods.div_ceil(ONE_IN)).clamp(1, LARGEST_QUORUM)
}

/// An op of the script, and what that takes.
pub(crate) type Question = (&'static str, Vec<String>);

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
    Closed {
        /// When its leave to probe began, in Redis's milliseconds.
        since: u64,
    },
    /// They failed.
    Reopened {
        /// When its leave to probe began.
        since: u64,
        /// When the next probe may pass.
        until: Instant,
        /// Failed returns so far.
        reopens: u32,
    },
    /// They decided nothing: they were cancelled, pushed back, or too few yet.
    HandedBack {
        /// When its leave to probe began.
        since: u64,
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

/// A pod's leave to probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// When it ends.
    pub until: Instant,
    /// When it began, in Redis's milliseconds: what is said of it later is known by that.
    pub since: u64,
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
        let mut parts = text.splitn(6, ' ');
        let pod = parts.next()?;
        let state = state_of(parts.next()?);
        let since = parts.next()?.parse().ok()?;
        let remaining = Duration::from_millis(parts.next()?.parse().ok()?);
        let reopens = parts.next()?.parse().ok()?;
        let id = Id::from_words(parts.next()?);
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
    pub(super) fn question(self, quorum: u32, now: Instant) -> Question {
        let millis = |until: Instant| until.saturating_duration_since(now).as_millis() as u64;
        let numbers = |op, arguments: &[u64]| (op, arguments.iter().map(u64::to_string).collect());
        match self {
            Self::Tripped { failures, until } => {
                let (wait, counts) = (millis(until), millis(until + GRACE));
                numbers("trip", &[quorum.into(), failures.into(), wait, counts])
            }
            Self::Recanted => numbers("recant", &[]),
            Self::Closed { since } => ("settle", vec![since.to_string(), "closed".into()]),
            Self::Reopened { since, until, reopens } => {
                numbers("settle", &[since, millis(until), reopens.into()])
            }
            Self::HandedBack { since, until, succeeded } => {
                numbers("hand_back", &[since, millis(until), succeeded.into()])
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
        if word.since == self.heard {
            self.wait_on(word, now);
        }
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

    /// A state that has been heard of may last longer than was said then, since a probe goes on. Without this each
    /// call would ask again until the probe is over.
    fn wait_on(&mut self, word: Word, now: Instant) {
        if let Phase::Open { until: Some(until), is_fleets: true } = &mut self.phase
            && matches!(word.state, Some(State::Open | State::HalfOpen))
        {
            *until = (*until).max(now + word.remaining);
        }
    }

    /// The fleet leaves the probing to this pod.
    pub(super) fn take_lease(&mut self, lease: Lease, succeeded: u32) {
        self.heard = self.heard.max(lease.since);
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
        let Some(Lease { since, .. }) = probes.lease.filter(|_| probes.under_way == 0) else { return };
        let until = probes.wait_until.map_or(now, |until| until.max(now));
        self.news = Some(News::HandedBack { since, until, succeeded: probes.succeeded });
        self.enter(Phase::Open { until: Some(until), is_fleets: true });
    }

    /// What the fleet may count on is taken back, since an operator has the last word here.
    pub(super) fn give_up_part(&mut self) {
        match self.lease() {
            Some(Lease { since, until }) => {
                self.news = Some(News::HandedBack { since, until, succeeded: 0 });
            }
            None => self.recant(),
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

    /// The leave under which it probes.
    pub(super) fn lease(&self) -> Option<Lease> {
        match &self.phase {
            Phase::HalfOpen(probes) => probes.lease,
            Phase::Closed | Phase::Open { .. } => None,
        }
    }

    fn is_fleets(&self) -> bool {
        self.lease().is_some() || matches!(self.phase, Phase::Open { is_fleets: true, .. })
    }

    /// The leave to probe, when it must be prolonged.
    pub(super) fn lease_in_use(&self) -> Option<Lease> {
        match &self.phase {
            Phase::HalfOpen(probes) if probes.under_way > 0 => probes.lease,
            _ => None,
        }
    }

    /// The leave that began at `since` lasts until then.
    pub(super) fn prolong(&mut self, since: u64, until: Instant) {
        if let Phase::HalfOpen(Probes { lease: Some(lease), .. }) = &mut self.phase
            && lease.since == since
        {
            lease.until = until;
        }
    }
}

impl BreakerCell {
    /// Whether others may have said something that this pod has not heard.
    pub fn is_behind(&self, now: Instant) -> bool {
        let Some(member) = &self.member else { return false };
        self.turn.load(Ordering::Relaxed) != member.fleet.turn(now)
    }

    /// Asks how things are, for a call that would go on with old news and has something better to do at `end`. One
    /// call asks for all. Whatever comes of it, nobody asks again in this turn.
    ///
    /// # Errors
    /// Why there is no answer.
    pub async fn catch_up(&self, now: Instant, end: Instant) -> Result<(), Fault> {
        let Some(member) = &self.member else { return Ok(()) };
        let Some(link) = member.fleet.link() else { return Ok(()) };
        let Ok(_place) = timeout_at(end, self.catching_up.lock()).await else { return Ok(()) };
        if !self.is_behind(now) {
            return Ok(());
        }
        let turn = member.fleet.turn(now);
        let answer = ask(&link, member, end, "read", &[]).await;
        self.turn.store(turn, Ordering::Relaxed);
        let word = Word::read(&answer?);
        self.core.lock().hear_quietly(word, Instant::now());
        Ok(())
    }

    /// Asks to be the one who probes, for a call that found the wait over and has something better to do at `end`.
    /// One call asks at a time. Where nobody answers, the pod is left to itself; but a late answer is one: the server is
    /// at its latest when the whole fleet asks, and if each pod then went on by itself, all would probe.
    pub async fn ask_to_probe(self: &Arc<Self>, end: Instant) {
        // While it is down there is no answer, be it a late one, to be refused for.
        let link = self.member.as_ref().and_then(|member| Some((member.clone(), member.fleet.up()?)));
        let Some((member, link)) = link else { return self.core.lock().stand_alone() };
        let Ok(place) = self.asking.clone().try_lock_owned() else { return };
        // In a task of its own: a client that leaves would leave a lease behind that nobody uses.
        let (cell, is_quick) = (self.clone(), link.may_be_asked());
        let asked = tokio::spawn(async move {
            let _place = place;
            let asked_at = Instant::now();
            let leave = probe(&link, &member).await;
            cell.take_leave(leave, asked_at, Instant::now());
        });
        if is_quick {
            let _ = timeout_at(end, asked).await;
        }
    }

    /// What the answer to the question of `asked_at` changes.
    pub(super) fn take_leave(&self, leave: Result<Leave, Fault>, asked_at: Instant, now: Instant) {
        let mut core = self.core.lock();
        match leave {
            Ok(Leave::Granted { succeeded, since }) => {
                core.take_lease(Lease { until: asked_at + LEASE, since }, succeeded);
            }
            // What the fleet knew is lost.
            Ok(Leave::Told(Word { state: None, .. })) => core.stand_alone(),
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

    /// What the fleet was told of a failure here counts no more.
    pub fn recant(&self) {
        self.core.lock().recant();
    }

    /// What could not be told is news still, unless there is newer.
    pub fn put_back(&self, news: News) {
        self.core.lock().news.get_or_insert(news);
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
        tell(link, member, op, &arguments).await
    }

    /// Prolongs the leave to probe while probes are under way, or hears that it has none any more.
    ///
    /// # Errors
    /// Why it could not be asked.
    pub async fn prolong(&self, link: &Link) -> Result<Option<Word>, Fault> {
        let Some(member) = &self.member else { return Ok(None) };
        let Some(Lease { since, .. }) = self.core.lock().lease_in_use() else { return Ok(None) };
        let asked_at = Instant::now();
        let word = tell(link, member, "prolong", &prolonging(since)).await?;
        if word.since == since {
            self.core.lock().prolong(since, asked_at + LEASE);
        }
        Ok(Some(word))
    }

    /// Reads how things are.
    ///
    /// # Errors
    /// Why that is not known.
    pub async fn read(&self, link: &Link) -> Result<Word, Fault> {
        let Some(member) = &self.member else { return Err(Fault::Down) };
        let turn = member.fleet.turn(Instant::now());
        let word = tell(link, member, "read", &[]).await?;
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

/// What the op `prolong` takes.
pub(super) fn prolonging(since: u64) -> Vec<String> {
    vec![since.to_string(), LEASE.as_millis().to_string()]
}

async fn probe(link: &Link, member: &Member) -> Result<Leave, Fault> {
    let reply = answer(link, member, "probe", &[LEASE.as_millis().to_string()]).await?;
    Ok(Leave::read(&reply))
}

/// For a request, until `end`.
async fn ask(link: &Link, member: &Member, end: Instant, op: &str, own: &[String]) -> Result<Reply, Fault> {
    let key = link.key("cb", &member.id);
    let (channel, id) = (link.channel(), member.id.in_words());
    link.ask_until(end, &SCRIPT, &[&key], &arguments(member, op, &channel, &id, own)).await
}

/// Beside the requests.
async fn answer(link: &Link, member: &Member, op: &str, own: &[String]) -> Result<Reply, Fault> {
    let key = link.key("cb", &member.id);
    let (channel, id) = (link.channel(), member.id.in_words());
    link.tell(&SCRIPT, &key, &arguments(member, op, &channel, &id, own)).await
}

async fn tell(link: &Link, member: &Member, op: &str, own: &[String]) -> Result<Word, Fault> {
    Ok(Word::read(&answer(link, member, op, own).await?))
}

fn arguments<'a>(
    member: &'a Member,
    op: &'a str,
    channel: &'a str,
    id: &'a str,
    own: &'a [String],
) -> Vec<&'a [u8]> {
    let common = [op, member.fleet.pod(), channel, id];
    common.into_iter().chain(own.iter().map(String::as_str)).map(str::as_bytes).collect()
}
