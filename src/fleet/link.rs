//! The connection to what pods share: kept by a task of its own, used by whoever has a question.
//!
//! It is up when a pod could last say that it lives, which is a script that writes: so a server that reads
//! but does not write (a replica, one without memory left) is down, as is one that does not answer. While it is
//! down nobody is kept waiting for it, and the task tries again and again, soon at first, with jitter, and more
//! rarely the more pods there are.
//!
//! It is slow when a sign of life takes longer than a request may wait, or three questions of requests in a row
//! did: then requests ask nothing, while news still goes its way beside them.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use redis::{Cmd, ErrorKind, PushInfo, PushKind, RedisError, ServerErrorKind, Value};
use thiserror::Error;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use super::Fleet;
use super::connect::{Connection, connect};
use super::script::{Reply, Script};
use crate::config::{RedisKind, SharedState};

/// For what no request waits for: a connection, a sign of life, news.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);
/// Questions in a row without an answer in time.
const STRIKES: u32 = 3;
/// The first wait before another try to connect; it doubles.
const FIRST_WAIT: Duration = Duration::from_millis(50);
/// A few pods say that they live at the one, many thousands at the other.
const QUICKEST_RHYTHM: Duration = Duration::from_secs(10);
const SLOWEST_RHYTHM: Duration = Duration::from_secs(30);
/// A connection that has lasted so long is no sign of trouble when it ends.
const STEADY: Duration = Duration::from_secs(10);
/// The least time between two looks at a server that some find wanting and others not.
const BREATH: Duration = Duration::from_millis(250);
/// How often a slow server is looked at.
const SLOW_RHYTHM: Duration = Duration::from_secs(1);

static BEAT: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("beat.lua")));

/// Why a question has no answer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Fault {
    /// Nobody is asked at the moment.
    #[error("the shared state is down or slow")]
    Down,
    /// No answer in time.
    #[error("no answer within {0:?}")]
    Late(Duration),
    /// The connection broke, or the server does not do what is asked of it now: it is read-only, full, loading.
    #[error("{0}")]
    Unable(String),
    /// This question alone is refused: its key holds something else.
    #[error("{0}")]
    Refused(String),
}

/// What `/status` shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Whether it is up.
    pub is_up: bool,
    /// Whether it takes longer than a request may wait.
    pub is_slow: bool,
    /// Since when it is up or down.
    pub since: SystemTime,
    /// Why it is down.
    pub error: Option<String>,
    /// Pods as last counted.
    pub pods: u32,
}

/// The connection, or the endeavour to have one. Dropping it ends the task that keeps it.
pub struct Link {
    inner: Arc<Inner>,
    keeper: JoinHandle<()>,
}

