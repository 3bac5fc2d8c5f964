"""What is looked at: the objects of each kustomization, of the rendered file, and those that hedgerow itself makes."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import kubectl
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"


@dataclass(frozen=True)
class Bundle:
    """Objects that go to a cluster together, by the name of where they come from."""

    name: str
    objects: list[dict]

    @classmethod
    def read(cls, name: str, text: str) -> "Bundle":
        found = [each for each in yaml.safe_load_all(text) if each]
        if not found:
            raise ValueError("there are no objects in it")
        return cls(name, found)

    def of_kind(self, kind: str) -> list[dict]:
        return [each for each in self.objects if each["kind"] == kind]

    def one(self, kind: str, name: str | None = None) -> dict:
        found = [each for each in self.of_kind(kind) if name in (None, each["metadata"]["name"])]
        if len(found) != 1:
            raise ValueError(f"expected one {kind} {name or ''}, found {len(found)}")
        return found[0]

    @property
    def templates(self) -> list[tuple[dict, dict]]:
        """Each workload with the pod that it makes."""
        return [(each, each["spec"]["template"]) for each in self.objects if "template" in each.get("spec", {})]


def told(each: dict) -> str:
    """The object's kind and name."""
    return f"{each['kind']} {each['metadata']['name']}"


def kustomizations() -> list[Path]:
    return sorted(file.parent for file in K8S.rglob("kustomization.yaml"))


def built(folder: Path) -> Bundle:
    return Bundle.read(str(folder.relative_to(K8S)), output([kubectl.find(), "kustomize", folder]))


def rendered() -> Bundle:
    return Bundle.read("install.yaml", (K8S / "install.yaml").read_text())


def files(folder: Path) -> list[Bundle]:
    """Each file of a kustomization as it is."""
    named = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return [Bundle.read(name, (folder / name).read_text()) for name in named]


def injected(binary: Path, bundle: Bundle) -> Bundle:
    return Bundle.read(f"{bundle.name}, injected", output([binary, "inject"], yaml.safe_dump_all(bundle.objects)))


def injected_manifests(binary: Path) -> Bundle:
    """Those that the integration tests inject too, which are as manifests come: with lists and kinds of operators."""
    files = [file for file in (ROOT / "tests/k8s/manifests").glob("*.yaml") if ".injected" not in file.suffixes]
    documents = Bundle.read("manifests", output([binary, "inject", *files])).objects
    return Bundle("manifests", [each for document in documents for each in known(document)])


def known(document: dict) -> list[dict]:
    """What of it has a schema: the items of a list, and of a kind of an operator's the pod that it makes."""
    if document["kind"] == "List":
        return [each for item in document["items"] for each in known(item)]
    if "." in document["apiVersion"].partition("/")[0].removesuffix(".k8s.io"):
        pod = document["spec"]["template"]
        metadata = {**document["metadata"], **pod.get("metadata", {})}
        return [{**pod, "apiVersion": "v1", "kind": "Pod", "metadata": metadata}]
    return [document]


def installed(binary: Path) -> Bundle:
    return Bundle.read("hedgerow install", output([binary, "install"]))


def output(command: list, text: str = "") -> str:
    return run(command, text)[0]


def run(command: list, text: str = "") -> tuple[str, str]:
    """What it says on standard output and on standard error."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise ValueError(f"{Path(command[0]).name} {command[1]} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout, done.stderr
