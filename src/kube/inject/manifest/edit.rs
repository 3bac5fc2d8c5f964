//! A patch made in the text itself, so that all that it does not touch stays as it was written: comments, order,
//! quotes, line ends.
//!
//! Each operation becomes one insertion or deletion at a place that is known from the one parse. So operations have
//! to mean nodes that are in the text already, by the numbers that they have there: lists grow at their ends first,
//! what moves the others comes last. [`inject`](super::super::inject()) and its reverse make their patches so.
//!
//! What cannot be changed in this way is refused with the reason: what is written in another place by an alias or
//! a merge, or in a style that needs more than a new line. The caller proves what comes out by reading it again.

use std::collections::HashSet;
use std::ops::Range;

use serde_json::Value;

use super::tree::{Entry, Kind, Node};
use super::write::{self, Quotes};
use crate::kube::inject::patch::{Operation, Patch, Pointer, index};

/// One change of the text.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Edit {
    /// What goes, in bytes; may be empty.
    pub(super) range: Range<usize>,
    /// What comes in its place.
    pub(super) text: String,
}

/// A hand that what is new is written in.
#[derive(Debug, Clone, Copy)]
pub(super) struct Style {
    pub(super) line_end: &'static str,
    pub(super) quotes: Quotes,
}

/// The changes that make `patch` in the document at `root` of `text`.
///
/// # Errors
/// Why it cannot be made in the text.
pub(super) fn edits(text: &str, root: &Node, style: Style, patch: &Patch) -> Result<Vec<Edit>, String> {
    let Style { line_end, quotes } = style;
    let removed = patch.operations().iter().filter_map(|operation| match operation {
        Operation::Remove { path } => Some(path),
        Operation::Add { .. } => None,
    });
    let editor = Editor { text, line_end, quotes, removed: removed.collect() };
    let mut edits: Vec<Edit> = Vec::with_capacity(patch.operations().len());
    for operation in patch.operations() {
        let edit = editor.edit(root, operation)?;
        // Each addition to a list's beginning moves the ones before.
        let is_first =
            matches!(operation, Operation::Add { path, .. } if path.steps().ends_with(&["0".into()]));
        let at = edits.iter().position(|before| is_first && before.range == edit.range);
        edits.insert(at.unwrap_or(edits.len()), edit);
    }
    Ok(edits)
}

/// Makes the changes. Those at one place are put one after the other.
pub(super) fn apply(text: &str, mut edits: Vec<Edit>) -> Result<String, String> {
    // Stable, so that those at one place stay in order; but what goes on with a line comes before a new one.
    edits.sort_by_key(|edit| (edit.range.start, edit.text.starts_with(['\r', '\n'])));
    let mut result = String::with_capacity(text.len() * 2);
    let mut done = 0;
    for edit in edits {
        let kept = text.get(done..edit.range.start).ok_or("two changes of the text meet in one place")?;
        result.push_str(kept);
        result.push_str(&edit.text);
        done = edit.range.end;
    }
    result.push_str(text.get(done..).ok_or("a change reaches past the end")?);
    Ok(result)
}

struct Editor<'a> {
    text: &'a str,
    line_end: &'a str,
    quotes: Quotes,
    /// What goes, by its path.
    removed: HashSet<&'a Pointer>,
}

/// A node on the way to a change.
#[derive(Clone, Copy)]
struct Step<'a> {
    node: &'a Node,
    /// The entry whose value it is, and the column of that entry's mapping.
    entry: Option<(&'a Entry, usize)>,
}

