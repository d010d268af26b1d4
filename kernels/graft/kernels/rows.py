"""Flat rows of a step from the trees and laws of its sessions. Knows no logits and no device.

Rows stand session after session, each session's nodes in preorder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat

import numpy as np
import torch
from torch import Tensor

from graft.common.sampling import Sampling
from graft.common.tree import IntArray, Tree
from graft.kernels.ops import Adjust, ChoiceRows, TreeRows


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """What decides the tokens after the nodes of one session's tree.

    prefix_length: committed tokens, root included; a node's next token has the absolute position
        prefix_length + depth.
    adjust: rows as the tree's nodes, from `adjust_rows`; None changes nothing.
    bitmask: [num_nodes, words], int32, from `fill_tree_bitmask`; None allows all.
    """

    sampling: Sampling
    tree: Tree
    prefix_length: int
    adjust: Adjust | None = None
    bitmask: Tensor | None = None


def tree_rows(trees: Sequence[Tree]) -> TreeRows:
    """The trees of a step, flattened."""
    ptr = [0, *accumulate(tree.num_nodes for tree in trees)]
    return TreeRows(
        ptr=torch.from_numpy(np.array(ptr, np.int32)),
        tokens=_joined([tree.tokens for tree in trees]),
        next_token=_joined([tree.next_token for tree in trees]),
        next_sibling=_joined([tree.next_sibling for tree in trees]),
    )


def choice_rows(laws: Sequence[Law], vocab_size: int) -> ChoiceRows:
    """One row a node, in order of `laws`."""
    counts = [law.tree.num_nodes for law in laws]
    positions = [law.tree.depth + np.int32(law.prefix_length) for law in laws]
    adjust = _stack_adjust(laws) if any(law.adjust is not None for law in laws) else None
    return ChoiceRows(
        temperature=_spread([law.sampling.temperature for law in laws], counts, np.float32),
        top_k=_spread([law.sampling.top_k for law in laws], counts, np.int32),
        top_p=_spread([law.sampling.top_p for law in laws], counts, np.float32),
        min_p=_spread([law.sampling.min_p for law in laws], counts, np.float32),
        seed=_spread([law.sampling.seed for law in laws], counts, np.uint64).view(torch.int64),
        position=_joined(positions),
        adjust_ptr=None if adjust is None else adjust.ptr,
        adjust_tokens=None if adjust is None else adjust.tokens,
        adjust_ratio=None if adjust is None else adjust.ratio,
        adjust_shift=None if adjust is None else adjust.shift,
        bitmask=_stack_bitmasks(laws, (vocab_size + 31) // 32),
    )


def _spread(values: Sequence[float], counts: Sequence[int], dtype: type) -> Tensor:
    rows = chain.from_iterable(map(repeat, values, counts))
    return torch.from_numpy(np.array([*rows], dtype))


def _joined(columns: Sequence[IntArray]) -> Tensor:
    """The columns one below the other; one alone is not copied."""
    if len(columns) == 1:
        return torch.from_numpy(columns[0])
    return torch.from_numpy(np.concatenate(columns or [np.zeros(0, np.int32)]))


def _stack_adjust(laws: Sequence[Law]) -> Adjust:
    parts = []
    for law in laws:
        if law.adjust is not None:
            parts.append(law.adjust)
        else:
            nothing = torch.zeros(law.tree.num_nodes + 1, dtype=torch.int32)
            empty = torch.zeros(0)
            parts.append(Adjust(nothing, empty.int(), empty, empty))
    ptr = [torch.zeros(1, dtype=torch.int32)]
    start = 0
    for part in parts:
        ptr.append(part.ptr[1:] + start)
        start += len(part.tokens)
    return Adjust(
        torch.cat(ptr),
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.ratio for part in parts]),
        torch.cat([part.shift for part in parts]),
    )


def _stack_bitmasks(laws: Sequence[Law], words: int) -> Tensor | None:
    if all(law.bitmask is None for law in laws):
        return None
    return torch.cat(
        [
            torch.full((law.tree.num_nodes, words), -1, dtype=torch.int32)
            if law.bitmask is None
            else law.bitmask
            for law in laws
        ]
    )
