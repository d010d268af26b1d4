"""Grows trees through a network one level at a time, any mix of shapes and laws side by side.

Networks that a device runs in calls of its own have their trees from graft.draft.bush.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.draft.expand import Growth
from graft.draft.nets.base import DraftNet
from graft.draft.rows import Part, step_rows
from graft.kernels.ops import KvCache


def grow_levels(net: DraftNet, growths: Sequence[Growth], hidden: Tensor, kv: KvCache) -> None:
    """Grows all levels of `growths`, in place.

    hidden: [stems of all growths, hidden], what the network made of the row before each.
    """
    sizes = [len(growth.stems) for growth in growths]
    growing = list(growths)
    while True:
        logits = net.logits(hidden).split(sizes)
        states = hidden.split(sizes)
        parts: list[Part] = []
        kept: list[Tensor] = []
        still = []
        for growth, rows, state in zip(growing, logits, states, strict=True):
            growth.add(rows)
            if not growth.done:
                still.append(growth)
                parts += growth.parts()
                kept.append(state[growth.parent_rows])
        if not still:
            return
        tokens = torch.cat([growth.tokens for growth in still])
        hidden = net.forward(tokens, torch.cat(kept), step_rows(parts), kv)
        growing = still
        sizes = [len(growth.tokens) for growth in growing]
        for growth, run in zip(growing, hidden.split(sizes), strict=True):
            growth.states.append(run)
