"""The support of each row's law: adjusted logits, and the threshold that the filters leave.

Knows one row's logits and its parameters; knows no noise and chooses nothing. Thresholds are
found by a search over the ordered bit patterns of the logits, four ways a pass, so every count
and weight is an integer sum and the result has the bits of graft.kernels.reference.choose.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.kernels.gpu import float_math
from graft.kernels.gpu.spec import KernelSpec
from graft.kernels.ops import ChoiceRows

BLOCK = 2048
WARPS = 8

GREEDY_AT = tl.constexpr(1e-5)  # rounded to float32 this is the highest greedy temperature
INFINITY = tl.constexpr(float("inf"))
LOWEST_KEY = tl.constexpr(-(2**31))
HIGHEST_KEY = tl.constexpr(2**31 - 1)
INFINITY_KEY = tl.constexpr(0x7F800000)


class Support(NamedTuple):
    """floor, top: [rows], float32. top_k and top_p keep the tokens with z >= floor; top is max z.

    Rows that filter nothing have -inf and +inf, where top was not asked for.
    """

    floor: Tensor
    top: Tensor


@triton.jit
def load_logits(logits_row, bitmask_row, lane, inside, HAS_BITMASK: tl.constexpr):
    """float32 logits, -inf where the mask forbids; NaN and +inf stay, so that they are seen."""
    x = tl.load(logits_row + lane, mask=inside, other=-INFINITY).to(tl.float32)
    if HAS_BITMASK:
        word = tl.load(bitmask_row + lane // 32, mask=inside, other=-1)
        allowed = ((word >> (lane % 32)) & 1) != 0
        x = tl.where(allowed | ~(x < INFINITY), x, -INFINITY)
    return x


@triton.jit
def is_greedy(temperature, top_k):
    """Whether the row's choice uses no noise."""
    return (temperature <= GREEDY_AT) | (top_k == 1)


@triton.jit
def _middle(low, high, part, by_value):
    """A key between two keys, a quarter `part` of the way, by value or by bit pattern."""
    way = low + (high - low) * part // 4
    below = float_math.from_order_key(tl.maximum(low, -INFINITY_KEY).to(tl.int32))
    above = float_math.from_order_key(tl.minimum(high, INFINITY_KEY).to(tl.int32))
    value = below + (above - below) * (part * 0.25)
    near = float_math.order_key(value).to(tl.int64)
    usable = by_value & (value == value) & (near > low) & (near < high)
    return tl.where(usable, near, way)


@triton.jit
def weights_of(x, heat, top, floor, least_share):
    """int64 weights of exp(z - top); 0 without support, below floor and below least_share."""
    z = tl.div_rn(x, heat)
    counted = (x > -INFINITY) & (z >= floor)
    share = float_math.exp32(tl.where(counted, z - top, -INFINITY))
    return float_math.to_weights(tl.where(share >= least_share, share, 0.0))


