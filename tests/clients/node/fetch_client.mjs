// fetch: undici's on Node 20, Node's own from 24 on.
import { fetch } from './fetch.mjs';
import { ASKED, PATIENCE, Stopwatch, read, saw, serve } from './talk.mjs';

const call = (url, options) => fetch(url, { ...options, signal: AbortSignal.timeout(PATIENCE) });

async function get(url, headers) {
  const response = await call(url, { headers });
  return saw(response.status, await response.text());
}

async function post(url, headers) {
  const body = JSON.stringify(ASKED);
  const fields = { ...headers, 'content-type': 'application/json' };
  const response = await call(url, { method: 'POST', body, headers: fields });
  return saw(response.status, await response.text());
}

async function stream(url, headers) {
  const stopwatch = new Stopwatch();
  const response = await call(url, { headers });
  return saw(response.status, await read(response.body, stopwatch), stopwatch);
}

async function twice(url, headers) {
  await get(url, headers);
  return get(url, headers);
}

serve({ get, post, stream, twice });
