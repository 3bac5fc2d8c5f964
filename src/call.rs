//! A call: the agent's request, made once and then only read.
//!
//! Every attempt of the call builds its own head from it, so that a hedge or a retry sends what the
//! first attempt sent. What changes while the call runs (how far it is, why it ended) is in
//! [`Progress`], which the attempts share with it.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::PathAndQuery;
use http::{Extensions, Method, StatusCode};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::config::Route;
use crate::error::Stage;
use crate::wire::incoming::IncomingBody;
use crate::wire::replay::Replay;
use crate::wire::target::Scheme;

/// The agent's request.
pub struct Call {
    /// As sent.
    pub method: Method,
    /// How the client named it.
    pub scheme: Scheme,
    /// The client does not know of a proxy, since it speaks HTTP in a tunnel or was redirected here: the
    /// request keeps its `Host` and gets no `Via`.
    pub is_unaware: bool,
    /// The address that the client itself wanted to go to.
    pub pinned: Option<IpAddr>,
    /// Path and query, byte for byte.
    pub target: PathAndQuery,
    /// As the client sent them, hop-by-hop fields included.
    pub headers: HeaderMap,
    /// Holds the client's spelling of the field names.
    pub spelling: Extensions,
    /// Which version of HTTP it takes.
    pub needs: Needs,
    /// The protocol that the client wants to change to.
    pub upgrade: Option<HeaderValue>,
    /// It came as an extended CONNECT (RFC 8441), whose client takes any success for its tunnel.
    pub is_extended_connect: bool,
    /// What must still be sent once for each attempt.
    pub body: CallBody,
    /// Passes interim answers (1xx) to the client; `None` for an HTTP/1.0 one.
    pub interim: Option<Arc<dyn InterimSink>>,
    /// What changes while it runs.
    pub progress: Arc<Progress>,
}

/// Marks the head of a request that came as an extended CONNECT (RFC 8441).
#[derive(Debug, Clone, Copy)]
pub struct ExtendedConnect;

/// Which version of HTTP a call cannot do without, where the policy leaves it open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// Either will do.
    Either,
    /// It changes to a protocol that takes the whole connection.
    Http1,
    /// It is gRPC.
    Http2,
    /// Its client spoke HTTP/2 to the upstream without asking (RFC 9113 section 3.3), which says nothing of
    /// another place that it is sent to.
    SpokenHttp2,
}

/// Where interim answers (1xx) of an upstream go.
pub trait InterimSink: Send + Sync {
    /// Hands one on. Called before the final answer, at most a few times.
    fn interim(&self, status: StatusCode, headers: &HeaderMap);
}

impl Call {
    /// Whether sending the call twice does no more than sending it once, as far as the method
    /// (RFC 9110 section 9.2.2), the caller (`Idempotency-Key`) and the route tell.
    pub fn is_idempotent(&self, methods: &[Method], route: Option<&Route>) -> bool {
        methods.contains(&self.method)
            || route.is_some_and(|route| route.idempotent)
            || self.headers.contains_key(&IDEMPOTENCY_KEY)
    }
}

static IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The body of a call.
pub enum CallBody {
    /// There is none.
    Empty,
    /// It passes once; the place is empty when an attempt has taken it.
    Once(Mutex<Option<IncomingBody>>),
    /// Each attempt takes a reader.
    Replay(Replay),
}

impl CallBody {
    /// Whether one more attempt could send all of it beside those that run.
    pub fn can_be_sent(&self) -> bool {
        match self {
            Self::Empty => true,
            Self::Once(body) => body.lock().is_some(),
            Self::Replay(replay) => replay.has_room(),
        }
    }

    /// Takes back what an attempt was to send and has read nothing of.
    pub fn give_back(&self, body: IncomingBody) {
        if let Self::Once(place) = self {
            *place.lock() = Some(body);
        }
    }

    /// Whether the attempt that was sending it could send all of it once more.
    pub fn can_be_sent_again(&self) -> bool {
        match self {
            Self::Replay(replay) => replay.is_whole() || replay.is_untouched(),
            Self::Empty | Self::Once(_) => self.can_be_sent(),
        }
    }
}

