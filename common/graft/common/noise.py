"""Position-keyed noise: Philox4x32-10 in numpy. The same bits come from torch and Triton.

The key is the request's 64-bit seed. The counter is (token // 4, position, 0, domain); word
token % 4 of its output belongs to the token. A uniform is ((word >> 9) + 0.5) * 2^-23, exact in
float32 and strictly inside (0, 1); the exponential is E = -log(u) and the Gumbel noise -log(E).

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); design section 6.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from graft.common.tree import FloatArray

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10

Words = npt.NDArray[np.uint32]


class Domain(IntEnum):
    """What noise is used for; different domains never share bits."""

    CHOICE = 0
    COIN = 1
    FINAL = 2
    DRAFT = 3
    SIMULATE = 4


def philox(
    seed: int, c0: npt.ArrayLike, c1: npt.ArrayLike, c2: npt.ArrayLike, c3: npt.ArrayLike
) -> tuple[Words, Words, Words, Words]:
    """Four 32-bit words for each counter; the counters broadcast against each other."""
    x0, x1, x2, x3 = np.broadcast_arrays(*(np.asarray(c, np.uint64) for c in (c0, c1, c2, c3)))
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        product0, product1 = x0 * _MULTIPLIER_0, x2 * _MULTIPLIER_1
        x0, x1, x2, x3 = (
            (product1 >> _SHIFT) ^ x1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _SHIFT) ^ x3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL_0) & 0xFFFFFFFF, (k1 + _WEYL_1) & 0xFFFFFFFF
    return (
        x0.astype(np.uint32),
        x1.astype(np.uint32),
        x2.astype(np.uint32),
        x3.astype(np.uint32),
    )


def to_uniform(words: Words) -> FloatArray:
    """float32 in (0, 1), one a word."""
    return ((words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def uniforms(
    seed: int, position: int, vocab_size: int, domain: Domain = Domain.CHOICE
) -> FloatArray:
    """[vocab_size], float32: the uniform of every token at a position."""
    blocks = np.arange((vocab_size + 3) // 4, dtype=np.uint64)
    words = np.stack(philox(seed, blocks, position, 0, domain), axis=-1).reshape(-1)[:vocab_size]
    return to_uniform(words)


def uniform_at(seed: int, position: int, index: int, domain: Domain) -> float:
    """The uniform of one (position, index)."""
    words = philox(seed, index // 4, position, 0, domain)
    return float(to_uniform(np.asarray(words[index % 4])))


def gumbel(seed: int, position: int, vocab_size: int, domain: Domain = Domain.CHOICE) -> FloatArray:
    """[vocab_size], float32: -log(-log(u)), added to logits / T before the argmax."""
    return np.asarray(-np.log(-np.log(uniforms(seed, position, vocab_size, domain))), np.float32)


def derive_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request; index 0 keeps the request's own seed."""
    if index == 0:
        return seed
    state = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return state ^ (state >> 31)
