"""The tools of the examples, simulated: what an agent meets on a bad day."""

import json
import socket
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

CAME, FAILED = ("quotes", "news"), ("filings", "ratings", "chatter")


class Tools:
    """A port for each. `quotes` answers at once; `news` does the second time, since one in many calls is slow
    everywhere; `filings` and `chatter` hang for `patience` seconds; `ratings` refuses the connection."""

    def __init__(self, patience: float):
        self.patience = patience
        # Requests that have arrived, by tool.
        self.seen: Counter[str] = Counter()
        self.stopping = threading.Event()
        self.servers = {name: self._serve(name) for name in ("quotes", "news", "filings", "chatter")}
        # Bound, so that nobody else gets the port, and not listening.
        self.refusing = socket.socket()
        self.refusing.bind(("127.0.0.1", 0))

    def environment(self) -> dict[str, str]:
        ports = {name: server.server_port for name, server in self.servers.items()}
        ports["ratings"] = self.refusing.getsockname()[1]
        return {f"{name.upper()}_URL": f"http://127.0.0.1:{port}" for name, port in ports.items()}

    def stop(self):
        self.stopping.set()
        self.refusing.close()
        for server in self.servers.values():
            server.shutdown()
            server.server_close()

    def _serve(self, name: str) -> ThreadingHTTPServer:
        tools = self

        class Tool(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                tools.seen[name] += 1
                if name in FAILED or (name == "news" and tools.seen[name] == 1):
                    tools.stopping.wait(tools.patience)
                [symbol] = parse_qs(urlsplit(self.path).query)["symbol"]
                body = json.dumps({"fact": f"{name} of {symbol}"}).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = Server(("127.0.0.1", 0), Tool)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """The other side has left: so every call ends that is cancelled."""
