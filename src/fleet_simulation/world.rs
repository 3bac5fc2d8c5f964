//! The simulated fleet: what happens, in order of time.
//!
//! Real are the state machines of the guards, the link's judgement of how the server does, and the scripts. Played
//! are the wires, Redis's queue, the provider and the calls, and who asks when: the gates of a call
//! ([`crate::pipeline::gate`]), the loops of the liaison ([`crate::liaison`]), the link's signs of life.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use tokio::time::Instant;

use super::redis::{Assumed, Done, Redis, Script};
use super::traffic::Traffic;
use crate::config::{Breaker, Login, RateLimit, RedisKind, SharedState};
use crate::fleet::{Fault, Fleet, Id, Link, Member, PATIENCE, Reply};
use crate::liaison::{PROLONG, RECONCILE, TICK};
use crate::policy::breaker::shared::{News, Word, quorum};
use crate::policy::breaker::{self, Admission, BreakerCell, Open, State, Verdict};
use crate::policy::rate_limit::RateLimiter;
use crate::policy::rate_limit::simulated::{Caller, Question, Turn};

/// What a message takes one way, in microseconds.
pub(super) const WIRE: Range<u64> = 200..1_000;
/// What the provider takes to answer, and to fail, unless it hangs.
pub(super) const ANSWER: Duration = Duration::from_millis(50);
/// How long a call waits for a token.
pub(super) const DEADLINE: Duration = Duration::from_secs(1);
/// Pods are started one after another within so many seconds.
pub(super) const ROLLOUT: f64 = 10.0;
/// How long a call waits for Redis.
pub(super) const TIMEOUT: Duration = Duration::from_millis(25);

/// What is simulated.
#[derive(Clone)]
pub(super) struct Setting {
    pub(super) pods: usize,
    pub(super) seed: u64,
    /// Upstreams that each pod calls.
    pub(super) upstreams: usize,
    /// Calls a second of each pod to each of them.
    pub(super) calls: f64,
    pub(super) breaker: Option<Breaker>,
    pub(super) rate: Option<RateLimit>,
    pub(super) quorum: u32,
}

/// What the provider does; all upstreams are one in this.
pub(super) struct Provider {
    pub(super) is_dead: bool,
    /// How long a dead one takes to fail.
    pub(super) fails_after: Duration,
    /// The share of calls that fail by chance.
    pub(super) failing: f64,
    /// So many pods are sick: all of their calls fail.
    pub(super) sick: usize,
}

impl Default for Provider {
    fn default() -> Self {
        Self { is_dead: false, fails_after: ANSWER, failing: 0.0, sick: 0 }
    }
}

/// What there is to count.
#[derive(Default)]
pub(super) struct Tally {
    pub(super) calls: u64,
    /// Calls that the provider failed.
    pub(super) failed: u64,
    pub(super) first_failure: Option<Instant>,
    /// Probes that reached the provider, and those of them that the fleet has not left to the pod.
    pub(super) probes: u64,
    pub(super) unleased: u64,
    /// Calls that waited for Redis, and those of them that waited in vain.
    pub(super) asked: u64,
    pub(super) unanswered: u64,
    /// Each time that a rate let a call through.
    pub(super) tokens: Vec<Instant>,
    /// What Redis told all pods of the fleet's breaker, and when.
    pub(super) fleet: Vec<(Instant, State)>,
    /// Breakers that opened, each time that one did.
    pub(super) opened: u64,
    pub(super) deliveries: u64,
    /// The longest that a command stood in Redis's queue.
    pub(super) longest_queue: Duration,
}

pub(super) struct World {
    pub(super) setting: Setting,
    pub(super) start: Instant,
    pub(super) now: Instant,
    pub(super) provider: Provider,
    pub(super) pods: Vec<Pod>,
    pub(super) tally: Tally,
    pub(super) traffic: Traffic,
    random: Rng,
    redis: Redis,
    busy_until: Instant,
    agenda: BinaryHeap<Entry>,
    entries: u64,
    // Links are made where tasks could be spawned; none ever is run.
    _runtime: tokio::runtime::Runtime,
}

