// Draws the tree of one round, as proposed or as decided. Knows one round and nothing else.

import { html, percent, picture, seen, svg } from "./dom.js";
import { curve, NODE, place } from "./layout.js";
import { REASONS } from "./stats.js";

const MARK = { accepted: "✓ ", rejected: "✕ ", bonus: "+ ", plain: "+ ", root: "", proposed: "" };

function box(at, kind, text, share, about) {
  return svg("g", { class: `node ${kind}`, transform: `translate(${at.x} ${at.y})` },
    svg("title", {}, about),
    svg("rect", { width: NODE.width, height: NODE.height, rx: 8 }),
    svg("text", { class: "code", x: 9, y: 15 }, MARK[kind] + seen(text)),
    svg("text", { class: "small", x: 9, y: 28 }, share));
}

function kindOf(round, node, decided) {
  if (node === 0) return "root";
  if (!decided) return "proposed";
  return round.tree.accepted.includes(node) ? "accepted" : "rejected";
}

// The token that the target added by itself: the last one, unless the end of the text cut it off.
function ownToken(round) {
  if (round.tokens.length <= round.num_accepted) return null;
  return { text: round.texts.at(-1), kind: round.num_drafted ? "bonus" : "plain" };
}

function about(tree, node, kind) {
  const choice = tree.choice_texts?.[node];
  const share = tree.choice_probabilities?.[node];
  const next = choice === undefined ? "" : `; after it the target says ${JSON.stringify(choice)}` +
    ` (${percent(share)})`;
  return `${JSON.stringify(tree.texts[node])}, ${kind}, ${percent(tree.probabilities[node])}${next}`;
}

export function drawTree(round, decided = true) {
  const tree = round.tree;
  const spot = place(tree);
  const edges = [];
  const boxes = [];
  tree.texts.forEach((text, node) => {
    const kind = kindOf(round, node, decided);
    const at = spot.nodes[node];
    if (node > 0) {
      edges.push(svg("path", { class: `edge ${kind}`, d: curve(spot.nodes[tree.parents[node]], at) }));
    }
    const share = node === 0 ? "decided" : percent(tree.probabilities[node]);
    boxes.push(box(at, kind, text, share, node === 0 ? "the root" : about(tree, node, kind)));
  });
  const own = decided ? ownToken(round) : null;
  if (own) {
    const from = spot.nodes[spot.last];
    edges.unshift(svg("path", { class: `edge ${own.kind}`, d: curve(from, spot.bonus) }));
    const share = percent(tree.bonus_probability);
    boxes.push(box(spot.bonus, own.kind, own.text, share, `the target's own token, ${share}`));
  }
  edges.sort((a, b) => Number(a.matches(".accepted")) - Number(b.matches(".accepted")));
  return picture(sentence(round, decided), spot.width, spot.height, ...edges, ...boxes);
}

// The round in one sentence, for the title and for those who hear the picture.
export function sentence(round, decided = true) {
  const number = round.plain_reason === "prefill" ? "The prompt" : `Round ${round.round}`;
  if (round.plain_reason) {
    return `${number}: no tree, ${REASONS[round.plain_reason] ?? round.plain_reason}`;
  }
  if (!decided) return `${number}: ${round.num_drafted} nodes proposed`;
  const bonus = round.tokens.length > round.num_accepted ? " + 1 of its own" : "";
  return `${number}: ${round.num_accepted} accepted of ${round.num_drafted} drafted${bonus}`;
}

// The tree as lines, indented by depth.
export function outline(round, decided = true) {
  const { tree } = round;
  const depth = [0];
  const lines = tree.texts.map((text, node) => {
    if (node > 0) depth[node] = depth[tree.parents[node]] + 1;
    const kind = kindOf(round, node, decided);
    const share = node > 0 ? `, ${percent(tree.probabilities[node])}` : "";
    return `${"  ".repeat(depth[node])}${JSON.stringify(text)} ${kind}${share}`;
  });
  const own = decided ? ownToken(round) : null;
  if (own) lines.push(`${JSON.stringify(own.text)} ${own.kind}, the target's own token`);
  return lines.map((line) => html("li", {}, line));
}
