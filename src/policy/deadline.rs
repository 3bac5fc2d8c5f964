//! One absolute deadline for a call, from what the caller sent and what the policy allows.
//!
//! A decider: it looks at the request's fields once, on arrival, and converts wall-clock time to the
//! monotonic clock there; later jumps of the wall clock change nothing. Everything that waits for
//! the call waits on the instant that comes out, and nothing sets a fresh timer. Relative timeouts
//! were rejected: each hop and each retry would start them anew.

use std::time::{Duration, SystemTime};

use http::header::{HeaderMap, HeaderName, HeaderValue};
use tokio::time::Instant;

use crate::config::{self, Covers};
use crate::error::{Bound, Error, Stage};
use crate::wire::deadline_header as header;
use crate::wire::retry_mark::AMZ_SDK_REQUEST;

/// The caller's absolute deadline.
pub static X_REQUEST_DEADLINE: HeaderName = HeaderName::from_static("x-request-deadline");
/// gRPC's relative one.
pub static GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

static STAINLESS_READ_TIMEOUT: HeaderName = HeaderName::from_static("x-stainless-read-timeout");
static STAINLESS_TIMEOUT: HeaderName = HeaderName::from_static("x-stainless-timeout");

/// Further than this beyond `deadline.max` a date is taken for a mistake in its unit.
const FAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// When a call ends, and why then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deadline {
    /// The upstream's work ends here, with the reserve still left to deliver the answer.
    pub at: Instant,
    /// What set it.
    pub bound: Bound,
    /// Whether the caller gave it.
    pub is_callers: bool,
    /// The same with the reserve, by the machine's clock on arrival: what the upstream is told.
    pub wall: SystemTime,
    /// The caller's own words for that, where it was not shortened.
    pub words: Option<HeaderValue>,
    /// The whole of what is left, for a `grpc-timeout` sent on.
    pub grpc_end: Option<Instant>,
    /// When that ends which the call is part of: the body's end, where the call's own deadline leaves it out.
    pub whole: Option<Instant>,
}

/// When a call ends at the latest: without a deadline further away than any call lasts.
pub fn end_of(deadline: Option<&Deadline>) -> Instant {
    const FOREVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
    deadline.map_or_else(|| Instant::now() + FOREVER, |deadline| deadline.at)
}

/// The moment of a call's arrival on both clocks.
#[derive(Debug, Clone, Copy)]
pub struct Arrival {
    /// Monotonic.
    pub now: Instant,
    /// By the machine's clock, which the caller's deadline is compared with once.
    pub wall: SystemTime,
}

impl Arrival {
    /// This moment.
    pub fn now() -> Self {
        Self { now: Instant::now(), wall: SystemTime::now() }
    }
}

impl Deadline {
    /// The deadline of a call with these `headers`, `within` that of what it is a part of; `None` when the
    /// stage is off.
    ///
    /// # Errors
    /// Those of [`Deadline::by`].
    pub fn of(
        policy: Option<&config::Deadline>,
        headers: &HeaderMap,
        arrival: Arrival,
        within: Option<Self>,
    ) -> Result<Option<Self>, Error> {
        let Some(policy) = policy else { return Ok(within) };
        let own = Self::by(policy, headers, arrival)?;
        Ok(Some(match within {
            None => own,
            Some(within) => own.within(within, policy, arrival),
        }))
    }

    /// The deadline of a call that is part of something with the deadline `whole`.
    #[must_use]
    pub fn within(self, whole: Self, policy: &config::Deadline, arrival: Arrival) -> Self {
        let end = whole.at;
        let deadline = match self.bound {
            // The policy's default is for calls that bring no deadline, and this one does, unless that is a
            // default as well.
            Bound::Default if whole.is_callers => {
                whole.or_earlier(Self::after(arrival, policy.max, policy.reserve, Bound::Max))
            }
            _ => self.or_earlier(whole),
        };
        Self { whole: Some(end), ..deadline }
    }

    /// What the caller asks for with `headers` under `policy`.
    ///
    /// # Errors
    /// [`Error::InvalidDeadline`] for a field that cannot be used, [`Error::DeadlineExceeded`] when
    /// it has passed already.
    pub fn by(policy: &config::Deadline, headers: &HeaderMap, arrival: Arrival) -> Result<Self, Error> {
        let given = given(headers)?;
        if let Some(given) = given {
            check_date(given.at, policy, arrival)?;
        }

        // Latest first: of equal bounds the one named last, the caller's, is reported.
        let mut end = (arrival.wall + policy.max, Bound::Max);
        let mut is_bounded = false;
        let mut lower = |candidate: Option<SystemTime>, bound: Bound| {
            let Some(candidate) = candidate else { return };
            is_bounded = true;
            if candidate <= end.0 {
                end = (candidate, bound);
            }
        };
        if policy.hints {
            lower(sdk_hint(headers, arrival.wall), Bound::SdkHint);
        }
        lower(grpc_timeout(headers)?.map(|left| arrival.wall + left), Bound::Grpc);
        lower(given.as_ref().map(|given| given.at), Bound::Header);
        if !is_bounded {
            end = (arrival.wall + policy.default.min(policy.max), Bound::Default);
        }

        let (end, bound) = end;
        let left = match end.duration_since(arrival.wall) {
            Ok(left) if !left.is_zero() => left,
            passed => {
                let skew = passed.err().map_or(Duration::ZERO, |error| error.duration());
                return Err(Error::DeadlineExceeded { stage: Stage::Arrival, bound, skew: Some(skew) });
            }
        };
        let words = given.filter(|given| given.at == end).map(|given| given.value.clone());
        Ok(Self {
            at: arrival.now + (left - policy.reserve.min(left / 10)),
            bound,
            is_callers: matches!(bound, Bound::Header | Bound::Grpc | Bound::SdkHint),
            wall: end,
            words,
            grpc_end: headers.contains_key(&GRPC_TIMEOUT).then(|| arrival.now + left),
            whole: None,
        })
    }

