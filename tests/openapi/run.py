#!/usr/bin/env python3
"""The fan-out against its own description: requests are made of it, right ones and wrong ones, and every answer is
checked against it.

What a request names is called, so the policy lets nothing through but one port of this machine: no other host is
dialled and no name is looked up. The origin on that port has an answer of each kind.

    .venv/bin/python tests/openapi/run.py
"""

import argparse
import base64
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "clients"))

from harness.process import Process, shown  # noqa: E402

# `localhost` is known without a look-up, and other names are refused without one, since no range is allowed that an
# address of theirs could be in. Whoever asks the name server all the same is heard.
POLICY = """
dns: {{ servers: ["127.0.0.1:{dns}"] }}
egress: {{ default: deny, allow: ["localhost:{origin}"] }}
defaults: {{ deadline: {{ default: 5s, max: 5s }}, breaker: off }}
"""


class Origin(BaseHTTPRequestHandler):
    """An answer of each kind, whatever the method."""

    protocol_version = "HTTP/1.1"
    ANSWERS = {
        "/json": (200, [("content-type", "application/json")], b'{"n": 1}'),
        "/text": (200, [("content-type", "text/plain")], b"some text"),
        "/bytes": (200, [("content-type", "application/octet-stream")], bytes(range(256))),
        "/nothing": (204, [], b""),
        "/twice": (200, [("x-same", "one"), ("x-same", "two")], b"{}"),
        "/503": (503, [("retry-after", "1")], b"busy"),
    }
    stopping = threading.Event()

    def answer(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/hang":
            self.stopping.wait()
        status, headers, body = self.ANSWERS.get(self.path, (404, [], b"no such thing"))
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if status != 204:
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def __getattr__(self, name):
        if name.startswith("do_"):
            return self.answer
        raise AttributeError(name)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    # A fan-out opens a hundred connections at once.
    request_queue_size = 256

    def handle_error(self, request, client_address):
        """The other side has left: so every call ends that is cancelled."""


# What must have come for the run to have said anything: answers of both forms, refusals, results and reasons.
EXPECTED = [
    "positive request: 200 application/json",
    "positive request: 200 text/event-stream; charset=utf-8",
    "negative request: 400 application/problem+json",
    "negative request: 405 application/problem+json",
    "source primary",
    "source backup",
    "error deadline",
    "error egress_denied",
    "error invalid_request",
    "error upstream_status",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, default=Path("target/debug/hedgerow"), help="the hedgerow to test")
    parser.add_argument("arguments", nargs="*", help="what `st run` gets beside that; after --")
    asked, began = parser.parse_args(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hedgerow-openapi-") as temporary:
        folder = Path(temporary)
        origin = Server(("127.0.0.1", 0), Origin)
        threading.Thread(target=origin.serve_forever, daemon=True).start()
        names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        names.bind(("127.0.0.1", 0))
        policy = POLICY.format(dns=names.getsockname()[1], origin=origin.server_port)
        hedgerow = Process(asked.bin.resolve(), folder, policy)
        try:
            code, report = make_requests(hedgerow, origin.server_port, folder, asked.arguments)
            hedgerow.stop()
        finally:
            hedgerow.process.kill()
            Origin.stopping.set()
        seen, passed, failed = read(report)
    wrong = [f"never came: {what}" for what in EXPECTED if not seen[what]]
    wrong += ["a name was looked up"] if was_asked(names) else []
    # The tool's own errors are no request's.
    wrong += ["Schemathesis has failed"] if code and not failed else []
    print("".join(f"\n{count:6} {what}" for what, count in sorted(seen.items())))
    print("".join(f"\n{problem}" for problem in wrong))
    print(f"\n{shown(passed, failed + len(wrong), time.monotonic() - began)}")
    return 1 if failed or wrong or not passed else 0


def make_requests(hedgerow: Process, origin: int, folder: Path, arguments: list[str]) -> tuple[int, Path]:
    """The tool's exit code and its report."""
    # From a file, since the operation that serves the document is left out where it is read from there.
    document, report = folder / "openapi.json", folder / "report.ndjson"
    document.write_bytes(hedgerow.ask(hedgerow.port, "/v1/openapi.json")[1])
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "ORIGIN": f"http://localhost:{origin}",
        "PYTHONPATH": str(HERE),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SCHEMATHESIS_HOOKS": "hooks",
    }
    st = Path(sys.executable).with_name("st")
    command = [st, "--config-file", HERE / "schemathesis.toml", "run", document]
    command += ["--url", f"http://127.0.0.1:{hedgerow.port}"]
    command += ["--report", "ndjson", "--report-ndjson-path", report, *arguments]
    # What it leaves behind goes with the folder.
    return subprocess.run(command, cwd=folder, env=environment, timeout=300).returncode, report


def read(report: Path) -> tuple[Counter[str], int, int]:
    """What came, how many requests passed all checks, and how many did not."""
    seen, passed, failed = Counter(), 0, 0
    for line in report.open():
        recorder = json.loads(line).get("ScenarioFinished", {}).get("recorder", {})
        for id, checks in recorder.get("checks", {}).items():
            is_right = all(check["status"] == "success" for check in checks)
            passed, failed = passed + is_right, failed + (not is_right)
        for id, exchange in recorder.get("interactions", {}).items():
            answer, case = exchange["response"], recorder["cases"][id]["value"]
            [kind] = answer["headers"].get("content-type", ["nothing"])
            seen[f"{case['meta']['generation']['mode']} request: {answer['status_code']} {kind}"] += 1
            if case["path"] == "/v1/fanout" and answer["status_code"] == 200:
                text = base64.b64decode(answer["content"]["$base64"]).decode()
                seen.update(f"{key} {word}" for key, word in re.findall(r'"(source|error)":"(\w+)"', text))
    return seen, passed, failed


def was_asked(names: socket.socket) -> bool:
    names.setblocking(False)
    try:
        return bool(names.recv(512))
    except BlockingIOError:
        return False


if __name__ == "__main__":
    sys.exit(main())
