//! How requests are changed on their way to an upstream.

use http::{HeaderName, HeaderValue};

use super::Builder;
use crate::config::de::did_you_mean;
use crate::config::notation::Named;
use crate::config::problem::Path;
use crate::config::{Rewrite, raw};

impl Builder<'_> {
    pub(super) fn rewrite(&self, keys: &raw::Rewrite, path: &Path) -> Rewrite {
        let headers = keys.headers.clone().unwrap_or_default();
        let remove_path = path.key("headers").key("remove");
        Rewrite {
            path: keys.path.as_ref().and_then(|keys| self.rewrite_path(keys, &path.key("path"))),
            set: self.set_headers(headers.set.as_ref(), &path.key("headers").key("set")),
            remove: self.list(headers.remove.as_deref(), &remove_path, header_name),
        }
    }

    fn rewrite_path(&self, keys: &raw::RewritePath, path: &Path) -> Option<(regex::Regex, String)> {
        let (Some(from), Some(to)) = (&keys.from, &keys.to) else {
            self.report.error(path, "expected both `from` and `to`");
            return None;
        };
        let regex = regex::Regex::new(from).map_err(|error| match error {
            regex::Error::Syntax(text) => {
                let reason = text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
                format!("expected a regular expression: {reason}")
            }
            _ => "the regular expression is too large".to_owned(),
        });
        let regex = self.report.check(&path.key("from"), regex)?;
        for group in groups_of(to) {
            let is_known = match group.parse::<usize>() {
                Ok(number) => number < regex.captures_len(),
                Err(_) => regex.capture_names().flatten().any(|name| name == group),
            };
            if !is_known {
                let hint = did_you_mean(group, regex.capture_names().flatten());
                self.report.error(&path.key("to"), format!("`from` has no group `{group}`{hint}"));
            }
        }
        Some((regex, to.clone()))
    }

    fn set_headers(&self, set: Option<&Named<String>>, path: &Path) -> Vec<(HeaderName, HeaderValue)> {
        let mut headers: Vec<(HeaderName, HeaderValue)> = Vec::new();
        for (name, text) in set.map(|set| set.0.as_slice()).unwrap_or_default() {
            let path = path.key(name);
            let Some(name) = self.report.check(&path, header_name(name)) else { continue };
            if headers.iter().any(|(own, _)| *own == name) {
                self.report.error(&path, "the same field in other letters is set already");
                continue;
            }
            let value = self.sources.substitute(text).and_then(|text| {
                HeaderValue::from_str(&text)
                    .map_err(|_| "the value has characters that no field has".to_owned())
            });
            let Some(mut value) = self.report.check(&path, value) else { continue };
            // Any of them may be a key, so that none is ever printed or indexed by HPACK.
            value.set_sensitive(true);
            headers.push((name, value));
        }
        headers
    }
}

fn header_name(name: &str) -> Result<HeaderName, String> {
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

/// The groups that a replacement uses, as the regex crate reads it: `$1`, `$name`, `${name}`.
fn groups_of(replacement: &str) -> Vec<&str> {
    let mut groups = Vec::new();
    let mut rest = replacement;
    while let Some((_, after)) = rest.split_once('$') {
        if let Some(after) = after.strip_prefix('$') {
            rest = after;
        } else if let Some((name, after)) = after.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
            groups.push(name);
            rest = after;
        } else {
            let end = after.find(|c: char| c != '_' && !c.is_ascii_alphanumeric()).unwrap_or(after.len());
            groups.extend(Some(&after[..end]).filter(|name| !name.is_empty()));
            rest = &after[end..];
        }
    }
    groups
}
