"""What must hold among the objects of the injector: each finds those that it names."""

from itertools import product
from pathlib import PurePosixPath

from bundles import Bundle, told
from labels import is_selected

NAMESPACE = "hedgerow-system"
SYSTEM = ["kube-system", "kube-node-lease", "kube-public", NAMESPACE]
LABEL = "hedgerow.dev/inject"
# By the label of the namespace, then by that of the pod; `else` is a value that means nothing.
INJECTED = {
    "enabled": {None, "enabled", "else"},
    "disabled": set(),
    "else": {"enabled"},
    None: {"enabled"},
}


def container(bundle: Bundle) -> dict:
    [container] = bundle.one("Deployment")["spec"]["template"]["spec"]["containers"]
    return container


def ports(bundle: Bundle) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(bundle)["ports"]}


def pod_labels(bundle: Bundle) -> dict:
    return bundle.one("Deployment")["spec"]["template"]["metadata"]["labels"]


def arguments(bundle: Bundle) -> dict[str, str]:
    """The flags of `hedgerow webhook`."""
    command, *flags = container(bundle)["args"]
    assert command == "webhook", command
    return dict(zip(flags[::2], flags[1::2], strict=True))


def service_leads_to_its_pods(bundle: Bundle):
    service = bundle.one("Service")["spec"]
    if not is_selected({"matchLabels": service["selector"]}, pod_labels(bundle)):
        yield f"it selects {service['selector']}, the pods have {pod_labels(bundle)}"
    for port in service["ports"]:
        if port["targetPort"] not in ports(bundle):
            yield f"no container has the port {port['targetPort']}"


def a_disruption_leaves_one_that_serves(bundle: Bundle):
    budget, replicas = bundle.one("PodDisruptionBudget")["spec"], bundle.one("Deployment")["spec"]["replicas"]
    if not is_selected(budget["selector"], pod_labels(bundle)):
        yield f"the budget selects {budget['selector']}, the pods have {pod_labels(bundle)}"
    if not 1 <= budget["minAvailable"] < replicas:
        yield f"of {replicas} replicas {budget['minAvailable']} stay, so no node can be drained, or all can"


def pods_keep_apart_from_their_like(bundle: Bundle):
    spec = bundle.one("Deployment")["spec"]["template"]["spec"]
    preferred, required = [
        spec["affinity"]["podAntiAffinity"].get(f"{how}DuringSchedulingIgnoredDuringExecution", [])
        for how in ("preferred", "required")
    ]
    terms = [*[each["podAffinityTerm"] for each in preferred], *required, *spec["topologySpreadConstraints"]]
    for term in terms:
        if not is_selected(term["labelSelector"], pod_labels(bundle)):
            yield f"{term} is not about its own pods"
    if not preferred and not required:
        yield "nothing keeps them on different nodes"


def network_policy_lets_in_what_has_to_come(bundle: Bundle):
    policy = bundle.one("NetworkPolicy")["spec"]
    if not is_selected(policy["podSelector"], pod_labels(bundle)):
        yield f"it selects {policy['podSelector']}, the pods have {pod_labels(bundle)}"
    [rule] = policy["ingress"]
    # No `from`: where the API server and the kubelet come from is not known.
    if rule.keys() != {"ports"} or {port["port"] for port in rule["ports"]} != ports(bundle).keys():
        yield f"it lets in {rule}, the ports are {ports(bundle)}"


def arguments_fit_the_pod(bundle: Bundle):
    asked = arguments(bundle)
    listening = {"webhook": asked["--listen"], "admin": asked["--admin"]}
    for name, address in listening.items():
        if ports(bundle).get(name) != int(address.rpartition(":")[2]):
            yield f"it listens on {address}, the port {name} is {ports(bundle).get(name)}"
    for probe in ("livenessProbe", "readinessProbe"):
        if container(bundle)[probe]["httpGet"]["port"] != "admin":
            yield f"{probe} does not ask the admin port"
    [mount] = container(bundle)["volumeMounts"]
    for flag, file in [("--tls-cert", "tls.crt"), ("--tls-key", "tls.key")]:
        if PurePosixPath(asked[flag]) != PurePosixPath(mount["mountPath"]) / file or "subPath" in mount:
            yield f"{flag} is {asked[flag]}, the certificate is mounted as {mount}"