pub(super) struct Pod {
    pub(super) lanes: Vec<Lane>,
    pub(super) is_alive: bool,
    fleet: Arc<Fleet>,
    link: Arc<Link>,
    /// A connection keeps the order of messages: when the last one arrives there, and here.
    last_sent: Instant,
    last_received: Instant,
    looked: Instant,
    beats: u64,
    /// Questions of the lease loop that have no answer yet.
    renewals: u32,
}

/// A pod's guards for one upstream, and its calls.
pub(super) struct Lane {
    pub(super) breaker: Arc<BreakerCell>,
    pub(super) rate: Arc<RateLimiter>,
    /// When its breaker was first open, and when it was last closed again.
    pub(super) opened: Option<Instant>,
    pub(super) closed: Option<Instant>,
    is_open: bool,
    id: Id,
    /// Calls a second, and how often that has changed.
    calls: f64,
    changes: u64,
    used: Instant,
    is_telling: bool,
    asks_to_probe: bool,
    asks_for_share: bool,
    line: VecDeque<(u64, Caller)>,
    callers: u64,
    looks: u64,
}

/// A lane of a pod.
#[derive(Debug, Clone, Copy)]
pub(super) struct At {
    pub(super) pod: usize,
    pub(super) lane: usize,
}

enum Event {
    /// One of so many changes of demand ago is none.
    Call(At, u64),
    Ended(At, Admission, Verdict),
    /// A question arrives at Redis, and what came of it at the pod.
    Asks(Errand),
    Answered(At, Instant, Kind, Result<Reply, Fault>),
    Heard(usize, Rc<str>),
    Beat(usize, u64),
    LookAgain(usize),
    Tick(usize),
    /// The first in line looks at the clock.
    Look(At, u64),
    Expired(At, u64),
}

/// A question on its way.
struct Errand {
    at: At,
    sent: Instant,
    kind: Kind,
    script: Script,
    op: &'static str,
    key: String,
    arguments: Vec<String>,
}

/// Who waits for the answer.
enum Kind {
    CatchUp(u64),
    Probe,
    News,
    Read,
    Prolong,
    Token(Question),
    Renewal(Question),
    Beat,
}

impl Kind {
    /// Whether it is a call.
    fn bound(&self) -> Duration {
        match self {
            Self::CatchUp(_) | Self::Token(_) => TIMEOUT,
            Self::Probe | Self::News | Self::Read | Self::Prolong | Self::Renewal(_) | Self::Beat => PATIENCE,
        }
    }
}

struct Entry {
    at: Instant,
    number: u64,
    event: Event,
}

impl Ord for Entry {
    /// The next is the greatest.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Eq for Entry {}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl World {
    pub(super) fn new(setting: Setting) -> Self {
        // Of the jitter and the names that the guards draw themselves.
        fastrand::seed(setting.seed);
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let guard = runtime.enter();
        let start = Instant::now();
        let pods: Vec<_> = (0..setting.pods).map(|_| Pod::new(&setting, start)).collect();
        drop(guard);
        let mut world = Self {
            start,
            now: start,
            provider: Provider::default(),
            pods,
            tally: Tally::default(),
            traffic: Traffic::default(),
            random: Rng::with_seed(setting.seed),
            redis: Redis::new(setting.seed),
            busy_until: start,
            agenda: BinaryHeap::new(),
            entries: 0,
            setting,
            _runtime: runtime,
        };
        for pod in 0..world.pods.len() {
            world.roll_out(pod);
        }
        world
    }

    /// Lets time pass until so many seconds after the start.
    pub(super) fn run_until(&mut self, seconds: f64) {
        let end = self.at(seconds);
        self.run_while(end, |_| true);
        self.now = end;
    }

