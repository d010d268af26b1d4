"""Starts a gateway, a verify and a draft replica of this project as processes, for measurements.

They are what `graft up` starts, on free ports; they end with the block that started them, and with
this process however it ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from graft.common.errors import GraftError

_HOST = "127.0.0.1"
_NICENESS = "0"
_START_S = 600.0
_STOP_S = 20.0
_ASK_S = 0.2


@dataclass(frozen=True, slots=True)
class Setup:
    """What to serve. config: a file of further settings, as of `graft up --config`.

    trained_drafter: as of `graft up`; without it, the draft service's own default drafts.
    """

    model: str
    precision: str
    threads: int
    config: Path | None = None
    trained_drafter: bool = True


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the services are."""

    url: str
    verify: str
    draft: str


async def start_child(words: Sequence[str], said: IO[str]) -> asyncio.subprocess.Process:
    """A `graft` command as a process that ends with this one; what it says goes to `said`."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "graft.cli.child", str(os.getpid()), _NICENESS, *words),
        stdout=said,
        stderr=said,
    )


@asynccontextmanager
async def running(setup: Setup) -> AsyncIterator[Addresses]:
    """The services, ready; they are ended after.

    Raises:
        GraftError: they did not start; the message has what they said last.
    """
    rest, rpc, verify, draft = free_ports(4)
    words = [
        "up",
        f"--model={setup.model}",
        f"--precision={setup.precision}",
        f"--threads={setup.threads}",
        f"--port={rest}",
        f"--grpc-port={rpc}",
        f"--verify-port={verify}",
        f"--draft-port={draft}",
        "--drain-s=1",
    ]
    if not setup.trained_drafter:
        words.append("--no-trained-drafter")
    if setup.config is not None:
        words.append(f"--config={setup.config}")
    with tempfile.TemporaryFile("w+") as said:
        process = await start_child(words, said)
        try:
            addresses = Addresses(f"http://{_HOST}:{rest}", f"{_HOST}:{verify}", f"{_HOST}:{draft}")
            if not await _ready(process, addresses.url):
                said.seek(0)
                last = " | ".join(said.read().strip().splitlines()[-4:])
                raise GraftError(f"the services did not start: {last}")
            yield addresses
        finally:
            await stop_process(process)


async def _ready(process: asyncio.subprocess.Process, url: str) -> bool:
    """True once all three serve and a drafter is connected; False when they ended instead."""
    until = time.monotonic() + _START_S
    async with httpx.AsyncClient(base_url=url, timeout=5.0) as client:
        while process.returncode is None and time.monotonic() < until:
            with suppress(httpx.HTTPError, ValueError, KeyError):
                if (await client.get("/ready")).status_code == 200:
                    found = (await client.get("/v1/models")).json()
                    if found["data"]:
                        return True
            await asyncio.sleep(_ASK_S)
    return False


async def stop_process(process: asyncio.subprocess.Process) -> None:
    """Ends a process, gently first."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    listeners = [socket.create_server((_HOST, 0)) for _ in range(count)]
    try:
        return [listener.getsockname()[1] for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()
