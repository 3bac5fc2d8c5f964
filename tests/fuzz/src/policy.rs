//! The policy file.

use std::path::Path;

use hedgerow::config::{self, Config, Problems, Severity, Stages};
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
        include_str!("../../config/invalid/duplicate-keys.yaml"),
        include_str!("../../config/invalid/impossible-values.yaml"),
        include_str!("../../config/invalid/rewrites.yaml"),
        include_str!("../../config/invalid/syntax.yaml"),
        "{}",
        "defaults: { hedge: { after: p90, initial: 800ms, min: 20ms, max: 1200ms, max_extra: 1 } }",
        "defaults: { deadline: { default: 30s, max: 15m }, extra_load: { ratio: 10%, floor: 1/s } }",
        "defaults: { bulkhead: { max_concurrent: 1, max_queue: 0 } }",
        "defaults: { breaker: { open_for: 30s, max_open_for: 5m, half_open_probes: 1, slow_rate: 80% } }",
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
    let lines = text.split('\n').count();
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
        check_stages(&policy.stages);
        policy.routes.iter().for_each(|route| check_stages(&route.stages));
    }
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
    if let Some(breaker) = &stages.breaker {
        assert!(breaker.open_for <= breaker.max_open_for && breaker.half_open_probes > 0, "{breaker:?}");
    }
}
