#!/usr/bin/env python3
"""Runs the examples as an agent's developer would, among tools of which one hangs, one refuses and one is slow.

Those of `fan_out` call hedgerow's endpoint; those of `through_proxy` are the same agents with ordinary HTTP calls and
the proxy variables alone. The latter run without them too: what they gain is to be hedgerow's doing.

    .venv/bin/python tests/examples/run.py
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools import CAME, FAILED, Tools

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "clients"))

from harness.process import Process, shown  # noqa: E402

# For the agents that bring no deadline; those of the fan-out bring the same.
POLICY = """
defaults: { deadline: { default: 3s } }
"""
# Far beyond the deadline, and beyond what a start takes on a machine that does much else.
PATIENCE = 30
# Without hedgerow an agent waits all of it.
PATIENCE_ALONE = 5

PYTHON = {name: [sys.executable, HERE / "python" / f"{name}.py"] for name in ("fan_out", "through_proxy")}
NODE = {name: ["node", HERE / "build" / f"{name}.js"] for name in ("fan_out", "through_proxy")}
FOLLOW_PROXY = f"--import={(HERE / 'build/follow_proxy.js').as_uri()}"


@dataclass
class Run:
    """A program's end, and what was seen of it."""

    code: int
    output: list[str]
    messages: str
    seconds: float
    requests: dict[str, int]

    @property
    def context(self) -> list[dict]:
        """What the model was given last."""
        return [json.loads(line) for line in self.output if line.startswith("[")][-1]

    def told(self, who: str) -> str:
        """What the message of the tool of this name says, or of this role."""
        [content] = [each["content"] for each in self.context if who in (each.get("name"), each["role"])]
        return content


def ended_well(run: Run):
    assert run.code == 0, run.messages


def told_what_came(run: Run):
    for name in CAME:
        told = json.loads(run.told(name))
        assert told.get("body", told) == {"fact": f"{name} of AAPL"}
        assert f"{name}: {run.told(name)}" in run.output, f"the agent does not say {name}"


def warned_of_the_rest(run: Run):
    """By the fan-out's sentence, which stands in the system message."""
    [warning] = [line for line in run.told("system").splitlines() if line.startswith("Warning: ")]
    for name in FAILED:
        assert f"{name} AAPL" in warning, warning
    assert "unavailable (deadline 3000 ms)" in warning and "(connect failed)" in warning, warning
    assert "Analysis based on 2/5 sources." in warning, warning


def told_why(run: Run):
    """By hedgerow's answer in place of the tool's. Node's fetch opens a tunnel first, and has no answer where that
    is refused, but says with which status."""
    for name in ("filings", "chatter"):
        status, _, problem = run.told(name).removeprefix("unavailable (").partition("): ")
        assert (status, json.loads(problem)["error"]) == ("504", "deadline_exceeded"), run.told(name)
    refusal = run.told("ratings")
    assert '"error":"connect_failed"' in refusal or "Proxy response (502)" in refusal, refusal


def ended_by_the_deadline(run: Run):
    assert run.seconds < PATIENCE, f"{run.seconds:.1f} s"


def asked_no_more_than_needed(run: Run):
    """A call and a hedge at most, and no retries of failures."""
    assert max(run.requests.values()) <= 2, run.requests


def showed_each_as_it_came(run: Run):
    assert [line for line in run.output if line.endswith(" is here")] == ["quotes AAPL is here", "news AAPL is here"]


def waited_for_all(run: Run):
    assert run.seconds >= PATIENCE_ALONE, f"{run.seconds:.1f} s"
    assert json.loads(run.told("filings")) == {"fact": "filings of AAPL"}
    assert run.requests["news"] == 1


COMMON = [ended_well, told_what_came, ended_by_the_deadline, asked_no_more_than_needed]
ALONE = [ended_well, told_what_came, waited_for_all]


@dataclass(frozen=True)
class Example:
    """A program and how it is run: with hedgerow's address, with the proxy variables, or alone."""

    name: str
    command: list
    way: str
    checks: list


def examples() -> list[Example]:
    fan_out = [*COMMON, warned_of_the_rest]
    proxy = [*COMMON, told_why]
    return [
        Example("Python", PYTHON["fan_out"], "fan-out", fan_out),
        Example("Python", PYTHON["through_proxy"], "proxy", proxy),
        Example("Python", PYTHON["through_proxy"], "alone", ALONE),
        Example("TypeScript", NODE["fan_out"], "fan-out", [*fan_out, showed_each_as_it_came]),
        Example("TypeScript", NODE["through_proxy"], "proxy", proxy),
        Example("TypeScript", NODE["through_proxy"], "alone", ALONE),
    ]


def run(example: Example, port: int, folder: Path) -> Run:
    tools = Tools(PATIENCE_ALONE if example.way == "alone" else PATIENCE)
    address = f"http://127.0.0.1:{port}"
    ways = {
        "fan-out": {"HEDGEROW_URL": address},
        "proxy": {"HTTP_PROXY": address, "HTTPS_PROXY": address, "NODE_OPTIONS": FOLLOW_PROXY},
        "alone": {},
    }
    base = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            example.command,
            env={**base, **tools.environment(), **ways[example.way]},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        tools.stop()
    seconds = time.monotonic() - began
    return Run(done.returncode, done.stdout.splitlines(), done.stderr, seconds, tools.seen)


def judge(example: Example, ended: Run) -> list[tuple[str, str | None]]:
    """Each check with what was wrong."""
    judged = []
    for check in example.checks:
        try:
            check(ended)
            judged.append((check.__name__, None))
        except Exception as error:
            judged.append((check.__name__, f"{type(error).__name__}: {error}"))
    return judged


def compile_typescript():
    shutil.rmtree(HERE / "build", ignore_errors=True)
    done = subprocess.run([HERE / "node_modules/.bin/tsc", "-p", HERE], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the TypeScript examples do not compile:\n{done.stdout}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, default=Path("target/debug/hedgerow"), help="the hedgerow to use")
    asked, began = parser.parse_args(), time.monotonic()
    compile_typescript()
    with tempfile.TemporaryDirectory(prefix="hedgerow-examples-") as temporary:
        folder = Path(temporary)
        hedgerow = Process(asked.bin.resolve(), folder, POLICY)
        try:
            with ThreadPoolExecutor(len(examples())) as pool:
                ends = list(pool.map(lambda example: run(example, hedgerow.port, folder), examples()))
            hedgerow.stop()
        finally:
            hedgerow.process.kill()
    passed = failed = 0
    for example, ended in zip(examples(), ends, strict=True):
        judged = judge(example, ended)
        wrong = [f"{name}: {problem}" for name, problem in judged if problem]
        passed, failed = passed + len(judged) - len(wrong), failed + len(wrong)
        verdict = "FAILED" if wrong else "ok"
        print(f"{example.name:12}{example.way:9}{verdict:7}{ended.seconds:5.1f} s   {dict(ended.requests)}")
        print("".join(f"    {problem}\n" for problem in wrong), end="")
    print(f"\n{shown(passed, failed, time.monotonic() - began)}")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