    /// The same, as long as `goes_on` after each event.
    pub(super) fn run_while(&mut self, end: Instant, goes_on: impl Fn(&Self) -> bool) {
        while goes_on(self) && self.agenda.peek().is_some_and(|entry| entry.at < end) {
            let Some(entry) = self.agenda.pop() else { return };
            self.now = entry.at;
            self.handle(entry.event);
        }
    }

    pub(super) fn at(&self, seconds: f64) -> Instant {
        self.start + Duration::from_secs_f64(seconds)
    }

    pub(super) fn lanes(&self) -> impl Iterator<Item = &Lane> {
        self.pods.iter().flat_map(|pod| &pod.lanes)
    }

    /// From now on a lane has so many calls a second.
    pub(super) fn demand(&mut self, at: At, calls: f64) {
        let lane = self.lane(at);
        lane.calls = calls;
        lane.changes += 1;
        self.plan_call(at);
    }

    fn roll_out(&mut self, pod: usize) {
        let wait = self.random.f64() * ROLLOUT;
        let begin = self.at(wait);
        self.plan(begin, Event::Beat(pod, 0));
        self.plan(begin, Event::LookAgain(pod));
        if self.setting.rate.is_some() {
            self.plan(begin, Event::Tick(pod));
        }
        self.now = begin;
        for lane in 0..self.setting.upstreams {
            self.plan_call(At { pod, lane });
        }
        self.now = self.start;
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Asks(errand) => self.serve(errand),
            Event::Answered(at, sent, kind, answer) if self.pods[at.pod].is_alive => {
                self.take_in(at, sent, kind, answer);
            }
            Event::Call(at, change) if self.lane(at).changes == change => {
                self.plan_call(at);
                self.call(at);
            }
            Event::Ended(at, admission, verdict) => self.ended(at, admission, verdict),
            Event::Heard(pod, word) => self.hear(pod, &word),
            Event::Beat(pod, beat) if self.pods[pod].is_alive && self.pods[pod].beats == beat => {
                self.beat(pod);
            }
            Event::LookAgain(pod) if self.pods[pod].is_alive => self.look_again(pod),
            Event::Tick(pod) if self.pods[pod].is_alive => self.tick(pod),
            Event::Look(at, look) if self.lane(at).looks == look => self.look(at),
            Event::Expired(at, caller) => self.expire(at, caller),
            Event::Answered(..)
            | Event::Call(..)
            | Event::Beat(..)
            | Event::LookAgain(_)
            | Event::Tick(_)
            | Event::Look(..) => {}
        }
    }

    fn plan(&mut self, at: Instant, event: Event) {
        self.entries += 1;
        self.agenda.push(Entry { at, number: self.entries, event });
    }

    fn lane(&mut self, at: At) -> &mut Lane {
        &mut self.pods[at.pod].lanes[at.lane]
    }
}

/// Calls.
impl World {
    fn plan_call(&mut self, at: At) {
        let (calls, changes) = (self.lane(at).calls, self.lane(at).changes);
        if calls > 0.0 && self.pods[at.pod].is_alive {
            let gap = -(1.0 - self.random.f64()).ln() / calls;
            self.plan(self.now + Duration::from_secs_f64(gap), Event::Call(at, changes));
        }
    }

    fn call(&mut self, at: At) {
        let now = self.now;
        self.tally.calls += 1;
        let lane = &mut self.pods[at.pod].lanes[at.lane];
        lane.used = now;
        if self.setting.breaker.is_some() && lane.breaker.is_behind(now) {
            let turn = self.pods[at.pod].fleet.turn(now);
            return self.ask_breaker(at, Kind::CatchUp(turn), breaker::simulated::read());
        }
        self.pass_gates(at);
    }

    fn pass_gates(&mut self, at: At) {
        let now = self.now;
        if let Some(cfg) = self.setting.breaker.clone() {
            let checked = self.lane(at).breaker.check(&cfg, now);
            self.note(at);
            if checked.is_err_and(|open| !open.is_due) {
                return;
            }
        }
        if let Some(cfg) = self.setting.rate {
            let lane = self.lane(at);
            if lane.rate.must_ask(&cfg, now) && !lane.asks_for_share {
                lane.asks_for_share = true;
                let question = lane.rate.ask_for(&cfg, true, now);
                return self.ask_rate(at, question, Kind::Token);
            }
        }
        self.take_token(at);
    }

