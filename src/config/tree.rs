//! The policy's YAML as a tree in which every key and value knows its line and column.
//!
//! A person who reads `unknown key` wants to know where. serde's derived types forget that, so the
//! text becomes this tree first: [`de`](super::de) fills the raw structs from it, and what is found
//! wrong later is looked up in it by path. Entries stay in the file's order and a key that stands
//! there twice stays twice, so that the second can be reported with the line of the first instead of
//! winning silently.
//!
//! The text comes from outside and may be hostile: its size, its depth and what aliases may unfold to
//! are bounded before anything is built.

use std::fmt;
use std::ops::RangeInclusive;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_yaml::{DuplicateKeyPolicy, Location, NonFiniteFloatPolicy, Options, Spanned};

use super::problem::{Path, Place, Problem, Segment};

/// Longest policy file, in bytes: ten thousand upstreams fit, and a reload still takes no time.
pub(super) const MAX_FILE: usize = 1 << 20;
/// Deepest nesting. The policy itself needs seven.
const MAX_DEPTH: usize = 32;
/// What is said of a file that exceeds `MAX_DEPTH` or `MAX_NODES`.
const TOO_DEEP: &str = "the file nests deeper than 32 levels, or is too large";
/// Nodes that a file may hold or unfold to by aliases.
const MAX_NODES: usize = 250_000;
/// Nodes that aliases may add: enough for shared blocks, too little for a bomb.
const MAX_ALIASED: usize = 50_000;

/// A value and where it stands.
#[derive(Debug, Clone)]
pub(super) struct Node {
    /// Where the value begins; for an alias, where the alias stands.
    pub(super) place: Place,
    /// The lines on which its text is written, which an alias only points to.
    written: RangeInclusive<usize>,
    /// The value.
    pub(super) value: Value,
}

/// What YAML knows of a value by its look alone.
#[derive(Debug, Clone)]
pub(super) enum Value {
    /// Nothing, `~` or `null`.
    Null,
    /// `true` or `false`; the YAML 1.1 words (`on`, `yes`) are text.
    Bool(bool),
    /// A whole or broken number, as it is written.
    Number(String),
    /// Everything else.
    Text(String),
    /// A sequence.
    List(Vec<Node>),
    /// A mapping, in the file's order, duplicates included.
    Map(Vec<Entry>),
    /// Something wrong that was reported already: see [`Node::cut`].
    Cut,
}

/// One `key: value` of a mapping.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    /// The key.
    pub(super) key: String,
    /// Where the key stands.
    pub(super) place: Place,
    /// Its value.
    pub(super) value: Node,
}

impl Entry {
    /// Where to point when the entry is wrong: at the value on the same line, at the key of a block.
    pub(super) fn pointer(&self) -> Place {
        if self.value.value.is_scalar() { self.value.place } else { self.place }
    }
}

impl Value {
    fn is_scalar(&self) -> bool {
        match self {
            Self::Bool(_) | Self::Number(_) | Self::Text(_) => true,
            // A value that was left out begins wherever the next token does: the key is the better place.
            Self::Null | Self::List(_) | Self::Map(_) | Self::Cut => false,
        }
    }
}

impl Node {
    /// Where the value at `path` stands, or its nearest ancestor that is in the file; with the path as
    /// the file counts it. List indexes in `path` are those of the list that was read from the tree,
    /// from which cut items are missing.
    pub(super) fn locate(&self, path: &Path) -> (Place, Path) {
        let (place, path, _) = self.walk(path);
        (place, path)
    }

    /// Where the value at `path` stands, if it is in the file and not null.
    pub(super) fn exact_place(&self, path: &Path) -> Option<Place> {
        let (place, _, node) = self.walk(path);
        node.filter(|node| !matches!(node.value, Value::Null | Value::Cut)).map(|_| place)
    }

    /// The value at `path`.
    pub(super) fn get(&self, path: &Path) -> Option<&Value> {
        self.walk(path).2.map(|node| &node.value)
    }

