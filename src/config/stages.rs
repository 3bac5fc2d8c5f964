//! From the sections' stage keys to [`Stages`]: inheritance, defaults, impossible values.
//!
//! Sections are laid over each other before anything is judged, since `min: 2s` in a route may be wrong
//! only together with the `max` of the defaults. A stage that is turned off keeps its keys, so that a
//! narrower section that turns it on again finds what the wider one had set.

use std::fmt::Display;
use std::time::Duration;

use super::notation::{After, Switch, Unit};
use super::problem::Path;
use super::raw::{self, Overlay};
use super::report::Report;
use super::{Breaker, Bulkhead, Covers, Deadline, ExtraLoad, Hedge, HedgeAfter, Stages, StatusSet};
use crate::units::{ByteSize, Percent, Rate, Span};

/// A stage's keys so far, and whether it is on.
#[derive(Debug, Clone)]
struct Layer<T> {
    is_on: bool,
    keys: T,
}

impl<T: Overlay + Clone> Layer<T> {
    fn narrowed(&self, own: Option<&Switch<T>>) -> Self {
        match own {
            None => self.clone(),
            Some(Switch::Off) => Self { is_on: false, keys: self.keys.clone() },
            Some(Switch::On(own)) => Self { is_on: true, keys: own.or(&self.keys) },
        }
    }
}

impl<T: Default> Default for Layer<T> {
    fn default() -> Self {
        Self { is_on: true, keys: T::default() }
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
            sections: std::iter::once(path.clone()).chain(self.sections.iter().cloned()).collect(),
        }
    }

    /// Hedges to `name` stay with their own upstream; whether there was such a target.
    pub(super) fn forget_hedge_to(&mut self, name: &str) -> bool {
        self.hedge.keys.to.take_if(|to| to == name).is_some()
    }

    /// The stages that these keys make, with defaults for what nobody set.
    pub(super) fn resolve(&self, report: &Report<'_>) -> Stages {
        let resolver = Resolver { report, sections: &self.sections };
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
            deadline: self.deadline.is_on.then(|| resolver.deadline(&self.deadline.keys)),
            hedge: self.hedge.is_on.then(|| resolver.hedge(&self.hedge.keys)),
            extra_load: ExtraLoad {
                ratio: self.extra_load.ratio.map_or(Percent::new(EXTRA_LOAD_RATIO), |Unit(ratio)| ratio),
                floor: self.extra_load.floor.map_or(Rate::per_second(EXTRA_LOAD_FLOOR), |Unit(floor)| floor),
            },
            bulkhead: self.bulkhead.is_on.then(|| resolver.bulkhead(&self.bulkhead.keys)),
            breaker: self.breaker.is_on.then(|| resolver.breaker(&self.breaker.keys)),
            retry: None,
            rate_limit: None,
            coalesce: None,
            cache: None,
            fallback: std::sync::Arc::default(),
        };
        resolver.warn_of_unpaid_percentile(&stages);
        stages
    }
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const STREAM_IDLE: Duration = Duration::from_secs(300);
const TUNNEL_IDLE: Duration = Duration::from_secs(3600);
const REPLAY_LIMIT: usize = 256 << 10;
const UNACCEPTABLE: [u16; 5] = [429, 500, 502, 503, 504];
const FAILURE_STATUSES: [u16; 4] = [500, 502, 503, 504];
/// In hundredths.
const EXTRA_LOAD_RATIO: f64 = 10.0;
/// Each second.
const EXTRA_LOAD_FLOOR: f64 = 1.0;
/// Beyond it a number of permits or places is a slip, and the counters stay small.
const MOST_CALLS: usize = 1_000_000;
/// The histogram of response times ends here, so no percentile is ever longer.
const LONGEST_HEDGE_DELAY: Duration = Duration::from_secs(120);
const MOST_EXTRA: u8 = 10;

