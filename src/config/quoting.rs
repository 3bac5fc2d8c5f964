//! Which lines of a policy are not to be quoted with a problem, since a secret may stand in them.
//!
//! Secrets have their places in a policy, and by a slip they stand next to them: `set` as text instead of a
//! mapping, `header` for `headers`, a key where the file that holds it is expected. A message shows no value of
//! such a place ([`Path::may_be_secret`]). Here are the lines that touch one, whatever the problem is about: in
//! flow style a whole upstream stands in one line. To mask the value inside its line was rejected: what YAML
//! escapes or folds is not found again by its text.

use std::collections::BTreeSet;

use http::HeaderName;

use super::problem::{Path, Place};
use super::secret::{has_userinfo, is_file_name, sounds_secret};
use super::tree::{self, Value};

/// The lines of a file, from 1, that are not to be quoted.
pub(super) fn unquotable(source: &str) -> BTreeSet<usize> {
    let mut lines = BTreeSet::new();
    let Ok(tree) = tree::parse(source) else { return near_secrets(source) };
    tree.for_each(&mut |path, place, value| {
        if is_secret(path, value) {
            lines.insert(place.line);
        }
    });
    tree.for_each_text(&mut |path, written, value| {
        if is_secret(path, value) {
            lines.extend(written);
        }
    });
    lines
}

fn is_secret(path: &Path, value: &Value) -> bool {
    match value {
        Value::Text(text) if has_userinfo(text) => true,
        Value::Text(text) | Value::Number(text) if path.is_key_file() => !is_file_name(text),
        Value::Text(name) if path.is_removed_field() => name.parse::<HeaderName>().is_err(),
        Value::Text(_) | Value::Number(_) | Value::Bool(_) => path.may_be_secret(),
        // `{ "x-api-key: …" }` is a key without a value.
        Value::Null => path.may_be_secret() && path.has_odd_key(),
        Value::List(_) | Value::Map(_) | Value::Cut => false,
    }
}

/// The same for what is no YAML, by the look of each line and of those that it is indented under.
fn near_secrets(source: &str) -> BTreeSet<usize> {
    let mut above: Vec<(usize, bool)> = Vec::new();
    let mut lines = BTreeSet::new();
    for (index, line) in source.lines().enumerate() {
        let text = line.trim_start();
        if text.is_empty() {
            continue;
        }
        let indent = line.len() - text.len();
        above.retain(|(other, _)| *other < indent);
        let is_near = above.last().is_some_and(|(_, is_near)| *is_near) || looks_secret(text);
        above.push((indent, is_near));
        if is_near {
            lines.insert(Place::new(index as u64 + 1, 1).line);
        }
    }
    lines
}

fn looks_secret(line: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    let mut words = line.split(|c| !is_part(c));
    has_userinfo(line) || words.any(|word| Path::of([word]).may_be_secret() || sounds_secret(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(source: &str) -> Vec<usize> {
        unquotable(source).into_iter().collect()
    }

    #[test]
    fn lines_that_touch_a_secret_are_not_quoted_and_no_others() {
        for (source, expected) in [
            (
                "upstreams:\n  a:\n    hosts: [a]\n    rewrite:\n      headers:\n        set:\n          x: s\n",
                &[7][..],
            ),
            (
                "upstreams:\n  a: { rewrite: { path: { from: a, to: b } } }\n  b: { rewrite: { headers: { set: { x: s } } } }",
                &[3],
            ),
            // Escaped, folded, in a block, or behind an anchor.
            ("a: 1\nrewrite: { headers: { set: { x: \"a\n  b\n  c\", y: 1 } } }\nb: 2", &[2, 3, 4]),
            ("rewrite:\n  headers:\n    set:\n      x: |\n        a\n        b\nb: 2", &[5, 6]),
            ("a: &s hidden\nb: 1\nrewrite: { set: { x: *s } }", &[1, 3]),
            // The upstream's own name is none.
            ("upstreams: { auth: { hosts: [a] } }\nlimits: { keep_alive: 1s }", &[]),
            (
                "tls: { ca_key: key.pem }\nb: { client_key: MIIEvQIBADANBgkqhkiG9w0B }\nc: { client_key: a/b.pem }",
                &[2],
            ),
            ("a: [\"http://u:p@h\", 'h:1']\nb: http://h", &[1]),
            ("shared_state:\n  redis: redis://a\n  timeout: 1s\n  url: a\n  prefix: a", &[2, 4]),
            ("shared_state: redis://a\nb: { shared_state: on }", &[1, 2]),
            (
                "fallback: [{ degraded: { status: 200, body: x } }]\nc: [{ degraded: { headers: { a: b } } }]",
                &[2],
            ),
        ] {
            assert_eq!(lines(source), expected, "{source}");
        }
    }

    #[test]
    fn where_nothing_can_be_read_what_looks_like_a_secret_is_not_quoted() {
        let source = "hosts: [a\n  set: { x: \"sk }\nb:\n  headers:\n\n    x-a: \"sk\n  c: 1\nmy-token: 'x\nurl: a:b@c\n";
        assert_eq!(lines(source), [2, 4, 6, 8, 9]);
    }
}
