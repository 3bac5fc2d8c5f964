"""What must hold for each pod that the manifests make, with a sidecar and without."""

import re
import tomllib

from bundles import ROOT, Bundle, told
from labels import is_selected

VERSION = tomllib.loads((ROOT / "Cargo.toml").read_text())["package"]["version"]
OWN_IMAGES = "ghcr.io/hedgerow/"
# Of the volumes that the restricted profile of Pod Security allows.
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def containers(pod: dict) -> list[dict]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def workloads_select_their_pods(bundle: Bundle):
    for workload, pod in bundle.templates:
        selector = workload["spec"].get("selector")
        # A Job is given one by the API server.
        if workload["kind"] != "Job" and not (selector and is_selected(selector, pod["metadata"]["labels"])):
            yield f"{told(workload)} selects {selector}, its pods have {pod['metadata']['labels']}"


def images_have_versions(bundle: Bundle):
    for workload, pod in bundle.templates:
        for image in [container["image"] for container in containers(pod)]:
            if not re.fullmatch(r"[\w.-]+\.[a-z]+/[\w./-]+:v?\d+\.\d+\.\d+", image):
                yield f"{told(workload)}: {image} has no registry or version"
            if image.startswith(OWN_IMAGES) and not image.endswith(f":v{VERSION}"):
                yield f"{told(workload)}: {image} is not of version {VERSION}"


def pods_have_no_token(bundle: Bundle):
    for workload, pod in bundle.templates:
        if pod["spec"].get("automountServiceAccountToken") is not False:
            yield f"{told(workload)} mounts a token"


def pods_meet_the_restricted_profile(bundle: Bundle):
    for workload, pod in bundle.templates:
        for problem in [*breaches_of_pod(pod["spec"]), *breaches_of_containers(pod)]:
            yield f"{told(workload)}: {problem}"


def breaches_of_pod(spec: dict):
    for key in ["hostNetwork", "hostPID", "hostIPC"]:
        if spec.get(key):
            yield key
    if spec.get("securityContext", {}).get("sysctls"):
        yield "sysctls"
    for volume in spec.get("volumes", []):
        if kinds := volume.keys() - {"name"} - VOLUMES:
            yield f"volume {volume['name']} is a {kinds}"


def breaches_of_containers(pod: dict):
    shared = pod["spec"].get("securityContext", {})
    for container in containers(pod):
        for breach in breaches({**shared, **container.get("securityContext", {})}):
            yield f"container {container['name']}: {breach}"
        if any("hostPort" in port for port in container.get("ports", [])):
            yield f"container {container['name']}: hostPort"


def breaches(context: dict):
    """Of what a container and its pod say together."""
    required = {"allowPrivilegeEscalation": False, "runAsNonRoot": True}
    yield from (f"{key} is not {value}" for key, value in required.items() if context.get(key) is not value)
    if context.get("privileged") or context.get("procMount", "Default") != "Default":
        yield "privileged or procMount"
    if context.get("runAsUser") == 0:
        yield "runs as root"
    if context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "has no seccomp profile"
    capabilities = context.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield "does not drop all capabilities"
    if added := set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield f"adds {added}"


def own_containers_are_bounded(bundle: Bundle):
    """More than the profile asks for: a file system that cannot be written, bounds on memory and none on time."""
    own = [each for _, pod in bundle.templates for each in containers(pod) if each["image"].startswith(OWN_IMAGES)]
    if not own:
        yield "none of the containers is hedgerow's"
    for container in own:
        context, resources = container["securityContext"], container["resources"]
        if not context.get("readOnlyRootFilesystem"):
            yield f"container {container['name']} can write to its root"
        if "memory" not in resources["limits"] or "cpu" in resources["limits"]:
            yield f"container {container['name']} has the limits {resources['limits']}"
        if resources["requests"].keys() != {"cpu", "memory"}:
            yield f"container {container['name']} requests {resources['requests']}"


def every_workload_has_its_sidecar(bundle: Bundle):
    if not bundle.templates:
        yield "there are no workloads"
    for workload, pod in bundle.templates:
        first = pod["spec"].get("initContainers", [{}])[0]
        if (first.get("name"), first.get("restartPolicy")) != ("hedgerow", "Always"):
            yield f"{told(workload)} begins with {first}"
