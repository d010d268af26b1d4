"""What the training loop asks of a network in training. Knows no network and no file.

Row j of a window is a place in one sequence: its token, the target's states after that token, and
so, by way of the target's head, the law of the token behind it. Windows have `length` rows to
learn at and up to `margin` rows behind them, so that a step that guesses several tokens ahead
finds their tokens and laws in the same window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Windows side by side; W is the length of a window, M its margin, K the states of a row.

    tokens: [B, W + M + 1], int64; column j + 1 is the token that row j's law is about. Columns
        past the end of a sequence hold 0.
    states: [B, W + M, K, hidden], float32; zero where the sequence has ended.
    positions: [B, W + M], int64, places in the sequence.
    known: [B, W + M], bool: the row exists, and so does the token behind it.
    answer: [B, W + M], bool: known, and the token behind it belongs to the answer.
    greedy: [B], bool: the answer was written at temperature 0.
    """

    tokens: Tensor
    states: Tensor
    positions: Tensor
    known: Tensor
    answer: Tensor
    greedy: Tensor
    length: int

    @property
    def margin(self) -> int:
        """Rows behind the last one that is learnt at."""
        return int(self.tokens.shape[1]) - 1 - self.length


@dataclass(frozen=True, slots=True)
class Loss:
    """What one batch came to.

    total: scalar, mean over the places that count, to be minimised.
    figures: what the log shows, for example agreement of each step.
    """

    total: Tensor
    figures: dict[str, float]


class Trainee(nn.Module, ABC):
    """A network in training: float32 weights, and the target's parts that it borrows as buffers.

    proposer: the name under which a draft service runs it.
    layers: the target's states that `Batch.states` has to hold, in this order, in the numbering
        of Hugging Face; whichever law the network learns is made from state `num_layers`.
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
        """Sums over a held-out batch, each with its count: what is good about the drafts.

        For example {"agree_1": (number of right first tokens, number of places)}. Sums of
        batches add up; the loop divides at the end.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes config.json and model.safetensors in the published layout, bfloat16."""

    def parameter_groups(self) -> list[dict[str, object]]:
        """Groups of an optimizer: "params", and what differs from the loop's defaults."""
        return [{"params": [one for one in self.parameters() if one.requires_grad]}]
