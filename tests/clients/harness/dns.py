"""A name server on loopback that knows one answer: every name under `.test` is 127.0.0.1.

Clients behind a proxy never ask it, only hedgerow does. It lets them speak to names, which is what their
certificates and hedgerow's policy are about, on a machine whose resolver knows none of them.
"""

import asyncio
import struct

A = 1
NO_ERROR, NAME_ERROR = 0, 3


class NameServer(asyncio.DatagramProtocol):
    """Answers each datagram with one question by itself; has no state."""

    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, query, sender):
        if (reply := _reply(query)) is not None:
            self.transport.sendto(reply, sender)


async def serve() -> int:
    """Starts the server and tells its port."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 0))
    return transport.get_extra_info("sockname")[1]


def _reply(query: bytes) -> bytes | None:
    name, end = _name(query)
    if name is None:
        return None
    (kind,) = struct.unpack_from("!H", query, end)
    known = name.endswith(".test")
    answers = [_loopback()] if known and kind == A else []
    # A response, recursion desired and available; one question, no further sections.
    flags = 0x8180 | (NO_ERROR if known else NAME_ERROR)
    head = query[:2] + struct.pack("!HHHHH", flags, 1, len(answers), 0, 0)
    return head + query[12 : end + 4] + b"".join(answers)


def _name(query: bytes) -> tuple[str | None, int]:
    """The name that is asked for, and where its type stands."""
    labels, at = [], 12
    while at < len(query) and (length := query[at]):
        labels.append(query[at + 1 : at + 1 + length].decode("latin-1").lower())
        at += 1 + length
    # The root's label, type and class.
    return (".".join(labels) if at + 5 <= len(query) else None), at + 1


def _loopback() -> bytes:
    # The name as a pointer to the question's; class IN, a minute, four bytes.
    return struct.pack("!HHHIH", 0xC00C, A, 1, 60, 4) + bytes([127, 0, 0, 1])