    fn take_token(&mut self, at: At) {
        let now = self.now;
        let Some(cfg) = self.setting.rate else { return self.enter(at) };
        let deadline = now + DEADLINE;
        let lane = self.lane(at);
        if lane.rate.try_acquire(&cfg, None, now) {
            return self.has_token(at);
        }
        let Some(caller) = lane.rate.arrive(&cfg, now, deadline) else { return self.has_token(at) };
        match lane.rate.step(&caller, now) {
            Turn::Taken => self.has_token(at),
            Turn::Refused => {}
            Turn::At(_) | Turn::Later => {
                lane.callers += 1;
                let number = lane.callers;
                lane.line.push_back((number, caller));
                self.plan(deadline, Event::Expired(at, number));
                self.look(at);
            }
        }
    }

    /// The first in line, and who is first then.
    fn look(&mut self, at: At) {
        let now = self.now;
        loop {
            let lane = self.lane(at);
            let Some((_, first)) = lane.line.front() else { return };
            match lane.rate.step(first, now) {
                Turn::Taken => {
                    lane.line.pop_front();
                    self.has_token(at);
                }
                Turn::Refused => {
                    lane.line.pop_front();
                }
                Turn::At(then) => {
                    lane.looks += 1;
                    let look = lane.looks;
                    // A timer's grain.
                    return self.plan(then.max(now + Duration::from_millis(1)), Event::Look(at, look));
                }
                Turn::Later => return,
            }
        }
    }

    fn expire(&mut self, at: At, number: u64) {
        let lane = self.lane(at);
        if let Some(place) = lane.line.iter().position(|(caller, _)| *caller == number) {
            let (_, caller) = lane.line.remove(place).expect("it stands there");
            lane.rate.leave(&caller);
            self.look(at);
        }
    }

    fn has_token(&mut self, at: At) {
        self.tally.tokens.push(self.now);
        self.enter(at);
    }

    fn enter(&mut self, at: At) {
        if let Err(Open { is_due: true, .. }) = self.admit(at)
            && !self.lane(at).asks_to_probe
        {
            self.lane(at).asks_to_probe = true;
            self.ask_breaker(at, Kind::Probe, breaker::simulated::probe());
        }
    }

    fn admit(&mut self, at: At) -> Result<(), Open> {
        let Some(cfg) = self.setting.breaker.clone() else { return Ok(()) };
        let now = self.now;
        let admission = self.lane(at).breaker.admit(&cfg, now);
        self.note(at);
        let admission = admission?;
        if admission.is_probe() {
            self.tally.probes += 1;
            self.tally.unleased += u64::from(!self.lane(at).breaker.is_leased());
        }
        let Provider { is_dead, fails_after, failing, sick } = self.provider;
        let fails = is_dead || at.pod < sick || (failing > 0.0 && self.random.f64() < failing);
        let verdict = if fails { Verdict::Failure } else { Verdict::Success };
        let takes = if is_dead { fails_after } else { ANSWER };
        self.plan(now + takes, Event::Ended(at, admission, verdict));
        Ok(())
    }

    fn ended(&mut self, at: At, admission: Admission, verdict: Verdict) {
        let Some(cfg) = self.setting.breaker.clone() else { return };
        if verdict == Verdict::Failure {
            self.tally.failed += 1;
            self.tally.first_failure.get_or_insert(self.now);
        }
        admission.finish(&cfg, verdict, self.now);
        self.note(at);
        self.pass_on(at);
    }

    /// Sees whether a lane's breaker has opened or closed.
    fn note(&mut self, at: At) {
        let now = self.now;
        let lane = self.lane(at);
        let is_open = lane.breaker.state() != State::Closed;
        if is_open == lane.is_open {
            return;
        }
        lane.is_open = is_open;
        match is_open {
            true => {
                lane.opened.get_or_insert(now);
                self.tally.opened += 1;
            }
            false => lane.closed = Some(now),
        }
    }
}

