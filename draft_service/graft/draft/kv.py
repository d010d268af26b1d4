"""Keys and values of one draft model: pages that all its sessions share, and a lane for each.

Knows pages, slots and lengths; knows no tokens and no model. A lane's committed positions come
first, scratch for the nodes of a tree right behind them; the next catch-up writes over scratch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from graft.common.errors import GraftError
from graft.common.tree import IntArray
from graft.kernels.ops import KvCache
from graft.v1.error_reason_pb2 import ErrorReason

PAGE_TOKENS = 16
_FIRST_PAGES = 64


class OutOfPages(GraftError):
    """The pool is full; the session drafts nothing until others have gone."""

    reason = ErrorReason.ERROR_REASON_OVERLOADED


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token of a draft model keeps."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(slots=True, eq=False)
class Lane:
    """One session's keys and values.

    base: position of logical slot 0; above 0 for a drafter that joined late and got a window.
    length: positions base .. length - 1 are cached, and stay.
    pages: physical pages, in order.
    """

    base: int = 0
    length: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def num_cached(self) -> int:
        """Committed slots."""
        return self.length - self.base

    def slots(self, first: int, stop: int) -> IntArray:
        """[stop - first], int32: physical slots of logical slots counted from `base`.

        first, stop: positions; those from `length` on are scratch.
        """
        logical = np.arange(first - self.base, stop - self.base, dtype=np.int32)
        pages = np.asarray(self.pages, np.int32)[logical // PAGE_TOKENS]
        return np.asarray(pages * PAGE_TOKENS + logical % PAGE_TOKENS, np.int32)


class DraftKv:
    """The pool. Grows as it is needed, up to `max_tokens`; `cache` changes when it does."""

    def __init__(self, shape: KvShape, max_tokens: int) -> None:
        self._max_pages = max(1, max_tokens // PAGE_TOKENS)
        self._shape = shape
        self._free: list[int] = []
        self._more_holders: Counter[int] = Counter()
        self.num_pages = 0
        self.cache = KvCache(self._empty(0), self._empty(0), PAGE_TOKENS)

    @property
    def num_free(self) -> int:
        """Pages that no lane holds, of those there are now."""
        return len(self._free)

    def reserve(self, lane: Lane, stop: int) -> None:
        """Gives the lane pages for all positions before `stop`.

        Raises:
            OutOfPages: there are not enough; the lane keeps what it had.
        """
        wanted = -(-(stop - lane.base) // PAGE_TOKENS) - len(lane.pages)
        if wanted <= 0:
            return
        if wanted > len(self._free):
            self._grow(wanted - len(self._free))
        if wanted > len(self._free):
            raise OutOfPages(
                f"{wanted} pages wanted, {len(self._free)} of {self._max_pages} are free"
            )
        lane.pages += [self._free.pop() for _ in range(wanted)]

    def release(self, lane: Lane) -> None:
        """Takes all pages of a lane back; those of its forks stay with them."""
        self._take_back(reversed(lane.pages))
        lane.pages.clear()
        lane.length = lane.base

    def forget(self, lane: Lane, before: int) -> None:
        """Takes whole pages of positions before `before` back; the lane then begins later."""
        count = max(0, min(before, lane.length) - lane.base) // PAGE_TOKENS
        self._take_back(lane.pages[:count])
        del lane.pages[:count]
        lane.base += count * PAGE_TOKENS

    def fork(self, lane: Lane, stop: int) -> Lane:
        """A lane of its own with the same keys and values before `stop`, scratch included.

        Full pages are shared, as nobody writes to them; the others are copied.

        Raises:
            OutOfPages: there are not enough for the copies.
        """
        num_shared = lane.num_cached // PAGE_TOKENS
        other = Lane(lane.base, lane.length, lane.pages[:num_shared])
        self._more_holders.update(other.pages)
        try:
            self.reserve(other, stop)
        except OutOfPages:
            self.release(other)
            raise
        first = lane.base + num_shared * PAGE_TOKENS
        if stop > first:
            source = torch.from_numpy(lane.slots(first, stop)).long()
            target = torch.from_numpy(other.slots(first, stop)).long()
            for held in (self.cache.keys, self.cache.values):
                held[:, target] = held[:, source]
        return other

    def _take_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            if self._more_holders[page]:
                self._more_holders[page] -= 1
            else:
                del self._more_holders[page]
                self._free.append(page)

    def _grow(self, missing: int) -> None:
        wanted = max(self.num_pages + missing, 2 * self.num_pages, _FIRST_PAGES)
        num_pages = min(wanted, self._max_pages)
        if num_pages == self.num_pages:
            return
        keys, values = self._empty(num_pages), self._empty(num_pages)
        old = self.num_pages * PAGE_TOKENS
        keys[:, :old], values[:, :old] = self.cache.keys, self.cache.values
        self.cache = KvCache(keys, values, PAGE_TOKENS)
        self._free = [*range(num_pages - 1, self.num_pages - 1, -1), *self._free]
        self.num_pages = num_pages

    def _empty(self, num_pages: int) -> torch.Tensor:
        shape = self._shape
        return torch.empty(
            shape.num_layers, num_pages * PAGE_TOKENS, shape.num_kv_heads, shape.head_dim
        )
