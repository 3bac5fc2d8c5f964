"""Every object against the schemas of the API servers that hedgerow is for."""

import functools
import json
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

from bundles import Bundle, told
from kubernetes_validate import SchemaNotFoundError, ValidationError, utils, validate

VERSIONS = [f"1.{minor}" for minor in range(29, 38)]

# Kinds that operators bring, whose schemas are not among those, with the keys of `spec` that are used here. Any other
# kind without a schema is a slip.
CUSTOM = {
    ("cert-manager.io/v1", "Issuer"): {"selfSigned", "ca"},
    ("cert-manager.io/v1", "Certificate"): {
        "isCA",
        "commonName",
        "secretName",
        "dnsNames",
        "usages",
        "duration",
        "renewBefore",
        "privateKey",
        "issuerRef",
    },
    ("monitoring.coreos.com/v1", "PodMonitor"): {"namespaceSelector", "selector", "podMetricsEndpoints"},
}

# The library reads a file of some megabytes anew for each object.
utils.schema_contents = functools.cache(utils.schema_contents)


def problems_by_object(bundles: Iterable[Bundle]) -> dict[str, list[str]]:
    """By the object's JSON. The same objects are in several bundles."""
    texts = sorted({json.dumps(each) for bundle in bundles for each in bundle.objects})
    judged = {text: custom(json.loads(text)) for text in texts if is_custom(json.loads(text))}
    rest = [text for text in texts if text not in judged]
    with ProcessPoolExecutor() as pool:
        for found in pool.map(functools.partial(judge, rest), VERSIONS):
            for text, problems in found.items():
                judged.setdefault(text, []).extend(problems)
    return judged


def is_custom(each: dict) -> bool:
    return (each["apiVersion"], each["kind"]) in CUSTOM


def custom(each: dict) -> list[str]:
    unknown = each["spec"].keys() - CUSTOM[each["apiVersion"], each["kind"]]
    return [f"{told(each)}: unknown key spec.{key}" for key in sorted(unknown)]


def judge(texts: list[str], version: str) -> dict[str, list[str]]:
    return {text: list(faults(json.loads(text), version)) for text in texts}


def faults(each: dict, version: str):
    try:
        # It falls back to an older one that it has.
        if (used := validate(each, version, strict=True)) != version:
            yield f"{told(each)}: there is no schema of {version}, only of {used}"
    except ValidationError as error:
        place = ".".join(str(step) for step in error.path)
        yield f"{told(each)}: {version}: {place}: {error.message}"
    except SchemaNotFoundError:
        yield f"{told(each)}: {version}: unknown kind {each['apiVersion']} {each['kind']}"