/// What one call shares with its attempts and its answer.
#[derive(Debug, Default)]
pub struct Progress {
    stage: AtomicU8,
    fate: AtomicU8,
    attempts: AtomicU32,
    queued_us: AtomicU32,
    asked_us: AtomicU32,
    peer: Mutex<Option<IpAddr>>,
    connection: AtomicU64,
    is_final: AtomicBool,
    was_pushed_back: AtomicBool,
    is_unawaited: AtomicBool,
    is_sufficient: AtomicBool,
    tried: Mutex<Vec<Tried>>,
}

/// An upstream that had no acceptable answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tried {
    /// Its policy's name.
    pub upstream: Arc<str>,
    /// What came instead.
    pub end: TriedEnd,
}

/// What came instead of an acceptable answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TriedEnd {
    /// An answer with this status.
    Status(StatusCode),
    /// None; the word of the error.
    Error(&'static str),
}

impl TriedEnd {
    /// The word of an error; an upstream's own bad status has one too.
    pub fn error(self) -> &'static str {
        match self {
            Self::Status(_) => "upstream_status",
            Self::Error(word) => word,
        }
    }
}

/// Why the attempts that still run are about to be dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// For no reason of ours: the client has left.
    ClientLeft,
    /// The deadline has struck.
    Expired,
    /// Another attempt has won.
    Superseded,
}

impl Progress {
    /// Notes what the call waits for now.
    pub fn enter(&self, stage: Stage) {
        self.stage.store(stage as u8, Ordering::Relaxed);
    }

    /// What the call waits for.
    pub fn stage(&self) -> Stage {
        Stage::ALL[usize::from(self.stage.load(Ordering::Relaxed)) % Stage::ALL.len()]
    }

    /// To be said before running attempts are dropped.
    pub fn decide(&self, fate: Fate) {
        self.fate.store(fate as u8, Ordering::Relaxed);
    }

    /// Why an attempt that is being dropped is dropped.
    pub fn fate(&self) -> Fate {
        match self.fate.load(Ordering::Relaxed) {
            f if f == Fate::Expired as u8 => Fate::Expired,
            f if f == Fate::Superseded as u8 => Fate::Superseded,
            _ => Fate::ClientLeft,
        }
    }

    /// What still runs is about to be dropped since nobody needs its answer any more.
    pub fn give_way(&self) {
        self.is_unawaited.store(true, Ordering::Relaxed);
        self.decide(Fate::Superseded);
    }

    /// Whether it was given up since nobody needed its answer any more.
    pub fn has_given_way(&self) -> bool {
        self.is_unawaited.load(Ordering::Relaxed)
    }

    /// The reader has what it wants of the answer: it is judged by its head when the rest is dropped.
    pub fn suffice(&self) {
        self.is_sufficient.store(true, Ordering::Relaxed);
    }

    /// Whether the reader has what it wants of the answer.
    pub fn is_sufficient(&self) -> bool {
        self.is_sufficient.load(Ordering::Relaxed)
    }

