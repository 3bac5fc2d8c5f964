//! What tells two calls apart when one's answer might do for the other.
//!
//! Coalescing and the cache both give an answer to a call that it was not made for, so both ask here
//! and nowhere else. A [`Key`] is a digest over everything that can change an answer: where the request
//! goes, what it asks for and who asks. Two calls with different credentials have different keys, whatever
//! the policy says: no setting takes a field out of the key, only more in. Each part goes into the digest with its
//! length, so that no two lists of parts look alike, and the digest is long enough (SHA-256) that nobody can
//! make two calls collide. What is kept under a key never holds the credential itself.

use std::net::IpAddr;

use http::Method;
use http::header::{self, HeaderMap, HeaderName};
use http::uri::PathAndQuery;
use ring::digest::{Context, SHA256};

use crate::wire::target::Scheme;

/// The fields by which callers say who they are. Beside the standard ones, those that providers of tools
/// and models made up for themselves: to take one of them for a credential that is none costs a hit, to
/// miss one would show a caller another one's answer.
static CREDENTIALS: [HeaderName; 9] = [
    header::AUTHORIZATION,
    header::COOKIE,
    HeaderName::from_static("x-api-key"),
    HeaderName::from_static("api-key"),
    HeaderName::from_static("x-goog-api-key"),
    HeaderName::from_static("x-auth-token"),
    HeaderName::from_static("x-access-token"),
    HeaderName::from_static("x-amz-security-token"),
    HeaderName::from_static("x-subscription-token"),
];

/// What answers differ by although their `Vary` forgets to say so, often enough that no answer is shared over it.
pub static NEGOTIATED: [HeaderName; 2] = [header::ACCEPT, header::ACCEPT_ENCODING];

/// Where a request goes and what it asks for, without its fields.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// As the client named it.
    pub scheme: Scheme,
    /// Host and port in normal form.
    pub authority: &'a str,
    /// Host and port that are dialled for it, which a reload may change.
    pub dialled: &'a str,
    /// The address that the client itself wanted to go to: what another address answers under this name
    /// may be anything.
    pub pinned: Option<IpAddr>,
    /// Path and query.
    pub target: &'a PathAndQuery,
}

/// Two calls with the same key may share an answer, as far as the request tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key([u8; 32]);

impl Key {
    /// The key of a call. `method` is what answers are made for, which for a cache is GET for HEAD too;
    /// `fields` are looked at beside those that always are; `body` is what is sent.
    pub fn of<'a>(
        place: Place<'_>,
        method: &Method,
        headers: &HeaderMap,
        fields: impl IntoIterator<Item = &'a HeaderName>,
        body: Option<&BodyDigest>,
    ) -> Self {
        let mut parts = place_digest(place);
        parts.add(method.as_str().as_bytes());
        for name in CREDENTIALS.iter().chain(&NEGOTIATED).chain(fields) {
            parts.add_field(name, headers);
        }
        parts.add(body.map_or(&[][..], |digest| &digest.0));
        Self(parts.finish())
    }

    /// The digest.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// The digest of where a request goes, whoever asks: for forgetting all that is kept of a resource.
pub fn resource(place: Place<'_>) -> [u8; 32] {
    place_digest(place).finish()
}

fn place_digest(place: Place<'_>) -> Parts {
    let mut parts = Parts(Context::new(&SHA256));
    parts.add(match place.scheme {
        Scheme::Http => b"http",
        Scheme::Https => b"https",
    });
    parts.add(place.authority.as_bytes());
    parts.add(place.dialled.as_bytes());
    match place.pinned.map(|ip| ip.to_canonical()) {
        None => parts.add(&[]),
        Some(IpAddr::V4(ip)) => parts.add(&ip.octets()),
        Some(IpAddr::V6(ip)) => parts.add(&ip.octets()),
    }
    parts.add(place.target.as_str().as_bytes());
    parts
}

/// The digest of a request body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BodyDigest([u8; 32]);

impl BodyDigest {
    /// Over all of `chunks`, however they are cut.
    pub fn of(chunks: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Self {
        let mut digest = Context::new(&SHA256);
        for chunk in chunks {
            digest.update(chunk.as_ref());
        }
        Self(into_array(digest))
    }
}

/// Who asks, as a number that stands for all the credentials of a request. It is no secret and tells none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Credential([u8; 32]);

impl Credential {
    /// The credentials of a request; `None` when it shows none.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        if !is_shown(headers) {
            return None;
        }
        let mut parts = Parts(Context::new(&SHA256));
        for name in &CREDENTIALS {
            parts.add_field(name, headers);
        }
        Some(Self(parts.finish()))
    }
}

/// Whether a request says who asks.
pub fn is_shown(headers: &HeaderMap) -> bool {
    CREDENTIALS.iter().any(|name| headers.contains_key(name))
}

struct Parts(Context);

impl Parts {
    fn add(&mut self, part: &[u8]) {
        self.0.update(&(part.len() as u64).to_be_bytes());
        self.0.update(part);
    }

    /// Adds the field's values in their order. Several are not the same as one with commas.
    fn add_field(&mut self, name: &HeaderName, headers: &HeaderMap) {
        let values = headers.get_all(name);
        let count = values.iter().count();
        self.add(name.as_str().as_bytes());
        self.0.update(&(count as u64).to_be_bytes());
        for value in values {
            self.add(value.as_bytes());
        }
    }

    fn finish(self) -> [u8; 32] {
        into_array(self.0)
    }
}

fn into_array(digest: Context) -> [u8; 32] {
    let digest = digest.finish();
    digest.as_ref().try_into().expect("SHA-256 has 32 bytes")
}
