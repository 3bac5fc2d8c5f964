//! A pod's part of a rate that all pods keep together.
//!
//! **Shares, not tokens.** A pod leases a share of the rate itself for some seconds and runs its own bucket at
//! that pace. So most calls ask nobody, the bucket still knows when each token will come, and the shares of all pods
//! never add up to more than the whole, which makes the sum exact at any moment and not only on average. To
//! lease batches of tokens was rejected: a batch that is large enough to be worth a question is a burst, and who waits for
//! the next one cannot be told when it comes.
//!
//! **By need.** `rate.lua` divides the rate by what each pod's calls asked for lately, and leaves what nobody needs
//! in a bucket there, from which a pod with few calls takes single tokens, at one question each, and a pod that has
//! just begun takes its first ones. What a pod's calls need more of is asked for when it shows; what they need less of
//! goes back with the next question, and all of it when the pod leaves or falls silent.
//!
//! **Without the others.** A lease outlives its server until it ends. After that, and where there was none, a pod keeps
//! to its part by head count as last known.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::bucket::Pace;
use super::{RateLimiter, State};
use crate::config::RateLimit;
use crate::fleet::{Fault, Link, Member, Reply, Script};
use crate::units::Rate;

/// How often a pod asks for its share anew, where there is enough for all.
const CALM: Duration = Duration::from_secs(10);
/// The same where there is not, so that who needs more waits no longer for those who need less.
const SCARCE: Duration = Duration::from_secs(1);
/// The least time between two questions, and the longest that a single token is waited for without one.
const SOONEST: Duration = Duration::from_millis(250);
/// The calls of so long a time may come together, whatever the share.
const AT_ONCE: Duration = Duration::from_millis(100);
/// What the script's answer consists of.
const ANSWERS: usize = 5;
/// The least time over which a need is measured, in seconds.
const SPAN: f64 = 0.5;

static SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("rate.lua")));

/// What a limiter has to do with the others of its fleet.
#[derive(Debug, Default)]
pub(super) struct Share {
    standing: Standing,
    /// It has had a share, or was left alone, since the process started.
    has_begun: bool,
    /// Calls that asked for a token since `since`.
    asked: u64,
    since: Option<Instant>,
    /// Tokens a second that its calls asked for, as last told.
    need: f64,
}

/// What a pod may take.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
enum Standing {
    /// Nothing before it has asked.
    #[default]
    Unknown,
    /// Its lease.
    Leased(Lease),
    /// Its part by head count, since nobody answers.
    Alone {
        /// When a call may have to wait for an answer again.
        until: Instant,
        /// When it is asked for beside the calls.
        again: Instant,
    },
}

/// A pod's part of the rate for some time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Lease {
    /// Of the whole rate, 0 to 1. With 0 only the tokens at hand are its own.
    share: f64,
    /// What it can be at the next question: once the others have asked anew, or because there is more for who needs it.
    prospect: f64,
    /// Tokens that may be saved up.
    burst: u32,
    renew_at: Instant,
    until: Instant,
    /// The whole rate does not suffice for what all pods need.
    is_scarce: bool,
}

impl Lease {
    /// When there may be more than this, at the soonest.
    fn next_chance(&self, now: Instant) -> Instant {
        if self.is_scarce { self.renew_at.max(now) } else { now + SOONEST }
    }
}

impl Share {
    /// A call asks for a token.
    pub(super) fn count(&mut self, now: Instant) {
        self.asked += 1;
        self.since.get_or_insert(now);
    }

    pub(super) fn lease(&self) -> Option<Lease> {
        match self.standing {
            Standing::Leased(lease) => Some(lease),
            Standing::Unknown | Standing::Alone { .. } => None,
        }
    }

    /// What holds at `now`.
    fn settle(&mut self, member: Option<&Member>, now: Instant) -> Standing {
        let may_ask = || {
            let link = member.and_then(|member| member.fleet.link());
            link.is_some_and(|link| link.may_be_asked())
        };
        self.standing = match self.standing {
            // Single tokens come from others, so without them it has nothing.
            Standing::Leased(lease) if lease.until > now && (lease.share > 0.0 || may_ask()) => {
                return self.standing;
            }
            Standing::Alone { until, .. } if until > now => return self.standing,
            _ if may_ask() => Standing::Unknown,
            _ => Standing::Alone { until: now + SOONEST, again: now },
        };
        self.standing
    }

