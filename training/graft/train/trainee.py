"""What the training loop asks of a network in training. Knows no network and no file.

A row is a place in one sequence: its token, the target's states after that token, and so the
target's law of the token behind it. A window is `length` rows to learn at and `margin` rows behind
them, so that a step that guesses several tokens ahead finds their tokens and laws in the same
window. Sequences follow one another within a window; rows see only rows of their own segment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Laws:
    """The likeliest tokens of each row's law, cut to the draft vocabulary and renormalised.

    columns: [..., k], int64, places in the draft vocabulary, likeliest first.
    masses: [..., k], float32; they sum to at most 1, the rest lies on all other columns.
    """

    columns: Tensor
    masses: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Windows side by side; W is the length of a window, M its margin, K the states of a row.

    tokens: [B, W + M], int64, the token of each row. following: [B, W + M], int64, the token that
        really came behind it.
    states: [B, W + M, K, hidden], float32.
    positions: [B, W + M], int64, places in the sequence.
    segments: [B, W + M], int64; equal numbers belong to one piece of a sequence, -1 is no row.
    answer: [B, W + M], bool: the token behind the row belongs to the answer.
    greedy: [B, W + M], bool: the answer was written at temperature 0.
    laws: over [B, W + M]; None where the run made none.
    seed: for whatever the trainee draws at random.
    """

    tokens: Tensor
    following: Tensor
    states: Tensor
    positions: Tensor
    segments: Tensor
    answer: Tensor
    greedy: Tensor
    laws: Laws | None
    length: int
    seed: int

    @property
    def margin(self) -> int:
        """Rows behind the last one that is learnt at."""
        return int(self.tokens.shape[1]) - self.length


@dataclass(frozen=True, slots=True)
class Loss:
    """What one batch came to.

    total: scalar, a mean over the places that count, to be minimised.
    figures: what the log shows, for example the cross-entropy of each step.
    """

    total: Tensor
    figures: dict[str, float]


class Trainee(nn.Module, ABC):
    """A network in training: float32 weights, and what it borrows of the target as buffers.

    proposer: the name under which a draft service runs it.
    layers: the target's states that `Batch.states` has to hold, in this order, in the numbering
        of Hugging Face.
    margin: rows that it needs behind a window.
    """

    proposer: str
    layers: tuple[int, ...]
    margin: int

    @abstractmethod
    def loss(self, batch: Batch, progress: float) -> Loss:
        """The loss of one batch. progress: 0 at the first step of training, 1 at the last."""

    @abstractmethod
    def figures(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Sums over a held-out batch, each with its count: how good the drafts are.

        For example {"agree_1": (number of right first tokens, number of places)}. The loop adds
        up the sums and the counts of all batches before it divides.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes config.json and model.safetensors in the published layout, bfloat16."""

    @abstractmethod
    def read(self, folder: Path) -> None:
        """In place: goes on from the weights of a drafter that `save` wrote.

        Raises:
            InvalidArgument: no drafter of this kind and shape is there.
        """

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Groups of an optimizer: "params", and what differs from the loop's defaults."""
        return [{"params": [one for one in self.parameters() if one.requires_grad]}]
