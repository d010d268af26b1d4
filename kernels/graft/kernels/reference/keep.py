"""Compaction of accepted keys and values: the meaning of `Ops.keep`. Knows no pages' owners."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.kernels.ops import KvCache


def keep_moves(
    ptr: Tensor, accept_token_num: Tensor, accept_index: Tensor, write_slots: Tensor
) -> tuple[Tensor, Tensor]:
    """The copies that bring accepted rows to the front of their tree's slots.

    The j-th node of an accepted path moves to the slot of node j. Nothing moves where the path is
    the first nodes of preorder.

    Shapes:
        ptr: [trees + 1]; accept_token_num: [trees]; accept_index: [trees, width], local nodes.
        write_slots: [rows], int32, the slot each row's key was written to.
        returns: source and target slots, each [moves], int32.
    """
    source = []
    target = []
    for tree, accepted in enumerate(accept_token_num.tolist()):
        start = int(ptr[tree])
        for j, node in enumerate(accept_index[tree, : accepted + 1].tolist()):
            if node != j:
                source.append(int(write_slots[start + node]))
                target.append(int(write_slots[start + j]))
    return torch.tensor(source, dtype=torch.int32), torch.tensor(target, dtype=torch.int32)


def keep(kv: KvCache, source: Tensor, target: Tensor) -> None:
    """In place on kv: copies slot source[i] to slot target[i] in all layers, in order of i."""
    for take, put in zip(source.tolist(), target.tolist(), strict=True):
        kv.keys[:, put] = kv.keys[:, take]
        kv.values[:, put] = kv.values[:, take]