struct Inner {
    settings: SharedState,
    connection: ArcSwapOption<Connection>,
    is_up: AtomicBool,
    is_slow: AtomicBool,
    /// Questions of requests in a row without an answer in time.
    strikes: AtomicU32,
    pods: AtomicU32,
    /// The count that holds until fewer have been counted for as long as a pod is taken to live, and when it was last
    /// come to.
    census: Mutex<(u32, Instant)>,
    /// The keeper is to look at once.
    doubt: Notify,
    /// Told to one who waits, or who comes later, that it is up for the first time.
    rose: Notify,
    status: Mutex<(SystemTime, Option<String>)>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl Link {
    /// Begins to connect, in a task of its own. Until it has counted them there are so many `pods`.
    pub(super) fn start(settings: SharedState, fleet: Weak<Fleet>, pods: u32) -> Arc<Self> {
        let inner = Arc::new(Inner {
            settings,
            connection: ArcSwapOption::empty(),
            is_up: AtomicBool::new(false),
            is_slow: AtomicBool::new(false),
            strikes: AtomicU32::new(0),
            pods: AtomicU32::new(pods),
            census: Mutex::new((pods, Instant::now())),
            doubt: Notify::new(),
            rose: Notify::new(),
            status: Mutex::new((SystemTime::now(), None)),
        });
        let keeper = tokio::spawn(keep(inner.clone(), fleet));
        Arc::new(Self { inner, keeper })
    }

    /// The settings it was made with.
    pub fn settings(&self) -> &SharedState {
        &self.inner.settings
    }

    /// Whether it does what it is there for.
    pub fn is_up(&self) -> bool {
        self.inner.is_up.load(Ordering::Relaxed)
    }

    /// Whether a request may ask: it is up, and quick.
    pub fn may_be_asked(&self) -> bool {
        self.is_up() && !self.inner.is_slow.load(Ordering::Relaxed)
    }

    /// Pods as last counted, at least one.
    pub fn pods(&self) -> u32 {
        self.inner.pods.load(Ordering::Relaxed)
    }

    /// What there is to see.
    pub fn status(&self) -> Status {
        let (since, error) = self.inner.status.lock().clone();
        let is_slow = self.inner.is_slow.load(Ordering::Relaxed);
        Status { is_up: self.is_up(), is_slow, since, error, pods: self.pods() }
    }

    /// Counts the pods anew, and says that this one lives.
    ///
    /// # Errors
    /// Why it could not.
    pub async fn count(&self, pod: &str) -> Result<u32, Fault> {
        self.inner.beat(pod).await?;
        Ok(self.pods())
    }

    /// Says that the pod is gone.
    pub async fn leave(&self, pod: &str) {
        let mut cmd = redis::cmd("ZREM");
        cmd.arg(pods_key(&self.inner.settings)).arg(pod);
        // Unsaid, it is found out a little later.
        let _ = self.command_aside(&cmd).await;
    }

    /// Resolves when it is up, at the latest when a first try has had its time.
    pub async fn ready(&self) {
        let _ = timeout(2 * self.inner.settings.timeout, self.inner.rose.notified()).await;
    }

    /// `prefix:kind:rest`.
    pub fn key(&self, kind: &str, rest: impl std::fmt::Display) -> String {
        format!("{}:{kind}:{rest}", self.inner.settings.prefix)
    }

    /// Where pods tell each other what has changed.
    pub fn channel(&self) -> String {
        channel(&self.inner.settings)
    }

    /// Runs a script for a request, which waits for it no longer than `shared_state.timeout`.
    ///
    /// # Errors
    /// Why there is no answer.
    pub async fn ask(&self, script: &Script, key: &str, arguments: &[&[u8]]) -> Result<Reply, Fault> {
        if !self.may_be_asked() {
            return Err(Fault::Down);
        }
        self.inner.run(script, &[key], arguments, self.inner.settings.timeout).await
    }

    /// As [`Link::ask`], about several keys of one slot, for a request that has something better to do at `end`.
    ///
    /// # Errors
    /// Why there is no answer.
    pub async fn ask_until(
        &self,
        end: Instant,
        script: &Script,
        keys: &[&str],
        arguments: &[&[u8]],
    ) -> Result<Reply, Fault> {
        if !self.may_be_asked() {
            return Err(Fault::Down);
        }
        let bound = end.saturating_duration_since(Instant::now()).min(self.inner.settings.timeout);
        if bound.is_zero() {
            return Err(Fault::Late(bound));
        }
        self.inner.run(script, keys, arguments, bound).await
    }

    /// Runs a script for which no request waits.
    ///
    /// # Errors
    /// Why there is no answer.
    pub async fn tell(&self, script: &Script, key: &str, arguments: &[&[u8]]) -> Result<Reply, Fault> {
        self.inner.run(script, &[key], arguments, self.inner.patience()).await
    }

    /// Sends a command for a request.
    ///
    /// # Errors
    /// Why there is no answer.
    pub async fn command(&self, cmd: &Cmd) -> Result<Value, Fault> {
        if !self.may_be_asked() {
            return Err(Fault::Down);
        }
        self.inner.send(cmd, self.inner.settings.timeout).await.map_err(Fault::from)
    }

    /// Sends a command for which no request waits.
    ///
    /// # Errors
    /// Why there is no answer.
    pub async fn command_aside(&self, cmd: &Cmd) -> Result<Value, Fault> {
        self.inner.send(cmd, self.inner.patience()).await.map_err(Fault::from)
    }
}

/// A link that nobody keeps: a simulation carries what would go over it.
#[cfg(test)]
impl Link {
    /// One that is up. To be called where tasks can be spawned.
    pub(crate) fn simulated(settings: SharedState) -> Arc<Self> {
        let link = Self::start(settings, Weak::new(), 1);
        link.keeper.abort();
        link.inner.is_up.store(true, Ordering::Relaxed);
        link
    }

