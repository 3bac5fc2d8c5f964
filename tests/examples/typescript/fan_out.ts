// An agent whose tool node hands all calls of a turn to hedgerow at once, and gets each result as it comes. The nodes
// have the shape of LangGraph's: they take the state and return what changes in it.
import { model, type Message, type ToolCall } from './stand_in.js';

const HEDGEROW = process.env.HEDGEROW_URL ?? 'http://127.0.0.1:15300';
const urlOf = (name: string) => process.env[`${name.toUpperCase()}_URL`] ?? `https://${name}.example.com`;
// Good to have: without them an answer is complete, and when all others have ended they get this much longer.
const OPTIONAL = new Set(['chatter']);
const GRACE_MS = 100;
// For all calls of a turn together. A user waits for it at most, so it is the turn's time and not the slowest tool's.
const DEADLINE_MS = 3000;
const PROMPT = 'You are an analyst. Never invent what a tool could not tell: say that it was unavailable.';

type State = { messages: Message[]; warning: string | null };
type Result = { id: string; status: number; body?: unknown };
type Summary = { warning: string | null; missing: Record<string, { message: string }> };

function think({ messages, warning }: State): Partial<State> {
  // The warning is of the last turn alone, and stands where a model looks first. Among the tools' messages it would be
  // one text more from outside, and some APIs take no system message between others.
  const system: Message = { role: 'system', content: warning ? `${PROMPT}\n\n${warning}` : PROMPT };
  return { messages: [...messages, model([system, ...messages])] };
}

async function callTools({ messages }: State): Promise<Partial<State>> {
  const wanted = messages.at(-1)?.toolCalls ?? [];
  // The id is the call's name in the warning, so it says to a model what is missing. A list has each id once: equal
  // calls of a turn are one call.
  const idOf = ({ name, args }: ToolCall) => `${name} ${args.symbol}`;
  const distinct = new Map(wanted.map((call) => [idOf(call), call]));
  const response = await fetch(`${HEDGEROW}/v1/fanout`, {
    method: 'POST',
    // Without this field the answer is one JSON object, which is all that most agents need.
    headers: { accept: 'text/event-stream' },
    body: JSON.stringify({
      deadline_ms: DEADLINE_MS,
      grace_ms: GRACE_MS,
      calls: [...distinct].map(([id, call]) => ({
        id,
        url: `${urlOf(call.name)}?${new URLSearchParams(call.args)}`,
        optional: OPTIONAL.has(call.name),
      })),
    }),
    // The stream ends soon after the deadline. This timeout is for a sidecar that is gone.
    signal: AbortSignal.timeout(DEADLINE_MS + 5000),
  });
  // Tools that fail are no error here: only a list that cannot be read is.
  if (!response.ok || !response.body) throw new Error(`${response.status}: ${await response.text()}`);

  const results = new Map<string, Result>();
  let summary: Summary | undefined;
  for await (const { event, data } of events(response.body)) {
    if (event === 'result') {
      const result: Result = JSON.parse(data);
      results.set(result.id, result);
      // Whoever waits can be shown that something happens.
      console.log(`${result.id} is here`);
    } else if (event === 'complete') {
      summary = JSON.parse(data);
    }
    // The others, `missing` and `deadline`, tell earlier what the summary tells too.
  }
  if (!summary) throw new Error('the stream broke off');

  const { missing, warning } = summary;
  // Every call gets its message, as the APIs of models demand.
  const told = wanted.map((call): Message => {
    const result = results.get(idOf(call));
    // A 404 is a result too, so the status is told with the body.
    const content = result
      ? JSON.stringify({ status: result.status, body: result.body })
      : `unavailable: ${missing[idOf(call)]?.message}`;
    return { role: 'tool', name: call.name, toolCallId: call.id, content };
  });
  // One sentence: what is missing, and on how much an analysis rests. Null where all has come.
  return { messages: [...messages, ...told], warning };
}

/** The events of a stream, as far as hedgerow uses the format: one line of data each. */
async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<{ event?: string; data: string }> {
  let text = '';
  for await (const chunk of body.pipeThrough(new TextDecoderStream())) {
    const blocks = (text + chunk).split('\n\n');
    text = blocks.pop() ?? '';
    for (const block of blocks) {
      const { event, data } = Object.fromEntries(block.split('\n').map((line) => line.split(/: (.*)/s, 2)));
      // Without data it is a comment, which only keeps the connection alive.
      if (data) yield { event, data };
    }
  }
}

let state: State = { messages: [{ role: 'human', content: 'What about AAPL?' }], warning: null };
for (;;) {
  state = { ...state, ...think(state) };
  if (!state.messages.at(-1)?.toolCalls) break;
  state = { ...state, ...(await callTools(state)) };
}
console.log(state.messages.at(-1)?.content);
