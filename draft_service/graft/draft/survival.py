"""How far a match can be trusted: the share of next tokens that came true, by length of match.

It puts trees of matched text and of models on one scale: the log-probability of a path. Knows
counts and trees; knows no proposer.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from graft.common.tree import Tree

_LENGTHS = (1, 2, 3, 4, 6, 9, 16)
_PRIOR = (0.25, 0.4, 0.55, 0.65, 0.78, 0.88, 0.95)
_PRIOR_TRIALS = 8.0
_KEEP_SHARE = 0.99


class Survival:
    """Learns from verified text; begins with what is usual for chat."""

    def __init__(self) -> None:
        self._hits = [share * _PRIOR_TRIALS for share in _PRIOR]
        self._trials = [_PRIOR_TRIALS] * len(_LENGTHS)

    def at(self, length: int) -> float:
        """The share of next tokens that come true after a match of `length` tokens."""
        place = _bucket(length)
        return self._hits[place] / self._trials[place]

    def add(self, length: int, came_true: bool) -> None:
        """Takes one next token, in place."""
        place = _bucket(length)
        self._hits[place] = _KEEP_SHARE * self._hits[place] + came_true
        self._trials[place] = _KEEP_SHARE * self._trials[place] + 1.0

    def scored(self, tree: Tree, length: int) -> Tree:
        """The tree with its scores, of shares among what was seen, brought to the common scale."""
        logs = np.zeros(tree.max_depth + 1)
        for depth in range(1, len(logs)):
            share = min(self.at(length + depth - 1), 0.999)
            logs[depth] = logs[depth - 1] + math.log(max(share, 1e-4))
        shares = np.zeros(tree.num_nodes) if tree.scores is None else tree.scores
        return replace(tree, scores=(shares + logs[tree.depth]).astype(np.float32))


def _bucket(length: int) -> int:
    return sum(length >= limit for limit in _LENGTHS[1:])