    /// The sooner of `own`, when the `count`th token comes by the present share, and of when it comes by what the share
    /// will be.
    fn sooner(&self, cfg: &RateLimit, count: u64, own: Instant, now: Instant) -> Instant {
        let hoped = match self.standing {
            Standing::Leased(lease) if lease.prospect > lease.share => {
                let seconds = count as f64 / (cfg.rate.in_a_second() * lease.prospect);
                lease.next_chance(now) + Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX / 4)
            }
            // Somebody is asking.
            Standing::Unknown => now + SOONEST / 10,
            _ => return own,
        };
        own.min(hoped)
    }

    /// Tokens a second that are asked for, by the calls since the last look and before.
    fn measure(&mut self, now: Instant) -> f64 {
        if self.since.is_none() {
            // The call that has it ask for the first time.
            self.count(now);
        }
        let recent = self.recent(now);
        // Up at once, down by halves.
        self.need = if recent > self.need { recent } else { (recent + self.need) / 2.0 };
        self.asked = 0;
        self.since = Some(now);
        self.need
    }

    fn recent(&self, now: Instant) -> f64 {
        let span = self.since.map_or(0.0, |since| now.saturating_duration_since(since).as_secs_f64());
        self.asked as f64 / span.max(SPAN)
    }
}

impl State {
    /// The pace at which this pod's bucket fills under `cfg`.
    pub(super) fn pace(&mut self, cfg: &RateLimit, member: Option<&Member>, now: Instant) -> Pace {
        if !cfg.is_shared {
            self.whole = None;
            return Pace::of(cfg);
        }
        self.whole = Some(*cfg);
        let part = |share: f64, burst: u32| {
            Pace::of(&RateLimit { rate: Rate::per_second(cfg.rate.in_a_second() * share), burst, ..*cfg })
        };
        match self.share.settle(member, now) {
            Standing::Unknown => {
                if !self.share.has_begun {
                    self.bucket.empty();
                }
                part(0.0, 1)
            }
            Standing::Leased(lease) => part(lease.share, lease.burst),
            Standing::Alone { .. } => {
                let pods = member.map_or(1, |member| member.fleet.pods()).max(1);
                let burst = (cfg.burst / pods).max(1);
                let pace = part(1.0 / f64::from(pods), burst);
                if !std::mem::replace(&mut self.share.has_begun, true) {
                    self.bucket.set_pace(pace, now);
                    self.bucket.add(burst, now);
                }
                pace
            }
        }
    }

    /// When the last of `count` tokens comes, none of which is taken before `from`.
    pub(super) fn time_of(&mut self, count: u64, from: Instant, now: Instant) -> Instant {
        let own = self.bucket.time_of(count, from, now);
        match &self.whole {
            Some(cfg) => self.share.sooner(cfg, count, own, now).max(from),
            _ => own,
        }
    }
}

impl RateLimiter {
    /// Whether a call that wants a token has to ask first.
    pub fn must_ask(&self, cfg: &RateLimit, now: Instant) -> bool {
        let Some(link) = self.member.as_ref().and_then(|member| member.fleet.link()) else { return false };
        if !link.may_be_asked() {
            return false;
        }
        let mut state = self.serve(cfg, now);
        match state.share.standing {
            Standing::Unknown => true,
            Standing::Leased(lease) => {
                lease.share == 0.0 && lease.renew_at <= now && state.bucket.at_hand(now) == 0
            }
            Standing::Alone { .. } => false,
        }
    }

    /// Asks for a share, for a call that has something better to do at `end`. One call asks at a time, for those
    /// too that stand in line meanwhile.
    ///
    /// # Errors
    /// Why there is no answer.
    pub async fn ask(self: &Arc<Self>, cfg: &RateLimit, end: Instant) -> Result<(), Fault> {
        let Some(link) = self.member.as_ref().and_then(|member| member.fleet.link()) else { return Ok(()) };
        let Ok(place) = self.asking.clone().try_lock_owned() else { return Ok(()) };
        // In a task of its own: a client that leaves would take along what was granted.
        let (limiter, cfg) = (self.clone(), *cfg);
        let (answered, asked) = oneshot::channel();
        tokio::spawn(async move {
            let _place = place;
            let question = limiter.question(&cfg, 1 + limiter.in_line(), Instant::now());
            let answer = limiter.put(&link, &cfg, question, Some(end)).await;
            let may_go_on = answer.is_ok();
            // A client that has left needs no answer.
            let _ = answered.send(answer);
            // For those who came while it asked, beside the calls.
            let rest = limiter.in_line();
            if may_go_on && rest > 0 {
                let question = limiter.question(&cfg, rest, Instant::now());
                let _ = limiter.put(&link, &cfg, question, None).await;
            }
        });
        // The first question ends by then.
        asked.await.unwrap_or(Ok(()))
    }

