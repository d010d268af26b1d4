"""Best-first trees from candidates that do not depend on the path, level by level.

The heaviest nodes of the whole tree are among the heaviest of each level, and a parent never comes
after its child, so a loop over levels finds what a heap finds. Meaning: reference.uno.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from graft.kernels.trees import UnoTrees


def build_uno_trees(depth_tokens: Tensor, depth_probs: Tensor, num_nodes: int) -> UnoTrees:
    """Adds the heaviest unused (parent, rank) until a tree has `num_nodes`; as the reference.

    Raises:
        ValueError: the candidates hold fewer than `num_nodes` nodes, or a probability is NaN.
    """
    if bool(torch.isnan(depth_probs).any()):
        raise ValueError("a candidate's probability is NaN")
    tokens, probs = depth_tokens.numpy(), depth_probs.numpy()
    batch, levels, topk = tokens.shape
    wanted = num_nodes - 1
    # Of every level: mass, token, rank and the parent's place in the level above.
    beam = np.ones((batch, 1), np.float32)
    kept: list[tuple[np.ndarray, ...]] = []
    for level in range(levels):
        width = beam.shape[1]
        mass = (beam[:, :, None] * probs[:, level, None, :]).reshape(batch, -1)
        token = np.tile(tokens[:, level], (1, width))
        rank = np.tile(np.arange(topk), (batch, width))
        parent = np.repeat(np.arange(width), topk)[None].repeat(batch, 0)
        order = np.lexsort((parent, token, rank, -mass), axis=1)[:, :wanted]
        columns = (mass, token, rank, parent)
        kept.append(tuple(np.take_along_axis(column, order, 1) for column in columns))
        beam = kept[-1][0]
    mass, token, rank, parent = (
        np.concatenate(column, axis=1) for column in zip(*kept, strict=True)
    )
    if mass.shape[1] < wanted:
        raise ValueError(f"the candidates hold {mass.shape[1] + 1} nodes, expected {num_nodes}")
    widths = [columns[0].shape[1] for columns in kept]
    depth = np.repeat(np.arange(levels), widths)
    # Flat place of each candidate's parent, the root being place 0 and candidates following.
    start = np.cumsum([0, 1, *widths])[:levels]
    parent = parent + start[depth]
    order = np.argsort(-mass, axis=1, kind="stable")[:, :wanted]
    number = np.full((batch, mass.shape[1] + 1), -1, np.int64)
    number[:, 0] = 0
    np.put_along_axis(number, order + 1, np.arange(1, num_nodes)[None].repeat(batch, 0), 1)
    parent_node = np.take_along_axis(number, np.take_along_axis(parent, order, 1), 1)
    slots = parent_node * topk + np.take_along_axis(rank, order, 1)
    parent_list = np.full_like(slots, -1)
    parent_list[:, 1:] = slots[:, :-1]
    return UnoTrees(
        draft_tokens=torch.from_numpy(np.take_along_axis(token, order, 1)),
        top_scores_index=torch.from_numpy(slots),
        parent_list=torch.from_numpy(parent_list),
        masses=torch.from_numpy(np.take_along_axis(mass, order, 1)),
        parent=torch.from_numpy(np.concatenate([np.full((batch, 1), -1), parent_node], axis=1)),
    )
