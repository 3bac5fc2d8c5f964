"""What the origin says: plain answers, event streams, the shapes of the LLM APIs, MCP, WebSocket, git."""

import asyncio
import base64
import hashlib
import json
import os
from pathlib import Path

EVENTS = 5
# Between two events of a stream. Five of them gathered by a proxy would arrive together.
GAP = 0.1
# Longer than any deadline that a case sets.
HANG = 20

TEXT = {"content-type": "text/plain"}
JSON = {"content-type": "application/json"}
GRPC = {"content-type": "application/grpc"}
GRPC_OK = {"grpc-status": "0"}
EVENT_STREAM = {"content-type": "text/event-stream", "cache-control": "no-cache"}

WORDS = ["stay", " close", " to", " the", " hedge"]
SENTENCE = "".join(WORDS)


async def respond(request, reply, repositories: Path):
    """Answers one request; a route that nobody knows is 404. git finds its repositories in that folder."""
    if ".git/" in request.route:
        return await git(request, reply, repositories)
    route = ROUTES.get((request.method, request.route)) or ROUTES.get(("*", request.route))
    if route is None:
        return await whole(reply, 404, TEXT, b"no such route")
    await route(request, reply)


async def whole(reply, status: int, headers: dict[str, str], body: bytes = b""):
    await reply.start(status, headers)
    if body:
        await reply.send(body)
    await reply.end()


async def hello(request, reply):
    await whole(reply, 200, JSON, json.dumps({"hello": "from the tool"}).encode())


async def echo(request, reply):
    await whole(reply, 200, JSON, bytes(request.body))


async def upload(request, reply):
    await whole(reply, 200, JSON, json.dumps({"bytes": len(request.body)}).encode())


async def hang(request, reply):
    await asyncio.sleep(HANG)
    await whole(reply, 200, TEXT, b"too late")


async def events(request, reply):
    await _stream(reply, [{"n": n} for n in range(1, EVENTS + 1)])


async def cut(request, reply):
    """An event stream that breaks off after its first event."""
    await reply.start(200, EVENT_STREAM)
    await reply.send(b'data: {"n": 1}\n\n')
    await reply.cut()


async def openai_chat(request, reply):
    asked = json.loads(request.body)
    frame = {"id": "chatcmpl-1", "created": 1, "model": asked["model"]}
    if not asked.get("stream"):
        message = {"role": "assistant", "content": SENTENCE}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {**frame, "object": "chat.completion", "choices": [choice]}
        return await whole(reply, 200, JSON, json.dumps(answer).encode())
    chunks = [
        {
            **frame,
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}],
        }
        for word in WORDS
    ]
    await _stream(reply, chunks, end=b"data: [DONE]\n\n")


async def anthropic_messages(request, reply):
    asked = json.loads(request.body)
    usage = {"input_tokens": 1, "output_tokens": 1}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": asked["model"], "usage": usage}
    if not asked.get("stream"):
        content = [{"type": "text", "text": SENTENCE}]
        answer = {**message, "content": content, "stop_reason": "end_turn", "stop_sequence": None}
        return await whole(reply, 200, JSON, json.dumps(answer).encode())
    begun = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
    done = {"stop_reason": "end_turn", "stop_sequence": None}
    deltas = [{"type": "text_delta", "text": word} for word in WORDS]
    messages = [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": done, "usage": {"output_tokens": EVENTS}},
        {"type": "message_stop"},
    ]
    await _stream(reply, messages, named=True)


async def _stream(reply, messages: list[dict], named: bool = False, end: bytes = b""):
    """An event stream; each message is sent when it is due, and the head before the first."""
    await reply.start(200, EVENT_STREAM)
    for message in messages:
        await asyncio.sleep(GAP)
        name = f"event: {message['type']}\n" if named else ""
        await reply.send(f"{name}data: {json.dumps(message)}\n\n".encode())
    if end:
        await reply.send(end)
    await reply.end()


async def grpc_say(request, reply):
    """One message in, the same message out."""
    await reply.start(200, GRPC)
    await reply.send(bytes(request.body))
    await reply.end(GRPC_OK)


async def grpc_count(request, reply):
    """One message in, as many out as an event stream has events."""
    await reply.start(200, GRPC)
    for _ in range(EVENTS):
        await asyncio.sleep(GAP)
        await reply.send(bytes(request.body))
    await reply.end(GRPC_OK)


# The sessions of MCP by id; each is over when its event is set.
SESSIONS: dict[str, asyncio.Event] = {}
ECHO_TOOL = {
    "name": "echo",
    "description": "says it again",
    "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}},
}