impl Editor<'_> {
    fn edit(&self, root: &Node, operation: &Operation) -> Result<Edit, String> {
        let (Operation::Add { path, .. } | Operation::Remove { path }) = operation;
        let (parents, last) = path.split_last().ok_or("the whole document would change")?;
        let root = Step { node: root, entry: None };
        let parent = parents.iter().try_fold(root, |step, key| self.child(step, key))?;
        match operation {
            Operation::Add { value, .. } => self.add(parent, last, value),
            Operation::Remove { .. } => self.remove(parent, &parents.iter().collect(), last),
        }
    }

    fn child<'a>(&self, step: Step<'a>, key: &str) -> Result<Step<'a>, String> {
        match &step.node.kind {
            Kind::Map { entries, .. } => {
                let entry = entries.iter().find(|entry| entry.name == key);
                let entry = entry.ok_or_else(|| format!("`{key}` comes from a merge"))?;
                Ok(Step { node: &entry.value, entry: Some((entry, step.node.column)) })
            }
            Kind::List { items, .. } => {
                let item = index(key).and_then(|index| items.get(index));
                Ok(Step { node: item.ok_or("a list is shorter than expected")?, entry: None })
            }
            Kind::Alias => Err("it is written by an alias".into()),
            Kind::Scalar => Err(format!("there is no `{key}`")),
        }
    }

    fn add(&self, parent: Step<'_>, last: &str, value: &Value) -> Result<Edit, String> {
        match &parent.node.kind {
            Kind::Map { is_flow, entries } => match entries.iter().find(|entry| entry.name == last) {
                Some(entry) => self.replace(entry, value),
                None if *is_flow => {
                    let places: Vec<&Node> = entries.iter().map(|entry| &entry.value).collect();
                    let starts: Vec<&Node> = entries.iter().map(|entry| &entry.key).collect();
                    let new = |lead: Option<(&str, &str)>| {
                        let value = self.flow(value, lead);
                        format!("{}: {value}", self.quotes.around(last))
                    };
                    self.add_in_brackets(parent.node, &starts, &places, new)
                }
                None => {
                    let column = parent.node.column;
                    let text = write::entry(last, value, column, self.line_end);
                    let end = entries.last().ok_or("a mapping is empty")?.end;
                    Ok(self.new_line(end, column, &text))
                }
            },
            Kind::List { is_flow: true, items } => {
                let places: Vec<&Node> = items.iter().collect();
                let new = |lead: Option<(&str, &str)>| self.flow(value, lead);
                if last == "-" || items.is_empty() {
                    return self.add_in_brackets(parent.node, &places, &places, new);
                }
                let first =
                    places.first().filter(|_| last == "0").ok_or("an item would go between others")?;
                let lead = self.lead(first.begin);
                let after = lead.map_or(" ".to_owned(), |lead| format!("{}{lead}", self.line_end));
                let text = format!("{},{after}", new(lead.map(|lead| (lead, self.step(parent.node, lead)))));
                Ok(Edit { range: first.begin..first.begin, text })
            }
            Kind::List { items, .. } => {
                let column = self.dash_column(parent)?;
                let text = format!("- {}", write::block(value, column + 2, self.line_end));
                if last == "-" {
                    let end = items.last().ok_or("a list is empty")?.span.end;
                    return Ok(self.new_line(end, column, &text));
                }
                // Right below the key, so that a comment over the first item stays with it.
                let (entry, _) =
                    parent.entry.filter(|_| last == "0").ok_or("an item would go between others")?;
                let first = items.first().ok_or("a list is empty")?;
                if entry.key.line >= first.line {
                    return Err("a list begins on the line of its key".into());
                }
                Ok(self.new_line(entry.key.span.end, column, &text))
            }
            Kind::Alias => Err("it is written by an alias".into()),
            Kind::Scalar => Err(format!("there is no place for `{last}`")),
        }
    }

    /// The value of a key that is there already: nothing, a scalar, or a pair of brackets with nothing in it.
    fn replace(&self, entry: &Entry, value: &Value) -> Result<Edit, String> {
        let is_small = match &entry.value.kind {
            Kind::Scalar => true,
            Kind::List { items, .. } => items.is_empty(),
            Kind::Map { entries, .. } => entries.is_empty(),
            Kind::Alias => false,
        };
        if !is_small {
            return Err(format!("`{}` is there already", entry.name));
        }
        let range = entry.value.span.clone();
        if !range.is_empty() {
            return Ok(Edit { range, text: write::flow(value, self.quotes) });
        }
        // Nothing is written, but the colon.
        let after = entry.end;
        if !self.text[..after].ends_with(':') {
            return Err("a key has no colon".into());
        }
        Ok(Edit { range: after..after, text: format!(" {}", write::flow(value, self.quotes)) })
    }

    /// At the end of what is in braces or brackets. `starts` and `ends` are what it holds.
    fn add_in_brackets(
        &self,
        parent: &Node,
        starts: &[&Node],
        ends: &[&Node],
        new: impl Fn(Option<(&str, &str)>) -> String,
    ) -> Result<Edit, String> {
        let (Some(start), Some(end)) = (starts.last(), ends.last()) else {
            let inside = parent.span.start + 1;
            return Ok(Edit { range: inside..inside, text: new(None) });
        };
        if end.span.is_empty() {
            return Err("the last value in a pair of brackets is left out".into());
        }
        let lead = self.lead(start.begin);
        let before = lead.map_or(" ".to_owned(), |lead| format!("{}{lead}", self.line_end));
        let text = format!(",{before}{}", new(lead.map(|lead| (lead, self.step(parent, lead)))));
        Ok(Edit { range: end.span.end..end.span.end, text })
    }

    fn flow(&self, value: &Value, lead: Option<(&str, &str)>) -> String {
        match lead {
            Some((lead, step)) => write::flow_lines(value, self.quotes, lead, step, self.line_end),
            None => write::flow(value, self.quotes),
        }
    }

    /// The white space before `at`, if there is nothing else on its line.
    fn lead(&self, at: usize) -> Option<&str> {
        let start = self.line_start(at);
        let lead = &self.text[start..at];
        (start > 0 && lead.trim().is_empty()).then_some(lead)
    }

    /// By how much what is in `parent` is indented, of which `lead` is the whole.
    fn step<'l>(&self, parent: &Node, lead: &'l str) -> &'l str {
        let line = &self.text[self.line_start(parent.begin)..];
        let outer = line.len() - line.trim_start_matches([' ', '\t']).len();
        lead.get(outer..).filter(|step| !step.is_empty()).unwrap_or("  ")
    }

    fn remove(&self, parent: Step<'_>, place: &Pointer, last: &str) -> Result<Edit, String> {
        let (is_flow, spans): (bool, Vec<Range<usize>>) = match &parent.node.kind {
            Kind::Map { is_flow, entries } => {
                (*is_flow, entries.iter().map(|entry| entry.key.begin..entry.end).collect())
            }
            Kind::List { is_flow, items } => {
                (*is_flow, items.iter().map(|item| item.begin..item.span.end).collect())
            }
            Kind::Alias => return Err("it is written by an alias".into()),
            Kind::Scalar => return Err(format!("there is no `{last}`")),
        };
        let at = match &parent.node.kind {
            Kind::Map { entries, .. } => entries.iter().position(|entry| entry.name == last),
            _ => index(last).filter(|at| *at < spans.len()),
        };
        let at = at.ok_or_else(|| format!("`{last}` comes from a merge"))?;
        let own = spans[at].clone();
        if is_flow {
            let stays = |at: usize| {
                let step = match &parent.node.kind {
                    Kind::Map { entries, .. } => entries[at].name.clone(),
                    _ => at.to_string(),
                };
                !self.removed.contains(&place.child(step))
            };
            let range = match (at.checked_sub(1), spans.get(at + 1)) {
                // With the comma before it, where that one stays between others.
                (Some(before), _) if (0..at).any(stays) => spans[before].end..own.end,
                (_, Some(next)) => own.start..next.start,
                _ => parent.node.span.start + 1..own.end,
            };
            return Ok(Edit { range, text: String::new() });
        }
        let (start, column) = match &parent.node.kind {
            Kind::List { .. } => {
                let column = self.dash_column(parent)?;
                (self.dash(own.start, column)?, column)
            }
            _ => (own.start, parent.node.column),
        };
        if self.text[self.line_start(start)..start].chars().count() != column
            || !self.text[self.line_start(start)..start].trim().is_empty()
        {
            return Err("what would go begins in the middle of a line".into());
        }
        Ok(Edit { range: self.lines(self.line_start(start), own.end), text: String::new() })
    }

    /// Whole lines, and the break before them where the last one has none.
    fn lines(&self, start: usize, end: usize) -> Range<usize> {
        match self.text[end..].find('\n') {
            Some(length) => start..end + length + 1,
            None => {
                let before = &self.text[..start];
                let before = before.strip_suffix('\n').unwrap_or(before);
                before.strip_suffix('\r').unwrap_or(before).len()..self.text.len()
            }
        }
    }

    /// A line of its own after the one on which `at` is.
    fn new_line(&self, at: usize, column: usize, text: &str) -> Edit {
        let rest = &self.text[at..];
        let line = rest.find('\n').map_or(rest, |length| &rest[..length]);
        let end = at + line.strip_suffix('\r').unwrap_or(line).len();
        Edit { range: end..end, text: format!("{}{}{text}", self.line_end, " ".repeat(column)) }
    }

    fn line_start(&self, at: usize) -> usize {
        self.text[..at].rfind('\n').map_or(0, |end| end + 1)
    }

    /// Of a block list: where its dashes are.
    fn dash_column(&self, list: Step<'_>) -> Result<usize, String> {
        if self.text[list.node.span.start..].starts_with('-')
            && let Kind::List { items, .. } = &list.node.kind
            && items.first().is_none_or(|first| first.begin > list.node.span.start)
        {
            return Ok(list.node.column);
        }
        // Dashes right below their key, not indented: the parser calls the first item their beginning.
        list.entry.map(|(_, column)| column).ok_or_else(|| "a list has no dashes of its own".into())
    }

    /// The dash of the item that begins at `at`.
    fn dash(&self, at: usize, column: usize) -> Result<usize, String> {
        let mut start = self.line_start(at);
        loop {
            let line = &self.text[start..];
            let (before, rest) = line.split_at_checked(column).unwrap_or((line, ""));
            if before.trim().is_empty() && rest.starts_with('-') {
                return Ok(start + column);
            }
            if start == 0
                || !line[..line.find('\n').unwrap_or(line.len())].trim().is_empty()
                    && start < self.line_start(at)
            {
                return Err("an item's dash is on the line of something else".into());
            }
            start = self.line_start(start - 1);
        }
    }
}
