//! Collects what [`build`](super::build) finds wrong, with the place in the file.
//!
//! A key that is inherited belongs to the section that set it: a bad value in the defaults is told once,
//! in its own line, however many upstreams inherit it.

use std::cell::RefCell;
use std::fmt::Display;

use super::de::MOST_PROBLEMS;
use super::problem::{Path, Place, Problem, Severity};
use super::tree::{Node, Value};

/// Problems so far.
pub(super) struct Report<'a> {
    tree: &'a Node,
    found: RefCell<Vec<Problem>>,
}

impl<'a> Report<'a> {
    /// For the file that `tree` was read from.
    pub(super) fn new(tree: &'a Node) -> Self {
        Self { tree, found: RefCell::default() }
    }

    /// What was found.
    pub(super) fn into_problems(self) -> Vec<Problem> {
        self.found.into_inner()
    }

    /// Where something stands, for messages that name two places.
    pub(super) fn place(&self, path: &Path) -> Place {
        self.tree.locate(path).0
    }

    /// The policy cannot be used because of what stands at `path`.
    pub(super) fn error(&self, path: &Path, message: impl Display) {
        self.add(Severity::Error, path, message);
    }

    /// What stands at `path` probably does not do what was meant.
    pub(super) fn warning(&self, path: &Path, message: impl Display) {
        self.add(Severity::Warning, path, message);
    }

    /// Whether a further problem of this kind would be told. Looking for its place costs a walk through the
    /// file, which ten thousand upstreams need not all do in vain.
    pub(super) fn has_room(&self, severity: Severity) -> bool {
        let found = self.found.borrow();
        found.iter().filter(|problem| problem.severity == severity).count() < MOST_PROBLEMS
    }

    /// The value, unless it is wrong; then that is noted.
    pub(super) fn check<T>(&self, path: &Path, result: Result<T, impl Display>) -> Option<T> {
        result.map_err(|message| self.error(path, message)).ok()
    }

    fn add(&self, severity: Severity, path: &Path, message: impl Display) {
        // Each kind by itself: a hundred warnings must not hide the error that makes the policy unusable.
        if !self.has_room(severity) {
            return;
        }
        let mut found = self.found.borrow_mut();
        let (place, path) = self.tree.locate(path);
        let problem = Problem { severity, place, path, message: message.to_string() };
        if !found.contains(&problem) {
            found.push(problem);
        }
    }

    /// Whether the file has something there, be it wrong: then that has been told.
    pub(super) fn is_written(&self, path: &Path) -> bool {
        match self.tree.get(path) {
            None | Some(Value::Null) => false,
            Some(Value::List(items)) => !items.is_empty(),
            Some(_) => true,
        }
    }

    /// Whether the file has the key there, with nothing under it.
    pub(super) fn is_null(&self, path: &Path) -> bool {
        matches!(self.tree.get(path), Some(Value::Null))
    }

    /// Whether the mapping there has nothing in it, not even something wrong.
    pub(super) fn has_no_keys(&self, path: &Path) -> bool {
        match self.tree.get(path) {
            Some(Value::Map(entries)) => entries.iter().all(|entry| matches!(entry.value.value, Value::Null)),
            None | Some(Value::Null) => true,
            Some(_) => false,
        }
    }

    /// The path of the first of `keys` (dotted, below a section) that the narrowest section sets; if none
    /// does, where the first key would stand in the narrowest section.
    pub(super) fn setter(&self, sections: &[Path], keys: &[&str]) -> Path {
        let below =
            |section: &Path, key: &str| key.split('.').fold(section.clone(), |path, key| path.key(key));
        let all: Vec<Path> =
            sections.iter().flat_map(|section| keys.iter().map(|key| below(section, key))).collect();
        let is_set = |path: &&Path| self.tree.exact_place(path).is_some();
        all.iter().find(is_set).or(all.first()).cloned().unwrap_or_default()
    }
}
