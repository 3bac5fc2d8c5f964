// How the Node programs of the suite hear what to do and tell what they saw; the same as python/talk.py.
import { createInterface } from 'node:readline';

// Milliseconds. No case lets a client wait so long on purpose.
export const PATIENCE = 10_000;

export const ASKED = { ask: 'hello' };

/** When the events of a stream came, in milliseconds after the call began. */
export class Stopwatch {
  began = performance.now();
  events_ms = [];

  event() {
    this.events_ms.push(Math.round(performance.now() - this.began));
  }

  /** Counts the events in a piece of a stream and gives the piece back as text. */
  piece(bytes) {
    const text = Buffer.from(bytes).toString();
    for (const _ of text.matchAll(/^data:/gm)) this.event();
    return text;
  }
}

/** The report of a call that was answered. */
export const saw = (status, body, stopwatch) => ({ status, body, events_ms: stopwatch?.events_ms });

/** The text of a stream whose events are counted. */
export async function read(body, stopwatch) {
  let text = '';
  for await (const bytes of body) text += stopwatch.piece(bytes);
  return text;
}

/** Carries out case after case, until the runner closes the line. */
export async function serve(verbs) {
  for await (const line of createInterface({ input: process.stdin })) {
    const [verb, url, ...fields] = line.split('\t');
    const headers = Object.fromEntries(fields.map((field) => field.split(': ', 2)));
    let report;
    try {
      report = await verbs[verb](url, headers);
    } catch (error) {
      report = { failure: causes(error).join(' < ') };
    }
    console.log(JSON.stringify(report));
  }
  // Kept-alive sockets would hold the process.
  process.exit();
}

function causes(error) {
  const told = [];
  for (let at = error; at && told.length < 8; at = at.cause) {
    told.push(`${at.name} ${at.code ?? ''}: ${at.message}`);
  }
  return told;
}
