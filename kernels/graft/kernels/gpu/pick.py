"""Draws a token from weights in integers: the bits of reference.float_math.pick.

Device functions only. Knows rows of probabilities; knows no rule.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graft.kernels.gpu import float_math

LAST_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def residual_weights(target_row, draft_row, ratio, draft_end, lane, vocab):
    """int64 weights of max(ratio * target - draft, 0).

    draft_end: vocab, or 0 where nothing is taken away.
    """
    p = tl.load(target_row + lane, mask=lane < vocab, other=0.0)
    q = tl.load(draft_row + lane, mask=lane < draft_end, other=0.0)
    usable = tl.where((q >= 0.0) & (q <= 1.0), q, 0.0)
    return float_math.to_weights(tl.maximum(ratio * p - usable, 0.0))


@triton.jit
def without(weights, lane, candidates, next_sibling, removed, num_nodes):
    """Weights with 0 at the tokens of node `removed` and its later siblings."""
    steps = removed * 0
    while (removed >= 0) & (steps < num_nodes):
        weights = tl.where(lane == tl.load(candidates + removed), 0, weights)
        removed = tl.load(next_sibling + removed)
        steps += 1
    return weights


@triton.jit
def pick(
    target_row, draft_row, ratio, draft_end, candidates, next_sibling, removed, num_nodes,
    uniform, vocab, BLOCK: tl.constexpr,
):  # fmt: skip
    """First token whose running weight exceeds uniform * total; the last token if all weigh 0.

    removed: first of the siblings whose tokens weigh nothing, -1 for none.
    """
    sums = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocab, BLOCK):
        lane = first + tl.arange(0, BLOCK)
        weight = residual_weights(target_row, draft_row, ratio, draft_end, lane, vocab)
        sums += without(weight, lane, candidates, next_sibling, removed, num_nodes)
    total = tl.sum(sums, 0)
    bar = (uniform.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    bar = tl.minimum(bar, total - 1)
    token = tl.full([], vocab - 1, tl.int32)
    before = total * 0
    first = tl.full([], 0, tl.int32)
    if total == 0:
        first += vocab
    while first < vocab:
        lane = first + tl.arange(0, BLOCK)
        weight = residual_weights(target_row, draft_row, ratio, draft_end, lane, vocab)
        weight = without(weight, lane, candidates, next_sibling, removed, num_nodes)
        here = tl.sum(weight, 0)
        if before + here > bar:
            running = tl.cumsum(weight, 0) + before
            token = tl.min(tl.where(running > bar, lane, LAST_TOKEN), 0)
            first += vocab
        before += here
        first += BLOCK
    return token
