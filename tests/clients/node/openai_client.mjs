// The OpenAI SDK as it comes: two retries of its own for whatever looks transient.
import OpenAI from 'openai';
import { fetch } from './fetch.mjs';
import { PATIENCE, Stopwatch, saw, serve } from './talk.mjs';

const ASKED = { model: 'small', messages: [{ role: 'user', content: 'hello' }] };

const client = (url, headers) =>
  new OpenAI({ apiKey: 'none', baseURL: url, defaultHeaders: headers, timeout: PATIENCE, fetch });

const ask = async (api) => saw(200, (await api.chat.completions.create(ASKED)).choices[0].message.content);

async function chat(url, headers) {
  try {
    return await ask(client(url, headers));
  } catch (error) {
    if (!error.status) throw error;
    // Of the body it shows the member `error`.
    return saw(error.status, JSON.stringify({ error: error.error }));
  }
}

async function stream(url, headers) {
  const stopwatch = new Stopwatch();
  let text = '';
  for await (const chunk of await client(url, headers).chat.completions.create({ ...ASKED, stream: true })) {
    stopwatch.event();
    text += chunk.choices[0].delta.content;
  }
  return saw(200, text, stopwatch);
}

async function twice(url, headers) {
  const api = client(url, headers);
  await ask(api);
  return ask(api);
}

serve({ chat, stream, twice });
