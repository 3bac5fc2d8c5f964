//! Which of a key's answers a request may have: what `Vary` names (RFC 9111 section 4.1), and of a coded answer
//! whether the request accepts the same codings, since many origins forget to name that. One without a coding is for
//! everyone: `fetch` accepts none where it asks for a part.
//!
//! An entry remembers the fields that its answer depended on and a digest of what the request had in them,
//! not their values: `Vary` may name a credential.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use ring::digest::{Context, SHA256};

use super::directives::{Escapes, members};

/// The most fields that an answer may depend on. Each look at it costs a digest over all of them.
const MOST_FIELDS: usize = 32;

/// The fields that chose an answer, and what they were.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Selection {
    /// Sorted, each once.
    fields: Box<[HeaderName]>,
    values: [u8; 32],
}

impl Selection {
    /// `None` when no later request could match: `Vary: *`, a member that can be no field, or so many that
    /// no two requests are alike.
    pub(super) fn of(answer: &HeaderMap, request: &HeaderMap) -> Option<Self> {
        let lines = answer.get_all(header::VARY).iter();
        let fields: Result<Vec<_>, _> = lines
            .flat_map(|line| members(line.as_bytes(), Escapes::No))
            .map(|member| if member == b"*" { Err(()) } else { HeaderName::from_bytes(member).map_err(drop) })
            .collect();
        let mut fields = fields.ok()?;
        if answer.contains_key(header::CONTENT_ENCODING) {
            fields.push(header::ACCEPT_ENCODING);
        }
        fields.sort_unstable_by(|one, other| one.as_str().cmp(other.as_str()));
        fields.dedup();
        if fields.len() > MOST_FIELDS {
            return None;
        }
        let values = digest(&fields, request);
        Some(Self { fields: fields.into(), values })
    }

    /// Whether the request would have been given this answer.
    pub(super) fn matches(&self, request: &HeaderMap) -> bool {
        self.fields.is_empty() || digest(&self.fields, request) == self.values
    }

    /// The digest of what the request had in those fields.
    pub(super) fn values(&self) -> &[u8; 32] {
        &self.values
    }

    /// Bytes of memory.
    pub(super) fn weight(&self) -> usize {
        self.fields.iter().map(|name| size_of::<HeaderName>() + name.as_str().len()).sum()
    }
}

/// What an agent negotiates by is compared as the list that RFC 9110 section 12.5 makes of it, so how it is
/// broken into lines and spaced does not matter; languages and codings in any case. Any other field may mean
/// something by each of its bytes. An absent field is not an empty one.
fn digest(fields: &[HeaderName], request: &HeaderMap) -> [u8; 32] {
    let mut digest = Context::new(&SHA256);
    for name in fields {
        if !request.contains_key(name) {
            digest.update(b"-");
            continue;
        }
        digest.update(b"+");
        let mut add = |part: &[u8]| {
            digest.update(&(part.len() as u64 + 1).to_be_bytes());
            digest.update(part);
        };
        let lines = request.get_all(name).iter().map(HeaderValue::as_bytes);
        if !NEGOTIATION.contains(name) {
            lines.for_each(&mut add);
        } else {
            let ignores_case = [header::ACCEPT_LANGUAGE, header::ACCEPT_ENCODING].contains(name);
            for member in lines.flat_map(|line| members(line, Escapes::Yes)) {
                if ignores_case { add(&member.to_ascii_lowercase()) } else { add(member) }
            }
        }
        digest.update(&0u64.to_be_bytes());
    }
    digest.finish().as_ref().try_into().expect("SHA-256 has 32 bytes")
}

static NEGOTIATION: [HeaderName; 4] =
    [header::ACCEPT, header::ACCEPT_CHARSET, header::ACCEPT_ENCODING, header::ACCEPT_LANGUAGE];
