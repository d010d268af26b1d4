// The panel of rounds: which recording and round is shown, and everything drawn of it.

import { byId, html, percent } from "./dom.js";
import { depthChart, tierStrip, waterfall } from "./charts.js";
import { Player } from "./player.js";
import { REASONS, totals } from "./stats.js";
import { drawTree, outline, sentence } from "./tree.js";

const REST = 3;
const LEAST_SCALE = 0.85;
const WIDE_ENOUGH = 500;

export class Panel {
  // moved(recording, number, decided, millis) is called when another round is shown.
  constructor(moved) {
    this.moved = moved;
    this.recordings = [];
    this.recording = null;
    this.number = 0;
    this.following = false;
    this.waiting = false;
    this.pause = 0;
    this.player = new Player(
      (moment, millis) => this.#show(moment.number, moment.decided, millis),
      () => this.#played(),
    );
    this.#listen();
  }

  // Adds a recording and shows it; while it is written, its newest round stays in view.
  open(recording, following) {
    this.player.stop();
    this.recordings.push(recording);
    this.recording = recording;
    this.following = following;
    this.#list();
    this.refresh();
  }

  // Draws again at a frame soon, the sooner the less time the last drawing took.
  refresh() {
    if (this.waiting) return;
    this.waiting = true;
    setTimeout(() => requestAnimationFrame((now) => {
      this.waiting = false;
      if (!this.player.playing) this.show(this.following ? this.#last : this.number);
      this.pause = REST * (performance.now() - now);
    }), this.pause);
  }

  // The recording is whole; what was followed stays at its last round.
  finish() {
    if (this.following) this.number = this.#last;
    this.following = false;
    this.refresh();
  }

  // Shows a round as it was decided, of another recording if one is given.
  show(number, recording = this.recording) {
    this.player.stop();
    if (recording !== this.recording) {
      this.recording = recording;
      this.#list();
    }
    this.#show(Math.max(0, Math.min(number, this.#last)), true, null);
  }

  stopFollowing() {
    this.following = false;
  }

  get #last() {
    return Math.max(0, (this.recording?.rounds.length ?? 1) - 1);
  }