struct Resolver<'a> {
    report: &'a Report<'a>,
    sections: &'a [Path],
}

impl Resolver<'_> {
    fn error(&self, keys: &[&str], message: impl Display) {
        self.report.error(&self.report.setter(self.sections, keys), message);
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

    fn deadline(&self, keys: &raw::Deadline) -> Deadline {
        let deadline = Deadline {
            default: self.positive("deadline.default", keys.default, Duration::from_secs(30)),
            max: self.positive("deadline.max", keys.max, Duration::from_secs(15 * 60)),
            reserve: self.span(keys.reserve, Duration::from_millis(50)),
            covers: match keys.covers {
                None | Some(raw::Covers::Auto) => Covers::Auto,
                Some(raw::Covers::Head) => Covers::Head,
                Some(raw::Covers::Body) => Covers::Body,
            },
            hints: keys.hints.is_none_or(|flag| flag.0),
            tell_envoy: keys.tell_envoy.is_some_and(|flag| flag.0),
        };
        // The built-in reserve shrinks with the deadline by itself, so only a written one can be wrong.
        if keys.reserve.is_some() {
            self.in_order(("deadline.reserve", deadline.reserve), ("deadline.default", deadline.default));
        }
        if deadline.default > deadline.max {
            let path = self.report.setter(self.sections, &["deadline.default", "deadline.max"]);
            let (default, max) = (Span(deadline.default), Span(deadline.max));
            self.report.warning(&path, format!("default ({default}) is cut to max ({max})"));
        }
        deadline
    }

    fn hedge(&self, keys: &raw::Hedge) -> Hedge {
        let hedge = Hedge {
            after: match keys.after {
                None | Some(After::Auto) => HedgeAfter::Auto,
                Some(After::Percentile(percentile)) => HedgeAfter::Percentile(percentile),
                Some(After::Fixed(Span(span))) => HedgeAfter::Fixed(span),
            },
            initial: self.span(keys.initial, Duration::from_millis(800)),
            min: self.span(keys.min, Duration::from_millis(20)),
            max: self.span(keys.max, Duration::from_millis(1200)),
            max_extra: usize::from(keys.max_extra.unwrap_or(1)),
            methods: match &keys.methods {
                None => vec![http::Method::GET, http::Method::HEAD, http::Method::OPTIONS],
                Some(methods) => methods.iter().map(|method| method.0.clone()).collect(),
            },
            to: keys.to.as_deref().map(Into::into),
        };
        self.in_order(("hedge.min", hedge.min), ("hedge.max", hedge.max));
        if hedge.max > LONGEST_HEDGE_DELAY {
            self.error(&["hedge.max"], format!("at most {}", Span(LONGEST_HEDGE_DELAY)));
        }
        match hedge.max_extra {
            0 => self.error(&["hedge.max_extra"], "expected 1 or more; `hedge: off` turns hedging off"),
            n if n > usize::from(MOST_EXTRA) => {
                self.error(&["hedge.max_extra"], format!("at most {MOST_EXTRA}"));
            }
            _ => {}
        }
        for method in &hedge.methods {
            if !matches!(method.as_str(), "GET" | "HEAD" | "OPTIONS" | "PUT" | "DELETE") {
                let message = format!(
                    "{method} cannot be repeated by its method alone; a route says `idempotent: true`, \
                     a call brings an Idempotency-Key"
                );
                self.error(&["hedge.methods"], message);
            }
        }
        hedge
    }

    fn bulkhead(&self, keys: &raw::Bulkhead) -> Bulkhead {
        let bulkhead = Bulkhead {
            max_concurrent: keys.max_concurrent.unwrap_or(100),
            max_queue: keys.max_queue.unwrap_or(100),
        };
        if !(1..=MOST_CALLS).contains(&bulkhead.max_concurrent) {
            let message = format!("expected 1 to {MOST_CALLS}; `bulkhead: off` takes the bound away");
            self.error(&["bulkhead.max_concurrent"], message);
        }
        if bulkhead.max_queue > MOST_CALLS {
            self.error(&["bulkhead.max_queue"], format!("expected 0 to {MOST_CALLS}"));
        }
        bulkhead
    }

    fn breaker(&self, keys: &raw::Breaker) -> Breaker {
        let rate =
            |rate: &Option<Switch<Unit<Percent>>>| rate.as_ref().and_then(Switch::on).map(|unit| unit.0);
        let breaker = Breaker {
            consecutive_failures: match &keys.consecutive_failures {
                None => Some(5),
                Some(Switch::Off) => None,
                Some(Switch::On(failures)) => Some(*failures),
            },
            failure_rate: rate(&keys.failure_rate),
            slow_rate: rate(&keys.slow_rate),
            slow_after: self.positive("breaker.slow_after", keys.slow_after, Duration::from_secs(5)),
            window: self.span(keys.window, Duration::from_secs(60)),
            min_requests: keys.min_requests.unwrap_or(20),
            open_for: self.positive("breaker.open_for", keys.open_for, Duration::from_secs(30)),
            max_open_for: self.span(keys.max_open_for, Duration::from_secs(300)),
            half_open_probes: keys.half_open_probes.unwrap_or(1),
            failure_statuses: self.statuses(
                "breaker.failure_statuses",
                keys.failure_statuses.as_deref(),
                &FAILURE_STATUSES,
            ),
            fair_chance: self.span(keys.fair_chance, Duration::from_secs(1)),
        };
        self.judge_breaker(&breaker);
        breaker
    }

    fn judge_breaker(&self, breaker: &Breaker) {
        self.in_order(("breaker.open_for", breaker.open_for), ("breaker.max_open_for", breaker.max_open_for));
        if breaker.consecutive_failures == Some(0) {
            self.error(&["breaker.consecutive_failures"], "expected 1 or more; `off` turns this rule off");
        }
        for (key, rate) in
            [("breaker.failure_rate", breaker.failure_rate), ("breaker.slow_rate", breaker.slow_rate)]
        {
            if rate.is_some_and(|rate| rate.fraction() == 0.0) {
                self.error(&[key], "expected more than 0%; `off` turns this rule off");
            }
        }
        // Ten buckets of less than a tenth of a second each would be noise.
        if breaker.window < Duration::from_secs(1) {
            self.error(&["breaker.window"], "expected a duration of at least 1s");
        }
        if breaker.min_requests == 0 {
            self.error(&["breaker.min_requests"], "expected 1 or more");
        }
        if breaker.half_open_probes == 0 {
            self.error(&["breaker.half_open_probes"], "expected 1 or more: without a probe it never closes");
        }
        if breaker.consecutive_failures.is_none()
            && breaker.failure_rate.is_none()
            && breaker.slow_rate.is_none()
        {
            let path = self.report.setter(self.sections, &["breaker.consecutive_failures", "breaker"]);
            self.report.warning(&path, "all rules are off, so the breaker never opens");
        }
    }

    /// A percentile sends a hedge for all calls above it; a budget for fewer is the bound that counts.
    fn warn_of_unpaid_percentile(&self, stages: &Stages) {
        let Some(HedgeAfter::Percentile(percentile)) = stages.hedge.as_ref().map(|hedge| hedge.after) else {
            return;
        };
        let (wanted, paid) = (100.0 - percentile.hundredths(), stages.extra_load.ratio.hundredths());
        if wanted > paid + 0.001 {
            let path = self.report.setter(self.sections, &["hedge.after", "extra_load.ratio"]);
            let message = format!(
                "p{} hedges {} of the calls, but extra_load.ratio pays for {}",
                percentile.to_string().trim_end_matches('%'),
                Percent::new(wanted),
                stages.extra_load.ratio
            );
            self.report.warning(&path, message);
        }
    }
}
