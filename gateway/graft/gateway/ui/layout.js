// Where the nodes of a tree stand. Pure: columns in, places out.

import { depths } from "./stats.js";

export const NODE = { width: 92, height: 34, gapX: 24, gapY: 8, margin: 12 };

// Depth runs to the right; the first child stands in its parent's row, so that the drafter's best
// path is a straight line. The target's own token is one more child of the last accepted node.
export function place(tree) {
  const depth = depths(tree);
  const last = tree.accepted.length ? tree.accepted.at(-1) : 0;
  const children = tree.parents.map(() => []);
  tree.parents.forEach((parent, node) => {
    if (parent >= 0) children[parent].push(node);
  });
  const rows = [];
  let next = 0;
  let bonusRow = 0;
  const visit = (node, row) => {
    rows[node] = row;
    let taken = false;
    for (const child of children[node]) {
      visit(child, taken ? next : row);
      taken = true;
    }
    if (node === last) {
      bonusRow = taken ? next : row;
      taken = true;
      next = Math.max(next, bonusRow + 1);
    }
    next = Math.max(next, row + 1);
  };
  visit(0, 0);
  const at = (column, row) => ({
    x: NODE.margin + column * (NODE.width + NODE.gapX),
    y: NODE.margin + row * (NODE.height + NODE.gapY),
  });
  const columns = Math.max(...depth, depth[last] + 1) + 1;
  return {
    nodes: rows.map((row, node) => at(depth[node], row)),
    bonus: at(depth[last] + 1, bonusRow),
    last,
    width: 2 * NODE.margin + columns * (NODE.width + NODE.gapX) - NODE.gapX,
    height: 2 * NODE.margin + next * (NODE.height + NODE.gapY) - NODE.gapY,
  };
}

// A curve from the right side of one node to the left side of another.
export function curve(from, to) {
  const [x1, y1] = [from.x + NODE.width, from.y + NODE.height / 2];
  const [x2, y2] = [to.x, to.y + NODE.height / 2];
  const middle = (x1 + x2) / 2;
  return `M${x1} ${y1} C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
}
