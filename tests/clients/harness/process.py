"""A hedgerow process of its own: started on free ports, asked until it is ready, stopped as a pod's end does it."""

import http.client
import json
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

START = 15

LISTEN = """
listen: {{ proxy: "127.0.0.1:{proxy}", admin: "127.0.0.1:{admin}", transparent: {transparent} }}
"""


class Process:
    """A running process under `policy`, to which its ports are added. Its log is read as it comes."""

    def __init__(
        self,
        binary: Path,
        folder: Path,
        policy: str,
        environment: Mapping[str, str] | None = None,
        transparent: str = "off",
        prefix: Sequence[str] = (),
    ):
        """`prefix` is a command that runs another."""
        self.port, self.admin_port = free_ports(2)
        file = folder / "policy.yaml"
        ports = {"proxy": self.port, "admin": self.admin_port, "transparent": transparent}
        file.write_text(LISTEN.format(**ports) + policy)
        self.messages = folder / "hedgerow.log"
        self.process = subprocess.Popen(
            [*prefix, binary, "run", "--config", file],
            env=environment or {},
            stdout=subprocess.PIPE,
            stderr=self.messages.open("w"),
            text=True,
        )
        self.log: list[dict] = []
        self.logged = threading.Condition()
        threading.Thread(target=self._read_log, daemon=True).start()
        self._until_ready()

    def stop(self):
        """A process that hangs or has panicked spoils the whole run."""
        self.process.terminate()
        code, messages = self.process.wait(timeout=30), self.messages.read_text()
        if code != 0 or "panicked" in messages:
            raise SystemExit(f"hedgerow left with {code}:\n{messages}")

    def _read_log(self):
        for line in self.process.stdout:
            with self.logged:
                self.log.append(json.loads(line))
                self.logged.notify_all()

    def _until_ready(self):
        until = time.monotonic() + START
        while self.process.poll() is None and time.monotonic() < until:
            try:
                if self.ask(self.admin_port, "/readyz")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.02)
        self.process.kill()
        raise SystemExit(f"hedgerow does not start:\n{self.messages.read_text()}")

    @staticmethod
    def ask(port: int, target: str) -> tuple[int, bytes]:
        """Status and body of the answer to a GET."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", target)
        response = connection.getresponse()
        return response.status, response.read()


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def shown(passed: int, failed: int, seconds: float) -> str:
    """The closing line, in the form of cargo's own, so that one sum can be made of all suites."""
    verdict = "FAILED" if failed or not passed else "ok"
    return f"test result: {verdict}. {passed} passed; {failed} failed; 0 ignored; finished in {seconds:.1f}s"
