//! The stages that bound and repeat attempts: deadline, hedge, bulkhead, breaker, retry, rate limit.

use std::time::Duration;

use http::Method;

use super::Resolver;
use crate::config::notation::{After, MethodName, Switch, Unit};
use crate::config::{Breaker, Bulkhead, Covers, Deadline, Hedge, HedgeAfter, RateLimit, Retry, raw};
use crate::units::{Percent, Rate, Span};

const FAILURE_STATUSES: [u16; 4] = [500, 502, 503, 504];
/// Beyond it a number of permits, places or tokens is a slip, and the counters stay small.
const MOST_CALLS: u32 = 1_000_000;
/// Each second: one in a hundred hours. Below it is a slip, and the time to the next token overflows.
const LEAST_RATE: f64 = 0.01 / 3600.0;
/// The histogram of response times ends here, so no percentile is ever longer.
const LONGEST_HEDGE_DELAY: Duration = Duration::from_secs(120);
const MOST_EXTRA: u8 = 10;
/// No deadline holds more tries than this with a wait worth the name between them.
pub(super) const MOST_ATTEMPTS: u32 = 100;

impl Resolver<'_> {
    pub(super) fn deadline(&self, keys: &raw::Deadline) -> Deadline {
        let deadline = Deadline {
            default: self.positive("deadline.default", keys.default, Deadline::BUILT_IN.default),
            max: self.positive("deadline.max", keys.max, Deadline::BUILT_IN.max),
            reserve: self.span(keys.reserve, Deadline::BUILT_IN.reserve),
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
            let (default, max) = (Span(deadline.default), Span(deadline.max));
            self.warning(
                &["deadline.default", "deadline.max"],
                format!("default ({default}) is cut to max ({max})"),
            );
        }
        deadline
    }

    pub(super) fn hedge(&self, keys: &raw::Hedge) -> Hedge {
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
            methods: self.methods("hedge.methods", keys.methods.as_deref()),
            to: keys.to.as_deref().map(Into::into),
        };
        self.in_order(("hedge.min", hedge.min), ("hedge.max", hedge.max));
        // A fixed delay has no beginning, and the built-in one is cut by itself.
        if keys.initial.is_some() && hedge.initial > hedge.max && !matches!(hedge.after, HedgeAfter::Fixed(_))
        {
            let (initial, max) = (Span(hedge.initial), Span(hedge.max));
            self.warning(
                &["hedge.initial", "hedge.max"],
                format!("initial ({initial}) is cut to max ({max})"),
            );
        }
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
        hedge
    }

    pub(super) fn bulkhead(&self, keys: &raw::Bulkhead) -> Bulkhead {
        let bulkhead = Bulkhead {
            max_concurrent: keys.max_concurrent.unwrap_or(100),
            max_queue: keys.max_queue.unwrap_or(100),
        };
        if !(1..=MOST_CALLS as usize).contains(&bulkhead.max_concurrent) {
            let message = format!("expected 1 to {MOST_CALLS}; `bulkhead: off` takes the bound away");
            self.error(&["bulkhead.max_concurrent"], message);
        }
        if bulkhead.max_queue > MOST_CALLS as usize {
            self.error(&["bulkhead.max_queue"], format!("expected 0 to {MOST_CALLS}"));
        }
        bulkhead
    }

    pub(super) fn breaker(&self, keys: &raw::Breaker) -> Breaker {
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
            is_shared: keys.shared.is_some_and(|flag| flag.0),
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
            self.warning(
                &["breaker.consecutive_failures", "breaker"],
                "all rules are off, so the breaker never opens",
            );
        }
    }

    pub(super) fn retry(&self, keys: &raw::Retry) -> Retry {
        let retry = Retry {
            max_attempts: keys.max_attempts.unwrap_or(2),
            backoff: self.positive("retry.backoff", keys.backoff, Duration::from_millis(100)),
            max_backoff: self.span(keys.max_backoff, Duration::from_secs(2)),
            methods: self.methods("retry.methods", keys.methods.as_deref()),
        };
        self.in_order(("retry.backoff", retry.backoff), ("retry.max_backoff", retry.max_backoff));
        match retry.max_attempts {
            0 | 1 => {
                let message = "expected 2 or more, the first included; `retry: off` turns retries off";
                self.error(&["retry.max_attempts"], message);
            }
            n if n > MOST_ATTEMPTS => {
                self.error(&["retry.max_attempts"], format!("at most {MOST_ATTEMPTS}"));
            }
            _ => {}
        }
        retry
    }

    pub(super) fn rate_limit(&self, keys: &raw::RateLimit) -> RateLimit {
        let Some(Unit(rate)) = keys.rate else {
            if !self.is_written("rate_limit.rate") {
                self.error(&["rate_limit"], "expected `rate`, such as 200/s, 30/m or 0.5/s");
            }
            return RateLimit {
                rate: Rate::per_second(1.0),
                burst: 1,
                max_pause: Duration::ZERO,
                is_shared: false,
            };
        };
        if rate.in_a_second() < LEAST_RATE {
            let message = "expected 0.01/h or more; `rate_limit: off` takes the bound away";
            self.error(&["rate_limit.rate"], message);
        }
        if rate.in_a_second() > f64::from(MOST_CALLS) {
            self.error(&["rate_limit.rate"], format!("at most {MOST_CALLS}/s"));
        }
        // What one second brings. The cast is safe: it is bounded, and saturates.
        let of_a_second = rate.in_a_second().clamp(1.0, f64::from(MOST_CALLS)) as u32;
        let limit = RateLimit {
            rate,
            burst: keys.burst.unwrap_or(of_a_second),
            max_pause: self.span(keys.max_pause, Duration::from_secs(60)),
            is_shared: keys.shared.is_some_and(|flag| flag.0),
        };
        if !(1..=MOST_CALLS).contains(&limit.burst) {
            self.error(&["rate_limit.burst"], format!("expected 1 to {MOST_CALLS}"));
        }
        limit
    }

    /// Methods that a policy may call repeatable. The others are so by what a route or a call says.
    fn methods(&self, key: &str, methods: Option<&[MethodName]>) -> Vec<Method> {
        let Some(methods) = methods else { return vec![Method::GET, Method::HEAD, Method::OPTIONS] };
        for (index, MethodName(method)) in methods.iter().enumerate() {
            if !matches!(method.as_str(), "GET" | "HEAD" | "OPTIONS" | "PUT" | "DELETE") {
                let message = format!(
                    "{method} cannot be repeated by its method alone; a route says `idempotent: true`, \
                     a call brings an Idempotency-Key"
                );
                self.report.error(&self.setter(&[key]).index(index), message);
            }
        }
        methods.iter().map(|method| method.0.clone()).collect()
    }
}
