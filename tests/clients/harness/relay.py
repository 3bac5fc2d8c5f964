"""The port that a client takes for hedgerow's: it passes bytes on to it and counts connections.

hedgerow pools what it opens upstream, so only here, between client and hedgerow, can be seen whether a client
keeps a connection, and whether it asks again and again where it should have given up.
"""

import asyncio


class Relay:
    """One for each client under test, so that clients running beside each other are told apart."""

    def __init__(self, to_port: int):
        self.to_port = to_port
        self.connections = 0
        self.open = set()

    async def start(self) -> "Relay":
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def stop(self):
        self.server.close()
        for writer in self.open:
            writer.close()

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.to_port)
            self.open |= {writer, up_writer}
            try:
                await asyncio.gather(_pass(reader, up_writer), _pass(up_reader, writer))
            finally:
                self.open -= {writer, up_writer}
                up_writer.close()
        except OSError:
            # A reset: the other side gets to know by the close.
            pass
        finally:
            writer.close()


async def _pass(reader, writer):
    while chunk := await reader.read(1 << 16):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
