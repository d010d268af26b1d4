"""The tier with the most tokens a second, of all that a proposer has. Pure arithmetic.

Knows estimates; keeps nothing and knows no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graft.common.tier import Tier
from graft.gateway.tiers.costs import Costs
from graft.gateway.tiers.grow import best_nodes, expected_accepted
from graft.gateway.tiers.survival import MAX_DEPTH, MAX_WIDTH, Chances

MAX_NODES = 48


@dataclass(frozen=True, slots=True)
class Offer:
    """What a proposer can do: its default tier and its limits. nodes count the root."""

    base: Tier
    max_nodes: int
    max_depth: int

    @property
    def name(self) -> str:
        """The proposer's name."""
        return self.base.proposer

    @property
    def widest(self) -> int:
        """The greatest width worth a thought: trees only where the default is a tree."""
        return 1 if self.base.topk == 1 else min(MAX_WIDTH, max(self.base.topk, 2))

    @property
    def deepest(self) -> int:
        """The greatest depth worth a thought."""
        return min(self.max_depth, MAX_DEPTH, max(2 * self.base.num_steps, 8))


@dataclass(frozen=True, slots=True)
class Load:
    """What a session's rounds share a step with: sessions in it, and the session's length."""

    num_sessions: int
    context: int


@dataclass(frozen=True, slots=True)
class Rated:
    """A tier and what is expected of it, in tokens a second of one session."""

    tier: Tier
    rate: float
    tokens: float
    seconds: float


def plain(costs: Costs, load: Load) -> Rated | None:
    """Decoding without drafts; None while nothing is known of verify."""
    curve = costs.verify.curve(load.num_sessions, MAX_NODES, load.context)
    if curve is None:
        return None
    seconds = curve[1] + costs.beside.get(0.0)
    return Rated(Tier(), 1.0 / seconds, 1.0, seconds)


def rate(tier: Tier, chances: Chances, costs: Costs, load: Load) -> Rated | None:
    """A tier as it is, when every session of the step would do the same."""
    if tier.off:
        return plain(costs, load)
    curve = costs.verify.curve(load.num_sessions, MAX_NODES, load.context)
    if curve is None:
        return None
    nodes = best_nodes(chances, tier.num_steps, tier.topk, tier.num_draft_tokens - 1)
    accepted = expected_accepted(nodes, tier.num_steps, tier.topk, tier.num_draft_tokens - 1)
    num_nodes = min(tier.num_draft_tokens, len(nodes) + 1, MAX_NODES)
    return _rated(tier, accepted, num_nodes, chances, costs, curve)


def _rated(
    tier: Tier,
    accepted: float,
    num_nodes: int,
    chances: Chances,
    costs: Costs,
    curve: Sequence[float],
) -> Rated:
    """A tree round where there is a tree, a plain one after the same wait where there is none."""
    offered = 0.0 if costs.too_late(tier) else chances.offered
    tokens = 1.0 + offered * accepted
    forward_s = offered * curve[num_nodes] + (1.0 - offered) * curve[1]
    wait_s = costs.draft(tier.proposer).wait_s(tier, forward_s)
    seconds = min(wait_s, costs.deadline_s) + forward_s + costs.beside.get(0.0)
    return Rated(tier, tokens / seconds, tokens, seconds)


def best(offer: Offer, chances: Chances, costs: Costs, load: Load) -> Rated | None:
    """The best tier of a proposer: a level or a node is added only where that raises the rate."""
    max_nodes = min(offer.max_nodes, MAX_NODES)
    curve = costs.verify.curve(load.num_sessions, MAX_NODES, load.context)
    if curve is None or max_nodes < 2:
        return None
    found: Rated | None = None
    nodes = best_nodes(chances, offer.deepest, offer.widest, max_nodes - 1)
    for lookahead in sorted({0, offer.base.lookahead}):
        for width in _widths(offer.widest):
            falls = 0
            for depth in _depths(offer.deepest):
                if depth + 1 > max_nodes:
                    break
                tier = Tier(offer.name, depth, width, depth + 1, lookahead)
                level: Rated | None = None
                accepted, count = 0.0, 1
                for node in nodes:
                    if node.depth > depth or node.width > width:
                        continue
                    accepted += node.chance
                    count += 1
                    if count < depth + 1 or (width > 1 and count > 4 and count % 2):
                        continue
                    grown = _rated(tier, accepted, count, chances, costs, curve)
                    if level is not None and grown.rate <= level.rate:
                        break
                    level = replace(grown, tier=replace(tier, num_draft_tokens=count))
                if level is None:
                    break
                if found is None or level.rate > found.rate:
                    found, falls = level, 0
                else:
                    falls += 1
                    if falls == 2:
                        break
    return found


def _widths(widest: int) -> Sequence[int]:
    return [width for width in (1, 2, 4) if width <= widest] or [1]


def _depths(deepest: int) -> Sequence[int]:
    return [depth for depth in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16) if depth <= deepest]
