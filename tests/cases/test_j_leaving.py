"""Clients and drafters that leave: at any moment, many times, while everything is stuck."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import psutil
import pytest

from graft.common.channel import open_channel
from graft.draft.server import DraftServer
from graft.draft.settings import DraftSettings
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model
from graft.testing.verify_client import eventually
from graft.v1 import gateway_pb2
from graft.v1.gateway_pb2_grpc import GatewayServiceStub

LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(model) as running:
        yield running


def all_idle(cluster: Cluster) -> bool:
    engine = cluster.verifiers[0].engine
    assert engine is not None
    now = engine.snapshot()
    return (
        now.num_pages_free == now.num_pages
        and now.num_running == now.num_waiting == 0
        and cluster.drafters[0].num_sessions == 0
        and cluster.gateway.gateway.num_in_flight == 0
    )


def cancelled(cluster: Cluster) -> float:
    text = cluster.gateway.gateway.metrics.exposition().decode()
    counts = [line for line in text.splitlines() if line.startswith("graft_cancelled_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in counts)


def long_stream() -> gateway_pb2.CompleteStreamRequest:
    return gateway_pb2.CompleteStreamRequest(
        prompts=[gateway_pb2.Prompt(text="go on and on ")],
        options=gateway_pb2.GenerationOptions(**LONG),
    )


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_grpc_client_that_gives_up_stops_all_three_services(
    cluster: Cluster, how: str
) -> None:
    async with open_channel(f"127.0.0.1:{cluster.gateway.grpc_port}") as channel:
        call = GatewayServiceStub(channel).CompleteStream(
            long_stream(), timeout=0.15 if how == "deadline" else 30
        )
        await call.read()
        if how == "cancel":
            call.cancel()
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: all_idle(cluster))
    assert cancelled(cluster) == 1


async def test_a_cancel_that_races_with_the_last_token_harms_nobody(cluster: Cluster) -> None:
    bystander = asyncio.create_task(cluster.complete("by", temperature=0, **LONG))
    rng = random.Random(3)

    async def racer() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=30) as client:
            for _ in range(40):
                body = {"prompt": "short", "max_tokens": rng.randrange(1, 6)}
                sending = asyncio.create_task(client.post("/v1/completions", json=body))
                await asyncio.wait([sending], timeout=rng.uniform(0, 0.06))
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    await asyncio.gather(*(racer() for _ in range(4)))
    crowded = (await bystander)["choices"]
    await eventually(lambda: all_idle(cluster))
    assert (await cluster.complete("by", temperature=0, **LONG))["choices"] == crowded


async def test_a_draft_service_restarted_under_load_fails_no_request(model: Path) -> None:
    async with running_cluster(model, gateway={"poll_s": 0.1}) as cluster:
        body = {"prompt": "one two one two ", "temperature": 0, "max_tokens": 120}
        body["ignore_eos"] = True
        expected = (await cluster.complete(**{**body, "speculation": "off"}))["choices"]
        stop = asyncio.Event()
        texts: list[Any] = []

        async def load() -> None:
            while not stop.is_set():
                texts.append((await cluster.complete(**body))["choices"])

        running = [asyncio.create_task(load()) for _ in range(3)]
        port = int(cluster.draft_addresses[0].rpartition(":")[2])
        drafter = cluster.drafters[0]
        for _ in range(8):
            await drafter.stop(0)
            drafter = DraftServer(DraftSettings.load(None, {"port": port}))
            await drafter.start()
            await eventually(lambda: drafter.num_sessions > 0, within_s=10)  # noqa: B023
        stop.set()
        await asyncio.gather(*running)
        assert texts and all(choices == expected for choices in texts)
        await drafter.stop(0)


@pytest.mark.slow
async def test_cancelled_streams_leave_no_memory(cluster: Cluster) -> None:
    process = psutil.Process()

    async def some(number: int) -> None:
        async with open_channel(f"127.0.0.1:{cluster.gateway.grpc_port}") as channel:
            stub = GatewayServiceStub(channel)
            for _ in range(number):
                call = stub.CompleteStream(long_stream(), timeout=30)
                await call.read()
                call.cancel()

    await asyncio.gather(*(some(250) for _ in range(4)))
    await eventually(lambda: all_idle(cluster))
    before = process.memory_info().rss
    await asyncio.gather(*(some(1500) for _ in range(4)))
    await eventually(lambda: all_idle(cluster))
    assert process.memory_info().rss - before < 20 << 20
