//! Answers that pods keep for each other: a second level behind each pod's own [`Store`](super::Store).
//!
//! A pod that has no answer of its own asks Redis before it asks the upstream, and writes there what it keeps itself.
//! What comes from there is no answer yet. It is taken as from a cache further up: an answer with an age
//! (RFC 9111 section 4.2.3), made an [`Entry`] by the same code as the upstream's own and put to the same questions.
//!
//! **Whose.** The key is the digest that the pod's own store has as its key, with the credentials in it, and with
//! `accept-encoding` too: one key has one answer, and agents with other codings would take turns in throwing out
//! each other's. What else `Vary` names is in the answer, as a digest that only such a request has; what does
//! not match is a miss. Neither can be turned back into a credential, but whoever reads there reads the answers.
//!
//! **How old.** An answer carries how old it was when it was written, and Redis tells how long ago that was: by its own
//! clock alone, from the time for which the key was set and the time that it has left. So pods whose
//! clocks differ agree on its age. The writer's clock and the answer's `Date` are looked at as well, and the oldest age
//! counts, since a command may have lain on its way for long.
//!
//! **Forgetting** (RFC 9111 section 4.4) leaves a mark at the resource, as in the pod's own store, which is read in the same
//! question: what was asked for before it is as nothing, in every partition and variant, also when it is written later.
//! A mark lives as long as the longest-lived answer, and that is why none is kept there for long. To delete
//! the keys instead was rejected: nobody knows those of other credentials. What other pods have in their own stores
//! already, a mark does not reach.
//!
//! **Why plain keys.** A hash for each resource, with its answers as fields, would need no mark. But Redis lets go of
//! keys, not of fields, and one resource may have thousands of callers.

mod value;

#[cfg(test)]
mod tests;

use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use http::{Method, header};
use ring::digest::{Context, SHA256};
use tokio::time::Instant;

use self::value::Label;
use super::directives::{RequestControl, ResponseControl};
use super::entry::Head;
use super::{Asked, Entry, Times};
use crate::config::Cache;
use crate::fleet::{Fault, Link, Reply, Script};
use crate::policy::identity::{self, Key};
use crate::wire::hop_by_hop;

/// The longest that an answer is kept, from the request that brought it, and with it every mark. An hour of a hundred
/// unsafe calls a second to ever new resources is some 60 MB of marks.
const LONGEST: Duration = Duration::from_secs(60 * 60);
/// For an answer's fields, beside its body.
const HEAD: usize = 64 << 10;
/// The largest value, whatever the policy allows for a body: more could seldom be read in the time that there is.
const LARGEST: usize = 4 << 20;

static FIND: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("find.lua")));

/// Where the pods keep the answer to a request.
#[derive(Debug, Clone, Copy)]
pub struct Spot {
    resource: [u8; 32],
    key: Key,
}

impl Spot {
    /// For a request under the policy `cfg`.
    pub fn of(asked: Asked<'_>, cfg: &Cache) -> Self {
        let fields = cfg.vary.iter().chain([&header::ACCEPT_ENCODING]);
        let key = Key::of(asked.place, &Method::GET, asked.headers, fields, None);
        Self { resource: identity::resource(asked.place), key }
    }

    fn name(&self, link: &Link) -> String {
        let key = URL_SAFE_NO_PAD.encode(self.key.as_bytes());
        format!("{}:{key}", mark(link, &self.resource))
    }

    /// What tells requests apart that `selection` does, here and nowhere else: what `Vary` names may be a credential, and
    /// a digest of it alone would be the same for every resource.
    fn stamp(&self, selection: &[u8; 32]) -> [u8; 32] {
        let mut digest = Context::new(&SHA256);
        digest.update(self.key.as_bytes());
        digest.update(selection);
        digest.finish().as_ref().try_into().expect("SHA-256 has 32 bytes")
    }
}

/// The key of a resource's mark. What is in braces decides on the slot, so that it is the same for all of the
/// resource's answers.
fn mark(link: &Link, resource: &[u8; 32]) -> String {
    link.key("cache", format_args!("{{{}}}", URL_SAFE_NO_PAD.encode(resource)))
}

/// The most bytes that a value may have under a policy.
pub fn most_bytes(cfg: &Cache) -> usize {
    cfg.max_body.saturating_add(HEAD).min(LARGEST)
}

/// Whether any kept answer would do for the request.
pub fn may_suffice(asked: Asked<'_>) -> bool {
    let request = RequestControl::of(asked.headers);
    !request.no_cache && !request.no_store
}

/// What the pods keep for a request. Waits until `end`, and no longer than `shared_state.timeout`.
///
/// # Errors
/// Why there is no answer from Redis.
pub async fn find(
    link: &Link,
    spot: &Spot,
    asked: Asked<'_>,
    cfg: &Cache,
    end: Instant,
) -> Result<Option<Entry>, Fault> {
    let (name, mark) = (spot.name(link), mark(link, &spot.resource));
    let most = most_bytes(cfg).to_string();
    let began = Instant::now();
    let reply = link.ask_until(end, &FIND, &[&name, &mark], &[most.as_bytes()]).await?;
    let Some(found) = Found::of(&reply) else { return Ok(None) };
    Ok(found.entry(spot, asked, Moment { began, ended: Instant::now(), wall: SystemTime::now() }))
}

