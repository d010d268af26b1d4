"""Best-first trees from candidates that do not depend on the path. Knows no model.

Source: UNO's tree mode; reference section 7.4, golden T8.
"""

from __future__ import annotations

import heapq

import numpy as np
import torch
from torch import Tensor

from graft.kernels.trees import UnoTrees


def build_uno_trees(depth_tokens: Tensor, depth_probs: Tensor, num_nodes: int) -> UnoTrees:
    """Adds the heaviest unused (parent, rank) until a tree has `num_nodes`, the root included.

    Ties: larger mass, then shallower depth, lower rank, lower token, lower parent.

    Shapes:
        depth_tokens: [batch, F - 1, K], int64: depth d + 1 offers depth_tokens[:, d].
        depth_probs: the same shape, float32, falling along K.
    Raises:
        ValueError: the candidates hold fewer than `num_nodes` nodes, or a probability is NaN.
    """
    if bool(torch.isnan(depth_probs).any()):
        raise ValueError("a candidate's probability is NaN")
    grown = [
        _grow(depth_tokens[b].numpy(), depth_probs[b].numpy(), num_nodes)
        for b in range(len(depth_tokens))
    ]
    tokens, slots, masses, parents = (list(column) for column in zip(*grown, strict=True))
    slot_rows = torch.tensor(slots, dtype=torch.int64).reshape(len(grown), num_nodes - 1)
    parent_list = torch.full_like(slot_rows, -1)
    parent_list[:, 1:] = slot_rows[:, :-1]
    return UnoTrees(
        draft_tokens=torch.tensor(tokens, dtype=torch.int64).reshape(slot_rows.shape),
        top_scores_index=slot_rows,
        parent_list=parent_list,
        masses=torch.tensor(masses, dtype=torch.float32).reshape(slot_rows.shape),
        parent=torch.tensor(parents, dtype=torch.int64),
    )


def _grow(
    tokens: np.ndarray[tuple[int, int], np.dtype[np.int64]],
    probs: np.ndarray[tuple[int, int], np.dtype[np.float32]],
    num_nodes: int,
) -> tuple[list[int], list[int], list[float], list[int]]:
    levels, topk = tokens.shape
    heap: list[tuple[float, int, int, int, int]] = []

    def offer(parent: int, depth: int, mass: np.float32) -> None:
        for rank in range(topk if depth < levels else 0):
            child_mass = np.float32(mass * probs[depth, rank])
            entry = (-float(child_mass), depth + 1, rank, int(tokens[depth, rank]), parent)
            heapq.heappush(heap, entry)

    offer(0, 0, np.float32(1))
    drafted: list[int] = []
    slots: list[int] = []
    masses: list[float] = []
    parents = [-1]
    while len(parents) < num_nodes:
        if not heap:
            raise ValueError(f"the candidates hold {len(parents)} nodes, expected {num_nodes}")
        negative_mass, depth, rank, token, parent = heapq.heappop(heap)
        node = len(parents)
        drafted.append(token)
        slots.append(parent * topk + rank)
        masses.append(-negative_mass)
        parents.append(parent)
        offer(node, depth, np.float32(-negative_mass))
    return drafted, slots, masses, parents
