"""The float32 log and exp of the sampling law in Triton: the bits of reference.float_math.

Device functions only. Callers are launched with `enable_fp_fusion=False`; a fused multiply-add
would round once where the reference rounds twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graft.kernels.reference import float_math as reference

WEIGHT_ONE = tl.constexpr(float(reference.WEIGHT_ONE))
EXP_LOWEST = tl.constexpr(float(reference.EXP_LOWEST))
LOG2_E = tl.constexpr(float(reference.LOG2_E))
LN2_HIGH = tl.constexpr(float(reference.LN2_HIGH))
LN2_LOW = tl.constexpr(float(reference.LN2_LOW))
SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to a whole number, ties to even

LOG = tuple(tl.constexpr(float(c)) for c in reference.LOG_POLYNOMIAL)
EXP = tuple(tl.constexpr(float(c)) for c in reference.EXP_POLYNOMIAL)
L0, L1, L2, L3, L4, L5, L6, L7 = LOG
E0, E1, E2, E3, E4 = EXP


@triton.jit
def log32(x):
    """Natural logarithm of positive normal float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    e = exponent.to(tl.float32)
    square = f * f
    y = f * L0 + L1
    y = y * f + L2
    y = y * f + L3
    y = y * f + L4
    y = y * f + L5
    y = y * f + L6
    y = y * f + L7
    y = y * f * square
    y = y + e * LN2_LOW
    y = y - 0.5 * square
    return (f + y) + e * LN2_HIGH


@triton.jit
def exp32(x):
    """exp of float32 numbers at or below 0; 0 below EXP_LOWEST."""
    clipped = tl.maximum(x, EXP_LOWEST)
    n = (clipped * LOG2_E + ROUNDER) - ROUNDER
    r = (clipped - n * LN2_HIGH) - n * LN2_LOW
    y = r * E0 + E1
    y = y * r + E2
    y = y * r + E3
    y = y * r + E4
    y = (y * (r * r) + r) + 1.0
    scale = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < EXP_LOWEST, 0.0, y * scale)


@triton.jit
def to_weights(x):
    """Non-negative float32 numbers of at most 1 as int64, 2^40 to the unit, cut."""
    return (x * WEIGHT_ONE).to(tl.int64)


@triton.jit
def order_key(x):
    """int32 that orders like the float32 numbers it stands for; -0 is made 0 first."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def from_order_key(key):
    """The float32 number of an order key."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return bits.to(tl.float32, bitcast=True)