/// What pods do beside the calls.
impl World {
    fn pass_on(&mut self, at: At) {
        let pod = &mut self.pods[at.pod];
        let lane = &mut pod.lanes[at.lane];
        if lane.is_telling || !pod.link.is_up() {
            return;
        }
        if let Some(news) = lane.breaker.take_news() {
            lane.is_telling = true;
            let quorum = quorum(self.setting.quorum, pod.link.pods());
            let question = question_of(news, quorum, self.now);
            self.ask_breaker(at, Kind::News, question);
        }
    }

    fn hear(&mut self, pod: usize, text: &str) {
        let now = self.now;
        if let Some(id) = text.strip_prefix("rate ").map(Id::from_words) {
            let called_on = self.pods[pod].lanes.iter().find(|lane| lane.id == id);
            return called_on.expect("all call all").rate.is_called_on(now);
        }
        let (_, id, word) = Word::parse(text).expect("it was published by this version");
        let lane = self.pods[pod].lanes.iter().position(|lane| lane.id == id).expect("all call all");
        let at = At { pod, lane };
        self.lane(at).breaker.hear(word, now);
        self.note(at);
        self.pass_on(at);
    }

    fn beat(&mut self, pod: usize) {
        let at = At { pod, lane: 0 };
        let Pod { fleet, link, beats, .. } = &mut self.pods[pod];
        *beats += 1;
        let arguments = vec![fleet.pod().to_owned(), link.lives().as_millis().to_string()];
        self.send(at, Kind::Beat, Script::Beat, "beat", "hedgerow:pods".to_owned(), arguments);
    }

    fn look_again(&mut self, pod: usize) {
        let wait = PROLONG.mul_f64(0.8 + 0.2 * self.random.f64());
        self.plan(self.now + wait, Event::LookAgain(pod));
        if self.setting.breaker.is_none() {
            return;
        }
        let every = (Duration::from_millis(6) * self.pods[pod].link.pods()).clamp(RECONCILE.0, RECONCILE.1);
        let is_time = self.now - self.pods[pod].looked >= every;
        if is_time {
            self.pods[pod].looked = self.now;
        }
        for lane in 0..self.setting.upstreams {
            let at = At { pod, lane };
            if let Some(since) = self.lane(at).breaker.must_prolong() {
                self.ask_breaker(at, Kind::Prolong, breaker::simulated::prolong(since));
            }
            if is_time && self.now - self.lane(at).used <= every {
                self.ask_breaker(at, Kind::Read, breaker::simulated::read());
            }
        }
    }

    fn tick(&mut self, pod: usize) {
        let Some(cfg) = self.setting.rate else { return };
        let now = self.now;
        if self.pods[pod].link.is_up() {
            for lane in 0..self.setting.upstreams {
                let at = At { pod, lane };
                let lane = self.lane(at);
                if lane.rate.is_due(&cfg, now) && !lane.asks_for_share {
                    lane.asks_for_share = true;
                    let question = lane.rate.ask_for(&cfg, false, now);
                    self.pods[pod].renewals += 1;
                    self.ask_rate(at, question, Kind::Renewal);
                }
            }
        }
        self.plan_tick(pod);
    }

    fn plan_tick(&mut self, pod: usize) {
        if self.pods[pod].renewals == 0 {
            self.plan(self.now + TICK, Event::Tick(pod));
        }
    }
}

/// What goes to Redis and comes back.
impl World {
    fn ask_breaker(&mut self, at: At, kind: Kind, (op, own): breaker::simulated::Question) {
        let id = self.lane(at).id.clone();
        let pod = self.pods[at.pod].fleet.pod().to_owned();
        let mut arguments =
            vec![op.to_owned(), pod, "hedgerow:news".to_owned(), format!("{} ", id.authority)];
        arguments.extend(own);
        self.send(at, kind, Script::Breaker, op, format!("hedgerow:cb:{id}"), arguments);
    }

