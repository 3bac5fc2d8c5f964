//! How an answer is written down for other pods.
//!
//! A byte for the version, then numbers of fixed width (big-endian), then everything of variable length behind its
//! length. It is read to its exact end, and whatever does not read so is nothing: another version's value, another
//! program's, half of one.

use http::StatusCode;
use http::header::{HeaderMap, HeaderName, HeaderValue};

/// Another form has another number.
const VERSION: u8 = 1;

/// More fields than an upstream's answer has; a header map of tens of thousands would panic.
const MOST_FIELDS: usize = 1024;

/// What goes with an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Label {
    /// When the request was sent that brought it, in milliseconds of the writer's clock since 1970.
    pub(super) sent_at: u64,
    /// How many milliseconds before it was written that was.
    pub(super) sent_ago: u64,
    /// The age that it would have had when the request was sent, in milliseconds.
    pub(super) age_when_sent: u64,
    /// For how many milliseconds it was written.
    pub(super) life: u64,
    /// What the request had in the fields that chose the answer.
    pub(super) stamp: [u8; 32],
}

/// An answer as it was read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Value<'a> {
    pub(super) label: Label,
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: &'a [u8],
}

/// The number of bytes that [`write()`] makes.
pub(super) fn size(headers: &HeaderMap, body: &[u8]) -> usize {
    /// Version, label, status, number of fields, length of the body.
    const FIXED: usize = 1 + 4 * 8 + 32 + 2 + 4 + 8;
    let fields = headers.iter().map(|(name, value)| 2 * 4 + name.as_str().len() + value.len());
    FIXED + fields.sum::<usize>() + body.len()
}

/// Writes an answer down. `None` for a head of which more would be written than is read again.
pub(super) fn write(label: &Label, status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Option<Vec<u8>> {
    if headers.len() > MOST_FIELDS {
        return None;
    }
    let mut bytes = Vec::with_capacity(size(headers, body));
    bytes.push(VERSION);
    for number in [label.sent_at, label.sent_ago, label.age_when_sent, label.life] {
        bytes.extend_from_slice(&number.to_be_bytes());
    }
    bytes.extend_from_slice(&label.stamp);
    bytes.extend_from_slice(&status.as_u16().to_be_bytes());
    bytes.extend_from_slice(&(headers.len() as u32).to_be_bytes());
    for (name, value) in headers {
        for text in [name.as_str().as_bytes(), value.as_bytes()] {
            bytes.extend_from_slice(&u32::try_from(text.len()).ok()?.to_be_bytes());
            bytes.extend_from_slice(text);
        }
    }
    bytes.extend_from_slice(&(body.len() as u64).to_be_bytes());
    bytes.extend_from_slice(body);
    Some(bytes)
}

/// Reads what [`write()`] wrote; `None` for anything else.
pub(super) fn read(bytes: &[u8]) -> Option<Value<'_>> {
    let mut rest = Rest(bytes);
    if rest.array()? != [VERSION] {
        return None;
    }
    let label = Label {
        sent_at: rest.number()?,
        sent_ago: rest.number()?,
        age_when_sent: rest.number()?,
        life: rest.number()?,
        stamp: rest.array()?,
    };
    let status = StatusCode::from_u16(u16::from_be_bytes(rest.array()?)).ok()?;
    let count = usize::try_from(u32::from_be_bytes(rest.array()?)).ok()?;
    if count > MOST_FIELDS {
        return None;
    }
    let mut headers = HeaderMap::new();
    for _ in 0..count {
        let name = HeaderName::from_bytes(rest.text()?).ok()?;
        let value = HeaderValue::from_bytes(rest.text()?).ok()?;
        headers.try_append(name, value).ok()?;
    }
    let length = rest.number()?;
    let body = rest.0;
    (body.len() as u64 == length).then_some(Value { label, status, headers, body })
}