/// Writes an entry down that is of use for `life` yet.
///
/// # Errors
/// Why it could not be.
pub async fn keep(link: &Link, spot: &Spot, entry: &Entry, life: Duration) -> Result<(), Fault> {
    let Some(value) = written(spot, entry, life, Instant::now(), SystemTime::now()) else { return Ok(()) };
    let mut cmd = redis::cmd("SET");
    cmd.arg(spot.name(link)).arg(value).arg("PX").arg(millis(life));
    link.command_aside(&cmd).await.map(drop)
}

/// Takes away what is kept at a spot.
///
/// # Errors
/// Why it could not be.
pub async fn remove(link: &Link, spot: &Spot) -> Result<(), Fault> {
    let mut cmd = redis::cmd("UNLINK");
    cmd.arg(spot.name(link));
    link.command_aside(&cmd).await.map(drop)
}

/// Something was done to a resource: what was asked for before is of no use any more, whoever asked.
///
/// # Errors
/// Why nobody could be told.
pub async fn forget(link: &Link, resource: &[u8; 32]) -> Result<(), Fault> {
    let life = millis(LONGEST);
    let mut cmd = redis::cmd("SET");
    cmd.arg(mark(link, resource)).arg(life).arg("PX").arg(life);
    link.command_aside(&cmd).await.map(drop)
}

impl Entry {
    /// For how long other pods may make use of the entry. `allowance` is the longest staleness that the policy's fallback
    /// takes. Nothing when it is not fresh.
    pub fn shared_life(&self, allowance: Duration, cfg: &Cache, now: Instant) -> Duration {
        let since_sent = now.saturating_duration_since(self.sent());
        self.useful_for(allowance, cfg, now).min(LONGEST.saturating_sub(since_sent))
    }

    /// The bytes of the value that it makes.
    pub fn shared_size(&self) -> usize {
        value::size(self.headers(), self.body())
    }
}

/// The value of an entry; `None` for one that nobody could make use of.
fn written(spot: &Spot, entry: &Entry, life: Duration, now: Instant, wall: SystemTime) -> Option<Vec<u8>> {
    let head = entry.head();
    let sent_ago = now.saturating_duration_since(head.times.sent);
    let until_received = head.times.received.saturating_duration_since(head.times.sent);
    let sent_at = wall.checked_sub(sent_ago)?.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    let label = Label {
        sent_at: millis(sent_at),
        sent_ago: millis(sent_ago),
        age_when_sent: millis(head.initial_age.saturating_sub(until_received)),
        life: millis(life),
        stamp: spot.stamp(head.selection.as_ref()?.values()),
    };
    value::write(&label, head.status, &head.headers, entry.body())
}

/// What Redis has told.
struct Found<'a> {
    value: &'a [u8],
    left: Duration,
    /// How long ago the resource was marked.
    marked: Option<Duration>,
}

/// When that was.
#[derive(Clone, Copy)]
struct Moment {
    /// Not later than Redis looked.
    began: Instant,
    /// Not earlier.
    ended: Instant,
    wall: SystemTime,
}

impl<'a> Found<'a> {
    fn of(reply: &'a Reply) -> Option<Self> {
        let time = |number: f64| Duration::try_from_secs_f64(number / 1000.0).ok();
        let is_marked = reply.bytes(2).is_some_and(|mark| !mark.is_empty());
        // What cannot be read of a mark is one of this moment.
        let marked = || {
            let (set, left) = (time(reply.number(2)), time(reply.number(3)));
            set.zip(left).map_or(Duration::ZERO, |(set, left)| set.saturating_sub(left))
        };
        Some(Self {
            value: reply.bytes(0)?,
            // Below zero: somebody has taken the end away by which the age is known.
            left: time(reply.number(1))?,
            marked: is_marked.then(marked),
        })
    }

    /// The entry for a request; `None` when it is none for this one, or of no use any more.
    fn entry(&self, spot: &Spot, asked: Asked<'_>, moment: Moment) -> Option<Entry> {
        let value::Value { label, status, mut headers, body } = value::read(self.value)?;
        let kept_for = Duration::from_millis(label.life).checked_sub(self.left)?;
        let by_redis = Duration::from_millis(label.sent_ago).saturating_add(kept_for);
        let by_wall = SystemTime::UNIX_EPOCH
            .checked_add(Duration::from_millis(label.sent_at))
            .and_then(|sent| moment.wall.duration_since(sent).ok())
            .unwrap_or_default();
        let sent_ago = by_redis.max(by_wall);
        if self.marked.is_some_and(|marked| sent_ago >= marked) {
            return None;
        }
        hop_by_hop::strip(&mut headers);
        let control = ResponseControl::of(&headers);
        let is_private = identity::is_shown(asked.headers);
        let times =
            Times { sent: moment.began.checked_sub(sent_ago)?, received: moment.ended, wall: moment.wall };
        let mut head = Head::of(asked, status, &headers, control, is_private, times);
        let waited = times.received.saturating_duration_since(times.sent);
        head.initial_age =
            head.initial_age.max(Duration::from_millis(label.age_when_sent).saturating_add(waited));
        let is_chosen = head.selection.as_ref().is_some_and(|own| spot.stamp(own.values()) == label.stamp);
        (is_chosen && head.may_be_kept()).then(|| Entry::new(head, Bytes::copy_from_slice(body)))
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