    fn ask_rate(&mut self, at: At, question: Question, kind: fn(Question) -> Kind) {
        let key = format!("hedgerow:rl:{}", self.lane(at).id);
        let mut arguments = vec![self.pods[at.pod].fleet.pod().to_owned()];
        arguments.extend(question.arguments("hedgerow:news", &format!("{} ", self.lane(at).id.authority)));
        self.send(at, kind(question), Script::Rate, "rate", key, arguments);
    }

    fn send(
        &mut self,
        at: At,
        kind: Kind,
        script: Script,
        op: &'static str,
        key: String,
        arguments: Vec<String>,
    ) {
        let sent = self.now;
        self.tally.asked += u64::from(matches!(kind, Kind::CatchUp(_) | Kind::Probe | Kind::Token(_)));
        if kind.bound() == TIMEOUT && !self.pods[at.pod].link.may_be_asked() {
            return self.take_in(at, sent, kind, Err(Fault::Down));
        }
        let wire = self.wire();
        let pod = &mut self.pods[at.pod];
        pod.last_sent = pod.last_sent.max(sent + wire);
        let arrives = pod.last_sent;
        self.plan(arrives, Event::Asks(Errand { at, sent, kind, script, op, key, arguments }));
    }

    /// Redis does what it is asked as soon as it has done all that came before.
    fn serve(&mut self, errand: Errand) {
        let Errand { at, sent, kind, script, op, key, arguments } = errand;
        let begin = self.now.max(self.busy_until);
        self.tally.longest_queue = self.tally.longest_queue.max(begin - self.now);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let Done { reply, published, took } = self.redis.run(script, &key, &arguments, begin - self.start);
        self.busy_until = begin + took;
        let arrives = self.arrival(at.pod, self.busy_until);
        for word in published {
            self.publish(word.into());
        }
        self.traffic.note(begin, op, self.busy_until - begin);
        let bound = kind.bound();
        let (then, answer) = match arrives > sent + bound {
            true => (sent + bound, Err(Fault::Late(bound))),
            false => (arrives, Ok(Reply::new(reply))),
        };
        self.plan(then, Event::Answered(at, sent, kind, answer));
    }

    /// Each pod in its turn; Redis is busy until all have been told.
    fn publish(&mut self, word: Rc<str>) {
        if let Some((_, _, Word { state, .. })) = Word::parse(&word) {
            self.tally.fleet.push((self.busy_until, state.expect("a state")));
        }
        let Assumed { delivery, .. } = Assumed::default();
        let first = self.random.usize(..self.pods.len());
        for turn in 0..self.pods.len() {
            let pod = (first + turn) % self.pods.len();
            self.busy_until += delivery;
            let arrives = self.arrival(pod, self.busy_until);
            self.plan(arrives, Event::Heard(pod, word.clone()));
        }
        self.tally.deliveries += self.pods.len() as u64;
    }

    fn arrival(&mut self, pod: usize, left: Instant) -> Instant {
        let wire = self.wire();
        let received = &mut self.pods[pod].last_received;
        *received = (*received).max(left + wire);
        *received
    }

    fn wire(&mut self) -> Duration {
        Duration::from_micros(self.random.u64(WIRE))
    }

