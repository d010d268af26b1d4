"""Prometheus registry and exposition. Knows no metric of a service; each service owns its own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, start_http_server

from graft.common.errors import InvalidArgument


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
