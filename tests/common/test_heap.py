"""Collections are nobody's working time, and settled objects are not visited again."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

from graft.common import heap


@pytest.fixture
def many() -> Iterator[list[list[object]]]:
    """Enough objects that one collection takes measurable time."""
    gc.disable()
    yield [[] for _ in range(400_000)]
    gc.enable()
    gc.unfreeze()


def test_working_time_counts_work_and_not_collections(many: list[list[object]]) -> None:
    cpu, working = time.thread_time(), heap.working_time()
    gc.collect()
    collected = time.thread_time() - cpu
    assert heap.working_time() - working < 0.2 * collected
    cpu, working = time.thread_time(), heap.working_time()
    sum(len(one) for one in many)
    worked = time.thread_time() - cpu
    assert heap.working_time() - working == pytest.approx(worked, rel=0.1)


def test_settled_objects_are_left_alone(many: list[list[object]]) -> None:
    heap.settle()
    assert gc.get_freeze_count() >= len(many)
    assert len(gc.get_objects()) < len(many)
