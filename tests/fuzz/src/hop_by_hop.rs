//! Which fields end with a connection.

use hedgerow::wire::hop_by_hop::{Forwarded, names, strip, upgrade};
use http::HeaderMap;

use crate::Target;
use crate::fields::fields;

/// Header fields: the two ways to leave fields behind, copying and stripping, agree; what `Connection`
/// names does not go on, and what the next hop needs does.
pub const HOP_BY_HOP: Target = Target {
    check,
    inputs: 30_000,
    seeds: &[
        "connection: X-Hop, close\nx-hop: 1\nkeep-alive: 5\nx-end: 1\nX-End: 2",
        "Connection: host, content-length,, ,content-type\nhost: a\ncontent-length: 3\ncontent-type: x",
        "connection: upgrade\nconnection: http2-settings\nupgrade: h2c\nhttp2-settings: AAM",
        "connection: Upgrade\nupgrade: websocket\nte: trailers, deflate\ntransfer-encoding: chunked",
        "proxy-authorization: Basic eA==\nproxy-connection: close\nproxy-authenticate: Basic",
        "connection: connection, connection\nx: \u{e9}",
    ],
};

/// Stripping is for heads of answers and copying for requests, which have these of their own.
const OF_REQUESTS: [&str; 2] = ["proxy-authorization", "http2-settings"];
const NEEDED: [&str; 3] = ["host", "content-length", "content-type"];

fn check(data: &[u8]) {
    let headers = fields(data);
    let copied: HeaderMap =
        Forwarded::of(&headers).iter().map(|(name, value)| (name.clone(), value.clone())).collect();
    let mut stripped = headers.clone();
    strip(&mut stripped);
    for name in OF_REQUESTS {
        stripped.remove(name);
    }
    assert_eq!(copied.len(), count(&headers, &copied), "a repeated field went on in part");
    assert_eq!(copied, stripped, "copying and stripping differ");
    for name in copied.keys() {
        let is_needed = NEEDED.contains(&name.as_str());
        assert!(is_needed || !names(&headers, name.as_str()), "{name} is named by Connection");
    }
    for name in NEEDED {
        assert_eq!(copied.contains_key(name), headers.contains_key(name), "{name}");
    }
    if let Some(protocol) = upgrade(&headers) {
        assert!(!protocol.as_bytes().to_ascii_lowercase().starts_with(b"h2c"), "h2c was relayed");
    }
}

/// How many values `headers` has under the names of `copied`.
fn count(headers: &HeaderMap, copied: &HeaderMap) -> usize {
    copied.keys().map(|name| headers.get_all(name).iter().count()).sum()
}
