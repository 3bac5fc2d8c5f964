//! Fills the raw structs from the tree, and finds out everything that is wrong with their shape.
//!
//! serde stops at the first error, but all are to be told at once. Two ways lead there: what can be
//! stepped over (unknown keys, duplicates) is noted and skipped; at a value of the wrong kind the
//! deepest entry that holds it is cut out of the tree, and the whole is read again until it succeeds.
//! Reading a policy takes a millisecond, and after [`MOST_PROBLEMS`] it stops.
//!
//! `deserialize_newtype_struct` under the name [`SWITCH`] looks for `off` first: this is how a stage
//! can be either `off` or a mapping without serde's untagged enums, which buffer values and lose their
//! places and any message worth reading. Under [`TOGGLE`] it looks for `true` as well.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::{self, Display};

use serde::de::value::StrDeserializer;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor,
};
use serde::forward_to_deserialize_any;

use super::notation::{Found, SWITCH, TOGGLE};
use super::problem::{Path, Place, Problem};
use super::raw;
use super::secret::has_userinfo;
use super::tree::{Entry, Node, Value};

/// Where reading stops: nobody fixes more at once, and each costs another reading.
pub(super) const MOST_PROBLEMS: usize = 100;

/// Reads `T`, noting every problem; what is wrong is missing from the result and cut from `tree`.
pub(super) fn from_tree<T: DeserializeOwned + Default>(tree: &mut Node, problems: &mut Vec<Problem>) -> T {
    loop {
        let skipped = RefCell::new(Vec::new());
        let root = Reader { node: tree, trail: &Trail::Root, skipped: &skipped };
        let result = T::deserialize(root);
        let error = match result {
            Ok(value) => {
                problems.append(&mut skipped.into_inner());
                problems.truncate(MOST_PROBLEMS);
                return value;
            }
            Err(error) => error.into_problem(tree.place),
        };
        let is_cut = tree.cut(&error.path);
        problems.push(error);
        // Without a cut the same error would come for ever: the file as a whole is of the wrong kind.
        if !is_cut || problems.len() >= MOST_PROBLEMS {
            return T::default();
        }
    }
}

/// The way from the root, kept on the stack; it becomes a [`Path`] only when something is wrong.
enum Trail<'a> {
    Root,
    Key(&'a Self, &'a str),
    Index(&'a Self, usize),
}

impl Trail<'_> {
    fn to_path(&self) -> Path {
        match self {
            Self::Root => Path::root(),
            Self::Key(parent, key) => parent.to_path().key(key),
            Self::Index(parent, index) => parent.to_path().index(*index),
        }
    }
}

/// A message, and where it belongs once it has passed the first entry on its way out.
#[derive(Debug)]
struct ReadError {
    message: String,
    at: Option<(Place, Path)>,
}

impl ReadError {
    /// Only the deepest place counts.
    fn at(mut self, place: Place, trail: &Trail<'_>) -> Self {
        self.at.get_or_insert_with(|| (place, trail.to_path()));
        self
    }

    fn into_problem(self, root: Place) -> Problem {
        let (place, path) = self.at.unwrap_or((root, Path::root()));
        Problem::error(place, path, self.message)
    }
}

impl Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ReadError {}

impl serde::de::Error for ReadError {
    fn custom<T: Display>(message: T) -> Self {
        Self { message: message.to_string(), at: None }
    }
}

/// What a node is, for messages.
struct Kind<'a> {
    node: &'a Node,
    may_be_secret: bool,
}

impl Display for Kind<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.node.value {
            Value::Null | Value::Cut => f.write_str("nothing"),
            Value::Number(_) if self.may_be_secret => f.write_str("a number"),
            Value::Text(_) if self.may_be_secret => f.write_str("text"),
            Value::Bool(value) => write!(f, "`{value}`"),
            Value::Number(text) | Value::Text(text) => Found(text).fmt(f),
            Value::List(_) => f.write_str("a list"),
            Value::Map(_) => f.write_str("a mapping"),
        }
    }
}

/// `; did you mean ...`, when something known is close to what was written.
pub(super) fn did_you_mean<'a>(written: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let close =
        |candidate: &&str| strsim::osa_distance(written, candidate) <= (written.chars().count() / 3).max(1);
    match known.into_iter().filter(close).min_by_key(|candidate| strsim::osa_distance(written, candidate)) {
        Some(candidate) => format!("; did you mean `{candidate}`?"),
        None => String::new(),
    }
}

