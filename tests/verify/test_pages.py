"""The page pool: states, sharing, eviction and the rule that only an owner writes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.verify.pages import OutOfPages, PagePool, PageTable

TOKENS = np.arange(100, dtype=np.int32)


def table(pool: PagePool, salt: str = "") -> PageTable:
    return PageTable(pool, salt)


def test_a_pool_counts_free_used_and_cached_pages() -> None:
    pool = PagePool(8, 4)
    held = table(pool)
    held.attach(TOKENS, 10, headroom=0)
    assert (pool.num_free, pool.num_used, pool.num_cached) == (5, 3, 0)
    held.publish(TOKENS, 10)
    held.release()
    assert (pool.num_free, pool.num_used, pool.num_cached) == (6, 0, 2)
    pool.check()


def test_a_known_prefix_is_shared_up_to_its_last_full_page() -> None:
    pool = PagePool(8, 4)
    first, second = table(pool), table(pool)
    first.attach(TOKENS, 12, headroom=0)
    first.publish(TOKENS, 12)
    assert second.attach(TOKENS, 13, headroom=0) == 12
    assert second.pages[:3] == first.pages
    assert pool.owners(first.pages[0]) == 2


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    pool = PagePool(8, 4)
    first, second = table(pool), table(pool)
    first.attach(TOKENS, 12, headroom=0)
    first.publish(TOKENS, 12)
    assert second.attach(TOKENS, 12, headroom=0) == 8


def test_salts_keep_prefixes_apart() -> None:
    pool = PagePool(8, 4)
    first, second = table(pool, "tenant a"), table(pool, "tenant b")
    first.attach(TOKENS, 12, headroom=0)
    first.publish(TOKENS, 12)
    assert second.attach(TOKENS, 12, headroom=0) == 0


def test_a_prefix_that_differs_in_its_first_page_shares_nothing() -> None:
    pool = PagePool(16, 4)
    first, second = table(pool), table(pool)
    first.attach(TOKENS, 12, headroom=0)
    first.publish(TOKENS, 12)
    other = TOKENS.copy()
    other[0] = 77
    assert second.attach(other, 12, headroom=0) == 0


def test_reuse_can_be_declined() -> None:
    pool = PagePool(8, 4)
    first, second = table(pool), table(pool)
    first.attach(TOKENS, 12, headroom=0)
    first.publish(TOKENS, 12)
    assert second.attach(TOKENS, 12, headroom=0, reuse=False) == 0


def test_the_oldest_cached_pages_are_evicted_first_and_tails_before_heads() -> None:
    pool = PagePool(4, 4)
    held = table(pool)
    held.attach(TOKENS, 16, headroom=0)
    held.publish(TOKENS, 16)
    pages = list(held.pages)
    held.release()
    assert pool.allocate(1) == [pages[3]]
    assert pool.allocate(1) == [pages[2]]


def test_an_evicted_page_is_no_longer_found() -> None:
    pool = PagePool(4, 4)
    held = table(pool)
    held.attach(TOKENS, 16, headroom=0)
    held.publish(TOKENS, 16)
    held.release()
    pool.release(pool.allocate(3))
    again = table(pool)
    assert again.attach(TOKENS, 16, headroom=0) == 4
    pool.check()


def test_what_does_not_fit_takes_nothing() -> None:
    pool = PagePool(4, 4)
    held = table(pool)
    with pytest.raises(OutOfPages):
        held.attach(TOKENS, 20, headroom=0)
    with pytest.raises(OutOfPages):
        held.attach(TOKENS, 16, headroom=1)
    assert pool.num_free == 4
    assert held.attach(TOKENS, 16, headroom=0) == 0


def test_shared_pages_count_as_taken_when_headroom_is_judged() -> None:
    pool = PagePool(4, 4)
    first, second = table(pool), table(pool)
    first.attach(TOKENS, 12, headroom=0)
    first.publish(TOKENS, 12)
    first.release()
    with pytest.raises(OutOfPages):
        second.attach(TOKENS, 16, headroom=1)
    assert second.attach(TOKENS, 16, headroom=0) == 12


def test_trimming_gives_back_only_what_is_not_needed() -> None:
    pool = PagePool(8, 4)
    held = table(pool)
    held.attach(TOKENS, 9, headroom=0)
    held.reserve(20)
    assert len(held.pages) == 5
    held.trim(9)
    assert len(held.pages) == 3
    assert pool.num_free == 5


def test_forgotten_pages_are_not_reused() -> None:
    pool = PagePool(8, 4)
    first, second = table(pool), table(pool)
    first.attach(TOKENS, 12, headroom=0)
    first.publish(TOKENS, 12)
    first.release(forget=True)
    assert second.attach(TOKENS, 12, headroom=0) == 0
    pool.check()


def test_writing_into_a_shared_or_published_page_is_caught() -> None:
    pool = PagePool(8, 4)
    first, second = table(pool), table(pool)
    first.attach(TOKENS, 12, headroom=0)
    first.publish(TOKENS, 12)
    second.attach(TOKENS, 13, headroom=0)
    with pytest.raises(AssertionError, match="published"):
        first.check_writable(11, 12)
    with pytest.raises(AssertionError, match="leave the pages"):
        second.check_writable(12, 17)
    second.check_writable(12, 16)


def test_releasing_twice_is_caught() -> None:
    pool = PagePool(8, 4)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(pages)


def test_slots_follow_the_pages() -> None:
    pool = PagePool(8, 4)
    held = table(pool)
    held.pages = [5, 2, 7]
    assert held.slots(3, 9).tolist() == [23, 8, 9, 10, 11, 28]
    assert held.slots(4, 4).tolist() == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=40))
def test_pages_are_never_lost_or_doubled(moves: list[tuple[int, int]]) -> None:
    """Random sessions attach, grow, publish, trim and go; four prompts share prefixes."""
    pool = PagePool(12, 4)
    live: dict[int, tuple[PageTable, int]] = {}
    for who, length in moves:
        tokens = np.concatenate([TOKENS[:8], np.full(92, who // 2, np.int32)])
        if who not in live:
            held = table(pool)
            try:
                held.attach(tokens, length, headroom=0)
                live[who] = (held, length)
            except OutOfPages:
                assert held.pages == []
        else:
            held, held_length = live.pop(who)
            held.publish(tokens, held_length)
            if length % 2:
                held.release()
            else:
                try:
                    held.reserve(held_length + length)
                except OutOfPages:
                    pass
                held.trim(held_length)
                live[who] = (held, held_length)
        pool.check()
    for held, _ in live.values():
        held.release()
    pool.check()
    assert pool.num_used == 0
