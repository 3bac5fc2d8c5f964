"""What each client does in each mode, and what must have been seen of it on all sides.

A judge looks at the client's own report, at what arrived at the origin, at the connections that the client
opened and at hedgerow's log, and raises `Wrong` with a sentence.
"""

import http.client
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import answers
from .hedgerow import ADDRESS, DENIED, INTERCEPTED, LONG, PINNED, TUNNELLED

if TYPE_CHECKING:
    from run import Bench

    from .clients import Client


class Wrong(Exception):
    """What a judge found."""


@dataclass(frozen=True)
class Mode:
    """A way through hedgerow, told apart by scheme and host."""

    name: str
    scheme: str
    host: str
    # No proxy is told; rules send the client to hedgerow.
    is_redirected: bool = False

    def __str__(self):
        return self.name


FORWARD = Mode("forward", "http", INTERCEPTED)
TUNNEL = Mode("tunnel", "https", TUNNELLED)
INTERCEPT = Mode("intercept", "https", INTERCEPTED)
REDIRECT = Mode("redirect", "http", INTERCEPTED, is_redirected=True)
REDIRECT_TLS = Mode("redirect-tls", "https", INTERCEPTED, is_redirected=True)
MODES = (FORWARD, TUNNEL, INTERCEPT, REDIRECT, REDIRECT_TLS)
# Where hedgerow sees requests. In a tunnel it sees the CONNECT alone.
READ = (FORWARD, INTERCEPT, REDIRECT, REDIRECT_TLS)


@dataclass
class Seen:
    """All there is to know about one case of one client in one mode."""

    client: "Client"
    mode: Mode
    bench: "Bench"
    tag: str
    report: dict
    connections: int
    seconds: float

    @property
    def arrived(self):
        """The requests that came to the origin."""
        return self.bench.origin.seen[self.tag]

    @property
    def body(self) -> str:
        return self.report.get("body") or ""


@dataclass(frozen=True)
class Case:
    """`verb` is what the client's program is told; `path` follows the tag."""

    name: str
    verb: str
    path: str
    judge: Callable[[Seen], None]
    headers: Callable[[], dict[str, str]] = dict
    modes: tuple[Mode, ...] = MODES
    host: str | None = None
    websocket: bool = False

    def url(self, mode: Mode, ports: dict[str, int], tag: str) -> str:
        scheme = mode.scheme.replace("http", "ws") if self.websocket else mode.scheme
        return f"{scheme}://{self.host or mode.host}:{ports[mode.scheme]}/{tag}{self.path}"


def said(text: str) -> Callable[[Seen], None]:
    """200 with this in the body, in HTTP/2 where the client offers it."""

    def judge(seen: Seen):
        _answered(seen, 200, text)
        if seen.client.h2 and seen.mode.scheme == "https" and seen.report["http"] != "2":
            raise Wrong(f"HTTP/{seen.report['http']} instead of HTTP/2")

    return judge


def streamed(text: str) -> Callable[[Seen], None]:
    """Event after event as they were sent, none lost and none held back."""

    def judge(seen: Seen):
        said(text)(seen)
        times = seen.report["events_ms"]
        if len(times) != answers.EVENTS:
            raise Wrong(f"{len(times)} events instead of {answers.EVENTS}")
        sent = answers.GAP * (answers.EVENTS - 1) * 1000
        # On a busy machine the first may be noticed late; gathered ones would all come at once.
        if times[-1] - times[0] < sent / 4:
            raise Wrong(f"events that were sent within {sent:.0f} ms came at {times}")

    return judge


def reused(text: str) -> Callable[[Seen], None]:
    """Two calls, on one connection where the client keeps it. Some have one left from an earlier case."""

    def judge(seen: Seen):
        said(text)(seen)
        if len(seen.arrived) != 2:
            raise Wrong(f"{len(seen.arrived)} requests arrived instead of 2")
        _connections(seen, 1 if seen.mode in seen.client.keeps_alive else 2)

    return judge


def uploaded(seen: Seen):
    """2 MiB, of which the first byte waited for the origin's `100 Continue`."""
    _answered(seen, 200, '{"bytes": 2097152}')
    if "100 Continue" not in seen.report["talk"]:
        raise Wrong("no 100 Continue came")


def encrypted_on_the_way(seen: Seen):
    """`https://` that came in clear, in absolute-form: the tool, which takes nothing but TLS, got it."""
    _answered(seen, 200, "from the tool")


