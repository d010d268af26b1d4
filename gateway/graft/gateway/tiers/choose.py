"""The tier with the most tokens a second, of all that a proposer has. Pure arithmetic.

Knows estimates; keeps nothing and knows no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from graft.common.tier import Tier
from graft.gateway.tiers.costs import Costs
from graft.gateway.tiers.grow import Node, best_nodes, expected_accepted
from graft.gateway.tiers.survival import MAX_DEPTH, MAX_WIDTH, Chances

MAX_NODES = 48
_LEAST_S = 1e-6


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
    seconds = max(_LEAST_S, curve[1] + costs.beside.get(0.0))
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
    level = _Level(tier.num_steps, tier.topk, tier.lookahead, tier.proposer, chances, costs)
    tokens, seconds = level.round(accepted, curve[num_nodes], curve[1])
    return Rated(tier, tokens / seconds, tokens, seconds)


class _Level:
    """What rounds of one depth, width and look-ahead have in common, whatever their nodes.

    A round has a tree, or is plain after the same wait.
    """

    __slots__ = ("_beside_s", "_costs", "_draft", "_drafting_s", "_lookahead", "_offered")

    def __init__(
        self,
        depth: int,
        topk: int,
        lookahead: int,
        proposer: str,
        chances: Chances,
        costs: Costs,
    ) -> None:
        self._costs = costs
        self._draft = costs.draft(proposer)
        self._drafting_s = self._draft.draft_s(depth, topk)
        self._lookahead = lookahead > 0
        self._offered = chances.offered
        self._beside_s = costs.beside.get(0.0)

    def round(self, accepted: float, tree_s: float, plain_s: float) -> tuple[float, float]:
        """Tokens and seconds of a round, of a tree that has `accepted` tokens on average."""
        offered = self._offered
        forward_s = offered * tree_s + (1.0 - offered) * plain_s
        wait_s = self._draft.wait_s(self._drafting_s, forward_s, lookahead=self._lookahead)
        if self._costs.too_late(wait_s):
            offered, forward_s, wait_s = 0.0, plain_s, self._costs.deadline_s
        seconds = max(_LEAST_S, wait_s + forward_s + self._beside_s)
        return 1.0 + offered * accepted, seconds


def best(
    offer: Offer, chances: Chances, costs: Costs, load: Load, most_s: float = math.inf
) -> Rated | None:
    """The best tier of a proposer: a level or a node is added only where that raises the rate.

    most_s: the longest round that is thought of. None when no tier is so quick.
    """
    max_nodes = min(offer.max_nodes, MAX_NODES)
    curve = costs.verify.curve(load.num_sessions, MAX_NODES, load.context)
    if curve is None or max_nodes < 2:
        return None
    found = (0.0, 0.0, 1.0)
    where = (0, 0, 0, 0)
    nodes = best_nodes(chances, offer.deepest, offer.widest, max_nodes - 1)
    for lookahead in sorted({0, offer.base.lookahead}):
        for width in _widths(offer.widest):
            falls = 0
            for depth in _depths(offer.deepest):
                if depth + 1 > max_nodes or falls == 2:
                    break
                level = _Level(depth, width, lookahead, offer.name, chances, costs)
                grown = _grown(level, nodes, depth, width, curve)
                if grown is None or grown[2] > most_s:
                    break
                rate_, tokens, seconds, count = grown
                if rate_ > found[0]:
                    found, falls = (rate_, tokens, seconds), 0
                    where = (depth, width, count, lookahead)
                else:
                    falls += 1
    if not where[0]:
        return None
    depth, width, count, lookahead = where
    return Rated(Tier(offer.name, depth, width, count, lookahead), *found)


def _grown(
    level: _Level, nodes: Sequence[Node], depth: int, width: int, curve: Sequence[float]
) -> tuple[float, float, float, int] | None:
    """Rate, tokens, seconds and nodes of a level's best tree; None when it has no such tree."""
    accepted, count = 0.0, 1
    found: tuple[float, float, float, int] | None = None
    for node in nodes:
        if node.depth > depth or node.width > width:
            continue
        accepted += node.chance
        count += 1
        if count <= depth or (width > 1 and count > 4 and count % 2):
            continue
        tokens, seconds = level.round(accepted, curve[count], curve[1])
        rate_ = tokens / seconds
        if found is not None and rate_ <= found[0]:
            break
        found = (rate_, tokens, seconds, count)
    return found


def _widths(widest: int) -> Sequence[int]:
    return [width for width in (1, 2, 4) if width <= widest] or [1]


def _depths(deepest: int) -> Sequence[int]:
    return [depth for depth in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16) if depth <= deepest]
