"""The vocabulary head and the choice as one call of the native library."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from graft.kernels.cpu.choose import CChoiceRows, Native
from graft.kernels.cpu.native_linear import NativeLinear
from graft.kernels.ops import ChoiceRows
from graft.kernels.reference.choose import GREEDY_BELOW

_GREEDY_BELOW = torch.tensor(GREEDY_BELOW, dtype=torch.float32).item()


def filtered(rows: ChoiceRows, vocab_size: int) -> bool:
    """True when some row needs its whole row of logits at once, or has entries changed."""
    if rows.adjust_ptr is not None or rows.bitmask is not None:
        return True
    # Few rows, one after the other: a dozen calls of torch would cost more than the loop.
    columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    for temperature, top_k, top_p, min_p in zip(*map(Tensor.tolist, columns), strict=True):
        sampled = temperature >= _GREEDY_BELOW and top_k != 1
        if sampled and (0 < top_k < vocab_size or top_p < 1 or min_p > 0):
            return True
    return False


def choose_head(by: Native, hidden: int, head: NativeLinear, rows: ChoiceRows) -> Tensor:
    """[rows], int32: what `choose` makes of the head's logits, for rows that are not `filtered`.

    hidden: address of [rows, in], float32, contiguous.

    Raises:
        ValueError: a tensor has another dtype or length than the contract says.
    """
    count = len(rows.temperature)
    wanted = {
        "temperature": torch.float32,
        "top_k": torch.int32,
        "top_p": torch.float32,
        "min_p": torch.float32,
        "seed": torch.int64,
        "position": torch.int32,
    }
    alive = {}
    for name, dtype in wanted.items():
        tensor: Tensor = getattr(rows, name)
        if tensor.dtype is not dtype or tuple(tensor.shape) != (count,):
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {(count,)}"
            )
        alive[name] = tensor.contiguous()
    struct = CChoiceRows(
        rows=count,
        vocab=head.out_features,
        **{name: tensor.data_ptr() for name, tensor in alive.items()},
    )
    chosen = torch.empty(count, dtype=torch.int32)
    by.library.graft_head_choose(
        by.pool, head.address, hidden, ctypes.addressof(struct), chosen.data_ptr()
    )
    return chosen
