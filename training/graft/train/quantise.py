"""Hidden states as int8 with one scale a state, and back. Knows no layer and no file.

Decoding gives each value within half a scale; the scale is the state's greatest magnitude over
127.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int8Array = npt.NDArray[np.int8]
ScaleArray = npt.NDArray[np.float32]

_MOST = 127.0


def quantise(states: Tensor) -> tuple[Int8Array, ScaleArray]:
    """[rows, layers, hidden], float32 -> the same shape in int8, and scales: [rows, layers]."""
    scales = states.abs().amax(dim=-1) / _MOST
    steps = states / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    steps = steps.round_().clamp_(-_MOST, _MOST).to(torch.int8)
    return steps.cpu().numpy(), scales.float().cpu().numpy()


def restore(rows: Tensor, scales: Tensor) -> Tensor:
    """[..., hidden], int8, and [...], float32 -> [..., hidden], float32."""
    return rows.float() * scales.unsqueeze(-1)
