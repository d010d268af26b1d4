// One request as it was answered: its tokens, its rounds and their times. Knows no page.

export const FORMAT = "graft-recording-1";

export class Recording {
  constructor(words, model, parameters) {
    this.format = FORMAT;
    this.created = new Date().toISOString();
    this.words = words;
    this.model = model;
    this.parameters = parameters;
    this.tokens = [];
    this.rounds = [];
    this.said = null;
    this.thoughts = 0;
    this.finish = null;
    this.metrics = null;
  }

  // Takes one object of the stream; true when something to show came with it.
  take(chunk) {
    if (chunk.metrics) this.metrics = chunk.metrics.speculative_decoding;
    let changed = false;
    for (const choice of chunk.choices ?? []) {
      this.rounds.push(...(choice.speculation_trace ?? []));
      const at = this.duration;
      (choice.token_texts ?? []).forEach((text, place) => {
        this.tokens.push({ text, origin: choice.token_origins[place], at_ms: at });
      });
      this.#read(choice.delta ?? {}, choice.token_texts?.length ?? 0);
      this.finish = choice.finish_reason ?? this.finish;
      changed ||= Boolean(choice.speculation_trace?.length || choice.token_texts?.length);
    }
    return changed;
  }

  // Reasoning is a message's beginning, its marks included: so many tokens, of which `fresh` came now.
  #read(delta, fresh) {
    if (this.said === null && delta.reasoning_content) this.thoughts = this.tokens.length;
    if (!delta.content) return;
    if (this.said === null && this.thoughts) this.thoughts = this.tokens.length - fresh;
    this.said = (this.said ?? "") + delta.content;
  }

  // What was said to the reader, without reasoning.
  get text() {
    return this.said ?? this.tokens.map((token) => token.text).join("");
  }

  get duration() {
    return this.rounds.length ? this.rounds.at(-1).at_ms : 0;
  }

  // The number of the round that decided each emitted token.
  roundOfToken(place) {
    let count = 0;
    for (const [number, round] of this.rounds.entries()) {
      count += round.tokens.length;
      if (place < count) return number;
    }
    return this.rounds.length - 1;
  }

  // The places of the tokens that a round decided: from the first, up to and without the last.
  tokensOfRound(number) {
    const before = this.rounds.slice(0, number);
    const start = before.reduce((sum, round) => sum + round.tokens.length, 0);
    return [start, start + (this.rounds[number]?.tokens.length ?? 0)];
  }
}

const columns = ["tokens", "texts", "parents", "probabilities", "accepted"];

function isRound(round) {
  const tree = round?.tree;
  return Array.isArray(round?.tokens) && Array.isArray(round?.texts) &&
    typeof round?.at_ms === "number" && typeof round?.timing_us === "object" &&
    (tree === null || (columns.every((name) => Array.isArray(tree?.[name])) &&
      tree.parents.every((parent, node) => Number.isInteger(parent) && parent < node)));
}

// A recording from a saved file. Throws a sentence when it is none.
export function reopen(text) {
  let saved;
  try {
    saved = JSON.parse(text);
  } catch {
    throw new Error("this file is not JSON");
  }
  const whole = saved?.format === FORMAT && Array.isArray(saved.tokens) &&
    Array.isArray(saved.rounds) && saved.rounds.every(isRound) &&
    saved.tokens.every((token) => typeof token?.text === "string");
  if (!whole) throw new Error(`this file is not a recording of the form ${FORMAT}`);
  return Object.assign(new Recording("", "", {}), saved);
}
