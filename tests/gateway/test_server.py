"""The gateway as a process: settings, ports, signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from graft.common.errors import InvalidArgument, ModelNotFound
from graft.gateway.job import Delta
from graft.gateway.rest.sse import Pacing
from graft.gateway.server import GatewayServer
from graft.gateway.settings import GatewaySettings
from graft.gateway.text import Emitted, Origin, Piece
from graft.testing.front import running_front
from graft.testing.models import write_tiny_model
from graft.testing.scripted_verify import Script, ScriptedVerify

SAY = list(b"abcdefghijklmnopqrstuvwxyz" * 20)


@pytest.mark.parametrize("field", ["port", "grpc_port"])
async def test_a_port_in_use_is_one_clear_error(tmp_path: Path, field: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = {"port": 0, "grpc_port": 0, "model": str(write_tiny_model(tmp_path / "tiny"))}
        flags[field] = taken.getsockname()[1]
        server = GatewayServer(GatewaySettings.load(None, flags))
        with pytest.raises(InvalidArgument, match="is the port in use"):
            await server.start()


async def test_a_missing_model_is_one_clear_error(tmp_path: Path) -> None:
    flags = {"port": 0, "grpc_port": 0, "model": str(tmp_path / "none")}
    with pytest.raises(ModelNotFound, match="none"):
        await GatewayServer(GatewaySettings.load(None, flags)).start()


async def test_the_world_is_not_served_in_plain_text_by_accident(tmp_path: Path) -> None:
    flags = {"host": "0.0.0.0", "port": 0, "model": str(write_tiny_model(tmp_path / "tiny"))}
    with pytest.raises(InvalidArgument, match="--insecure"):
        await GatewayServer(GatewaySettings.load(None, flags)).start()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"tree_deadline_ms": -1}, "tree_deadline_ms"),
        ({"tree_deadline_ms": 10**9}, "tree_deadline_ms"),
        ({"speculation": "{broken"}, r"neither a proposer's name nor JSON: Invalid JSON[^\n]*$"),
        ({"speculation": '{"depth": 3}'}, "neither a proposer's name nor JSON"),
        ({"api_keys": [" "]}, "an API key is empty"),
        ({"verify": []}, "verify"),
        ({"servedname": "x"}, "did you mean served_name"),
    ],
)
def test_settings_out_of_range_are_named(flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        GatewaySettings.load(None, flags)


def test_pacing_sends_the_first_piece_and_then_joins() -> None:
    def delta(text: str) -> Delta:
        tokens = tuple(Emitted(0, letter, Origin.PLAIN) for letter in text)
        return Delta(0, Piece(text, tokens))

    pacing = Pacing(3)
    assert pacing.add(delta("a")) == delta("a")
    assert pacing.add(delta("b")) is None
    assert pacing.add(delta("cd")) == delta("bcd")
    assert pacing.add(delta("e")) is None
    assert pacing.rest(0) == delta("e")
    assert pacing.rest(0) is None


async def test_stopping_twice_or_before_the_start_is_fine(tmp_path: Path) -> None:
    server = GatewayServer(GatewaySettings.load(None, {}))
    await server.stop(0.1)
    async with running_front(tmp_path, [Script(SAY)]) as front:
        await front.server.stop(0.1)


@contextlib.asynccontextmanager
async def gateway_process(
    folder: Path, verify: str
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = (
        "import sys; from graft.gateway.main import run;"
        "from graft.gateway.settings import GatewaySettings;"
        "run(GatewaySettings.load(None, dict(model=sys.argv[1], verify=[sys.argv[2]], draft=[],"
        "port=int(sys.argv[3]), grpc_port=0)));"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    model = str(write_tiny_model(folder / "tiny"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, model, verify, str(port), env={**os.environ}
    )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_signal_drains_and_ends_with_zero(tmp_path: Path) -> None:
    reached, go = asyncio.Event(), asyncio.Event()

    async def pause(num_committed: int) -> None:
        if num_committed >= 3:
            reached.set()
            await go.wait()

    verify = ScriptedVerify(Script(SAY, before_commit=pause))
    address = await verify.start()
    async with (
        gateway_process(tmp_path, address) as (url, process),
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/ready")).status_code == 200:
                    break
            await asyncio.sleep(0.05)
        body = {"prompt": "x", "max_tokens": 8}
        task = asyncio.create_task(client.post("/v1/completions", json=body))
        await reached.wait()
        process.send_signal(signal.SIGTERM)
        state = ""
        while state != "draining":
            state = (await client.get("/ready")).json()["state"]
        go.set()
        assert (await task).json()["choices"][0]["text"] == "abcdefgh"
        assert await process.wait() == 0
    await verify.stop()


async def test_a_signal_is_heard_from_the_first_moment_the_port_answers(tmp_path: Path) -> None:
    async with gateway_process(tmp_path, "127.0.0.1:1") as (url, process):
        port = int(url.rpartition(":")[2])
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                break
            await asyncio.sleep(0)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
        writer.close()
