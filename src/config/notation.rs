//! How single values look in the policy: the types that the raw structs are made of.
//!
//! Each says what it expects in the words of a person, since these words are the error message, and
//! what it looks like as JSON Schema, since an editor checks with that.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

use super::secret::without_userinfo;
use crate::units::{ByteSize, Percent, Rate, Span};

/// A value with a unit, as the user wrote it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Unit<T>(pub(super) T);

/// What a [`Unit`] must tell about itself.
pub(super) trait Notation: FromStr<Err: fmt::Display> {
    /// The schema's name for it.
    const NAME: &'static str;
    /// What is expected, for messages.
    const EXPECTED: &'static str;
    /// The same as a regular expression of JSON Schema (ECMA 262).
    const PATTERN: &'static str;

    /// What a bare number most likely stands for.
    fn with_unit(number: &str) -> String;

    /// The value of a bare number, where one is taken.
    fn from_bare(_number: u64) -> Option<Self> {
        None
    }
}

impl Notation for Span {
    const NAME: &'static str = "Duration";
    const EXPECTED: &'static str = Self::EXPECTED;
    const PATTERN: &'static str = r"^[0-9]+(\.[0-9]+)?(us|ms|s|m|h)$";

    fn with_unit(number: &str) -> String {
        // From three digits on, milliseconds are as likely.
        match number.parse::<f64>() {
            Ok(large) if large >= 100.0 => format!("{number}ms` or `{number}s"),
            _ => format!("{number}s"),
        }
    }
}

impl Notation for ByteSize {
    const NAME: &'static str = "Size";
    const EXPECTED: &'static str = Self::EXPECTED;
    const PATTERN: &'static str = r"^[0-9]+(\.[0-9]+)?(B|KiB|MiB|GiB)?$";

    fn with_unit(number: &str) -> String {
        format!("{number}B")
    }

    fn from_bare(number: u64) -> Option<Self> {
        number.to_string().parse().ok()
    }
}

impl Notation for Percent {
    const NAME: &'static str = "Ratio";
    const EXPECTED: &'static str = Self::EXPECTED;
    const PATTERN: &'static str = r"^[0-9]+(\.[0-9]+)?%$";

    fn with_unit(number: &str) -> String {
        match number.parse::<f64>() {
            Ok(fraction) if fraction < 1.0 => Self::new(fraction * 100.0).to_string(),
            _ => format!("{number}%"),
        }
    }
}

impl Notation for Rate {
    const NAME: &'static str = "Rate";
    const EXPECTED: &'static str = Self::EXPECTED;
    const PATTERN: &'static str = r"^[0-9]+(\.[0-9]+)?/(s|m|h)$";

    fn with_unit(number: &str) -> String {
        format!("{number}/s")
    }
}

impl<'de, T: Notation> Deserialize<'de> for Unit<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UnitVisitor(PhantomData)).map(Self)
    }
}

struct UnitVisitor<T>(PhantomData<T>);

impl<T: Notation> UnitVisitor<T> {
    fn bare<E: Error>(number: &str) -> E {
        E::custom(format!(
            "expected {}; found `{number}` (did you mean `{}`?)",
            T::EXPECTED,
            T::with_unit(number)
        ))
    }
}

impl<T: Notation> Visitor<'_> for UnitVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(|error| E::custom(format!("{error}; found {}", Found(text))))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
        T::from_bare(number).ok_or_else(|| Self::bare(&number.to_string()))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<T, E> {
        Err(Self::bare(&number.to_string()))
    }
}

impl<T: Notation> JsonSchema for Unit<T> {
    fn schema_name() -> Cow<'static, str> {
        T::NAME.into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let text = json_schema!({ "type": "string", "pattern": T::PATTERN });
        if T::from_bare(1).is_some() {
            json_schema!({ "description": T::EXPECTED, "anyOf": [text, { "type": "integer", "minimum": 0 }] })
        } else {
            json_schema!({ "description": T::EXPECTED, "type": "string", "pattern": T::PATTERN })
        }
    }
}

/// A value in a message: in backticks, cut when it is long, and without any password that a URL has.
pub(super) struct Found<'a>(pub &'a str);

impl fmt::Display for Found<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MOST: usize = 60;
        let text = without_userinfo(self.0);
        let mut chars = text.chars().filter(|c| !c.is_control());
        write!(f, "`{}", chars.by_ref().take(MOST).collect::<String>())?;
        f.write_str(if chars.next().is_some() { "…`" } else { "`" })
    }
}

/// A stage or value that `off` (or `false`) turns off.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Switch<T> {
    /// `off`.
    Off,
    /// Anything else.
    On(T),
}

impl<T> Switch<T> {
    /// The value, unless it is off.
    pub(super) fn on(&self) -> Option<&T> {
        match self {
            Self::Off => None,
            Self::On(value) => Some(value),
        }
    }
}

/// The name under which a [`Switch`] asks [`de`](super::de) to look for `off` first; see there.
pub(super) const SWITCH: &str = "@switch";

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Switch<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_newtype_struct(SWITCH, SwitchVisitor(PhantomData))
    }
}

struct SwitchVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for SwitchVisitor<T> {
    type Value = Switch<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value or `off`")
    }

    fn visit_unit<E>(self) -> Result<Switch<T>, E> {
        Ok(Switch::Off)
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<Switch<T>, D::Error> {
        T::deserialize(deserializer).map(Switch::On)
    }
}

