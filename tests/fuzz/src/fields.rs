//! Header fields out of bytes.

use http::{HeaderMap, HeaderName, HeaderValue};

/// More than the proxy lets in.
const MOST: usize = 200;

/// `name: value` in each line; what the HTTP library would refuse is left out.
pub(crate) fn fields(data: &[u8]) -> HeaderMap {
    let field = |line: &[u8]| {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        Some((HeaderName::from_bytes(name).ok()?, HeaderValue::from_bytes(value).ok()?))
    };
    let mut headers = HeaderMap::new();
    for (name, value) in data.split(|byte| *byte == b'\n').filter_map(field).take(MOST) {
        headers.append(name, value);
    }
    headers
}
