"""hedgerow as the clients need it: the suite's policy, the access log, and the environment of its clients."""

import os
from itertools import count
from pathlib import Path

from .pki import Pki
from .process import Process

# What the policy says about hosts. All of them are the origin.
INTERCEPTED = "tool.test"
TUNNELLED = "elsewhere.test"
DENIED = "denied.test"
PINNED = "pinned.test"
# More than the 64 characters that a certificate's common name holds.
LONG = "a-host-whose-name-is-longer-than-the-common-name-of-a.certificate.test"
# Without a name there is no SNI. Clients are told to go to 127.0.0.1 directly, but that is not the only one.
ADDRESS = "127.0.0.2"
HOSTS = [INTERCEPTED, TUNNELLED, DENIED, PINNED, LONG, ADDRESS]

# No second attempts and no breaker, so that what arrives at the origin is what the client sent, and a case
# that fails leaves the others alone.
POLICY = f"""
dns: {{ servers: ["127.0.0.1:%(dns)d"] }}
egress: {{ deny: [{DENIED}] }}
tls: {{ ca_dir: "%(trust)s" }}
defaults: {{ hedge: off, breaker: off }}
upstreams:
  intercepted: {{ hosts: [{INTERCEPTED}, {PINNED}, {LONG}, {ADDRESS}], intercept: true }}
"""


class Hedgerow(Process):
    """The one process that all clients go through."""

    def __init__(self, binary: Path, folder: Path, pki: Pki, dns_port: int):
        self.trust = folder / "trust"
        self.trust.mkdir()
        self.marks = count()
        policy = POLICY % {"dns": dns_port, "trust": self.trust}
        super().__init__(binary, folder, policy, {"SSL_CERT_FILE": str(pki.root)})

    def log_of(self, tag: str) -> list[dict]:
        """The lines of requests with this tag that have ended.

        Lines are written in the order in which requests end, but not before the answer is out. So one more
        request is made, and its line waited for.
        """
        mark = f"mark-{next(self.marks)}"
        self.ask(self.port, f"http://{DENIED}/{mark}/")
        with self.logged:
            if not self.logged.wait_for(lambda: self._lines(mark), timeout=5):
                raise TimeoutError("the access log stands still")
            return self._lines(tag)

    def _lines(self, tag: str) -> list[dict]:
        return [line for line in self.log if line.get("path", "").startswith(f"/{tag}/")]


def environment(proxy_port: int, trust: Path, home: Path) -> dict[str, str]:
    """The variables of a container that hedgerow was injected into, and no others that could help.

    Both cases of each proxy variable, since curl, wget and git read some in lower case alone and others prefer
    upper case. Most programs take the bundle *instead of* the public roots, hence it holds both. Java reads
    neither kind and has to be told by options.
    """
    proxy = f"http://127.0.0.1:{proxy_port}"
    direct = "localhost,127.0.0.1,::1,.svc,.cluster.local"
    bundle = str(trust / "bundle.pem")
    bundles = [
        "SSL_CERT_FILE",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "PIP_CERT",
        "AWS_CA_BUNDLE",
        "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
        "GIT_SSL_CAINFO",
        "NODE_EXTRA_CA_CERTS",
        "DENO_CERT",
        "CARGO_HTTP_CAINFO",
    ]
    java = [
        *(f"-D{scheme}.proxyHost=127.0.0.1" for scheme in ("http", "https")),
        *(f"-D{scheme}.proxyPort={proxy_port}" for scheme in ("http", "https")),
        "-Dhttp.nonProxyHosts=localhost|127.*|[::1]",
        f"-Djavax.net.ssl.trustStore={trust / 'truststore.p12'}",
        "-Djavax.net.ssl.trustStorePassword=changeit",
    ]
    return {
        **{name: proxy for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY")},
        **{name: direct for name in ("no_proxy", "NO_PROXY")},
        **{name: bundle for name in bundles},
        "WGETRC": str(trust / "wgetrc"),
        "JAVA_TOOL_OPTIONS": " ".join(java),
        "NODE_USE_ENV_PROXY": "1",
        "AIOHTTP_TRUST_ENV": "True",
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LANG": "C.UTF-8",
    }