async def mcp_post(request, reply):
    """Streamable HTTP: a message a POST; what a tool says comes as an event stream, the rest as JSON."""
    message = json.loads(request.body)
    asked = message.get("params", {})
    match message.get("method"):
        case "initialize":
            session = request.tag
            SESSIONS[session] = asyncio.Event()
            result = {
                "protocolVersion": asked["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "origin", "version": "1"},
            }
            await _mcp_result(reply, message, result, **{"mcp-session-id": session})
        case _ if request.headers.get("mcp-session-id") not in SESSIONS:
            await whole(reply, 404, TEXT, b"no such session")
        case "tools/list":
            await _mcp_result(reply, message, {"tools": [ECHO_TOOL]})
        case "tools/call":
            said = {"type": "text", "text": asked["arguments"]["text"]}
            result = {"content": [said], "isError": False}
            await _stream(reply, [{"jsonrpc": "2.0", "id": message["id"], "result": result}])
        case _:
            # A notification, which nothing answers.
            await whole(reply, 202, {})


async def _mcp_result(reply, message: dict, result: dict, **headers: str):
    answer = {"jsonrpc": "2.0", "id": message["id"], "result": result}
    await whole(reply, 200, {**JSON, **headers}, json.dumps(answer).encode())


async def mcp_get(request, reply):
    """The stream for what the server has to say by itself: nothing, until the session ends."""
    await reply.start(200, EVENT_STREAM)
    if session := SESSIONS.get(request.headers["mcp-session-id"]):
        await session.wait()
    await reply.end()


async def mcp_delete(request, reply):
    SESSIONS.pop(request.headers["mcp-session-id"]).set()
    await whole(reply, 204, {})


# RFC 6455 section 1.3.
WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
TEXT_FRAME, CLOSE_FRAME = 0x81, 0x88


async def websocket(request, reader, writer):
    """Sends each message back, and the close too. Short unfragmented messages are all that a case sends."""
    key = request.headers["sec-websocket-key"].encode()
    accept = base64.b64encode(hashlib.sha1(key + WEBSOCKET_GUID).digest()).decode()
    fields = f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accept}\r\n"
    writer.write(f"HTTP/1.1 101 Switching Protocols\r\n{fields}\r\n".encode())
    kind = TEXT_FRAME
    while kind != CLOSE_FRAME:
        kind, length = await reader.readexactly(2)
        mask = await reader.readexactly(4)
        masked = await reader.readexactly(length & 0x7F)
        message = bytes(byte ^ mask[at % 4] for at, byte in enumerate(masked))
        writer.write(bytes([kind, len(message)]) + message)
        await writer.drain()


async def git(request, reply, repositories: Path):
    """Smart HTTP through git's own CGI program (gitprotocol-http)."""
    variables = {
        "GIT_PROJECT_ROOT": str(repositories),
        "GIT_HTTP_EXPORT_ALL": "1",
        "PATH_INFO": request.route,
        "QUERY_STRING": request.path.partition("?")[2],
        "REQUEST_METHOD": request.method,
        "CONTENT_TYPE": request.headers.get("content-type", ""),
        "HTTP_CONTENT_ENCODING": request.headers.get("content-encoding", ""),
        "GIT_PROTOCOL": request.headers.get("git-protocol", ""),
        "PATH": os.environ["PATH"],
    }
    pipe = asyncio.subprocess.PIPE
    backend = await asyncio.create_subprocess_exec(
        "git", "http-backend", env=variables, stdin=pipe, stdout=pipe
    )
    output, _ = await backend.communicate(bytes(request.body))
    head, _, body = output.partition(b"\r\n\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n"))
    status = int(headers.pop("status", "200").split()[0])
    await whole(reply, status, headers, body)


ROUTES = {
    ("*", "/hello"): hello,
    ("POST", "/echo"): echo,
    ("*", "/upload"): upload,
    ("*", "/hang"): hang,
    ("POST", "/hang/v1/chat/completions"): hang,
    ("POST", "/hang/v1/messages"): hang,
    ("GET", "/events"): events,
    ("GET", "/cut"): cut,
    ("POST", "/v1/chat/completions"): openai_chat,
    ("POST", "/v1/messages"): anthropic_messages,
    ("POST", "/grpc/say"): grpc_say,
    ("POST", "/grpc/count"): grpc_count,
    ("POST", "/grpc/hang"): hang,
    ("POST", "/mcp"): mcp_post,
    ("GET", "/mcp"): mcp_get,
    ("DELETE", "/mcp"): mcp_delete,
}
