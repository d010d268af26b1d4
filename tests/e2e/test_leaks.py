"""Clients that leave at any moment cost nothing that stays."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from graft.common.channel import open_channel
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model
from graft.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

NUM_REQUESTS = 200
AT_ONCE = 12


async def counts(cluster: Cluster) -> dict[str, int]:
    """What must be back at its idle level."""
    async with open_channel(cluster.verify_addresses[0]) as channel:
        verify = await verify_pb2_grpc.VerifyServiceStub(channel).Describe(
            verify_pb2.VerifyServiceDescribeRequest(), timeout=5
        )
    async with open_channel(cluster.draft_addresses[0]) as channel:
        draft = await draft_pb2_grpc.DraftServiceStub(channel).Describe(
            draft_pb2.DraftServiceDescribeRequest(), timeout=5
        )
    return {
        "running": verify.running_session_count,
        "waiting": verify.waiting_session_count,
        "pages in use": verify.kv_page_count - verify.kv_page_free_count,
        "attended": draft.session_count,
    }


async def leave_early(cluster: Cluster, rng: random.Random) -> None:
    """One request that is read to its end, or cut off after a random time."""
    body: dict[str, Any] = {
        "model": cluster.model,
        "prompt": "ab " * rng.randrange(1, 40),
        "max_tokens": rng.randrange(1, 120),
        "ignore_eos": True,
        "stream": rng.random() < 0.7,
        "n": rng.choice([1, 1, 2]),
        "speculation": rng.choice(["auto", "auto", "off"]),
    }
    patience = rng.choice([0.0, 0.01, 0.05, 0.2, 30.0])

    async def read() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=30) as client:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_bytes():
                    pass

    with suppress(TimeoutError, httpx.HTTPError):
        await asyncio.wait_for(read(), patience)


async def test_everything_is_back_within_two_seconds(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    async with running_cluster(model, verify={"max_running": 6}) as cluster:
        await cluster.complete("warm up", max_tokens=8)
        process = psutil.Process()
        idle, files = await counts(cluster), process.num_fds()
        assert set(idle.values()) == {0}
        rng = random.Random(5)
        places = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            async with places:
                await leave_early(cluster, rng)

        await asyncio.gather(*(one() for _ in range(NUM_REQUESTS)))
        deadline = asyncio.get_running_loop().time() + 2.0
        while True:
            now = await counts(cluster)
            level = process.num_fds()
            if now == idle and level <= files + 2:
                break
            assert asyncio.get_running_loop().time() < deadline, (now, level, files)
            await asyncio.sleep(0.05)
        body = await cluster.complete("still here", max_tokens=8, ignore_eos=True)
        assert body["usage"]["completion_tokens"] == 8
