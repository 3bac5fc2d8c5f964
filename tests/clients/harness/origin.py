"""The tools that the clients call: one server, http and https, HTTP/1.1 and (by ALPN) HTTP/2.

It runs in the runner's own process, so that a case can look at what arrived. The first segment of a path is
the case's tag; everything is recorded under it, and `answers` sees the path without it.
"""

import asyncio
import socket
import ssl
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import h2.config
import h2.connection
import h2.errors
import h2.events

from . import answers
from .hedgerow import ADDRESS
from .pki import Pki
from .process import free_ports

CHUNK = 1 << 14


@dataclass
class Request:
    """A request as it arrived. Header names are lower-case; of equal ones the last counts."""

    method: str
    path: str
    headers: dict[str, str]
    version: str
    connection: int
    body: bytearray = field(default_factory=bytearray)

    @property
    def tag(self) -> str:
        return self.path.split("/")[1]

    @property
    def route(self) -> str:
        """The path after the tag, without the query."""
        return "/" + "/".join(self.path.split("?")[0].split("/")[2:])


class Origin:
    """Both servers and their record."""

    def __init__(self, pki: Pki, repositories: Path):
        self.repositories = repositories
        self.seen: dict[str, list[Request]] = defaultdict(list)
        self.connections = 0
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(pki.certificate, pki.key)
        self.tls.set_alpn_protocols(["h2", "http/1.1"])

    async def start_on(self, http: list[socket.socket], https: list[socket.socket]) -> "Origin":
        """On sockets that listen already."""
        self.http_port, self.https_port = (sockets[0].getsockname()[1] for sockets in (http, https))
        plain = [await asyncio.start_server(self._serve, sock=each) for each in http]
        encrypted = [await asyncio.start_server(self._serve, sock=each, ssl=self.tls) for each in https]
        self.servers = plain + encrypted
        return self

    async def start(self) -> "Origin":
        self.http_port, self.https_port = free_ports(2)
        addresses = ["127.0.0.1", ADDRESS]
        self.servers = [
            await asyncio.start_server(self._serve, addresses, self.http_port),
            await asyncio.start_server(self._serve, addresses, self.https_port, ssl=self.tls),
        ]
        return self

    def arrived(self, request: Request) -> None:
        self.seen[request.tag].append(request)

    async def _serve(self, reader, writer):
        self.connections += 1
        tls = writer.get_extra_info("ssl_object")
        version = Http2 if tls and tls.selected_alpn_protocol() == "h2" else Http1
        try:
            await version(self, self.connections, reader, writer).serve()
        except (OSError, EOFError):
            # The other side left, in the middle of something or not: every cancelled call ends like this.
            pass
        finally:
            writer.close()


class Http1:
    """A connection with HTTP/1.1: one request after the other."""

    def __init__(self, origin: Origin, number: int, reader, writer):
        self.origin, self.number, self.reader, self.writer = origin, number, reader, writer

    async def serve(self):
        while (request := await self._request()) is not None:
            if request.headers.get("upgrade", "").lower() == "websocket":
                return await answers.websocket(request, self.reader, self.writer)
            await answers.respond(request, Http1Reply(self.writer), self.origin.repositories)
            if request.headers.get("connection", "").lower() == "close":
                return

    async def _request(self) -> Request | None:
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        request = Request(method, path, headers, "1.1", self.number)
        self.origin.arrived(request)
        if "expect" in headers:
            self.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await self._body(request)
        return request

    async def _body(self, request: Request):
        if request.headers.get("transfer-encoding") == "chunked":
            while size := int(await self.reader.readline(), 16):
                request.body += await self.reader.readexactly(size)
                await self.reader.readline()
            await self.reader.readuntil(b"\r\n")
        else:
            request.body += await self.reader.readexactly(int(request.headers.get("content-length", 0)))


class Http1Reply:
    """An answer with `Transfer-Encoding: chunked`, as its length is never known."""

    def __init__(self, writer):
        self.writer = writer

    async def start(self, status: int, headers: dict[str, str]):
        bodiless = status in (202, 204)
        framing = {"content-length": "0"} if bodiless else {"transfer-encoding": "chunked"}
        lines = [f"{name}: {value}\r\n" for name, value in {**headers, **framing}.items()]
        self.chunked = not bodiless
        self.writer.write(f"HTTP/1.1 {status} -\r\n{''.join(lines)}\r\n".encode())
        await self.writer.drain()

    async def send(self, data: bytes):
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    async def end(self):
        if self.chunked:
            self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def cut(self):
        self.writer.close()


class Http2:
    """A connection with HTTP/2: a task for each stream."""

    def __init__(self, origin: Origin, number: int, reader, writer):
        self.origin, self.number, self.reader, self.writer = origin, number, reader, writer
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        self.requests: dict[int, Request] = {}
        self.tasks: dict[int, asyncio.Task] = {}
        self.window_opened = asyncio.Condition()

    async def serve(self):
        self.h2.initiate_connection()
        await self.flush()
        try:
            while data := await self.reader.read(1 << 16):
                for event in self.h2.receive_data(data):
                    await self._on(event)
                await self.flush()
        finally:
            for task in self.tasks.values():
                task.cancel()

    async def flush(self):
        self.writer.write(self.h2.data_to_send())
        await self.writer.drain()

    async def _on(self, event):
        match event:
            case h2.events.RequestReceived():
                fields = dict(event.headers)
                request = Request(fields[":method"], fields[":path"], fields, "2", self.number)
                self.origin.arrived(request)
                self.requests[event.stream_id] = request
                if "expect" in fields:
                    self.h2.send_headers(event.stream_id, [(":status", "100")])
            case h2.events.DataReceived():
                self.requests[event.stream_id].body += event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                request = self.requests.pop(event.stream_id)
                answering = asyncio.create_task(self._answer(request, event.stream_id))
                self.tasks[event.stream_id] = answering
            case h2.events.StreamReset():
                self.requests.pop(event.stream_id, None)
                if task := self.tasks.pop(event.stream_id, None):
                    task.cancel()
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                async with self.window_opened:
                    self.window_opened.notify_all()

    async def _answer(self, request: Request, stream: int):
        await answers.respond(request, Http2Reply(self, stream), self.origin.repositories)
        self.tasks.pop(stream, None)


class Http2Reply:
    """An answer on one stream; sending waits for the peer's windows."""

    def __init__(self, connection: Http2, stream: int):
        self.connection, self.stream = connection, stream

    async def start(self, status: int, headers: dict[str, str]):
        self.connection.h2.send_headers(self.stream, [(":status", str(status)), *headers.items()])
        await self.connection.flush()

    async def send(self, data: bytes):
        while data:
            async with self.connection.window_opened:
                await self.connection.window_opened.wait_for(self._window)
            part, data = data[: self._window()], data[self._window() :]
            self.connection.h2.send_data(self.stream, part)
            await self.connection.flush()

    def _window(self) -> int:
        return min(CHUNK, self.connection.h2.local_flow_control_window(self.stream))

    async def end(self, trailers: dict[str, str] | None = None):
        if trailers:
            self.connection.h2.send_headers(self.stream, trailers.items(), end_stream=True)
        else:
            self.connection.h2.end_stream(self.stream)
        await self.connection.flush()

    async def cut(self):
        self.connection.h2.reset_stream(self.stream, h2.errors.ErrorCodes.INTERNAL_ERROR)
        await self.connection.flush()
