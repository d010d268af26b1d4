"""A replica's life: loading, health, stalls, drain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import Tensor

from graft.common.channel import open_channel
from graft.common.errors import (
    Draining,
    GraftError,
    InvalidArgument,
    ModelNotFound,
    NoReplica,
    NumericFailure,
    Stalled,
)
from graft.common.model_cache import Progress
from graft.common.server import error_from_call
from graft.kernels.cpu.library import available
from graft.kernels.ops import KvCache, StepRows
from graft.testing.gate import Gate, Gated
from graft.testing.plain import Plain
from graft.testing.verify_client import (
    Say,
    Seat,
    VerifyBench,
    eventually,
    running_verify,
    settings_of,
)
from graft.v1 import verify_pb2, verify_pb2_grpc
from graft.verify.loading import Loaded, load
from graft.verify.server import SERVICE_NAME, VerifyServer
from graft.verify.settings import VerifySettings

PROMPT = list(b"hello")


async def health_of(channel: grpc.aio.Channel, name: str = SERVICE_NAME) -> str:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def until_health(bench: VerifyBench, status: str) -> None:
    """Watches the health service until it says `status`."""
    wanted = health_pb2.HealthCheckResponse.ServingStatus.Value(status)
    async with open_channel(bench.address) as channel, asyncio.timeout(5):
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        async for answer in health_pb2_grpc.HealthStub(channel).Watch(request):
            if answer.status == wanted:
                return


async def failure(call: Callable[[], object]) -> GraftError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call()  # type: ignore[misc]
    error = error_from_call(caught.value)
    assert error is not None
    return error


async def test_a_replica_is_not_serving_until_its_model_is_there(tiny_model: Path) -> None:
    loader = Gated()
    loader.begin.clear()
    server = VerifyServer(settings_of(tiny_model), loader)
    port = await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            assert await health_of(channel) == "NOT_SERVING"
            stub = verify_pb2_grpc.VerifyServiceStub(channel)
            request = verify_pb2.VerifyServiceDescribeRequest()
            error = await failure(lambda: stub.Describe(request))
            assert isinstance(error, NoReplica)
            assert "loading" in str(error)
            loader.begin.set()
            await server.ready()
            assert await health_of(channel) == "SERVING"
            assert await health_of(channel, "") == "SERVING"
            assert (await stub.Describe(request)).vocab_size == 320
    finally:
        loader.begin.set()
        await server.stop(0)


async def test_a_model_that_is_not_there_is_named(tiny_model: Path) -> None:
    server = VerifyServer(settings_of(tiny_model.parent / "nowhere"))
    await server.start()
    with pytest.raises(ModelNotFound, match="nowhere"):
        await server.ready()
    await server.stop(0)


async def test_memory_that_does_not_suffice_names_the_number_to_lower(tiny_model: Path) -> None:
    server = VerifyServer(settings_of(tiny_model, memory_gb=0.01, kv_tokens=1 << 20))
    await server.start()
    with pytest.raises(InvalidArgument, match=r"lower kv_tokens from 1048576 to \d+ or less"):
        await server.ready()
    await server.stop(0)


async def test_a_target_that_writes_nan_is_not_served(tiny_model: Path) -> None:
    def poisoned(settings: VerifySettings, progress: Progress) -> Loaded:
        loaded = load(settings, progress)
        loaded.target.decoder.weights.final_norm.fill_(float("nan"))
        return loaded

    server = VerifyServer(settings_of(tiny_model), poisoned)
    await server.start()
    with pytest.raises(NumericFailure):
        await server.ready()
    await server.stop(0)


@pytest.mark.skipif(not available(), reason="only native kernels promise equal bits")
async def test_a_target_whose_trees_change_the_text_is_not_served(tiny_model: Path) -> None:
    class Crooked(Gate):
        def forward(
            self, tokens: Tensor, rows: StepRows, kv: KvCache, output_rows: Tensor | None
        ) -> Tensor:
            hidden = super().forward(tokens, rows, kv, output_rows)
            return -hidden if len(rows.extra_slots) else hidden

    def crooked(settings: VerifySettings, progress: Progress) -> Loaded:
        loaded = load(settings, progress)
        decoder = Crooked(loaded.target.decoder)
        return replace(loaded, target=replace(loaded.target, decoder=decoder))

    server = VerifyServer(settings_of(tiny_model), crooked)
    await server.start()
    with pytest.raises(GraftError, match="self-check"):
        await server.ready()
    await server.stop(0)


async def test_a_context_beyond_the_models_is_refused(tiny_model: Path) -> None:
    server = VerifyServer(settings_of(tiny_model, context_length=1024))
    await server.start()
    with pytest.raises(InvalidArgument, match="1024"):
        await server.ready()
    await server.stop(0)


def test_limits_that_contradict_each_other_are_refused(tiny_model: Path) -> None:
    with pytest.raises(InvalidArgument, match="max_step_rows is 8, expected more than max_running"):
        VerifyServer(settings_of(tiny_model, max_step_rows=8, max_running=8))


async def test_a_port_in_use_is_named(tiny_model: Path) -> None:
    async with running_verify(tiny_model) as bench:
        port = int(bench.address.rpartition(":")[2])
        second = VerifyServer(settings_of(tiny_model, port=port))
        with pytest.raises(InvalidArgument, match="in use"):
            await second.start()
        await second.stop(0)


async def test_a_step_that_does_not_end_turns_health_and_moves_sessions(
    tiny_model: Path, plain: Plain
) -> None:
    loader = Gated()
    async with running_verify(tiny_model, loader=loader, stall_s=0.2) as bench:
        assert loader.gate is not None
        loader.gate.close()
        try:
            error = await failure(lambda: bench.generate(PROMPT, 5))
            assert isinstance(error, Stalled)
            await until_health(bench, "NOT_SERVING")
            about = await bench.stub.Describe(verify_pb2.VerifyServiceDescribeRequest())
            assert about.last_progress_micros > 200_000
            assert isinstance(await failure(lambda: bench.generate(PROMPT, 5)), Stalled)
        finally:
            loader.gate.open.set()
        await until_health(bench, "SERVING")
        await eventually(bench.idle_pages)
        assert (await bench.generate(PROMPT, 5)).tokens == plain.text(PROMPT, 5)


async def test_an_idle_replica_stays_healthy(tiny_model: Path) -> None:
    async with running_verify(tiny_model, stall_s=0.25) as bench:
        await bench.generate(PROMPT, 2)
        await asyncio.sleep(0.6)
        async with open_channel(bench.address) as channel:
            assert await health_of(channel) == "SERVING"


async def test_a_forward_that_raises_ends_its_sessions_only(tiny_model: Path, plain: Plain) -> None:
    loader = Gated()
    async with running_verify(tiny_model, loader=loader) as bench:
        assert loader.gate is not None
        loader.gate.broken = True
        error = await failure(lambda: bench.generate(PROMPT, 5))
        assert type(error) is GraftError
        loader.gate.broken = False
        assert (await bench.generate(PROMPT, 5)).tokens == plain.text(PROMPT, 5)
        await eventually(bench.idle_pages)


async def test_a_cancel_during_a_step_keeps_its_pages_until_the_step_is_over(
    tiny_model: Path,
) -> None:
    loader = Gated()
    async with running_verify(tiny_model, loader=loader) as bench:
        assert loader.gate is not None and bench.server.engine is not None
        loader.gate.close()
        running = asyncio.create_task(bench.generate(PROMPT, 50))
        await asyncio.to_thread(loader.gate.reached.wait, 5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await eventually(
            lambda: bench.server.engine is not None and bench.server.engine.num_unapplied > 0
        )
        assert not bench.idle_pages()
        loader.gate.open.set()
        await eventually(bench.idle_pages)


async def test_draining_finishes_what_runs_and_refuses_what_comes(
    tiny_model: Path, plain: Plain
) -> None:
    loader = Gated()
    async with running_verify(tiny_model, loader=loader) as bench:
        assert loader.gate is not None
        loader.gate.close()
        running = asyncio.create_task(bench.generate(PROMPT, 20))
        await asyncio.to_thread(loader.gate.reached.wait, 5)
        stopping = asyncio.create_task(bench.server.stop(10))
        await until_health(bench, "NOT_SERVING")
        late = asyncio.create_task(failure(lambda: bench.generate(PROMPT, 5)))
        await asyncio.sleep(0.05)
        loader.gate.open.set()
        assert (await running).tokens == plain.text(PROMPT, 20)
        assert isinstance(await late, Draining)
        await stopping


async def test_what_outlasts_the_drain_is_told_to_move(tiny_model: Path) -> None:
    loader = Gated()
    async with running_verify(tiny_model, loader=loader) as bench:
        assert loader.gate is not None
        loader.gate.close()
        running = asyncio.create_task(failure(lambda: bench.generate(PROMPT, 20)))
        await asyncio.to_thread(loader.gate.reached.wait, 5)
        stopping = asyncio.create_task(bench.server.stop(0.05))
        assert isinstance(await running, Draining)
        loader.gate.open.set()
        await stopping


async def test_stopping_ends_draft_streams_well(tiny_model: Path) -> None:
    async def silent(seat: Seat) -> Say | None:
        return None

    async with running_verify(tiny_model) as bench:
        drafter = bench.drafter(silent)
        await drafter.welcomed.wait()
        await bench.server.stop(0.1)
        assert await drafter.call.code() == grpc.StatusCode.OK


async def test_metrics_are_served_on_their_own_port(tiny_model: Path) -> None:
    async with running_verify(tiny_model) as bench:
        await bench.generate(PROMPT, 4)
        assert bench.metric("graft_rounds_total", outcome="prefill") == 1
        assert bench.metric("graft_rounds_total", outcome="plain") == 3
        assert bench.metric("graft_committed_tokens_total") == 4
        assert bench.metric("graft_fallback_rounds_total", reason="off") == 3
        assert bench.metric("graft_accept_length_sum") == 3
        assert bench.metric("graft_round_seconds_count", stage="verify") == 4
        assert bench.metric("graft_kv_pages", state="used") == 0
        total = sum(bench.metric("graft_kv_pages", state=s) for s in ("free", "cached"))
        assert total == 128
