// The messages and the origin of each of their tokens. Knows elements; asks no server.

import { html } from "./dom.js";
import { totals } from "./stats.js";

const MEANING = { accepted: "accepted: guessed, and right", bonus: "bonus: the target's own",
  plain: "plain: the target's own, no guess" };

export class Conversation {
  // choose(recording, place) is called when a token is clicked.
  constructor(host, choose) {
    this.host = host;
    this.turns = [];
    host.addEventListener("click", (event) => {
      const token = event.target.closest(".token");
      if (!token) return;
      const turn = this.turns.find((one) => one.words.contains(token));
      if (turn?.recording) choose(turn.recording, Number(token.dataset.place));
    });
  }

  // What the API is told of the conversation so far.
  get messages() {
    return this.turns.map(({ role, recording, said }) =>
      ({ role, content: recording ? recording.text : said }));
  }

  get empty() {
    return this.turns.length === 0;
  }

  ask(said) {
    this.#add({ role: "user", said, recording: null }, "You", said);
  }

  // An answer that is being written, or that was recorded.
  answer(recording) {
    const turn = { role: "assistant", recording, said: "", shown: 0, thoughts: 0 };
    this.#add(turn, recording.model || "Model", "");
    this.grow(recording);
  }

  // Shows the tokens that came since the last call.
  grow(recording) {
    const turn = this.#turn(recording);
    this.#keepEnd(() => {
      for (; turn.shown < recording.tokens.length; turn.shown += 1) {
        const { text, origin } = recording.tokens[turn.shown];
        const title = MEANING[origin];
        const place = { class: `token ${origin}`, "data-place": turn.shown, title };
        turn.words.append(html("span", place, text));
      }
      for (; turn.thoughts < recording.thoughts; turn.thoughts += 1) {
        turn.words.children[turn.thoughts].classList.add("thought");
      }
      turn.words.classList.toggle("waiting", recording.finish === null);
    });
  }

  // Says under an answer how it went.
  close(recording, note) {
    const turn = this.#turn(recording);
    turn.words.classList.remove("waiting");
    this.#keepEnd(() => {
      turn.element.querySelector(".count").textContent = note || summary(recording);
    });
  }

  // Marks the tokens of a round; tokens later than `millis` are hidden, unless it is null.
  mark(recording, number, decided, millis = null) {
    const [start, end] = recording.tokensOfRound(number);
    for (const turn of this.turns) {
      const mine = turn.recording === recording;
      for (const token of turn.words.querySelectorAll(".token")) {
        const place = Number(token.dataset.place);
        const now = mine && decided && place >= start && place < end;
        token.classList.toggle("now", now);
        token.classList.toggle("later", mine && millis !== null &&
          recording.tokens[place].at_ms > millis);
      }
    }
  }

  // Takes the last answer back, so that it can be written again.
  takeBack() {
    if (this.turns.at(-1)?.role === "assistant") this.turns.pop().element.remove();
  }

  clear() {
    for (const turn of this.turns) turn.element.remove();
    this.turns = [];
  }

  // Stays at the end of the conversation if that is where the reader is.
  #keepEnd(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.host;
    change();
    if (scrollHeight - scrollTop - clientHeight < 80) this.host.scrollTop = this.host.scrollHeight;
  }

  #turn(recording) {
    return this.turns.find((turn) => turn.recording === recording);
  }

  #add(turn, who, said) {
    turn.words = html("div", { class: "words" }, said);
    turn.element = html("article", { class: `message ${turn.role}`, "aria-label": `${who} said` },
      html("div", { class: "who" }, who), turn.words, html("div", { class: "count" }));
    this.turns.push(turn);
    this.host.append(turn.element);
    this.host.scrollTop = this.host.scrollHeight;
  }
}

export function summary(recording) {
  const found = totals(recording.rounds);
  const cut = recording.finish === "length" ? ", cut at max_tokens" : "";
  return `${recording.tokens.length} tokens in ${found.rounds} rounds, ` +
    `${found.accepted} guessed right${cut}`;
}
