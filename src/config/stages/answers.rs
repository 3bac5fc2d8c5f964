//! The stages that answer without a call of their own: coalesce, cache, fallback.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, StatusCode};

use super::Resolver;
use crate::config::de::did_you_mean;
use crate::config::fields::{fields, vary_name};
use crate::config::notation::{Switch, Unit};
use crate::config::problem::{Path, Severity};
use crate::config::{Cache, Coalesce, Degraded, FallbackStep, raw};
use crate::units::{ByteSize, Span};

/// Of an answer that is shared or kept.
const MAX_BODY: usize = 1 << 20;
/// The most that one answer that is shared or kept may hold: it is in memory as a whole, beside others.
const MOST_BODY: usize = 1 << 30;
const MAX_BYTES: usize = 64 << 20;
/// What a kept answer takes beside its body: half a kilobyte, and its fields with 128 bytes each beside their text.
const BESIDE_BODY: usize = 4 << 10;
/// Longest fallback; nobody waits for more.
const MOST_STEPS: usize = 16;

/// What a degraded answer's body may ask for.
const PLACEHOLDERS: [&str; 3] = ["error", "upstream", "retry_after_ms"];

/// The fallback that holds in a section, and where it was written.
#[derive(Debug, Clone, Default)]
pub(super) struct Chain {
    /// With the place in the list that was written.
    steps: Vec<(usize, raw::FallbackStep)>,
    /// The section that wrote it.
    section: Path,
}

impl Chain {
    pub(super) fn narrowed(&self, own: Option<&Switch<Vec<raw::FallbackStep>>>, path: &Path) -> Self {
        match own {
            None => self.clone(),
            Some(Switch::Off) => Self::default(),
            Some(Switch::On(steps)) => {
                Self { steps: steps.iter().cloned().enumerate().collect(), section: path.clone() }
            }
        }
    }

    /// Takes the steps to the upstream `name` away; whether there was one.
    pub(super) fn forget(&mut self, name: &str) -> bool {
        let before = self.steps.len();
        self.steps.retain(|(_, step)| step.upstream.as_deref() != Some(name));
        self.steps.len() < before
    }
}