    /// The answer to a sign of life, which has taken `time`.
    pub(crate) fn beaten(&self, pods: u32, time: Duration) {
        self.inner.took(time);
        self.inner.counted(pods.max(1), self.inner.lives());
        self.inner.is_up.store(true, Ordering::Relaxed);
    }

    /// The answer to anything else.
    pub(crate) fn answered(&self) {
        self.inner.strikes.store(0, Ordering::Relaxed);
    }

    /// No answer within `bound`.
    pub(crate) fn unanswered(&self, bound: Duration) {
        self.inner.is_late(bound);
    }

    pub(crate) fn rhythm(&self) -> Duration {
        self.inner.rhythm()
    }

    pub(crate) fn lives(&self) -> Duration {
        self.inner.lives()
    }
}

fn pods_key(settings: &SharedState) -> String {
    format!("{}:pods", settings.prefix)
}

fn channel(settings: &SharedState) -> String {
    // Published words know no databases.
    format!("{}:news:{}", settings.prefix, settings.redis.database)
}

/// Why a command has no answer.
enum Failed {
    Down,
    Late(Duration),
    Error(RedisError),
}

impl From<Failed> for Fault {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Down => Self::Down,
            Failed::Late(bound) => Self::Late(bound),
            Failed::Error(error) if is_of_server(&error) => Self::Unable(error.to_string()),
            Failed::Error(error) => Self::Refused(error.to_string()),
        }
    }
}

/// Whether the next question would fare no better. An error that the server raises within a script comes with a
/// code of its own, or with its code in the text.
fn is_of_server(error: &RedisError) -> bool {
    const CODES: [&str; 8] =
        ["OOM", "MISCONF", "NOAUTH", "NOREPLICAS", "BUSY", "READONLY", "LOADING", "MASTERDOWN"];
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::ResponseError) | ErrorKind::Extension => {
            let code = error.code().unwrap_or_default();
            let detail = error.detail().unwrap_or_default();
            CODES.iter().any(|known| *known == code || detail.contains(known))
        }
        ErrorKind::Server(kind) => {
            use ServerErrorKind::{CrossSlot, NoPerm, NoScript};
            !matches!(kind, NoScript | CrossSlot | NoPerm)
        }
        ErrorKind::UnexpectedReturnType => false,
        _ => true,
    }
}

impl Inner {
    async fn run(
        &self,
        script: &Script,
        keys: &[&str],
        arguments: &[&[u8]],
        bound: Duration,
    ) -> Result<Reply, Fault> {
        let end = Instant::now() + bound;
        let mut sent = self.send(&script.by_hash(keys, arguments), bound).await;
        if let Err(Failed::Error(error)) = &sent
            && error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
        {
            // A server that was restarted, flushed its scripts, or came to be the master.
            let rest = end.saturating_duration_since(Instant::now());
            sent = self.send(&script.by_text(keys, arguments), rest).await;
        }
        Ok(Reply::new(sent?))
    }

    async fn send(&self, cmd: &Cmd, bound: Duration) -> Result<Value, Failed> {
        let Some(connection) = self.connection.load_full() else { return Err(Failed::Down) };
        let mut connection = Connection::clone(&connection);
        match timeout(bound, connection.send(cmd)).await {
            Err(_) => {
                self.is_late(bound);
                Err(Failed::Late(bound))
            }
            Ok(Err(error)) => {
                if is_of_server(&error) {
                    self.is_in_doubt();
                }
                Err(Failed::Error(error))
            }
            Ok(Ok(value)) => {
                self.strikes.store(0, Ordering::Relaxed);
                // Some errors of the server come inside a value.
                value.extract_error().map_err(Failed::Error)
            }
        }
    }

