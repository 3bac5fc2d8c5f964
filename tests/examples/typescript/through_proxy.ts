// An agent as anyone would write it: tools that make plain HTTP calls, all of a turn side by side. Nothing in it knows
// of a proxy. Node's fetch follows HTTP_PROXY and HTTPS_PROXY from 24 on, where NODE_USE_ENV_PROXY is set; before, it
// takes a module that is loaded first:
//
//   HTTP_PROXY=http://127.0.0.1:15300 node --import ./follow_proxy.js through_proxy.js
import { model, type Message, type ToolCall } from './stand_in.js';

const urlOf = (name: string) => process.env[`${name.toUpperCase()}_URL`] ?? `https://${name}.example.com`;
const PROMPT = 'You are an analyst. Never invent what a tool could not tell: say that it was unavailable.';

async function ask({ id, name, args }: ToolCall): Promise<Message> {
  const tell = (content: string): Message => ({ role: 'tool', name, toolCallId: id, content });
  try {
    // No timeout of its own: a short one would cut off slow tools that answer. How long a turn may take and when a
    // second try is worth it is for the policy to say.
    const response = await fetch(`${urlOf(name)}?${new URLSearchParams(args)}`);
    const text = await response.text();
    // A failure's text goes to the model too: it says why, and whether another try makes sense.
    return tell(response.ok ? text : `unavailable (${response.status}): ${text}`);
  } catch (error) {
    return tell(`unavailable: ${reason(error)}`);
  }
}

/** The innermost: "fetch failed" alone helps nobody. */
const reason = (error: unknown): unknown => (error instanceof Error && error.cause ? reason(error.cause) : error);

const messages: Message[] = [{ role: 'human', content: 'What about AAPL?' }];
for (;;) {
  const answer = model([{ role: 'system', content: PROMPT }, ...messages]);
  messages.push(answer);
  if (!answer.toolCalls) break;
  messages.push(...(await Promise.all(answer.toolCalls.map(ask))));
}
console.log(messages.at(-1)?.content);
