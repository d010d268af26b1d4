"""Reads the likely outcomes of a round from a wider tree. Knows scores; knows no model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from graft.common.tier import Tier
from graft.common.tree import HARD_MAX_NODES, FloatArray, Tree, from_parents
from graft.draft.mirror import Mirror
from graft.draft.proposers.base import Foreseen

_WIDTH = 8
_SPARE_NODES = 40
_STEP_LOG = -0.2
_RANK_LOG = -1.2
_MOST, _LEAST = 0.98, 1e-6
_PRIOR_STEPS = 4.0
_KEEP_SHARE = 0.98
_TIMELY_SHARE = 0.2
_LEAST_TIMELY = 0.05

MOST_LEAD = 8
"""Rounds that are told apart by how far they lie ahead."""


class Outcome(NamedTuple):
    """What rounds may commit: accepted tokens and the target's own, one after the other.

    log: of its probability. rounds: how many of them.
    """

    tokens: tuple[int, ...]
    log: float
    rounds: int = 1


def widened(tier: Tier) -> Tier:
    """The tier of a tree that also shows what may follow each node of a tree of `tier`."""
    return replace(
        tier,
        num_steps=min(tier.num_steps + 1, HARD_MAX_NODES - 1),
        topk=max(tier.topk, _WIDTH),
        num_draft_tokens=min(tier.num_draft_tokens + _SPARE_NODES, HARD_MAX_NODES),
    )


def tier_of_branch(tier: Tier, mirror: Mirror) -> Tier:
    """The tier of a tree that grows from a likely prefix, cut to what the session has room for."""
    return replace(tier, num_steps=max(0, min(tier.num_steps, mirror.room - 1)))


def split(wide: Tree | None, tier: Tier) -> Foreseen:
    """The most promising nodes of a wide tree, within `tier`, and the wide tree itself."""
    if wide is None:
        return Foreseen(None, None)
    scores = path_logs(wide)
    num_children = [0] * wide.num_nodes
    kept = {0}
    # A stable sort: of equal scores the earlier node, which is the parent or the better sibling.
    for node in np.argsort(-scores, kind="stable").tolist():
        parent = int(wide.parent[node])
        if node == 0 or len(kept) >= tier.num_draft_tokens or parent not in kept:
            continue
        if int(wide.depth[node]) <= tier.num_steps and num_children[parent] < tier.topk:
            kept.add(node)
            num_children[parent] += 1
    return Foreseen(_part(wide, sorted(kept), scores), wide)


class Trust:
    """What a drafter's foresight has been worth, over all its sessions.

    One factor for the odds of all its probabilities: a drafter that is nearly always accepted while
    it is unsure of every token is trusted more than it trusts itself, and one that is sure and
    wrong is trusted less. And how often trees came in time that were sent so many rounds ahead.
    """

    def __init__(self) -> None:
        self._said = self._seen = _PRIOR_STEPS / 2
        self._steps = _PRIOR_STEPS
        self._timely = [1.0] * (MOST_LEAD + 1)

    def in_time(self, lead: int) -> float:
        """The share of trees that verify had when their turn came, `lead` rounds after."""
        return self._timely[lead]

    def judge(self, lead: int, in_time: bool) -> None:
        """Takes whether a tree sent `lead` rounds ahead was there, in place."""
        timely = self._timely[lead] + _TIMELY_SHARE * (in_time - self._timely[lead])
        self._timely[lead] = max(_LEAST_TIMELY, timely)

    def add(self, prob: float, accepted: bool) -> None:
        """Takes the first child of a node that was accepted, in place."""
        self._said = _KEEP_SHARE * self._said + prob
        self._seen = _KEEP_SHARE * self._seen + accepted
        self._steps = _KEEP_SHARE * self._steps + 1.0

    def of(self, prob: float) -> float:
        """How likely a child of that probability is accepted."""
        said, seen = (min(0.97, max(0.03, part / self._steps)) for part in (self._said, self._seen))
        factor = seen / (1 - seen) * (1 - said) / said
        return factor * prob / (1 + (factor - 1) * prob)

    def learn(self, tree: Tree, tokens: Sequence[int]) -> None:
        """Takes what a round over `tree` has committed, in place."""
        logs, node = path_logs(tree), 0
        for token in tokens:
            first = int(tree.next_token[node])
            if first < 0:
                return
            found = _child(tree, node, token)
            self.add(math.exp(float(logs[first] - logs[node])), found == first)
            if found is None:
                return
            node = found


def outcomes(
    tree: Tree | None, wide: Tree, trust: Trust | None = None, late: bool = False
) -> list[Outcome]:
    """How a round over `tree` may end, going by `wide`; None is a round over the root alone.

    Every node of `wide` that is the target's own token after a node of `tree` is one. trust: in
    the probabilities of `wide`. late: the verify side goes on without waiting for `tree`, token by
    token, so that every path of it may be committed before it arrives.
    """
    trust = trust or Trust()
    logs = path_logs(wide)
    probs = [math.exp(float(logs[node] - logs[max(0, wide.parent[node])])) for node in _all(wide)]
    place: list[int | None] = [0]
    paths: list[tuple[int, ...]] = [()]
    reached = [0.0] * wide.num_nodes
    inside, outside = [0.0] * wide.num_nodes, [0.0] * wide.num_nodes
    ends: list[int] = []
    for node in range(1, wide.num_nodes):
        parent, token = int(wide.parent[node]), int(wide.tokens[node])
        paths.append((*paths[parent], token))
        above = place[parent]
        here = None if above is None or tree is None else _child(tree, above, token)
        place.append(here)
        if here is not None:
            share = min(trust.of(probs[node]), _MOST)
            inside[parent] += share
            reached[node] = reached[parent] + math.log(max(share, _LEAST))
        elif above is not None:
            outside[parent] += probs[node]
            ends.append(node)
    found = []
    for node in ends:
        parent = int(wide.parent[node])
        left = max(1.0 - inside[parent], 1.0 - _MOST)
        share = probs[node] / outside[parent] if outside[parent] else 1.0
        log = reached[parent] + math.log(left) + math.log(max(share, _LEAST))
        found.append(Outcome(paths[node], log, len(paths[node]) if late else 1))
    if late:
        found += [
            Outcome(paths[node], reached[node], len(paths[node]))
            for node in _all(wide)[1:]
            if place[node]
        ]
    return found


def _all(tree: Tree) -> range:
    return range(tree.num_nodes)


def path_logs(tree: Tree) -> FloatArray:
    """[num_nodes], float32: the tree's scores, or falling ones by depth and rank without any."""
    if tree.scores is not None:
        return tree.scores
    logs = np.zeros(tree.num_nodes, np.float32)
    for node in range(1, tree.num_nodes):
        before = int(tree.next_sibling[node - 1]) == node or int(tree.parent[node]) != node - 1
        rank = _rank(tree, node) if before else 0
        logs[node] = logs[int(tree.parent[node])] + _STEP_LOG + rank * _RANK_LOG
    return logs


def _rank(tree: Tree, node: int) -> int:
    return tree.children(int(tree.parent[node])).index(node)


def _child(tree: Tree, node: int, token: int) -> int | None:
    for child in tree.children(node):
        if int(tree.tokens[child]) == token:
            return child
    return None


def _part(tree: Tree, nodes: Sequence[int], scores: FloatArray) -> Tree | None:
    """The tree of some of the nodes, parents included, the likelier sibling first."""
    if len(nodes) == 1:
        return None
    order = sorted(nodes, key=lambda node: (int(tree.depth[node]), -float(scores[node]), node))
    place = {node: i for i, node in enumerate(order)}
    return from_parents(
        [int(tree.tokens[node]) for node in order],
        [-1, *(place[int(tree.parent[node])] for node in order[1:])],
        [float(scores[node]) for node in order],
    )
