"""A client as a process of its own that is told case after case; python/talk.py has the other end."""

import json
import subprocess
import threading
from pathlib import Path

# Longer than a client waits by itself, its own retries included.
PATIENCE = 30


class Program:
    """Started at the first case, and again after one that it did not survive."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path):
        self.command, self.environment, self.folder = command, environment, folder
        self.process = None

    def carry_out(self, verb: str, url: str, headers: dict[str, str]) -> dict:
        """What the client reports; a hang or a crash is a report as well."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        fields = [f"{name}: {value}" for name, value in headers.items()]
        patience = threading.Timer(PATIENCE, self.process.kill)
        patience.start()
        try:
            self.process.stdin.write("\t".join([verb, url, *fields]) + "\n")
            self.process.stdin.flush()
            # Whatever else a library prints is not for us.
            report = next((line for line in self.process.stdout if line.startswith("{")), None)
        except BrokenPipeError:
            report = None
        finally:
            patience.cancel()
        return json.loads(report) if report else {"failure": f"no report. {self._last_words()}"}

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.errors.close()

    def _start(self):
        self.close()
        self.errors = (self.folder / "stderr").open("w+")
        self.process = subprocess.Popen(
            self.command,
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def _last_words(self) -> str:
        self.process.wait()
        self.errors.seek(0)
        return self.errors.read()[-1000:]
