"""The float32 log and exp of the sampling law, fixed to the bit. Knows no sampling.

Every implementation runs these same additions and multiplications, each rounded to float32 and
none of them fused (`-ffp-contract=off`, `enable_fp_fusion=False`), so the choice of a token has
the same bits in numpy, C++ and Triton. The polynomials are our own least-maximum fits; the error
is below 2 units in the last place.

Probabilities are summed as integers, `WEIGHT_ONE` to the unit, because integer sums do not depend
on their order.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from graft.common.tree import FloatArray

WEIGHT_ONE: Final = 1 << 40

EXP_LOWEST: Final = np.float32(-87.0)
LOG2_E: Final = np.float32(1.4426950216293335)
LN2_HIGH: Final = np.float32(0.693359375)
LN2_LOW: Final = np.float32(-0.00021219444170128554)

# log(1 + f) = f - f^2 / 2 + f^3 P(f), highest power first.
LOG_POLYNOMIAL: Final = tuple(
    np.float32(c)
    for c in (
        -0.07634322345256805,
        0.12761519849300385,
        -0.1316022127866745,
        0.1420176774263382,
        -0.16623353958129883,
        0.20001226663589478,
        -0.250008225440979,
        0.3333333134651184,
    )
)
# exp(r) = 1 + r + r^2 P(r), highest power first.
EXP_POLYNOMIAL: Final = tuple(
    np.float32(c)
    for c in (
        0.0013814606936648488,
        0.008368710987269878,
        0.04166838899254799,
        0.1666652113199234,
        0.4999999403953552,
    )
)

Weights = npt.NDArray[np.int64]

_SQRT_HALF_BITS = np.int32(0x3F3504F3)


def log32(x: npt.ArrayLike) -> FloatArray:
    """Natural logarithm of positive normal float32 numbers, the same bits everywhere."""
    bits = np.ascontiguousarray(x, np.float32).view(np.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> np.int32(23)
    f = (bits - (exponent << np.int32(23))).view(np.float32) - np.float32(1)
    e = exponent.astype(np.float32)
    square = f * f
    y = np.full_like(f, LOG_POLYNOMIAL[0])
    for c in LOG_POLYNOMIAL[1:]:
        y = y * f + c
    y = y * f * square
    y = y + e * LN2_LOW
    y = y - np.float32(0.5) * square
    return np.asarray((f + y) + e * LN2_HIGH, np.float32)


def exp32(x: npt.ArrayLike) -> FloatArray:
    """exp of float32 numbers at or below 0, the same bits everywhere; 0 below `EXP_LOWEST`."""
    given = np.asarray(x, np.float32)
    clipped = np.maximum(given, EXP_LOWEST)
    n = np.rint(clipped * LOG2_E)
    r = (clipped - n * LN2_HIGH) - n * LN2_LOW
    y = np.full_like(r, EXP_POLYNOMIAL[0])
    for c in EXP_POLYNOMIAL[1:]:
        y = y * r + c
    y = (y * (r * r) + r) + np.float32(1)
    scale = ((n.astype(np.int32) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.where(given < EXP_LOWEST, np.float32(0), y * scale)


def to_weights(values: npt.ArrayLike) -> Weights:
    """Non-negative float32 numbers of at most 1 as integers, `WEIGHT_ONE` to the unit, cut."""
    return (np.asarray(values, np.float32) * np.float32(WEIGHT_ONE)).astype(np.int64)


def pick(weights: Weights, uniform: float) -> int:
    """First index whose running weight exceeds uniform * total, or -1 when the total is 0.

    A uniform of 1 or more gives the last index of positive weight.
    """
    running = np.cumsum(weights)
    total = int(running[-1]) if len(running) else 0
    if total == 0:
        return -1
    bar = min(int(float(uniform) * float(total)), total - 1)
    return int(np.searchsorted(running, bar, side="right"))
