"""An OTLP collector that keeps what it gets: real gRPC, one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from graft.common.channel import claim_loop


@dataclass(frozen=True, slots=True)
class SeenSpan:
    """A span as it came, with the name of the service that made it."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    failed: bool
    lasted_s: float
    attributes: dict[str, Any] = field(default_factory=dict)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps spans; `endpoint` is what services are told."""

    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []
        self.endpoint = ""
        self._changed = asyncio.Condition()

    async def Export(self, request: Any, context: Any) -> Any:
        """Takes a batch."""
        async with self._changed:
            for resource in request.resource_spans:
                service = _attributes(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_seen(service, span) for span in scope.spans]
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def until(self, what: Callable[[list[SeenSpan]], bool]) -> list[SeenSpan]:
        """Waits until something is true of the spans; the test's timeout is the limit."""
        async with self._changed:
            await self._changed.wait_for(lambda: what(self.spans))
        return self.spans


@asynccontextmanager
async def running_collector() -> AsyncIterator[Collector]:
    """A collector on a port of its own."""
    claim_loop()
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
        collector, server
    )
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)


def _seen(service: str, span: Any) -> SeenSpan:
    return SeenSpan(
        service=service,
        name=span.name,
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        failed=span.status.code == span.status.STATUS_CODE_ERROR,
        lasted_s=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        attributes=_attributes(span.attributes),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
