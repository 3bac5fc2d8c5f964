//! What is wrong with a policy, where, and how it is told.
//!
//! All problems of a file are told at once, each with its line, column and path, since a person who
//! fixes them one by one needs as many deployments. Two notations: [`Problems`] prints for a terminal
//! with the source line and a pointer; [`Problems::summary`] is one line for log and `/status`, and
//! quotes nothing of the file.

use std::fmt;
use std::sync::Arc;

use super::quoting::unquotable;
use super::secret::sounds_secret;

/// A line and column, both from 1; columns count characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// From 1.
    pub line: usize,
    /// From 1.
    pub column: usize,
}

impl Place {
    /// The file's first character: for what is wrong with the file as a whole.
    pub const START: Self = Self { line: 1, column: 1 };

    /// A place; what the parser does not know (0) becomes the start.
    pub fn new(line: u64, column: u64) -> Self {
        let one_up = |n: u64| usize::try_from(n).unwrap_or(usize::MAX).max(1);
        Self { line: one_up(line), column: one_up(column) }
    }
}

/// One step of a [`Path`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Segment {
    /// Into a mapping.
    Key(String),
    /// Into a list, from 0.
    Index(usize),
}

/// A place in the policy by its keys, such as `upstreams.quotes.hosts[0]`. What is printed of it shows no value that
/// was written as a key.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Path(Vec<Segment>);

impl Path {
    /// The whole policy.
    pub fn root() -> Self {
        Self::default()
    }

    /// The path of `keys`, from the root.
    pub fn of<'a>(keys: impl IntoIterator<Item = &'a str>) -> Self {
        Self(keys.into_iter().map(|key| Segment::Key(key.to_owned())).collect())
    }

    /// One key deeper.
    pub fn key(&self, key: &str) -> Self {
        self.push(Segment::Key(key.to_owned()))
    }

    /// One item deeper.
    pub fn index(&self, index: usize) -> Self {
        self.push(Segment::Index(index))
    }

    /// As many steps deeper as `below` has.
    pub fn join(&self, below: &Self) -> Self {
        Self(self.0.iter().chain(&below.0).cloned().collect())
    }

    fn push(&self, segment: Segment) -> Self {
        let mut segments = self.0.clone();
        segments.push(segment);
        Self(segments)
    }

    /// The steps.
    pub fn segments(&self) -> &[Segment] {
        &self.0
    }

    /// Whether what stands here may be a secret, so that its value is not to be shown: where secrets belong, and
    /// where a slip may have put one. A slip is a misspelt key too, so that all of `rewrite`, `degraded` and
    /// `shared_state` counts but what is known to be none, and any key that is called like a credential.
    pub fn may_be_secret(&self) -> bool {
        let mut keys = self.keys();
        while let Some(key) = keys.next() {
            match key {
                "rewrite" => return keys.next() != Some("path"),
                "degraded" => return !matches!(keys.next(), Some("status" | "body")),
                "shared_state" => return !matches!(keys.next(), Some("timeout" | "quorum" | "prefix")),
                "headers" | "header" | "set" | "otlp" => return true,
                _ if sounds_secret(key) => return true,
                _ => {}
            }
        }
        false
    }

    /// Where the name of a key's file is expected, and someone may have written the key itself.
    pub(super) fn is_key_file(&self) -> bool {
        matches!(self.0.last(), Some(Segment::Key(key)) if key == "ca_key" || key == "client_key")
    }

    /// `upstreams.NAME.rewrite.headers.remove[0]`, the name of a field.
    pub(super) fn is_removed_field(&self) -> bool {
        matches!(self.0.as_slice(), [.., Segment::Key(list), Segment::Index(_)] if list == "remove")
    }

    /// Whether the last key looks like a whole line of a mapping.
    pub(super) fn has_odd_key(&self) -> bool {
        matches!(self.0.last(), Some(Segment::Key(key)) if key.contains(ODD))
    }

    /// The keys, without the name of the upstream: that may be anything.
    fn keys(&self) -> impl Iterator<Item = &str> {
        let is_name = |nth: usize| nth == 1 && self.0[0] == Segment::Key("upstreams".into());
        self.0.iter().enumerate().filter(move |(nth, _)| !is_name(*nth)).filter_map(|(_, segment)| {
            match segment {
                Segment::Key(key) => Some(key.as_str()),
                Segment::Index(_) => None,
            }
        })
    }

    /// `upstreams.NAME.rewrite.headers.set.FIELD`, and `degraded.headers.FIELD` of a fallback in any
    /// section: the places where `${env:…}` is replaced. `set` and `headers` themselves count, where someone may
    /// have written text instead of a mapping.
    pub fn is_header_value(&self) -> bool {
        self.is_in_upstream(&["rewrite", "headers", "set"]) || self.is_in_degraded_headers()
    }

    fn is_in_degraded_headers(&self) -> bool {
        let is_key = |segment: &Segment, name: &str| matches!(segment, Segment::Key(key) if key == name);
        let section = match self.0.as_slice() {
            [top, below @ ..] if is_key(top, "defaults") => below,
            [top, _, routes, _, below @ ..] if is_key(top, "upstreams") && is_key(routes, "routes") => below,
            [top, _, below @ ..] if is_key(top, "upstreams") => below,
            _ => return false,
        };
        match section {
            [fallback, _, degraded, headers, ..] => {
                is_key(fallback, "fallback") && is_key(degraded, "degraded") && is_key(headers, "headers")
            }
            _ => false,
        }
    }

    /// `shared_state.redis`, where `${env:…}` is replaced too. What is below counts, where someone may have written a
    /// list of URLs.
    pub(super) fn is_redis_url(&self) -> bool {
        let is_key = |segment: &Segment, name: &str| matches!(segment, Segment::Key(key) if key == name);
        matches!(self.0.as_slice(), [top, key, ..] if is_key(top, "shared_state") && is_key(key, "redis"))
    }

    /// `upstreams.NAME.rewrite.path`, where `${name}` is a group.
    pub fn is_rewrite_path(&self) -> bool {
        self.is_in_upstream(&["rewrite", "path"])
    }

    fn is_in_upstream(&self, keys: &[&str]) -> bool {
        let is_key = |segment: &Segment, name: &str| matches!(segment, Segment::Key(key) if key == name);
        match self.0.as_slice() {
            [top, _, below @ ..] if is_key(top, "upstreams") => {
                below.len() >= keys.len() && below.iter().zip(keys).all(|(segment, key)| is_key(segment, key))
            }
            _ => false,
        }
    }
}

