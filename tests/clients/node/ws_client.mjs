// ws with a proxy agent, since no version of Node gives it one.
import WebSocket from 'ws';
import { once } from 'node:events';
import { tunnel } from './agents.mjs';
import { PATIENCE, saw, serve } from './talk.mjs';

async function websocket(url, headers) {
  const socket = new WebSocket(url, { agent: tunnel, headers, handshakeTimeout: PATIENCE });
  await once(socket, 'open');
  socket.send('hello');
  const [message] = await once(socket, 'message');
  socket.close();
  return saw(101, message.toString());
}

serve({ websocket });
