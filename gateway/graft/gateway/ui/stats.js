// Counts over rounds. Pure functions.

export function depths(tree) {
  const found = [];
  tree.parents.forEach((parent, node) => {
    found[node] = parent < 0 ? 0 : found[parent] + 1;
  });
  return found;
}

// For each depth below the root: rounds whose tree was that deep, and those accepted so far.
export function acceptanceByDepth(rounds) {
  const offered = [];
  const accepted = [];
  for (const round of rounds) {
    const deepest = round.tree ? Math.max(...depths(round.tree)) : 0;
    for (let depth = 1; depth <= deepest; depth += 1) {
      offered[depth - 1] = (offered[depth - 1] ?? 0) + 1;
      accepted[depth - 1] = (accepted[depth - 1] ?? 0) + (round.num_accepted >= depth ? 1 : 0);
    }
  }
  return offered.map((count, place) => ({ depth: place + 1, offered: count,
    accepted: accepted[place] }));
}

export function totals(rounds) {
  const after = rounds.filter((round) => round.plain_reason !== "prefill");
  const sum = (list, of) => list.reduce((total, round) => total + of(round), 0);
  const tokens = sum(after, (round) => round.tokens.length);
  const drafted = sum(after, (round) => round.num_drafted);
  const accepted = sum(after, (round) => round.num_accepted);
  const seconds = rounds.length ? (rounds.at(-1).at_ms - rounds[0].at_ms) / 1000 : 0;
  return {
    tokens: sum(rounds, (round) => round.tokens.length),
    rounds: after.length,
    accepted,
    drafted,
    perRound: after.length ? tokens / after.length : 0,
    perSecond: seconds > 0 ? tokens / seconds : 0,
    reasons: reasons(after),
  };
}

function reasons(rounds) {
  const found = new Map();
  for (const round of rounds) {
    if (round.plain_reason) {
      found.set(round.plain_reason, (found.get(round.plain_reason) ?? 0) + 1);
    }
  }
  return found;
}

export const REASONS = {
  prefill: "the prompt's own pass",
  off: "speculation is off",
  no_drafter: "no drafter has joined",
  late: "no tree came in time",
  refused: "the tree was refused",
  empty: "the drafter had nothing to propose",
  no_room: "no room for a tree",
};

export function tierName(tier) {
  if (!tier) return "off";
  return `${tier.proposer} ${tier.num_steps}×${tier.topk}, ${tier.num_draft_tokens} nodes`;
}