    fn walk(&self, path: &Path) -> (Place, Path, Option<&Self>) {
        let (mut place, mut counted) = (self.place, Path::root());
        let mut node = Some(self);
        for segment in path.segments() {
            node = match (node.map(|node| &node.value), segment) {
                (Some(Value::Map(entries)), Segment::Key(key)) => {
                    counted = counted.key(key);
                    entries.iter().find(|entry| entry.key == *key).map(|entry| {
                        place = entry.pointer();
                        &entry.value
                    })
                }
                (Some(Value::List(items)), Segment::Index(index)) => {
                    let kept = items.iter().enumerate().filter(|(_, item)| !matches!(item.value, Value::Cut));
                    let found = kept.clone().nth(*index);
                    counted = counted.index(found.map_or(*index, |(original, _)| original));
                    found.map(|(_, item)| {
                        place = item.place;
                        item
                    })
                }
                (_, Segment::Key(key)) => {
                    counted = counted.key(key);
                    None
                }
                (_, Segment::Index(index)) => {
                    counted = counted.index(*index);
                    None
                }
            };
        }
        (place, counted, node)
    }

    /// The value of a key.
    pub(super) fn child_mut(&mut self, key: &str) -> Option<&mut Self> {
        match &mut self.value {
            Value::Map(entries) => {
                entries.iter_mut().find(|entry| entry.key == key).map(|entry| &mut entry.value)
            }
            _ => None,
        }
    }

