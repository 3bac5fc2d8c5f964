//! Which policy a request would get, and which line of the file each value comes from.

use std::fmt::{self, Display};

use http::{Method, Uri};
use serde_json::Value;

use super::effective::{origin, upstream_tls};
use super::problem::{Path, Place};
use super::{Loaded, UpstreamPolicy};
use crate::wire::authority::Authority;

/// The answer to `hedgerow explain FILE URL`.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// The request's upstream key, `host:port`.
    pub authority: Authority,
    /// The policy's name; `default` when no upstream names the host.
    pub upstream: String,
    /// The pattern that matched, and its line.
    pub host: Option<(String, usize)>,
    /// The route that matched: its name, or its place in the list from 0; and its line.
    pub route: Option<(String, usize)>,
    /// Every value that holds for the request.
    pub values: Vec<Explained>,
}

/// One value.
#[derive(Debug, Clone, PartialEq)]
pub struct Explained {
    /// The key below the section, such as `hedge.after`.
    pub key: String,
    /// The value in the policy's notation.
    pub value: String,
    /// Where it was set.
    pub source: Source,
}

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Nobody set it.
    BuiltIn,
    /// A section of the file, such as `defaults` or `upstreams.quotes`, and the line in it.
    File {
        /// The section's path.
        section: String,
        /// From 1.
        line: usize,
    },
}

impl Loaded {
    /// What a request of `method` for `url` would get.
    ///
    /// # Errors
    /// What is wrong with the URL.
    pub fn explain(&self, url: &str, method: &Method) -> Result<Explanation, String> {
        let (authority, path) = target(url)?;
        let policy = self.config.policy_for(&authority);
        let section = self.section_of(policy);
        let route = policy.route_for(method, &path);
        let mut sections = vec![section.clone(), Path::of(["defaults"])];
        if let Some((index, _)) = route {
            sections.insert(0, section.key("routes").index(index));
        }
        let stages = route.map_or(&policy.stages, |(_, route)| &route.stages);
        let mut values = self.of_upstream(policy, &section);
        flatten("", &stages.effective(), &mut |key, value| {
            let source = self.source(&sections, key);
            values.push(Explained { key: key.to_owned(), value, source });
        });
        Ok(Explanation {
            host: self.host_of(policy, &authority, &section),
            upstream: policy.name.to_string(),
            route: route.map(|(index, route)| {
                let name = route.name.as_deref().map_or_else(|| index.to_string(), str::to_owned);
                (name, self.line(&section.key("routes").index(index)))
            }),
            authority,
            values,
        })
    }

    fn section_of(&self, policy: &UpstreamPolicy) -> Path {
        if policy.index == self.config.upstreams.len() {
            Path::of(["defaults"])
        } else {
            Path::of(["upstreams", &*policy.name])
        }
    }

    fn host_of(&self, policy: &UpstreamPolicy, to: &Authority, section: &Path) -> Option<(String, usize)> {
        let matching = policy.hosts.iter().enumerate().filter(|(_, host)| host.matches(to.host(), to.port()));
        // As the index finds them: exact before suffix, longer before shorter, with a port before without.
        let rank = |host: &super::HostPattern| (!host.is_suffix, host.name.len(), host.port.is_some());
        let (index, host) = matching.max_by_key(|(_, host)| rank(host))?;
        Some((host.to_string(), self.line(&section.key("hosts").index(index))))
    }

    /// What no route can say, where the upstream says something.
    fn of_upstream(&self, policy: &UpstreamPolicy, section: &Path) -> Vec<Explained> {
        let own = std::slice::from_ref(section);
        let inherited = [section.clone(), Path::of(["defaults"])];
        let mut values = Vec::new();
        let mut explain = |sections: &[Path], key: &str, value: String| {
            let source = self.source(sections, key);
            values.push(Explained { key: key.to_owned(), value, source });
        };
        if let Some(endpoint) = &policy.endpoint {
            explain(own, "endpoint", endpoint.to_string());
        }
        explain(own, "origin", origin(policy.origin).to_owned());
        explain(&inherited, "intercept", policy.intercept.to_string());
        flatten("tls", &upstream_tls(&policy.tls), &mut |key, value| explain(own, key, value));
        if let Some((from, _)) = policy.rewrite.as_ref().and_then(|rewrite| rewrite.path.as_ref()) {
            explain(own, "rewrite.path", from.to_string());
        }
        values
    }

    fn source(&self, sections: &[Path], key: &str) -> Source {
        let found = sections.iter().find_map(|section| {
            let path = key.split('.').fold(section.clone(), |path, key| path.key(key));
            let Place { line, .. } = self.tree.exact_place(&path)?;
            Some(Source::File { section: section.to_string(), line })
        });
        found.unwrap_or(Source::BuiltIn)
    }

    fn line(&self, path: &Path) -> usize {
        self.tree.locate(path).0.line
    }
}

/// The authority and path that a request for `url` has.
fn target(url: &str) -> Result<(Authority, String), String> {
    let uri: Uri = url.parse().map_err(|error| format!("no URL: {error}"))?;
    let default_port = match uri.scheme_str() {
        Some("http" | "ws") => 80,
        Some("https" | "wss") => 443,
        _ => return Err("expected a URL such as https://api.example.com/v1/search".into()),
    };
    let authority = uri.authority().map(http::uri::Authority::as_str).unwrap_or_default();
    Ok((Authority::parse(authority, Some(default_port))?, uri.path().to_owned()))
}

/// Every value of an object with its dotted key; lists are values.
fn flatten(prefix: &str, value: &Value, visit: &mut impl FnMut(&str, String)) {
    match value {
        Value::Object(keys) => {
            for (key, value) in keys {
                let dotted = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                flatten(&dotted, value, visit);
            }
        }
        Value::String(text) => visit(prefix, text.clone()),
        Value::Array(items) => {
            let items: Vec<String> = items
                .iter()
                .map(|item| item.as_str().map_or_else(|| item.to_string(), str::to_owned))
                .collect();
            visit(prefix, format!("[{}]", items.join(", ")));
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => visit(prefix, value.to_string()),
    }
}

impl Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BuiltIn => f.write_str("built in"),
            Self::File { section, line } => write!(f, "line {line}, {section}"),
        }
    }
}

impl Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<10} {}", "to", self.authority)?;
        match &self.host {
            Some((pattern, line)) => {
                writeln!(f, "{:<10} {} (host {pattern}, line {line})", "upstream", self.upstream)?;
            }
            None => writeln!(f, "{:<10} {} (no upstream names the host)", "upstream", self.upstream)?,
        }
        match &self.route {
            Some((name, line)) => writeln!(f, "{:<10} {name} (line {line})", "route")?,
            None => writeln!(f, "{:<10} none", "route")?,
        }
        writeln!(f)?;
        let width = |of: fn(&Explained) -> &str| self.values.iter().map(|v| of(v).len()).max().unwrap_or(0);
        let (keys, values) = (width(|v| &v.key), width(|v| &v.value));
        for Explained { key, value, source } in &self.values {
            writeln!(f, "{key:<keys$}  {value:<values$}  {source}")?;
        }
        Ok(())
    }
}
