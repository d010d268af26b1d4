"""The target's own token after every row: coupled sampling in one pass over the logits.

Knows rows and their laws; knows no tree. Noise is made in registers (`noise`), and the floor of
rows that filter comes from `support`. The rule and its bits: graft.kernels.reference.choose.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.common.noise import Domain
from graft.kernels.gpu import float_math, noise, support, threshold
from graft.kernels.gpu.adjust import adjusted, check_rows
from graft.kernels.gpu.spec import KernelSpec, power_of_two
from graft.kernels.ops import ChoiceRows

BLOCK = 2048
WARPS = 4
MAX_SPLITS = 64
PROGRAMS = 2048  # some two waves of four-warp programs on 132 multiprocessors

CHOICE = tl.constexpr(int(Domain.CHOICE))
NO_TOKEN = tl.constexpr(-1)
REFUSED = tl.constexpr(-2)
LAST_TOKEN = tl.constexpr(2**31 - 1)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _can_win(z, best, uniform):
    """Whether z plus its noise may exceed best; errs on the side of yes, says yes to NaN and inf.

    E = -log(u) is at least 1 - u, so z - log(E) > best needs 1 - u < exp(z - best). This one
    fast exponential stands for the two exact logarithms, which few blocks then take. The slack
    covers every rounding on the way, that of z included.
    """
    slack = 1e-3 + tl.abs(best) * 2e-6
    return ~((1.0 - uniform) > tl.exp(z - best + slack) * 1.001)


@triton.jit
def choose_kernel(
    logits, temperature, top_k, min_p, seed, position, bitmask, floors, tops, picks, scores,
    tokens, vocab, segment, mask_words, HAS_BITMASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Best score and token of one row in one segment of the vocabulary.

    Programs: (row, split). Blocks go by in order of token, so the first of equal scores stays.
    Division, filters and noise logarithms are done only in blocks where a token can still win,
    or where the row has to be refused. A row that has its pick already leaves at once.
    """
    row = tl.program_id(0)
    split = tl.program_id(1)
    heat = tl.load(temperature + row)
    drawn = ~support.is_greedy(heat, tl.load(top_k + row))
    least_share = tl.load(min_p + row)
    key = tl.load(seed + row)
    place = tl.load(position + row)
    floor = tl.load(floors + row)
    top = tl.load(tops + row)
    coldness = 1.0 / heat
    logits_row = logits + row.to(tl.int64) * vocab
    bitmask_row = bitmask + row.to(tl.int64) * mask_words
    first = split * segment
    end = tl.minimum(first + segment, vocab)
    if tl.load(picks + row) != support.UNDECIDED:
        end = first
    best = tl.full([], -INFINITY, tl.float32)
    winner = tl.full([], NO_TOKEN, tl.int32)
    while first < end:
        lane = first + tl.arange(0, BLOCK)
        x = threshold.load_logits(logits_row, bitmask_row, lane, lane < end, HAS_BITMASK)
        if drawn:
            uniform = noise.uniforms(key, place, first, CHOICE, BLOCK)
            open_block = tl.max(_can_win(x * coldness, best, uniform).to(tl.int32), 0)
        else:
            uniform = tl.zeros([BLOCK], tl.float32)
            open_block = tl.max((~(x <= best)).to(tl.int32), 0)
        if open_block > 0:
            score = x
            if drawn:
                score = tl.div_rn(x, heat)
            if tl.max((~(score < INFINITY)).to(tl.int32), 0) > 0:
                best = tl.full([], INFINITY, tl.float32)
                winner = tl.full([], REFUSED, tl.int32)
                first = end
            else:
                if drawn:
                    kept = (score >= floor) & (score > -INFINITY)
                    if least_share > 0.0:
                        kept = kept & (float_math.exp32(score - top) >= least_share)
                    score = tl.where(kept, score + noise.gumbel_of(uniform), -INFINITY)
                highest = tl.max(score, 0)
                if highest > best:
                    best = highest
                    winner = tl.min(tl.where(score == highest, lane, LAST_TOKEN), 0)
        first += BLOCK
    out = row * tl.num_programs(1) + split
    tl.store(scores + out, best)
    tl.store(tokens + out, winner)


@triton.jit
def choose_reduce_kernel(scores, tokens, picks, chosen, splits, SPLITS: tl.constexpr):
    """One row's choice from its segments: highest score, then lowest token; -1 if refused."""
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    inside = split < splits
    score = tl.load(scores + row * splits + split, mask=inside, other=-INFINITY)
    token = tl.load(tokens + row * splits + split, mask=inside, other=NO_TOKEN)
    refused = tl.max((token == REFUSED).to(tl.int32), 0) > 0
    highest = tl.max(tl.where(token >= 0, score, -INFINITY), 0)
    winner = tl.min(tl.where((token >= 0) & (score == highest), token, LAST_TOKEN), 0)
    winner = tl.where(refused | (winner == LAST_TOKEN), NO_TOKEN, winner)
    pick = tl.load(picks + row)
    tl.store(chosen + row, tl.where(pick == support.UNDECIDED, winner, pick))


