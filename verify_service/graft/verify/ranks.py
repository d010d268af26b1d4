"""Where an accepted path lay among the drafter's guesses. Knows one tree; keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from graft.common.tree import Tree


def ranks(tree: Tree, path: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Places of a path's nodes among their siblings, and the children of its last node.

    path: nodes in order, the root first; siblings stand best first in preorder.
    """
    places = []
    for parent, node in pairwise(path):
        sibling, place = parent + 1, 0
        while sibling != node:
            sibling, place = int(tree.next_sibling[sibling]), place + 1
        places.append(place)
    return tuple(places), len(tree.children(path[-1])) if path else 0
