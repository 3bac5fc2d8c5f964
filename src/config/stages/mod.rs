//! From the sections' stage keys to [`Stages`]: inheritance, defaults, impossible values.
//!
//! Sections are laid over each other before anything is judged, since `min: 2s` in a route may be wrong
//! only together with the `max` of the defaults. A stage that is turned off keeps its keys, so that a
//! narrower section that turns it on again finds what the wider one had set. The one list among the
//! stages, `fallback`, is replaced as a whole: a step has no name by which a narrower one could mean it.
//!
//! What is impossible is an error. What is possible and defeats itself is a warning; see [`doubts`].

mod answers;
mod attempts;
mod doubts;

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use self::answers::Chain;
use super::files::Sources;
use super::notation::{Switch, Unit};
use super::problem::{Path, Severity};
use super::raw::{self, Overlay};
use super::report::Report;
use super::{ExtraLoad, Stages, StatusSet};
use crate::units::{ByteSize, Percent, Rate, Span};

/// A stage's keys so far, and whether a section has turned it on or off.
#[derive(Debug, Clone, Default)]
struct Layer<T> {
    is_on: Option<bool>,
    keys: T,
}

impl<T: Overlay + Clone> Layer<T> {
    fn narrowed(&self, own: Option<&Switch<T>>) -> Self {
        match own {
            None => self.clone(),
            Some(Switch::Off) => Self { is_on: Some(false), keys: self.keys.clone() },
            Some(Switch::On(own)) => Self { is_on: Some(true), keys: own.or(&self.keys) },
        }
    }

    /// The keys of a stage that is on where nobody says otherwise.
    fn unless_off(&self) -> Option<&T> {
        self.is_on.unwrap_or(true).then_some(&self.keys)
    }

    /// The keys of a stage that is off where nobody says otherwise.
    fn if_written(&self) -> Option<&T> {
        self.is_on.unwrap_or(false).then_some(&self.keys)
    }
}

/// All stage keys that hold in a section, its own and those of wider ones.
#[derive(Debug, Clone, Default)]
pub(super) struct Inherited {
    plain: raw::Stages,
    deadline: Layer<raw::Deadline>,
    hedge: Layer<raw::Hedge>,
    extra_load: raw::ExtraLoad,
    bulkhead: Layer<raw::Bulkhead>,
    breaker: Layer<raw::Breaker>,
    retry: Layer<raw::Retry>,
    rate_limit: Layer<raw::RateLimit>,
    coalesce: Layer<raw::Coalesce>,
    cache: Layer<raw::Cache>,
    fallback: Chain,
    /// Narrowest first.
    sections: Vec<Path>,
}

impl Inherited {
    /// What holds in the section at `path`, which sets `own`.
    pub(super) fn narrowed(&self, own: &raw::Stages, path: &Path) -> Self {
        Self {
            plain: own.or(&self.plain),
            deadline: self.deadline.narrowed(own.deadline.as_ref()),
            hedge: self.hedge.narrowed(own.hedge.as_ref()),
            extra_load: own.extra_load.clone().unwrap_or_default().or(&self.extra_load),
            bulkhead: self.bulkhead.narrowed(own.bulkhead.as_ref()),
            breaker: self.breaker.narrowed(own.breaker.as_ref()),
            retry: self.retry.narrowed(own.retry.as_ref().map(|toggle| &toggle.0)),
            rate_limit: self.rate_limit.narrowed(own.rate_limit.as_ref()),
            coalesce: self.coalesce.narrowed(own.coalesce.as_ref().map(|toggle| &toggle.0)),
            cache: self.cache.narrowed(own.cache.as_ref().map(|toggle| &toggle.0)),
            fallback: self.fallback.narrowed(own.fallback.as_ref(), path),
            sections: std::iter::once(path.clone()).chain(self.sections.iter().cloned()).collect(),
        }
    }

    /// An upstream does not back itself up: a hedge to `name` stays with its own upstream, a fallback to it
    /// goes. Whether there was either.
    pub(super) fn forget_backup(&mut self, name: &str) -> bool {
        let was_hedged_to = self.hedge.keys.to.take_if(|to| to == name).is_some();
        self.fallback.forget(name) || was_hedged_to
    }

