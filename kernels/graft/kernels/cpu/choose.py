"""The target's own choice at each row of logits, natively where the library was built.

Meaning: graft.kernels.reference.choose, which also serves where there is no library; both give
the same bits.
"""

from __future__ import annotations

import ctypes
from ctypes import CDLL, Structure, c_int64, c_void_p
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from graft.kernels.cpu.library import load
from graft.kernels.ops import ChoiceRows
from graft.kernels.reference import choose as plain

_POINTERS = (
    *("logits", "temperature", "top_k", "top_p", "min_p", "seed", "position"),
    *("adjust_ptr", "adjust_tokens", "adjust_ratio", "adjust_shift", "bitmask"),
)


class CChoiceRows(Structure):
    """ChoiceRows of choose.cpp."""

    _fields_ = (
        ("rows", c_int64),
        ("vocab", c_int64),
        *((name, c_void_p) for name in _POINTERS),
        ("words", c_int64),
    )


class Native(NamedTuple):
    """An opened library and the pool of threads its calls use; None runs on the caller alone."""

    library: CDLL
    pool: int | None = None


@cache
def native() -> Native | None:
    """The best library of this processor without a pool; None where none was built."""
    found = load()
    return None if found is None else Native(found[1])


def choose(logits: Tensor, rows: ChoiceRows, by: Native | None = None) -> Tensor:
    """logits: [rows, vocab], float32 -> [rows], int32; -1 for a refused row.

    Raises:
        ValueError: a tensor has another shape or dtype than the contract says.
    """
    struct, _alive = _pack(logits, rows)
    by = by or native()
    if by is None:
        return plain.choose(logits, rows)
    chosen = torch.empty(len(logits), dtype=torch.int32)
    by.library.graft_choose(by.pool, ctypes.addressof(struct), chosen.data_ptr())
    return chosen


def target_probs(logits: Tensor, rows: ChoiceRows, by: Native | None = None) -> Tensor:
    """The law itself: [rows, vocab], float32, the probability of each token; 0 in refused rows.

    Raises:
        ValueError: a tensor has another shape or dtype than the contract says.
    """
    struct, _alive = _pack(logits, rows)
    by = by or native()
    if by is None:
        return plain.target_probs(logits, rows)
    probs = torch.empty(logits.shape)
    by.library.graft_target_probs(by.pool, ctypes.addressof(struct), probs.data_ptr())
    return probs


def _pack(logits: Tensor, rows: ChoiceRows) -> tuple[CChoiceRows, list[Tensor]]:
    """The C form, and what must stay alive while it is used."""
    count, vocab = logits.shape
    words = (vocab + 31) // 32
    entries = 0
    if rows.adjust_ptr is not None:
        if rows.adjust_tokens is None or rows.adjust_ratio is None or rows.adjust_shift is None:
            raise ValueError("adjust_ptr is given, expected adjust_tokens, _ratio and _shift too")
        entries = len(rows.adjust_tokens)
        if count and int(rows.adjust_ptr[-1]) != entries:
            raise ValueError(f"adjust_ptr ends at {int(rows.adjust_ptr[-1])}, expected {entries}")
        if (
            entries
            and not 0 <= int(rows.adjust_tokens.min()) <= int(rows.adjust_tokens.max()) < vocab
        ):
            raise ValueError(f"an adjusted token is outside 0..{vocab - 1}")
    checked: list[Tensor] = []

    def address(name: str, tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
        if tensor is None:
            return None
        if tensor.dtype is not dtype or tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}"
            )
        checked.append(tensor.contiguous())
        return int(checked[-1].data_ptr())

    i32, f32 = torch.int32, torch.float32
    struct = CChoiceRows(
        count,
        vocab,
        address("logits", logits, f32, count, vocab),
        address("temperature", rows.temperature, f32, count),
        address("top_k", rows.top_k, i32, count),
        address("top_p", rows.top_p, f32, count),
        address("min_p", rows.min_p, f32, count),
        address("seed", rows.seed, torch.int64, count),
        address("position", rows.position, i32, count),
        address("adjust_ptr", rows.adjust_ptr, i32, count + 1),
        address("adjust_tokens", rows.adjust_tokens, i32, entries),
        address("adjust_ratio", rows.adjust_ratio, f32, entries),
        address("adjust_shift", rows.adjust_shift, f32, entries),
        address("bitmask", rows.bitmask, i32, count, words),
        words,
    )
    return struct, checked