/// What has not been read yet.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*array)
    }

    fn number(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    fn text(&mut self) -> Option<&'a [u8]> {
        let length = usize::try_from(u32::from_be_bytes(self.array()?)).ok()?;
        let (text, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn label() -> impl Strategy<Value = Label> {
        (any::<[u64; 4]>(), any::<[u8; 32]>()).prop_map(
            |([sent_at, sent_ago, age_when_sent, life], stamp)| Label {
                sent_at,
                sent_ago,
                age_when_sent,
                life,
                stamp,
            },
        )
    }

    /// Names come again and again, and values may be any that a field can have.
    fn headers() -> impl Strategy<Value = HeaderMap> {
        let value = prop_oneof!["[\\x20-\\x7e]{0,20}", "[\u{a0}-\u{ff}]{0,5}"];
        vec(("[a-c]{1,2}|x-[a-z0-9]{1,12}", value), 0..20).prop_map(|fields| {
            let field = |(name, value): (String, String)| {
                let value = HeaderValue::from_bytes(value.trim().as_bytes()).unwrap();
                (HeaderName::from_bytes(name.as_bytes()).unwrap(), value)
            };
            let mut headers = HeaderMap::new();
            for (name, value) in fields.into_iter().map(field) {
                headers.append(name, value);
            }
            headers
        })
    }

    fn written(headers: &HeaderMap, body: &[u8]) -> Vec<u8> {
        let label = Label { sent_at: 1, sent_ago: 2, age_when_sent: 3, life: 4, stamp: [5; 32] };
        write(&label, StatusCode::OK, headers, body).unwrap()
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            label in label(),
            status in 100..1000u16,
            headers in headers(),
            body in vec(any::<u8>(), 0..300),
        ) {
            let status = StatusCode::from_u16(status).unwrap();
            let bytes = write(&label, status, &headers, &body).unwrap();
            prop_assert_eq!(bytes.len(), size(&headers, &body));
            prop_assert_eq!(read(&bytes), Some(Value { label, status, headers, body: &body }));
        }

        #[test]
        fn what_nobody_wrote_is_nothing(bytes in vec(any::<u8>(), 0..400)) {
            // That a body's length fits by chance is out of reach, a panic is not.
            prop_assert_eq!(read(&bytes), None);
            let of_ours = [&[VERSION][..], &bytes].concat();
            prop_assert_eq!(read(&of_ours), None);
        }

        /// Nearly right is where a reader goes wrong.
        #[test]
        fn what_was_changed_does_no_harm(
            headers in headers(),
            body in vec(any::<u8>(), 0..40),
            changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        ) {
            let mut bytes = written(&headers, &body);
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if let Some(value) = read(&bytes) {
                let again = write(&value.label, value.status, &value.headers, value.body).unwrap();
                prop_assert_eq!(read(&again), Some(value));
            }
        }
    }

    #[test]
    fn half_of_a_value_and_more_than_one_are_nothing() {
        let headers = HeaderMap::from_iter([(http::header::ETAG, HeaderValue::from_static("\"a\""))]);
        let bytes = written(&headers, b"hello");
        for end in 0..bytes.len() {
            assert_eq!(read(&bytes[..end]), None, "{end}");
        }
        assert_eq!(read(&[&bytes[..], b"x"].concat()), None);
        assert!(read(&bytes).is_some());
    }

    #[test]
    fn another_versions_value_is_nothing() {
        let mut bytes = written(&HeaderMap::new(), b"hello");
        for version in (0..=u8::MAX).filter(|version| *version != VERSION) {
            bytes[0] = version;
            assert_eq!(read(&bytes), None, "{version}");
        }
    }

    #[test]
    fn a_head_of_too_many_fields_is_neither_written_nor_read() {
        let mut headers = HeaderMap::new();
        for _ in 0..MOST_FIELDS {
            headers.append("x-a", HeaderValue::from_static("b"));
        }
        let mut bytes = written(&headers, b"");
        assert!(read(&bytes).is_some());
        headers.append("x-a", HeaderValue::from_static("b"));
        let label = Label { sent_at: 1, sent_ago: 2, age_when_sent: 3, life: 4, stamp: [5; 32] };
        assert_eq!(write(&label, StatusCode::OK, &headers, b""), None);
        // Of which a header map would have to be made first.
        let count = 1 + 4 * 8 + 32 + 2;
        bytes[count..count + 4].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(read(&bytes), None);
    }
}
