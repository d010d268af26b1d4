"""Rows over a cache of noise, one by one: plain rows, prefill chunks and tree nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from graft.kernels.ops import KvCache, StepRows


@dataclass(slots=True)
class StepBuilder:
    """Collects rows; `sequence_pages[s]` are the physical pages of sequence s."""

    page_tokens: int
    sequence_pages: list[list[int]]
    positions: list[int] = field(default_factory=list)
    write_slots: list[int] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    prefix_len: list[int] = field(default_factory=list)
    extras: list[list[int]] = field(default_factory=list)

    def slot(self, sequence: int, number: int) -> int:
        """The physical slot of a logical key."""
        page = self.sequence_pages[sequence][number // self.page_tokens]
        return page * self.page_tokens + number % self.page_tokens

    def plain(self, sequence: int, position: int) -> None:
        """A row that sees keys 0..position of its sequence."""
        self._append(sequence, position, self.slot(sequence, position), position + 1, [])

    def node(self, sequence: int, committed: int, slots: list[int]) -> None:
        """A tree node over `committed` keys whose path, itself last, lies in `slots`."""
        self._append(sequence, committed + len(slots) - 1, slots[-1], committed, slots)

    def rows(self) -> StepRows:
        """The rows so far as tensors."""
        width = max(len(pages) for pages in self.sequence_pages)
        table = [pages + [-1] * (width - len(pages)) for pages in self.sequence_pages]
        pointers = [0]
        for path in self.extras:
            pointers.append(pointers[-1] + len(path))
        flat = [slot for path in self.extras for slot in path]
        return StepRows(
            positions=_ints(self.positions),
            write_slots=_ints(self.write_slots),
            sequence=_ints(self.sequence),
            page_table=torch.tensor(table, dtype=torch.int32),
            prefix_len=_ints(self.prefix_len),
            extra_ptr=_ints(pointers),
            extra_slots=_ints(flat),
        )

    def _append(
        self, sequence: int, position: int, write_slot: int, prefix: int, extras: list[int]
    ) -> None:
        self.positions.append(position)
        self.write_slots.append(write_slot)
        self.sequence.append(sequence)
        self.prefix_len.append(prefix)
        self.extras.append(extras)


def random_cache(
    generator: torch.Generator, *, slots: int, kv_heads: int, head_dim: int, page_tokens: int
) -> KvCache:
    """Two layers of normal keys and values."""
    shape = (2, slots, kv_heads, head_dim)
    return KvCache(
        torch.randn(shape, generator=generator),
        torch.randn(shape, generator=generator),
        page_tokens,
    )


def shuffled_pages(generator: torch.Generator, counts: list[int]) -> list[list[int]]:
    """Pages for sequences of `counts` pages each, in no order, none shared."""
    order = torch.randperm(sum(counts), generator=generator).tolist()
    return [[order.pop() for _ in range(count)] for count in counts]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True when no bit differs, the sign of zero included."""
    return a.shape == b.shape and bool(
        (a.contiguous().view(torch.int32) == b.contiguous().view(torch.int32)).all()
    )


def _ints(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
