//! A manifest's text as nodes that know where they are written.
//!
//! Values are read as `kubectl` reads them, which knows YAML 1.1: `yes` and `on` are booleans, `0644` is octal,
//! `<<` merges. What aliases unfold to is bounded.

use std::collections::HashMap;
use std::ops::Range;

use granit_parser::{Event, Marker, Parser, ScalarStyle, ScanError, Span, StructureStyle, Tag};
use serde_json::{Map, Number, Value};

/// Values that a document may hold, aliases unfolded. A real manifest has some thousands.
const MAX_VALUES: usize = 1_000_000;
/// Deepest nesting; custom resources with schemas in them have forty.
const MAX_DEPTH: usize = 128;

/// What is wrong with a text, and where: line and column from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    /// What is wrong.
    pub message: String,
}

impl Fault {
    fn new(mark: &Marker, message: impl Into<String>) -> Self {
        Self { line: mark.line(), column: mark.col() + 1, message: message.into() }
    }
}

impl From<ScanError> for Fault {
    fn from(error: ScanError) -> Self {
        Self::new(error.marker(), error.info())
    }
}

/// One document of a text.
#[derive(Debug)]
pub(super) struct Document {
    /// `None` where there is nothing between two marks.
    pub(super) root: Option<Node>,
    /// What it says.
    pub(super) value: Value,
    /// Its own text in bytes, without marks and what comments are around it.
    pub(super) span: Range<usize>,
    /// Where it begins, from 1.
    pub(super) line: usize,
    /// It has tags that a value cannot hold, so that it cannot be written anew.
    pub(super) has_own_tags: bool,
}

/// A value and where it stands.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) kind: Kind,
    /// Its own text in bytes. A block collection begins at its first entry, and ends with the last one's text.
    pub(super) span: Range<usize>,
    /// Of its first character, in characters from 0.
    pub(super) column: usize,
    /// Of its first character, from 1.
    pub(super) line: usize,
    /// Where its anchor and tag begin, if it has some.
    pub(super) begin: usize,
}

/// What a node is made of.
#[derive(Debug)]
pub(super) enum Kind {
    /// It has no parts.
    Scalar,
    /// It is written elsewhere.
    Alias,
    /// A list.
    List {
        /// In brackets.
        is_flow: bool,
        /// Its items.
        items: Vec<Node>,
    },
    /// A mapping.
    Map {
        /// In braces.
        is_flow: bool,
        /// Its entries, without what a merge brings.
        entries: Vec<Entry>,
    },
}

/// One `key: value`.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) key: Node,
    pub(super) value: Node,
    /// Where its text ends; after the colon where nothing follows that.
    pub(super) end: usize,
}

/// Reads all documents of `text`.
pub(super) fn parse(text: &str) -> Result<Vec<Document>, Fault> {
    // As libyaml has it, and so kubectl.
    let options = granit_parser::options! {
        emit_comments: false,
        emit_anchor_events: true,
        block_scalar_eof_without_line_feed: true,
        flow_nesting_limit: MAX_DEPTH,
        block_nesting_limit: MAX_DEPTH,
    };
    let mut reader = Reader {
        text,
        events: Parser::new_from_str_with_options(text, options),
        peeked: None,
        anchors: HashMap::new(),
        left: MAX_VALUES,
        has_own_tags: false,
    };
    let mut documents = Vec::new();
    loop {
        match reader.next()? {
            (Event::StreamEnd, _) => return Ok(documents),
            (Event::DocumentStart(..), _) => documents.push(reader.document()?),
            _ => {}
        }
    }
}

struct Reader<'t, P> {
    text: &'t str,
    events: P,
    peeked: Option<(Event<'t>, Span)>,
    /// What anchors stand for, and how many values that is.
    anchors: HashMap<usize, (Value, usize)>,
    /// Values that may still come.
    left: usize,
    has_own_tags: bool,
}

