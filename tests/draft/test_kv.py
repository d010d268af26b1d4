"""Pages of draft lanes: shared, bounded, grown on demand, and all given back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.draft.kv import PAGE_TOKENS, DraftKv, KvShape, Lane, OutOfPages

SHAPE = KvShape(num_layers=2, num_kv_heads=1, head_dim=4)


def test_slots_of_lanes_never_meet_and_run_on_within_a_page() -> None:
    kv = DraftKv(SHAPE, 10_000)
    lanes = [Lane(), Lane(base=7, length=7), Lane()]
    for stop in (20, 40, 90):
        for lane in lanes:
            kv.reserve(lane, stop)
    slots = [lane.slots(lane.base, 90).tolist() for lane in lanes]
    assert [len(one) for one in slots] == [90, 83, 90]
    assert len({slot for one in slots for slot in one}) == 263
    first = slots[0][:PAGE_TOKENS]
    assert first == list(range(first[0], first[0] + PAGE_TOKENS))


def test_growth_keeps_what_is_cached() -> None:
    kv = DraftKv(SHAPE, 100_000)
    lane = Lane()
    kv.reserve(lane, 50)
    places = torch.from_numpy(lane.slots(0, 50).astype(np.int64))
    kv.cache.keys[:, places] = torch.randn(2, 50, 1, 4)
    before, num_pages = kv.cache.keys[:, places].clone(), kv.num_pages
    kv.reserve(Lane(), num_pages * PAGE_TOKENS)
    assert kv.num_pages > num_pages
    assert torch.equal(kv.cache.keys[:, places], before)


def test_a_pool_that_is_full_says_so_and_takes_nothing() -> None:
    kv = DraftKv(SHAPE, 4 * PAGE_TOKENS)
    first, second = Lane(), Lane()
    kv.reserve(first, 3 * PAGE_TOKENS)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 of 4 are free"):
        kv.reserve(second, 2 * PAGE_TOKENS)
    assert second.pages == []
    kv.release(first)
    kv.reserve(second, 4 * PAGE_TOKENS)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300)), max_size=40))
@settings(deadline=None)
def test_free_and_used_pages_are_all_there_are(steps: list[tuple[int, int]]) -> None:
    kv = DraftKv(SHAPE, 60 * PAGE_TOKENS)
    lanes = [Lane() for _ in range(6)]
    for place, stop in steps:
        if stop == 0:
            kv.release(lanes[place])
        else:
            try:
                kv.reserve(lanes[place], stop)
            except OutOfPages:
                assert kv.num_pages == 60
        held = [page for lane in lanes for page in lane.pages]
        assert len(held) == len(set(held))
        assert len(held) + kv.num_free == kv.num_pages <= 60