def webhooks_call_the_service(bundle: Bundle):
    service = bundle.one("Service")
    expected = {
        "name": service["metadata"]["name"],
        "namespace": service["metadata"]["namespace"],
        "path": "/inject",
        "port": service["spec"]["ports"][0]["port"],
    }
    for webhook in bundle.one("MutatingWebhookConfiguration")["webhooks"]:
        if webhook["clientConfig"]["service"] != expected:
            yield f"{webhook['name']} calls {webhook['clientConfig']['service']}, the service is {expected}"


def webhooks_are_called_as_they_should_be(bundle: Bundle):
    """For new pods alone, at most twice, without effects, and not for long."""
    pods = {"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}
    expected = {
        "rules": [{**pods, "scope": "Namespaced"}],
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "reinvocationPolicy": "IfNeeded",
        "timeoutSeconds": 5,
        "failurePolicy": "Fail" if bundle.name.endswith("/ha") else "Ignore",
    }
    for webhook in bundle.one("MutatingWebhookConfiguration")["webhooks"]:
        for key, value in expected.items():
            if webhook.get(key) != value:
                yield f"{webhook['name']}: {key} is {webhook.get(key)}, expected {value}"


def webhooks_choose_the_right_pods(bundle: Bundle):
    """Each of them once."""
    for name, (own, pods) in product(["agents", *SYSTEM], INJECTED.items()):
        namespace = {"kubernetes.io/metadata.name": name, **({LABEL: own} if own else {})}
        for label in INJECTED:
            expected = int(label in pods and name not in SYSTEM)
            found = calls(bundle, namespace, {LABEL: label} if label else {})
            if found != expected:
                yield f"namespace {name} labelled {own}, pod {label}: {found} calls, expected {expected}"


def calls(bundle: Bundle, namespace: dict, pod: dict) -> int:
    webhooks = bundle.one("MutatingWebhookConfiguration")["webhooks"]
    return sum(
        is_selected(each["namespaceSelector"], namespace) and is_selected(each["objectSelector"], pod)
        for each in webhooks
    )


def namespace_enforces_the_restricted_profile(bundle: Bundle):
    labels = bundle.one("Namespace", NAMESPACE)["metadata"]["labels"]
    if labels.get("pod-security.kubernetes.io/enforce") != "restricted":
        yield f"it has the labels {labels}"


def certificate_is_the_one_that_is_served(bundle: Bundle):
    """From the CA's secret over the certificate's to the pod's volume, and back to the webhook's trust."""
    configuration, service = bundle.one("MutatingWebhookConfiguration"), bundle.one("Service")["metadata"]
    namespace, _, name = configuration["metadata"]["annotations"]["cert-manager.io/inject-ca-from"].partition("/")
    certificate = bundle.one("Certificate", name)
    [volume] = bundle.one("Deployment")["spec"]["template"]["spec"]["volumes"]
    if certificate["metadata"]["namespace"] != namespace:
        yield f"the webhook trusts {namespace}/{name}, which is not there"
    if f"{service['name']}.{service['namespace']}.svc" not in certificate["spec"]["dnsNames"]:
        yield f"the service's name is not among {certificate['spec']['dnsNames']}"
    if certificate["spec"]["secretName"] != volume["secret"]["secretName"]:
        yield f"it is kept as {certificate['spec']['secretName']}, the pod has {volume['secret']['secretName']}"
    issuer = bundle.one("Issuer", certificate["spec"]["issuerRef"]["name"])
    authority = bundle.one("Certificate", issuer["spec"]["ca"]["secretName"])
    if not authority["spec"].get("isCA") or "selfSigned" not in issuer_of(bundle, authority)["spec"]:
        yield f"{told(authority)} is no authority"


def issuer_of(bundle: Bundle, certificate: dict) -> dict:
    return bundle.one("Issuer", certificate["spec"]["issuerRef"]["name"])
