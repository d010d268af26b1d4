"""Makes trees of drafted nodes, without those that cannot be accepted. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graft.common.tree import Tree, from_parents


def pruned(
    root: int,
    vocab_size: int,
    tokens: Sequence[int],
    parents: Sequence[int],
    scores: Sequence[float],
) -> Tree | None:
    """The nodes under `root` as a tree; None when none is left.

    A node without a chance, or without a meaning to the target, goes with all below it.

    Shapes:
        tokens, parents, scores: [nodes], parents first; parents count the root as node 0, scores
            are logs of the probability of the whole path.
    """
    if tokens and max(tokens) < vocab_size and min(scores) > -np.inf:
        return from_parents([root, *tokens], [-1, *parents], [0.0, *(min(0.0, s) for s in scores)])
    place = {0: 0}
    path, above, kept = [root], [-1], [0.0]
    for node, (token, score) in enumerate(zip(tokens, scores, strict=True), 1):
        parent = place.get(parents[node - 1])
        if parent is None or token >= vocab_size or score == -np.inf:
            continue
        place[node] = len(path)
        path.append(token)
        above.append(parent)
        kept.append(min(0.0, score))
    return from_parents(path, above, kept) if len(path) > 1 else None


def pruned_chain(
    root: int, vocab_size: int, tokens: Sequence[int], logs: Sequence[float]
) -> Tree | None:
    """As `pruned`, for one path; logs: [nodes], each of its own node."""
    scores = np.cumsum(logs, dtype=np.float64).tolist()
    return pruned(root, vocab_size, tokens, range(len(tokens)), scores)
