"""websockets. It opens a tunnel for `ws://` too and takes the proxy from the environment by itself."""

from websockets.sync.client import connect

from talk import PATIENCE, saw, serve


def websocket(url, headers):
    with connect(url, additional_headers=headers, open_timeout=PATIENCE) as socket:
        socket.send("hello")
        return saw(101, socket.recv(timeout=PATIENCE))


serve(websocket=websocket)
