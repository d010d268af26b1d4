"""Walks ragged trees, one program a tree. Knows links, tokens and choices; knows no probability."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.kernels.gpu.spec import KernelSpec, check_device, check_tensor, power_of_two
from graft.kernels.ops import TreeRows

FILL = 128


@triton.jit
def _fill_tail(index_row, count, width, FILL: tl.constexpr):
    """Writes -1 behind the accepted path."""
    start = count + 1
    while start < width:
        place = start + tl.arange(0, FILL)
        tl.store(index_row + place, tl.full([FILL], -1, tl.int32), mask=place < width)
        start += FILL


@triton.jit
def accept_kernel(
    ptr, tokens, next_token, next_sibling, chosen, num, index, width, FILL: tl.constexpr
):
    """One program walks one tree; the step count bounds the walk even over broken links."""
    tree = tl.program_id(0)
    first = tl.load(ptr + tree)
    nodes = tl.load(ptr + tree + 1) - first
    index_row = index + tree.to(tl.int64) * width
    count = tree * 0 - 1
    if nodes > 0:
        count += 1
        tl.store(index_row, count)
        wanted = tl.load(chosen + first)
        child = tl.load(next_token + first)
        steps = 0
        while (child >= 0) & (child < nodes) & (steps < nodes):
            row = first + child
            token = tl.load(tokens + row)
            if (token == wanted) & (count + 1 < width):
                count += 1
                tl.store(index_row + count, child)
                wanted = tl.load(chosen + row)
                child = tl.load(next_token + row)
            else:
                child = tl.load(next_sibling + row)
            steps += 1
    tl.store(num + tree, tl.maximum(count, 0))
    _fill_tail(index_row, count, width, FILL)


