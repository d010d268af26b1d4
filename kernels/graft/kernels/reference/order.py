"""Exact conversion between the level-major order of the field and our preorder.

A conversion keeps the permutation, so accepted nodes, scores and rows can be carried both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from graft.common.tree import IntArray, Tree, from_parents


class Reordered(NamedTuple):
    """A tree in another order of nodes.

    tokens, parents: [num_nodes], int32, in the new order; parents[0] is -1.
    order: [num_nodes], int32: order[i] is the old index of new node i.
    """

    tokens: IntArray
    parents: IntArray
    order: IntArray


def preorder(tokens: Sequence[int], parents: Sequence[int]) -> tuple[Tree, IntArray]:
    """The preorder tree of nodes in any order with parents first, and the order it takes them in.

    Raises:
        TreeRefused: MALFORMED, as `graft.common.tree.from_parents`.
    """
    numbered = from_parents(range(len(tokens)), parents)
    order = numbered.tokens
    return from_parents(tokens, parents), order


def level_major(tree: Tree) -> Reordered:
    """The nodes level by level; inside a level in preorder, so siblings stay best first."""
    order = np.asarray(
        sorted(range(tree.num_nodes), key=lambda node: (int(tree.depth[node]), node)), np.int32
    )
    place = {int(node): i for i, node in enumerate(order)}
    parents = [-1 if node == 0 else place[int(tree.parent[node])] for node in order]
    return Reordered(tree.tokens[order], np.asarray(parents, np.int32), order)
