"""A gRPC server with health, reflection, error mapping and drain. Knows no service."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from types import AsyncGeneratorType
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from graft.common import log
from graft.common.channel import (
    VERIFY_MESSAGE_BYTES,
    Tls,
    claim_loop,
    is_loopback,
    server_credentials,
    server_options,
)
from graft.common.errors import (
    DOMAIN,
    GraftError,
    InvalidArgument,
    ProtocolBroken,
    error_class,
    mapping_of,
)
from graft.common.traced_calls import TraceInterceptor
from graft.common.tracing import OFF, Tracing
from graft.v1.error_reason_pb2 import ErrorReason

_log = log.get("server")
_MAX_MESSAGE = 4096
_closings: set[asyncio.Future[None]] = set()


class GrpcServer:
    """One server on one port; `start` binds, `stop` drains and ends it."""

    def __init__(
        self,
        service_names: Sequence[str],
        *,
        tls: Tls | None = None,
        plaintext_ok: bool = False,
        message_bytes: int = VERIFY_MESSAGE_BYTES,
        tracing: Tracing = OFF,
        trace_roots: bool = False,
    ) -> None:
        claim_loop()
        self._tls = tls
        self._plaintext_ok = plaintext_ok
        self._names = [*service_names]
        self.port = 0
        self.health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        interceptors: list[Any] = [ErrorInterceptor()]
        if tracing.enabled:
            interceptors.append(TraceInterceptor(tracing, roots=trace_roots))
        self.server = grpc.aio.server(
            interceptors=interceptors, options=server_options(message_bytes)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        reflection.enable_server_reflection(
            [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.server
        )

    async def start(self, host: str, port: int) -> int:
        """Binds and starts; returns the port, which matters when 0 was asked for.

        Raises:
            InvalidArgument: the port is in use, or plain text was asked for beyond loopback.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls is not None:
                bound = self.server.add_secure_port(address, server_credentials(self._tls))
            elif self._plaintext_ok or is_loopback(address):
                bound = self.server.add_insecure_port(address)
            else:
                raise InvalidArgument(
                    f"{address} is reachable from outside: give TLS files, or allow plain text "
                    "with --insecure on a network you trust",
                    field="host",
                )
        except RuntimeError as error:
            raise InvalidArgument(
                f"cannot listen on {address}: is the port in use?", field="port"
            ) from error
        await self.server.start()
        self.port = bound
        return bound

    async def set_serving(self, serving: bool) -> None:
        """Sets the health of the server and of each of its services."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *self._names):
            await self.health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """NOT_SERVING first, then waits up to `grace_s` for running calls, then ends."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


async def wait_for_signal() -> str:
    """Returns the name of the first SIGINT or SIGTERM."""
    loop = asyncio.get_running_loop()
    seen: asyncio.Future[str] = loop.create_future()

    def arrived(name: str) -> None:
        if not seen.done():
            seen.set_result(name)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, arrived, number.name)
    return await seen


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Turns GraftError into a status with google.rpc.ErrorInfo, and anything else into INTERNAL."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                _guard_unary(handler.unary_unary),
                _lenient(handler.request_deserializer),
                handler.response_serializer,
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                _guard_stream(handler.unary_stream),
                _lenient(handler.request_deserializer),
                handler.response_serializer,
            )
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(
                _guard_stream(handler.stream_stream),
                _lenient(handler.request_deserializer),
                handler.response_serializer,
            )
        return handler


class _Undecodable:
    """What stands in for a message that is none, until a method would see it."""

    def __init__(self, reason: str) -> None:
        self.error = ProtocolBroken(f"a message cannot be decoded: {reason}")


def _lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """A deserializer that does not raise: grpc would end the call as a defect of ours, or raise
    in the middle of a method that reads a stream."""
    if deserialize is None:
        return None

    def read(message: bytes) -> Any:
        try:
            return deserialize(message)
        except DecodeError as error:
            return _Undecodable(str(error))

    return read


class _Requests:
    """A stream of requests; one that cannot be decoded raises ProtocolBroken."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = requests

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return _decoded(await anext(self._requests))


def _decoded(request: Any) -> Any:
    """The request, or what its method gets to read of its requests.

    Raises:
        ProtocolBroken: it cannot be decoded.
    """
    if isinstance(request, _Undecodable):
        raise request.error
    return _Requests(request) if hasattr(request, "__anext__") else request


def _guard_unary(method: Callable[..., Any]) -> Callable[..., Any]:
    """Also for streaming methods that write to the context, such as health's Watch."""

    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await method(_decoded(request), context)
        except GraftError as error:
            await _abort(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError, grpc.aio.BaseError):
            raise
        except Exception:
            _log.exception("call failed")
            await _abort(context, GraftError("internal error"))

    return guarded


def _guard_stream(method: Callable[..., Any]) -> Callable[..., Any]:
    if not inspect.isasyncgenfunction(method):
        return _guard_unary(method)

    async def guarded(
        request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        try:
            async with aclosing(method(_decoded(request), context)) as responses:
                # A call that is cut while a response is being sent leaves its generators to the
                # garbage collector, and what they hold with them.
                context.add_done_callback(lambda _: _close_left(responses))  # type: ignore[arg-type]
                async for response in responses:
                    yield response
        except GraftError as error:
            await _abort(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError, grpc.aio.BaseError, GeneratorExit):
            raise
        except Exception:
            _log.exception("call failed")
            await _abort(context, GraftError("internal error"))

    return guarded


def _close_left(responses: AsyncGeneratorType[Any, None]) -> None:
    if responses.ag_frame is None or responses.ag_running:
        return
    closing = asyncio.ensure_future(responses.aclose())
    _closings.add(closing)
    closing.add_done_callback(_closings.discard)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: GraftError) -> None:
    await context.abort_with_status(  # type: ignore[attr-defined]
        rpc_status.to_status(status_of(error))
    )


def status_of(error: GraftError) -> status_pb2.Status:
    """The google.rpc.Status of an error: ErrorInfo, and BadRequest and RetryInfo where they fit."""
    details = [
        error_details_pb2.ErrorInfo(reason=ErrorReason.Name(error.reason), domain=DOMAIN),
    ]
    packed = [_packed(detail) for detail in details]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=str(error)[:_MAX_MESSAGE]
        )
        packed.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        packed.append(_packed(retry))
    return status_pb2.Status(
        code=mapping_of(error).code.value, message=str(error)[:_MAX_MESSAGE], details=packed
    )


def error_from_call(failure: grpc.aio.AioRpcError) -> GraftError | None:
    """The GraftError a peer sent, or None when the status carries none of ours."""
    status = rpc_status.from_call(failure)  # type: ignore[arg-type]
    if status is None:
        return None
    error: GraftError | None = None
    info, bad, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    field: str | None = None
    retry_after_s: float | None = None
    reason: str | None = None
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason = info.reason
        elif detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    if reason is not None and reason in ErrorReason.keys():
        cls = error_class(ErrorReason.Value(reason))
        error = GraftError.__new__(cls)
        GraftError.__init__(error, status.message, field=field, retry_after_s=retry_after_s)
    return error


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
