"""The support of each row's law: adjusted logits, and the threshold that the filters leave.

Knows one row's logits and its parameters; knows no noise and chooses nothing. One program takes a
row; rows that filter nothing leave at once. How a threshold is found: graft.kernels.gpu.threshold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.common.noise import Domain
from graft.kernels.gpu import float_math, noise, threshold
from graft.kernels.gpu.spec import KernelSpec
from graft.kernels.ops import ChoiceRows

BLOCK = 1024
WARPS = 8
LISTED = 2048  # tokens that the last part of a search holds in registers

GREEDY_AT = tl.constexpr(1e-5)  # rounded to float32 this is the highest greedy temperature
INFINITY = tl.constexpr(float("inf"))
CHOICE = tl.constexpr(int(Domain.CHOICE))
NO_TOKEN = tl.constexpr(-1)
UNDECIDED = tl.constexpr(-3)
LAST_TOKEN = tl.constexpr(2**31 - 1)


class Support(NamedTuple):
    """floor, top: [rows], float32. top_k and top_p keep the tokens with z >= floor; top is max z.

    Rows that filter nothing have -inf and +inf, where top was not asked for.

    pick: [rows], int32, the choice of a row whose whole support was at hand, -1 if refused;
        UNDECIDED elsewhere.
    """

    floor: Tensor
    top: Tensor
    pick: Tensor


@triton.jit
def is_greedy(temperature, top_k):
    """Whether the row's choice uses no noise."""
    return (temperature <= GREEDY_AT) | (top_k == 1)


@triton.jit
def _pick_listed(
    listed, count, heat, top, floor, least_share, seed, position, LISTED: tl.constexpr
):
    """The highest perturbed logit of a list that holds the whole support; the lowest on a tie."""
    slot = tl.arange(0, LISTED)
    token = tl.load(listed + LISTED + slot, mask=slot < count, other=LAST_TOKEN)
    key = tl.load(listed + slot, mask=slot < count, other=0)
    z = threshold.z_of(key, heat)
    kept = (slot < count) & (z >= floor)
    kept = kept & (float_math.exp32(tl.where(kept, z - top, 0.0)) >= least_share)
    uniform = noise.uniform_at(seed, position, tl.where(kept, token, 0), CHOICE)
    score = tl.where(kept, z + noise.gumbel_of(uniform), -INFINITY)
    winner = tl.min(tl.where(kept & (score == tl.max(score, 0)), token, LAST_TOKEN), 0)
    return tl.where(winner == LAST_TOKEN, NO_TOKEN, winner)


@triton.jit
def support_kernel(
    logits, temperature, top_k, top_p, min_p, seed, position, bitmask, floors, tops, picks, listed,
    vocab, mask_words,
    EVERY_ROW: tl.constexpr, HAS_BITMASK: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Floor, top and perhaps choice of one row.

    A row that filters nothing leaves at once, unless EVERY_ROW.
    """
    row = tl.program_id(0)
    heat = tl.load(temperature + row)
    count_kept = tl.load(top_k + row)
    mass_kept = tl.load(top_p + row)
    greedy = is_greedy(heat, count_kept)
    least_share = tl.load(min_p + row)
    filters = (count_kept > 0) | (mass_kept < 1.0) | ~(least_share <= 0.0) | EVERY_ROW
    pick = tl.full([], UNDECIDED, tl.int32)
    floor = heat * 0.0 - INFINITY
    top = heat * 0.0 + INFINITY
    if filters & ~greedy:
        logits_row = logits + row.to(tl.int64) * vocab
        bitmask_row = bitmask + row.to(tl.int64) * mask_words
        most = tl.full([BLOCK], -INFINITY, tl.float32)
        least = tl.full([BLOCK], INFINITY, tl.float32)
        counts = tl.zeros([BLOCK], tl.int32)
        refused = tl.zeros([BLOCK], tl.int32)
        for first in range(0, vocab, BLOCK):
            lane = first + tl.arange(0, BLOCK)
            x = threshold.load_logits(logits_row, bitmask_row, lane, lane < vocab, HAS_BITMASK)
            live = x > -INFINITY
            most = tl.maximum(most, tl.where(live, x, -INFINITY))
            least = tl.minimum(least, tl.where(live, x, INFINITY))
            counts += live.to(tl.int32)
            refused |= (~(x < INFINITY)).to(tl.int32)
        peak = tl.max(most, 0)
        highest = tl.div_rn(peak, heat)
        if (tl.max(refused, 0) > 0) | (peak == -INFINITY) | ~(highest < INFINITY):
            pick = tl.full([], NO_TOKEN, tl.int32)
        else:
            top = highest
            unknown = tl.full([], -1, tl.int64)
            low = float_math.order_key(tl.min(least, 0)).to(tl.int64)
            high = float_math.order_key(peak).to(tl.int64) + 1
            held = tl.sum(counts, 0)
            listed_row = listed + row.to(tl.int64) * (2 * LISTED)
            count = tl.full([], 0, tl.int32)
            if (count_kept > 0) & (count_kept < held):
                key, count = threshold.search(
                    logits_row, bitmask_row, listed_row, vocab, low, high, held,
                    count_kept.to(tl.int64), mass_kept, heat, top, floor,
                    False, HAS_BITMASK, LISTED, BLOCK,
                )  # fmt: skip
                floor = threshold.z_of(key, heat)
            if mass_kept < 1.0:
                if count > 0:
                    key = threshold.settle(
                        listed_row, count, low, high, unknown, mass_kept, heat, top, floor,
                        True, LISTED,
                    )  # fmt: skip
                else:
                    key, count = threshold.search(
                        logits_row, bitmask_row, listed_row, vocab, low, high, held, unknown,
                        mass_kept, heat, top, floor, True, HAS_BITMASK, LISTED, BLOCK,
                    )  # fmt: skip
                floor = threshold.z_of(key, heat)
            if count > 0:
                pick = _pick_listed(
                    listed_row, count, heat, top, floor, least_share,
                    tl.load(seed + row), tl.load(position + row), LISTED,
                )  # fmt: skip
    tl.store(floors + row, floor)
    tl.store(tops + row, top)
    tl.store(picks + row, pick)


def find_support(logits: Tensor, rows: ChoiceRows, every_row: bool = False) -> Support:
    """Support of the rows that filter, or of every drawn row; its callers have checked."""
    num_rows, vocab = logits.shape
    floor = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    top = torch.empty_like(floor)
    pick = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    listed = torch.empty(num_rows, 2 * LISTED, dtype=torch.int32, device=logits.device)
    bitmask = listed if rows.bitmask is None else rows.bitmask
    support_kernel[(num_rows,)](
        logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.position,
        bitmask, floor, top, pick, listed, vocab, 0 if rows.bitmask is None else bitmask.shape[1],
        EVERY_ROW=every_row, HAS_BITMASK=rows.bitmask is not None, LISTED=LISTED, BLOCK=BLOCK,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return Support(floor, top, pick)


SPECS = tuple(
    KernelSpec(
        name=f"support{suffix}",
        kernel=support_kernel,
        arguments="*fp32 *fp32 *i32 *fp32 *fp32 *i64 *i32 *i32 *fp32 *fp32 *i32 *i32 i32 i32",
        constants={"EVERY_ROW": every, "HAS_BITMASK": masked, "LISTED": LISTED, "BLOCK": BLOCK},
        num_warps=WARPS,
    )
    for suffix, every, masked in (
        ("", False, False),
        (" bitmask", False, True),
        (" every row", True, False),
        (" every row bitmask", True, True),
    )
)
