//! Which policy a request would get, and which line of the file each value comes from.

use std::fmt::{self, Display};
use std::sync::Arc;

use http::{Method, Uri};
use serde_json::Value;

use super::effective::{origin, rewrite, upstream_tls};
use super::notation::OPT_IN;
use super::problem::{Path, Place};
use super::{Loaded, Stages, UpstreamPolicy, tree};
use crate::wire::authority::Authority;

/// The answer to `hedgerow explain FILE URL`.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// The request's upstream key, `host:port`.
    pub authority: Authority,
    /// The policy's name; `default` when no upstream names the host, `direct` when that list does.
    pub upstream: String,
    /// The pattern that matched, of the upstream's hosts or of `direct`, and its line.
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
        if Arc::ptr_eq(policy, &self.config.untouched) {
            return Ok(self.explain_direct(policy, authority));
        }
        let section = self.section_of(policy);
        let route = policy.route_for(method, &path);
        let mut sections = vec![section.clone(), Path::of(["defaults"])];
        if let Some((index, _)) = route {
            sections.insert(0, section.key("routes").index(index));
        }
        let stages = route.map_or(&policy.stages, |(_, route)| &route.stages);
        let mut values = self.of_upstream(policy, &section);
        self.explain_stages(stages, &sections, &policy.name, &mut values);
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

    /// What passes untouched: the stages are off by the entry that says so.
    fn explain_direct(&self, policy: &UpstreamPolicy, authority: Authority) -> Explanation {
        let mut rules = self.config.direct.iter().enumerate();
        let rule = rules.find(|(_, rule)| rule.matches(&authority)).map(|(index, rule)| {
            let line = self.line(&Path::of(["direct"]).index(index));
            (rule.to_string(), line)
        });
        let line = rule.as_ref().map_or(1, |(_, line)| *line);
        let mut values = Vec::new();
        flatten(&Path::root(), &policy.stages.effective(), &mut |key, value| {
            let is_off = matches!(value.as_str(), "off" | "[]");
            let source = match is_off {
                true => Source::File { section: "direct".into(), line },
                false => Source::BuiltIn,
            };
            values.push(Explained { key: key.to_string(), value, source });
        });
        Explanation { authority, upstream: policy.name.to_string(), host: rule, route: None, values }
    }

    fn explain_stages(
        &self,
        stages: &Stages,
        sections: &[Path],
        upstream: &str,
        values: &mut Vec<Explained>,
    ) {
        let Value::Object(keys) = stages.effective() else { return };
        for (name, value) in keys {
            let key = Path::of([name.as_str()]);
            let mut explain = |key: &Path, value: String, source: Source| {
                values.push(Explained { key: key.to_string(), value, source });
            };
            // Off where nobody writes it, so that it matters which line turned it on.
            if OPT_IN.contains(&name.as_str()) && value.is_object() {
                explain(&key, "on".into(), self.source(sections, &key));
            }
            if name == "fallback" && !stages.fallback.is_empty() {
                self.explain_fallback(&value, sections, upstream, &mut explain);
                continue;
            }
            flatten(&key, &value, &mut |key, value| explain(key, value, self.source(sections, key)));
        }
    }

    /// The list of the narrowest section that has one, of which an upstream has left out itself.
    fn explain_fallback(
        &self,
        steps: &Value,
        sections: &[Path],
        upstream: &str,
        explain: &mut impl FnMut(&Path, String, Source),
    ) {
        let list = Path::of(["fallback"]);
        let is_set = |section: &&Path| self.tree.exact_place(&section.join(&list)).is_some();
        let Some(section) = sections.iter().find(is_set) else { return };
        let is_itself = |index: usize| {
            let to = section.join(&list).index(index).key("upstream");
            matches!(self.tree.get(&to), Some(tree::Value::Text(to) | tree::Value::Number(to)) if to == upstream)
        };
        let written = (0..).filter(|index| !is_itself(*index));
        let own = std::slice::from_ref(section);
        for (step, index) in steps.as_array().into_iter().flatten().zip(written) {
            let at = list.index(index);
            let degraded = at.key("degraded");
            // `{}` writes no key of its own.
            if step.get("degraded").is_some() {
                explain(&degraded, "on".into(), self.source(own, &degraded));
            }
            flatten(&at, step, &mut |key, value| explain(key, value, self.source(own, key)));
        }
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
        let mut explain = |sections: &[Path], key: &Path, value: String| {
            let source = self.source(sections, key);
            values.push(Explained { key: key.to_string(), value, source });
        };
        if let Some(endpoint) = &policy.endpoint {
            explain(own, &Path::of(["endpoint"]), endpoint.to_string());
        }
        explain(own, &Path::of(["origin"]), origin(policy.origin).to_owned());
        explain(&inherited, &Path::of(["intercept"]), policy.intercept.to_string());
        let tls = upstream_tls(&policy.tls);
        flatten(&Path::of(["tls"]), &tls, &mut |key, value| explain(own, key, value));
        if let Some(changes) = policy.rewrite.as_ref().map(rewrite) {
            flatten(&Path::of(["rewrite"]), &changes, &mut |key, value| explain(own, key, value));
        }
        values
    }

    fn source(&self, sections: &[Path], key: &Path) -> Source {
        let found = sections.iter().find_map(|section| {
            let Place { line, .. } = self.tree.exact_place(&section.join(key))?;
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

/// Every value of an object with its key below `at`; lists are values, unless they are of objects.
fn flatten(at: &Path, value: &Value, visit: &mut impl FnMut(&Path, String)) {
    match value {
        Value::Object(keys) => {
            for (key, value) in keys {
                flatten(&at.key(key), value, visit);
            }
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            for (index, item) in items.iter().enumerate() {
                flatten(&at.index(index), item, visit);
            }
        }
        Value::String(text) => visit(at, text.clone()),
        Value::Array(items) => {
            let items: Vec<String> = items
                .iter()
                .map(|item| item.as_str().map_or_else(|| item.to_string(), str::to_owned))
                .collect();
            visit(at, format!("[{}]", items.join(", ")));
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => visit(at, value.to_string()),
    }
}

/// A value on one line of a table: the body of a degraded answer may be a page.
fn in_a_row(value: &str) -> String {
    const MOST: usize = 60;
    let mut chars = value.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut row: String = chars.by_ref().take(MOST).collect();
    if chars.next().is_some() {
        row.push('…');
    }
    row
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
        let rows: Vec<_> = self.values.iter().map(|v| (&v.key, in_a_row(&v.value), &v.source)).collect();
        let keys = rows.iter().map(|(key, _, _)| key.chars().count()).max().unwrap_or(0);
        let values = rows.iter().map(|(_, value, _)| value.chars().count()).max().unwrap_or(0);
        for (key, value, source) in rows {
            writeln!(f, "{key:<keys$}  {value:<values$}  {source}")?;
        }
        Ok(())
    }
}
