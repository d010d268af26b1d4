"""The paged KV pool: who owns which page, and which pages can serve a prefix again.

Pure bookkeeping with page numbers and token hashes; knows no tensor, no model and no session.

A page is in one of three states: free, used (some table holds it), or cached (nobody holds it, but
its keys and values belong to a known prefix and are reused or evicted, oldest first).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from graft.common.tree import IntArray

PageKey = bytes


class OutOfPages(Exception):
    """The pool has fewer free and cached pages than asked for; nothing was taken.

    Never leaves the scheduler: it waits, trims or preempts instead.
    """


def first_key(salt: str) -> PageKey:
    """The key that the chain of a salt starts from; equal salts share pages, others never."""
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"graft-pages").digest()


def next_key(key: PageKey, tokens: IntArray) -> PageKey:
    """The key of the page that holds `tokens` after the page of `key`."""
    return hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=16, key=key).digest()


class PagePool:
    """All pages of a replica. free + used + cached == num_pages at all times."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages
        self._key_of: dict[int, PageKey] = {}
        self._page_of: dict[PageKey, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that hold nothing of use."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds but that could serve a known prefix."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages that some table holds."""
        return self.num_pages - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    def owners(self, page: int) -> int:
        """How many tables hold the page."""
        return self._owners[page]

    def find(self, keys: Sequence[PageKey]) -> list[int]:
        """The pages of the longest known run of `keys` from the first on."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def cost(self, pages: Sequence[int]) -> int:
        """How much `num_available` falls when `share` takes these found pages."""
        return sum(1 for page in pages if page in self._cached)

    def share(self, pages: Sequence[int]) -> None:
        """Adds one owner to each of these found pages."""
        for page in pages:
            assert page in self._key_of, f"page {page} is shared without a key"
            self._owners[page] += 1
            self._cached.pop(page, None)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages for one owner, evicting cached ones when no free one is left.

        Raises:
            OutOfPages: fewer are available.
        """
        if count > self.num_available:
            raise OutOfPages(f"{count} KV pages asked for, {self.num_available} available")
        pages = []
        for _ in range(count):
            if not self._free:
                page, _ = self._cached.popitem(last=False)
                self._drop_key(page)
                self._free.append(page)
            page = self._free.pop()
            assert self._owners[page] == 0, f"free page {page} has an owner"
            self._owners[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Takes one owner from each page; the last pages of a prefix become the first evicted."""
        for page in reversed(pages):
            self._owners[page] -= 1
            assert self._owners[page] >= 0, f"page {page} is released twice"
            if self._owners[page]:
                continue
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def publish(self, page: int, key: PageKey) -> None:
        """Offers a full, committed page for reuse; the first page of a key stays the known one."""
        assert self._owners[page] > 0, f"page {page} is published without an owner"
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def forget(self, pages: Sequence[int]) -> None:
        """Withdraws the offers of pages whose content is not to be trusted."""
        for page in pages:
            self._drop_key(page)
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    def check(self) -> None:
        """Asserts the pool's invariants; linear in the number of pages."""
        free, cached = set(self._free), set(self._cached)
        used = {page for page in range(self.num_pages) if self._owners[page]}
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached and not free & used and not cached & used, "page states overlap"
        assert len(free) + len(cached) + len(used) == self.num_pages, "a page is lost"
        assert cached <= set(self._key_of), "a cached page has no key"
        assert not free & set(self._key_of), "a free page has a key"
        assert {self._page_of[key] for key in self._key_of.values()} == set(self._key_of)

    def _drop_key(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]


class PageTable:
    """The pages of one session, by logical page. Holds what the session owns or shares."""

    def __init__(self, pool: PagePool, salt: str) -> None:
        self._pool = pool
        self._first_key = first_key(salt)
        self._keys: list[PageKey] = []
        self.pages: list[int] = []

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self._pool.page_tokens

    @property
    def keys(self) -> Sequence[PageKey]:
        """Keys of the first pages, those that were found or published."""
        return self._keys

    @property
    def capacity(self) -> int:
        """Number of tokens that fit the pages held."""
        return len(self.pages) * self._pool.page_tokens

    def needed(self, length: int) -> int:
        """Pages to allocate before `length` tokens fit."""
        return max(0, -(-length // self._pool.page_tokens) - len(self.pages))

    def attach(self, tokens: IntArray, length: int, headroom: int, *, reuse: bool = True) -> int:
        """Takes pages for the first `length` tokens, shared where their prefix is known.

        The last token is never taken from the cache: its row is what the choice comes from.
        Returns the number of tokens whose keys and values are already there.

        Raises:
            OutOfPages: fewer than `headroom` pages would be left; nothing was taken.
        """
        assert not self.pages, "pages are attached once"
        pool, size = self._pool, self._pool.page_tokens
        reusable = (length - 1) // size if reuse else 0
        found = pool.find(self._chain(tokens, reusable)[:reusable])
        fresh = -(-length // size) - len(found)
        if pool.num_available - pool.cost(found) - fresh < headroom:
            raise OutOfPages(f"{fresh} KV pages needed, {pool.num_available} available")
        pool.share(found)
        self.pages = [*found, *pool.allocate(fresh)]
        self._keys = self._keys[: len(found)]
        return len(found) * size

    def reserve(self, length: int) -> None:
        """Grows until `length` tokens fit.

        Raises:
            OutOfPages: the pool cannot; nothing was taken.
        """
        count = self.needed(length)
        if count:
            self.pages.extend(self._pool.allocate(count))

    def trim(self, length: int) -> None:
        """Releases the pages that `length` tokens do not need."""
        keep = -(-length // self._pool.page_tokens)
        if keep < len(self.pages):
            assert keep >= len(self._keys), "a published page is trimmed"
            self._pool.release(self.pages[keep:])
            del self.pages[keep:]

    def publish(self, tokens: IntArray, length: int) -> None:
        """Offers the pages that the first `length` tokens fill for reuse."""
        first = len(self._keys)
        self._chain(tokens, length // self._pool.page_tokens)
        for index in range(first, len(self._keys)):
            self._pool.publish(self.pages[index], self._keys[index])

    def release(self, *, forget: bool = False) -> None:
        """Gives everything back; `forget` keeps its content from being reused."""
        if forget:
            self._pool.forget(self.pages)
        self._pool.release(self.pages)
        self.pages, self._keys = [], []

    def slots(self, start: int, stop: int) -> IntArray:
        """[stop - start], int32: physical slots of the logical indices."""
        size = self._pool.page_tokens
        index = np.arange(start, stop, dtype=np.int32)
        first = start // size
        pages = np.asarray(self.pages[first : -(-stop // size)], np.int32)
        return np.asarray(pages[index // size - first] * size + index % size, np.int32)

    def check_writable(self, start: int, stop: int) -> None:
        """Asserts that this session alone owns what a step is about to write."""
        size = self._pool.page_tokens
        assert start >= len(self._keys) * size, "a write would touch a published page"
        assert stop <= self.capacity, "a write would leave the pages held"
        for page in self.pages[start // size : -(-stop // size)]:
            assert self._pool.owners(page) == 1, f"page {page} is shared and would be written"

    def _chain(self, tokens: IntArray, num_pages: int) -> list[PageKey]:
        """Extends the keys of full pages to `num_pages`."""
        size = self._pool.page_tokens
        for index in range(len(self._keys), num_pages):
            last = self._keys[-1] if self._keys else self._first_key
            self._keys.append(next_key(last, tokens[index * size : (index + 1) * size]))
        return self._keys
