"""aiohttp. Without `trust_env` it goes around every proxy.

For `ws://` it would look for a variable `ws_proxy`, so the proxy is given. That becomes an upgrade in
absolute-form, where other libraries open a tunnel.
"""

import asyncio
import os

import aiohttp

from talk import ASKED, PATIENCE, Stopwatch, saw, serve


def session():
    return aiohttp.ClientSession(trust_env=True, timeout=aiohttp.ClientTimeout(total=PATIENCE))


async def get(url, headers):
    async with session() as http, http.get(url, headers=headers) as response:
        return saw(response.status, await response.text())


async def post(url, headers):
    async with session() as http, http.post(url, json=ASKED, headers=headers) as response:
        return saw(response.status, await response.text())


async def stream(url, headers):
    stopwatch = Stopwatch()
    async with session() as http, http.get(url, headers=headers) as response:
        lines = []
        async for line in response.content:
            stopwatch.line(line)
            lines.append(line)
        return saw(response.status, b"".join(lines), stopwatch=stopwatch)


async def twice(url, headers):
    async with session() as http:
        async with http.get(url, headers=headers) as response:
            response.raise_for_status()
            await response.read()
        async with http.get(url, headers=headers) as response:
            return saw(response.status, await response.text())


async def websocket(url, headers):
    proxy = os.environ.get("https_proxy")
    async with session() as http, http.ws_connect(url, headers=headers, proxy=proxy) as socket:
        await socket.send_str("hello")
        return saw(101, await socket.receive_str())


def run(verb):
    return lambda url, headers: asyncio.run(verb(url, headers))


serve(get=run(get), post=run(post), stream=run(stream), twice=run(twice), websocket=run(websocket))
