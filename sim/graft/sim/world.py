"""The simulated services: what a round costs and what of a tree the target accepts.

The truth that policies have to find out. Knows no policy; a policy is never given this module's
objects, only the rounds that a gateway would see.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from graft.common.tier import Tier

FP32_MS = ((1, 24.1), (4, 21.7), (8, 21.9), (16, 25.8), (32, 49.8))
Q4_MS = ((1, 5.1), (4, 6.1), (8, 9.6), (16, 16.4), (32, 31.4))
DEADLINE_S = 0.05
BESIDE_S = 0.0008
EFFECTS = (0.75, 0.87, 1.0, 1.15, 1.35)
_DRAFT_STEP = 0.08
_DRAFT_OVERHEAD_S = 0.001
_DRAFT_BATCH = 0.1


@dataclass(frozen=True, slots=True)
class Machine:
    """A verify service: forward time by rows, as measured."""

    name: str
    measured: tuple[tuple[int, float], ...]

    def forward_s(self, rows: int) -> float:
        """Seconds of a forward over so many rows; straight lines between what was measured."""
        return _line(self.measured, rows) / 1e3


@cache
def _line(points: tuple[tuple[int, float], ...], at: int) -> float:
    place = next((i for i, (rows, _) in enumerate(points) if at <= rows), len(points) - 1)
    (low, low_y), (high, high_y) = points[max(1, place) - 1 : max(1, place) + 1]
    return low_y + (high_y - low_y) * (at - low) / (high - low)


FP32 = Machine("fp32", FP32_MS)
Q4 = Machine("q4_1", Q4_MS)


@dataclass(frozen=True, slots=True)
class Skill:
    """How often a proposer is right on a class of prompts.

    first: chance of its first guess at depth 1, 2, ..; the last one holds for all deeper ones.
    second: chance of its second guess when the first is wrong, and so on.
    offered: share of rounds for which it has a tree.
    """

    first: tuple[float, ...]
    second: tuple[float, ...] = (0.35, 0.2, 0.15)
    offered: float = 1.0

    def by_rank(self, depth: int, effect: float) -> list[float]:
        """Chance of each child of an accepted node at a depth, for a session of this effect."""
        chance = self.first[min(depth, len(self.first)) - 1] ** effect
        chances, left = [chance], 1.0 - chance
        for hazard in self.second:
            chances.append(left * hazard)
            left *= 1.0 - hazard
        return chances


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of time in which nothing changes but luck."""

    seconds: float
    skills: Mapping[str, Skill]
    rtt_s: float = 0.0005
    num_sessions: int = 1
    slow: float = 1.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Phases one after another on a machine, with the proposers there are; the first is default."""

    name: str
    kind: str
    machine: Machine
    phases: tuple[Phase, ...]
    bases: tuple[Tier, ...]
    fixed: tuple[Tier, ...]

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return sum(phase.seconds for phase in self.phases)


@dataclass(frozen=True, slots=True)
class Shape:
    """The tree that a drafter grows for a tier: children of each node by rank, and its depth.

    expected: accepted tokens on average.
    """

    children: tuple[tuple[int, ...], ...]
    by_rank: tuple[tuple[float, ...], ...]
    depth: int
    expected: float

    def walk(self, uniforms: Sequence[float]) -> tuple[tuple[int, ...], int]:
        """One outcome: ranks of the accepted nodes, and the last one's children that were wrong."""
        node = 0
        ranks: list[int] = []
        for depth, uniform in enumerate(uniforms):
            kids = self.children[node]
            if not kids:
                return tuple(ranks), 0
            rank = 0
            for chance in self.by_rank[depth][: len(kids)]:
                if uniform < chance:
                    break
                uniform -= chance
                rank += 1
            if rank == len(kids):
                return tuple(ranks), rank
            ranks.append(rank)
            node = kids[rank]
        return tuple(ranks), len(self.children[node])


@cache
def grow(skill: Skill, effect: float, tier: Tier) -> Shape:
    """Best-first by the drafter's own chances, within the tier."""
    levels = [skill.by_rank(depth, effect)[: tier.topk] for depth in range(1, tier.num_steps + 1)]
    children: list[list[int]] = [[]]
    depths, expected = [0], 0.0
    heap: list[tuple[float, int, int]] = [(-levels[0][0], 0, 0)] if levels else []
    above = [1.0]
    while heap and len(children) < tier.num_draft_tokens:
        negative, parent, rank = heapq.heappop(heap)
        node, depth = len(children), depths[parent] + 1
        children[parent].append(node)
        children.append([])
        depths.append(depth)
        above.append(-negative)
        expected -= negative
        if depth < tier.num_steps:
            heapq.heappush(heap, (negative * levels[depth][0], node, 0))
        if rank + 1 < len(levels[depth - 1]):
            heapq.heappush(heap, (-above[parent] * levels[depth - 1][rank + 1], parent, rank + 1))
    return Shape(tuple(map(tuple, children)), tuple(map(tuple, levels)), max(depths), expected)


@dataclass(frozen=True, slots=True)
class Cost:
    """Mean seconds of a round at a tier: drafting, the wire, and the forward with and without."""

    draft_s: float
    wire_s: float
    tree_s: float
    plain_s: float

    @property
    def late(self) -> bool:
        """True when the tree is there only after the deadline."""
        return self.draft_s + self.wire_s > DEADLINE_S


def cost(workload: Workload, phase: Phase, tier: Tier, num_nodes: int) -> Cost:
    """What a round costs when all sessions of the phase run it alike."""
    machine, batch = workload.machine, phase.num_sessions
    plain_s = machine.forward_s(batch) + BESIDE_S
    if tier.off:
        return Cost(0.0, 0.0, plain_s, plain_s)
    model = not tier.proposer.startswith("ngram")
    step_s = _DRAFT_STEP * machine.forward_s(1) * (1 + _DRAFT_BATCH * (batch - 1))
    steps = tier.num_steps * (1 + 0.1 * (tier.topk - 1)) if model else 0.0
    draft_s = (_DRAFT_OVERHEAD_S * (1.0 if model else 0.1) + step_s * steps) * phase.slow
    tree_s = machine.forward_s(batch * num_nodes) + BESIDE_S
    return Cost(draft_s, phase.rtt_s, tree_s, plain_s)


def mean_rate(workload: Workload, phase: Phase, effect: float, tier: Tier) -> float:
    """Tokens a second of one session at a fixed tier; late trees cost nothing but themselves."""
    if tier.off:
        return 1.0 / cost(workload, phase, tier, 1).plain_s
    skill = phase.skills[tier.proposer]
    shape = grow(skill, effect, tier)
    priced = cost(workload, phase, tier, len(shape.children))
    if priced.late:
        return 1.0 / priced.plain_s
    tokens = 1.0 + skill.offered * shape.expected
    seconds = priced.draft_s + priced.wire_s
    seconds += skill.offered * priced.tree_s + (1 - skill.offered) * priced.plain_s
    return tokens / seconds


def effect_of(uniform: float) -> float:
    """The effect of a session: sessions of one class are not all alike."""
    return EFFECTS[min(int(uniform * len(EFFECTS)), len(EFFECTS) - 1)]