def told_of_the_cut(seen: Seen):
    """An event stream that broke off. Not every client can tell that from its end, so hedgerow says it."""
    _answered(seen, 200, "event: error")


def shook_hands(seen: Seen):
    _answered(seen, 101, "hello")


def held_a_session(seen: Seen):
    """MCP: the messages, the stream for the server's own, the end, all in one session."""
    said("echo says hello")(seen)
    first, *others = seen.arrived
    if lost := [request.method for request in others if request.headers.get("mcp-session-id") != seen.tag]:
        raise Wrong(f"{lost} came without the session's id")
    methods = {request.method for request in seen.arrived}
    if methods != {"POST", "GET", "DELETE"}:
        raise Wrong(f"a session of {methods}")


def too_late(seen: Seen):
    """hedgerow's own 504 for a deadline that has passed: told as an answer, once, and nothing sent upstream."""
    _problem(seen, 504, "deadline_exceeded")
    if seen.arrived:
        raise Wrong("the origin was asked all the same")


def cut_short(seen: Seen):
    """hedgerow's own 504 when the deadline strikes, which is when it was set."""
    _problem(seen, 504, "deadline_exceeded")
    if len(seen.arrived) != 1:
        raise Wrong(f"{len(seen.arrived)} requests arrived instead of 1")
    # A client with retries of its own adds their delays.
    if seen.client.tries == 1 and not 0.5 * BUDGET < seen.seconds < 5 * BUDGET:
        raise Wrong(f"the answer took {seen.seconds:.1f} s with a budget of {BUDGET} s")


def refused(seen: Seen):
    """A refused CONNECT: the client tells what it can of the reason, and gives up."""
    told = seen.report.get("failure") or f"{seen.report.get('status')} {seen.body}"
    if seen.client.refusal not in told:
        raise Wrong(f"instead of {seen.client.refusal!r} the client tells {told!r}")
    if seen.arrived:
        raise Wrong("the origin was reached all the same")
    _connections(seen, MOST_TRIES)


def connect_too_late(seen: Seen):
    """A deadline on the CONNECT itself."""
    if "504" not in seen.report.get("failure", ""):
        raise Wrong(f"the client tells {seen.report}")


def stepped_down(seen: Seen):
    """The client refused our certificate; from then on the host is a tunnel, for everybody."""
    if "UnknownIssuer" not in seen.report.get("failure", ""):
        raise Wrong(f"the client tells {seen.report}")
    until = time.monotonic() + 5
    while not _shows_its_own_certificate(seen.bench, PINNED):
        if time.monotonic() > until:
            raise Wrong("the host is still intercepted")


def _shows_its_own_certificate(bench: "Bench", host: str) -> bool:
    """Whether a client that trusts the public roots alone gets through to the origin."""
    roots = ssl.create_default_context(cafile=bench.pki.root)
    connection = http.client.HTTPSConnection("127.0.0.1", bench.hedgerow.port, context=roots, timeout=5)
    connection.set_tunnel(host, bench.origin.https_port)
    try:
        connection.connect()
    except ssl.SSLCertVerificationError:
        return False
    connection.close()
    return True


def _answered(seen: Seen, status: int, text: str):
    """The status, with this in the body, by the way that it was to go."""
    report = seen.report
    if report.get("status") != status:
        raise Wrong(f"instead of {status}: {_told(report)}")
    for request in seen.arrived:
        # It tells every upstream the deadline, and no client of these cases did.
        read = "x-request-deadline" in request.headers
        if read != (seen.mode in READ):
            raise Wrong(f"the request was {'read' if read else 'not read'} by hedgerow")
        if read and (leaked := [name for name in request.headers if name.startswith("proxy-")]):
            raise Wrong(f"{leaked} went on to the tool")
    if not seen.arrived:
        raise Wrong("the origin was never asked")
    if text not in seen.body:
        raise Wrong(f"the body is {seen.body[:200]!r}")


def _problem(seen: Seen, status: int, error: str):
    """Problem JSON with this status as the client sees it, after the one try that `x-should-retry` leaves."""
    report = seen.report
    if instead := seen.client.instead_of_problems:
        if instead not in report.get("failure", ""):
            raise Wrong(f"instead of {instead!r}: {_told(report)}")
    elif report.get("status") != status:
        raise Wrong(f"instead of {status}: {_told(report)}")
    elif json.loads(seen.body).get("error") != error:
        raise Wrong(f"instead of {error}: {seen.body[:300]}")
    lines = [line for line in seen.bench.hedgerow.log_of(seen.tag) if line.get("error") == error]
    if len(lines) != seen.client.tries:
        raise Wrong(f"{len(lines)} tries instead of {seen.client.tries}")


