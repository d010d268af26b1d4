"""A verify process that is frozen, not dead: it is noticed, answered for, and goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from graft.testing.models import write_tiny_model

WORDS = ["--port=0", "--grpc-port=0", "--verify-port=0", "--draft-port=0", "--threads=1"]
PATIENCE_S = 60


@asynccontextmanager
async def served(model: Path) -> AsyncIterator[tuple[str, psutil.Process]]:
    """`graft up`: its URL, and the process of verify."""
    up = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "graft.cli.main", "up", f"--model={model}", *WORDS),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert up.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not (line := (await up.stdout.readline()).decode()).startswith("ready on "):
                assert line, "graft up ended before it was ready"
        children = psutil.Process(up.pid).children()
        yield line.split()[2], next(c for c in children if "verify" in c.cmdline())
    finally:
        up.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            await up.communicate()
        assert up.returncode == 0


async def streamed(
    client: httpx.AsyncClient, on_piece: Callable[[int], None] = lambda number: None
) -> tuple[str, list[str]]:
    """Text and finish reasons of one long answer."""
    body: dict[str, Any] = {"prompt": "one two one two", "max_tokens": 300, "temperature": 0}
    pieces: list[str] = []
    reasons: list[str] = []
    async with client.stream(
        "POST", "/v1/completions", json={**body, "ignore_eos": True, "stream": True}
    ) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            pieces.append(choice["text"])
            reasons += [choice["finish_reason"]] * bool(choice["finish_reason"])
            on_piece(len(pieces))
    return "".join(pieces), reasons


async def test_a_frozen_verify_service_is_noticed_and_the_text_goes_on(tmp_path: Path) -> None:
    async with (
        served(write_tiny_model(tmp_path / "tiny")) as (url, verify),
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        expected = await streamed(client)
        frozen = asyncio.Event()

        def freeze(number: int) -> None:
            if number == 5:
                os.kill(verify.pid, signal.SIGSTOP)
                frozen.set()

        stream = asyncio.create_task(streamed(client, freeze))
        await frozen.wait()
        try:
            async with asyncio.timeout(15):
                while True:
                    ready = await client.get("/ready")
                    if ready.status_code == 503:
                        break
                    await asyncio.sleep(0.2)
            assert "no answer for" in ready.json()["detail"]
            assert (await client.get("/health")).status_code == 503
            refused = await client.post("/v1/completions", json={"prompt": "x"}, timeout=5)
            assert refused.status_code == 503
            assert "no answer for" in refused.json()["error"]["message"]
        finally:
            os.kill(verify.pid, signal.SIGCONT)
        assert await asyncio.wait_for(stream, PATIENCE_S) == expected
        assert expected[1] == ["length"]
