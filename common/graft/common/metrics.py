"""Prometheus registry and exposition. Knows no metric of a service; each service owns its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import RestrictedRegistry

from graft.common.errors import InvalidArgument

T = TypeVar("T")
_MANY = 64


class Registry(CollectorRegistry):
    """One whose every scrape finds counted what was left for later."""

    def __init__(self) -> None:
        super().__init__()
        self._later: list[Callable[[], None]] = []

    def before_scrapes(self, settle: Callable[[], None]) -> None:
        """Has `settle` called before every scrape, on the scraper's thread."""
        self._later.append(settle)

    def collect(self) -> Iterable[Metric]:
        """All metrics."""
        self._settle()
        return super().collect()

    def restricted_registry(self, names: Iterable[str]) -> RestrictedRegistry:
        """Those of some names."""
        self._settle()
        return super().restricted_registry(names)

    def _settle(self) -> None:
        for settle in self._later:
            settle()


class Later(Generic[T]):
    """Has things counted at the next scrape, or once many wait; until then each costs an append.

    Between two steps of a target whose weights push all else out of the caches, the library takes
    several times as long for one thing as for each of many. What waits should be small.
    """

    def __init__(self, registry: Registry, count: Callable[[T], None]) -> None:
        self._count = count
        self._waiting: deque[T] = deque()
        registry.before_scrapes(self._settle)

    def add(self, thing: T) -> None:
        """Has it counted later."""
        self._waiting.append(thing)
        if len(self._waiting) >= _MANY:
            self._settle()

    def _settle(self) -> None:
        while self._waiting:
            try:
                thing = self._waiting.popleft()
            except IndexError:  # another thread has taken it
                return
            self._count(thing)


def serve(registry: CollectorRegistry, host: str, port: int) -> Callable[[], None]:
    """Serves `registry` at /metrics from a thread of its own until the returned function is called.

    Port 0 serves nothing.

    Raises:
        InvalidArgument: the port is in use.
    """
    if not port:
        return lambda: None
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise InvalidArgument(
            f"cannot serve metrics on {host}:{port}: is the port in use?", field="metrics_port"
        ) from error

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return close


ROUND_SECONDS_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
