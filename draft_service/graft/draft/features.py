"""Hidden states of the target that a drafter works from. Knows positions and widths, no model.

Row p belongs to position p of the committed prefix. Rows stand without gaps from `start` on; they
follow the commits, so the root, which the target has not run yet, never has one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graft.common.errors import InvalidArgument
from graft.common.tree import FloatArray

_LEAST_ROWS = 64


@dataclass(frozen=True, slots=True)
class FeatureNeed:
    """Which hidden states of the target a proposer asks for.

    layers: in the numbering of Hugging Face: 0 is the embedding, i what layer i - 1 (from zero)
        left behind. A row holds them side by side in this order.
    final_norm: the last state of all is taken after the target's final norm, else before it.
    fused: verify applies the drafter's own projection first and sends one state instead.
    """

    layers: tuple[int, ...]
    final_norm: bool = True
    fused: bool = False


class FeatureStore:
    """Rows of one session, float32.

    fused: the rows have passed the drafter's projection already.
    """

    def __init__(self, width: int, start: int = 0, fused: bool = False) -> None:
        self.width = width
        self.start = start
        self.fused = fused
        self._rows = np.empty((0, width), np.float32)
        self._count = 0

    @property
    def length(self) -> int:
        """The position after the last row's."""
        return self.start + self._count

    def append(self, rows: FloatArray) -> None:
        """Adds the rows of the next positions: [rows, width].

        Raises:
            InvalidArgument: rows of another width.
        """
        if rows.ndim != 2 or rows.shape[1] != self.width:
            raise InvalidArgument(
                f"features are {list(rows.shape)}, expected [rows, {self.width}]", field="features"
            )
        end = self._count + len(rows)
        if end > len(self._rows):
            grown = np.empty((max(_LEAST_ROWS, 2 * end), self.width), np.float32)
            grown[: self._count] = self._rows[: self._count]
            self._rows = grown
        self._rows[self._count : end] = rows
        self._count = end

    def rows(self, first: int, stop: int) -> FloatArray:
        """[stop - first, width]: the rows of positions `first` to `stop` - 1.

        Raises:
            IndexError: some of them are not here.
        """
        if not self.start <= first <= stop <= self.length:
            raise IndexError(
                f"rows {first}..{stop - 1} were asked for, here are {self.start}..{self.length - 1}"
            )
        return self._rows[first - self.start : stop - self.start]

    def forget(self, before: int) -> None:
        """Drops the rows of positions before `before`."""
        dropped = min(max(0, before - self.start), self._count)
        if dropped:
            self._rows = self._rows[dropped : self._count].copy()
            self.start += dropped
            self._count -= dropped
