//! Keys that the policy file has but this version does not act on.
//!
//! They are refused rather than ignored: who names a collector counts on traces. Off is what they are, so `off` is taken.
//! A stage that is built takes its line out of the list and nothing else.

use super::problem::{Path, Problem};
use super::tree::{Node, Value};

/// What a key may be set to all the same.
#[derive(Debug, Clone, Copy)]
enum But {
    /// `off` or `false`.
    Off,
    /// `100%`.
    All,
}

const KEYS: &[(&[&str], But)] = &[(&["telemetry", "otlp"], But::Off), (&["telemetry", "sample"], But::All)];

/// The last keys of everything that is refused, for the test that the example shows all the others.
#[cfg(test)]
pub(super) fn keys() -> impl Iterator<Item = &'static str> {
    KEYS.iter().filter_map(|(path, _)| path.last().copied())
}

/// Reports the keys and cuts them from the tree.
pub(super) fn refuse(tree: &mut Node, problems: &mut Vec<Problem>) {
    for (keys, but) in KEYS {
        let path = Path::of(keys.iter().copied());
        let Some(value) = tree.get(&path) else { continue };
        if !but.takes(value) {
            let what = match but {
                But::Off => "not supported yet; leave it out or write `off`",
                But::All => "not supported yet; leave it out",
            };
            let (place, _) = tree.locate(&path);
            problems.push(Problem::error(place, path.clone(), what));
        }
        tree.cut(&path);
    }
}

impl But {
    fn takes(self, value: &Value) -> bool {
        let is_off = match value {
            Value::Null | Value::Cut | Value::Bool(false) => true,
            Value::Text(text) => text == "off",
            _ => false,
        };
        match self {
            Self::Off => is_off,
            Self::All => matches!(value, Value::Null) || matches!(value, Value::Text(text) if text == "100%"),
        }
    }
}
