//! The containers and volumes that a pod gets.
//!
//! The sidecar meets the `restricted` profile of Pod Security on its own, whatever the pod says. Only the init
//! container of transparent mode needs more, once, before anything else runs.

use serde_json::{Map, Value, json};

use super::annotations::{Mode, Wishes};
use super::quantity::Quantity;
use super::{Settings, SidecarMode};
use crate::kube::names::{
    ADMIN_PORT, ADMIN_PORT_NAME, CA_DIR, CA_VOLUME, INIT, POLICY_DIR, POLICY_KEY, POLICY_VOLUME, PROXY_PORT,
    REDIRECT_PORT, SIDECAR, UID,
};

/// What an idle sidecar and one with a full cache hold, with room; no bound on the processor, which would cost
/// latency just when there is much to do.
const CPU_REQUEST: Quantity = Quantity::new("20m", 0.02);
const MEMORY_REQUEST: Quantity = Quantity::new("32Mi", 33_554_432.0);
const MEMORY_LIMIT: Quantity = Quantity::new("128Mi", 134_217_728.0);

/// The proxy itself.
pub(super) fn sidecar(settings: &Settings, wishes: &Wishes) -> Value {
    let mut container = json!({
        "name": SIDECAR,
        "image": wishes.image.as_ref().unwrap_or(&settings.image),
        "args": arguments(wishes),
        "ports": [{ "name": ADMIN_PORT_NAME, "containerPort": ADMIN_PORT, "protocol": "TCP" }],
        "resources": resources(wishes),
        // Holds the start of what comes after a native sidecar until the ports are open and the CA is written.
        "startupProbe": probe("/readyz", 1, 30),
        // And none for readiness: it would be the pod's, and a pod must not leave its Service over a breaker.
        "livenessProbe": probe("/livez", 10, 3),
        "securityContext": {
            "runAsNonRoot": true,
            "runAsUser": UID,
            "runAsGroup": UID,
            "allowPrivilegeEscalation": false,
            "privileged": false,
            "readOnlyRootFilesystem": true,
            "capabilities": { "drop": ["ALL"] },
            "seccompProfile": { "type": "RuntimeDefault" },
        },
        // A policy that cannot be used is told in the pod's status, not in the log alone.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts(wishes),
    });
    if settings.sidecar == SidecarMode::Native {
        container["restartPolicy"] = "Always".into();
    }
    container
}

/// What the pod fixes stands here, where no policy can contradict it: agents, probes and rules rely on it.
fn arguments(wishes: &Wishes) -> Vec<String> {
    let mut arguments = vec![
        "run".into(),
        format!("--config={POLICY_DIR}/{POLICY_KEY}"),
        "--config-optional".into(),
        format!("--proxy=127.0.0.1:{PROXY_PORT}"),
        // All addresses, of either family: the kubelet comes to the pod's.
        format!("--admin=[::]:{ADMIN_PORT}"),
    ];
    if wishes.mode == Mode::Transparent {
        arguments.push(format!("--transparent=127.0.0.1:{REDIRECT_PORT}"));
    }
    if wishes.intercept {
        arguments.push(format!("--ca-dir={CA_DIR}"));
        arguments.push("--intercept".into());
    }
    if let Some(level) = &wishes.log_level {
        arguments.push(format!("--log-level={level}"));
    }
    arguments
}

fn probe(path: &str, period: u32, failures: u32) -> Value {
    json!({
        "httpGet": { "path": path, "port": ADMIN_PORT },
        "periodSeconds": period,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    })
}

fn resources(wishes: &Wishes) -> Value {
    let (cpu_request, cpu_limit) =
        fitting(wishes.cpu_request.as_ref(), wishes.cpu_limit.as_ref(), &CPU_REQUEST, None);
    let (memory_request, memory_limit) = fitting(
        wishes.memory_request.as_ref(),
        wishes.memory_limit.as_ref(),
        &MEMORY_REQUEST,
        Some(&MEMORY_LIMIT),
    );
    let limits = [("cpu", cpu_limit), ("memory", memory_limit)];
    let limits = limits.into_iter().filter_map(|(what, limit)| Some((what.to_owned(), limit?.into())));
    json!({
        "requests": { "cpu": cpu_request, "memory": memory_request },
        "limits": limits.collect::<Map<String, Value>>(),
    })
}

/// A request and its limit. A limit below its request is refused by the API server, so a default gives way to what
/// was asked for.
fn fitting(
    request: Option<&Quantity>,
    limit: Option<&Quantity>,
    default_request: &Quantity,
    default_limit: Option<&Quantity>,
) -> (String, Option<String>) {
    let lowered = limit.filter(|limit| default_request.exceeds(limit));
    let request = request.or(lowered).unwrap_or(default_request);
    let raised = default_limit.map(|default| if request.exceeds(default) { request } else { default });
    (request.to_string(), limit.or(raised).map(Quantity::to_string))
}

/// What cannot be had at once: a limit below its own request.
pub(super) fn contradiction(wishes: &Wishes) -> Option<String> {
    let pairs = [
        ("cpu", &wishes.cpu_request, &wishes.cpu_limit),
        ("memory", &wishes.memory_request, &wishes.memory_limit),
    ];
    pairs.into_iter().find_map(|(what, request, limit)| {
        let (request, limit) = (request.as_ref()?, limit.as_ref()?);
        let told = || format!("{what}-request is {request} and {what}-limit is {limit}, which is less");
        request.exceeds(limit).then(told)
    })
}

