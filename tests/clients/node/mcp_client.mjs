// The MCP SDK over streamable HTTP: one session with one call of a tool, ended by a DELETE.
import { Client } from '@modelcontextprotocol/sdk/client/index.js';
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js';
import { fetch } from './fetch.mjs';
import { saw, serve } from './talk.mjs';

async function session(url, headers) {
  const client = new Client({ name: 'agent', version: '1' });
  const transport = new StreamableHTTPClientTransport(new URL(url), { fetch, requestInit: { headers } });
  try {
    await client.connect(transport);
    const [tool] = (await client.listTools()).tools;
    const said = await client.callTool({ name: tool.name, arguments: { text: 'hello' } });
    await transport.terminateSession();
    return saw(200, `${tool.name} says ${said.content[0].text}`);
  } finally {
    await client.close();
  }
}

serve({ session });
