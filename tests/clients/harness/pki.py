"""A throw-away root that stands for the public ones, and the origin's certificate under it.

hedgerow trusts this root through `SSL_CERT_FILE`, as it would trust the image's own roots, so it has to be
in the bundle that hedgerow writes for its clients too.
"""

import subprocess
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

# Complete on its own: what the system's openssl.cnf adds differs between distributions.
CONFIG = """
[req]
distinguished_name = name
prompt = no
[name]
[root]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[leaf]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid:always
subjectAltName = {names}
"""


@dataclass(frozen=True)
class Pki:
    """Paths of the PEM files."""

    root: Path
    certificate: Path
    key: Path


def make(folder: Path, hosts: list[str]) -> Pki:
    """A root and a leaf for these hosts."""
    config = folder / "openssl.cnf"
    config.write_text(CONFIG.format(names=", ".join(map(_name, hosts))))
    root, root_key = folder / "root.pem", folder / "root.key"
    leaf, leaf_key = folder / "leaf.pem", folder / "leaf.key"
    _certificate(config, "root", "/CN=stand-in for the public roots", root, root_key)
    signed = ["-CA", str(root), "-CAkey", str(root_key)]
    _certificate(config, "leaf", f"/CN={hosts[0]}", leaf, leaf_key, *signed)
    return Pki(root, leaf, leaf_key)


def _name(host: str) -> str:
    try:
        return f"IP:{ip_address(host)}"
    except ValueError:
        return f"DNS:{host}"


def _certificate(config: Path, kind: str, subject: str, out: Path, key: Path, *signed: str) -> None:
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(key)]
    what = ["-config", str(config), "-extensions", kind, "-subj", subject, "-days", "2", "-out", str(out)]
    subprocess.run(["openssl", "req", "-x509", *new_key, *what, *signed], check=True, capture_output=True)
