// The Anthropic SDK as it comes: two retries of its own for whatever looks transient.
import Anthropic from '@anthropic-ai/sdk';
import { fetch } from './fetch.mjs';
import { PATIENCE, Stopwatch, saw, serve } from './talk.mjs';

const ASKED = { model: 'small', max_tokens: 9, messages: [{ role: 'user', content: 'hello' }] };

// The SDK adds the version to the path itself.
const client = (url, headers) =>
  new Anthropic({ apiKey: 'none', baseURL: url.replace(/\/v1$/, ''), defaultHeaders: headers, timeout: PATIENCE, fetch });

const ask = async (api) => saw(200, (await api.messages.create(ASKED)).content[0].text);

async function chat(url, headers) {
  try {
    return await ask(client(url, headers));
  } catch (error) {
    if (!error.status) throw error;
    return saw(error.status, JSON.stringify(error.error));
  }
}

async function stream(url, headers) {
  const stopwatch = new Stopwatch();
  let text = '';
  for await (const event of client(url, headers).messages.stream(ASKED)) {
    if (event.type !== 'content_block_delta') continue;
    stopwatch.event();
    text += event.delta.text;
  }
  return saw(200, text, stopwatch);
}

async function twice(url, headers) {
  const api = client(url, headers);
  await ask(api);
  return ask(api);
}

serve({ chat, stream, twice });
