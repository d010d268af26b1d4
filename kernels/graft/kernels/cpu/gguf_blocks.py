"""Blocks of 32 weights as GGUF files store them, unpacked to float32. Reads no file.

Q8_0: float16 scale, 32 signed bytes; a weight is scale * q.
Q4_1: float16 scale, float16 minimum, 16 bytes whose low halves are weights 0..15 and whose high
halves are 16..31; a weight is scale * q + minimum.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_q8_0(raw: Tensor) -> Tensor:
    """[out, in / 32 * 34], uint8 -> [out, in], float32."""
    blocks = raw.reshape(len(raw), -1, 34)
    scale = blocks[..., :2].contiguous().view(torch.float16).float()
    quants = blocks[..., 2:].contiguous().view(torch.int8).float()
    return (scale * quants).reshape(len(raw), -1)


def unpack_q4_1(raw: Tensor) -> Tensor:
    """[out, in / 32 * 20], uint8 -> [out, in], float32."""
    blocks = raw.reshape(len(raw), -1, 20)
    scale = blocks[..., :2].contiguous().view(torch.float16).float()
    minimum = blocks[..., 2:4].contiguous().view(torch.float16).float()
    packed = blocks[..., 4:]
    quants = torch.cat([packed & 15, packed >> 4], dim=-1).float()
    return torch.addcmul(minimum, scale, quants).reshape(len(raw), -1)