    fn take_in(&mut self, at: At, sent: Instant, kind: Kind, answer: Result<Reply, Fault>) {
        let now = self.now;
        self.heed(at.pod, &kind, answer.as_ref().err());
        let pod = &mut self.pods[at.pod];
        let lane = &mut pod.lanes[at.lane];
        match kind {
            Kind::CatchUp(turn) => {
                lane.breaker.caught_up(turn, answer, now);
                self.note(at);
                self.pass_gates(at);
            }
            Kind::Probe => {
                lane.asks_to_probe = false;
                lane.breaker.may_probe(answer, sent, now);
                self.note(at);
                // The call may have gone on its way; the next one finds what has come of it.
                match now <= sent + TIMEOUT {
                    true => drop(self.admit(at)),
                    false => self.tally.unanswered += 1,
                }
            }
            Kind::News => {
                lane.is_telling = false;
                lane.breaker.told(answer, now);
                self.note(at);
                self.pass_on(at);
            }
            Kind::Read => {
                lane.breaker.told(answer, now);
                self.note(at);
            }
            Kind::Prolong => lane.breaker.prolonged(answer, sent),
            Kind::Token(question) => {
                self.take_up(at, &question, answer);
                self.take_token(at);
            }
            Kind::Renewal(question) => {
                pod.renewals -= 1;
                self.take_up(at, &question, answer);
                self.plan_tick(at.pod);
            }
            Kind::Beat => {
                let wait = match answer {
                    Ok(reply) => {
                        pod.link.beaten(reply.number(0) as u32, now - sent);
                        pod.link.rhythm().mul_f64(0.9 + 0.2 * self.random.f64())
                    }
                    // As if it connected anew.
                    Err(_) => Duration::from_secs_f64(0.05 + 0.5 * self.random.f64()),
                };
                let beats = pod.beats;
                self.plan(now + wait, Event::Beat(at.pod, beats));
            }
        }
    }

    fn take_up(&mut self, at: At, question: &Question, answer: Result<Reply, Fault>) {
        let Some(cfg) = self.setting.rate else { return };
        let now = self.now;
        let lane = self.lane(at);
        lane.asks_for_share = false;
        lane.rate.answered(&cfg, question, answer, now);
        self.look(at);
    }

    /// What an answer, or that there is none, says of the server.
    fn heed(&mut self, pod: usize, kind: &Kind, fault: Option<&Fault>) {
        let link = self.pods[pod].link.clone();
        match fault {
            None => link.answered(),
            Some(Fault::Late(bound)) => {
                self.tally.unanswered += u64::from(*bound == TIMEOUT);
                link.unanswered(*bound);
                // The link's keeper looks at once.
                if !link.may_be_asked() && !matches!(kind, Kind::Beat) {
                    let beats = self.pods[pod].beats;
                    self.plan(self.now, Event::Beat(pod, beats));
                }
            }
            Some(_) => self.tally.unanswered += 1,
        }
    }
}

fn question_of(news: News, quorum: u32, now: Instant) -> breaker::simulated::Question {
    breaker::simulated::news(news, quorum, now)
}

impl Pod {
    fn new(setting: &Setting, start: Instant) -> Self {
        let redis = crate::config::Redis {
            kind: RedisKind::Single,
            is_tls: false,
            ca_pem: None,
            servers: vec![("localhost".to_owned(), 0)],
            login: Login::default(),
            database: 0,
        };
        let settings =
            SharedState { redis, timeout: TIMEOUT, quorum: setting.quorum, prefix: "hedgerow".into() };
        let link = Link::simulated(settings);
        let fleet = Fleet::simulated(link.clone());
        let lanes = (0..setting.upstreams).map(|lane| Lane::new(setting, &fleet, lane, start)).collect();
        Self {
            lanes,
            is_alive: true,
            fleet,
            link,
            last_sent: start,
            last_received: start,
            looked: start,
            beats: 0,
            renewals: 0,
        }
    }
}

impl Lane {
    fn new(setting: &Setting, fleet: &Arc<Fleet>, lane: usize, start: Instant) -> Self {
        let id = Id { authority: format!("api{lane}.example.com:443").into(), route: None };
        let member = Member { fleet: fleet.clone(), id: id.clone() };
        Self {
            breaker: BreakerCell::of(member.clone()),
            rate: RateLimiter::of(member),
            opened: None,
            closed: None,
            is_open: false,
            id,
            calls: setting.calls,
            changes: 0,
            used: start,
            is_telling: false,
            asks_to_probe: false,
            asks_for_share: false,
            line: VecDeque::new(),
            callers: 0,
            looks: 0,
        }
    }
}
