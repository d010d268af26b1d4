"""Folds trees of several sources into one under one budget. Knows scores; knows no proposer."""

from __future__ import annotations

from collections.abc import Sequence

from graft.common.tier import Tier
from graft.common.tree import Tree, from_parents
from graft.draft.foresee import path_logs, split


def merged(trees: Sequence[Tree | None], tier: Tier) -> Tree | None:
    """The best nodes of all trees, which have one root; equal paths are one node.

    A path that several sources propose has the best of their scores.
    """
    found = [tree for tree in trees if tree is not None]
    if not found:
        return None
    return split(union(found), tier).tree


def union(trees: Sequence[Tree]) -> Tree:
    """All paths of all trees."""
    tokens, parents, scores = [int(trees[0].tokens[0])], [-1], [0.0]
    children: list[dict[int, int]] = [{}]
    for tree in trees:
        logs = path_logs(tree)
        place = [0] * tree.num_nodes
        for node in range(1, tree.num_nodes):
            parent, token = place[int(tree.parent[node])], int(tree.tokens[node])
            known = children[parent].get(token)
            if known is None:
                known = len(tokens)
                children[parent][token] = known
                tokens.append(token)
                parents.append(parent)
                scores.append(float(logs[node]))
                children.append({})
            scores[known] = max(scores[known], float(logs[node]))
            place[node] = known
    return from_parents(tokens, parents, scores)
