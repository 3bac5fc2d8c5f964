//! JSON Patch (RFC 6902) with the two operations that injection needs: `add`, and `remove` to take it back.
//!
//! A patch that only adds cannot lose what this version of hedgerow has never heard of: a pod of a newer
//! Kubernetes passes through with all of its fields. Where something has to go into a mapping or list that is
//! not there, the operation adds the mapping or list whole, so that every operation's parent exists.

use std::fmt;

use serde_json::{Map, Value, json};

/// A place in a document: the keys and indexes that lead to it (RFC 6901).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Pointer(Vec<String>);

impl Pointer {
    /// The whole document.
    pub fn root() -> Self {
        Self::default()
    }

    /// One step deeper: a key, or an index of a list, or `-` for its end.
    pub fn child(&self, step: impl fmt::Display) -> Self {
        let mut steps = self.0.clone();
        steps.push(step.to_string());
        Self(steps)
    }

    /// As many steps deeper as `below` has.
    pub fn join(&self, below: &Self) -> Self {
        Self(self.0.iter().chain(&below.0).cloned().collect())
    }

    /// The steps, without escapes.
    pub fn steps(&self) -> &[String] {
        &self.0
    }

    /// What leads to the parent, and the last step; `None` for the whole document.
    pub fn split_last(&self) -> Option<(&[String], &str)> {
        self.0.split_last().map(|(last, parents)| (parents, last.as_str()))
    }

    /// The value at this place.
    pub fn find<'a>(&self, document: &'a Value) -> Option<&'a Value> {
        self.0.iter().try_fold(document, |value, step| match value {
            Value::Object(map) => map.get(step),
            Value::Array(list) => list.get(index(step)?),
            _ => None,
        })
    }
}

impl<S: fmt::Display> FromIterator<S> for Pointer {
    fn from_iter<I: IntoIterator<Item = S>>(steps: I) -> Self {
        Self(steps.into_iter().map(|step| step.to_string()).collect())
    }
}

/// With the escapes of RFC 6901 section 3.
impl fmt::Display for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|step| write!(f, "/{}", step.replace('~', "~0").replace('/', "~1")))
    }
}

/// An index as RFC 6901 section 4 writes it: without sign and leading zeros.
pub(super) fn index(step: &str) -> Option<usize> {
    let is_canonical = step == "0" || !step.starts_with(['0', '+']);
    step.parse().ok().filter(|_| is_canonical)
}

/// One change.
#[derive(Debug, Clone, PartialEq)]
pub enum Operation {
    /// Sets a key of a mapping, or puts an item into a list before the one at that index.
    Add {
        /// Where.
        path: Pointer,
        /// What.
        value: Value,
    },
    /// Takes a key or an item away.
    Remove {
        /// Where.
        path: Pointer,
    },
}

impl Operation {
    fn to_json(&self) -> Value {
        match self {
            Self::Add { path, value } => json!({ "op": "add", "path": path.to_string(), "value": value }),
            Self::Remove { path } => json!({ "op": "remove", "path": path.to_string() }),
        }
    }

    fn apply(&self, document: &mut Value) -> Option<()> {
        let (Self::Add { path, .. } | Self::Remove { path }) = self;
        let (parents, last) = path.split_last()?;
        let parent = parents.iter().try_fold(document, |value, step| match value {
            Value::Object(map) => map.get_mut(step),
            Value::Array(list) => list.get_mut(index(step)?),
            _ => None,
        })?;
        match (self, parent) {
            (Self::Add { value, .. }, Value::Object(map)) => {
                map.insert(last.to_owned(), value.clone());
            }
            (Self::Add { value, .. }, Value::Array(list)) => {
                let at = if last == "-" { list.len() } else { index(last)? };
                if at > list.len() {
                    return None;
                }
                list.insert(at, value.clone());
            }
            // Not `remove`, which would put the last key into the gap.
            (Self::Remove { .. }, Value::Object(map)) => {
                map.shift_remove(last)?;
            }
            (Self::Remove { .. }, Value::Array(list)) => {
                let at = index(last).filter(|at| *at < list.len())?;
                list.remove(at);
            }
            _ => return None,
        }
        Some(())
    }
}

/// Changes in their order, each on what the ones before have made.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Patch(Vec<Operation>);

impl Patch {
    /// The changes.
    pub fn operations(&self) -> &[Operation] {
        &self.0
    }

    /// Sets a key whose mapping is there.
    pub(super) fn set(&mut self, path: Pointer, value: Value) {
        self.0.push(Operation::Add { path, value });
    }

    /// Takes away what is there.
    pub(super) fn remove(&mut self, path: Pointer) {
        self.0.push(Operation::Remove { path });
    }

    /// Puts `items` at the end of the list at `path` of `document`, or a list of them where there is none. `path`
    /// without its last step is there.
    pub(super) fn append(&mut self, document: &Value, path: &Pointer, items: Vec<Value>) {
        self.put(document, path, "-", items);
    }

    /// The same at the list's beginning, in the order of `items`. It moves what is in the list, so it has to
    /// come after all that counts in it.
    pub(super) fn prepend(&mut self, document: &Value, path: &Pointer, mut items: Vec<Value>) {
        if has_items(path.find(document)) {
            items.reverse();
        }
        self.put(document, path, "0", items);
    }

