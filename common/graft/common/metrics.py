"""Prometheus registry and exposition. Knows no metric of a service; each service owns its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, start_http_server


def serve(registry: CollectorRegistry, host: str, port: int) -> None:
    """Serves `registry` at /metrics from a thread of its own; port 0 serves nothing."""
    if port:
        start_http_server(port, addr=host, registry=registry)


ROUND_SECONDS_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
