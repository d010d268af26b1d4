"""A real server and a real channel: errors, limits, health, ports, one loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from graft.common.channel import claim_loop, is_loopback, open_channel
from graft.common.errors import GraftError, InvalidArgument, Overloaded, ProtocolBroken
from graft.common.server import GrpcServer, error_from_call
from graft.v1 import verify_pb2, verify_pb2_grpc

SERVICE = "graft.v1.VerifyService"


class Faulty(verify_pb2_grpc.VerifyServiceServicer):
    """Raises what it is told to."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.cleaned = asyncio.Event()

    async def Describe(self, request: Any, context: Any) -> Any:
        if self.error is not None:
            raise self.error
        return verify_pb2.VerifyServiceDescribeResponse(model_id="m")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield verify_pb2.GenerateResponse(sequence=0)
            if self.error is not None:
                raise self.error
            async for _ in request:
                pass
        finally:
            self.cleaned.set()


@pytest.fixture
async def served() -> AsyncIterator[tuple[Faulty, verify_pb2_grpc.VerifyServiceStub, GrpcServer]]:
    faulty = Faulty()
    server = GrpcServer([SERVICE], message_bytes=1 << 20)
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(faulty, server.server)
    port = await server.start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield faulty, verify_pb2_grpc.VerifyServiceStub(channel), server
    await server.stop(0)


async def test_an_error_arrives_as_itself(served: Any) -> None:
    faulty, stub, _ = served
    faulty.error = Overloaded("queue holds 8, limit is 8", field="queue", retry_after_s=1.5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Describe(verify_pb2.VerifyServiceDescribeRequest(), timeout=5)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    error = error_from_call(caught.value)
    assert isinstance(error, Overloaded)
    assert (str(error), error.field, error.retry_after_s) == (
        "queue holds 8, limit is 8",
        "queue",
        1.5,
    )


async def test_a_defect_is_internal_and_shows_nothing(served: Any) -> None:
    faulty, stub, _ = served
    faulty.error = RuntimeError("secret path")
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Describe(verify_pb2.VerifyServiceDescribeRequest(), timeout=5)
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        assert "secret" not in (caught.value.details() or "")
    call = stub.Generate()
    assert (await call.read()).sequence == 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.INTERNAL


async def test_a_cancelled_stream_runs_its_finally_at_once(served: Any) -> None:
    faulty, stub, _ = served
    call = stub.Generate()
    await call.read()
    call.cancel()
    await asyncio.wait_for(faulty.cleaned.wait(), 2)


async def test_a_message_over_the_cap_costs_only_its_call(served: Any) -> None:
    _, stub, _ = served
    big = verify_pb2.GenerateRequest()
    big.open.prompt_tokens.extend([40_000] * 500_000)
    call = stub.Generate()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.write(big)
        while await call.read() is not grpc.aio.EOF:
            pass
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    answer = await stub.Describe(verify_pb2.VerifyServiceDescribeRequest(), timeout=5)
    assert answer.model_id == "m"


async def test_health_follows_the_service(served: Any) -> None:
    _, _, server = served
    for serving in (True, False):
        await server.set_serving(serving)
        async with open_channel(f"127.0.0.1:{server.port}") as own:
            health = health_pb2_grpc.HealthStub(own)
            answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5)
        assert (answer.status == health_pb2.HealthCheckResponse.SERVING) == serving


async def test_a_port_in_use_is_one_sentence(served: Any) -> None:
    _, _, server = served
    second = GrpcServer([SERVICE])
    with pytest.raises(InvalidArgument, match="port in use"):
        await second.start("127.0.0.1", server.port)
    await second.stop(0)


async def test_plain_text_leaves_the_machine_only_when_asked_for() -> None:
    with pytest.raises(InvalidArgument, match="TLS"):
        open_channel("10.0.0.1:7001")
    await open_channel("10.0.0.1:7001", plaintext_ok=True).close()
    outside = GrpcServer([SERVICE])
    with pytest.raises(InvalidArgument, match="TLS"):
        await outside.start("0.0.0.0", 0)
    await outside.stop(0)
    assert is_loopback("dns:///localhost:1") and not is_loopback("verify:7001")


async def test_a_second_loop_is_refused() -> None:
    claim_loop()

    def elsewhere() -> str:
        async def claim() -> None:
            claim_loop()

        try:
            asyncio.run(claim())
        except RuntimeError as error:
            return str(error)
        return ""

    assert "another event loop" in await asyncio.to_thread(elsewhere)


def test_errors_without_details_of_ours_are_not_claimed() -> None:
    assert error_from_call(_bare(grpc.StatusCode.UNAVAILABLE)) is None
    assert isinstance(GraftError("x"), Exception)


def _bare(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())


async def test_a_message_that_is_none_is_the_fault_of_its_sender(served: Any) -> None:
    _, _, server = served
    rubbish = b"\xff\xff\xff\xff"
    async with open_channel(f"127.0.0.1:{server.port}") as own:
        unary = own.unary_unary(f"/{SERVICE}/Describe")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unary(rubbish, timeout=5)
        assert isinstance(error_from_call(caught.value), ProtocolBroken)
        call = own.stream_stream(f"/{SERVICE}/Generate")(timeout=5)
        await call.read()
        await call.write(rubbish)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "cannot be decoded" in (caught.value.details() or "")
