//! What came and what did not: in numbers for a program, in a sentence for a model, and in a paragraph that
//! teaches one to read it.

use std::collections::BTreeMap;
use std::time::Duration;

use http::StatusCode;
use http::header::{self, HeaderMap};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::item::{DEADLINE, Missing, NOT_AWAITED};
use super::millis;
use crate::telemetry::metrics::{FanoutCall, FanoutOutcome, Source};
use crate::wire::preference;

/// Names that a sentence lists; the others are counted.
const MOST_NAMED: usize = 20;

/// The language of the sentence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    /// English.
    English,
    /// Chinese, in simplified characters.
    Chinese,
}

impl Language {
    /// The one that a request prefers; English where it does not say.
    pub fn of(headers: &HeaderMap) -> Self {
        match preference::best(headers, &header::ACCEPT_LANGUAGE, &["en", "zh"]) {
            "zh" => Self::Chinese,
            _ => Self::English,
        }
    }

    /// For `Content-Language`.
    pub fn tag(self) -> &'static str {
        match self {
            Self::English => "en",
            Self::Chinese => "zh-Hans",
        }
    }
}

/// What is known of each call.
#[derive(Debug)]
pub struct Tally {
    calls: Vec<Known>,
    total: Duration,
    language: Language,
    wants_prompt: bool,
    results: usize,
    real_results: usize,
    good_results: usize,
    required_open: usize,
}

#[derive(Debug)]
struct Known {
    id: String,
    is_optional: bool,
    standing: Standing,
}

#[derive(Debug)]
enum Standing {
    Open,
    Result { source: Source, status: StatusCode, is_truncated: bool },
    Missing(Missing),
}

impl Tally {
    /// Of calls with these names, and whether each is optional, that have `total` to come.
    pub fn new(calls: Vec<(String, bool)>, total: Duration, language: Language, wants_prompt: bool) -> Self {
        let required_open = calls.iter().filter(|(_, is_optional)| !is_optional).count();
        let known = |(id, is_optional)| Known { id, is_optional, standing: Standing::Open };
        let calls = calls.into_iter().map(known).collect();
        Self {
            calls,
            total,
            language,
            wants_prompt,
            results: 0,
            real_results: 0,
            good_results: 0,
            required_open,
        }
    }

    /// A call has a result.
    pub fn results(&mut self, at: usize, source: Source, status: StatusCode, is_truncated: bool) {
        self.results += 1;
        self.real_results += usize::from(source != Source::Degraded);
        // That there is no such thing is an answer.
        let is_answer = status.as_u16() < 400 || matches!(status, StatusCode::NOT_FOUND | StatusCode::GONE);
        self.good_results += usize::from(source != Source::Degraded && is_answer);
        self.close(at, Standing::Result { source, status, is_truncated });
    }

    /// A call has none.
    pub fn misses(&mut self, at: usize, missing: Missing) {
        self.close(at, Standing::Missing(missing));
    }

    fn close(&mut self, at: usize, standing: Standing) {
        let known = &mut self.calls[at];
        self.required_open -= usize::from(!known.is_optional);
        known.standing = standing;
    }

    /// A call's name.
    pub fn id(&self, at: usize) -> &str {
        &self.calls[at].id
    }

    /// How many calls there are.
    pub fn len(&self) -> usize {
        self.calls.len()
    }

    /// Whether there are none, which no plan allows.
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// How long they had to come, from the request's arrival.
    pub fn deadline_ms(&self) -> u64 {
        millis(self.total)
    }

    /// The language of what is said.
    pub fn language(&self) -> Language {
        self.language
    }

    /// How many calls have a result that is no placeholder, and no refusal: a status below 400, 404 or 410.
    pub fn good_results(&self) -> usize {
        self.good_results
    }

    /// Whether all calls have ended that are not optional, of which there are some.
    pub fn only_optional_are_open(&self) -> bool {
        self.required_open == 0 && self.calls.iter().any(|known| !known.is_optional)
    }

