"""How the matrices of a draft checkpoint are held: as they come, or rounded to blocks of 8 bits.

A drafter's step is bound by the bytes of its weights, and rounding costs it little acceptance and
never a text. Vectors, tables of embeddings and adapters stay float32.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from graft.kernels.ops import Linear, Ops

BLOCK = 32


def quantised(ops: Ops) -> Ops:
    """These ops, but `pack` rounds matrices to Q8_0 blocks; the same ops where they keep none."""
    return cast(Ops, _Rounding(ops)) if ops.keeps_blocks else ops


class _Rounding:
    """Hands all but `pack` on."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def pack(self, weights: list[Tensor], biases: list[Tensor | None]) -> Linear:
        """Blocks lie along a row; rows that are no whole number of them stay float32."""
        if any(weight.shape[1] % BLOCK for weight in weights):
            return self._ops.pack(weights, biases)
        return self._ops.pack_q8_0([_blocks(weight) for weight in weights], biases)


def _blocks(weight: Tensor) -> Tensor:
    """[out, in] -> [out, in / 32 * 34], uint8, as GGUF stores Q8_0."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    values = np.ascontiguousarray(weight.to(torch.float32).numpy())
    return torch.from_numpy(quantize(values, GGMLQuantizationType.Q8_0))
