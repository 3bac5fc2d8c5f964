//! Globs over paths.

use std::path::Path;

use hedgerow::config;
use http::Method;

use crate::Target;

/// A glob, and in the next line a path: the compiled glob matches what a slow and simple matcher does.
pub const PATH_GLOB: Target = Target {
    check,
    inputs: 3_000,
    seeds: &[
        "/v1/search/**\n/v1/search/a/b",
        "/v1/orders/*\n/v1/orders/17",
        "/*/x*y/**z\n/a/x-y/b/z",
        "**\n/",
        "/a***b\n/a/b",
        "/a.b+(c)[d]{2}^$|\\\n/a.b+(c)[d]{2}^$|\\",
        "/%2e%2E/'x'\n/%2e%2E/'x'",
        "/\u{e9}*\n/\u{e9}\u{e9}",
    ],
};

fn check(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (glob, path) = text.split_once('\n').unwrap_or((text, "/"));
    if glob.contains(char::is_control) || path.contains('\n') {
        return;
    }
    // In single quotes YAML has one escape, the quote's own.
    let quoted = glob.replace('\'', "''");
    let policy = format!("upstreams: {{ u: {{ hosts: [a.example], routes: [ {{ path: '{quoted}' }} ] }} }}");
    let Ok(loaded) = config::parse(&policy, Path::new("")) else { return };
    let upstream = &loaded.config.upstreams[0];
    let read = upstream.routes[0].path.as_ref().expect("the route has a path");
    // Line separators of Unicode are YAML's to fold.
    if read.glob != glob {
        return;
    }
    let found = upstream.route_for(&Method::GET, path).is_some();
    assert_eq!(found, matches(glob, path), "{glob:?} on {path:?}");
}

#[derive(Clone, Copy)]
enum Part {
    Exactly(char),
    WithinSegment,
    Anything,
}

/// By the states of an automaton: which parts may come next after each character.
fn matches(glob: &str, path: &str) -> bool {
    let parts = parts(glob);
    let mut next = vec![false; parts.len() + 1];
    next[0] = true;
    skip_empty(&parts, &mut next);
    for c in path.chars() {
        let mut after = vec![false; parts.len() + 1];
        for (at, part) in parts.iter().enumerate().filter(|(at, _)| next[*at]) {
            match part {
                Part::Exactly(own) if *own == c => after[at + 1] = true,
                Part::WithinSegment if c != '/' => after[at] = true,
                Part::Anything => after[at] = true,
                Part::Exactly(_) | Part::WithinSegment => {}
            }
        }
        skip_empty(&parts, &mut after);
        next = after;
    }
    next[parts.len()]
}

fn parts(glob: &str) -> Vec<Part> {
    let mut rest = glob;
    let mut parts = Vec::new();
    while let Some(first) = rest.chars().next() {
        let (part, length) = match first {
            '*' if rest.starts_with("**") => (Part::Anything, 2),
            '*' => (Part::WithinSegment, 1),
            c => (Part::Exactly(c), c.len_utf8()),
        };
        parts.push(part);
        rest = &rest[length..];
    }
    parts
}

/// Stars match nothing, too.
fn skip_empty(parts: &[Part], next: &mut [bool]) {
    for (at, part) in parts.iter().enumerate() {
        if next[at] && !matches!(part, Part::Exactly(_)) {
            next[at + 1] = true;
        }
    }
}
