"""A real draft service between a gateway and verify replicas that the test plays by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from graft.common.channel import open_channel
from graft.common.tier import Tier, tier_to_proto
from graft.draft.proposers.base import Proposer
from graft.draft.server import DraftServer
from graft.draft.settings import DraftSettings
from graft.testing.fake_verify import WAIT_S, FakeReplica, FakeRounds, FakeSession, fake_replica
from graft.v1.draft_pb2 import AttendRequest, AttendResponse, AttendSession
from graft.v1.draft_pb2_grpc import DraftServiceStub

NGRAM = Tier("ngram", num_steps=4, topk=2, num_draft_tokens=8)


class FakeGateway:
    """The gateway's side of one Attend stream."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._seen: list[AttendResponse] = []
        self._writing = asyncio.Lock()

    async def send(self, **request: Any) -> None:
        """Writes one AttendRequest."""
        async with self._writing:
            await self.call.write(AttendRequest(**request))

    async def attend(self, address: str, session_id: int, tier: Tier = NGRAM) -> None:
        """Asks for a session to be attended."""
        await self.send(
            attend=AttendSession(
                session_id=session_id,
                ticket=b"ticket",
                verify_address=address,
                tier=tier_to_proto(tier),
            )
        )

    async def next(self, kind: str) -> Any:
        """The next event of this kind (attended, refused, status); others stay for later."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for i, event in enumerate(self._seen):
                    if event.WhichOneof("event") == kind:
                        del self._seen[i]
                        return getattr(event, kind)
                event = await self.call.read()
                assert isinstance(event, AttendResponse), f"the stream ended before {kind}"
                self._seen.append(event)

    async def ended(self) -> None:
        """Waits for the service to end the stream."""
        async with asyncio.timeout(WAIT_S):
            while isinstance(await self.call.read(), AttendResponse):
                pass


@dataclass(slots=True)
class Drafting:
    """The service under test, a replica, and one Attend stream."""

    server: DraftServer
    port: int
    channel: grpc.aio.Channel
    stub: Any
    replica: FakeReplica
    gateway: FakeGateway

    async def joined(
        self, session_id: int, tokens: Sequence[int], tier: Tier = NGRAM, **told: Any
    ) -> tuple[FakeRounds, FakeSession]:
        """Attends one session over a new stream and tells its prefix."""
        await self.gateway.attend(self.replica.address, session_id, tier)
        rounds = await self.replica.verify.stream()
        join = await rounds.next("joins")
        assert (join.session_id, join.ticket) == (session_id, b"ticket")
        session = rounds.prefix(session_id, tokens, **told)
        attended = await self.gateway.next("attended")
        assert attended.session_id == session_id
        return rounds, session

    def value(self, name: str, **labels: str) -> float:
        """A metric of the service, without its ``graft_draft_``."""
        return self.server.metrics.registry.get_sample_value(f"graft_draft_{name}", labels) or 0.0


@asynccontextmanager
async def drafting(
    proposers: Sequence[Proposer] | None = None, **settings: Any
) -> AsyncIterator[Drafting]:
    """Starts all of it; ends it within a second."""
    async with fake_replica() as replica:
        server = DraftServer(DraftSettings.load(None, {"port": 0, **settings}), proposers)
        port = await server.start()
        channel: grpc.aio.Channel = open_channel(f"127.0.0.1:{port}")
        stub: Any = DraftServiceStub(channel)
        gateway = FakeGateway(stub.Attend())
        try:
            yield Drafting(server, port, channel, stub, replica, gateway)
        finally:
            gateway.call.cancel()
            await channel.close(None)
            await server.stop(0)
