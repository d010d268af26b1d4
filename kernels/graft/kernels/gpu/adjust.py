"""Adjusted logits for the time of a call, and the check of a row's law. Chooses nothing.

Penalties, bias and forbidden tokens name few tokens of a row, so they are swapped into the logits
and put back, which costs their number and not the vocabulary's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.kernels.gpu.spec import KernelSpec, check_device, check_tensor
from graft.kernels.ops import ChoiceRows

ENTRIES = 128


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
        token = tl.load(tokens + entry, mask=entry < end, other=-1)
        inside = (token >= 0) & (token < vocab)
        spot = logits_row + token
        if RESTORE:
            tl.store(spot, tl.load(saved + entry, mask=inside, other=0.0), mask=inside)
        else:
            x = tl.load(spot, mask=inside, other=0.0).to(tl.float32)
            tl.store(saved + entry, x, mask=inside)
            by = tl.load(ratio + entry, mask=inside, other=1.0)
            scaled = tl.where(x > 0.0, tl.div_rn(x, by), x * by)
            tl.store(spot, scaled - tl.load(shift + entry, mask=inside, other=0.0), mask=inside)
        first += ENTRIES


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

SPECS = tuple(
    KernelSpec(
        name=f"adjust{suffix}",
        kernel=adjust_kernel,
        arguments="*fp32 *i32 *i32 *fp32 *fp32 *fp32 i32",
        constants={"RESTORE": restore, "ENTRIES": ENTRIES},
    )
    for suffix, restore in (("", False), (" restore", True))
)
