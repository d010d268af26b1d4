"""Compaction of accepted keys and values on the CPU. Meaning: graft.kernels.reference.keep."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from graft.kernels.ops import KvCache


def keep_moves(
    ptr: Tensor, accept_token_num: Tensor, accept_index: Tensor, write_slots: Tensor
) -> tuple[Tensor, Tensor]:
    """The copies that bring accepted rows to the front of their tree's slots; as the reference."""
    nodes = accept_index.numpy()
    column = np.arange(nodes.shape[1])
    moved = (column <= accept_token_num.numpy()[:, None]) & (nodes != column) & (nodes >= 0)
    tree, place = np.nonzero(moved)
    start = ptr.numpy()[tree]
    slots = write_slots.numpy()
    source, target = slots[start + nodes[tree, place]], slots[start + place]
    return torch.from_numpy(source), torch.from_numpy(target)


def keep(kv: KvCache, source: Tensor, target: Tensor) -> None:
    """In place on kv: every source is read before any target is written, in all layers at once.

    The same as one by one, because no source is the target of an earlier move.
    """
    if not len(source):
        return
    take, put = source.long(), target.long()
    kv.keys.index_copy_(1, put, kv.keys.index_select(1, take))
    kv.values.index_copy_(1, put, kv.values.index_select(1, take))
