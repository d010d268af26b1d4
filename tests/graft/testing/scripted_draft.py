"""A draft service that only keeps books: real gRPC, proposes nothing."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

from graft.common.channel import PROTOCOL_REVISION
from graft.common.server import GrpcServer
from graft.v1 import draft_pb2, draft_pb2_grpc, error_reason_pb2, tree_pb2


class ScriptedDraft(draft_pb2_grpc.DraftServiceServicer):
    """One replica. `attended` maps sessions to what was asked, `released` keeps what was let go."""

    def __init__(self, *proposers: str, refuse: bool = False, silent: bool = False) -> None:
        self.proposers = proposers or ("ngram",)
        self.refuse = refuse
        self.silent = silent
        self.attended: dict[int, draft_pb2.AttendSession] = {}
        self.tiers: list[tree_pb2.Tier] = []
        self.released: list[int] = []
        self.described: dict[str, Any] = {}
        self.changed = asyncio.Condition()
        self.port = 0
        self._server: GrpcServer | None = None
        self._incarnation = secrets.randbits(63)

    async def start(self, port: int = 0) -> str:
        """Listens; returns the address."""
        self._server = GrpcServer(["graft.v1.DraftService"])
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, self._server.server)
        self.port = await self._server.start("127.0.0.1", port)
        return f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """Ends at once, with every stream."""
        if self._server is not None:
            await self._server.server.stop(None)
            self._server = None

    async def until(self, what: Callable[[], bool]) -> None:
        """Waits until something is true of this replica; the test's timeout is the limit."""
        async with self.changed:
            await self.changed.wait_for(what)

    async def Describe(
        self, request: draft_pb2.DraftServiceDescribeRequest, context: Any
    ) -> draft_pb2.DraftServiceDescribeResponse:
        fields: dict[str, Any] = {
            "protocol_revision": PROTOCOL_REVISION,
            "incarnation_id": self._incarnation,
            "proposers": [
                draft_pb2.ProposerDescription(
                    name=name,
                    default_tier=tree_pb2.Tier(
                        proposer=name, num_steps=4, topk=2, num_draft_tokens=12
                    ),
                )
                for name in self.proposers
            ],
        }
        return draft_pb2.DraftServiceDescribeResponse(**fields | self.described)

    async def Attend(
        self, requests: AsyncIterator[draft_pb2.AttendRequest], context: Any
    ) -> AsyncIterator[draft_pb2.AttendResponse]:
        if self.silent:
            await asyncio.Event().wait()
        yield draft_pb2.AttendResponse(status=draft_pb2.DraftStatus())
        async for request in requests:
            answer = await self._take(request)
            if answer is not None:
                yield answer

    async def _take(self, request: draft_pb2.AttendRequest) -> draft_pb2.AttendResponse | None:
        async with self.changed:
            self.changed.notify_all()
            if request.HasField("release"):
                self.released.append(request.release.session_id)
                return None
            if request.HasField("set_tier"):
                self.tiers.append(request.set_tier.tier)
                return None
            session = request.attend
            self.attended[session.session_id] = session
            if self.refuse:
                return draft_pb2.AttendResponse(
                    refused=draft_pb2.SessionRefused(
                        session_id=session.session_id,
                        reason=error_reason_pb2.ERROR_REASON_OVERLOADED,
                        detail="full",
                    )
                )
            return draft_pb2.AttendResponse(
                attended=draft_pb2.SessionAttended(session_id=session.session_id, tier=session.tier)
            )
