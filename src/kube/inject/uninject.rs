//! What injection added, taken away again.

use serde_json::Value;

use super::patch::{Patch, Pointer, list_at, map_at, text_at};
use super::status::{self, Status};
use super::{env, is_injected};
use crate::kube::names::{CA_VOLUME, INIT, POLICY_VOLUME, SIDECAR};

/// The patch that takes away what [`inject`](super::inject()) added to `pod`; `None` where that is nothing. What
/// the pod had before, and what was added since under other names, stays.
///
/// # Errors
/// The status annotation cannot be read, so that nobody knows which variables are the pod's own.
pub fn uninject(pod: &Value) -> Result<Option<Patch>, String> {
    if !is_injected(pod) {
        return Ok(None);
    }
    let status = Status::read(pod)?;
    let mut patch = Patch::default();
    for list in ["containers", "initContainers"] {
        let place = Pointer::from_iter(["spec", list]);
        for (index, container) in list_at(pod, &["spec", list]).iter().enumerate() {
            let name = text_at(container, &["name"]).unwrap_or_default();
            if name == SIDECAR || name == INIT {
                continue;
            }
            let kept = status.kept.get(name);
            let is_added = |variable: &Value| {
                let name = text_at(variable, &["name"]).unwrap_or_default();
                env::is_ours(name) && !kept.is_some_and(|kept| kept.iter().any(|own| own == name))
            };
            let place = place.child(index);
            take(&mut patch, pod, &place.child("env"), is_added);
            take(&mut patch, pod, &place.child("volumeMounts"), is_named(&[CA_VOLUME]));
        }
    }
    let spec = Pointer::from_iter(["spec"]);
    take(&mut patch, pod, &spec.child("volumes"), is_named(&[POLICY_VOLUME, CA_VOLUME]));
    // After all that is counted in them.
    for list in ["containers", "initContainers"] {
        take(&mut patch, pod, &spec.child(list), is_named(&[SIDECAR, INIT]));
    }
    take_annotations(&mut patch, pod, &status);
    Ok(Some(patch))
}

fn is_named(names: &'static [&'static str]) -> impl Fn(&Value) -> bool {
    |item| text_at(item, &["name"]).is_some_and(|name| names.contains(&name))
}

/// Removes those items of the list at `place`, and the list when nothing else is in it.
fn take(patch: &mut Patch, pod: &Value, place: &Pointer, is_added: impl Fn(&Value) -> bool) {
    let Some(Value::Array(list)) = place.find(pod) else { return };
    let added: Vec<usize> = (0..list.len()).filter(|index| is_added(&list[*index])).collect();
    if added.len() == list.len() && !list.is_empty() {
        patch.remove(place.clone());
        return;
    }
    // From the end, so that those before keep their numbers.
    for index in added.into_iter().rev() {
        patch.remove(place.child(index));
    }
}

fn take_annotations(patch: &mut Patch, pod: &Value, status: &Status) {
    let Some(annotations) = map_at(pod, &["metadata", "annotations"]) else { return };
    let is_added = |key: &&String| *key == status::ANNOTATION || status.annotations.contains(key);
    let added: Vec<&String> = annotations.keys().filter(is_added).collect();
    let metadata = Pointer::from_iter(["metadata"]);
    let place = metadata.child("annotations");
    if added.len() < annotations.len() {
        added.into_iter().for_each(|key| patch.remove(place.child(key)));
    } else if map_at(pod, &["metadata"]).is_some_and(|metadata| metadata.len() == 1) {
        patch.remove(metadata);
    } else {
        patch.remove(place);
    }
}