    /// There was no answer within `bound`.
    fn is_late(&self, bound: Duration) {
        if bound >= self.patience() {
            return self.is_in_doubt();
        }
        // What had little time left says little of the server.
        let had_its_time = 2 * bound >= self.settings.timeout;
        if had_its_time && self.strikes.fetch_add(1, Ordering::Relaxed) + 1 >= STRIKES {
            self.note_pace(true, bound);
            self.doubt.notify_one();
        }
    }

    /// It is taken to be down until the keeper has looked.
    fn is_in_doubt(&self) {
        self.is_up.store(false, Ordering::Relaxed);
        self.doubt.notify_one();
    }

    /// For what no request waits for.
    fn patience(&self) -> Duration {
        PATIENCE.max(self.settings.timeout)
    }

    fn rises(&self) {
        self.is_up.store(true, Ordering::Relaxed);
        self.rose.notify_one();
        let mut status = self.status.lock();
        let was_down = status.1.take();
        if let Some(reason) = was_down {
            tracing::info!(was = reason, "shared state is up again");
            status.0 = SystemTime::now();
        }
    }

    fn falls(&self, reason: String) {
        self.is_up.store(false, Ordering::Relaxed);
        self.connection.store(None);
        let mut status = self.status.lock();
        match &mut status.1 {
            Some(known) if *known == reason => {}
            // Told once: what follows is the same trouble in other words.
            Some(known) => {
                tracing::debug!(reason, "shared state is still down");
                *known = reason;
            }
            None => {
                tracing::warn!(reason, "shared state is down: going on with what this pod knows itself");
                *status = (SystemTime::now(), Some(reason));
            }
        }
    }

    /// How often a pod says that it lives.
    fn rhythm(&self) -> Duration {
        if self.is_slow.load(Ordering::Relaxed) {
            return SLOW_RHYTHM;
        }
        let pods = Duration::from_millis(self.pods.load(Ordering::Relaxed).into());
        pods.clamp(QUICKEST_RHYTHM, SLOWEST_RHYTHM)
    }

    /// The longest wait between two tries.
    fn longest_wait(&self) -> Duration {
        let pods = Duration::from_millis(self.pods.load(Ordering::Relaxed).into());
        pods.clamp(Duration::from_millis(500), Duration::from_secs(10))
    }

    /// How long a sign of life has taken.
    fn took(&self, time: Duration) {
        self.strikes.store(0, Ordering::Relaxed);
        // It has to become clearly quicker, or it would be one and the other in turns.
        let was_slow = self.is_slow.load(Ordering::Relaxed);
        let bound = if was_slow { self.settings.timeout / 2 } else { self.settings.timeout };
        self.note_pace(time > bound, time);
    }

    fn note_pace(&self, is_slow: bool, time: Duration) {
        if self.is_slow.swap(is_slow, Ordering::Relaxed) != is_slow {
            let bound = self.settings.timeout;
            match is_slow {
                true => tracing::warn!(?time, ?bound, "shared state is slow: requests do not wait for it"),
                false => tracing::info!(?time, ?bound, "shared state is quick again"),
            }
        }
    }

    async fn beat(&self, pod: &str) -> Result<(), Fault> {
        let lives = self.lives();
        let key = pods_key(&self.settings);
        let began = Instant::now();
        let reply = self
            .run(&BEAT, &[&key], &[pod.as_bytes(), lives.as_millis().to_string().as_bytes()], self.patience())
            .await?;
        self.took(began.elapsed());
        let pods = reply.number(0) as u32;
        if pods == 0 {
            return Err(Fault::Unable("the server does not run scripts as Redis does".into()));
        }
        self.counted(pods, lives);
        Ok(())
    }