    /// The calls of which nothing is known yet.
    pub fn open(&self) -> impl Iterator<Item = usize> + '_ {
        let is_open = |known: &Known| matches!(known.standing, Standing::Open);
        self.calls.iter().enumerate().filter(move |(_, known)| is_open(known)).map(|(at, _)| at)
    }

    /// How it stands as a whole.
    pub fn outcome(&self) -> FanoutOutcome {
        match self.is_complete() {
            true => FanoutOutcome::Complete,
            false if self.results == 0 => FanoutOutcome::Empty,
            false => FanoutOutcome::Partial,
        }
    }

    /// Every call that has ended, for the metrics.
    pub fn calls(&self) -> impl Iterator<Item = FanoutCall> + '_ {
        self.calls.iter().filter_map(|known| match &known.standing {
            Standing::Open => None,
            Standing::Result { source, .. } => Some((*source).into()),
            Standing::Missing(missing) => Some(match missing.error {
                DEADLINE => FanoutCall::Deadline,
                "circuit_open" => FanoutCall::CircuitOpen,
                "upstream_status" => FanoutCall::UpstreamStatus,
                NOT_AWAITED => FanoutCall::NotAwaited,
                _ => FanoutCall::Error,
            }),
        })
    }

    fn is_complete(&self) -> bool {
        self.calls.iter().all(|known| known.is_optional || matches!(known.standing, Standing::Result { .. }))
    }

    fn missing(&self) -> impl Iterator<Item = (&Known, &Missing)> {
        self.calls.iter().filter_map(|known| match &known.standing {
            Standing::Missing(missing) => Some((known, missing)),
            Standing::Open | Standing::Result { .. } => None,
        })
    }

    /// The names of results from this source.
    fn from(&self, source: Source) -> Vec<&str> {
        self.which(|standing| matches!(standing, Standing::Result { source: from, .. } if *from == source))
    }

    fn which(&self, is_meant: impl Fn(&Standing) -> bool) -> Vec<&str> {
        self.calls.iter().filter(|known| is_meant(&known.standing)).map(|known| known.id.as_str()).collect()
    }

    /// What is told of it after so many milliseconds.
    pub fn summary(&self, elapsed_ms: u64) -> Summary<'_> {
        Summary { tally: self, elapsed_ms }
    }

    /// The sentence for the model; `None` when there is nothing to warn of.
    fn warning(&self) -> Option<String> {
        let mut reasons: BTreeMap<Reason, Vec<&str>> = BTreeMap::new();
        for (known, missing) in self.missing() {
            reasons.entry(Reason(missing.error)).or_default().push(&known.id);
        }
        let (stale, degraded) = (self.from(Source::Stale), self.from(Source::Degraded));
        let truncated =
            self.which(|standing| matches!(standing, Standing::Result { is_truncated: true, .. }));
        let words = Words { language: self.language, deadline_ms: self.deadline_ms() };
        let mut parts: Vec<_> =
            reasons.iter().map(|(reason, names)| words.unavailable(names, reason.0)).collect();
        for (names, what) in [(stale, Flaw::Stale), (degraded, Flaw::Degraded), (truncated, Flaw::Truncated)]
        {
            if !names.is_empty() {
                parts.push(words.flawed(&names, what));
            }
        }
        let mut refused: BTreeMap<u16, Vec<&str>> = BTreeMap::new();
        for known in &self.calls {
            if let Standing::Result { status, source, .. } = known.standing
                && status.as_u16() >= 400
                && source != Source::Degraded
            {
                refused.entry(status.as_u16()).or_default().push(&known.id);
            }
        }
        parts.extend(refused.iter().map(|(status, names)| words.answered(names, *status)));
        (!parts.is_empty()).then(|| words.sentence(&parts, self.real_results, self.calls.len()))
    }
}

