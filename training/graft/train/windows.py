"""Cuts a corpus into windows: an endless stream of shuffled sequences, sliced at equal lengths.

The stream is a function of (corpus, seed), and window n is its rows from n * length on, so a
stopped run goes on at any window. Knows no network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graft.train.corpus import SequenceRef
from graft.train.laws import LawTable
from graft.train.trainee import Batch, Laws


class Source(Protocol):
    """What windows read of a corpus."""

    @property
    def layers(self) -> tuple[int, ...]:
        """States of a row, in the numbering of Hugging Face."""

    def tokens(self, ref: SequenceRef) -> NDArray[np.int32]:
        """[n]"""

    def states(self, ref: SequenceRef) -> Tensor:
        """[n - 1, states, hidden], float32."""


@dataclass(frozen=True, slots=True)
class WindowShape:
    """length: rows to learn at. margin: rows behind them. count: windows of a batch."""

    length: int
    margin: int
    count: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows start..stop of one sequence, as they lie in one window."""

    number: int
    start: int
    stop: int


class Windows:
    """Batches of one split of a corpus.

    seed: None keeps the order of the corpus, as for held-out sequences.
    """

    def __init__(
        self,
        source: Source,
        refs: Sequence[SequenceRef],
        layers: tuple[int, ...],
        shape: WindowShape,
        seed: int | None,
        laws: LawTable | None = None,
    ) -> None:
        """layers: states that batches hold, in this order; laws: rows of `refs` in order."""
        self.shape = shape
        self._source, self._refs, self._laws, self._seed = source, refs, laws, seed
        self._picked = [source.layers.index(layer) for layer in layers]
        self._tokens = [source.tokens(ref) for ref in refs]
        # The last row of a sequence has a law, but no token behind it to learn from.
        self._rows = np.array([len(tokens) - 1 for tokens in self._tokens], np.int64)
        if not len(refs) or not self._rows.sum():
            raise ValueError("a corpus without sequences has no windows")
        self._law_starts = np.concatenate([[0], np.cumsum(self._rows)])
        self._orders: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    @property
    def num_rows(self) -> int:
        """Of one epoch."""
        return int(self._rows.sum())

    def batch(self, number: int) -> Batch:
        """Windows number * count and those behind it, of the endless stream."""
        shape = self.shape
        first = number * shape.count
        windows = [self._window((first + one) * shape.length) for one in range(shape.count)]
        return self._join(windows, number)

    def once(self) -> Iterator[Batch]:
        """The batches of one epoch; the last one runs on into the next."""
        per_batch = self.shape.length * self.shape.count
        for number in range(-(-self.num_rows // per_batch)):
            yield self.batch(number)

    def _window(self, offset: int) -> list[_Piece]:
        """What lies at `length + margin` rows of the stream from `offset` on."""
        pieces: list[_Piece] = []
        left = self.shape.length + self.shape.margin
        epoch, inside = divmod(offset, self.num_rows)
        while left:
            order, ends = self._order(epoch)
            at = int(np.searchsorted(ends, inside, side="right"))
            number = int(order[at])
            start = inside - (int(ends[at]) - int(self._rows[number]))
            stop = min(int(self._rows[number]), start + left)
            pieces.append(_Piece(number, start, stop))
            left -= stop - start
            inside += stop - start
            if inside == self.num_rows:
                epoch, inside = epoch + 1, 0
        return pieces

    def _order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The epoch's sequences, and where in the epoch each ends."""
        if epoch not in self._orders:
            if self._seed is None:
                order = np.arange(len(self._refs), dtype=np.int64)
            else:
                order = np.random.default_rng((self._seed, epoch)).permutation(len(self._refs))
            self._orders = {e: o for e, o in self._orders.items() if e >= epoch - 1}
            self._orders[epoch] = order, np.cumsum(self._rows[order])
        return self._orders[epoch]

    def _join(self, windows: list[list[_Piece]], number: int) -> Batch:
        rows = self.shape.length + self.shape.margin
        size = (len(windows), rows)
        tokens, following, positions = (np.zeros(size, np.int64) for _ in range(3))
        segments = np.full(size, -1, np.int64)
        answer, greedy = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
        law_rows = np.zeros(size, np.int64)
        states: list[Tensor] = []
        for line, pieces in enumerate(windows):
            at = 0
            for segment, piece in enumerate(pieces):
                ref, ids = self._refs[piece.number], self._tokens[piece.number]
                here = slice(at, at + piece.stop - piece.start)
                tokens[line, here] = ids[piece.start : piece.stop]
                following[line, here] = ids[piece.start + 1 : piece.stop + 1]
                places = np.arange(piece.start, piece.stop)
                positions[line, here] = places
                segments[line, here] = segment
                answer[line, here] = places + 1 >= ref.prompt_len
                greedy[line, here] = ref.temperature == 0
                law_rows[line, here] = self._law_starts[piece.number] + places
                states.append(self._source.states(ref)[piece.start : piece.stop, self._picked])
                at = here.stop
        joined = torch.cat(states)
        return Batch(
            tokens=torch.from_numpy(tokens),
            following=torch.from_numpy(following),
            states=joined.view(*size, *joined.shape[1:]),
            positions=torch.from_numpy(positions),
            segments=torch.from_numpy(segments),
            answer=torch.from_numpy(answer),
            greedy=torch.from_numpy(greedy),
            laws=None if self._laws is None else _laws(self._laws, law_rows),
            length=self.shape.length,
            seed=number if self._seed is None else self._seed * 1_000_003 + number,
        )


def _laws(table: LawTable, rows: NDArray[np.int64]) -> Laws:
    at = torch.from_numpy(rows)
    return Laws(table.columns[at].long(), table.masses[at].float())
