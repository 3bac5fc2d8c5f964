"""hedgerow as the clients need it: the suite's policy, the access log, and the environment of its clients."""

import os
from itertools import count
from pathlib import Path

from . import pod
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
# Where a pod's rules send connections.
TRANSPARENT = 15301
NAMES = [INTERCEPTED, TUNNELLED, DENIED, PINNED, LONG]
HOSTS = [*NAMES, ADDRESS]

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
    """The one process that all clients go through; in a pod, by the pod's rules."""

    def __init__(self, binary: Path, folder: Path, pki: Pki, dns_port: int, pod_: pod.Pod | None = None):
        self.trust = folder / "trust"
        self.trust.mkdir()
        self.marks = count()
        policy = POLICY % {"dns": dns_port, "trust": self.trust}
        environment = {"SSL_CERT_FILE": str(pki.root)}
        if pod_ is None:
            super().__init__(binary, folder, policy, environment)
        else:
            user, at = pod.as_user(self.trust), f"127.0.0.1:{TRANSPARENT}"
            super().__init__(binary, folder, policy, environment, transparent=at, prefix=user)
            pod_.redirect(binary, TRANSPARENT)

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


def environment(proxy_port: int | None, trust: Path, home: Path) -> dict[str, str]:
    """The variables of a container that hedgerow was injected into, and no others that could help. Without a port no
    proxy is told.

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
        f"-Djavax.net.ssl.trustStore={trust / 'truststore.p12'}",
        "-Djavax.net.ssl.trustStorePassword=changeit",
    ]
    proxies = {}
    if proxy_port is not None:
        java += [f"-D{scheme}.proxyHost=127.0.0.1" for scheme in ("http", "https")]
        java += [f"-D{scheme}.proxyPort={proxy_port}" for scheme in ("http", "https")]
        java += ["-Dhttp.nonProxyHosts=localhost|127.*|[::1]"]
        proxies |= {name: proxy for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY")}
        proxies |= {name: direct for name in ("no_proxy", "NO_PROXY")}
    return {
        **proxies,
        **{name: bundle for name in bundles},
        "WGETRC": str(trust / "wgetrc"),
        "JAVA_TOOL_OPTIONS": " ".join(java),
        "NODE_USE_ENV_PROXY": "1",
        "AIOHTTP_TRUST_ENV": "True",
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LANG": "C.UTF-8",
    }