/// What may be wrong with a result.
#[derive(Clone, Copy)]
enum Flaw {
    Stale,
    Degraded,
    Truncated,
}

/// Orders the deadline, which is most often the reason, before the others.
#[derive(Debug, PartialEq, Eq)]
struct Reason(&'static str);

impl Ord for Reason {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let rank = |reason: &Self| (reason.0 != DEADLINE, reason.0);
        rank(self).cmp(&rank(other))
    }
}

impl PartialOrd for Reason {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// The sentence's parts in its language.
struct Words {
    language: Language,
    deadline_ms: u64,
}

impl Words {
    fn unavailable(&self, names: &[&str], reason: &str) -> String {
        let (names, ms) = (self.list(names), self.deadline_ms);
        match (self.language, reason) {
            (Language::English, DEADLINE) => format!("{names} unavailable (deadline {ms} ms)"),
            (Language::English, reason) => format!("{names} unavailable ({})", reason.replace('_', " ")),
            (Language::Chinese, DEADLINE) => format!("{names} 数据缺失（截止时间 {ms} 毫秒）"),
            (Language::Chinese, reason) => format!("{names} 数据缺失（{reason}）"),
        }
    }

    fn flawed(&self, names: &[&str], what: Flaw) -> String {
        let what = match (self.language, what) {
            (Language::English, Flaw::Stale) => "out of date (kept answers)",
            (Language::English, Flaw::Degraded) => "replaced by a placeholder",
            (Language::English, Flaw::Truncated) => "cut off",
            (Language::Chinese, Flaw::Stale) => "数据已过期（缓存）",
            (Language::Chinese, Flaw::Degraded) => "仅有占位数据",
            (Language::Chinese, Flaw::Truncated) => "内容被截断",
        };
        format!("{} {what}", self.list(names))
    }

    /// An error of the upstream's that is a result, since it may be the answer: no such ticker.
    fn answered(&self, names: &[&str], status: u16) -> String {
        match self.language {
            Language::English => format!("{} answered {status}", self.list(names)),
            Language::Chinese => format!("{} 返回状态 {status}", self.list(names)),
        }
    }

    fn list(&self, names: &[&str]) -> String {
        let (shown, rest) = names.split_at(names.len().min(MOST_NAMED));
        match (self.language, rest.len()) {
            (Language::English, 0) => shown.join(", "),
            (Language::English, rest) => format!("{} and {rest} more", shown.join(", ")),
            (Language::Chinese, 0) => shown.join("、"),
            (Language::Chinese, rest) => format!("{}等另外 {rest} 项", shown.join("、")),
        }
    }

    fn sentence(&self, parts: &[String], came: usize, of: usize) -> String {
        match self.language {
            Language::English => format!(
                "Warning: {}. Analysis based on {came}/{of} sources. Do not estimate what is missing.",
                parts.join("; ")
            ),
            Language::Chinese => {
                format!("警告：{}。本次分析基于 {came}/{of} 个数据源，请勿估算缺失的数据。", parts.join("；"))
            }
        }
    }

    fn prompt(&self) -> &'static str {
        match self.language {
            Language::English => {
                "Tool results come as one JSON object. `results` holds what arrived in time, under each call's id. \
                 `missing` lists the calls without a result and why. Use only what is in `results`. Never invent, \
                 estimate or recall a value for a call in `missing`: say that it was unavailable. A result whose \
                 `source` is `stale` may be out of date and one whose `source` is `degraded` is a placeholder, not \
                 data; a result with `truncated` is cut off. If `warning` is not null, repeat its facts in your \
                 answer, and limit your conclusions to the sources that came."
            }
            Language::Chinese => {
                "工具结果是一个 JSON 对象。`results` 按调用的 id 给出按时返回的内容；`missing` 列出没有结果的调用及原因。\
                 只能使用 `results` 中的数据。对于 `missing` 中的调用，不得编造、估算或凭记忆补充，应说明数据不可用。\
                 `source` 为 `stale` 的结果可能已过期，为 `degraded` 的只是占位内容而非数据；带 `truncated` 的结果已被截断。\
                 如果 `warning` 不为 null，请在回答中说明其内容，并且只根据已返回的数据源下结论。"
            }
        }
    }
}