    fn put(&mut self, document: &Value, path: &Pointer, at: &str, items: Vec<Value>) {
        match path.find(document) {
            _ if items.is_empty() => {}
            list if has_items(list) => {
                self.0.extend(items.into_iter().map(|value| Operation::Add { path: path.child(at), value }))
            }
            _ => self.set(path.clone(), Value::Array(items)),
        }
    }

    /// The same changes to a part of a larger document that stands at `place`.
    #[must_use]
    pub fn below(&self, place: &Pointer) -> Self {
        let moved = self.0.iter().map(|operation| match operation {
            Operation::Add { path, value } => Operation::Add { path: place.join(path), value: value.clone() },
            Operation::Remove { path } => Operation::Remove { path: place.join(path) },
        });
        Self(moved.collect())
    }

    /// The operations of `other` after these.
    pub(super) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// Makes the changes.
    ///
    /// # Errors
    /// The path of the first operation whose place is not in `document`, which is then changed in part.
    pub fn apply(&self, document: &mut Value) -> Result<(), String> {
        self.0.iter().try_for_each(|operation| {
            operation.apply(document).ok_or_else(|| {
                let (Operation::Add { path, .. } | Operation::Remove { path }) = operation;
                format!("the patch does not fit: there is no place {path}")
            })
        })
    }

    /// As the API server takes it.
    pub fn to_json(&self) -> Value {
        self.0.iter().map(Operation::to_json).collect()
    }
}

/// Whether it is a list with something in it. An empty one is replaced, as one that is not there.
fn has_items(list: Option<&Value>) -> bool {
    list.and_then(Value::as_array).is_some_and(|list| !list.is_empty())
}

/// The mapping at `path` of `document`.
pub(super) fn map_at<'a>(document: &'a Value, path: &[&str]) -> Option<&'a Map<String, Value>> {
    path.iter().try_fold(document, |value, key| value.get(key))?.as_object()
}

/// The items of the list at `path` of `document`; none where there is no list.
pub(super) fn list_at<'a>(document: &'a Value, path: &[&str]) -> &'a [Value] {
    let found = path.iter().try_fold(document, |value, key| value.get(key));
    found.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

/// The text at `path` of `document`.
pub(super) fn text_at<'a>(document: &'a Value, path: &[&str]) -> Option<&'a str> {
    path.iter().try_fold(document, |value, key| value.get(key))?.as_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pointer(steps: &[&str]) -> Pointer {
        steps.iter().collect()
    }

    #[test]
    fn keys_are_escaped() {
        assert_eq!(pointer(&["a/b~c", "0", "-"]).to_string(), "/a~1b~0c/0/-");
        assert_eq!(Pointer::root().to_string(), "");
    }

    #[test]
    fn a_list_that_is_not_there_is_added_whole_and_one_that_is_grows() {
        let document = json!({ "spec": { "volumes": [1], "env": null } });
        let mut patch = Patch::default();
        patch.append(&document, &pointer(&["spec", "mounts"]), vec![json!(1), json!(2)]);
        patch.append(&document, &pointer(&["spec", "env"]), vec![json!("e")]);
        patch.append(&document, &pointer(&["spec", "volumes"]), vec![json!(2), json!(3)]);
        patch.prepend(&document, &pointer(&["spec", "volumes"]), vec![json!("a"), json!("b")]);
        patch.prepend(&document, &pointer(&["spec", "first"]), vec![json!("a"), json!("b")]);
        patch.append(&document, &pointer(&["spec", "none"]), vec![]);
        let mut patched = document.clone();
        patch.apply(&mut patched).unwrap();
        let expected = json!({ "spec": {
            "volumes": ["a", "b", 1, 2, 3], "env": ["e"], "mounts": [1, 2], "first": ["a", "b"],
        } });
        assert_eq!(patched, expected);
        let wire = patch.to_json();
        assert_eq!(wire[0], json!({ "op": "add", "path": "/spec/mounts", "value": [1, 2] }));
        assert_eq!(wire[2], json!({ "op": "add", "path": "/spec/volumes/-", "value": 2 }));
    }

    #[test]
    fn what_is_removed_leaves_the_rest_in_order() {
        let mut document = json!({ "a": 1, "b": [1, 2, 3], "c": 3 });
        let mut patch = Patch::default();
        patch.remove(pointer(&["b", "1"]));
        patch.remove(pointer(&["a"]));
        patch.apply(&mut document).unwrap();
        assert_eq!(document.to_string(), r#"{"b":[1,3],"c":3}"#);
    }

    #[test]
    fn a_place_that_is_not_there_is_named() {
        for steps in [&["x", "y"][..], &["list", "2"], &["list", "01"], &["list", "+0"], &["text", "x"], &[]]
        {
            let mut patch = Patch::default();
            patch.set(pointer(steps), Value::Null);
            let mut document = json!({ "list": [1], "text": "t" });
            let error = patch.apply(&mut document).unwrap_err();
            assert!(error.ends_with(&pointer(steps).to_string()), "{error}");
        }
    }

    #[test]
    fn a_patch_moves_below_a_place() {
        let mut patch = Patch::default();
        patch.set(pointer(&["spec", "x"]), json!(1));
        let mut document = json!({ "items": [{ "spec": {} }] });
        patch.below(&pointer(&["items", "0"])).apply(&mut document).unwrap();
        assert_eq!(document, json!({ "items": [{ "spec": { "x": 1 } }] }));
    }
}