impl<T: JsonSchema> JsonSchema for Switch<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("{}OrOff", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let inner = generator.subschema_for::<T>();
        json_schema!({ "anyOf": [inner, { "enum": ["off", false] }] })
    }
}

/// A stage that is off until a section writes it: its keys, `true` for the defaults of all of them, or
/// `off`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Toggle<T>(pub(super) Switch<T>);

/// The stages that are off where no section writes them.
pub(super) const OPT_IN: [&str; 4] = ["retry", "rate_limit", "coalesce", "cache"];

/// The name under which a [`Toggle`] asks [`de`](super::de) to look for `true` and `off` first.
pub(super) const TOGGLE: &str = "@toggle";

impl<'de, T: Deserialize<'de> + Default> Deserialize<'de> for Toggle<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_newtype_struct(TOGGLE, ToggleVisitor(PhantomData))
    }
}

struct ToggleVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de> + Default> Visitor<'de> for ToggleVisitor<T> {
    type Value = Toggle<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`true`, `off` or a mapping")
    }

    fn visit_bool<E>(self, is_on: bool) -> Result<Toggle<T>, E> {
        Ok(Toggle(if is_on { Switch::On(T::default()) } else { Switch::Off }))
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<Toggle<T>, D::Error> {
        T::deserialize(deserializer).map(|keys| Toggle(Switch::On(keys)))
    }
}

impl<T: JsonSchema> JsonSchema for Toggle<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("{}OrFlag", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let inner = generator.subschema_for::<T>();
        json_schema!({ "anyOf": [inner, { "enum": [true, "on", false, "off"] }] })
    }
}

/// A yes or no: `true` or `on`, `false` or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Flag(pub(super) bool);

impl<'de> Deserialize<'de> for Flag {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        bool::deserialize(deserializer).map(Self)
    }
}

impl JsonSchema for Flag {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Flag".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "enum": [true, false, "on", "off"] })
    }
}

/// A mapping with free keys, in the file's order.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Named<T>(pub(super) Vec<(String, T)>);

impl<T> Default for Named<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Named<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(NamedVisitor(PhantomData))
    }
}

struct NamedVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for NamedVisitor<T> {
    type Value = Named<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a mapping")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Named<T>, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = access.next_entry()? {
            entries.push(entry);
        }
        Ok(Named(entries))
    }
}

impl<T: JsonSchema> JsonSchema for Named<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("Named{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let inner = generator.subschema_for::<T>();
        json_schema!({ "type": "object", "additionalProperties": inner })
    }
}

/// When a hedge starts: a duration, a percentile such as `p75`, or `auto`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum After {
    /// `auto`.
    Auto,
    /// `p75`.
    Percentile(Percent),
    /// `800ms`.
    Fixed(Span),
}

impl After {
    const EXPECTED: &'static str = "`auto`, a percentile from p1 to p99.9, or a duration such as 800ms";
}

impl FromStr for After {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        if let Some(digits) = text.strip_prefix('p') {
            let number: f64 = match digits.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
                true => digits.parse().map_err(|_| Self::EXPECTED)?,
                false => return Err(Self::EXPECTED),
            };
            return match number {
                n if (1.0..=99.9).contains(&n) => Ok(Self::Percentile(Percent::new(n))),
                _ => Err(Self::EXPECTED),
            };
        }
        text.parse().map(Self::Fixed).map_err(|_| Self::EXPECTED)
    }
}

impl<'de> Deserialize<'de> for After {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse()
            .map_err(|expected| D::Error::custom(format!("expected {expected}; found {}", Found(&text))))
    }
}

impl JsonSchema for After {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "HedgeAfter".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let pattern = r"^(auto|p[0-9]+(\.[0-9]+)?|[0-9]+(\.[0-9]+)?(us|ms|s|m|h))$";
        json_schema!({ "type": "string", "pattern": pattern })
    }
}

/// An address with its port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Socket(pub(super) SocketAddr);

impl<'de> Deserialize<'de> for Socket {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(|_| {
            let found = Found(&text);
            D::Error::custom(format!("expected an address with port such as 127.0.0.1:8080; found {found}"))
        })
    }
}

impl JsonSchema for Socket {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Socket".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "pattern": r"^(\[[0-9a-fA-F:.]+\]|[0-9.]+):[0-9]+$" })
    }
}

/// An HTTP method in capitals.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MethodName(pub(super) http::Method);

impl<'de> Deserialize<'de> for MethodName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        // Methods are case-sensitive (RFC 9110 section 9.1): a policy for `get` would never match.
        let upper = text.to_ascii_uppercase();
        match http::Method::from_bytes(text.as_bytes()) {
            Ok(method) if upper == text => Ok(Self(method)),
            Ok(_) => Err(D::Error::custom(format!(
                "expected a method in capitals; found {} (did you mean `{upper}`?)",
                Found(&text)
            ))),
            Err(_) => Err(D::Error::custom(format!("expected a method such as GET; found {}", Found(&text)))),
        }
    }
}

impl JsonSchema for MethodName {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Method".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "pattern": "^[A-Z][A-Z0-9-]*$" })
    }
}
