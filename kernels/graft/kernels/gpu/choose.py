"""The target's own token after every row: coupled sampling in one pass over the logits.

Knows rows and their laws; knows no tree. Noise is made in registers (`noise`), and the floor of
rows that filter comes from `support`. The rule and its bits: graft.kernels.reference.choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.common.noise import Domain
from graft.kernels.gpu import float_math, noise, support
from graft.kernels.gpu.spec import KernelSpec, check_device, check_tensor, power_of_two
from graft.kernels.ops import ChoiceRows

BLOCK = 2048
WARPS = 4
MAX_SPLITS = 64
PROGRAMS = 2048  # some two waves of four-warp programs on 132 multiprocessors
ENTRIES = 128

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
    logits, temperature, top_k, min_p, seed, position, bitmask, floors, tops, scores, tokens,
    vocab, segment, mask_words, HAS_BITMASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Best score and token of one row in one segment of the vocabulary.

    Programs: (row, split). Blocks go by in order of token, so the first of equal scores stays.
    Division, filters and noise logarithms are done only in blocks where a token can still win,
    or where the row has to be refused.
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
    best = tl.full([], -INFINITY, tl.float32)
    winner = tl.full([], NO_TOKEN, tl.int32)
    while first < end:
        lane = first + tl.arange(0, BLOCK)
        x = support.load_logits(logits_row, bitmask_row, lane, lane < end, HAS_BITMASK)
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
def choose_reduce_kernel(scores, tokens, chosen, splits, SPLITS: tl.constexpr):
    """One row's choice from its segments: highest score, then lowest token; -1 if refused."""
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    inside = split < splits
    score = tl.load(scores + row * splits + split, mask=inside, other=-INFINITY)
    token = tl.load(tokens + row * splits + split, mask=inside, other=NO_TOKEN)
    refused = tl.max((token == REFUSED).to(tl.int32), 0) > 0
    highest = tl.max(tl.where(token >= 0, score, -INFINITY), 0)
    winner = tl.min(tl.where((token >= 0) & (score == highest), token, LAST_TOKEN), 0)
    tl.store(chosen + row, tl.where(refused | (winner == LAST_TOKEN), NO_TOKEN, winner))


@triton.jit
def adjust_kernel(
    logits, ptr, tokens, ratio, shift, saved, vocab, RESTORE: tl.constexpr, ENTRIES: tl.constexpr
):
    """In place on one row: swaps adjusted logits in and saves the old ones, or puts them back."""
    row = tl.program_id(0)
    logits_row = logits + row.to(tl.int64) * vocab
    first = tl.load(ptr + row)
    end = tl.load(ptr + row + 1)
    while first < end:
        entry = first + tl.arange(0, ENTRIES)
        inside = entry < end
        spot = logits_row + tl.load(tokens + entry, mask=inside, other=0)
        if RESTORE:
            tl.store(spot, tl.load(saved + entry, mask=inside, other=0.0), mask=inside)
        else:
            x = tl.load(spot, mask=inside, other=0.0).to(tl.float32)
            tl.store(saved + entry, x, mask=inside)
            by = tl.load(ratio + entry, mask=inside, other=1.0)
            scaled = tl.where(x > 0.0, tl.div_rn(x, by), x * by)
            tl.store(spot, scaled - tl.load(shift + entry, mask=inside, other=0.0), mask=inside)
        first += ENTRIES


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
        found.floor, found.top, scores, tokens, vocab, segment,
        0 if rows.bitmask is None else bitmask.shape[1],
        HAS_BITMASK=rows.bitmask is not None, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    choose_reduce_kernel[(num_rows,)](
        scores, tokens, chosen, splits, SPLITS=power_of_two(splits), num_warps=1
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


@contextmanager
def adjusted(logits: Tensor, rows: ChoiceRows) -> Iterator[None]:
    """In place on logits while the block runs: the rows' adjustments are in effect."""
    if rows.adjust_ptr is None or rows.adjust_tokens is None or rows.adjust_tokens.numel() == 0:
        yield
        return
    saved = torch.empty_like(rows.adjust_shift)
    arguments = (
        logits, rows.adjust_ptr, rows.adjust_tokens, rows.adjust_ratio, rows.adjust_shift, saved,
        logits.shape[1],
    )  # fmt: skip
    grid = (logits.shape[0],)
    options = {"ENTRIES": ENTRIES, "num_warps": 4, "enable_fp_fusion": False}
    adjust_kernel[grid](*arguments, RESTORE=False, **options)
    try:
        yield
    finally:
        adjust_kernel[grid](*arguments, RESTORE=True, **options)


def check_rows(logits: Tensor, rows: ChoiceRows) -> None:
    """Raises ValueError where logits and rows break the contract of `Ops.choose`."""
    check_tensor("logits", logits, torch.float32, (-1, -1))
    num_rows, vocab = logits.shape
    for name, dtype in _COLUMNS:
        check_tensor(name, getattr(rows, name), dtype, (num_rows,))
    if rows.adjust_ptr is not None:
        check_tensor("adjust_ptr", rows.adjust_ptr, torch.int32, (num_rows + 1,))
        for name, dtype in _ADJUSTMENTS:
            column = getattr(rows, name)
            if column is None:
                raise ValueError(f"{name} is None, expected a tensor beside adjust_ptr")
            check_tensor(name, column, dtype, (-1,))
    if rows.bitmask is not None:
        check_tensor("bitmask", rows.bitmask, torch.int32, (num_rows, -(-vocab // 32)))
    names = ("adjust_ptr", "bitmask", *(name for name, _ in (*_COLUMNS, *_ADJUSTMENTS)))
    check_device(logits=logits, **{name: getattr(rows, name) for name in names})


_COLUMNS = (
    ("temperature", torch.float32),
    ("top_k", torch.int32),
    ("top_p", torch.float32),
    ("min_p", torch.float32),
    ("seed", torch.int64),
    ("position", torch.int32),
)
_ADJUSTMENTS = (
    ("adjust_tokens", torch.int32),
    ("adjust_ratio", torch.float32),
    ("adjust_shift", torch.float32),
)

SPECS = (
    *(
        KernelSpec(
            name=f"choose{suffix}",
            kernel=choose_kernel,
            arguments="*fp32 *fp32 *i32 *fp32 *i64 *i32 *i32 *fp32 *fp32 *fp32 *i32 i32 i32 i32",
            constants={"HAS_BITMASK": masked, "BLOCK": BLOCK},
            num_warps=WARPS,
        )
        for suffix, masked in (("", False), (" bitmask", True))
    ),
    KernelSpec(
        name="choose reduce",
        kernel=choose_reduce_kernel,
        arguments="*fp32 *i32 *i32 i32",
        constants={"SPLITS": MAX_SPLITS},
        num_warps=1,
    ),
    *(
        KernelSpec(
            name=f"adjust{suffix}",
            kernel=adjust_kernel,
            arguments="*fp32 *i32 *i32 *fp32 *fp32 *fp32 i32",
            constants={"RESTORE": restore, "ENTRIES": ENTRIES},
        )
        for suffix, restore in (("", False), (" restore", True))
    ),
)
