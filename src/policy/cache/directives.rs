//! The directives of `Cache-Control` (RFC 9111 section 5.2), read with care and without trust.
//!
//! Names are compared in any case, values may be tokens or quoted strings, and several lines are one list.
//! What is wrong is read as what keeps less: a freshness that is no number is none (section 4.2.1), of
//! several the least counts, and a list whose quotes never close says `no-store`, since anything may be
//! hidden in it.

use std::borrow::Cow;
use std::time::Duration;

use http::header::{self, HeaderMap, HeaderName};

/// What an answer says of its use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ResponseControl {
    pub(super) no_store: bool,
    /// Without a list of fields.
    pub(super) no_cache: bool,
    /// Without a list of fields.
    pub(super) private: bool,
    pub(super) public: bool,
    pub(super) must_revalidate: bool,
    pub(super) proxy_revalidate: bool,
    pub(super) must_understand: bool,
    pub(super) max_age: Option<Duration>,
    pub(super) s_maxage: Option<Duration>,
    pub(super) stale_while_revalidate: Option<Duration>,
    pub(super) stale_if_error: Option<Duration>,
    /// Fields that are not to be used again unasked, each once: `no-cache="a, b"`.
    pub(super) no_cache_fields: Vec<HeaderName>,
    /// Fields that no shared cache may keep, each once: `private="a, b"`.
    pub(super) private_fields: Vec<HeaderName>,
}

impl ResponseControl {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let mut control = Self::default();
        let is_readable = each(headers, |name, value| control.take(name, value));
        control.no_store |= !is_readable;
        control.no_cache |= says_pragma(headers);
        control
    }

    /// Lets go of the lists, once the fields that are kept have been chosen by them.
    pub(super) fn forget_fields(&mut self) {
        self.no_cache_fields = Vec::new();
        self.private_fields = Vec::new();
    }

    fn take(&mut self, name: &[u8], value: &Value<'_>) {
        match name {
            b"no-store" => self.no_store = true,
            b"public" => self.public = true,
            b"must-revalidate" => self.must_revalidate = true,
            b"proxy-revalidate" => self.proxy_revalidate = true,
            // The one that loosens another, `no-store`, so only in the form that it is defined in.
            b"must-understand" => self.must_understand |= matches!(value, Value::Absent),
            b"no-cache" => {
                let names = value.field_names();
                self.no_cache |= !names.is_some_and(|names| add_fields(&mut self.no_cache_fields, names));
            }
            b"private" => {
                let names = value.field_names();
                self.private |= !names.is_some_and(|names| add_fields(&mut self.private_fields, names));
            }
            b"max-age" => least(&mut self.max_age, value.seconds_or_none()),
            b"s-maxage" => least(&mut self.s_maxage, value.seconds_or_none()),
            b"stale-while-revalidate" => least(&mut self.stale_while_revalidate, value.seconds_or_none()),
            b"stale-if-error" => least(&mut self.stale_if_error, value.seconds_or_none()),
            _ => {}
        }
    }
}

/// The most fields that a directive is limited to. A longer list is nobody's meaning: then the directive holds
/// for the whole answer, which is stricter.
const MOST_FIELDS: usize = 64;

/// Adds those that are not there yet; `false` when they become too many.
fn add_fields(known: &mut Vec<HeaderName>, names: Vec<HeaderName>) -> bool {
    for name in names {
        if known.contains(&name) {
            continue;
        }
        if known.len() == MOST_FIELDS {
            return false;
        }
        known.push(name);
    }
    true
}

/// What a request wants of caches.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct RequestControl {
    pub(super) no_store: bool,
    pub(super) no_cache: bool,
    pub(super) only_if_cached: bool,
    pub(super) max_age: Option<Duration>,
    pub(super) min_fresh: Option<Duration>,
    /// The longest duration where any staleness will do.
    pub(super) max_stale: Option<Duration>,
    pub(super) stale_if_error: Option<Duration>,
}

impl RequestControl {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let mut control = Self::default();
        let is_readable = each(headers, |name, value| control.take(name, value));
        control.no_cache |= !is_readable || says_pragma(headers);
        control
    }

    fn take(&mut self, name: &[u8], value: &Value<'_>) {
        match name {
            b"no-store" => self.no_store = true,
            b"no-cache" => self.no_cache = true,
            b"only-if-cached" => self.only_if_cached = true,
            b"max-age" => least(&mut self.max_age, value.seconds_or_none()),
            b"min-fresh" => {
                let wanted = value.seconds().unwrap_or(Duration::MAX);
                self.min_fresh = Some(self.min_fresh.map_or(wanted, |other| other.max(wanted)));
            }
            b"max-stale" => {
                let any = matches!(value, Value::Absent).then_some(Duration::MAX);
                least(&mut self.max_stale, any.unwrap_or_else(|| value.seconds_or_none()));
            }
            b"stale-if-error" => least(&mut self.stale_if_error, value.seconds_or_none()),
            _ => {}
        }
    }
}

/// Seconds as RFC 9111 section 1.2.2 has them: what is too large is what fits. `None` for anything else.
pub(super) fn delta_seconds(digits: &[u8]) -> Option<Duration> {
    /// The value that the RFC names for this.
    const MOST: u64 = 1 << 31;
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let seconds = digits.iter().fold(0, |sum: u64, digit| (sum * 10 + u64::from(digit - b'0')).min(MOST));
    Some(Duration::from_secs(seconds))
}

