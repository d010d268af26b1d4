"""Starts one verify and one draft replica of this project as processes, each on a core of its own.

They end with the block that started them, and with this process however it ends.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

import grpc.aio
import httpx

from graft.bench.services import free_ports, start_child, stop_process
from graft.common.channel import open_channel
from graft.common.errors import GraftError
from graft.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

_HOST = "127.0.0.1"
_START_S = 600.0
_ASK_S = 0.2
_SENT = "graft_draft_sent_bytes_total"


@dataclass(frozen=True, slots=True)
class Cores:
    """What to serve, and on which cores. proposer: as in the draft service's `proposers`.

    draft_flags: more words for `graft draft`.
    """

    model: str
    precision: str
    proposer: str
    verify_core: int = 0
    draft_core: int = 1
    draft_flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Replicas:
    """Addresses, and the payload bytes that draft has sent to verify so far."""

    verify: str
    draft: str
    sent: Callable[[], Awaitable[float]]


@asynccontextmanager
async def two_replicas(cores: Cores) -> AsyncIterator[Replicas]:
    """Both replicas, ready; they are ended after.

    Raises:
        GraftError: they did not start; the message has what they said last.
    """
    verify, draft, metrics = free_ports(3)
    words = {
        cores.verify_core: (
            "verify",
            f"--model={cores.model}",
            f"--precision={cores.precision}",
            "--threads=1",
            f"--port={verify}",
        ),
        cores.draft_core: (
            "draft",
            f"--proposers={cores.proposer}",
            f"--model={cores.model}",
            "--threads=1",
            f"--port={draft}",
            f"--metrics-port={metrics}",
            *cores.draft_flags,
        ),
    }
    async with AsyncExitStack() as stack:
        said = stack.enter_context(tempfile.TemporaryFile("w+"))
        processes = []
        for core, command in words.items():
            processes.append(await _start(core, command, said))
            stack.push_async_callback(stop_process, processes[-1])
        addresses = f"{_HOST}:{verify}", f"{_HOST}:{draft}"
        if not await _ready(processes, *addresses):
            said.seek(0)
            last = " | ".join(said.read().strip().splitlines()[-4:])
            raise GraftError(f"the replicas did not start: {last}")
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=10.0))

        async def sent() -> float:
            page = await client.get(f"http://{_HOST}:{metrics}/metrics")
            lines = (line.split() for line in page.text.splitlines())
            return next((float(value) for name, value, *_ in lines if name == _SENT), 0.0)

        yield Replicas(*addresses, sent)


async def _start(core: int, words: Sequence[str], said: IO[str]) -> asyncio.subprocess.Process:
    process = await start_child(words, said)
    # Threads that it starts from here on stay on the core.
    os.sched_setaffinity(process.pid, {core})
    return process


async def _ready(
    processes: Sequence[asyncio.subprocess.Process], verify_address: str, draft_address: str
) -> bool:
    """True once both answer; False when one of them ended instead."""
    until = time.monotonic() + _START_S
    async with open_channel(verify_address) as verify, open_channel(draft_address) as draft:
        asks: list[tuple[Any, Any]] = [
            (
                verify_pb2_grpc.VerifyServiceStub(verify).Describe,
                verify_pb2.VerifyServiceDescribeRequest(),
            ),
            (
                draft_pb2_grpc.DraftServiceStub(draft).Describe,
                draft_pb2.DraftServiceDescribeRequest(),
            ),
        ]
        while all(one.returncode is None for one in processes) and time.monotonic() < until:
            with suppress(grpc.aio.AioRpcError):
                for ask, request in asks:
                    await ask(request, timeout=5.0)
                return True
            await asyncio.sleep(_ASK_S)
    return False
