"""Position-keyed noise in registers: Triton's own Philox4x32-10, the bits of graft.common.noise.

Device functions only; no memory is touched and nothing is launched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graft.kernels.gpu import float_math

UNIFORM_STEP = tl.constexpr(2.0**-23)


@triton.jit
def to_uniform(word):
    """float32 in (0, 1), exact: ((word >> 9) + 0.5) * 2^-23."""
    return ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * UNIFORM_STEP


@triton.jit
def uniforms(seed, position, first_token, domain: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK], float32: uniforms of tokens first_token .. first_token + BLOCK - 1.

    first_token and BLOCK are multiples of 4: one Philox call serves four neighbours.
    """
    quads = (first_token // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = quads * 0
    w0, w1, w2, w3 = tl.philox(seed, quads, zero + position.to(tl.uint32), zero, zero + domain)
    even = tl.interleave(to_uniform(w0), to_uniform(w2))
    odd = tl.interleave(to_uniform(w1), to_uniform(w3))
    return tl.interleave(even, odd)


@triton.jit
def uniform_at(seed, position, index, domain: tl.constexpr):
    """The uniform of one (position, index), for scalars or tensors of one shape."""
    quad = (index // 4).to(tl.uint32)
    zero = quad * 0
    w0, w1, w2, w3 = tl.philox(seed, quad, zero + position.to(tl.uint32), zero, zero + domain)
    lane = index % 4
    word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    return to_uniform(word)


@triton.jit
def gumbel_of(uniform):
    """-log(-log(u)): what is added to logits / T before the argmax."""
    return -float_math.log32(-float_math.log32(uniform))
