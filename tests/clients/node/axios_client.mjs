// axios. It reads the proxy variables by itself.
import axios from 'axios';
import { ASKED, PATIENCE, Stopwatch, read, saw, serve } from './talk.mjs';

const client = axios.create({ timeout: PATIENCE, validateStatus: null, responseType: 'text' });

async function get(url, headers) {
  const response = await client.get(url, { headers });
  return saw(response.status, response.data);
}

async function post(url, headers) {
  const response = await client.post(url, ASKED, { headers });
  return saw(response.status, response.data);
}

async function stream(url, headers) {
  const stopwatch = new Stopwatch();
  const response = await client.get(url, { headers, responseType: 'stream' });
  return saw(response.status, await read(response.data, stopwatch), stopwatch);
}

async function twice(url, headers) {
  await get(url, headers);
  return get(url, headers);
}

serve({ get, post, stream, twice });