    /// The stages that these keys make, with defaults for what nobody set.
    pub(super) fn resolve(&self, report: &Report<'_>, sources: &Sources) -> Stages {
        let resolver = Resolver { report, sources, inherited: self };
        let plain = &self.plain;
        let stages = Stages {
            connect_timeout: resolver.positive("connect_timeout", plain.connect_timeout, CONNECT_TIMEOUT),
            attempt_timeout: plain
                .attempt_timeout
                .as_ref()
                .and_then(Switch::on)
                .map(|span| resolver.positive("attempt_timeout", Some(*span), span.0.0)),
            stream_idle: resolver.positive("stream_idle", plain.stream_idle, STREAM_IDLE),
            tunnel_idle: resolver.positive("tunnel_idle", plain.tunnel_idle, TUNNEL_IDLE),
            replay_limit: plain.replay_limit.map_or(REPLAY_LIMIT, |Unit(ByteSize(bytes))| bytes),
            unacceptable: resolver.statuses("unacceptable", plain.unacceptable.as_deref(), &UNACCEPTABLE),
            deadline: self.deadline.unless_off().map(|keys| resolver.deadline(keys)),
            hedge: self.hedge.unless_off().map(|keys| resolver.hedge(keys)),
            extra_load: ExtraLoad {
                ratio: self.extra_load.ratio.map_or(Percent::new(EXTRA_LOAD_RATIO), |Unit(ratio)| ratio),
                floor: self.extra_load.floor.map_or(Rate::per_second(EXTRA_LOAD_FLOOR), |Unit(floor)| floor),
            },
            bulkhead: self.bulkhead.unless_off().map(|keys| resolver.bulkhead(keys)),
            breaker: self.breaker.unless_off().map(|keys| resolver.breaker(keys)),
            retry: self.retry.if_written().map(|keys| resolver.retry(keys)),
            rate_limit: self.rate_limit.if_written().map(|keys| resolver.rate_limit(keys)),
            coalesce: self.coalesce.if_written().map(|keys| resolver.coalesce(keys)),
            cache: self.cache.if_written().map(|keys| resolver.cache(keys)),
            fallback: resolver.fallback(&self.fallback),
        };
        resolver.doubt(&stages);
        stages
    }
}

impl Stages {
    /// What holds for hosts that pass with no policy: every guard off, and values of their own for what has no
    /// off. `defaults` are for calls under a policy, so that a tight one there cuts nothing here; a body that
    /// no deadline covers may be as silent as a tunnel, which is what most of these calls are.
    pub(super) fn untouched() -> Self {
        Self {
            connect_timeout: CONNECT_TIMEOUT,
            attempt_timeout: None,
            stream_idle: TUNNEL_IDLE,
            tunnel_idle: TUNNEL_IDLE,
            replay_limit: REPLAY_LIMIT,
            unacceptable: StatusSet::new(UNACCEPTABLE),
            deadline: None,
            hedge: None,
            extra_load: ExtraLoad {
                ratio: Percent::new(EXTRA_LOAD_RATIO),
                floor: Rate::per_second(EXTRA_LOAD_FLOOR),
            },
            bulkhead: None,
            breaker: None,
            retry: None,
            rate_limit: None,
            coalesce: None,
            cache: None,
            fallback: Arc::default(),
        }
    }
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const STREAM_IDLE: Duration = Duration::from_secs(300);
const TUNNEL_IDLE: Duration = Duration::from_secs(3600);
const REPLAY_LIMIT: usize = 256 << 10;
const UNACCEPTABLE: [u16; 5] = [429, 500, 502, 503, 504];
/// In hundredths.
const EXTRA_LOAD_RATIO: f64 = 10.0;
/// Each second.
const EXTRA_LOAD_FLOOR: f64 = 1.0;

struct Resolver<'a> {
    report: &'a Report<'a>,
    sources: &'a Sources,
    inherited: &'a Inherited,
}

impl Resolver<'_> {
    fn setter(&self, keys: &[&str]) -> Path {
        self.report.setter(&self.inherited.sections, keys)
    }

    fn error(&self, keys: &[&str], message: impl Display) {
        if self.report.has_room(Severity::Error) {
            self.report.error(&self.setter(keys), message);
        }
    }

    fn warning(&self, keys: &[&str], message: impl Display) {
        if self.report.has_room(Severity::Warning) {
            self.report.warning(&self.setter(keys), message);
        }
    }

    /// Whether a section has something under the key, be it wrong: then that has been told.
    fn is_written(&self, key: &str) -> bool {
        let below = |section: &Path| key.split('.').fold(section.clone(), |path, key| path.key(key));
        self.inherited.sections.iter().any(|section| self.report.is_written(&below(section)))
    }

    fn span(&self, value: Option<Unit<Span>>, default: Duration) -> Duration {
        value.map_or(default, |Unit(Span(span))| span)
    }

    fn positive(&self, key: &str, value: Option<Unit<Span>>, default: Duration) -> Duration {
        let span = self.span(value, default);
        if span.is_zero() {
            self.error(&[key], "expected a duration longer than 0s");
        }
        span
    }

    /// Two durations of which the first must not exceed the second.
    fn in_order(&self, (small, less): (&str, Duration), (great, more): (&str, Duration)) {
        if less > more {
            let last = |key: &str| key.rsplit('.').next().unwrap_or_default().to_owned();
            let message =
                format!("{} ({}) is longer than {} ({})", last(small), Span(less), last(great), Span(more));
            self.error(&[small, great], message);
        }
    }

    fn statuses(&self, key: &str, list: Option<&[u16]>, default: &[u16]) -> StatusSet {
        let list = list.unwrap_or(default);
        for status in list.iter().filter(|status| !(100..=599).contains(*status)) {
            self.error(&[key], format!("expected statuses from 100 to 599; found `{status}`"));
        }
        StatusSet::new(list.iter().copied())
    }
}