/// All that is told of a fan-out beside its results.
#[derive(Debug)]
pub struct Summary<'a> {
    tally: &'a Tally,
    elapsed_ms: u64,
}

impl Serialize for Summary<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { tally, elapsed_ms } = self;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("complete", &tally.is_complete())?;
        map.serialize_entry("warning", &tally.warning())?;
        if tally.wants_prompt {
            let words = Words { language: tally.language, deadline_ms: 0 };
            map.serialize_entry("system_prompt", words.prompt())?;
        }
        map.serialize_entry("elapsed_ms", elapsed_ms)?;
        let count = |source| tally.from(source).len();
        map.serialize_entry(
            "counts",
            &Counts {
                calls: tally.calls.len(),
                results: tally.results,
                missing: tally.missing().count(),
                hedge: count(Source::Hedge),
                backup: count(Source::Backup),
                cache: count(Source::Cache),
                stale: count(Source::Stale),
                degraded: count(Source::Degraded),
            },
        )?;
        map.serialize_entry("missing", &MissingCalls(tally))?;
        map.end()
    }
}

/// How many calls came to what.
#[derive(Serialize)]
struct Counts {
    calls: usize,
    results: usize,
    missing: usize,
    hedge: usize,
    backup: usize,
    cache: usize,
    stale: usize,
    degraded: usize,
}

struct MissingCalls<'a>(&'a Tally);

impl Serialize for MissingCalls<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.missing().map(|(known, missing)| (&known.id, missing)))
    }
}

impl Serialize for Missing {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        self.serialize_into(&mut map)?;
        map.end()
    }
}

