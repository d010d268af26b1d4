"""A whole Graft in a process of its own: for clients that are no part of the test's loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from graft.common import log
from graft.common.server import wait_for_signal
from graft.testing.cluster import running_cluster
from graft.testing.models import write_tiny_model

_TESTS = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Where it serves."""

    url: str
    grpc: str


@contextmanager
def gateway_elsewhere(folder: Path) -> Iterator[Elsewhere]:
    """Starts verify, draft and gateway with a tiny model in one child process; ends it after."""
    process = subprocess.Popen(
        [sys.executable, "-m", "graft.testing.elsewhere", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(_TESTS)},
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("serving "):
                _, url, grpc = line.split()
                break
        else:
            raise RuntimeError(f"the services ended with code {process.wait()}")
        yield Elsewhere(url, grpc)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        process.wait(20)
        if process.stdout is not None:
            process.stdout.close()


async def _serve(folder: Path) -> None:
    log.setup("test", "error", "json")
    stopped = asyncio.create_task(wait_for_signal())
    async with running_cluster(write_tiny_model(folder / "tiny", context=1024)) as cluster:
        grpc = f"127.0.0.1:{cluster.gateway.grpc_port}"
        print("serving", cluster.url, grpc, flush=True)
        await stopped


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
