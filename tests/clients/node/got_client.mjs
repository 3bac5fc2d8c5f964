// got with proxy agents, since it reads no variable. Its own retries stay as they are: two, for GET.
import got from 'got';
import { once } from 'node:events';
import { agents } from './agents.mjs';
import { ASKED, PATIENCE, Stopwatch, read, saw, serve } from './talk.mjs';

const client = got.extend({ agent: agents, throwHttpErrors: false, timeout: { request: PATIENCE } });

async function get(url, headers) {
  const response = await client.get(url, { headers });
  return saw(response.statusCode, response.body);
}

async function post(url, headers) {
  const response = await client.post(url, { json: ASKED, headers });
  return saw(response.statusCode, response.body);
}

async function stream(url, headers) {
  const stopwatch = new Stopwatch();
  const body = client.stream(url, { headers });
  const [response] = await once(body, 'response');
  return saw(response.statusCode, await read(body, stopwatch), stopwatch);
}

async function twice(url, headers) {
  await get(url, headers);
  return get(url, headers);
}

serve({ get, post, stream, twice });