impl Missing {
    /// Its keys.
    pub(super) fn serialize_into<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        map.serialize_entry("error", self.error)?;
        map.serialize_entry("message", &self.message)?;
        if let Some(status) = self.status {
            map.serialize_entry("status", &status.as_u16())?;
        }
        if let Some(wait) = self.retry_after {
            map.serialize_entry("retry_after_ms", &millis(wait))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn tally(ids: &[&str], language: Language) -> Tally {
        let calls = ids.iter().map(|id| ((*id).to_owned(), false)).collect();
        Tally::new(calls, Duration::from_millis(1500), language, false)
    }

    fn told(tally: &Tally) -> Value {
        serde_json::to_value(tally.summary(7)).unwrap()
    }

    #[test]
    fn when_all_have_come_there_is_nothing_to_warn_of() {
        let mut tally = tally(&["a", "b", "c"], Language::English);
        for (at, source) in [Source::Hedge, Source::Backup, Source::Cache].into_iter().enumerate() {
            tally.results(at, source, StatusCode::OK, false);
        }
        let expected = json!({
            "complete": true, "warning": null, "elapsed_ms": 7, "missing": {},
            "counts": { "calls": 3, "results": 3, "missing": 0, "hedge": 1, "backup": 1, "cache": 1, "stale": 0, "degraded": 0 },
        });
        assert_eq!(told(&tally), expected);
    }

    #[test]
    fn the_warning_names_what_is_missing_and_why_in_both_languages() {
        for (language, expected) in [
            (
                Language::English,
                "Warning: TSLA, NVDA unavailable (deadline 1500 ms); MSFT unavailable (circuit open); \
                 META, AMD unavailable (upstream status); AAPL out of date (kept answers); \
                 GOOG, IBM replaced by a placeholder. Analysis based on 2/9 sources. Do not estimate what is missing.",
            ),
            (
                Language::Chinese,
                "警告：TSLA、NVDA 数据缺失（截止时间 1500 毫秒）；MSFT 数据缺失（circuit_open）；\
                 META、AMD 数据缺失（upstream_status）；AAPL 数据已过期（缓存）；GOOG、IBM 仅有占位数据。\
                 本次分析基于 2/9 个数据源，请勿估算缺失的数据。",
            ),
        ] {
            let ids = ["META", "TSLA", "GOOG", "MSFT", "INTC", "NVDA", "AAPL", "AMD", "IBM"];
            let mut tally = tally(&ids, language);
            // In whatever order they come.
            for at in [5, 1] {
                tally.misses(at, Missing::deadline("late"));
            }
            for at in [7, 0] {
                tally.misses(at, Missing::because("upstream_status", "answered 503"));
            }
            tally.misses(3, Missing::because("circuit_open", "open"));
            tally.results(4, Source::Primary, StatusCode::OK, false);
            tally.results(6, Source::Stale, StatusCode::OK, false);
            tally.results(8, Source::Degraded, StatusCode::OK, false);
            tally.results(2, Source::Degraded, StatusCode::OK, false);
            assert_eq!(told(&tally)["warning"], expected);
            assert_eq!(told(&tally)["complete"], false);
        }
    }

    /// A thousand names of the greatest length would be a book.
    #[test]
    fn the_warning_is_bounded_whatever_is_missing() {
        for (language, rest) in
            [(Language::English, " and 980 more unavailable"), (Language::Chinese, "等另外 980 项")]
        {
            let ids: Vec<_> = (0..1000).map(|at| format!("{at:0>200}")).collect();
            let mut tally = tally(&ids.iter().map(String::as_str).collect::<Vec<_>>(), language);
            (0..1000).for_each(|at| tally.misses(at, Missing::deadline("late")));
            let told = told(&tally);
            let warning = told["warning"].as_str().unwrap();
            assert!(warning.contains(rest) && warning.contains("0/1000"), "{warning}");
            assert!(warning.len() < MOST_NAMED * 205 + 200, "{} bytes", warning.len());
            // The first of them are named, and all are listed.
            assert!(warning.contains(&ids[19]) && !warning.contains(&ids[20]));
            assert_eq!(told["missing"].as_object().unwrap().len(), 1000);
        }
    }

    #[test]
    fn a_missing_call_tells_all_that_is_known() {
        let mut tally = tally(&["a", "b"], Language::English);
        let status = Some(StatusCode::SERVICE_UNAVAILABLE);
        tally.misses(0, Missing { status, ..Missing::because("upstream_status", "quotes answered 503") });
        let retry_after = Some(Duration::from_micros(11_999_600));
        tally.misses(1, Missing { retry_after, ..Missing::because("circuit_open", "quotes is failing") });
        let expected = json!({
            "a": { "error": "upstream_status", "message": "quotes answered 503", "status": 503 },
            "b": { "error": "circuit_open", "message": "quotes is failing", "retry_after_ms": 12_000 },
        });
        assert_eq!(told(&tally)["missing"], expected);
    }

    #[test]
    fn the_prompt_is_given_to_who_asks_and_speaks_the_language() {
        assert!(told(&tally(&["a"], Language::English)).get("system_prompt").is_none());
        for (language, begin) in [(Language::English, "Tool results"), (Language::Chinese, "工具结果")] {
            let calls = vec![("a".to_owned(), false)];
            let told = told(&Tally::new(calls, Duration::ZERO, language, true));
            let prompt = told["system_prompt"].as_str().unwrap();
            assert!(prompt.starts_with(begin), "{prompt}");
            for key in
                ["`results`", "`missing`", "`source`", "`stale`", "`degraded`", "`truncated`", "`warning`"]
            {
                assert!(prompt.contains(key), "{key} in {prompt}");
            }
        }
    }

    /// What is known of a call: still open, a result, or missing.
    fn standing() -> impl Strategy<Value = Option<Result<Source, Missing>>> {
        let source = prop::sample::select(vec![
            Source::Primary,
            Source::Hedge,
            Source::Collapsed,
            Source::Cache,
            Source::Backup,
            Source::Stale,
            Source::Degraded,
        ]);
        let missing =
            prop::sample::select(vec![DEADLINE, NOT_AWAITED, "circuit_open", "upstream_status", "internal"]);
        prop_oneof![
            Just(None),
            source.prop_map(|source| Some(Ok(source))),
            missing.prop_map(|why| Some(Err(Missing::because(why, "so it is")))),
        ]
    }

    proptest! {
        #[test]
        fn numbers_names_and_sentence_agree(
            standings in prop::collection::vec((any::<bool>(), standing()), 1..40),
            is_chinese: bool,
        ) {
            let language = if is_chinese { Language::Chinese } else { Language::English };
            let calls: Vec<_> =
                standings.iter().enumerate().map(|(at, (is_optional, _))| (format!("#{at}#"), *is_optional)).collect();
            let mut tally = Tally::new(calls, Duration::from_secs(1), language, false);
            for (at, (_, standing)) in standings.iter().enumerate().rev() {
                match standing {
                    None => {}
                    Some(Ok(source)) => tally.results(at, *source, StatusCode::OK, false),
                    Some(Err(missing)) => tally.misses(at, missing.clone()),
                }
            }
            let is_result = |standing: &Option<Result<Source, Missing>>| matches!(standing, Some(Ok(_)));
            let results = standings.iter().filter(|(_, standing)| is_result(standing)).count();
            let open = standings.iter().filter(|(_, standing)| standing.is_none()).count();
            let is_complete = standings.iter().all(|(is_optional, standing)| *is_optional || is_result(standing));
            let told = told(&tally);
            prop_assert_eq!(&told["complete"], is_complete);
            let is_real = |standing: &Option<Result<Source, Missing>>| {
                matches!(standing, Some(Ok(source)) if *source != Source::Degraded)
            };
            let real = standings.iter().filter(|(_, standing)| is_real(standing)).count();
            prop_assert_eq!(tally.good_results(), real);
            prop_assert_eq!(tally.open().count(), open);
            prop_assert_eq!(tally.calls().count(), standings.len() - open);
            prop_assert_eq!(&told["counts"]["results"], results);
            let missing: Vec<_> = told["missing"].as_object().unwrap().keys().cloned().collect();
            prop_assert_eq!(&told["counts"]["missing"], missing.len());
            prop_assert_eq!(missing.len() + results + open, standings.len());
            // In the order of the calls.
            let is_missing = |standing: &Option<Result<Source, Missing>>| matches!(standing, Some(Err(_)));
            let named = standings.iter().enumerate().filter(|(_, (_, standing))| is_missing(standing));
            let named: Vec<_> = named.map(|(at, _)| format!("#{at}#")).collect();
            prop_assert_eq!(&missing, &named);
            let has_required = standings.iter().any(|(is_optional, _)| !is_optional);
            let required_open = standings.iter().any(|(is_optional, standing)| !is_optional && standing.is_none());
            prop_assert_eq!(tally.only_optional_are_open(), has_required && !required_open);

            let doubtful = standings.iter().filter(|(_, standing)| {
                matches!(standing, Some(Ok(Source::Stale | Source::Degraded)))
            });
            let is_warned = !missing.is_empty() || doubtful.count() > 0;
            let warning = told["warning"].as_str().unwrap_or_default();
            prop_assert_eq!(!warning.is_empty(), is_warned);
            let degraded = told["counts"]["degraded"].as_u64().unwrap() as usize;
            let based_on = format!("{}/{}", results - degraded, standings.len());
            prop_assert!(!is_warned || warning.contains(&based_on), "{}", warning);
            if named.len() <= MOST_NAMED {
                prop_assert!(named.iter().all(|name| warning.contains(name.as_str())), "{}", warning);
            }
        }
    }
}
