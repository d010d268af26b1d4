"""Hidden states of the target that a drafter works from. Knows positions and widths, no model.

Row p belongs to position p of the committed prefix. Rows stand without gaps from `start` on; they
follow the commits, so the root, which the target has not run yet, never has one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graft.common.errors import InvalidArgument
from graft.common.feature_codec import decode
from graft.common.features import FeatureSpec
from graft.common.tree import FloatArray
from graft.v1.features_pb2 import FeatureCodec

_LEAST_ROWS = 64


@dataclass(frozen=True, slots=True)
class FeatureNeed:
    """Which hidden states of the target a proposer asks for.

    layers: in the numbering of Hugging Face: 0 is the embedding, i what layer i - 1 (from zero)
        left behind. A row holds them side by side in this order.
    final_norm: the last state of all is taken after the target's final norm, else before it.
    fused: verify applies the drafter's own projection first and sends one state instead.
    fused_id: which projection that is; `graft.common.projection` makes it from the weights.
    codec: how rows travel.
    window_tokens: recent rows that suffice; 0 wants all that are to be had.
    """

    layers: tuple[int, ...]
    final_norm: bool = True
    fused: bool = False
    fused_id: str = ""
    codec: FeatureCodec.ValueType = FeatureCodec.FEATURE_CODEC_BF16
    window_tokens: int = 0

    @property
    def spec(self) -> FeatureSpec:
        """What a row holds, as verify is asked for it."""
        fused_id = self.fused_id if self.fused else ""
        return FeatureSpec(self.layers, self.final_norm, self.codec, fused_id)


@dataclass(frozen=True, slots=True)
class FeatureTerms:
    """What a join asks for, and the values of a row that it then gets."""

    spec: FeatureSpec
    width: int
    window_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FeatureChunk:
    """Rows as they came, of `count` positions from `start` on."""

    start: int
    count: int
    payload: bytes


class FeatureStore:
    """Rows of one session, float32.

    fused: the rows have passed the drafter's projection already.
    codec: how rows come that `take` is given.
    """

    def __init__(
        self,
        width: int,
        start: int = 0,
        fused: bool = False,
        codec: FeatureCodec.ValueType = FeatureCodec.FEATURE_CODEC_BF16,
    ) -> None:
        self.width = width
        self.start = start
        self.fused = fused
        self.begun = False
        self._codec = codec
        self._rows = np.empty((0, width), np.float32)
        self._count = 0

    @property
    def length(self) -> int:
        """The position after the last row's."""
        return self.start + self._count

    def take(self, chunk: FeatureChunk) -> None:
        """Decodes and adds rows as they came; the first ones decide where the store starts.

        Raises:
            InvalidArgument: they do not follow the ones before, or have another size.
            NumericFailure: a value is not a finite number.
        """
        if self.begun and chunk.start != self.length:
            raise InvalidArgument(
                f"features of position {chunk.start} came, expected {self.length}",
                field="features",
            )
        rows = decode(chunk.payload, chunk.count, self.width, self._codec)
        if not self.begun:
            self.start = chunk.start
        self.append(rows)

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
        self.begun = True

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
