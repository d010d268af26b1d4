"""What became of pushed trees, as the verify replicas count it. Knows descriptions and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from graft.v1 import verify_pb2

Descriptions = Callable[[], Iterable[verify_pb2.VerifyServiceDescribeResponse]]


class TreeCounts(Collector):
    """Two counters of the gateway, as new as its last look at every replica.

    A replica that comes back counts from zero: what its former life counted stays in the sum.
    """

    def __init__(self, read: Descriptions) -> None:
        self._read = read
        self._pushed: dict[int, Mapping[str, int]] = {}
        self._rejected: dict[int, Mapping[str, int]] = {}

    def collect(self) -> Iterable[Metric]:
        """The sums over all replicas there have been."""
        for description in self._read():
            life = description.incarnation_id
            self._pushed[life] = dict(description.pushed_tree_counts)
            self._rejected[life] = dict(description.rejected_tree_counts)
        yield _family(
            "graft_pushed_trees",
            "Trees that came before they were asked for, by what became of them",
            "outcome",
            self._pushed.values(),
            ("hit", "miss", "stale"),
        )
        yield _family(
            "graft_rejected_trees", "Trees verify did not use", "reason", self._rejected.values()
        )


def _family(
    name: str,
    about: str,
    label: str,
    lives: Iterable[Mapping[str, int]],
    always: tuple[str, ...] = (),
) -> Metric:
    total: Counter[str] = Counter(dict.fromkeys(always, 0))
    for counts in lives:
        total.update(counts)
    family = CounterMetricFamily(name, about, labels=[label])
    for key, count in sorted(total.items()):
        family.add_metric([key], count)
    return family
