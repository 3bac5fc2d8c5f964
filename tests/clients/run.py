#!/usr/bin/env python3
"""Real clients of agents, through hedgerow, by each way that they may go.

Each row is a client with the environment of a container that hedgerow was injected into, each column a mode:
forward (http), tunnel (https that only passes), intercept (https that hedgerow reads). Everything runs on
loopback: the origin and a name server in this process, hedgerow and the clients beside it.

In the modes redirect (http) and redirect-tls (https that hedgerow reads) the clients are told of no proxy. They run as
root, in a network namespace with the rules of `hedgerow redirect`; the origin is in another one.

    .venv/bin/python tests/clients/run.py --only httpx --mode forward
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import clients, dns, hedgerow, pki, pod
from harness.cases import MODES, Case, Mode, Seen, Wrong
from harness.clients import Absent, Client
from harness.hedgerow import Hedgerow
from harness.origin import Origin
from harness.process import shown
from harness.relay import Relay

# Clients at once. They mostly wait: for a start, for an event, for a deadline.
AT_ONCE = 2 + (os.cpu_count() or 1)


class Bench:
    """Everything around the clients. The servers live on an event loop in a thread of its own."""

    def __init__(self, binary: Path, folder: Path, in_pod: bool):
        self.folder = folder
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.pki = pki.make(folder, hedgerow.HOSTS)
        origin, names = Origin(self.pki, repositories(folder)), self.on_loop(dns.serve())
        if in_pod:
            self.pod = pod.Pod([name for name in hedgerow.NAMES if name != hedgerow.LONG], [hedgerow.LONG])
            ports = [self.pod.listen(port) for port in pod.PORTS.values()]
            self.origin = self.on_loop(origin.start_on(*ports))
        else:
            self.pod = None
            self.origin = self.on_loop(origin.start())
        self.hedgerow = Hedgerow(binary, folder, self.pki, names, self.pod)
        self.ports = {"http": self.origin.http_port, "https": self.origin.https_port}

    def on_loop(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=30)

    def try_client(self, client: Client, mode: Mode) -> list[tuple[Case, str | None]]:
        """Each case of a cell, with what was wrong about it."""
        folder = self.folder / as_word(f"{client.name} {mode}")
        folder.mkdir()
        relay = self.on_loop(Relay(self.hedgerow.port).start())
        proxy_port = None if mode.is_redirected else relay.port
        environment = hedgerow.environment(proxy_port, self.hedgerow.trust, folder)
        program = client.open(environment, folder)
        try:
            due = [case for case in client.cases if mode in case.modes]
            return [(case, self.try_case(client, mode, case, program, relay)) for case in due]
        finally:
            program.close()
            self.on_loop(relay.stop())

    def try_case(self, client: Client, mode: Mode, case: Case, program, relay: Relay) -> str | None:
        tag = as_word(f"{client.name} {mode} {case.name}")
        before, began = relay.connections, time.monotonic()
        report = program.carry_out(case.verb, case.url(mode, self.ports, tag), case.headers())
        seconds = time.monotonic() - began
        seen = Seen(client, mode, self, tag, report, relay.connections - before, seconds)
        try:
            case.judge(seen)
        except Wrong as wrong:
            return str(wrong)
        except Exception as error:
            return f"{type(error).__name__}: {error} about {report}"


def as_word(text: str) -> str:
    """For a path: without spaces and signs."""
    return re.sub(r"[^\w.]+", "-", text)


def repositories(folder: Path) -> Path:
    """A folder with a bare repository of one commit."""
    root = folder / "repositories"
    root.mkdir()
    command = ["git", "-c", "user.name=tool", "-c", "user.email=tool@localhost"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_DIR": str(root / "repository.git")}

    def git(*arguments: str) -> str:
        options = {"env": environment, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
        return subprocess.run([*command, *arguments], check=True, **options).stdout.strip()

    git("init", "--quiet", "--bare", "--initial-branch=main")
    # Of no files: `mktree` gets nothing to read.
    git("update-ref", "refs/heads/main", git("commit-tree", git("mktree"), "-m", "a first commit"))
    return root


def show(rows: list[Client | Absent], modes: list[Mode], results: dict) -> tuple[int, int]:
    """The table, and below it what was wrong. How many cases passed, and how many failed."""
    passed, wrong = 0, []
    width = max(len(row.name) for row in rows) + 2
    print(f"\n{'':{width}}" + "".join(f"{mode.name:12}" for mode in modes))
    for row in rows:
        if isinstance(row, Absent):
            print(f"{row.name:{width}}absent: {row.reason}")
            continue
        line = f"{row.name:{width}}"
        for mode in modes:
            cell = results.get((row.name, mode), [])
            bad = [(case, problem) for case, problem in cell if problem]
            wrong += [f"{row.name}, {mode}, {case.name}: {problem}" for case, problem in bad]
            passed += len(cell) - len(bad)
            mark = "-" if not cell else "ok" if not bad else "FAILED"
            line += f"{f'{mark} {len(cell) - len(bad)}/{len(cell)}' if cell else mark:12}"
        print(line.rstrip())
    print("".join(f"\n{problem}" for problem in wrong))
    return passed, len(wrong)


def arguments():
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    binary = Path("target/debug/hedgerow")
    parser.add_argument(
        "--bin", type=Path, default=binary, help="the hedgerow to test, with the Rust clients beside it"
    )
    parser.add_argument("--only", action="append", help="clients whose name has this in it")
    parser.add_argument("--mode", action="append", choices=[mode.name for mode in MODES])
    # Set where this runs itself in a pod.
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    modes = [mode for mode in MODES if not asked.mode or mode.name in asked.mode]
    if asked.inside:
        return run(asked, modes)
    # By turns: each is a run of its own, with its own table.
    redirected = [mode.name for mode in modes if mode.is_redirected]
    others = [mode for mode in modes if not mode.is_redirected]
    code = run(asked, others) if others else 0
    if redirected:
        only = [part for name in asked.only or [] for part in ("--only", name)]
        chosen = [part for name in redirected for part in ("--mode", name)]
        again = ["--inside", "--bin", str(asked.bin.resolve()), *only, *chosen]
        code = pod.run_inside(Path(__file__).resolve(), again) or code
    return code


def run(asked, modes: list[Mode]) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hedgerow-clients-") as temporary:
        folder = Path(temporary)
        # The programs in Rust lie where hedgerow's own binary does.
        rows = clients.all_clients(asked.bin.resolve().parent, folder)
        rows = [row for row in rows if not asked.only or any(part in row.name for part in asked.only)]
        if not rows:
            raise SystemExit(f"no client's name has {' or '.join(asked.only)} in it")
        bench = Bench(asked.bin.resolve(), folder, asked.inside)
        cells = [(row, mode) for row in rows if isinstance(row, Client) for mode in modes]
        try:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                done = list(pool.map(lambda cell: bench.try_client(*cell), cells))
            bench.hedgerow.stop()
        finally:
            bench.hedgerow.process.kill()
        results = {(client.name, mode): cases for (client, mode), cases in zip(cells, done, strict=True)}
    passed, failed = show(rows, modes, results)
    print(f"\n{shown(passed, failed, time.monotonic() - began)}")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
