//! The policy file.

use std::path::Path;
use std::time::Duration;

use hedgerow::config::{self, Config, FallbackStep, Problems, Severity, Stages};
use http::Method;

use crate::Target;

/// A policy's text: it gives a policy that the rest of hedgerow can rely on, or problems with a place.
pub const POLICY: Target = Target {
    check,
    inputs: 1_500,
    seeds: &[
        include_str!("../../../config.example.yaml"),
        include_str!("../../config/valid/anchors.yaml"),
        include_str!("../../config/valid/numbers.yaml"),
        include_str!("../../config/valid/off.yaml"),
        include_str!("../../config/valid/places.yaml"),
        include_str!("../../config/valid/stages.yaml"),
        include_str!("../../config/doubtful/backups.yaml"),
        include_str!("../../config/doubtful/retries.yaml"),
        include_str!("../../config/doubtful/sharing.yaml"),
        include_str!("../../config/invalid/duplicate-keys.yaml"),
        include_str!("../../config/invalid/fallbacks.yaml"),
        include_str!("../../config/invalid/impossible-values.yaml"),
        include_str!("../../config/invalid/rewrites.yaml"),
        include_str!("../../config/invalid/syntax.yaml"),
        "{}",
        "defaults: { hedge: { after: p90, initial: 800ms, min: 20ms, max: 1200ms, max_extra: 1 } }",
        "defaults: { deadline: { default: 30s, max: 15m }, extra_load: { ratio: 10%, floor: 1/s } }",
        "defaults: { bulkhead: { max_concurrent: 1, max_queue: 0 } }",
        "defaults: { breaker: { open_for: 30s, max_open_for: 5m, half_open_probes: 1, slow_rate: 80% } }",
        "defaults: { retry: { max_attempts: 3, backoff: 1ms, max_backoff: 2s }, rate_limit: { rate: 1/h } }",
        "defaults: { coalesce: true, cache: { ttl: 1s, max_bytes: 1KiB }, fallback: [{ stale: 1s }] }",
        "a: &a [*a, *a]",
        "- ? !!binary x\n\t|2-\n",
    ],
};

fn check(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    // No file that a policy names can be there.
    match config::parse(text, Path::new("/nonexistent")) {
        Ok(loaded) => {
            check_problems(&loaded.warnings, text, Severity::Warning);
            check_config(&loaded.config);
            for url in ["http://a.example/v1/x?y", "https://quotes.example.com:8443/"] {
                let explained = loaded.explain(url, &Method::POST).expect("a plain URL can be explained");
                assert!(!explained.values.is_empty());
                let _ = explained.to_string();
            }
        }
        Err(problems) => {
            let has_error = problems.iter().any(|problem| problem.severity == Severity::Error);
            assert!(has_error, "refused without an error");
            check_problems(&problems, text, Severity::Error);
        }
    }
}

fn check_problems(problems: &Problems, text: &str, worst: Severity) {
    // A carriage return ends a line in YAML too (section 5.4).
    let lines = text.split(['\n', '\r']).count();
    for problem in problems.iter() {
        assert!((1..=lines + 1).contains(&problem.place.line), "{problem} in {lines} lines");
        assert!(problem.place.column >= 1, "{problem}");
        assert!(!problem.message.is_empty(), "{problem}");
        assert!(worst == Severity::Error || problem.severity == worst, "{problem}");
    }
    let shown = problems.to_string();
    assert_eq!(shown.is_empty(), problems.is_empty());
    assert!(!problems.summary().contains('\n'), "a summary is one line");
}

fn check_config(config: &Config) {
    assert!(config.threads > 0);
    assert!(config.hash.len() == 16 && config.hash.bytes().all(|b| b.is_ascii_hexdigit()));
    for (nth, policy) in config.policies().enumerate() {
        assert_eq!(policy.index, nth);
        for stages in policy.routes.iter().map(|route| &route.stages).chain([&policy.stages]) {
            check_stages(stages);
            for backup in backups(stages) {
                assert_ne!(*backup, *policy.name, "an upstream backs itself up");
                let place = config.upstream(backup).map(|backup| backup.place());
                assert!(place.is_some_and(|place| place.is_some()), "{backup} leads nowhere");
            }
        }
    }
}

fn backups(stages: &Stages) -> impl Iterator<Item = &str> {
    let steps = stages.fallback.iter().filter_map(|step| match step {
        FallbackStep::Upstream(name) => Some(&**name),
        FallbackStep::Stale(_) | FallbackStep::Degraded(_) => None,
    });
    stages.hedge.as_ref().and_then(|hedge| hedge.to.as_deref()).into_iter().chain(steps)
}

fn check_stages(stages: &Stages) {
    if let Some(hedge) = &stages.hedge {
        assert!(hedge.min <= hedge.max, "{hedge:?}");
    }
    if let Some(bulkhead) = &stages.bulkhead {
        assert!(bulkhead.max_concurrent > 0, "{bulkhead:?}");
    }
    if let Some(deadline) = &stages.deadline {
        assert!(!deadline.max.is_zero() && !deadline.default.is_zero(), "{deadline:?}");
    }
    if let Some(retry) = &stages.retry {
        assert!(retry.max_attempts >= 2 && !retry.backoff.is_zero(), "{retry:?}");
        assert!(retry.backoff <= retry.max_backoff, "{retry:?}");
    }
    if let Some(limit) = &stages.rate_limit {
        assert!(limit.burst >= 1 && limit.rate.in_a_second() > 0.0, "{limit:?}");
        let refill = Duration::try_from_secs_f64(limit.rate.in_a_second().recip());
        assert!(refill.is_ok_and(|refill| !refill.is_zero()), "{limit:?}");
    }
    if let Some(coalesce) = &stages.coalesce {
        assert!(coalesce.max_body > 0, "{coalesce:?}");
    }
    if let Some(cache) = &stages.cache {
        assert!(cache.max_body > 0 && cache.max_body as u64 <= cache.max_bytes, "{cache:?}");
        assert!(cache.ttl.is_none_or(|ttl| !ttl.is_zero()), "{cache:?}");
    }
    for step in stages.fallback.iter() {
        match step {
            FallbackStep::Upstream(_) => {}
            FallbackStep::Stale(age) => assert!(!age.is_zero(), "{step:?}"),
            FallbackStep::Degraded(answer) => {
                assert!((200..=599).contains(&answer.status.as_u16()), "{step:?}");
            }
        }
    }
    if let Some(breaker) = &stages.breaker {
        assert!(breaker.open_for <= breaker.max_open_for && breaker.half_open_probes > 0, "{breaker:?}");
    }
}
