"""The MCP SDK over streamable HTTP: one session with one call of a tool, ended by a DELETE."""

import asyncio

from mcp import ClientSession
from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

from talk import PATIENCE, saw, serve


def session(url, headers):
    return asyncio.run(asyncio.wait_for(use_a_tool(url, headers), PATIENCE))


async def use_a_tool(url, headers):
    async with (
        create_mcp_http_client(headers=headers) as http,
        streamable_http_client(url, http_client=http) as (read, write, *_),
        ClientSession(read, write) as mcp,
    ):
        await mcp.initialize()
        tools = [tool.name for tool in (await mcp.list_tools()).tools]
        said = (await mcp.call_tool(tools[0], {"text": "hello"})).content[0].text
        return saw(200, f"{tools[0]} says {said}")


serve(session=session)