impl Resolver<'_> {
    pub(super) fn coalesce(&self, keys: &raw::Coalesce) -> Coalesce {
        let coalesce = Coalesce {
            max_body: keys.max_body.map_or(MAX_BODY, |Unit(ByteSize(bytes))| bytes),
            vary: self.vary("coalesce.vary", keys.vary.as_deref()),
        };
        if coalesce.max_body == 0 {
            self.error(&["coalesce.max_body"], "expected more than 0B; `coalesce: off` shares nothing");
        } else if coalesce.max_body > MOST_BODY {
            self.error(&["coalesce.max_body"], format!("at most {}", ByteSize(MOST_BODY)));
        }
        coalesce
    }

    pub(super) fn cache(&self, keys: &raw::Cache) -> Cache {
        let bytes = |Unit(ByteSize(bytes))| bytes;
        let max_bytes = keys.max_bytes.map_or(MAX_BYTES, bytes);
        // The built-in bound on one answer shrinks with that on all by itself, so only a written one can be
        // wrong.
        let max_body = keys.max_body.map_or(MAX_BODY.min(max_bytes), bytes);
        if max_bytes == 0 {
            self.error(&["cache.max_bytes"], "expected more than 0B; `cache: off` keeps nothing");
        } else if max_body == 0 {
            self.error(&["cache.max_body"], "expected more than 0B; `cache: off` keeps nothing");
        } else if max_body > MOST_BODY {
            self.error(&["cache.max_body"], format!("at most {}", ByteSize(MOST_BODY)));
        } else if max_body > max_bytes {
            let (body, all) = (ByteSize(max_body), ByteSize(max_bytes));
            let message = format!("max_body ({body}) is larger than max_bytes ({all})");
            self.error(&["cache.max_body", "cache.max_bytes"], message);
        } else if max_bytes < BESIDE_BODY {
            let message = format!(
                "keeps next to nothing: an answer takes up to {} beside its body",
                ByteSize(BESIDE_BODY)
            );
            self.warning(&["cache.max_bytes"], message);
        } else if keys.max_body.is_some() && max_bytes - max_body < BESIDE_BODY {
            let (body, all) = (ByteSize(max_body), ByteSize(max_bytes));
            let message = format!(
                "an answer of max_body ({body}) does not fit into max_bytes ({all}): it takes up to {} more",
                ByteSize(BESIDE_BODY)
            );
            self.warning(&["cache.max_body", "cache.max_bytes"], message);
        }
        if keys.ttl.is_some_and(|Unit(Span(ttl))| ttl.is_zero()) {
            let message = "expected a duration longer than 0s; leave it out to go by what origins say";
            self.error(&["cache.ttl"], message);
        }
        Cache {
            ttl: keys.ttl.map(|Unit(Span(ttl))| ttl),
            stale_if_error: self.span(keys.stale_if_error, Duration::ZERO),
            stale_while_revalidate: self.span(keys.stale_while_revalidate, Duration::ZERO),
            max_bytes: max_bytes as u64,
            max_body,
            vary: self.vary("cache.vary", keys.vary.as_deref()),
            is_shared: keys.shared.is_some_and(|flag| flag.0),
        }
    }

    fn vary(&self, key: &str, names: Option<&[String]>) -> Vec<HeaderName> {
        let mut fields = Vec::new();
        for (index, name) in names.unwrap_or_default().iter().enumerate() {
            match vary_name(name) {
                Ok(field) if fields.contains(&field) => {}
                Ok(field) => fields.push(field),
                Err(message) => self.report.error(&self.setter(&[key]).index(index), message),
            }
        }
        fields
    }

    pub(super) fn fallback(&self, chain: &Chain) -> Arc<[FallbackStep]> {
        let list = chain.section.key("fallback");
        if chain.steps.len() > MOST_STEPS {
            self.report.error(&list, format!("{} steps; at most {MOST_STEPS}", chain.steps.len()));
            return Arc::default();
        }
        let mut last: Option<usize> = None;
        let mut steps = Vec::with_capacity(chain.steps.len());
        for (index, keys) in &chain.steps {
            let path = list.index(*index);
            if let Some(earlier) = last
                && self.report.has_room(Severity::Warning)
            {
                let line = self.report.place(&list.index(earlier)).line;
                self.report
                    .warning(&path, format!("never reached: `degraded` in line {line} always answers"));
            }
            let Some(step) = self.fallback_step(keys, &path) else { continue };
            if matches!(step, FallbackStep::Degraded(_)) {
                last.get_or_insert(*index);
            }
            steps.push(step);
        }
        steps.into()
    }

    fn fallback_step(&self, keys: &raw::FallbackStep, path: &Path) -> Option<FallbackStep> {
        match (&keys.upstream, keys.stale, &keys.degraded) {
            (Some(name), None, None) => Some(FallbackStep::Upstream(name.as_str().into())),
            (None, Some(Unit(Span(age))), None) => {
                if age.is_zero() {
                    self.report.error(&path.key("stale"), "expected a duration longer than 0s");
                }
                Some(FallbackStep::Stale(age))
            }
            (None, None, Some(keys)) => {
                Some(FallbackStep::Degraded(self.degraded(keys, &path.key("degraded"))))
            }
            (None, None, None) => {
                self.judge_empty_step(path);
                None
            }
            _ => {
                let message = "expected one of upstream, stale, degraded; write each as an item of its own";
                self.report.error(path, message);
                None
            }
        }
    }

    /// Keys that are wrong have been told and are missing here.
    fn judge_empty_step(&self, path: &Path) {
        if self.report.is_null(&path.key("degraded")) {
            let message = "expected a mapping; `degraded: {}` is the built-in answer";
            self.report.error(&path.key("degraded"), message);
        } else if self.report.has_no_keys(path) {
            self.report.error(path, "expected one of upstream, stale, degraded");
        }
    }

    fn degraded(&self, keys: &raw::Degraded, path: &Path) -> Degraded {
        let status = keys.status.unwrap_or(503);
        let status = match StatusCode::from_u16(status) {
            Ok(status) if (200..=599).contains(&status.as_u16()) => status,
            _ => {
                self.report.error(&path.key("status"), format!("expected 200 to 599; found `{status}`"));
                StatusCode::SERVICE_UNAVAILABLE
            }
        };
        if let Some(body) = &keys.body {
            self.judge_body(status, body, &path.key("body"));
        }
        Degraded {
            status,
            headers: fields(keys.headers.as_ref(), &path.key("headers"), self.report, self.sources),
            body: keys.body.as_deref().map(Into::into),
        }
    }

    fn judge_body(&self, status: StatusCode, body: &str, path: &Path) {
        // RFC 9110 sections 15.3.5, 15.3.6 and 15.4.5.
        if matches!(status.as_u16(), 204 | 205 | 304) {
            self.report.error(path, format!("an answer with status {} has no body", status.as_u16()));
        }
        // JSON is full of braces; a slip is what is nearly a placeholder.
        for word in words_in_braces(body).filter(|word| !PLACEHOLDERS.contains(word)) {
            let hint = did_you_mean(word, PLACEHOLDERS);
            if !hint.is_empty() {
                self.report.warning(path, format!("`{{{word}}}` stays as it is{hint}"));
            }
        }
    }
}

/// `error` of `{error}`: what looks like a placeholder.
fn words_in_braces(text: &str) -> impl Iterator<Item = &str> {
    let is_word = |word: &&str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
    text.split('{').skip(1).filter_map(|rest| rest.split_once('}')).map(|(word, _)| word).filter(is_word)
}
