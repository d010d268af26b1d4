"""Simulated acceptance for benchmarks: accept lengths drawn from a law instead of decided.

The text it gives means nothing. Lengths here are accept lengths, bonus included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
import torch
from torch import Tensor

from graft.common.noise import Domain, philox, uniform_at
from graft.kernels.trees import VerifyResult, VerifyTrees

FIXED_TOKEN: Final = 100
_UNIFORM_BITS: Final = 9


class SimulatedMethod(Enum):
    """How a length is drawn.

    MATCH_EXPECTED takes the floor or the ceiling so that the mean is the wanted length;
    MULTINOMIAL rounds a normal draw around it, of variance 1, clamped to 1 .. width.
    """

    MATCH_EXPECTED = "match-expected"
    MULTINOMIAL = "multinomial"


class SimulatedTokens(Enum):
    """What is written as tokens: always `FIXED_TOKEN`, or the drafts and the target's bonus."""

    FIXED = "fixed"
    REAL_DRAFT_TOKEN = "real-draft-token"


@dataclass(frozen=True, slots=True)
class Simulation:
    """How acceptance is simulated.

    Raises:
        ValueError: accept_length is below 1, bonus included.
    """

    accept_length: float
    method: SimulatedMethod = SimulatedMethod.MATCH_EXPECTED
    tokens: SimulatedTokens = SimulatedTokens.FIXED

    def __post_init__(self) -> None:
        if not (math.isfinite(self.accept_length) and self.accept_length >= 1.0):
            raise ValueError(
                f"accept_length is {self.accept_length}, expected at least 1, bonus included"
            )


def simulated_lengths(
    simulation: Simulation, seeds: Tensor, positions: Tensor, width: int
) -> Tensor:
    """[batch], int32: accept lengths in 1 .. width, bonus included.

    seeds: [batch], int64 bits of unsigned seeds; positions: [batch], int32.
    """
    lengths = [
        _length(simulation, int(seed) & 0xFFFFFFFFFFFFFFFF, int(position), width)
        for seed, position in zip(seeds, positions, strict=True)
    ]
    return torch.tensor(lengths, dtype=torch.int32)


def simulate_accept(
    simulation: Simulation, trees: VerifyTrees, target_predict: Tensor, lengths: Tensor, width: int
) -> VerifyResult:
    """The result of a verify step that accepted `lengths`, the first nodes of each row.

    With real draft tokens the trees are chains. Shapes as `verify_tree_greedy`.
    """
    batch, num_nodes = trees.candidates.shape
    predicts = np.full(batch * num_nodes, -1, np.int32)
    accept_index = np.full((batch, width), -1, np.int32)
    for b in range(batch):
        length = int(lengths[b])
        rows = b * num_nodes + np.arange(length)
        accept_index[b, :length] = rows
        if simulation.tokens is SimulatedTokens.FIXED:
            predicts[rows] = FIXED_TOKEN
        else:
            predicts[rows[:-1]] = trees.candidates[b, 1:length].numpy()
            predicts[rows[-1]] = int(target_predict[b, length - 1])
    return VerifyResult(
        torch.from_numpy(predicts), torch.from_numpy(accept_index), (lengths - 1).int()
    )


def _length(simulation: Simulation, seed: int, position: int, width: int) -> int:
    wanted = min(simulation.accept_length, float(width))
    if simulation.method is SimulatedMethod.MATCH_EXPECTED:
        low = math.floor(wanted)
        coin = uniform_at(seed, position, 0, Domain.SIMULATE)
        return low + (1 if coin < wanted - low else 0)
    drawn = math.floor(simulation.accept_length + standard_normal(seed, position) + 0.5)
    return min(max(drawn, 1), width)


def standard_normal(seed: int, position: int) -> float:
    """A draw of mean 0 and variance 1: the sum of twelve uniforms, less 6, exact in float64."""
    words = np.stack(philox(seed, [0, 1, 2], position, 0, Domain.SIMULATE))
    ticks = int((words >> np.uint32(_UNIFORM_BITS)).astype(np.int64).sum())
    return (ticks + 6) * 2.0**-23 - 6.0