    /// Takes in how many pods there are. Fewer count only when there have been no more for some time: a server that has
    /// lost all counts those who have come back so far, and the first of them must not take itself for the fleet.
    fn counted(&self, pods: u32, lives: Duration) {
        let (mut census, now) = (self.census.lock(), Instant::now());
        if pods >= census.0 || now - census.1 > lives {
            *census = (pods, now);
        }
        self.pods.store(census.0, Ordering::Relaxed);
    }

    /// How long a pod is taken to live after a sign of life.
    fn lives(&self) -> Duration {
        3 * self.rhythm().max(QUICKEST_RHYTHM)
    }
}

/// Connects, says that the pod lives, and does both again whenever it must, for as long as there is a fleet.
async fn keep(inner: Arc<Inner>, fleet: Weak<Fleet>) {
    let mut wait = FIRST_WAIT;
    loop {
        let Some(pod) = fleet.upgrade().map(|fleet| fleet.pod().to_owned()) else { return };
        let began = Instant::now();
        match open(&inner, &fleet, &pod).await {
            Ok(()) => {
                inner.rises();
                if let Some(fleet) = fleet.upgrade() {
                    fleet.begin_turn();
                }
                let reason = stay(&inner, &fleet, &pod).await;
                inner.falls(reason);
            }
            Err(reason) => inner.falls(reason),
        }
        if began.elapsed() > STEADY {
            wait = FIRST_WAIT;
        }
        // All pods lose it in the same instant and must not come back in one.
        sleep(wait.mul_f64(0.5 + fastrand::f64())).await;
        wait = (wait * 2).min(inner.longest_wait());
    }
}

/// A connection over which the pod has said that it lives, and hears the others.
async fn open(inner: &Arc<Inner>, fleet: &Weak<Fleet>, pod: &str) -> Result<(), String> {
    let patience = inner.patience();
    let (ears, doubter) = (fleet.clone(), Arc::downgrade(inner));
    let on_push = move |push: PushInfo| match push.kind {
        PushKind::Message => {
            if let (Some(fleet), Some(word)) = (ears.upgrade(), word_of(push.data)) {
                fleet.hear(word);
            }
        }
        PushKind::Disconnection => {
            if let Some(inner) = doubter.upgrade() {
                inner.is_in_doubt();
            }
        }
        _ => {}
    };
    let redis = &inner.settings.redis;
    // Each of several servers may need its time to turn out to be mute.
    let within = if redis.kind == RedisKind::Single { patience } else { 4 * patience };
    let opened = timeout(within, async {
        let mut connection = connect(redis, patience, on_push).await?;
        connection.subscribe(&channel(&inner.settings)).await?;
        Ok::<_, RedisError>(connection)
    });
    let connection = match opened.await {
        Err(_) => return Err(format!("no connection within {within:?}")),
        Ok(opened) => opened.map_err(|error| error.to_string())?,
    };
    inner.connection.store(Some(Arc::new(connection)));
    inner.beat(pod).await.map_err(|fault| fault.to_string())
}

/// Says from time to time that the pod lives, and at once when that is in doubt; returns why it cannot.
async fn stay(inner: &Inner, fleet: &Weak<Fleet>, pod: &str) -> String {
    let mut heard = Instant::now();
    loop {
        let rhythm = inner.rhythm().mul_f64(0.9 + 0.2 * fastrand::f64());
        // Whether its time has come or somebody doubts: the answer is the same.
        let _ = timeout(rhythm, inner.doubt.notified()).await;
        let was_down = !inner.is_up.load(Ordering::Relaxed);
        match inner.beat(pod).await {
            Ok(()) => {
                inner.rises();
                let Some(fleet) = fleet.upgrade().filter(|_| was_down) else { continue };
                // One server of several may have gone with what it had to say. What was to be told meanwhile is left.
                match heard.elapsed() > STEADY {
                    true => fleet.begin_turn(),
                    false => fleet.nudge(),
                }
                heard = Instant::now();
                sleep(BREATH).await;
            }
            Err(fault) => return fault.to_string(),
        }
    }
}

fn word_of(mut data: Vec<Value>) -> Option<String> {
    match data.pop()? {
        Value::BulkString(bytes) => String::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}