    /// The values or items right below this node, which stands at `path`, with their paths.
    pub(super) fn children_mut(&mut self, path: &Path) -> Vec<(Path, &mut Self)> {
        match &mut self.value {
            Value::Map(entries) => {
                entries.iter_mut().map(|entry| (path.key(&entry.key), &mut entry.value)).collect()
            }
            Value::List(items) => {
                items.iter_mut().enumerate().map(|(index, item)| (path.index(index), item)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Calls `visit` for this node and every one below it.
    pub(super) fn for_each(&self, visit: &mut impl FnMut(&Path, Place, &Value)) {
        self.for_each_below(&Path::root(), self.place, visit);
    }

    fn for_each_below(&self, path: &Path, place: Place, visit: &mut impl FnMut(&Path, Place, &Value)) {
        visit(path, place, &self.value);
        match &self.value {
            Value::List(items) => {
                for (index, item) in items.iter().enumerate() {
                    item.for_each_below(&path.index(index), item.place, visit);
                }
            }
            Value::Map(entries) => {
                for entry in entries {
                    entry.value.for_each_below(&path.key(&entry.key), entry.pointer(), visit);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Text(_) | Value::Cut => {}
        }
    }

    /// Calls `visit` for each value that holds no others, with the lines on which it is written.
    pub(super) fn for_each_text(&self, visit: &mut impl FnMut(&Path, RangeInclusive<usize>, &Value)) {
        self.for_each_text_below(&Path::root(), visit);
    }

    fn for_each_text_below(&self, path: &Path, visit: &mut impl FnMut(&Path, RangeInclusive<usize>, &Value)) {
        match &self.value {
            Value::List(items) => {
                for (index, item) in items.iter().enumerate() {
                    item.for_each_text_below(&path.index(index), visit);
                }
            }
            Value::Map(entries) => {
                for entry in entries {
                    entry.value.for_each_text_below(&path.key(&entry.key), visit);
                }
            }
            value => visit(path, self.written.clone(), value),
        }
    }

    /// Takes the entry or item at `path` (as the file counts) out of what will be read; false when
    /// there is none. It leaves its place behind, so that paths found before stay true.
    pub(super) fn cut(&mut self, path: &Path) -> bool {
        if path.segments().is_empty() {
            return false;
        }
        let mut node = self;
        for segment in path.segments() {
            let child = match (&mut node.value, segment) {
                (Value::Map(entries), Segment::Key(key)) => {
                    entries.iter_mut().find(|entry| entry.key == *key).map(|entry| &mut entry.value)
                }
                (Value::List(items), Segment::Index(index)) => items.get_mut(*index),
                _ => None,
            };
            let Some(child) = child else { return false };
            node = child;
        }
        !matches!(std::mem::replace(&mut node.value, Value::Cut), Value::Cut)
    }
}

/// Reads the text of a policy.
///
/// # Errors
/// The one problem that keeps it from being read: its size, its syntax, or that it holds nothing.
pub(super) fn parse(text: &str) -> Result<Node, Problem> {
    if text.len() > MAX_FILE {
        let message = format!("the file has {} bytes; a policy has at most {MAX_FILE}", text.len());
        return Err(Problem::error(Place::START, Path::root(), message));
    }
    let mut spanned: SpannedNode = match serde_yaml::from_str_with_options(text, options()) {
        Ok(node) => node,
        Err(_) if holds_nothing(text) => return Err(empty()),
        Err(error) => return Err(syntax(&error)),
    };
    if matches!(spanned.value, SpannedValue::Null) {
        return Err(empty());
    }
    Ok(spanned.take(text))
}

fn empty() -> Problem {
    let message = "the file is empty; a policy that changes no default is written `{}`";
    Problem::error(Place::START, Path::root(), message)
}

/// Only white space, comments and document marks.
fn holds_nothing(text: &str) -> bool {
    text.trim_start_matches('\u{feff}').lines().all(|line| {
        let line = line.trim();
        line.is_empty() || line.starts_with('#') || line == "---" || line == "..."
    })
}

fn syntax(error: &serde_yaml::Error) -> Problem {
    use serde_yaml::Error as Yaml;

    let place = error.location().map_or(Place::START, Place::from);
    let message = match error.without_snippet() {
        Yaml::MultipleDocuments { .. } => "a second YAML document begins here; a policy is one".into(),
        Yaml::Budget { .. } => TOO_DEEP.into(),
        Yaml::NullIntoString { .. } | Yaml::Unexpected { .. } => "expected text as the key".into(),
        Yaml::RecursiveReferencesRequireWeakTypes { .. } => {
            "an alias inside its own anchor has no end".into()
        }
        Yaml::AliasError { error, .. } if matches!(**error, Yaml::AliasReplayLimitExceeded { .. }) => {
            format!("the aliases unfold to more than {MAX_ALIASED} values")
        }
        other => match plain_message(&other.to_string()) {
            message if message == "recursion limit exceeded" => TOO_DEEP.into(),
            message => message,
        },
    };
    Problem::error(place, Path::root(), message)
}

/// The library's message ends in the place, which is told apart here, and may have hints in further
/// lines that speak of its own interface.
fn plain_message(text: &str) -> String {
    let first = text.lines().next().unwrap_or_default();
    let message = first.split(" at line ").next().unwrap_or(first);
    message.trim_end_matches([',', ':']).to_owned()
}

fn options() -> Options {
    serde_yaml::options! {
        budget: serde_yaml::budget! {
            max_depth: MAX_DEPTH,
            max_nodes: MAX_NODES,
            max_aliases: 10_000,
            max_anchors: 10_000,
            flow_nesting_limit: MAX_DEPTH,
        },
        // Both entries come through, and `de` reports the second with the line of the first.
        duplicate_keys: DuplicateKeyPolicy::PassThrough,
        alias_limits: serde_yaml::alias_limits! { max_total_replayed_events: MAX_ALIASED },
        // `off` stays a word, so that `hedge: off` and `hedge: false` can both be told from `no`.
        strict_booleans: true,
        // `.nan` is as much text as any other word that no key takes.
        non_finite_float_policy: NonFiniteFloatPolicy::AsString,
        reject_unsupported_tags: true,
        with_snippet: false,
        emit_comments: false,
    }
}

impl From<Location> for Place {
    fn from(location: Location) -> Self {
        Self::new(location.line(), location.column())
    }
}

/// A node as the library hands it over; numbers still lack their text.
struct SpannedNode {
    location: Location,
    defined: Location,
    value: SpannedValue,
}

enum SpannedValue {
    Null,
    Bool(bool),
    Number,
    Text(String),
    List(Vec<SpannedNode>),
    Map(Vec<(Spanned<String>, SpannedNode)>),
}

impl SpannedNode {
    fn take(&mut self, text: &str) -> Node {
        let value = match &mut self.value {
            SpannedValue::Null => Value::Null,
            SpannedValue::Bool(value) => Value::Bool(*value),
            SpannedValue::Number => Value::Number(source_of(self.defined, text).to_owned()),
            SpannedValue::Text(value) => Value::Text(std::mem::take(value)),
            SpannedValue::List(items) => Value::List(items.iter_mut().map(|item| item.take(text)).collect()),
            SpannedValue::Map(entries) => Value::Map(
                entries
                    .iter_mut()
                    .map(|(key, value)| Entry {
                        key: std::mem::take(&mut key.value),
                        place: key.referenced.into(),
                        value: value.take(text),
                    })
                    .collect(),
            ),
        };
        let Place { line, .. } = self.defined.into();
        let more = if value.is_scalar() { source_of(self.defined, text).matches('\n').count() } else { 0 };
        Node { place: self.location.into(), written: line..=line + more, value }
    }
}

/// The characters that a location covers.
fn source_of(location: Location, text: &str) -> &str {
    let span = location.span();
    let range = span.byte_offset().zip(span.byte_len()).and_then(|(start, len)| {
        let start = usize::try_from(start).ok()?;
        Some(start..start.checked_add(usize::try_from(len).ok()?)?)
    });
    range.and_then(|range| text.get(range)).unwrap_or_default().trim()
}

impl<'de> Deserialize<'de> for SpannedNode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Spanned { value, referenced, defined } = Spanned::<SpannedValue>::deserialize(deserializer)?;
        Ok(Self { location: referenced, defined, value })
    }
}

impl<'de> Deserialize<'de> for SpannedValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyVisitor)
    }
}

struct AnyVisitor;

impl<'de> Visitor<'de> for AnyVisitor {
    type Value = SpannedValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("YAML")
    }

