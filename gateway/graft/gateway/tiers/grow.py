"""Trees worth their rows: expected accepted tokens of the best tree of every size.

Knows chances; knows no cost and no proposer.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from graft.gateway.tiers.survival import MAX_WIDTH, Chances


@dataclass(frozen=True, slots=True)
class Node:
    """A drafted node of the best tree: its chance to be accepted, its depth and its path's width.

    width: the greatest rank on the path from the root, counted from 1.
    """

    chance: float
    depth: int
    width: int


def best_nodes(chances: Chances, max_depth: int, max_width: int, max_nodes: int) -> list[Node]:
    """Drafted nodes, best first. Those within a depth and a width are the best tree of these.

    A node never stands before its parent, since no chance exceeds 1.
    """
    depth_limit = min(max_depth, len(chances.first))
    if depth_limit < 1:
        return []
    width_limit = min(max_width, MAX_WIDTH)
    if width_limit == 1:
        nodes, chance = [], 1.0
        for depth in range(1, min(depth_limit, max_nodes) + 1):
            chance *= chances.first[depth - 1]
            nodes.append(Node(chance, depth, 1))
        return nodes
    levels = [_by_rank(first, chances.hazards, width_limit) for first in chances.first]
    heap = [(-levels[0][0], 1, 0, 1, 1.0)]
    nodes = []
    while heap and len(nodes) < max_nodes:
        negative, depth, rank, width, above = heapq.heappop(heap)
        nodes.append(Node(-negative, depth, width))
        if depth < depth_limit:
            heapq.heappush(heap, (negative * levels[depth][0], depth + 1, 0, width, -negative))
        if rank + 1 < width_limit:
            chance = above * levels[depth - 1][rank + 1]
            heapq.heappush(heap, (-chance, depth, rank + 1, max(width, rank + 2), above))
    return nodes


def _by_rank(first: float, hazards: Sequence[float], width: int) -> list[float]:
    """Chance of each child of an accepted node; none is thought likelier than the one before."""
    chances, left = [first], 1.0 - first
    for rank in range(1, width):
        chances.append(min(chances[-1], left * hazards[rank]))
        left *= 1.0 - hazards[rank]
    return chances


def expected_accepted(nodes: list[Node], depth: int, width: int, num_drafted: int) -> float:
    """Accepted tokens of the best tree within a depth, a width and a number of drafted nodes."""
    total, count = 0.0, 0
    for node in nodes:
        if node.depth <= depth and node.width <= width:
            total += node.chance
            count += 1
            if count == num_drafted:
                break
    return total
