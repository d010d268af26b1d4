"""Services for a measurement: processes that start, answer and end, or say why not."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import httpx
import pytest
from tenacity import AsyncRetrying, retry_if_result, stop_after_delay, wait_fixed

from graft.bench.services import Setup, running
from graft.common.errors import GraftError
from graft.testing.models import write_tiny_model

MEASURING = """
import asyncio, sys
from graft.bench.services import Setup, running
async def main():
    async with running(Setup(sys.argv[1], "fp32", 1)) as addresses:
        print(addresses.url, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def answers(url: str) -> bool:
    """True while something listens there."""
    async with httpx.AsyncClient(timeout=5.0) as client:
        try:
            await client.get(f"{url}/health")
        except httpx.HTTPError:
            return False
    return True


@pytest.mark.timeout(300)
async def test_a_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    setup = Setup(str(tmp_path / "nothing"), "fp32", 1)
    with pytest.raises(GraftError, match=r"did not start: .*nothing"):
        async with running(setup):
            raise AssertionError("it started")


@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
async def test_services_end_with_a_measurement_that_is_killed(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", MEASURING, str(model)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(120):
        url = (await process.stdout.readline()).decode().strip()
    assert await answers(url)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    asking = AsyncRetrying(
        wait=wait_fixed(0.2), stop=stop_after_delay(60), retry=retry_if_result(bool)
    )
    assert not await asking(answers, url)