    fn visit_unit<E>(self) -> Result<SpannedValue, E> {
        Ok(SpannedValue::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<SpannedValue, E> {
        Ok(SpannedValue::Bool(value))
    }

    fn visit_i64<E>(self, _: i64) -> Result<SpannedValue, E> {
        Ok(SpannedValue::Number)
    }

    fn visit_u64<E>(self, _: u64) -> Result<SpannedValue, E> {
        Ok(SpannedValue::Number)
    }

    fn visit_i128<E>(self, _: i128) -> Result<SpannedValue, E> {
        Ok(SpannedValue::Number)
    }

    fn visit_u128<E>(self, _: u128) -> Result<SpannedValue, E> {
        Ok(SpannedValue::Number)
    }

    fn visit_f64<E>(self, _: f64) -> Result<SpannedValue, E> {
        Ok(SpannedValue::Number)
    }

    fn visit_str<E>(self, value: &str) -> Result<SpannedValue, E> {
        Ok(SpannedValue::Text(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<SpannedValue, E> {
        Ok(SpannedValue::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<SpannedValue, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element()? {
            items.push(item);
        }
        Ok(SpannedValue::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<SpannedValue, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = access.next_entry()? {
            entries.push(entry);
        }
        Ok(SpannedValue::Map(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(node: &Node) -> String {
        let Place { line, column } = node.place;
        match &node.value {
            Value::Null => format!("null@{line}:{column}"),
            Value::Bool(value) => format!("{value}@{line}:{column}"),
            Value::Number(text) => format!("#{text}@{line}:{column}"),
            Value::Text(text) => format!("{text:?}@{line}:{column}"),
            Value::Cut => "cut".into(),
            Value::List(items) => format!("[{}]", items.iter().map(shape).collect::<Vec<_>>().join(", ")),
            Value::Map(entries) => {
                let entries = entries
                    .iter()
                    .map(|e| format!("{}@{}:{}={}", e.key, e.place.line, e.place.column, shape(&e.value)));
                format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
            }
        }
    }

    fn message(text: &str) -> String {
        let problem = parse(text).expect_err("should be refused");
        format!("{}:{}: {}", problem.place.line, problem.place.column, problem.message)
    }

    #[test]
    fn every_key_and_value_knows_its_place() {
        let tree = parse("a: 1.10\nb:\n  - off\n  - \"5\"\n  - {c: false, d: }\n").unwrap();
        assert_eq!(
            shape(&tree),
            "{a@1:1=#1.10@1:4, b@2:1=[\"off\"@3:5, \"5\"@4:5, {c@5:6=false@5:9, d@5:16=null@5:17}]}"
        );
    }

    #[test]
    fn a_key_that_stands_twice_stays_twice() {
        let tree = parse("a: 1\nb: 2\na: 3\n").unwrap();
        assert_eq!(shape(&tree), "{a@1:1=#1@1:4, b@2:1=#2@2:4, a@3:1=#3@3:4}");
    }

    #[test]
    fn aliases_and_merges_stand_where_they_are_used() {
        let tree = parse("x: &x {k: 7}\ny: *x\nz: {<<: *x, l: 1}\n").unwrap();
        assert_eq!(
            shape(&tree),
            "{x@1:1={k@1:8=#7@1:11}, y@2:1={k@2:4=#7@2:4}, z@3:1={l@3:13=#1@3:16, k@3:9=#7@3:9}}"
        );
    }

    #[test]
    fn an_empty_file_is_no_policy() {
        for text in ["", "\n\n", "# nothing\n", "---\n", "--- \n# x\n...\n", "~", "null\n", "\u{feff}"] {
            assert_eq!(
                message(text),
                "1:1: the file is empty; a policy that changes no default is written `{}`",
                "{text:?}"
            );
        }
        assert_eq!(shape(&parse("{}").unwrap()), "{}");
    }

    #[test]
    fn what_would_unfold_without_end_is_refused() {
        let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for level in 1..9 {
            let inner = vec![format!("*a{}", level - 1); 10].join(", ");
            bomb.push_str(&format!("a{level}: &a{level} [{inner}]\n"));
        }
        assert_eq!(message(&bomb), "5:20: the aliases unfold to more than 50000 values");
        for deep in ["[".repeat(100_000), "- ".repeat(100_000), "{a: ".repeat(100_000)] {
            let message = message(&deep);
            assert!(message.ends_with(TOO_DEEP), "{message}");
        }
        assert_eq!(message("a: &a [*a]\n"), "1:8: an alias inside its own anchor has no end");
        let long = format!("a: {}", "x".repeat(MAX_FILE));
        assert_eq!(message(&long), "1:1: the file has 1048579 bytes; a policy has at most 1048576");
    }

    #[test]
    fn what_is_no_yaml_is_told_with_its_place() {
        for (text, expected) in [
            ("a: 1\n---\nb: 2\n", "3:1: a second YAML document begins here; a policy is one"),
            ("a: [1, 2\nb: 3\n", "2:2: illegal placement of ':' indicator"),
            ("a: 'x\n", "1:4: unclosed quote"),
            ("a: 1\n b: 2\n", "2:3: mapping values are not allowed in this context"),
            ("a: *nope\n", "1:4: alias references unknown anchor"),
            ("? [a]\n: 2\n", "1:3: expected text as the key"),
            ("~: 1\n", "1:1: expected text as the key"),
        ] {
            assert_eq!(message(text), expected, "{text:?}");
        }
        for text in ["a: !!int x\n", "a: !foo x\n", "a: \u{1}\n", "@", "a: b: c"] {
            message(text);
        }
    }
}
