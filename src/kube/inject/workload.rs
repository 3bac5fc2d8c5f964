//! Where in a document pods are described.
//!
//! Known kinds are not listed: whatever has containers where the built-in kinds have them is a workload, so that
//! custom ones such as Rollouts are injected like Deployments.

use serde_json::Value;

use super::patch::{Pointer, text_at};

/// A pod or pod template in a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    /// What holds it: `Deployment`.
    pub kind: String,
    /// The name of what holds it.
    pub name: String,
    /// The namespace, where the document names one.
    pub namespace: Option<String>,
    /// Where in the document the object with the pod's `metadata` and `spec` is.
    pub pod: Pointer,
}

/// Where a pod's template can be, and where containers are then. A pod is its own template.
const TEMPLATES: [&[&str]; 4] =
    [&[], &["spec", "template"], &["spec", "jobTemplate", "spec", "template"], &["template"]];

/// The workloads of a document, which is an object of the API or a `List` of some.
pub fn find(document: &Value) -> Vec<Workload> {
    let mut found = Vec::new();
    collect(document, &Pointer::root(), &mut found);
    found
}

fn collect(object: &Value, place: &Pointer, found: &mut Vec<Workload>) {
    let (Some(kind), Some(_)) = (text_at(object, &["kind"]), text_at(object, &["apiVersion"])) else {
        return;
    };
    // PodList and the like too, as `kubectl get --raw` has them.
    if kind.ends_with("List")
        && let Some(items) = object.get("items").and_then(Value::as_array)
    {
        for (index, item) in items.iter().enumerate() {
            collect(item, &place.child("items").child(index), found);
        }
        return;
    }
    let has_containers = |path: &&&[&str]| {
        let pod = path.iter().try_fold(object, |value, key| value.get(key));
        // A custom resource with a list of its own under `spec.containers` is no pod.
        (!path.is_empty() || kind == "Pod")
            && pod.and_then(|pod| pod.get("spec")?.get("containers")).is_some_and(Value::is_array)
    };
    if let Some(path) = TEMPLATES.iter().find(has_containers) {
        let name = text_at(object, &["metadata", "name"]).or(text_at(object, &["metadata", "generateName"]));
        found.push(Workload {
            kind: kind.to_owned(),
            name: name.unwrap_or("(without a name)").to_owned(),
            namespace: text_at(object, &["metadata", "namespace"]).map(str::to_owned),
            pod: place.join(&path.iter().collect()),
        });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_kind_with_containers_is_found() {
        let spec = json!({ "containers": [{ "name": "a" }] });
        let template = json!({ "template": { "spec": spec } });
        for (kind, spec, place) in [
            ("Pod", spec.clone(), ""),
            ("Deployment", template.clone(), "/spec/template"),
            ("Rollout", template.clone(), "/spec/template"),
            ("CronJob", json!({ "jobTemplate": { "spec": template } }), "/spec/jobTemplate/spec/template"),
        ] {
            let metadata = json!({ "name": "n", "namespace": "agents" });
            let document = json!({ "apiVersion": "x/v1", "kind": kind, "metadata": metadata, "spec": spec });
            let found = find(&document);
            assert_eq!(found.len(), 1, "{kind}");
            assert_eq!((found[0].kind.as_str(), found[0].pod.to_string().as_str()), (kind, place));
            assert_eq!((found[0].name.as_str(), found[0].namespace.as_deref()), ("n", Some("agents")));
        }
        let template = json!({ "apiVersion": "v1", "kind": "PodTemplate", "template": { "spec": spec } });
        assert_eq!(find(&template)[0].pod.to_string(), "/template");
    }

    #[test]
    fn lists_are_looked_into() {
        let pod = json!({ "apiVersion": "v1", "kind": "Pod", "spec": { "containers": [] } });
        let service = json!({ "apiVersion": "v1", "kind": "Service", "spec": {} });
        let inner = json!({ "apiVersion": "v1", "kind": "List", "items": [service, pod] });
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": [pod, inner] });
        let places: Vec<String> = find(&list).iter().map(|workload| workload.pod.to_string()).collect();
        assert_eq!(places, ["/items/0", "/items/1/items/1"]);
    }

    #[test]
    fn other_documents_are_none() {
        for document in [
            json!(null),
            json!([1]),
            json!({ "kind": "Pod", "spec": { "containers": [] } }),
            json!({ "apiVersion": "v1", "kind": "Pod", "spec": { "containers": {} } }),
            json!({ "apiVersion": "v1", "kind": "Service", "spec": { "ports": [] } }),
            json!({ "apiVersion": "x/v1", "kind": "AgentFleet", "spec": { "containers": [] } }),
            json!({ "apiVersion": "v1", "kind": "List", "items": {} }),
        ] {
            assert_eq!(find(&document), []);
        }
    }
}
