//! What tells two calls apart when one's answer might do for the other.
//!
//! Coalescing and the cache both give an answer to a call that it was not made for, so both ask here
//! and nowhere else. A [`Key`] is a digest over everything that can change an answer: where the request
//! goes, what it asks for and who asks. Two calls with different credentials have different keys, whatever
//! the policy says: no setting takes a field out of the key, only more in. Each part goes into the digest with its
//! length, so that no two lists of parts look alike, and the digest is long enough (SHA-256) that nobody can
//! make two calls collide. What is kept under a key never holds the credential itself. The parts are written
//! down first and digested in one go, which costs less than feeding the digest piece by piece.

use std::net::IpAddr;

use http::Method;
use http::header::{self, HeaderMap, HeaderName};
use http::uri::PathAndQuery;
use ring::digest::{Context, Digest, SHA256, digest};

use crate::config::UpstreamPolicy;
use crate::wire::credentials::is_credential;
use crate::wire::target::Scheme;

/// What answers differ by although their `Vary` forgets to say so, often enough that no answer is given to one that
/// asked for another kind. Codings are as often forgotten, but an answer tells by itself whether it has one.
pub static NEGOTIATED: [HeaderName; 1] = [header::ACCEPT];

/// Where a request goes and what it asks for, without its fields.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// As the client named it.
    pub scheme: Scheme,
    /// Host and port in normal form.
    pub authority: &'a str,
    /// What the upstream is sent as `Host`, where that is the client's own word; else empty. Behind one address
    /// another name may be another site.
    pub host: &'a [u8],
    /// What the policy makes of requests on their way there.
    pub passage: &'a Passage,
    /// The address that the client itself wanted to go to: what another address answers under this name
    /// may be anything.
    pub pinned: Option<IpAddr>,
    /// Path and query.
    pub target: &'a PathAndQuery,
}

/// What a policy makes of requests on their way to the upstream, as a digest: where they go, how the upstream is
/// spoken to, and what is changed in them. After a reload that changes any of it, answers are other ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Passage([u8; 32]);

impl Passage {
    /// Nothing that would have to be told apart.
    pub const NONE: Self = Self([0; 32]);

    /// What `policy` does.
    pub fn of(policy: &UpstreamPolicy) -> Self {
        let mut parts = Parts::new();
        if let Some(endpoint) = &policy.endpoint {
            parts.add(if endpoint.is_https { b"https" } else { b"http" });
            parts.add(endpoint.authority.key().as_bytes());
        }
        parts.add(&[policy.origin as u8]);
        parts.add(policy.tls.server_name.as_deref().unwrap_or_default().as_bytes());
        parts.add(policy.tls.ca_pem.as_deref().unwrap_or_default());
        parts.add(policy.tls.client.as_ref().map_or(&[][..], |client| &client.cert_pem));
        if let Some(rules) = &policy.rewrite {
            let (from, to) = rules.path.as_ref().map_or(("", ""), |(from, to)| (from.as_str(), to.as_str()));
            parts.add(from.as_bytes());
            parts.add(to.as_bytes());
            for (name, value) in &rules.set {
                parts.add(name.as_str().as_bytes());
                parts.add(value.as_bytes());
            }
            parts.add(b"without");
            rules.remove.iter().for_each(|name| parts.add(name.as_str().as_bytes()));
        }
        Self(parts.finish())
    }
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
        let mut parts = Parts::new();
        parts.add_resource(place);
        parts.add(match place.scheme {
            Scheme::Http => b"http",
            Scheme::Https => b"https",
        });
        parts.add(place.host);
        parts.add(&place.passage.0);
        match place.pinned.map(|ip| ip.to_canonical()) {
            None => parts.add(&[]),
            Some(IpAddr::V4(ip)) => parts.add(&ip.octets()),
            Some(IpAddr::V6(ip)) => parts.add(&ip.octets()),
        }
        parts.add(method.as_str().as_bytes());
        parts.add_credentials(headers);
        for name in NEGOTIATED.iter().chain(fields) {
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

/// The digest of what a request is about, whoever asks and however: for forgetting all that is kept of it.
pub fn resource(place: Place<'_>) -> [u8; 32] {
    let mut parts = Parts::new();
    parts.add_resource(place);
    parts.finish()
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
        Self(into_array(digest.finish()))
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
        let mut parts = Parts::new();
        parts.add_credentials(headers);
        Some(Self(parts.finish()))
    }
}

/// Whether a request says who asks.
pub fn is_shown(headers: &HeaderMap) -> bool {
    headers.keys().any(is_credential)
}

/// What is digested.
struct Parts(Vec<u8>);

impl Parts {
    /// With room for all but long targets and credentials.
    fn new() -> Self {
        Self(Vec::with_capacity(1024))
    }

    fn add(&mut self, part: &[u8]) {
        self.0.extend_from_slice(&(part.len() as u64).to_be_bytes());
        self.0.extend_from_slice(part);
    }

    fn add_resource(&mut self, place: Place<'_>) {
        self.add(place.authority.as_bytes());
        self.add(place.target.as_str().as_bytes());
    }

    /// Adds all credentials, in an order that does not depend on how they came.
    fn add_credentials(&mut self, headers: &HeaderMap) {
        let mut names: Vec<&HeaderName> = headers.keys().filter(|name| is_credential(name)).collect();
        names.sort_unstable_by_key(|name| name.as_str());
        self.0.extend_from_slice(&(names.len() as u64).to_be_bytes());
        for name in names {
            self.add_field(name, headers);
        }
    }

    /// Adds the field's values in their order. Several are not the same as one with commas.
    fn add_field(&mut self, name: &HeaderName, headers: &HeaderMap) {
        let values = headers.get_all(name);
        let count = values.iter().count();
        self.add(name.as_str().as_bytes());
        self.0.extend_from_slice(&(count as u64).to_be_bytes());
        for value in values {
            self.add(value.as_bytes());
        }
    }

    fn finish(self) -> [u8; 32] {
        into_array(digest(&SHA256, &self.0))
    }
}

fn into_array(digest: Digest) -> [u8; 32] {
    digest.as_ref().try_into().expect("SHA-256 has 32 bytes")
}