  #show(number, decided, millis) {
    const rounds = this.recording?.rounds ?? [];
    const same = this.number === number && this.decided === decided && this.drawn === rounds.length;
    this.number = number;
    this.decided = decided;
    this.drawn = rounds.length;
    this.#controls();
    if (rounds.length) {
      if (!same || millis === null) this.#draw(rounds, millis);
      this.moved(this.recording, number, decided, millis);
    } else {
      this.#blank();
    }
  }

  #draw(rounds, millis) {
    const round = rounds[this.number];
    byId("round-title").textContent = sentence(round, this.decided);
    const host = byId("tree");
    if (round.tree) {
      const drawing = drawTree(round, this.decided);
      this.#shrink(host, drawing);
      host.replaceChildren(drawing);
      this.#bringIntoView(host, drawing);
      byId("outline").replaceChildren(...outline(round, this.decided));
    } else {
      host.replaceChildren(html("p", { class: "note" }, "This round was not traced."));
      byId("outline").replaceChildren();
    }
    this.#figure("waterfall", (width) => waterfall(round, width));
    const shown = millis === null ? rounds : rounds.slice(0, this.number + (this.decided ? 1 : 0));
    this.#figure("depths", (width) => depthChart(shown, width));
    this.#figure("tiers", (width) => tierStrip(rounds, this.number, width, (n) => this.#jump(n)));
    this.#reasons(rounds);
    this.#totals(shown);
  }

  // A wide tree is made a little smaller before it has to be scrolled.
  #shrink(host, drawing) {
    if (host.clientWidth < WIDE_ENOUGH) return;
    const { width, height } = drawing.viewBox.baseVal;
    const scale = Math.max(LEAST_SCALE, Math.min(1, host.clientWidth / width));
    drawing.setAttribute("width", width * scale);
    drawing.setAttribute("height", height * scale);
  }

  #bringIntoView(host, drawing) {
    const own = drawing.querySelector(".node.bonus, .node.plain");
    host.scrollTo(0, 0);
    if (!own) return;
    const room = host.getBoundingClientRect();
    const spot = own.getBoundingClientRect();
    host.scrollTo(Math.max(0, spot.right - room.right + 12), Math.max(0, spot.bottom - room.bottom + 12));
  }

  #figure(id, draw) {
    const host = byId(id);
    host.replaceChildren(draw(host.clientWidth || 480));
  }

  #reasons(rounds) {
    const found = [...totals(rounds).reasons].map(([name, count]) =>
      `${count} without a tree: ${REASONS[name] ?? name}`);
    const inactive = this.recording.metrics?.inactive_reason;
    if (inactive) found.push(inactive);
    if (found.length) byId("tiers").append(html("p", { class: "note" }, found.join("; ")));
  }

  #totals(rounds) {
    const found = totals(rounds);
    const share = found.drafted ? percent(found.accepted / found.drafted) : "none drafted";
    const entries = [
      ["tokens", found.tokens],
      ["rounds", found.rounds],
      ["tokens a round", found.perRound.toFixed(2)],
      ["drafted accepted", share],
      ["tokens a second", found.perSecond.toFixed(1)],
    ];
    byId("totals").replaceChildren(...entries.map(([name, value]) =>
      html("div", {}, html("dt", {}, name), html("dd", {}, String(value)))));
  }

  #blank() {
    byId("round-title").textContent = "No round yet";
    for (const id of ["tree", "outline", "waterfall", "depths", "tiers", "totals"]) {
      byId(id).replaceChildren();
    }
  }

  #controls() {
    const count = this.recording?.rounds.length ?? 0;
    const slider = byId("at");
    slider.max = String(this.#last);
    slider.value = String(this.number);
    slider.setAttribute("aria-valuetext", `round ${this.number} of ${this.#last}`);
    slider.disabled = count === 0;
    byId("back").disabled = this.number <= 0;
    byId("ahead").disabled = this.number >= this.#last;
    for (const id of ["play", "save-json", "save-svg"]) byId(id).disabled = count === 0;
    byId("play").textContent = this.player.playing ? "Pause" : "Replay";
  }

  #list() {
    const select = byId("recording");
    select.replaceChildren(...this.recordings.map((recording, place) => {
      const words = recording.words.replace(/\s+/g, " ");
      const short = words.length > 28 ? `${words.slice(0, 27)}…` : words;
      return new Option(`${place + 1}. ${short}`, String(place));
    }));
    select.value = String(this.recordings.indexOf(this.recording));
    select.disabled = false;
  }

  #jump(number) {
    this.following = false;
    this.show(number);
  }

  #played() {
    this.show(this.#last);
  }

  #toggle() {
    if (this.player.playing) {
      this.show(this.number);
      return;
    }
    this.following = false;
    const { rounds } = this.recording;
    const resume = this.number < this.#last && this.number > 0;
    this.player.play(rounds, resume ? rounds[this.number].at_ms : 0);
    this.#controls();
  }

  #listen() {
    byId("at").addEventListener("input", () => this.#jump(Number(byId("at").value)));
    byId("back").addEventListener("click", () => this.#jump(this.number - 1));
    byId("ahead").addEventListener("click", () => this.#jump(this.number + 1));
    byId("play").addEventListener("click", () => this.#toggle());
    byId("speed").addEventListener("change", () => {
      this.player.speed = Number(byId("speed").value);
    });
    byId("recording").addEventListener("change", () => {
      this.following = false;
      this.show(0, this.recordings[Number(byId("recording").value)]);
    });
    new ResizeObserver(() => this.refresh()).observe(byId("waterfall"));
  }
}
