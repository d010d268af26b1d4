"""Candidate trees as preorder arrays. Knows shapes and tokens; knows no model and no wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graft.common.errors import GraftError
from graft.v1.error_reason_pb2 import ErrorReason
from graft.v1.tree_pb2 import TreeRefusal

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

HARD_MAX_NODES = 1024


class TreeRefused(GraftError):
    """A tree that may not be used; `refusal` is the typed reason that goes on the wire."""

    reason = ErrorReason.ERROR_REASON_INVALID_ARGUMENT

    def __init__(self, refusal: TreeRefusal.ValueType, message: str) -> None:
        super().__init__(message, field="tree")
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """What two peers agreed a tree may hold. `max_nodes` counts the root, `max_depth` does not."""

    max_nodes: int
    max_depth: int
    vocab_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """One candidate tree in depth-first preorder, best child first; node 0 is the root.

    All arrays are [num_nodes], int32; -1 is none.

        tokens: node's token; tokens[0] is the last committed token.
        next_token: first child, which in preorder is i + 1 (the field's retrive_next_token).
        next_sibling: next child of the same parent (the field's retrive_next_sibling).
        parent, depth: parent node, and number of edges to the root.
        scores: [num_nodes], float32, log-probability of each path, or None. scores[0] is 0.

    Source:
        docs/decisions/0002; encoding of SGLang's build_tree (reference section 1.4) in preorder.
    """

    tokens: IntArray
    next_token: IntArray
    next_sibling: IntArray
    parent: IntArray
    depth: IntArray
    scores: FloatArray | None = None

    @property
    def num_nodes(self) -> int:
        """Number of nodes, root included."""
        return len(self.tokens)

    @property
    def max_depth(self) -> int:
        """Greatest depth; 0 for a root alone."""
        return int(max(self.depth.tolist()))

    def positions(self, prefix_length: int) -> IntArray:
        """[num_nodes], int32: absolute position of each node; the root has prefix_length - 1."""
        return self.depth + np.int32(prefix_length - 1)

    def retrive_index(self, row: int = 0) -> IntArray:
        """[num_nodes], int32: row of each node when this tree starts at `row` of a flat batch."""
        return np.arange(row, row + self.num_nodes, dtype=np.int32)

    def ancestors(self, node: int) -> list[int]:
        """Nodes from the root down to `node` itself."""
        path = []
        while node >= 0:
            path.append(node)
            node = int(self.parent[node])
        return path[::-1]

    def children(self, node: int) -> list[int]:
        """Children of `node`, best first."""
        found = []
        child = int(self.next_token[node])
        while child >= 0:
            found.append(child)
            child = int(self.next_sibling[child])
        return found


def root_only(token: int) -> Tree:
    """A tree of the root alone: plain decoding."""
    none = np.full(1, -1, np.int32)
    return Tree(
        tokens=np.array([token], np.int32),
        next_token=none,
        next_sibling=none.copy(),
        parent=none.copy(),
        depth=np.zeros(1, np.int32),
    )


def chain(tokens: Sequence[int]) -> Tree:
    """A chain; tokens[0] is the root."""
    return from_parents(tokens, range(-1, len(tokens) - 1))


def from_parents(
    tokens: Sequence[int],
    parents: Sequence[int],
    scores: Sequence[float] | None = None,
) -> Tree:
    """A preorder tree from nodes in any order that puts parents before children.

    Children of a node keep their given order. `scores` travel with their nodes.

    Raises:
        TreeRefused: MALFORMED, when node 0 is not the only root or a parent does not precede its
            child; BAD_SCORES, when a score is NaN.
    """
    num_nodes = len(tokens)
    if num_nodes == 0 or len(parents) != num_nodes or parents[0] != -1:
        raise TreeRefused(
            TreeRefusal.TREE_REFUSAL_MALFORMED, "node 0 must be the root, with parent -1"
        )
    if scores is not None and any(score != score for score in scores):
        raise TreeRefused(TreeRefusal.TREE_REFUSAL_BAD_SCORES, "a score is NaN")
    children: list[list[int]] = [[] for _ in range(num_nodes)]
    for node in range(1, num_nodes):
        parent = parents[node]
        if not 0 <= parent < node:
            raise TreeRefused(
                TreeRefusal.TREE_REFUSAL_MALFORMED,
                f"node {node} has parent {parent}, expected one of 0..{node - 1}",
            )
        children[parent].append(node)
    order: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children[node]))
    place = {node: i for i, node in enumerate(order)}
    next_token, next_sibling, parent_of = ([-1] * num_nodes for _ in range(3))
    depth = [0] * num_nodes
    for i, node in enumerate(order):
        before = -1
        for child in children[node]:
            j = place[child]
            parent_of[j] = i
            depth[j] = depth[i] + 1
            if before < 0:
                next_token[i] = j
            else:
                next_sibling[before] = j
            before = j
    # One array for all five: calls of numpy are what this costs.
    named = [tokens[node] for node in order]
    lines = np.array((named, next_token, next_sibling, parent_of, depth), np.int32)
    return Tree(
        tokens=lines[0],
        next_token=lines[1],
        next_sibling=lines[2],
        parent=lines[3],
        depth=lines[4],
        scores=None if scores is None else np.array([scores[node] for node in order], np.float32),
    )


def check(tree: Tree, limits: TreeLimits) -> None:
    """Refuses a well-formed tree that breaks the agreed limits or repeats a token among siblings.

    Raises:
        TreeRefused: TOO_MANY_NODES, TOO_DEEP, TOKEN_RANGE or DUPLICATE_SIBLING.
    """
    if tree.num_nodes > limits.max_nodes:
        raise TreeRefused(
            TreeRefusal.TREE_REFUSAL_TOO_MANY_NODES,
            f"tree has {tree.num_nodes} nodes, limit is {limits.max_nodes}",
        )
    if tree.max_depth > limits.max_depth:
        raise TreeRefused(
            TreeRefusal.TREE_REFUSAL_TOO_DEEP,
            f"tree is {tree.max_depth} deep, limit is {limits.max_depth}",
        )
    # A tree is a few numbers: lists are faster than calls of numpy.
    drafted = tree.tokens[1:].tolist()
    if drafted and not 0 <= min(drafted) <= max(drafted) < limits.vocab_size:
        raise TreeRefused(
            TreeRefusal.TREE_REFUSAL_TOKEN_RANGE,
            f"a token is outside 0..{limits.vocab_size - 1}",
        )
    if len({*zip(tree.parent[1:].tolist(), drafted, strict=True)}) != len(drafted):
        raise TreeRefused(
            TreeRefusal.TREE_REFUSAL_DUPLICATE_SIBLING, "two children of one node hold one token"
        )


def trim(tree: Tree, max_nodes: int, max_depth: int) -> Tree:
    """The tree without nodes deeper than `max_depth`, cut to `max_nodes` from the end of preorder.

    Preorder puts the best path first, and a prefix of preorder is ancestor-closed.
    """
    if tree.num_nodes <= max_nodes and tree.max_depth <= max_depth:
        return tree
    keep = np.flatnonzero(tree.depth <= max_depth)[:max_nodes]
    place = {int(node): i for i, node in enumerate(keep)}
    parents = [-1] + [place[int(tree.parent[node])] for node in keep[1:]]
    scores = None if tree.scores is None else tree.scores[keep].tolist()
    return from_parents(tree.tokens[keep].tolist(), parents, scores)
