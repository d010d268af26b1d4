"""Reads the likely outcomes of a round from a wider tree. Knows scores; knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from graft.common.tier import Tier
from graft.common.tree import HARD_MAX_NODES, FloatArray, Tree, from_parents
from graft.draft.mirror import Mirror
from graft.draft.proposers.base import Foreseen

_WIDTH = 4
_SPARE_NODES = 24
_STEP_LOG = -0.2
_RANK_LOG = -1.2


class Outcome(NamedTuple):
    """What a round may commit: accepted tokens and the target's own. log: of its probability."""

    tokens: tuple[int, ...]
    log: float


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


def outcomes(tree: Tree | None, wide: Tree, adrift: bool = False) -> list[Outcome]:
    """How a round over `tree` may end, going by `wide`; None is a round over the root alone.

    Every node of `wide` that is the target's own token after a node of `tree` is one. adrift: the
    verify side goes on without waiting for `tree`, so that every path of it may be committed
    before it arrives.
    """
    scores = path_logs(wide)
    place: list[int | None] = [0]
    paths: list[tuple[int, ...]] = [()]
    found: list[Outcome] = []
    for node in range(1, wide.num_nodes):
        parent, token = int(wide.parent[node]), int(wide.tokens[node])
        paths.append((*paths[parent], token))
        above = place[parent]
        here = None if above is None or tree is None else _child(tree, above, token)
        place.append(here)
        if adrift or (above is not None and here is None):
            found.append(Outcome(paths[node], float(scores[node])))
    return found


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
