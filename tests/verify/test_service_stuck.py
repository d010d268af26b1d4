"""A draft service that stops reading: its stream is dropped, its sessions go on without it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from graft.common.channel import PROTOCOL_REVISION
from graft.common.errors import Stalled
from graft.common.server import error_from_call
from graft.testing.plain import Plain
from graft.testing.verify_client import Say, eventually, running_verify
from graft.v1 import verify_pb2

PROMPT = list(b"a prompt")
HELLO = Say(hello=verify_pb2.DraftHello(protocol_revision=PROTOCOL_REVISION))


@pytest.mark.parametrize("reads", ["soon", "too late"])
async def test_a_drafter_that_does_not_read_is_dropped(
    tiny_model: Path, plain: Plain, monkeypatch: pytest.MonkeyPatch, reads: str
) -> None:
    """Every empty proposal for a session it has not joined is answered, and it reads nothing."""
    monkeypatch.setattr("graft.verify.outgoing.ERROR_S", 60.0 if reads == "soon" else 0.05)
    async with running_verify(tiny_model) as bench:
        call = bench.stub.Rounds()  # type: ignore[call-arg]
        await call.write(HELLO)
        empty = verify_pb2.EmptyProposal(session_id=1, prefix_length=1, prefix_digest=1)
        flood = Say(empties=[empty] * 1000)

        async def talk() -> None:
            while not call.done():
                await call.write(flood)

        talking = asyncio.create_task(talk())
        await eventually(lambda: bench.metric("graft_dropped_streams_total") == 1, 20)
        assert (await bench.generate(PROMPT, 5)).tokens == plain.text(PROMPT, 5)
        if reads == "too late":
            await asyncio.sleep(0.5)
        async with asyncio.timeout(10):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
        if reads == "soon":
            assert isinstance(error_from_call(caught.value), Stalled)
        await asyncio.gather(talking, return_exceptions=True)
