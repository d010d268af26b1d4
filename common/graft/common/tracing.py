"""Spans of one process, sent by OTLP over gRPC; none unless an endpoint is named. Knows no service.

The current span travels in the context of a task, as OpenTelemetry's API keeps it. Between
services it is the W3C ``traceparent``: in the metadata of a session's own call, in a field where
sessions share a call.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from graft.common import log
from graft.common.channel import is_loopback
from graft.common.errors import GraftError, InvalidArgument, reason_name

Attributes = Mapping[str, str | bool | int | float]

ENDPOINT_VARIABLES = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"]

_log = log.get("tracing")
_W3C = TraceContextTextMapPropagator()
_HEADERS = ("traceparent", "tracestate")
_EXPORT_TIMEOUT_S = 5.0
_LIBRARY = "graft"


class _Provider(Protocol):
    """What is used of the SDK's TracerProvider."""

    def get_tracer(self, name: str) -> Tracer: ...

    def shutdown(self) -> None: ...


class Tracing:
    """The spans of one service. `OFF` makes none."""

    def __init__(self, provider: _Provider | None, rounds: float = 0.0) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer(_LIBRARY)
        self._rounds = rounds

    @property
    def enabled(self) -> bool:
        """False when no span is ever made."""
        return self._tracer is not None

    def begin(
        self, name: str, parent: Context | None, kind: SpanKind, attributes: Attributes
    ) -> Span:
        """A span that begins now, not current anywhere; whoever began it ends it."""
        if self._tracer is None:
            return trace.INVALID_SPAN
        parent = Context() if parent is None else parent
        return self._tracer.start_span(name, parent, kind, dict(attributes))

    @contextmanager
    def serving(self, name: str, parent: Context | None, attributes: Attributes) -> Iterator[Span]:
        """A span of a request, current in this task until it ends; a failure is its status."""
        span = self.begin(name, parent, SpanKind.SERVER, attributes)
        token = otel_context.attach(trace.set_span_in_context(span))
        try:
            yield span
        except GraftError as error:
            failed(span, reason_name(error.reason))
            raise
        except Exception as error:
            failed(span, type(error).__name__)
            raise
        except BaseException:
            span.set_attribute("graft.cancelled", True)
            raise
        finally:
            span.end()
            otel_context.detach(token)

    def sampled(self, number: int) -> bool:
        """Whether round `number` of a session gets a span: the first, then evenly spaced ones."""
        return math.ceil((number + 1) * self._rounds) > math.ceil(number * self._rounds)

    def past(self, name: str, parent: Span, lasted_s: float, attributes: Attributes) -> None:
        """A span below `parent` of what ended just now."""
        if self._tracer is None or not parent.is_recording():
            return
        end = time.time_ns()
        span = self._tracer.start_span(
            name,
            trace.set_span_in_context(parent, Context()),
            SpanKind.INTERNAL,
            dict(attributes),
            start_time=end - round(lasted_s * 1e9),
        )
        span.end(end)

    def close(self) -> None:
        """Sends what is left, and ends; blocks for a few seconds at most."""
        if self._provider is not None:
            self._provider.shutdown()


OFF = Tracing(None)


def open_tracing(
    service: str, endpoint: str, *, share: float = 1.0, rounds: float = 0.0
) -> Tracing:
    """Tracing to `endpoint`, or `OFF` without one.

    share: of requests that come without a trace, those that are traced; others follow their caller.
    rounds: of a traced session's rounds, those with a span of their own.

    Raises:
        InvalidArgument: the endpoint is no address, or the OpenTelemetry SDK is not installed.
    """
    if not endpoint:
        return OFF
    plain = _is_plain(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError:
        raise InvalidArgument(
            "--otlp-endpoint needs the OpenTelemetry SDK and its OTLP exporter: "
            "pip install 'graft-serve[otel]'",
            field="otlp_endpoint",
        ) from None
    _route_warnings()
    resource = Resource.create({"service.name": f"graft-{service}", "service.version": _version()})
    provider = TracerProvider(
        ParentBased(TraceIdRatioBased(share)), resource, shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter(endpoint, insecure=plain, timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider, rounds)


def failed(span: Span, kind: str) -> None:
    """Marks a span as failed, by a word from a small set: messages may hold what users wrote."""
    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR)


def parent_of(headers: Mapping[str, str]) -> Context | None:
    """The caller's span, or None when the headers name none that can be read."""
    found = {name: headers[name] for name in _HEADERS if name in headers}
    context = _W3C.extract(found, Context())
    return context if trace.get_current_span(context).get_span_context().is_valid else None


def current() -> Span:
    """The span that this task works for; one that records nothing when there is none."""
    return trace.get_current_span()


def traceparent() -> str:
    """The current span for a field or a header; empty when nothing is traced."""
    return dict(outgoing_metadata()).get("traceparent", "")


def outgoing_metadata() -> Sequence[tuple[str, str]]:
    """The current span for the metadata of a call; empty when nothing is traced."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return tuple(carrier.items())


def _is_plain(endpoint: str) -> bool:
    """True when spans go as plain text.

    Raises:
        InvalidArgument: the endpoint is neither an address on this machine nor a URL.
    """
    scheme, found, rest = endpoint.rpartition("://")
    if scheme in ("http", "https") and rest:
        return scheme == "http"
    if not found and is_loopback(endpoint):
        return True
    raise InvalidArgument(
        f"the OTLP endpoint is {endpoint!r}, expected http://HOST:PORT, or https://HOST:PORT for "
        "TLS",
        field="otlp_endpoint",
    )


def _version() -> str:
    try:
        return version("graft-serve")
    except PackageNotFoundError:
        return "0.0.0"


class _Lines(logging.Handler):
    """The SDK's complaints as lines of our log; an equal one is told once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg not in self._told:
            self._told.add(str(record.msg))
            _log.warning("spans were not sent", detail=record.getMessage())


def _route_warnings() -> None:
    logger = logging.getLogger("opentelemetry")
    if not logger.handlers:
        logger.addHandler(_Lines())
        logger.propagate = False
