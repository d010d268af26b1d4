"""Starts further gateways before replicas that run already, as processes, for measurements.

They end with the block that started them, and with this process however it ends.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import httpx

from graft.bench.services import free_ports, start_child, stop_process
from graft.common.errors import GraftError

_HOST = "127.0.0.1"
_START_S = 120.0
_ASK_S = 0.2


@asynccontextmanager
async def gateways(
    model: str, verify: str, draft: str, ways: Mapping[str, Sequence[str]]
) -> AsyncIterator[dict[str, str]]:
    """One gateway a way, ready, with a drafter connected; yields their URLs.

    verify: also where drafters are told to go. ways: further words of `graft gateway`, by name.

    Raises:
        GraftError: one did not start; the message has what they said last.
    """
    ports = free_ports(2 * len(ways))
    urls: dict[str, str] = {}
    processes: list[asyncio.subprocess.Process] = []
    async with AsyncExitStack() as stack:
        said = stack.enter_context(tempfile.TemporaryFile("w+"))
        for place, (way, words) in enumerate(ways.items()):
            rest, rpc = ports[2 * place : 2 * place + 2]
            command = [
                "gateway",
                f"--model={model}",
                f"--verify={verify}",
                f"--draft={draft}",
                f"--port={rest}",
                f"--grpc-port={rpc}",
                *words,
            ]
            process = await start_child(command, said)
            stack.push_async_callback(stop_process, process)
            processes.append(process)
            urls[way] = f"http://{_HOST}:{rest}"
        for url, process in zip(urls.values(), processes, strict=True):
            if not await _ready(process, url):
                said.seek(0)
                last = " | ".join(said.read().strip().splitlines()[-4:])
                raise GraftError(f"a gateway did not start: {last}")
        yield urls


async def _ready(process: asyncio.subprocess.Process, url: str) -> bool:
    """True once it serves and knows a proposer; False when it ended instead."""
    until = time.monotonic() + _START_S
    async with httpx.AsyncClient(base_url=url, timeout=5.0) as client:
        while process.returncode is None and time.monotonic() < until:
            with suppress(httpx.HTTPError, ValueError, KeyError, IndexError):
                if (await client.get("/ready")).status_code == 200:
                    (model,) = (await client.get("/v1/models")).json()["data"]
                    if model["speculation"]["proposers"]:
                        return True
            await asyncio.sleep(_ASK_S)
    return False
