"""Whether two ways to one result agree as exactly as this machine's kernels promise."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from graft.common.tree import FloatArray
from graft.kernels.cpu.library import available


def agree(left: Tensor, right: Tensor) -> bool:
    """True for equal bits; without a native library for equal shapes and numbers 1e-4 apart.

    Torch's products depend on the number of rows, so rows alone and rows in company differ there.
    """
    if available():
        return bool(torch.equal(left, right))
    return left.shape == right.shape and bool(torch.allclose(left, right, rtol=1e-4, atol=1e-4))


def agree_in_bf16(rows: FloatArray, expected: FloatArray) -> bool:
    """True when `rows` are `expected` in bf16; without a native library, neighbours of it."""
    wanted: FloatArray = torch.from_numpy(expected.copy()).bfloat16().float().numpy()
    if available() or rows.shape != wanted.shape:
        return bool(np.array_equal(rows, wanted))
    return bool((np.abs(rows - wanted) <= np.abs(wanted) / 128 + 1e-5).all())
