"""curl, wget and git: a process for each case, and the report made of what they print."""

import re
import subprocess
import time
from pathlib import Path

from .program import PATIENCE

ASKED = '{"ask": "hello"}'


class Command:
    """What the three have in common. A subclass has a method for each verb."""

    def __init__(self, environment: dict[str, str], folder: Path):
        self.environment, self.folder = environment, folder

    def carry_out(self, verb: str, url: str, headers: dict[str, str]) -> dict:
        try:
            return getattr(self, verb)(url, headers)
        except subprocess.TimeoutExpired as hang:
            return {"failure": str(hang)}

    def close(self):
        """Nothing outlives a case."""

    def run(self, *command: str) -> tuple[int, list[str], str, list[int]]:
        """Exit code, lines of output, errors, and when the events among the lines came."""
        began, lines, events_ms = time.monotonic(), [], []
        with (self.folder / "stderr").open("w+") as errors:
            options = {"env": self.environment, "cwd": self.folder, "text": True}
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, **options) as process:
                for line in process.stdout:
                    if line.startswith("data:"):
                        events_ms.append(round((time.monotonic() - began) * 1000))
                    lines.append(line)
                code = process.wait(PATIENCE)
            errors.seek(0)
            return code, lines, errors.read(), events_ms


class Curl(Command):
    """Offers HTTP/2 by itself, and `Expect: 100-continue` for large bodies."""

    def get(self, url, headers, *options):
        fields = [part for name, value in headers.items() for part in ("-H", f"{name}: {value}")]
        result = "\n%{http_code} %{http_version}\n"
        code, lines, errors, events_ms = self.run("curl", "-sSN", "-w", result, *fields, *options, url)
        if code:
            return {"failure": f"exit {code}: {errors}"}
        status, version = lines.pop().split()
        body = "".join(lines)
        return {"status": int(status), "http": version, "body": body, "events_ms": events_ms, "talk": errors}

    stream = get

    def post(self, url, headers):
        return self.get(url, {**headers, "content-type": "application/json"}, "-d", ASKED)

    def twice(self, url, headers):
        return self.get(url, headers, url)

    def upload(self, url, headers):
        file = self.folder / "upload"
        file.write_bytes(bytes(2 << 20))
        # HTTP/2 has no use for the expectation in curl's view.
        return self.get(url, headers, "-v", "--http1.1", "--data-binary", f"@{file}")

    def in_clear(self, url, headers):
        return self.get(url.replace("https:", "http:"), headers, "--request-target", url)

    def late_connect(self, url, headers):
        (deadline,) = headers.items()
        return self.get(url, {}, "--proxy-header", ": ".join(deadline))


class Wget(Command):
    """Debian's is built with GnuTLS: it offers no ALPN and takes roots from its own file alone."""

    def get(self, url, headers, *options):
        fields = [f"--header={name}: {value}" for name, value in headers.items()]
        quiet = ["-q", "-S", "-O", "-", "--content-on-error", "--tries=1", "--timeout=10"]
        code, lines, errors, events_ms = self.run("wget", *quiet, *fields, *options, url)
        statuses = re.findall(r"^ *HTTP/[\d.]+ (\d+)", errors, re.MULTILINE)
        if not statuses:
            return {"failure": f"exit {code}: {errors}"}
        return {"status": int(statuses[-1]), "body": "".join(lines), "events_ms": events_ms}

    stream = get

    def post(self, url, headers):
        return self.get(url, {**headers, "content-type": "application/json"}, f"--post-data={ASKED}")

    def twice(self, url, headers):
        return self.get(url, headers, url)


class Git(Command):
    """Clones by smart HTTP: discovery, then a POST for the objects."""

    clones = 0

    def clone(self, url, headers):
        self.clones += 1
        target = str(self.folder / f"clone-{self.clones}")
        fields = [
            part for name, value in headers.items() for part in ("-c", f"http.extraHeader={name}: {value}")
        ]
        code, _, errors, _ = self.run("git", *fields, "clone", "--quiet", url, target)
        if code:
            return {"failure": f"exit {code}: {errors}"}
        _, lines, _, _ = self.run("git", "-C", target, "log", "--format=%s")
        return {"status": 200, "body": "".join(lines)}