impl<'t, P: Iterator<Item = Result<(Event<'t>, Span), ScanError>>> Reader<'t, P> {
    fn next(&mut self) -> Result<(Event<'t>, Span), Fault> {
        if let Some(peeked) = self.peeked.take() {
            return Ok(peeked);
        }
        match self.events.next() {
            Some(event) => Ok(event?),
            None => Ok((Event::StreamEnd, Span::empty(Marker::default()))),
        }
    }

    fn peek(&mut self) -> Result<&Event<'t>, Fault> {
        if self.peeked.is_none() {
            self.peeked = Some(self.next()?);
        }
        Ok(self.peeked.as_ref().map_or(&Event::StreamEnd, |(event, _)| event))
    }

    fn document(&mut self) -> Result<Document, Fault> {
        self.anchors.clear();
        (self.left, self.has_own_tags) = (MAX_VALUES, false);
        let (root, value) = self.node()?;
        let is_empty = matches!(root.kind, Kind::Scalar) && root.span.is_empty();
        let (span, line) = (root.begin..root.span.end, root.line);
        let root = (!is_empty).then_some(root);
        Ok(Document { root, value, span, line, has_own_tags: self.has_own_tags })
    }

    fn node(&mut self) -> Result<(Node, Value), Fault> {
        let (event, span) = self.next()?;
        let before = self.left;
        self.spend(1, &span)?;
        let mut begin = bytes(&span.tag_start().unwrap_or(span.start));
        let mut anchor = None;
        if let Event::Anchor(id, _) = self.peek()? {
            anchor = Some(*id);
            let (_, place) = self.next()?;
            begin = begin.min(bytes(&place.start));
        }
        let (kind, value, end) = match event {
            Event::Alias(id) => {
                let Some((value, size)) = self.anchors.get(&id).cloned() else {
                    return Err(Fault::new(&span.start, "an alias inside its own anchor has no end"));
                };
                self.spend(size, &span)?;
                (Kind::Alias, value, bytes(&span.end))
            }
            Event::Scalar(text, style, _, tag) => {
                let value = self.scalar(&text, style, tag.as_deref());
                (Kind::Scalar, value, self.end_of_scalar(&text, style, &span))
            }
            Event::SequenceStart(style, _, tag) => {
                self.note_tag(tag.as_deref(), "seq");
                self.list(style == StructureStyle::Flow, bytes(&span.end))?
            }
            Event::MappingStart(style, _, tag) => {
                self.note_tag(tag.as_deref(), "map");
                self.map(style == StructureStyle::Flow, bytes(&span.end))?
            }
            _ => return Err(Fault::new(&span.start, "expected a value")),
        };
        if let Some(id) = anchor {
            self.anchors.insert(id, (value.clone(), before - self.left));
        }
        let start = bytes(&span.start);
        let node = Node {
            kind,
            span: start..end.max(start),
            column: span.start.col(),
            line: span.start.line(),
            begin: begin.min(start),
        };
        Ok((node, value))
    }

    fn spend(&mut self, values: usize, span: &Span) -> Result<(), Fault> {
        let too_many =
            || Fault::new(&span.start, format!("the document unfolds to more than {MAX_VALUES} values"));
        self.left = self.left.checked_sub(values).ok_or_else(too_many)?;
        Ok(())
    }

    fn list(&mut self, is_flow: bool, mut end: usize) -> Result<(Kind, Value, usize), Fault> {
        let (mut items, mut values) = (Vec::new(), Vec::new());
        while !matches!(self.peek()?, Event::SequenceEnd) {
            let (item, value) = self.node()?;
            end = item.span.end;
            items.push(item);
            values.push(value);
        }
        let (_, span) = self.next()?;
        let end = if is_flow { bytes(&span.end) } else { end };
        Ok((Kind::List { is_flow, items }, Value::Array(values), end))
    }

    fn map(&mut self, is_flow: bool, mut end: usize) -> Result<(Kind, Value, usize), Fault> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut map = Map::new();
        let mut merged = Vec::new();
        while !matches!(self.peek()?, Event::MappingEnd) {
            let mark = self.peeked.as_ref().map_or_else(Marker::default, |(_, span)| span.start);
            let (key, key_value) = self.node()?;
            let name = match key_value {
                Value::String(text) => text,
                // As kubectl, for which a key is its text.
                _ if matches!(key.kind, Kind::Scalar) => self.text[key.span.clone()].to_owned(),
                other => other.to_string(),
            };
            let (value, content) = self.node()?;
            end = self.end_of_entry(&key, &value);
            if name == "<<" && &self.text[key.span.clone()] == "<<" {
                merged.push((mark, content));
            } else if map.insert(name.clone(), content).is_some() {
                return Err(Fault::new(&mark, format!("the key {name:?} is there twice")));
            }
            entries.push(Entry { name, key, value, end });
        }
        for (mark, content) in merged {
            merge(&mut map, content)
                .ok_or_else(|| Fault::new(&mark, "expected a mapping, or a list of some, to merge"))?;
        }
        let (_, span) = self.next()?;
        let end = if is_flow { bytes(&span.end) } else { end };
        Ok((Kind::Map { is_flow, entries }, Value::Object(map), end))
    }

    /// The parser has an empty value stand before the colon.
    fn end_of_entry(&self, key: &Node, value: &Node) -> usize {
        if !value.span.is_empty() || value.span.end > key.span.end {
            return value.span.end.max(key.span.end);
        }
        let rest = &self.text[key.span.end..];
        let colon = rest.find(':').filter(|colon| rest[..*colon].trim().is_empty());
        key.span.end + colon.map_or(0, |colon| colon + 1)
    }

    /// A block scalar reaches into the next line, past its own last one.
    fn end_of_scalar(&self, value: &str, style: ScalarStyle, span: &Span) -> usize {
        let (start, end) = (bytes(&span.start), bytes(&span.end));
        if !matches!(style, ScalarStyle::Literal | ScalarStyle::Folded) {
            return end;
        }
        let text = &self.text[start..end];
        if value.ends_with("\n\n") || value == "\n" {
            // With `+` the empty lines count, so that what follows has to come after them.
            let text = text.trim_end_matches([' ', '\t']);
            let text = text.strip_suffix('\n').unwrap_or(text);
            return start + text.strip_suffix('\r').unwrap_or(text).len();
        }
        start + text.trim_end().len()
    }

    fn note_tag(&mut self, tag: Option<&Tag>, own: &str) {
        self.has_own_tags |= tag.is_some_and(|tag| !tag.is_yaml_core_schema_tag(own));
    }

    fn scalar(&mut self, text: &str, style: ScalarStyle, tag: Option<&Tag>) -> Value {
        if let Some(tag) = tag {
            if tag.is_yaml_core_schema_tag("str") || !is_core(tag) {
                self.has_own_tags |= !is_core(tag);
                return Value::String(text.to_owned());
            }
            return plain(text);
        }
        if style == ScalarStyle::Plain { plain(text) } else { Value::String(text.to_owned()) }
    }
}