    /// One that a fan-out sets for its calls: `left` after `arrival`, less the `reserve`.
    pub fn after(arrival: Arrival, left: Duration, reserve: Duration, bound: Bound) -> Self {
        Self {
            at: arrival.now + (left - reserve.min(left / 10)),
            bound,
            is_callers: true,
            wall: arrival.wall + left,
            words: None,
            grpc_end: None,
            whole: None,
        }
    }

    /// How long it is from `arrival`, the reserve included.
    pub fn total(&self, arrival: Arrival) -> Duration {
        self.wall.duration_since(arrival.wall).unwrap_or_default()
    }

    /// `x-request-deadline` as the upstream gets it. Made for each attempt, since not every call has one.
    pub fn told(&self) -> HeaderValue {
        self.words.clone().unwrap_or_else(|| rfc3339(self.wall))
    }

    /// The earlier of two.
    #[must_use]
    pub fn or_earlier(self, other: Self) -> Self {
        if other.at < self.at { other } else { self }
    }

    /// What bounds the body of an answer. By itself a deadline of the policy ends at the head of a stream, which then
    /// has `stream_idle`; but what the call is part of ends for its body too.
    pub fn of_body(&self, policy: Option<&config::Deadline>, is_stream: bool) -> Option<Self> {
        let is_covered = matches!(self.bound, Bound::FanOut | Bound::FanOutCall)
            || policy.is_some_and(|policy| match policy.covers {
                Covers::Head => false,
                Covers::Body => true,
                Covers::Auto => self.is_callers || !is_stream,
            });
        match is_covered {
            true => Some(self.clone()),
            false => self.whole.map(|at| Self { at, bound: Bound::FanOut, ..self.clone() }),
        }
    }

    /// The error of a call that this deadline ends.
    pub fn exceeded(&self, stage: Stage) -> Error {
        Error::DeadlineExceeded { stage, bound: self.bound, skew: None }
    }
}

#[derive(Clone, Copy)]
struct Given<'a> {
    value: &'a HeaderValue,
    at: SystemTime,
}

fn given(headers: &HeaderMap) -> Result<Option<Given<'_>>, Error> {
    let mut values = headers.get_all(&X_REQUEST_DEADLINE).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.any(|other| other != value) {
        return Err(Error::InvalidDeadline("two x-request-deadline fields with different values"));
    }
    let at = header::parse_deadline(value.as_bytes()).map_err(Error::InvalidDeadline)?;
    Ok(Some(Given { value, at }))
}

fn check_date(at: SystemTime, policy: &config::Deadline, arrival: Arrival) -> Result<(), Error> {
    if at > arrival.wall + policy.max + FAR {
        return Err(Error::InvalidDeadline(
            "x-request-deadline lies more than a year beyond deadline.max: check its unit",
        ));
    }
    Ok(())
}

fn grpc_timeout(headers: &HeaderMap) -> Result<Option<Duration>, Error> {
    headers
        .get(&GRPC_TIMEOUT)
        .map(|value| header::parse_grpc_timeout(value.as_bytes()))
        .transpose()
        .map_err(Error::InvalidDeadline)
}

/// The earliest of the SDKs' own timeouts. Those that cannot be read, or lead beyond what the clock can
/// say, are ignored: they are hints.
fn sdk_hint(headers: &HeaderMap, wall: SystemTime) -> Option<SystemTime> {
    let seconds = [&STAINLESS_READ_TIMEOUT, &STAINLESS_TIMEOUT]
        .into_iter()
        .filter_map(|name| headers.get(name))
        .filter_map(|value| header::parse_stainless_timeout(value.as_bytes()))
        .filter_map(|left| wall.checked_add(left));
    let ttl = headers.get(&AMZ_SDK_REQUEST).and_then(|value| header::parse_amz_ttl(value.as_bytes()));
    seconds.chain(ttl).min()
}

/// RFC 3339 with milliseconds, as a field value.
fn rfc3339(at: SystemTime) -> HeaderValue {
    HeaderValue::from_maybe_shared(bytes::Bytes::from(header::format_rfc3339_millis(at)))
        .unwrap_or_else(|_| HeaderValue::from_static("1970-01-01T00:00:00.000Z"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_beyond_the_clock_is_no_hint() {
        let endless = HeaderValue::from_static("18446744073709551615");
        let headers = HeaderMap::from_iter([(STAINLESS_TIMEOUT.clone(), endless)]);
        let config = config::embedded();
        let policy = config.defaults.stages.deadline.as_ref();
        let deadline = Deadline::of(policy, &headers, Arrival::now(), None).unwrap().unwrap();
        assert_eq!(deadline.bound, Bound::Default);
    }
}
