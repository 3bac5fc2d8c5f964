#!/usr/bin/env python3
"""The Kubernetes manifests: they build, every supported API server would take them, and they mean what they should.

Nothing of a cluster is needed. Each kustomization is built, the examples are injected by hedgerow, and the schemas of
each Kubernetes are at hand; what no schema says, such as which pods a webhook is called for, is worked out here.

    .venv/bin/python tests/k8s/run.py
"""

import argparse
import copy
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import bundles
import injector
import kubectl
import pods
import schemas
import yaml
from bundles import K8S, ROOT, Bundle, told
from labels import is_selected

sys.path.append(str(ROOT / "tests/clients"))

from harness.process import shown  # noqa: E402

CLUSTER_WIDE = {"Namespace", "MutatingWebhookConfiguration"}
README = ROOT / "README.md"
RENDERED = "overlays/cert-manager"
WITH_CERT_MANAGER = [RENDERED, "overlays/ha", "install.yaml"]
INJECTORS = ["base", *WITH_CERT_MANAGER, "hedgerow install"]

INJECTOR_CHECKS = [
    injector.service_leads_to_its_pods,
    injector.a_disruption_leaves_one_that_serves,
    injector.pods_keep_apart_from_their_like,
    injector.network_policy_lets_in_what_has_to_come,
    injector.arguments_fit_the_pod,
    injector.webhooks_call_the_service,
    injector.webhooks_are_called_as_they_should_be,
    injector.webhooks_choose_the_right_pods,
    injector.namespace_enforces_the_restricted_profile,
    pods.own_containers_are_bounded,
]


def objects_are_told_apart(bundle: Bundle):
    """By kind, namespace and name."""
    seen = set()
    for each in bundle.objects:
        name = (told(each), each["metadata"].get("namespace"))
        if name in seen:
            yield f"{told(each)} is there twice"
        seen.add(name)
        if (each["kind"] in CLUSTER_WIDE) == ("namespace" in each["metadata"]):
            yield f"{told(each)}: namespace is {each['metadata'].get('namespace')}"


def nothing_is_granted(bundle: Bundle):
    for each in bundle.objects:
        if each["apiVersion"].startswith("rbac.") or each.get("automountServiceAccountToken"):
            yield f"{told(each)} gives rights"


POD_CHECKS = [
    pods.workloads_select_their_pods,
    pods.images_have_versions,
    pods.pods_have_no_token,
    pods.pods_meet_the_restricted_profile,
]


def files_are_named(folder: Path):
    """By the kustomization beside them; others would be checked by nobody."""
    named = (folder / "kustomization.yaml").read_text()
    for file in folder.glob("*.yaml"):
        if file.name != "kustomization.yaml" and not re.search(rf"[ :]{re.escape(file.name)}$", named, re.MULTILINE):
            yield f"{file.name} is not named"


def files_are_objects_of_their_own(base: Bundle):
    """`hedgerow install` prints them without a kustomization, and gives them its own version."""
    unbuilt = bundles.files(K8S / "base")
    yield from (f"{file.name} has {len(file.objects)} objects" for file in unbuilt if len(file.objects) != 1)
    together = Bundle("unbuilt", [each for file in unbuilt for each in file.objects])
    injector.container(together)["image"] = injector.container(base)["image"]
    yield from differences(together, base)


def differences(one: Bundle, other: Bundle):
    """Of objects, whatever their order."""
    left, right = ({json.dumps(each, sort_keys=True): told(each) for each in side.objects} for side in (one, other))
    for text in left.keys() ^ right.keys():
        yield f"{left.get(text) or right[text]} is not the same in both"


def render_is_fresh(rendered: Bundle, built: Bundle):
    yield from (f"{problem}: `make k8s-render` writes it anew" for problem in differences(rendered, built))