/// The members of a list (RFC 9110 section 5.6.1), without the empty ones; commas in quotes part nothing.
pub(super) fn members(list: &[u8], escapes: Escapes) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(list);
    std::iter::from_fn(move || {
        let list = rest?;
        let (member, left) = match end_of_member(list, escapes) {
            Some(comma) => (&list[..comma], Some(&list[comma + 1..])),
            None => (list, None),
        };
        rest = left;
        Some(member.trim_ascii())
    })
    .filter(|member| !member.is_empty())
}

/// Whether a backslash inside quotes takes the next byte's meaning away. In entity tags it does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Escapes {
    Yes,
    No,
}

fn end_of_member(list: &[u8], escapes: Escapes) -> Option<usize> {
    let mut quoted = Quoted::default();
    list.iter().position(|byte| !quoted.pass(*byte, escapes) && *byte == b',')
}

/// Whether a quoted string is still open at the end.
fn is_unclosed(member: &[u8]) -> bool {
    let mut quoted = Quoted::default();
    for byte in member {
        quoted.pass(*byte, Escapes::Yes);
    }
    quoted.is_open
}

#[derive(Default)]
struct Quoted {
    is_open: bool,
    is_escaped: bool,
}

impl Quoted {
    /// Takes the next byte and tells whether it is inside quotes.
    fn pass(&mut self, byte: u8, escapes: Escapes) -> bool {
        if self.is_escaped {
            self.is_escaped = false;
        } else if byte == b'"' {
            self.is_open = !self.is_open;
        } else if byte == b'\\' && self.is_open && escapes == Escapes::Yes {
            self.is_escaped = true;
        }
        self.is_open
    }
}

/// What stands behind a directive's name.
enum Value<'a> {
    Absent,
    Is(Cow<'a, [u8]>),
    /// Neither a token nor a quoted string.
    Broken,
}

impl<'a> Value<'a> {
    fn read(text: &'a [u8]) -> Self {
        match text {
            [b'"', inner @ .., b'"'] => Self::Is(unescape(inner)),
            [] => Self::Broken,
            _ if text.iter().any(|byte| matches!(byte, b' ' | b'\t' | b'"')) => Self::Broken,
            _ => Self::Is(Cow::Borrowed(text)),
        }
    }

    fn seconds(&self) -> Option<Duration> {
        match self {
            Self::Is(digits) => delta_seconds(digits),
            Self::Absent | Self::Broken => None,
        }
    }

    fn seconds_or_none(&self) -> Duration {
        self.seconds().unwrap_or_default()
    }

    /// The fields that the directive is limited to. `None` when it holds for the whole answer, as it must
    /// when the list names nothing that can be a field.
    fn field_names(&self) -> Option<Vec<HeaderName>> {
        let Self::Is(list) = self else { return None };
        let names: Result<Vec<_>, _> = members(list, Escapes::No).map(HeaderName::from_bytes).collect();
        names.ok().filter(|names| !names.is_empty())
    }
}

fn unescape(inner: &[u8]) -> Cow<'_, [u8]> {
    if !inner.contains(&b'\\') {
        return Cow::Borrowed(inner);
    }
    let mut bytes = inner.iter();
    let mut text = Vec::with_capacity(inner.len());
    while let Some(byte) = bytes.next() {
        let meant = if *byte == b'\\' { bytes.next().unwrap_or(byte) } else { byte };
        text.push(*meant);
    }
    Cow::Owned(text)
}

/// Shows each directive with its name in lower case; `false` when the list cannot be read to its end.
fn each(headers: &HeaderMap, mut see: impl FnMut(&[u8], &Value<'_>)) -> bool {
    let lines = headers.get_all(header::CACHE_CONTROL).iter();
    let mut is_readable = true;
    for member in lines.flat_map(|line| members(line.as_bytes(), Escapes::Yes)) {
        is_readable &= !is_unclosed(member);
        let (name, value) = match member.iter().position(|byte| *byte == b'=') {
            None => (member, Value::Absent),
            Some(at) => {
                let (name, value) = (&member[..at], &member[at + 1..]);
                // Space around the sign is not in the grammar: the name is heeded, the value is not.
                let is_apart = name.ends_with(b" ") || name.ends_with(b"\t") || value.trim_ascii() != value;
                (name.trim_ascii(), if is_apart { Value::Broken } else { Value::read(value) })
            }
        };
        see(&name.to_ascii_lowercase(), &value);
    }
    is_readable
}

fn least(kept: &mut Option<Duration>, value: Duration) {
    *kept = Some(kept.map_or(value, |other| other.min(value)));
}

/// `Pragma: no-cache` counts where there is no `Cache-Control` (RFC 9111 section 5.4). In answers it has no
/// meaning by the RFC; who sends it alone means no-cache all the same.
fn says_pragma(headers: &HeaderMap) -> bool {
    !headers.contains_key(header::CACHE_CONTROL)
        && headers
            .get_all(header::PRAGMA)
            .iter()
            .flat_map(|line| members(line.as_bytes(), Escapes::Yes))
            .any(|member| member.eq_ignore_ascii_case(b"no-cache"))
}
