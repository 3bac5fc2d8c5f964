// node:http and node:https with the default agent, which reads the environment from Node 24 on.
import http from 'node:http';
import https from 'node:https';
import { once } from 'node:events';
import { ASKED, PATIENCE, Stopwatch, read, saw, serve } from './talk.mjs';

async function call(url, options, body) {
  const { request } = url.startsWith('https:') ? https : http;
  const call = request(url, { ...options, timeout: PATIENCE });
  call.end(body);
  const [response] = await once(call, 'response');
  return response;
}

async function get(url, headers) {
  const response = await call(url, { headers });
  return saw(response.statusCode, await read(response, new Stopwatch()));
}

async function post(url, headers) {
  const body = JSON.stringify(ASKED);
  const fields = { ...headers, 'content-type': 'application/json' };
  const response = await call(url, { method: 'POST', headers: fields }, body);
  return saw(response.statusCode, await read(response, new Stopwatch()));
}

async function stream(url, headers) {
  const stopwatch = new Stopwatch();
  const response = await call(url, { headers });
  return saw(response.statusCode, await read(response, stopwatch), stopwatch);
}

async function twice(url, headers) {
  await get(url, headers);
  return get(url, headers);
}

serve({ get, post, stream, twice });