def _connections(seen: Seen, most: int):
    if seen.connections > most:
        raise Wrong(f"{seen.connections} connections instead of {most}")


def _told(report: dict) -> str:
    return report.get("failure") or f"{report.get('status')} {(report.get('body') or '')[:200]}"


# Seconds; far less than a client's patience.
BUDGET = 1.0

# The first try and the SDKs' two retries.
MOST_TRIES = 3


def _passed() -> dict[str, str]:
    return {"x-request-deadline": "1"}


def _soon() -> dict[str, str]:
    return {"x-request-deadline": f"{time.time() + BUDGET:.3f}"}


def _errors(
    verb: str, path: str, hang: str | None = None, modes: tuple[Mode, ...] = READ, websocket: bool = False
) -> list[Case]:
    late = Case("past deadline", verb, path, too_late, headers=_passed, modes=modes, websocket=websocket)
    struck = [Case("deadline", verb, hang, cut_short, headers=_soon, modes=modes)] if hang else []
    denied = Case("refused", verb, path, refused, modes=(TUNNEL,), host=DENIED, websocket=websocket)
    return [late, *struck, denied]


ADDRESSED = Case("address", "get", "/hello", said("from the tool"), modes=(INTERCEPT,), host=ADDRESS)
HTTP = [
    Case("get", "get", "/hello", said("from the tool")),
    Case("post", "post", "/echo", said('"ask"')),
    Case("stream", "stream", "/events", streamed('{"n": 5}')),
    Case("reuse", "twice", "/hello", reused("from the tool")),
    # In a pod it leads to an IPv6 address alone.
    Case("long name", "get", "/hello", said("from the tool"), modes=(INTERCEPT, REDIRECT, REDIRECT_TLS), host=LONG),
    ADDRESSED,
    *_errors("get", "/hello", "/hang"),
]
# Java, Go and axios go to loopback addresses without the proxy; https-proxy-agent takes one for `localhost`.
HTTP_BY_NAME = [case for case in HTTP if case is not ADDRESSED]
SDK = [
    Case("chat", "chat", "/v1", said(answers.SENTENCE)),
    Case("stream", "stream", "/v1", streamed(answers.SENTENCE)),
    Case("reuse", "twice", "/v1", reused(answers.SENTENCE)),
    *_errors("chat", "/v1", "/hang/v1"),
]
WEBSOCKET = [
    Case("echo", "websocket", "/echo", shook_hands, websocket=True),
    *_errors("websocket", "/echo", websocket=True),
]
MCP = [Case("session", "session", "/mcp", held_a_session), *_errors("session", "/mcp")]
# In the clear gRPC needs an upstream with `origin: h2c`, which is not a matter of the client.
ENCRYPTED = (TUNNEL, INTERCEPT, REDIRECT_TLS)
GRPC = [
    Case("unary", "unary", "/grpc/say", said("hello"), modes=ENCRYPTED),
    Case("stream", "stream", "/grpc/count", streamed("hello"), modes=ENCRYPTED),
    *_errors("unary", "/grpc/say", "/grpc/hang", modes=(INTERCEPT, REDIRECT_TLS)),
]
GIT = [
    Case("clone", "clone", "/repository.git", said("a first commit")),
    *_errors("clone", "/repository.git"),
]
URLLIB = [
    *HTTP,
    # It sends the fragment too.
    Case("fragment", "get", "/hello#part", said("from the tool")),
    # It takes such a stream for complete.
    Case("cut stream", "stream", "/cut", told_of_the_cut, modes=READ),
]
CURL = [
    *HTTP,
    Case("upload", "upload", "/upload", uploaded),
    Case("in clear", "in_clear", "/hello", encrypted_on_the_way, modes=(INTERCEPT,)),
    Case("late connect", "late_connect", "/hello", connect_too_late, headers=_passed, modes=(TUNNEL,)),
]
BUILT_IN_ROOTS = [Case("step down", "get", "/hello", stepped_down, modes=(INTERCEPT,), host=PINNED)]
