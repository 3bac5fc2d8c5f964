//! What in a pod leaves no room for the sidecar.
//!
//! Any of these would make a pod that the API server refuses, or that starts and does not work; a message at
//! the door is kinder.

use serde_json::Value;

use super::annotations::{Mode, Wishes};
use super::patch::{list_at, text_at};
use crate::kube::names::{
    ADMIN_PORT, CA_DIR, CA_VOLUME, INIT, POLICY_VOLUME, PROXY_PORT, REDIRECT_PORT, SIDECAR, UID,
};

/// Each thing that is in the way.
pub(super) fn clashes(pod: &Value, wishes: &Wishes) -> Vec<String> {
    let containers = || {
        let init = list_at(pod, &["spec", "initContainers"]);
        list_at(pod, &["spec", "containers"]).iter().chain(init)
    };
    let mut found = Vec::new();
    for container in containers() {
        let name = text_at(container, &["name"]).unwrap_or("?");
        if name == SIDECAR || name == INIT && wishes.mode == Mode::Transparent {
            found.push(format!("there is a container named {name} that is not hedgerow's"));
            continue;
        }
        found.extend(ports(container, wishes).map(|port| {
            format!("container {name} listens on port {port}, which hedgerow needs in the same pod")
        }));
        if wishes.intercept && mounts_at(container, CA_DIR) {
            found.push(format!("container {name} mounts something else at {CA_DIR}"));
        }
        if wishes.mode == Mode::Transparent && user(pod, container) == Some(u64::from(UID)) {
            found.push(format!(
                "container {name} runs as user {UID}, whose connections are not redirected: they are hedgerow's"
            ));
        }
    }
    let volumes = list_at(pod, &["spec", "volumes"]).iter().filter_map(|volume| text_at(volume, &["name"]));
    let taken = volumes.filter(|name| *name == POLICY_VOLUME || *name == CA_VOLUME && wishes.intercept);
    found.extend(taken.map(|name| format!("there is a volume named {name} that is not hedgerow's")));
    found
}

fn ports(container: &Value, wishes: &Wishes) -> impl Iterator<Item = u64> {
    let redirects = wishes.mode == Mode::Transparent;
    let ports = list_at(container, &["ports"]).iter();
    let tcp = ports.filter(|port| matches!(text_at(port, &["protocol"]), None | Some("TCP")));
    let numbers = tcp.filter_map(|port| port.get("containerPort")?.as_u64());
    numbers.filter(move |port| {
        [PROXY_PORT, ADMIN_PORT].map(u64::from).contains(port)
            || redirects && *port == u64::from(REDIRECT_PORT)
    })
}

fn mounts_at(container: &Value, place: &str) -> bool {
    let mounts = list_at(container, &["volumeMounts"]).iter();
    mounts.filter_map(|mount| text_at(mount, &["mountPath"])).any(|path| path.trim_end_matches('/') == place)
}

/// The user that the container is told to be; what its image says is not known here.
fn user(pod: &Value, container: &Value) -> Option<u64> {
    let own = container.get("securityContext").and_then(|context| context.get("runAsUser"));
    let pods = || pod.get("spec")?.get("securityContext")?.get("runAsUser");
    own.filter(|user| !user.is_null()).or_else(pods)?.as_u64()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(spec: Value, mode: Mode, intercept: bool) -> String {
        let wishes = Wishes { mode, intercept, ..Wishes::default() };
        clashes(&json!({ "spec": spec }), &wishes).join("\n")
    }

    #[test]
    fn names_ports_volumes_mounts_and_users_clash() {
        let with = |container: Value| json!({ "containers": [container] });
        for (spec, message) in [
            (with(json!({ "name": "hedgerow" })), "there is a container named hedgerow"),
            (
                json!({ "containers": [], "initContainers": [{ "name": "hedgerow-init" }] }),
                "named hedgerow-init",
            ),
            (
                with(json!({ "name": "a", "ports": [{ "containerPort": 15300 }] })),
                "container a listens on port 15300",
            ),
            (
                with(json!({ "name": "a", "ports": [{ "containerPort": 15302, "protocol": "TCP" }] })),
                "port 15302",
            ),
            (with(json!({ "name": "a", "ports": [{ "containerPort": 15301 }] })), "port 15301"),
            (json!({ "volumes": [{ "name": "hedgerow-policy" }] }), "a volume named hedgerow-policy"),
            (json!({ "volumes": [{ "name": "hedgerow-ca" }] }), "a volume named hedgerow-ca"),
            (
                with(json!({ "name": "a", "volumeMounts": [{ "mountPath": "/var/run/hedgerow/ca/" }] })),
                "mounts something else",
            ),
            (
                with(json!({ "name": "a", "securityContext": { "runAsUser": 2747 } })),
                "container a runs as user 2747",
            ),
            (
                json!({ "containers": [{ "name": "a" }], "securityContext": { "runAsUser": 2747 } }),
                "runs as user 2747",
            ),
        ] {
            let told = told(spec, Mode::Transparent, true);
            assert!(told.contains(message), "{message} not in {told:?}");
        }
    }

    #[test]
    fn what_does_not_matter_does_not_clash() {
        let spec = json!({
            "containers": [{
                "name": "a",
                "ports": [{ "containerPort": 15301 }, { "containerPort": 15300, "protocol": "UDP" }],
                "securityContext": { "runAsUser": 2747 },
                "volumeMounts": [{ "mountPath": "/var/run/hedgerow/ca" }],
            }],
            "initContainers": [{ "name": "hedgerow-init" }],
            "volumes": [{ "name": "hedgerow-ca" }],
        });
        assert_eq!(told(spec, Mode::Env, false), "");
        let own = json!({
            "containers": [{ "name": "a", "securityContext": { "runAsUser": 1 } }],
            "securityContext": { "runAsUser": 2747 },
        });
        assert_eq!(told(own, Mode::Transparent, false), "");
    }
}
