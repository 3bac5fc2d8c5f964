//! Fields that belong to one connection and end with it (RFC 9110 section 7.6.1).
//!
//! A message's head is copied field by field into the next hop's, and what is hop-by-hop stays
//! behind: the fixed list below, the names that `Connection` lists, and the proxy's own credentials.
//! `Connection` cannot take away what the message needs to be read at all.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};

static PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
static KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
static HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");

/// The fields of a request or response that go on to the next hop.
pub struct Forwarded<'a> {
    headers: &'a HeaderMap,
    has_connection: bool,
}

impl<'a> Forwarded<'a> {
    /// Looks at `headers` once for a `Connection` field.
    pub fn of(headers: &'a HeaderMap) -> Self {
        Self { headers, has_connection: headers.contains_key(header::CONNECTION) }
    }

    /// Whether the field goes on.
    pub fn keeps(&self, name: &HeaderName) -> bool {
        let is_listed = || self.has_connection && !is_protected(name) && names(self.headers, name.as_str());
        !is_hop_by_hop(name) && !is_listed()
    }

    /// The fields that go on, repeated ones in their order.
    pub fn iter(&self) -> impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)> {
        self.headers.iter().filter(|(name, _)| self.keeps(name))
    }
}

/// Takes the hop-by-hop fields out of a head that is passed on as it is. Most heads have none or a
/// `Connection` alone, so they are looked for in one pass before anything is taken out.
pub fn strip(headers: &mut HeaderMap) {
    let forwarded = Forwarded::of(headers);
    let doomed: Vec<HeaderName> = headers.keys().filter(|name| !forwarded.keeps(name)).cloned().collect();
    for name in doomed {
        headers.remove(name);
    }
}

/// Whether `Connection` lists a field that is there and would go on if it were not listed.
pub fn takes_away(headers: &HeaderMap) -> bool {
    let forwarded = Forwarded::of(headers);
    forwarded.has_connection && headers.keys().any(|name| !is_hop_by_hop(name) && !forwarded.keeps(name))
}

/// Whether `Connection` lists `option`, in any case.
pub fn names(headers: &HeaderMap, option: &str) -> bool {
    options(headers).any(|listed| listed.eq_ignore_ascii_case(option))
}

/// Whether the sender asks for trailers: the one value of `TE` that a proxy may pass on.
pub fn wants_trailers(headers: &HeaderMap) -> bool {
    headers
        .get_all(header::TE)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|coding| coding.trim().eq_ignore_ascii_case("trailers"))
}

/// The protocol that a request asks to change to, where it is one that passes through a proxy.
/// `h2c` does not: relayed, it would smuggle requests past every policy (RFC 9113 section 3.1).
pub fn upgrade(headers: &HeaderMap) -> Option<&HeaderValue> {
    let wanted = headers.get(header::UPGRADE)?;
    let is_h2c = wanted.as_bytes().get(..3).is_some_and(|start| start.eq_ignore_ascii_case(b"h2c"));
    (!is_h2c && names(headers, "upgrade")).then_some(wanted)
}

fn options(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
}

fn is_hop_by_hop(name: &HeaderName) -> bool {
    name == header::CONNECTION
        || name == header::TRANSFER_ENCODING
        || name == header::TE
        || name == header::UPGRADE
        || name == header::PROXY_AUTHORIZATION
        || name == header::PROXY_AUTHENTICATE
        || *name == PROXY_CONNECTION
        || *name == KEEP_ALIVE
        || *name == HTTP2_SETTINGS
}

/// What the next hop cannot read the message without.
fn is_protected(name: &HeaderName) -> bool {
    name == header::HOST || name == header::CONTENT_LENGTH || name == header::CONTENT_TYPE
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        fields
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect()
    }

    fn kept(fields: &[(&'static str, &'static str)]) -> Vec<String> {
        let headers = map(fields);
        let by_iter: Vec<String> = Forwarded::of(&headers).iter().map(|(name, _)| name.to_string()).collect();
        by_iter
    }

    #[test]
    fn fields_named_by_connection_stay_behind() {
        let fields = [
            ("connection", "X-Hop, close"),
            ("x-hop", "secret"),
            ("keep-alive", "5"),
            ("proxy-connection", "x"),
            ("proxy-authorization", "Basic eA=="),
            ("x-end", "1"),
        ];
        assert_eq!(kept(&fields), ["x-end"]);
        let mut headers = map(&fields);
        strip(&mut headers);
        assert_eq!(headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["x-end"]);
    }

    #[test]
    fn connection_cannot_take_what_the_message_needs() {
        let fields = [("connection", "host, content-length"), ("host", "a"), ("content-length", "3")];
        assert_eq!(kept(&fields), ["host", "content-length"]);
    }

    #[test]
    fn only_trailers_of_te_matters() {
        assert!(wants_trailers(&map(&[("te", "deflate, Trailers")])));
        assert!(!wants_trailers(&map(&[("te", "deflate")])));
    }

    #[test]
    fn h2c_is_no_upgrade_to_relay() {
        assert!(upgrade(&map(&[("connection", "Upgrade"), ("upgrade", "websocket")])).is_some());
        assert!(upgrade(&map(&[("connection", "Upgrade, HTTP2-Settings"), ("upgrade", "h2c")])).is_none());
        assert!(upgrade(&map(&[("upgrade", "websocket")])).is_none());
    }
}
