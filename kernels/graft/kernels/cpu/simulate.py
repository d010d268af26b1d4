"""Simulated acceptance, all sessions of a batch at once. Meaning: graft.kernels.reference.simulate.

Lengths are two Philox draws a session, so they come from the reference itself.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from graft.kernels.reference.simulate import (
    FIXED_TOKEN,
    SimulatedMethod,
    SimulatedTokens,
    Simulation,
    simulated_lengths,
)
from graft.kernels.trees import VerifyResult, VerifyTrees

__all__ = [
    "FIXED_TOKEN",
    "SimulatedMethod",
    "SimulatedTokens",
    "Simulation",
    "simulate_accept",
    "simulated_lengths",
]


def simulate_accept(
    simulation: Simulation, trees: VerifyTrees, target_predict: Tensor, lengths: Tensor, width: int
) -> VerifyResult:
    """The result of a verify step that accepted `lengths`, the first nodes of each row."""
    tokens = trees.candidates.numpy()
    batch, num_nodes = tokens.shape
    length = lengths.numpy().astype(np.int64)[:, None]
    column = np.arange(num_nodes)
    taken = column < length
    following = np.full((batch, num_nodes), FIXED_TOKEN, np.int64)
    if simulation.tokens is SimulatedTokens.REAL_DRAFT_TOKEN:
        following[:, :-1] = tokens[:, 1:]
        last = column == length - 1
        following[last] = target_predict.numpy()[last]
    predicts = np.where(taken, following, -1).astype(np.int32).reshape(-1)
    rows = np.arange(batch)[:, None] * num_nodes + np.arange(width)
    accept_index = np.where(np.arange(width) < length, rows, -1).astype(np.int32)
    return VerifyResult(
        torch.from_numpy(predicts), torch.from_numpy(accept_index), (lengths - 1).int()
    )