    fn in_line(&self) -> u64 {
        self.state.lock().line.len() as u64
    }

    /// Puts a question, for a request until `end`, and takes up the answer.
    async fn put(
        &self,
        link: &Link,
        cfg: &RateLimit,
        question: Question,
        end: Option<Instant>,
    ) -> Result<(), Fault> {
        let answer = question.put(link, end).await;
        let result = answer.as_ref().map(|_| ()).map_err(Clone::clone);
        self.take_up(cfg, &question, answer, Instant::now());
        result
    }

    /// Whether it is time to ask for a share anew: the lease is half over, calls need much more than was told, or
    /// some wait for tokens that no share will bring.
    pub fn is_due(&self, cfg: &RateLimit, now: Instant) -> bool {
        let state = self.serve(cfg, now);
        let waits = state.line.len() > 0;
        let (recent, told) = (state.share.recent(now), state.share.need);
        match state.share.standing {
            Standing::Unknown => waits,
            Standing::Alone { again, .. } => state.share.asked > 0 && again <= now,
            Standing::Leased(lease) if lease.renew_at <= now => lease.share > 0.0 || waits,
            Standing::Leased(lease) => {
                let has_just_asked = state.share.since.is_some_and(|since| now < since + SOONEST);
                let is_grown = recent > 1.5 * told + 2.0 && recent > lease.share * cfg.rate.in_a_second();
                // In calm there may be tokens for those who wait.
                !has_just_asked && (is_grown || (waits && !lease.is_scarce))
            }
        }
    }

    /// Asks for a share anew; no request waits for it.
    ///
    /// # Errors
    /// Why there is no answer.
    pub async fn renew(&self, link: &Link, cfg: &RateLimit) -> Result<(), Fault> {
        let Ok(_place) = self.asking.try_lock() else { return Ok(()) };
        let question = self.question(cfg, self.in_line(), Instant::now());
        self.put(link, cfg, question, None).await
    }

    /// Others need more than they can have: the next question is due soon, though not in the same instant in all
    /// pods.
    pub fn is_called_on(&self, now: Instant) {
        if let Standing::Leased(lease) = &mut self.state.lock().share.standing {
            lease.renew_at = lease.renew_at.min(now + SOONEST.mul_f64(2.0 * fastrand::f64()));
        }
    }

    /// Gives the lease back with all that is left of it.
    pub async fn give_back(&self, link: &Link, cfg: &RateLimit) {
        let now = Instant::now();
        let left = {
            let mut state = self.serve(cfg, now);
            if state.share.lease().is_none() {
                return;
            }
            let left = state.bucket.at_hand(now);
            state.share.standing = Standing::Unknown;
            left
        };
        let question = Question { need: 0.0, left, ..self.question(cfg, 0, now) };
        // What cannot be given back ends by itself.
        let _ = question.put(link, None).await;
    }

    /// The pod's share, if it has one.
    pub fn share(&self) -> Option<f64> {
        self.state.lock().share.lease().map(|lease| lease.share)
    }

    pub(super) fn question(&self, cfg: &RateLimit, want: u64, asked_at: Instant) -> Question {
        let mut state = self.state.lock();
        let member = self.member.clone();
        let pods = member.as_ref().map_or(1, |member| member.fleet.pods());
        let (is_scarce, is_new, held) = match state.share.standing {
            Standing::Leased(lease) => (lease.is_scarce, false, lease.share),
            Standing::Alone { .. } => (false, false, 1.0 / f64::from(pods.max(1))),
            Standing::Unknown => (false, true, 0.0),
        };
        let need = state.share.measure(asked_at);
        Question { member, cfg: *cfg, need, want, left: 0, is_new, held, pods, is_scarce, asked_at }
    }