@triton.jit
def _total(
    logits_row, bitmask_row, vocab, heat, top, floor,
    HAS_BITMASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weight of all tokens at or above floor."""
    sums = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocab, BLOCK):
        lane = first + tl.arange(0, BLOCK)
        x = load_logits(logits_row, bitmask_row, lane, lane < vocab, HAS_BITMASK)
        sums += weights_of(x, heat, top, floor, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _threshold(
    logits_row, bitmask_row, vocab, low, high, bar, heat, top, floor,
    WEIGH: tl.constexpr, HAS_BITMASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest key such that the tokens at or above it measure at least `bar`.

    Measured is the number of tokens, or with WEIGH the weight of those at or above floor. The
    measure at `low` reaches the bar, the one at `high` does not. Each pass reads the row once,
    tries three keys between, and pulls both ends in to keys that tokens have; it alternates
    between even values and even bit patterns, so that it ends within 32 passes.
    """
    passes = low * 0
    while high - low > 1:
        by_value = passes % 2 == 0
        p1 = _middle(low, high, 1, by_value)
        p2 = _middle(low, high, 2, by_value)
        p3 = _middle(low, high, 3, by_value)
        m1 = tl.zeros([BLOCK], tl.int64)
        m2 = tl.zeros([BLOCK], tl.int64)
        m3 = tl.zeros([BLOCK], tl.int64)
        least = tl.full([BLOCK], HIGHEST_KEY, tl.int32)
        most = tl.full([BLOCK], LOWEST_KEY, tl.int32)
        for first in range(0, vocab, BLOCK):
            lane = first + tl.arange(0, BLOCK)
            x = load_logits(logits_row, bitmask_row, lane, lane < vocab, HAS_BITMASK)
            key = float_math.order_key(x)
            live = x > -INFINITY
            if WEIGH:
                measure = weights_of(x, heat, top, floor, 0.0)
            else:
                measure = live.to(tl.int64)
            m1 += tl.where(key >= p1, measure, 0)
            m2 += tl.where(key >= p2, measure, 0)
            m3 += tl.where(key >= p3, measure, 0)
            least = tl.minimum(least, tl.where(live & (key >= low), key, HIGHEST_KEY))
            most = tl.maximum(most, tl.where(live & (key < high), key, LOWEST_KEY))
        s1 = tl.sum(m1, 0)
        s2 = tl.sum(m2, 0)
        s3 = tl.sum(m3, 0)
        low = tl.maximum(low, tl.min(least, 0).to(tl.int64))
        high = tl.minimum(high, tl.max(most, 0).to(tl.int64) + 1)
        low = tl.where(s1 >= bar, tl.maximum(low, p1), low)
        low = tl.where(s2 >= bar, tl.maximum(low, p2), low)
        low = tl.where(s3 >= bar, tl.maximum(low, p3), low)
        high = tl.where(s3 < bar, tl.minimum(high, p3), high)
        high = tl.where(s2 < bar, tl.minimum(high, p2), high)
        high = tl.where(s1 < bar, tl.minimum(high, p1), high)
        passes += 1
    return low


@triton.jit
def support_kernel(
    logits, temperature, top_k, top_p, min_p, bitmask, floors, tops, vocab, mask_words,
    EVERY_ROW: tl.constexpr, HAS_BITMASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Floor and top of one row; a row that filters nothing leaves at once, unless EVERY_ROW."""
    row = tl.program_id(0)
    heat = tl.load(temperature + row)
    count_kept = tl.load(top_k + row)
    mass_kept = tl.load(top_p + row)
    greedy = is_greedy(heat, count_kept)
    filters = (count_kept > 0) | (mass_kept < 1.0) | ~(tl.load(min_p + row) <= 0.0) | EVERY_ROW
    floor = heat * 0.0 - INFINITY
    top = heat * 0.0 + INFINITY
    if filters & ~greedy:
        logits_row = logits + row.to(tl.int64) * vocab
        bitmask_row = bitmask + row.to(tl.int64) * mask_words
        most = tl.full([BLOCK], -INFINITY, tl.float32)
        least = tl.full([BLOCK], INFINITY, tl.float32)
        counts = tl.zeros([BLOCK], tl.int32)
        for first in range(0, vocab, BLOCK):
            lane = first + tl.arange(0, BLOCK)
            x = load_logits(logits_row, bitmask_row, lane, lane < vocab, HAS_BITMASK)
            live = x > -INFINITY
            most = tl.maximum(most, tl.where(live, x, -INFINITY))
            least = tl.minimum(least, tl.where(live, x, INFINITY))
            counts += live.to(tl.int32)
        peak = tl.max(most, 0)
        highest = tl.div_rn(peak, heat)
        if (peak > -INFINITY) & (highest < INFINITY):
            top = highest
            low = float_math.order_key(tl.min(least, 0)).to(tl.int64)
            high = float_math.order_key(peak).to(tl.int64) + 1
            if (count_kept > 0) & (count_kept < tl.sum(counts, 0)):
                key = _threshold(
                    logits_row, bitmask_row, vocab, low, high, count_kept.to(tl.int64),
                    heat, top, floor, False, HAS_BITMASK, BLOCK,
                )  # fmt: skip
                floor = tl.div_rn(float_math.from_order_key(key.to(tl.int32)), heat)
            if mass_kept < 1.0:
                total = _total(logits_row, bitmask_row, vocab, heat, top, floor, HAS_BITMASK, BLOCK)
                share = tl.ceil(mass_kept.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
                bar = tl.maximum(tl.minimum(share, total), 1)
                key = _threshold(
                    logits_row, bitmask_row, vocab, low, high, bar,
                    heat, top, floor, True, HAS_BITMASK, BLOCK,
                )  # fmt: skip
                floor = tl.div_rn(float_math.from_order_key(key.to(tl.int32)), heat)
    tl.store(floors + row, floor)
    tl.store(tops + row, top)


def find_support(logits: Tensor, rows: ChoiceRows, every_row: bool = False) -> Support:
    """Floor and top of the rows that filter, or of every drawn row; its callers have checked."""
    num_rows, vocab = logits.shape
    floor = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    top = torch.empty_like(floor)
    bitmask = floor if rows.bitmask is None else rows.bitmask
    support_kernel[(num_rows,)](
        logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, bitmask, floor, top,
        vocab, 0 if rows.bitmask is None else bitmask.shape[1],
        EVERY_ROW=every_row, HAS_BITMASK=rows.bitmask is not None, BLOCK=BLOCK,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return Support(floor, top)


SPECS = tuple(
    KernelSpec(
        name=f"support{suffix}",
        kernel=support_kernel,
        arguments="*fp32 *fp32 *i32 *fp32 *fp32 *i32 *fp32 *fp32 i32 i32",
        constants={"EVERY_ROW": False, "HAS_BITMASK": masked, "BLOCK": BLOCK},
        num_warps=WARPS,
    )
    for suffix, masked in (("", False), (" bitmask", True))
)
