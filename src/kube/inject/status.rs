//! The annotation that an injected pod carries: what was done to it, and what was there before.

use std::collections::BTreeMap;
use std::fmt;

use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::SidecarMode;
use super::annotations::Mode;
use super::env;
use super::patch::{Patch, list_at, text_at};

/// Its name.
pub(super) const ANNOTATION: &str = "hedgerow.dev/status";

/// What the annotation says, in JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Status {
    /// Of the hedgerow that did it.
    version: String,
    mode: String,
    sidecar: String,
    /// Sixteen hex digits of the patch: pods that were injected alike have the same.
    hash: String,
    /// For each container the variables that were its own before, among those that hedgerow may set.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) kept: BTreeMap<String, Vec<String>>,
    /// Other annotations that were added.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) annotations: Vec<String>,
}

impl Status {
    pub(super) fn of(
        pod: &Value,
        mode: Mode,
        sidecar: SidecarMode,
        patch: &Patch,
        annotations: &Map<String, Value>,
    ) -> Self {
        let digest = digest(&SHA256, patch.to_json().to_string().as_bytes());
        let hash = digest.as_ref().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let mut kept = BTreeMap::new();
        for container in
            ["containers", "initContainers"].iter().flat_map(|list| list_at(pod, &["spec", list]))
        {
            let own = list_at(container, &["env"]).iter().filter_map(|variable| text_at(variable, &["name"]));
            let own: Vec<String> = own.filter(|name| env::is_ours(name)).map(str::to_owned).collect();
            if !own.is_empty()
                && let Some(name) = text_at(container, &["name"])
            {
                kept.insert(name.to_owned(), own);
            }
        }
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            mode: mode.word().into(),
            sidecar: sidecar.word().into(),
            hash,
            kept,
            annotations: annotations.keys().cloned().collect(),
        }
    }

    /// The status of an injected pod.
    ///
    /// # Errors
    /// What is wrong with the annotation.
    pub(super) fn read(pod: &Value) -> Result<Self, String> {
        let text = text_at(pod, &["metadata", "annotations", ANNOTATION]).unwrap_or_default();
        serde_json::from_str(text).map_err(|error| format!("annotation {ANNOTATION} cannot be read: {error}"))
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}