fn is_core(tag: &Tag) -> bool {
    ["str", "int", "float", "bool", "null"].iter().any(|name| tag.is_yaml_core_schema_tag(name))
}

fn bytes(mark: &Marker) -> usize {
    mark.byte_offset().unwrap_or_default()
}

/// What is in `map` already stays.
fn merge(map: &mut Map<String, Value>, content: Value) -> Option<()> {
    match content {
        Value::Object(more) => {
            for (key, value) in more {
                map.entry(key).or_insert(value);
            }
            Some(())
        }
        Value::Array(list) => list.into_iter().try_for_each(|item| match item {
            Value::Object(_) => merge(map, item),
            _ => None,
        }),
        _ => None,
    }
}

/// A scalar without quotes.
fn plain(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Value::Null,
        "true" | "True" | "TRUE" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => Value::Bool(true),
        "false" | "False" | "FALSE" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => Value::Bool(false),
        _ => number(text).map_or_else(|| Value::String(text.to_owned()), Value::Number),
    }
}

fn number(text: &str) -> Option<Number> {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    if !unsigned.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
        return None;
    }
    let text = text.replace('_', "");
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(&text);
    let (digits, radix) = match unsigned.get(..2) {
        Some("0x" | "0X") => (&unsigned[2..], 16),
        Some("0o") => (&unsigned[2..], 8),
        Some("0b") => (&unsigned[2..], 2),
        Some(_) if unsigned.starts_with('0') && unsigned.bytes().all(|byte| byte.is_ascii_digit()) => {
            (&unsigned[1..], 8)
        }
        _ => (unsigned, 10),
    };
    let is_digits = !digits.is_empty() && digits.chars().all(|c| c.is_digit(radix));
    if is_digits && text.starts_with('-') {
        if let Ok(number) = i64::from_str_radix(&format!("-{digits}"), radix) {
            return Some(number.into());
        }
    } else if is_digits && let Ok(number) = u64::from_str_radix(digits, radix) {
        return Some(number.into());
    }
    let is_float = unsigned.bytes().all(|byte| byte.is_ascii_digit() || b".eE+-".contains(&byte));
    // What is not finite stays text.
    is_float.then(|| text.parse().ok()).flatten().and_then(Number::from_f64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn values(text: &str) -> Vec<Value> {
        parse(text).unwrap().into_iter().map(|document| document.value).collect()
    }

    #[test]
    fn scalars_are_what_kubectl_takes_them_for() {
        for (text, value) in [
            ("~", json!(null)),
            ("yes", json!(true)),
            ("Off", json!(false)),
            ("y", json!("y")),
            ("0644", json!(420)),
            ("0x10", json!(16)),
            ("1_000", json!(1000)),
            ("-5", json!(-5)),
            ("1.5", json!(1.5)),
            ("1e3", json!(1000.0)),
            ("1.2.3", json!("1.2.3")),
            ("08", json!(8.0)),
            (".inf", json!(".inf")),
            ("250m", json!("250m")),
            ("2026-11-30", json!("2026-11-30")),
            ("'yes'", json!("yes")),
            ("!!str 1", json!("1")),
            ("!own 1", json!("1")),
        ] {
            assert_eq!(values(text), [value], "{text}");
        }
    }

    #[test]
    fn merges_and_aliases_unfold() {
        let text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a]\nd: {<<: [*a, {z: 4}]}\n";
        let a = json!({ "x": 1, "y": 2 });
        let expected = json!({ "a": a, "b": { "y": 3, "x": 1 }, "c": [a], "d": { "x": 1, "y": 2, "z": 4 } });
        assert_eq!(values(text), [expected]);
    }

    #[test]
    fn faults_have_their_place() {
        for (text, line, column, message) in [
            ("a: 1\nb: 2\na: 3\n", 3, 1, "the key \"a\" is there twice"),
            ("a:\n\tb: 1\n", 2, 2, "tab"),
            ("a: 1\nb: [\n", 2, 4, "unclosed bracket"),
            ("a: *b\n", 1, 4, ""),
            ("a: &a [*a]\n", 1, 8, "has no end"),
            ("{<<: 1}\n", 1, 2, "expected a mapping"),
        ] {
            let fault = parse(text).unwrap_err();
            assert_eq!((fault.line, fault.column), (line, column), "{text}: {fault:?}");
            assert!(fault.message.contains(message), "{fault:?}");
        }
    }

    #[test]
    fn aliases_are_bounded() {
        let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..12 {
            let before = vec![format!("*a{}", level - 1); 10].join(", ");
            text += &format!("a{level}: &a{level} [{before}]\n");
        }
        assert!(parse(&text).unwrap_err().message.contains("unfolds to more than"));
        assert!(parse(&"[".repeat(10_000)).is_err());
    }

    #[test]
    fn empty_documents_have_no_root() {
        let documents = parse("---\n---\n# note\n---\na: 1\n").unwrap();
        let roots: Vec<bool> = documents.iter().map(|document| document.root.is_some()).collect();
        assert_eq!(roots, [false, false, true]);
        assert!(parse("").unwrap().is_empty());
    }
}