    /// Counts an attempt that is sent; the first is 1.
    pub fn count_attempt(&self) -> u32 {
        self.attempts.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Attempts sent so far.
    pub fn attempts(&self) -> u32 {
        self.attempts.load(Ordering::Relaxed)
    }

    /// A try begins: what comes of the one before it says nothing about this one.
    pub fn begin_try(&self) {
        self.decide(Fate::ClientLeft);
        self.connection.store(0, Ordering::Relaxed);
    }

    /// Notes which address the try's first attempt went to, and the number of the shared connection that
    /// it is on.
    pub fn went_to(&self, peer: IpAddr, connection: Option<u64>) {
        *self.peer.lock() = Some(peer);
        self.connection.store(connection.unwrap_or(0), Ordering::Relaxed);
    }

    /// The address that the last try's first attempt went to: what a hedge keeps away from, and another try.
    pub fn peer(&self) -> Option<IpAddr> {
        *self.peer.lock()
    }

    /// The shared connection of the try's first attempt, where it is on one.
    pub fn connection(&self) -> Option<u64> {
        Some(self.connection.load(Ordering::Relaxed)).filter(|connection| *connection > 0)
    }

    /// Until when the call, which ends at `end`, waits from `now` on for what other pods know: `patience` in all, over
    /// everything that it asks them, and half of what is left to it at most, since it can do without.
    pub fn asks_until(&self, patience: Duration, now: Instant, end: Option<Instant>) -> Instant {
        let waited = Duration::from_micros(self.asked_us.load(Ordering::Relaxed).into());
        let left = end.map_or(Duration::MAX, |end| end.saturating_duration_since(now));
        now + patience.saturating_sub(waited).min(left / 2)
    }

    /// Adds time that it has waited for that.
    pub fn asked(&self, wait: Duration) {
        self.asked_us.fetch_add(micros(wait), Ordering::Relaxed);
    }

    /// Adds time in queues.
    pub fn queued(&self, wait: Duration) {
        self.queued_us.fetch_add(micros(wait), Ordering::Relaxed);
    }

    /// No further try will be made here, and one by the caller would do no good.
    pub fn give_up(&self) {
        self.is_final.store(true, Ordering::Relaxed);
    }

    /// Whether another try by the caller would do no good.
    pub fn is_final(&self) -> bool {
        self.is_final.load(Ordering::Relaxed)
    }

    /// An upstream has asked for fewer requests: none of the call is to be sent twice from now on.
    pub fn push_back(&self) {
        self.was_pushed_back.store(true, Ordering::Relaxed);
    }

    /// Whether an upstream has asked for fewer requests.
    pub fn was_pushed_back(&self) -> bool {
        self.was_pushed_back.load(Ordering::Relaxed)
    }

    /// Notes an upstream that had no acceptable answer. The policy's chain bounds how many there are.
    pub fn note_tried(&self, upstream: Arc<str>, end: TriedEnd) {
        self.tried.lock().push(Tried { upstream, end });
    }

    /// What the call has tried in vain, in that order; empty while its own upstream has not failed.
    pub fn tried(&self) -> Vec<Tried> {
        self.tried.lock().clone()
    }

    /// The call shares the answer of another one, and so what that has tried.
    pub fn follow(&self, leader: &Self) {
        *self.tried.lock() = leader.tried();
        self.is_final.store(leader.is_final(), Ordering::Relaxed);
    }

    /// Time in queues: for a permit, and for a rate token.
    pub fn queue_time(&self) -> Duration {
        Duration::from_micros(self.queued_us.load(Ordering::Relaxed).into())
    }
}

/// What a request is called in the log: the caller's `x-request-id`, or one of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestId {
    /// Made here; printed as 16 hex digits.
    Ours(u64),
    /// The caller's.
    Theirs(HeaderValue),
}

impl RequestId {
    /// The caller's id when it is a short token, else a random one.
    pub fn of(headers: &HeaderMap) -> Self {
        static X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
        match headers.get(&X_REQUEST_ID) {
            Some(id) if is_short_token(id.as_bytes()) => Self::Theirs(id.clone()),
            _ => Self::Ours(fastrand::u64(..)),
        }
    }
}

/// As far as they go into the number, which is more than an hour.
fn micros(time: Duration) -> u32 {
    time.as_micros().min(u32::MAX.into()) as u32
}

fn is_short_token(id: &[u8]) -> bool {
    (1..=128).contains(&id.len()) && id.iter().all(|b| b.is_ascii_alphanumeric() || b"-_.:+/=".contains(b))
}

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ours(id) => write!(f, "{id:016x}"),
            Self::Theirs(id) => f.write_str(id.to_str().unwrap_or("-")),
        }
    }
}

/// Whether the request has a body to wait for.
pub fn has_body(headers: &HeaderMap) -> bool {
    headers.contains_key(header::TRANSFER_ENCODING)
        || headers.get(header::CONTENT_LENGTH).is_some_and(|length| length != "0")
}

/// Whether the client sends its content only when told to (RFC 9110 section 10.1.1).
pub fn expects_continue(headers: &HeaderMap) -> bool {
    headers
        .get(header::EXPECT)
        .is_some_and(|expected| expected.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_call_waits_for_other_pods_once_for_all_that_it_asks() {
        let (progress, now) = (Progress::default(), Instant::now());
        let asks_for = |end: Option<Instant>| progress.asks_until(ms(25), now, end) - now;
        assert_eq!(asks_for(None), ms(25));
        assert_eq!(asks_for(Some(now + ms(30))), ms(15), "half of what is left to it");
        progress.asked(ms(20));
        assert_eq!(asks_for(None), ms(5));
        progress.asked(ms(20));
        assert_eq!(asks_for(None), ms(0));
        assert_eq!(asks_for(Some(now)), ms(0));
    }
}