@triton.jit
def target_probs_kernel(
    logits, temperature, top_k, min_p, bitmask, floors, tops, chosen, probs, vocab, mask_words,
    HAS_BITMASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Probabilities of one row from its choice: zeros if refused, one 1 if greedy."""
    row = tl.program_id(0)
    heat = tl.load(temperature + row)
    greedy = support.is_greedy(heat, tl.load(top_k + row))
    least_share = tl.load(min_p + row)
    floor = tl.load(floors + row)
    top = tl.load(tops + row)
    token = tl.load(chosen + row)
    logits_row = logits + row.to(tl.int64) * vocab
    bitmask_row = bitmask + row.to(tl.int64) * mask_words
    probs_row = probs + row.to(tl.int64) * vocab
    if greedy | (token < 0):
        for first in range(0, vocab, BLOCK):
            lane = first + tl.arange(0, BLOCK)
            tl.store(probs_row + lane, (lane == token).to(tl.float32), mask=lane < vocab)
    else:
        sums = tl.zeros([BLOCK], tl.int64)
        for first in range(0, vocab, BLOCK):
            lane = first + tl.arange(0, BLOCK)
            x = threshold.load_logits(logits_row, bitmask_row, lane, lane < vocab, HAS_BITMASK)
            sums += threshold.weights_of(x, heat, top, floor, least_share)
        total = tl.sum(sums, 0).to(tl.float64)
        for first in range(0, vocab, BLOCK):
            lane = first + tl.arange(0, BLOCK)
            x = threshold.load_logits(logits_row, bitmask_row, lane, lane < vocab, HAS_BITMASK)
            weight = threshold.weights_of(x, heat, top, floor, least_share)
            share = (weight.to(tl.float64) / total).to(tl.float32)
            tl.store(probs_row + lane, share, mask=lane < vocab)


def choose(logits: Tensor, rows: ChoiceRows) -> Tensor:
    """The target's own token after each row; -1 for a refused row.

    Shapes:
        logits: [rows, vocab], float32. With adjustments, changed in place during the call and
            put back before it ends; a row names a token at most once.
        returns: [rows], int32.
    Raises:
        ValueError: a shape, dtype, device or layout differs from the contract.
    """
    check_rows(logits, rows)
    with adjusted(logits, rows):
        return choose_adjusted(logits, rows, support.find_support(logits, rows))


def target_probs(logits: Tensor, rows: ChoiceRows) -> Tensor:
    """The law itself: the probability of each token; 0 in refused rows, one 1 in greedy ones.

    Shapes: as `choose`; returns [rows, vocab], float32.
    Raises:
        ValueError: a shape, dtype, device or layout differs from the contract.
    """
    check_rows(logits, rows)
    num_rows, vocab = logits.shape
    probs = torch.empty_like(logits)
    if num_rows == 0:
        return probs
    with adjusted(logits, rows):
        found = support.find_support(logits, rows, every_row=True)
        chosen = choose_adjusted(logits, rows, found)
        bitmask = chosen if rows.bitmask is None else rows.bitmask
        target_probs_kernel[(num_rows,)](
            logits, rows.temperature, rows.top_k, rows.min_p, bitmask, found.floor, found.top,
            chosen, probs, vocab, 0 if rows.bitmask is None else bitmask.shape[1],
            HAS_BITMASK=rows.bitmask is not None, BLOCK=support.BLOCK, num_warps=support.WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
    return probs


def choose_adjusted(logits: Tensor, rows: ChoiceRows, found: support.Support) -> Tensor:
    """The choice over logits that are adjusted already; checks nothing."""
    num_rows, vocab = logits.shape
    chosen = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return chosen
    splits, segment = split_vocabulary(num_rows, vocab)
    scores = torch.empty(num_rows * splits, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows * splits, dtype=torch.int32, device=logits.device)
    bitmask = tokens if rows.bitmask is None else rows.bitmask
    choose_kernel[(num_rows, splits)](
        logits, rows.temperature, rows.top_k, rows.min_p, rows.seed, rows.position, bitmask,
        found.floor, found.top, found.pick, scores, tokens, vocab, segment,
        0 if rows.bitmask is None else bitmask.shape[1],
        HAS_BITMASK=rows.bitmask is not None, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    choose_reduce_kernel[(num_rows,)](
        scores, tokens, found.pick, chosen, splits, SPLITS=power_of_two(splits), num_warps=1
    )
    return chosen


def split_vocabulary(num_rows: int, vocab: int) -> tuple[int, int]:
    """Segments a row and tokens a segment, so that few rows fill the device too.

    Segments are whole blocks. The choice does not depend on them.
    """
    wanted = min(MAX_SPLITS, max(1, PROGRAMS // max(num_rows, 1)))
    blocks = -(-vocab // BLOCK)
    segment = -(-blocks // min(wanted, blocks)) * BLOCK
    return -(-vocab // segment), segment


_LAW = "*fp32 *fp32 *i32 *fp32"
SPECS = (
    *(
        KernelSpec(
            name=f"choose{suffix}",
            kernel=choose_kernel,
            arguments=f"{_LAW} *i64 *i32 *i32 *fp32 *fp32 *i32 *fp32 *i32 i32 i32 i32",
            constants={"HAS_BITMASK": masked, "BLOCK": BLOCK},
            num_warps=WARPS,
        )
        for suffix, masked in (("", False), (" bitmask", True))
    ),
    KernelSpec(
        name="choose reduce",
        kernel=choose_reduce_kernel,
        arguments="*fp32 *i32 *i32 *i32 i32",
        constants={"SPLITS": MAX_SPLITS},
        num_warps=1,
    ),
    *(
        KernelSpec(
            name=f"target probs{suffix}",
            kernel=target_probs_kernel,
            arguments=f"{_LAW} *i32 *fp32 *fp32 *i32 *fp32 i32 i32",
            constants={"HAS_BITMASK": masked, "BLOCK": support.BLOCK},
            num_warps=support.WARPS,
        )
        for suffix, masked in (("", False), (" bitmask", True))
    ),
)
