//! Fields of a head as the policy names them: to set, to take away, to tell calls apart by.

use http::{HeaderName, HeaderValue};

use super::files::Sources;
use super::notation::Named;
use super::problem::Path;
use super::report::Report;

/// The fields of the mapping at `path`, with their secrets put in. What is wrong is noted and left out.
pub(super) fn fields(
    set: Option<&Named<String>>,
    path: &Path,
    report: &Report<'_>,
    sources: &Sources,
) -> Vec<(HeaderName, HeaderValue)> {
    let mut fields: Vec<(HeaderName, HeaderValue)> = Vec::new();
    for (name, text) in set.map(|set| set.0.as_slice()).unwrap_or_default() {
        let path = path.key(name);
        let Some(name) = report.check(&path, field_name(name)) else { continue };
        if fields.iter().any(|(own, _)| *own == name) {
            report.error(&path, "the same field in other letters is set already");
            continue;
        }
        let value = sources.substitute(text).and_then(|text| {
            HeaderValue::from_str(&text).map_err(|_| "the value has characters that no field has".to_owned())
        });
        let Some(mut value) = report.check(&path, value) else { continue };
        // Any of them may be a key, so that none is ever printed or indexed by HPACK.
        value.set_sensitive(true);
        fields.push((name, value));
    }
    fields
}

/// A field that the policy may change: none of those that hedgerow writes for each connection itself.
pub(super) fn field_name(name: &str) -> Result<HeaderName, String> {
    const OF_THE_CONNECTION: [&str; 9] = [
        "connection",
        "content-length",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "proxy-connection",
    ];
    let header: HeaderName = name.parse().map_err(|_| "expected the name of a header field".to_owned())?;
    if OF_THE_CONNECTION.contains(&header.as_str()) {
        return Err(format!("`{header}` belongs to the connection, which hedgerow sets up itself"));
    }
    Ok(header)
}

/// A request field by which calls are told apart.
pub(super) fn vary_name(name: &str) -> Result<HeaderName, String> {
    match name {
        // In an answer's `Vary` it means that no two calls are alike (RFC 9110 section 12.5.5).
        "*" => Err("`*` would tell all calls apart; `off` turns the stage off".into()),
        _ => field_name(name),
    }
}
