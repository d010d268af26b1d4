"""Lays out the rows of one forward pass over scattered pages, as a test wants to see them.

Knows the contract of the kernels; knows no scheduler. Pages are given to sequences in a shuffled
order, so that a mix-up of logical and physical slots shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from graft.kernels.ops import KvCache, StepRows


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one sequence: a chain from `start` on, or a tree whose root sits at `start`.

    parents: empty for a chain; for a tree the local parent of each node, -1 for the root, nodes
    in preorder.
    """

    sequence: int
    start: int
    tokens: Sequence[int]
    parents: Sequence[int] = ()


@dataclass(slots=True)
class Layout:
    """A KV cache and the pages of `num_sequences` sequences of up to `max_tokens` tokens."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_sequences: int = 1
    max_tokens: int = 256
    page_tokens: int = 16
    seed: int = 0
    kv: KvCache = field(init=False)
    page_table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        per_sequence = -(-self.max_tokens // self.page_tokens)
        num_pages = self.num_sequences * per_sequence
        shape = (self.num_layers, num_pages * self.page_tokens, self.num_kv_heads, self.head_dim)
        self.kv = KvCache(torch.full(shape, 7.5), torch.full(shape, -7.5), self.page_tokens)
        pages = np.random.default_rng(self.seed).permutation(num_pages).astype(np.int32)
        self.page_table = torch.from_numpy(pages.reshape(self.num_sequences, per_sequence))

    def slot(self, sequence: int, index: int) -> int:
        """The physical slot of a sequence's logical index."""
        page = int(self.page_table[sequence, index // self.page_tokens])
        return page * self.page_tokens + index % self.page_tokens

    def rows(self, pieces: Sequence[Piece]) -> tuple[Tensor, StepRows]:
        """Tokens and rows of one step; the pieces follow each other in it."""
        tokens: list[int] = []
        positions: list[int] = []
        write: list[int] = []
        sequence: list[int] = []
        prefix: list[int] = []
        extra: list[int] = []
        ends = [0]
        for piece in pieces:
            paths: list[list[int]] = []
            for node, token in enumerate(piece.tokens):
                slot = self.slot(piece.sequence, piece.start + node)
                tokens.append(token)
                write.append(slot)
                sequence.append(piece.sequence)
                if piece.parents:
                    parent = piece.parents[node]
                    paths.append([*(paths[parent] if parent >= 0 else []), slot])
                    positions.append(piece.start + len(paths[node]) - 1)
                    prefix.append(piece.start)
                    extra.extend(paths[node])
                else:
                    positions.append(piece.start + node)
                    prefix.append(piece.start + node + 1)
                ends.append(len(extra))
        return _int32(tokens), StepRows(
            positions=_int32(positions),
            write_slots=_int32(write),
            sequence=_int32(sequence),
            page_table=self.page_table,
            prefix_len=_int32(prefix),
            extra_ptr=_int32(ends),
            extra_slots=_int32(extra),
        )


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
