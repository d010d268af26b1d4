"""What is counted later is there at every scrape, and never waits for more than many others."""

from __future__ import annotations

import threading

from prometheus_client import Counter
from prometheus_client.exposition import generate_latest

from graft.common.metrics import Later, Registry


class Counted:
    """A counter that is fed later."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.taken: list[int] = []
        self.later: Later[int] = Later(self.registry, self._count)
        self._counter = Counter("things", "Things", registry=self.registry)

    def _count(self, thing: int) -> None:
        self.taken.append(thing)
        self._counter.inc()


def test_a_scrape_finds_all_that_came_before_it() -> None:
    counted = Counted()
    for thing in range(3):
        counted.later.add(thing)
    assert counted.taken == []
    assert "things_total 3.0" in generate_latest(counted.registry).decode()
    counted.later.add(3)
    assert counted.registry.get_sample_value("things_total") == 4.0
    counted.later.add(4)
    some = counted.registry.restricted_registry(["things_total"])
    assert "things_total 5.0" in generate_latest(some).decode()
    assert counted.taken == [0, 1, 2, 3, 4]


def test_many_are_counted_without_a_scrape() -> None:
    counted = Counted()
    for thing in range(1000):
        counted.later.add(thing)
    assert 1000 - len(counted.taken) < 64


def test_scrapes_of_another_thread_lose_nothing_and_count_nothing_twice() -> None:
    counted = Counted()
    done = threading.Event()

    def scrape() -> None:
        while not done.is_set():
            generate_latest(counted.registry)

    scraping = threading.Thread(target=scrape)
    scraping.start()
    for thing in range(20_000):
        counted.later.add(thing)
    done.set()
    scraping.join()
    generate_latest(counted.registry)
    assert sorted(counted.taken) == list(range(20_000))