def install_is_the_base_with_a_certificate(installed: Bundle, base: Bundle):
    """And the certificate's digest, which replaces injectors that serve an older one; nothing else is another."""
    plain = copy.deepcopy([each for each in installed.objects if each["kind"] != "Secret"])
    secret = installed.one("Secret")
    [volume] = installed.one("Deployment")["spec"]["template"]["spec"]["volumes"]
    if secret["metadata"]["name"] != volume["secret"]["secretName"] or secret["type"] != "kubernetes.io/tls":
        yield f"{told(secret)}, {secret['type']}, is not what the pod mounts"
    for each in plain:
        if each["kind"] == "Deployment":
            annotations = each["spec"]["template"]["metadata"]["annotations"]
            if not annotations.pop("hedgerow.dev/certificate", None):
                yield f"{told(each)} does not say which certificate it serves"
        for webhook in each.get("webhooks", []):
            if not webhook["clientConfig"].pop("caBundle", None):
                yield f"{webhook['name']} has no caBundle"
    yield from differences(Bundle("without", plain), base)


def policies_are_valid(examples: Bundle, binary: Path):
    policies = [each["data"]["policy.yaml"] for each in examples.of_kind("ConfigMap")]
    if not policies:
        yield "there is no policy"
    with tempfile.TemporaryDirectory(prefix="hedgerow-k8s-") as folder:
        for policy in policies:
            file = Path(folder) / "policy.yaml"
            file.write_text(policy)
            if warnings := bundles.run([binary, "check", file])[1]:
                yield warnings


def policy_is_the_one_that_sidecars_mount(injected: Bundle):
    names = {each["metadata"]["name"] for each in injected.of_kind("ConfigMap")}
    for workload, pod in injected.templates:
        mounted = [volume["configMap"]["name"] for volume in pod["spec"]["volumes"] if "configMap" in volume]
        if mounted != list(names):
            yield f"{told(workload)} mounts {mounted}, there is {names}"


def monitors_find_their_ports(monitoring: Bundle, base: Bundle, injected: Bundle):
    def names(pod: dict) -> set[str]:
        return {port["name"] for container in pods.containers(pod) for port in container.get("ports", [])}

    def asked(monitor: str) -> set[str]:
        return {each["port"] for each in monitoring.one("PodMonitor", monitor)["spec"]["podMetricsEndpoints"]}

    selector = monitoring.one("PodMonitor", "hedgerow-injector")["spec"]["selector"]
    if not is_selected(selector, injector.pod_labels(base)):
        yield f"the injector's selects {selector}"
    for monitor, bundle in [("hedgerow-injector", base), ("hedgerow-sidecars", injected)]:
        for workload, pod in bundle.templates:
            if not asked(monitor) <= names(pod):
                yield f"{monitor} asks {asked(monitor)}, {told(workload)} has {names(pod)}"


def annotations_of_the_readme_mean_something(binary: Path):
    """Those of its table, each with the first value that stands there."""
    rows = re.findall(r"^\| `(hedgerow\.dev/[\w-]+)` \| `([^`]+)`", README.read_text(), re.MULTILINE)
    if not rows:
        yield "there is no table of them"
    names = [{"name": f"pod-{number}", "annotations": dict([row])} for number, row in enumerate(rows)]
    spec = {"containers": [{"name": name, "image": name} for name in ("agent", "metrics")]}
    made = [{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec} for metadata in names]
    _, messages = bundles.run([binary, "inject"], yaml.safe_dump_all(made))
    yield from re.findall("warning: .*", messages)
    if (count := messages.count(": injected")) != len(rows):
        yield f"{len(rows)} annotations, {count} pods injected: {messages}"


def images_of_the_readme_are_of_this_version():
    images = re.findall(rf"{re.escape(pods.OWN_IMAGES)}\S+:([\w.]+)", README.read_text())
    yield from (f"it has {version}, this is {pods.VERSION}" for version in images if version != f"v{pods.VERSION}")
    if not images:
        yield "it names no image"


