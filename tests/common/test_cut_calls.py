"""What a streaming call holds is given back at once when the call is cut, whatever it was doing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from graft.common.channel import open_channel
from graft.common.server import GrpcServer
from graft.v1 import features_pb2, verify_pb2, verify_pb2_grpc


class Flood(verify_pb2_grpc.VerifyServiceServicer):
    """Says far more than anybody reads; `given_back` is set by what a service does at the end."""

    def __init__(self) -> None:
        self.num_said = 0
        self.given_back = asyncio.Event()

    async def Rounds(self, requests: Any, context: Any) -> AsyncIterator[verify_pb2.RoundsResponse]:
        try:
            while True:
                self.num_said += 1
                rows = features_pb2.FeatureRows(payload=bytes(1 << 20))
                features = [features_pb2.SessionFeatures(rows=rows)]
                yield verify_pb2.RoundsResponse(features=features)
        finally:
            self.given_back.set()


@pytest.mark.parametrize("reads", [False, True])
async def test_a_call_cut_while_it_sends_is_wound_up_without_the_garbage_collector(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []
    before = sys.get_asyncgen_hooks()

    def hold(generator: Any) -> None:
        held.append(generator)  # as a traceback does
        if before.firstiter is not None:
            before.firstiter(generator)

    server, flood = GrpcServer(["graft.v1.VerifyService"]), Flood()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(flood, server.server)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    sys.set_asyncgen_hooks(firstiter=hold)
    try:
        async with open_channel(address) as channel:
            stub: Any = verify_pb2_grpc.VerifyServiceStub(channel)
            call = stub.Rounds()
            await call.write(verify_pb2.RoundsRequest())
            if reads:
                await call.read()
            said = -1
            while said != flood.num_said or not said:
                said = flood.num_said
                await asyncio.sleep(0.1)
            assert not flood.given_back.is_set()
            call.cancel()
            await asyncio.wait_for(flood.given_back.wait(), 10)
    finally:
        sys.set_asyncgen_hooks(firstiter=before.firstiter)
        await server.stop(0.1)
    assert held