struct Reader<'a> {
    node: &'a Node,
    trail: &'a Trail<'a>,
    skipped: &'a RefCell<Vec<Problem>>,
}

impl<'a> Reader<'a> {
    fn entries(&self, what: impl Display) -> Result<&'a [Entry], ReadError> {
        match &self.node.value {
            Value::Map(entries) => Ok(entries),
            // A section of which everything is commented out.
            Value::Null => Ok(&[]),
            _ => Err(self.expected(what)),
        }
    }

    fn expected(&self, what: impl Display) -> ReadError {
        serde::de::Error::custom(format_args!("expected {what}; found {}", self.kind()))
    }

    fn kind(&self) -> Kind<'a> {
        Kind { node: self.node, may_be_secret: self.trail.to_path().may_be_secret() }
    }

    fn read_map<'de, V: Visitor<'de>>(
        self,
        entries: &'a [Entry],
        known: Option<&'static [&'static str]>,
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        let entries = self.usable(entries, known);
        visitor.visit_map(Entries { reader: self, rest: entries.into_iter(), current: None })
    }

    /// The entries without duplicates and unknown keys, which are noted.
    fn usable(&self, entries: &'a [Entry], known: Option<&'static [&'static str]>) -> Vec<&'a Entry> {
        let mut seen: HashMap<&str, Place> = HashMap::with_capacity(entries.len());
        let mut usable = Vec::with_capacity(entries.len());
        for entry in entries {
            if let Some(first) = seen.insert(&entry.key, entry.place) {
                seen.insert(&entry.key, first);
                let message = format!("duplicate key; it is already set in line {}", first.line);
                self.note(entry, message);
            } else if let Some(known) = known.filter(|known| !known.contains(&entry.key.as_str())) {
                self.note(entry, self.unknown(&entry.key, known));
            } else if !matches!(entry.value.value, Value::Cut) {
                usable.push(entry);
            }
        }
        usable
    }

    fn unknown(&self, key: &str, known: &[&str]) -> String {
        // The commonest slip: a stage at the top, where one looks for what holds for all.
        if matches!(self.trail, Trail::Root) && raw::STAGE_KEYS.contains(&key) {
            return "unknown key here; set it in `defaults`, in an upstream or in a route".into();
        }
        if key == "intercept" && (self.is_route() || matches!(self.trail, Trail::Root)) {
            // A route is found by the path, which is seen once TLS has been ended.
            return "unknown key here; set it in an upstream or in `defaults`".into();
        }
        match did_you_mean(key, known.iter().copied()) {
            hint if hint.is_empty() => format!("unknown key; expected one of {}", known.join(", ")),
            hint => format!("unknown key{hint}"),
        }
    }

    fn is_route(&self) -> bool {
        matches!(self.trail, Trail::Index(Trail::Key(_, "routes"), _))
    }

    fn note(&self, entry: &Entry, message: String) {
        let path = self.trail.to_path().key(&entry.key);
        let mut skipped = self.skipped.borrow_mut();
        if skipped.len() < MOST_PROBLEMS {
            skipped.push(Problem::error(entry.place, path, message));
        }
    }

    fn text(&self) -> Result<&'a str, ReadError> {
        match &self.node.value {
            // `1.10` and `8080` are text where text is wanted, digit by digit.
            Value::Text(text) | Value::Number(text) => Ok(text),
            _ => Err(self.expected("text")),
        }
    }

    fn is_off(&self) -> bool {
        self.flag() == Some(false)
    }

    fn flag(&self) -> Option<bool> {
        match &self.node.value {
            Value::Bool(value) => Some(*value),
            Value::Text(text) if text == "on" => Some(true),
            Value::Text(text) if text == "off" => Some(false),
            _ => None,
        }
    }
}

macro_rules! whole_numbers {
    ($($method:ident $visit:ident $type:ty,)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
            let number = match &self.node.value {
                Value::Number(text) => text.parse::<$type>().ok(),
                _ => None,
            };
            match number {
                Some(number) => visitor.$visit(number),
                None => {
                    let most = u64::from(<$type>::MAX);
                    let what = if most == u64::MAX { "a whole number".into() } else { format!("a whole number up to {most}") };
                    Err(self.expected(what))
                }
            }
        }
    )*};
}

