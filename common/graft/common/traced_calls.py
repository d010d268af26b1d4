"""A span for each call that a gRPC server answers. Knows no service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from inspect import isasyncgenfunction
from typing import Any

import grpc
import grpc.aio

from graft.common.tracing import Tracing, parent_of

_OURS = "/graft.v1."


class TraceInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Traces calls of our own services whose caller has a span, and with `roots` the others too.

    It stands inside the one that maps errors, so that it sees what a method raised.
    """

    def __init__(self, tracing: Tracing, *, roots: bool) -> None:
        self._tracing = tracing
        self._roots = roots

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(_OURS):
            return handler
        headers = {
            str(key): value
            for key, value in details.invocation_metadata or ()
            if isinstance(value, str)
        }
        parent = parent_of(headers)
        if parent is None and not self._roots:
            return handler

        def span() -> Any:
            name = details.method.removeprefix("/")
            service, _, method = name.partition("/")
            attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
            return self._tracing.serving(name, parent, attributes)

        if handler.unary_unary:
            make, method = grpc.unary_unary_rpc_method_handler, _one(handler.unary_unary, span)
        elif handler.unary_stream:
            make, method = grpc.unary_stream_rpc_method_handler, _many(handler.unary_stream, span)
        elif handler.stream_stream:
            make, method = grpc.stream_stream_rpc_method_handler, _many(handler.stream_stream, span)
        else:
            return handler
        return make(method, handler.request_deserializer, handler.response_serializer)


def _one(method: Callable[..., Any], span: Callable[[], Any]) -> Callable[..., Any]:
    async def traced(request: Any, context: Any) -> Any:
        with span():
            return await method(request, context)

    return traced


def _many(method: Callable[..., Any], span: Callable[[], Any]) -> Callable[..., Any]:
    if not isasyncgenfunction(method):
        return _one(method, span)

    async def traced(request: Any, context: Any) -> AsyncIterator[Any]:
        with span():
            async with aclosing(method(request, context)) as responses:
                async for response in responses:
                    yield response

    return traced
