"""The Gumbel noise of a position for all tokens, natively where the library was built.

Meaning: the noise of graft.kernels.reference.choose, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.common.noise import uniforms
from graft.kernels.cpu.choose import Native, native
from graft.kernels.reference.float_math import log32

_SIGN = 1 << 63


def noise(seed: int, position: int, vocab_size: int, by: Native | None = None) -> Tensor:
    """[vocab_size], float32: what the choice at `position` adds to each token's logit / T."""
    by = by or native()
    if by is None:
        return torch.from_numpy(-log32(-log32(uniforms(seed, position, vocab_size))))
    out = torch.empty(vocab_size)
    signed = (seed ^ _SIGN) - _SIGN  # the same 64 bits as a signed number
    by.library.graft_noise(signed, position, vocab_size, out.data_ptr())
    return out
