// In place of a model, so that the examples need no key and no network: it wants every tool once, then repeats what
// it was told. What it is given goes to standard output, since the examples are about what reaches a model.

export type ToolCall = { id: string; name: string; args: { symbol: string } };
export type Message = {
  role: 'system' | 'human' | 'ai' | 'tool';
  content: string;
  name?: string;
  toolCalls?: ToolCall[];
  toolCallId?: string;
};

const TOOLS = ['quotes', 'news', 'filings', 'ratings', 'chatter'];

export function model(messages: Message[]): Message {
  console.log(JSON.stringify(messages.map(({ role, name, content }) => ({ role, name, content }))));
  const told = messages.filter(({ role }) => role === 'tool').map(({ name, content }) => `${name}: ${content}`);
  if (told.length > 0) return { role: 'ai', content: told.join('\n') };
  const toolCalls = TOOLS.map((name) => ({ id: `call-${name}`, name, args: { symbol: 'AAPL' } }));
  return { role: 'ai', content: '', toolCalls };
}
