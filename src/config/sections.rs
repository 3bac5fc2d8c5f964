//! The sections of a file that can hold stages, before they are read: the defaults, the upstreams, the
//! routes.

use super::de::MOST_PROBLEMS;
use super::notation::OPT_IN;
use super::problem::{Path, Problem};
use super::tree::{Node, Value};

/// Calls `visit` for each section with its path.
pub(super) fn for_each(tree: &mut Node, mut visit: impl FnMut(&Path, &mut Node)) {
    let root = Path::root();
    if let Some(defaults) = tree.child_mut("defaults") {
        visit(&root.key("defaults"), defaults);
    }
    let Some(upstreams) = tree.child_mut("upstreams") else { return };
    for (path, upstream) in upstreams.children_mut(&root.key("upstreams")) {
        visit(&path, upstream);
        if let Some(routes) = upstream.child_mut("routes") {
            for (path, route) in routes.children_mut(&path.key("routes")) {
                visit(&path, route);
            }
        }
    }
}

/// A key without a value is as if not written, which is what a stage that is on by itself was written for.
/// Who writes `coalesce:` alone hopes for more.
pub(super) fn doubts_of_empty_stages(tree: &mut Node) -> Vec<Problem> {
    let mut doubts = Vec::new();
    for_each(tree, |section, node| {
        for name in OPT_IN {
            let key = Path::of([name]);
            if matches!(node.get(&key), Some(Value::Null)) {
                let message = match name {
                    "rate_limit" => {
                        "nothing follows, so it stays off; `{ rate: 200/s }` turns it on".to_owned()
                    }
                    _ => format!("nothing follows, so it stays off; `{name}: true` turns it on"),
                };
                doubts.push(Problem::warning(node.locate(&key).0, section.join(&key), message));
            }
        }
    });
    doubts.truncate(MOST_PROBLEMS);
    doubts
}