impl<'de> Deserializer<'de> for Reader<'_> {
    type Error = ReadError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match &self.node.value {
            Value::Number(text) => match (text.parse::<u64>(), text.parse::<f64>()) {
                (Ok(number), _) => visitor.visit_u64(number),
                (Err(_), Ok(number)) => visitor.visit_f64(number),
                (Err(_), Err(_)) => visitor.visit_str(text),
            },
            Value::Text(text) => visitor.visit_str(text),
            // Every type that asks this way is written as text or number.
            _ => Err(self.expected(Expecting(&visitor))),
        }
    }

    whole_numbers! {
        deserialize_u8 visit_u8 u8,
        deserialize_u16 visit_u16 u16,
        deserialize_u32 visit_u32 u32,
        deserialize_u64 visit_u64 u64,
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match self.flag() {
            Some(value) => visitor.visit_bool(value),
            None => Err(self.expected("`true` or `false`")),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        visitor.visit_str(self.text()?)
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        visitor.visit_str(self.text()?)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match self.node.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        match (name, &self.node.value) {
            (SWITCH, _) if self.is_off() => visitor.visit_unit(),
            // Said here, since what is in it expects a mapping and knows of nothing else.
            (TOGGLE, Value::Bool(_) | Value::Number(_) | Value::Text(_) | Value::List(_)) => {
                match self.flag() {
                    Some(is_on) => visitor.visit_bool(is_on),
                    None => Err(self.expected(Expecting(&visitor))),
                }
            }
            _ => visitor.visit_newtype_struct(self),
        }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match &self.node.value {
            Value::List(items) => visitor.visit_seq(Items { reader: self, rest: items.iter().enumerate() }),
            _ if matches!(self.trail, Trail::Key(_, "routes" | "fallback")) => {
                Err(self.expected("a list of mappings"))
            }
            Value::Text(text) | Value::Number(text) if !self.kind().may_be_secret && !has_userinfo(text) => {
                let message =
                    format_args!("expected a list; found {} (did you mean `[{text}]`?)", self.kind());
                Err(serde::de::Error::custom(message))
            }
            _ => Err(self.expected("a list")),
        }
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        let entries = self.entries("a mapping")?;
        self.read_map(entries, None, visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        let entries = self.entries(format_args!("a mapping of {}", fields.join(", ")))?;
        self.read_map(entries, Some(fields), visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        let word = match &self.node.value {
            Value::Text(text) => text.as_str(),
            // YAML 1.1 tools write `off` as false.
            Value::Bool(false) => "off",
            _ => "",
        };
        if !variants.contains(&word) {
            let hint = did_you_mean(word, variants.iter().copied());
            let error = format!("expected one of {}; found {}{hint}", variants.join(", "), self.kind());
            return Err(serde::de::Error::custom(error));
        }
        let word: StrDeserializer<'_, ReadError> = word.into_deserializer();
        visitor.visit_enum(word)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u128 f32 f64 char bytes byte_buf unit unit_struct tuple tuple_struct identifier
    }
}

struct Expecting<'v, V>(&'v V);

impl<'de, V: Visitor<'de>> Display for Expecting<'_, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.expecting(f)
    }
}

struct Entries<'a> {
    reader: Reader<'a>,
    rest: std::vec::IntoIter<&'a Entry>,
    current: Option<&'a Entry>,
}

impl<'de> MapAccess<'de> for Entries<'_> {
    type Error = ReadError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, ReadError> {
        self.current = self.rest.next();
        let Some(entry) = self.current else { return Ok(None) };
        let key: StrDeserializer<'_, ReadError> = entry.key.as_str().into_deserializer();
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, ReadError> {
        let entry = self.current.take().expect("serde asks for the key first");
        let trail = Trail::Key(self.reader.trail, &entry.key);
        let reader = Reader { node: &entry.value, trail: &trail, skipped: self.reader.skipped };
        seed.deserialize(reader).map_err(|error| error.at(entry.pointer(), &trail))
    }
}

struct Items<'a> {
    reader: Reader<'a>,
    rest: std::iter::Enumerate<std::slice::Iter<'a, Node>>,
}

impl<'de> SeqAccess<'de> for Items<'_> {
    type Error = ReadError;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, ReadError> {
        let Some((index, node)) = self.rest.find(|(_, node)| !matches!(node.value, Value::Cut)) else {
            return Ok(None);
        };
        let trail = Trail::Index(self.reader.trail, index);
        let reader = Reader { node, trail: &trail, skipped: self.reader.skipped };
        seed.deserialize(reader).map(Some).map_err(|error| error.at(node.place, &trail))
    }
}
