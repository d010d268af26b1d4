// The small figures beside the tree: waterfall, acceptance by depth, tiers over time.

import { html, millis, percent, picture, svg } from "./dom.js";
import { acceptanceByDepth, REASONS, tierName } from "./stats.js";

const STAGES = [
  ["draft", "draft"],
  ["tree_wait", "wait for the tree"],
  ["queue", "queue"],
  ["forward", "target forward"],
  ["choice", "choose and keep"],
];
const ROW = 24;
const LETTER = 6;
const LABEL = 128;
const VALUE = 66;

// Stages one below the other, each beginning where the one before it ended. The drafter works
// while verify waits for its tree, so these two begin together.
function starts(timing) {
  const wait = timing.tree_wait;
  const draft = Math.max(0, wait - timing.draft);
  const queue = wait;
  const forward = queue + timing.queue;
  return { draft, tree_wait: 0, queue, forward, choice: forward + timing.forward };
}

export function waterfall(round, width) {
  const timing = round.timing_us;
  const from = starts(timing);
  const whole = Math.max(1, from.choice + timing.choice, timing.draft);
  const room = Math.max(60, width - LABEL - VALUE);
  const scale = (micros) => (micros / whole) * room;
  const rows = STAGES.map(([name, label], place) => {
    const y = place * ROW;
    const long = Math.max(timing[name] ? 2 : 0, Math.min(scale(timing[name]), room));
    const x = LABEL + Math.min(scale(from[name]), room - long);
    return svg("g", {},
      svg("text", { x: 0, y: y + 16 }, label),
      svg("rect", { class: "bar-ground", x: LABEL, y: y + 5, width: room, height: 14, rx: 3 }),
      svg("rect", { class: `stage-${name}`, x, y: y + 5, width: long, height: 14, rx: 3 }),
      svg("text", { x: LABEL + room + 8, y: y + 16 }, millis(timing[name])));
  });
  const label = STAGES.map(([name, word]) => `${word} ${millis(timing[name])}`).join(", ");
  return picture(`Time of the round: ${label}`, width, STAGES.length * ROW, ...rows);
}

export function depthChart(rounds, width) {
  const found = acceptanceByDepth(rounds);
  if (!found.length) return html("p", { class: "note" }, "No tree yet.");
  const room = Math.max(60, width - 28 - 92);
  const rows = found.map(({ depth, offered, accepted }, place) => {
    const y = place * 20;
    return svg("g", {},
      svg("text", { x: 0, y: y + 13 }, String(depth)),
      svg("rect", { class: "bar-ground", x: 28, y: y + 3, width: room, height: 12, rx: 3 }),
      svg("rect", { class: "bar-accepted", x: 28, y: y + 3, height: 12, rx: 3,
        width: (accepted / offered) * room }),
      svg("text", { class: "small", x: 36 + room, y: y + 13 },
        `${percent(accepted / offered)} of ${offered}`));
  });
  const label = found.map((one) => `depth ${one.depth} ${percent(one.accepted / one.offered)}`);
  return picture(`Acceptance by depth: ${label.join(", ")}`, width, found.length * 20, ...rows);
}

// A column a round, a block a token, under bands that name the tier. `now` is the round shown.
export function tierStrip(rounds, now, width, choose) {
  if (!rounds.length) return html("p", { class: "note" }, "No round yet.");
  const most = Math.max(2, ...rounds.map((round) => round.tokens.length));
  const step = Math.min(28, width / rounds.length);
  const gap = step > 3 ? 1 : 0;
  const block = Math.min(12, 72 / most);
  const top = 24;
  const height = top + most * block + 4;
  const columns = rounds.map((round, place) => {
    const column = svg("g", {});
    round.tokens.forEach((_, token) => {
      const kind = token < round.num_accepted ? "accepted" : round.num_drafted ? "bonus" : "plain";
      column.append(svg("rect", { class: `bar-${kind}`, x: place * step + gap / 2, rx: gap,
        y: height - 2 - (token + 1) * block, width: step - gap, height: block - 1 }));
    });
    const reason = round.plain_reason ? `, ${REASONS[round.plain_reason]}` : "";
    column.append(svg("title", {}, `round ${round.round}: ${round.tokens.length} tokens${reason}`));
    column.addEventListener("click", () => choose(place));
    return column;
  });
  const bands = tierBands(rounds).map(({ name, from, to }) => svg("g", {},
    svg("rect", { class: "band", x: from * step, y: 1, width: (to - from) * step, height: 18,
      rx: 3 }),
    svg("title", {}, name),
    (to - from) * step < name.length * LETTER ? null :
      svg("text", { class: "small", x: from * step + 5, y: 14 }, name)));
  const cursor = svg("rect", { class: "cursor", x: now * step, y: top - 2, width: step,
    height: height - top + 1 });
  const label = `${rounds.length} rounds; tiers: ${tierBands(rounds).map((b) => b.name).join(", ")}`;
  return picture(label, width, height, ...bands, ...columns, cursor);
}

function tierBands(rounds) {
  const bands = [];
  rounds.forEach((round, place) => {
    const name = tierName(round.tier);
    if (bands.at(-1)?.name === name) bands.at(-1).to = place + 1;
    else bands.push({ name, from: place, to: place + 1 });
  });
  return bands;
}