class Report:
    """A line for each check."""

    def __init__(self):
        self.passed = self.failed = 0

    def check(self, subject: str, find: Callable[..., Iterable[str] | None], *given, title: str = ""):
        """`find` is given the rest, and finds problems."""
        try:
            problems = list(find(*given) or [])
        except Exception as error:
            problems = [f"{type(error).__name__}: {error}"]
        self.passed, self.failed = self.passed + (not problems), self.failed + bool(problems)
        print(f"{'FAILED' if problems else 'ok':7}{subject:24}{title or find.__name__.replace('_', ' ')}")
        print("".join(f"    {problem}\n" for problem in problems), end="", flush=True)


def gather(report: Report, binary: Path) -> dict[str, Bundle]:
    """By name, those that could be made."""
    makers = {str(folder.relative_to(K8S)): partial(bundles.built, folder) for folder in bundles.kustomizations()}
    makers["install.yaml"] = bundles.rendered
    makers["injected"] = lambda: bundles.injected(binary, bundles.built(K8S / "examples"))
    makers["manifests"] = partial(bundles.injected_manifests, binary)
    makers["hedgerow install"] = partial(bundles.installed, binary)
    found = {}

    def is_made(name: str):
        found[name] = makers[name]()

    for name in makers:
        report.check(name, is_made, name)
    return found


def check_each(report: Report, found: dict[str, Bundle]):
    by_object = schemas.problems_by_object(found.values())

    def is_valid(bundle: Bundle):
        return [problem for each in bundle.objects for problem in by_object[json.dumps(each)]]

    for name, bundle in found.items():
        report.check(name, is_valid, bundle, title=f"is valid from {schemas.VERSIONS[0]} to {schemas.VERSIONS[-1]}")
        for check in checks_of(name, bundle):
            report.check(name, check, bundle)


def checks_of(name: str, bundle: Bundle) -> list[Callable[[Bundle], Iterable[str]]]:
    if name == "manifests":
        # They are as others write them.
        return []
    return [
        objects_are_told_apart,
        nothing_is_granted,
        *(POD_CHECKS if bundle.templates else []),
        *(INJECTOR_CHECKS if name in INJECTORS else []),
        *([injector.certificate_is_the_one_that_is_served] if name in WITH_CERT_MANAGER else []),
    ]


def check_together(report: Report, binary: Path, found: dict[str, Bundle]):
    """What must hold beside that, each with the bundles that it is about. One that could not be made has failed."""
    for check, *names in [
        (files_are_objects_of_their_own, "base"),
        (install_is_the_base_with_a_certificate, "hedgerow install", "base"),
        (render_is_fresh, "install.yaml", RENDERED),
        (pods.every_workload_has_its_sidecar, "injected"),
        (pods.own_containers_are_bounded, "injected"),
        (policy_is_the_one_that_sidecars_mount, "injected"),
        (monitors_find_their_ports, "overlays/monitoring", "base", "injected"),
    ]:
        if all(name in found for name in names):
            report.check(names[0], check, *[found[name] for name in names])
    if "examples" in found:
        report.check("examples", policies_are_valid, found["examples"], binary)


def check_files(report: Report, binary: Path):
    for folder in bundles.kustomizations():
        report.check(str(folder.relative_to(K8S)), files_are_named, folder)
    report.check("README.md", annotations_of_the_readme_mean_something, binary)
    report.check("README.md", images_of_the_readme_are_of_this_version)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, default=Path("target/debug/hedgerow"), help="the hedgerow to use")
    asked, began, report = parser.parse_args(), time.monotonic(), Report()
    if kubectl.find() is None:
        raise SystemExit("kubectl is missing: `make kubectl` brings it")
    binary = asked.bin.resolve()
    found = gather(report, binary)
    check_each(report, found)
    check_together(report, binary, found)
    check_files(report, binary)
    print(f"\n{shown(report.passed, report.failed, time.monotonic() - began)}")
    return 1 if report.failed or not report.passed else 0


if __name__ == "__main__":
    sys.exit(main())
