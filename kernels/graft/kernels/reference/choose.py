"""The target's own choice at each row of logits: the meaning of `Ops.choose`. Knows no trees.

The law of a row, in order, all in float32 and in the operations of `float_math`:

1. x: the logits, with the named tokens adjusted (`ChoiceRows.adjust_*`). A row in which any x is
   NaN or +inf is refused: its choice is -1.
2. Tokens whose bit of the mask is clear leave the support; so do tokens at -inf. A row without
   support is refused.
3. A row is greedy when its temperature is below `GREEDY_BELOW` or its top_k is 1: the choice is
   the highest x, the lowest token on a tie.
4. z = x / temperature. A row in which a supported z is +inf is refused.
5. top_k drops tokens whose z is below the k-th highest; ties with it stay.
6. top_p weighs what is left by exp(z - max z) and drops tokens below the highest threshold at
   which the kept weight reaches top_p of the total; ties with the threshold stay.
7. min_p drops tokens with exp(z - max z) < min_p.
8. The choice is the highest z - log(-log u), u being the token's uniform at the row's position;
   the lowest token on a tie.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graft.common.noise import uniforms
from graft.common.tree import FloatArray
from graft.kernels.ops import ChoiceRows
from graft.kernels.reference.float_math import WEIGHT_ONE, exp32, log32, to_weights

GREEDY_BELOW: Final = 1e-5

BoolArray = npt.NDArray[np.bool_]


def choose(logits: Tensor, rows: ChoiceRows) -> Tensor:
    """logits: [rows, vocab], float32 -> [rows], int32; -1 for a refused row."""
    chosen = [_choose_row(adjusted(logits, rows, row), rows, row) for row in range(len(logits))]
    return torch.tensor(chosen, dtype=torch.int32)


def target_probs(logits: Tensor, rows: ChoiceRows) -> Tensor:
    """The law itself: [rows, vocab], float32, the probability of each token; 0 in refused rows.

    A greedy row has one token of probability 1. Tokens below 2^-40 of the likeliest have 0.
    """
    probs = np.zeros(logits.shape, np.float32)
    for row in range(len(logits)):
        x = adjusted(logits, rows, row)
        if is_greedy(rows, row):
            token = _choose_row(x, rows, row)
            if token >= 0:
                probs[row, token] = 1
            continue
        z, kept = supported(x, rows, row)
        if not kept.any():
            continue
        weights = to_weights(np.where(kept, exp32(z - z[kept].max()), np.float32(0)))
        probs[row] = (weights.astype(np.float64) / float(weights.sum())).astype(np.float32)
    return torch.from_numpy(probs)


def adjusted(logits: Tensor, rows: ChoiceRows, row: int) -> FloatArray:
    """[vocab], float32: the row's logits after step 1 and the mask, -inf where not allowed.

    All NaN for a refused row.
    """
    x: FloatArray = np.array(logits[row].numpy(), np.float32)
    if rows.adjust_ptr is not None:
        assert rows.adjust_tokens is not None
        assert rows.adjust_ratio is not None
        assert rows.adjust_shift is not None
        span = slice(int(rows.adjust_ptr[row]), int(rows.adjust_ptr[row + 1]))
        tokens = rows.adjust_tokens[span].numpy()
        ratio, shift = rows.adjust_ratio[span].numpy(), rows.adjust_shift[span].numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            old = x[tokens]
            x[tokens] = np.where(old > 0, old / ratio, old * ratio) - shift
    if np.isnan(x).any() or np.isposinf(x).any():
        return np.full_like(x, np.nan)
    if rows.bitmask is not None:
        x[~allowed(rows.bitmask[row].numpy(), len(x))] = -np.inf
    return x


def allowed(bitmask: npt.NDArray[np.int32], vocab_size: int) -> BoolArray:
    """[vocab_size], bool: the bits of one row of a mask."""
    bits = np.unpackbits(np.ascontiguousarray(bitmask).view(np.uint8), bitorder="little")
    return bits[:vocab_size].astype(np.bool_)


def is_greedy(rows: ChoiceRows, row: int) -> bool:
    """True when the row's choice uses no noise."""
    return float(rows.temperature[row]) < GREEDY_BELOW or int(rows.top_k[row]) == 1


def supported(x: FloatArray, rows: ChoiceRows, row: int) -> tuple[FloatArray, BoolArray]:
    """z and which tokens steps 2 and 4 to 7 keep; nothing is kept in a refused row."""
    with np.errstate(over="ignore"):
        z = x / np.float32(rows.temperature[row].item())
    nothing = np.zeros(len(z), np.bool_)
    if np.isnan(z).any() or np.isposinf(z).any():
        return z, nothing
    kept = z > -np.inf
    if not kept.any():
        return z, nothing
    top_k = int(rows.top_k[row])
    if 0 < top_k < int(kept.sum()):
        kept &= z >= np.sort(z)[-top_k]
    shares = np.where(kept, exp32(z - z[kept].max()), np.float32(0))
    top_p = float(rows.top_p[row])
    if top_p < 1.0:
        kept &= z >= top_p_threshold(z, to_weights(shares), top_p)
    kept &= shares >= np.float32(rows.min_p[row].item())
    return z, kept


def top_p_threshold(z: FloatArray, weights: npt.NDArray[np.int64], top_p: float) -> np.float32:
    """The highest z at which the tokens at or above it weigh `top_p` of the total."""
    total = int(weights.sum())
    needed = min(math.ceil(top_p * float(total)), total)
    order = np.argsort(-z, kind="stable")
    reached = np.cumsum(weights[order]) >= needed
    return np.float32(z[order[int(np.argmax(reached))]])


def _choose_row(x: FloatArray, rows: ChoiceRows, row: int) -> int:
    if np.isnan(x).any() or not (x > -np.inf).any():
        return -1
    if is_greedy(rows, row):
        return int(np.argmax(x))
    z, kept = supported(x, rows, row)
    if not kept.any():
        return -1
    seed = int(rows.seed[row]) & 0xFFFFFFFFFFFFFFFF
    noise = -log32(-log32(uniforms(seed, int(rows.position[row]), len(x))))
    return int(np.argmax(np.where(kept, z + noise, np.float32(-np.inf))))


assert WEIGHT_ONE < 1 << 41, "2^18 tokens must sum below 2^63"