fn mounts(wishes: &Wishes) -> Vec<Value> {
    // The directory, never a subPath: the kubelet does not update those.
    let mut mounts = vec![json!({ "name": POLICY_VOLUME, "mountPath": POLICY_DIR, "readOnly": true })];
    if wishes.intercept {
        mounts.push(json!({ "name": CA_VOLUME, "mountPath": CA_DIR }));
    }
    mounts
}

/// The CA's files as an agent has them.
pub(super) fn trust_mount() -> Value {
    json!({ "name": CA_VOLUME, "mountPath": CA_DIR, "readOnly": true })
}

/// The pod's new volumes.
pub(super) fn volumes(settings: &Settings, wishes: &Wishes) -> Vec<Value> {
    let name = wishes.policy_configmap.as_ref().unwrap_or(&settings.policy_configmap);
    // Without the ConfigMap the built-in policy holds, and the pod starts all the same.
    let mut volumes = vec![json!({ "name": POLICY_VOLUME, "configMap": { "name": name, "optional": true } })];
    if wishes.intercept {
        volumes.push(json!({ "name": CA_VOLUME, "emptyDir": { "medium": "Memory", "sizeLimit": "4Mi" } }));
    }
    volumes
}

/// Sets up the redirect rules and ends.
pub(super) fn init(settings: &Settings, wishes: &Wishes) -> Value {
    let mut arguments = vec![
        "redirect".to_owned(),
        format!("--proxy-uid={UID}"),
        format!("--port={REDIRECT_PORT}"),
        // Or clients that find HTTP/3 would pass by the rules.
        "--reject-quic".to_owned(),
    ];
    let ports: Vec<String> = match wishes.redirect_ports.as_slice() {
        [] => vec!["80".into(), "443".into()],
        ports => ports.iter().map(u16::to_string).collect(),
    };
    let excluded_ports: Vec<String> = wishes.exclude_outbound_ports.iter().map(u16::to_string).collect();
    let excluded: Vec<String> = wishes.exclude_outbound_cidrs.iter().map(ToString::to_string).collect();
    for (flag, items) in
        [("--ports", ports), ("--exclude-ports", excluded_ports), ("--exclude-cidrs", excluded)]
    {
        if !items.is_empty() {
            arguments.push(format!("{flag}={}", items.join(",")));
        }
    }
    json!({
        "name": INIT,
        "image": settings.init_image,
        "args": arguments,
        // iptables wants a lock that it can write, and the root is read-only.
        "env": [{ "name": "XTABLES_LOCKFILE", "value": "/dev/shm/hedgerow-xtables.lock" }],
        "resources": {
            "requests": { "cpu": "10m", "memory": "16Mi" },
            "limits": { "memory": "64Mi" },
        },
        "securityContext": {
            "runAsNonRoot": false,
            "runAsUser": 0,
            "runAsGroup": 0,
            "allowPrivilegeEscalation": false,
            "privileged": false,
            "readOnlyRootFilesystem": true,
            // NET_RAW is for the legacy backend of iptables.
            "capabilities": { "drop": ["ALL"], "add": ["NET_ADMIN", "NET_RAW"] },
            "seccompProfile": { "type": "RuntimeDefault" },
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resources_of(request: Option<&str>, limit: Option<&str>) -> (String, String) {
        let read = |text: Option<&str>| text.map(|text| text.parse().unwrap());
        let wishes = Wishes { memory_request: read(request), memory_limit: read(limit), ..Wishes::default() };
        let resources = resources(&wishes);
        let text = |value: &Value| value["memory"].as_str().unwrap().to_owned();
        (text(&resources["requests"]), text(&resources["limits"]))
    }

    #[test]
    fn a_default_gives_way_to_what_was_asked_for() {
        for (request, limit, expected) in [
            (None, None, ("32Mi", "128Mi")),
            (Some("64Mi"), None, ("64Mi", "128Mi")),
            (Some("1Gi"), None, ("1Gi", "1Gi")),
            (None, Some("16Mi"), ("16Mi", "16Mi")),
            (None, Some("1Gi"), ("32Mi", "1Gi")),
            (Some("1M"), Some("2M"), ("1M", "2M")),
        ] {
            let (own_request, own_limit) = resources_of(request, limit);
            assert_eq!((own_request.as_str(), own_limit.as_str()), expected);
        }
    }

    #[test]
    fn the_processor_is_bounded_only_when_asked_for() {
        let unbounded = resources(&Wishes::default());
        assert_eq!(unbounded["limits"]["cpu"], Value::Null);
        let bounded = resources(&Wishes { cpu_limit: "10m".parse().ok(), ..Wishes::default() });
        assert_eq!((&bounded["limits"]["cpu"], &bounded["requests"]["cpu"]), (&json!("10m"), &json!("10m")));
    }

    #[test]
    fn the_defaults_are_what_they_are_written_as() {
        for quantity in [CPU_REQUEST, MEMORY_REQUEST, MEMORY_LIMIT] {
            assert_eq!(quantity.to_string().parse(), Ok(quantity));
        }
    }

    #[test]
    fn a_limit_below_its_request_is_a_contradiction() {
        let wishes = Wishes {
            memory_request: "1Gi".parse().ok(),
            memory_limit: "1G".parse().ok(),
            ..Wishes::default()
        };
        let told = "memory-request is 1Gi and memory-limit is 1G, which is less";
        assert_eq!(contradiction(&wishes).as_deref(), Some(told));
        assert_eq!(contradiction(&Wishes::default()), None);
    }
}