    /// What an answer changes.
    pub(super) fn take_up(
        &self,
        cfg: &RateLimit,
        question: &Question,
        answer: Result<Reply, Fault>,
        now: Instant,
    ) {
        let mut state = self.serve(cfg, now);
        let granted = match answer {
            Ok(reply) => {
                state.share.standing = Standing::Leased(question.lease(&reply));
                state.share.has_begun = true;
                reply.number(1) as u32
            }
            // What was leased holds on; without that the pod is on its own for a while.
            Err(_) => {
                if state.share.lease().is_none_or(|lease| lease.share == 0.0) {
                    state.share.standing = Standing::Alone { until: now + CALM, again: now + SCARCE };
                }
                0
            }
        };
        // Those in line go by the pace as it stands in the bucket.
        let pace = state.pace(cfg, self.member.as_ref(), now);
        state.bucket.set_pace(pace, now);
        state.bucket.add(granted, now);
        state.line.wake_first();
    }
}

/// What a pod asks for.
#[derive(Debug)]
pub(super) struct Question {
    member: Option<Member>,
    cfg: RateLimit,
    /// Tokens a second.
    need: f64,
    /// Tokens at once.
    want: u64,
    /// Tokens that it gives back.
    left: u32,
    /// It starts with an empty bucket.
    is_new: bool,
    /// The share that it goes by.
    held: f64,
    pods: u32,
    is_scarce: bool,
    asked_at: Instant,
}

impl Question {
    /// How often a pod asks: more rarely the more there are.
    fn rhythm(&self, is_scarce: bool) -> Duration {
        let least = if is_scarce { SCARCE } else { CALM };
        least.max(Duration::from_millis(self.pods.into())).min(Duration::from_secs(30))
    }

    /// For how long a lease is taken: so that it is asked for three times before it ends.
    fn term(&self) -> Duration {
        3 * self.rhythm(self.is_scarce)
    }

    /// What the script takes beside the pod.
    pub(super) fn numbers(&self) -> [String; 8] {
        [
            self.cfg.rate.in_a_second().to_string(),
            self.cfg.burst.to_string(),
            self.need.to_string(),
            self.want.to_string(),
            self.left.to_string(),
            u8::from(self.is_new).to_string(),
            self.term().as_millis().to_string(),
            self.held.to_string(),
        ]
    }

    /// How often those who lease more than they need may be called on, in milliseconds.
    pub(super) fn pause(&self) -> String {
        self.rhythm(true).as_millis().to_string()
    }

    async fn put(&self, link: &Link, end: Option<Instant>) -> Result<Reply, Fault> {
        let Some(member) = &self.member else { return Err(Fault::Down) };
        let key = link.key("rl", &member.id);
        let (numbers, channel, id, pause) =
            (self.numbers(), link.channel(), member.id.in_words(), self.pause());
        let mut arguments = vec![member.fleet.pod().as_bytes()];
        arguments.extend(numbers.iter().map(|number| number.as_bytes()));
        arguments.extend([&channel, &id, &pause].map(|text| text.as_bytes()));
        let reply = match end {
            Some(end) => link.ask_until(end, &SCRIPT, &[&key], &arguments).await?,
            None => link.tell(&SCRIPT, &key, &arguments).await?,
        };
        match reply.has(ANSWERS) {
            true => Ok(reply),
            false => Err(Fault::Refused("the answer is not that of the script".into())),
        }
    }

    /// The lease that was granted. It began here before it began there, and ends so, too.
    fn lease(&self, reply: &Reply) -> Lease {
        let share = reply.number(0).clamp(0.0, 1.0);
        let granted = reply.number(1) as u32;
        let is_scarce = reply.number(2) > 0.0;
        let own_part = (f64::from(self.cfg.burst) * share) as u32;
        // Calls do not come evenly; the part of a small share is less than two that come together.
        let at_once = 1 + (self.need * AT_ONCE.as_secs_f64()).ceil() as u32;
        // With single tokens only, the next question is due as soon as there can be one.
        let wait = match share > 0.0 || is_scarce {
            true => self.rhythm(is_scarce).mul_f64(0.9 + 0.2 * fastrand::f64()),
            false => Duration::from_millis(reply.number(4) as u64).clamp(SOONEST / 10, SOONEST),
        };
        Lease {
            share,
            prospect: reply.number(3).clamp(0.0, 1.0),
            burst: own_part.max(at_once).max(granted).min(self.cfg.burst),
            renew_at: self.asked_at + wait,
            until: self.asked_at + self.term(),
            is_scarce,
        }
    }
}