/// What no key has; behind it begins what was to be its value.
const ODD: [char; 3] = [':', '=', ' '];

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (nth, segment) in self.0.iter().enumerate() {
            match segment {
                Segment::Key(key) if key.contains(ODD) && self.may_be_secret() => {
                    write!(f, ".{}…", key.split(ODD).next().unwrap_or_default())?;
                }
                Segment::Key(key) if nth == 0 => f.write_str(key)?,
                Segment::Key(key) => write!(f, ".{key}")?,
                Segment::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

/// As it is shown: the keys may be a secret's.
impl fmt::Debug for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Whether a problem keeps the policy from being used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The policy is refused.
    Error,
    /// The policy is used; it probably does not do what its author thinks.
    Warning,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Error or warning.
    pub severity: Severity,
    /// Where.
    pub place: Place,
    /// Of what; the root for the file as a whole.
    pub path: Path,
    /// What was expected and what was found. Never the value of a secret.
    pub message: String,
}

impl Problem {
    /// What makes the policy unusable.
    pub fn error(place: Place, path: Path, message: impl Into<String>) -> Self {
        Self { severity: Severity::Error, place, path, message: message.into() }
    }

    /// What should be looked at.
    pub fn warning(place: Place, path: Path, message: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, place, path, message: message.into() }
    }
}

/// `12:7: upstreams.quotes.hedge.aftr: unknown key`.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: ", self.place.line, self.place.column)?;
        if self.severity == Severity::Warning {
            f.write_str("warning: ")?;
        }
        if !self.path.segments().is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.message)
    }
}

/// The problems of one file, in its order.
#[derive(Clone)]
pub struct Problems {
    file: Arc<str>,
    source: Arc<str>,
    list: Vec<Problem>,
}

impl Problems {
    /// The problems of `file`, whose text is `source`.
    pub fn new(file: &str, source: &str, mut list: Vec<Problem>) -> Self {
        list.sort_by_key(|problem| problem.place);
        Self { file: file.into(), source: source.into(), list }
    }

    /// In the file's order.
    pub fn iter(&self) -> impl Iterator<Item = &Problem> {
        self.list.iter()
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// In one line, for the log and `/status`; after ten only their number. Source lines are not
    /// quoted.
    pub fn summary(&self) -> String {
        const MOST: usize = 10;
        let shown = self.list.iter().take(MOST).map(|problem| format!("{}:{problem}", self.file));
        let summary = shown.collect::<Vec<_>>().join("; ");
        match self.list.len().checked_sub(MOST) {
            None | Some(0) => summary,
            Some(more) => format!("{summary}; and {more} more"),
        }
    }
}

/// Each problem with its source line and a pointer, as compilers print them; without them where the line may
/// hold a secret.
impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hidden = unquotable(&self.source);
        for problem in &self.list {
            writeln!(f, "{}:{problem}", self.file)?;
            if hidden.contains(&problem.place.line) {
                continue;
            }
            let line = self.source.lines().nth(problem.place.line - 1).unwrap_or_default();
            write_pointer(f, problem.place, line)?;
        }
        Ok(())
    }
}

/// Without the source, which may hold secrets.
impl fmt::Debug for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.list).finish()
    }
}

impl std::error::Error for Problems {}

/// The most of a source line that is shown on each side of the pointer.
const CONTEXT: usize = 60;

fn write_pointer(f: &mut fmt::Formatter<'_>, place: Place, line: &str) -> fmt::Result {
    if line.trim().is_empty() {
        return Ok(());
    }
    let before = place.column - 1;
    let skipped = before.saturating_sub(CONTEXT);
    // Tabs and control characters have no width of their own on every terminal.
    let shown: String =
        line.chars().skip(skipped).take(2 * CONTEXT).map(|c| if c.is_control() { ' ' } else { c }).collect();
    let number = place.line.to_string();
    writeln!(f, "  {number} | {}", shown.trim_end())?;
    writeln!(f, "  {:width$} | {:indent$}^", "", "", width = number.len(), indent = before - skipped)
}
