//! Both sides of HTTP/2: an agent, an upstream that a test drives stream by stream, and bare frames for what a
//! library would not do.
//!
//! The library (the `h2` crate on both sides of the proxy and in it) keeps its own rules, so it cannot be the
//! judge of them. Hence the upstream's [`wire`] is read frame by frame below the library: how many streams were
//! open, which were reset and why, stand in the record as they came over the wire.

pub mod agent;
pub mod frames;
pub mod upstream;
mod wire;

pub use agent::{Answer, Call, End, Http2Agent};
pub use upstream::{Http2Upstream, Stream};

use bytes::Bytes;
use h2::RecvStream;
use http::{HeaderMap, HeaderName, HeaderValue};

/// Neither side of a test takes many small frames for an attack: what is tried is whether the proxy does.
const PATIENT: usize = 1 << 30;

/// Fields for a request or an answer.
pub fn fields(fields: &[(&str, &str)]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in fields {
        let name = HeaderName::from_bytes(name.as_bytes()).expect("a valid name");
        map.append(name, HeaderValue::from_str(value).expect("a valid value"));
    }
    map
}

/// The values of all fields of this name.
pub fn values<'h>(headers: &'h HeaderMap, name: &str) -> Vec<&'h str> {
    headers.get_all(name).iter().map(|value| value.to_str().expect("text")).collect()
}

/// The next piece of a body, and room for as much again; `None` at its end.
async fn piece(body: &mut RecvStream) -> Option<Result<Bytes, h2::Error>> {
    loop {
        let piece = body.data().await?;
        let Ok(bytes) = &piece else { return Some(piece) };
        // Fails when the stream has been reset, which the next read tells.
        let _ = body.flow_control().release_capacity(bytes.len());
        // The end may come in an empty frame.
        if !bytes.is_empty() {
            return Some(piece);
        }
    }
}
