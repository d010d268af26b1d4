"""Whether two ways to one result agree as exactly as this machine's kernels promise."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.kernels.cpu.library import available


def agree(left: Tensor, right: Tensor) -> bool:
    """True for equal bits; without a native library for equal shapes and numbers 1e-4 apart.

    Torch's products depend on the number of rows, so rows alone and rows in company differ there.
    """
    if available():
        return bool(torch.equal(left, right))
    return left.shape == right.shape and bool(torch.allclose(left, right, rtol=1e-4, atol=1e-4))
