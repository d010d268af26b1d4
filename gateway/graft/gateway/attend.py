"""Tells draft replicas which sessions to attend: one Attend stream per replica, many sessions.

A thin shell around placement.Attendance. A drafter that is gone, silent or unwilling costs a
session its speculation until another one takes over; it never costs text.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import grpc.aio

from graft.common import log
from graft.common.tier import Tier, tier_to_proto
from graft.gateway import placement
from graft.gateway.metrics import Metrics
from graft.gateway.replicas import Replica, Replicas
from graft.gateway.streams import settle
from graft.v1 import draft_pb2, draft_pb2_grpc

_log = log.get("attend")
_TICK_S = 0.5
_RECONNECT_S = 0.2

DraftReplica = Replica[draft_pb2.DraftServiceDescribeResponse]
DraftReplicas = Replicas[draft_pb2.DraftServiceDescribeResponse]


class Attendants:
    """Keeps sessions attended. All methods return at once; streams are fed by their own tasks."""

    def __init__(self, drafts: DraftReplicas, metrics: Metrics, silent_s: float = 5.0) -> None:
        self._drafts = drafts
        self._metrics = metrics
        self._silent_s = silent_s
        self._state = placement.Attendance()
        self._outboxes: dict[str, asyncio.Queue[draft_pb2.AttendRequest]] = {}
        self._links: dict[str, asyncio.Task[None]] = {}
        self._runner: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts to keep a stream to every usable draft replica."""
        self._runner = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Ends all streams; drafters release their sessions."""
        tasks = [*self._links.values()]
        if self._runner is not None:
            tasks.append(self._runner)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    @property
    def num_sessions(self) -> int:
        """Sessions that want a drafter."""
        return self._state.num_sessions

    @property
    def connected(self) -> bool:
        """True when some drafter can be told about a session right now."""
        return bool(self._outboxes)

    def attend(self, wish: placement.Wish) -> None:
        """Asks for a drafter for the session."""
        self._act(self._state.wish(wish, time.monotonic()))

    def set_tier(self, session: int, tier: Tier) -> None:
        """Changes the tier of a session from its next tree on."""
        self._act(self._state.change_tier(session, tier, time.monotonic()))

    def release(self, session: int) -> None:
        """The session is over; unknown and released sessions are fine."""
        self._act(self._state.release(session))

    def _act(self, actions: list[placement.Action]) -> None:
        for action in actions:
            outbox = self._outboxes.get(action.draft)
            if outbox is not None:
                outbox.put_nowait(_message(action))

    async def _run(self) -> None:
        while True:
            for replica in self._drafts.usable():
                link = self._links.get(replica.address)
                if link is None or link.done():
                    self._links[replica.address] = asyncio.create_task(self._keep(replica))
            for address in [a for a, link in self._links.items() if link.done()]:
                del self._links[address]
            self._act(self._state.tick(time.monotonic()))
            await self._drafts.changed.wait(_TICK_S)

    async def _keep(self, replica: DraftReplica) -> None:
        """One life of the stream to a replica; `_run` starts the next one."""
        description = replica.description
        assert description is not None
        call = draft_pb2_grpc.DraftServiceStub(replica.channel).Attend(None)
        outbox = self._outboxes[replica.address] = asyncio.Queue()
        writer = asyncio.create_task(_write(call, outbox))
        try:
            self._act(
                self._state.link_up(
                    replica.address,
                    frozenset(proposer.name for proposer in description.proposers),
                    description.max_sessions,
                    time.monotonic(),
                )
            )
            await self._read(call, replica)
        finally:
            call.cancel()
            writer.cancel()
            del self._outboxes[replica.address]
            self._act(self._state.link_down(replica.address, time.monotonic()))
        await asyncio.sleep(_RECONNECT_S)

    async def _read(
        self,
        call: grpc.aio.StreamStreamCall[draft_pb2.AttendRequest, draft_pb2.AttendResponse],
        replica: DraftReplica,
    ) -> None:
        """Follows the stream until it ends, breaks or falls silent."""
        lost = replica.lost
        while True:
            read: asyncio.Future[Any] = asyncio.ensure_future(call.read())
            try:
                await asyncio.wait(
                    {read, lost}, timeout=self._silent_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not read.done():
                    _log.warning("drafter fell silent", draft=replica.address)
                    self._metrics.draft_error("silent")
                    self._drafts.suspect(replica)
                    return
            finally:
                if not read.done():
                    call.cancel()
                    await settle(read)
            if read.cancelled():
                return
            failure = read.exception()
            if failure is not None:
                _log.warning("drafter was lost", draft=replica.address, error=_code(failure))
                self._metrics.draft_error("lost")
                self._drafts.suspect(replica)
                return
            message = read.result()
            if not isinstance(message, draft_pb2.AttendResponse):
                self._drafts.suspect(replica)
                return
            replica.heard()
            self._take(message, replica)

    def _take(self, message: draft_pb2.AttendResponse, replica: DraftReplica) -> None:
        if message.HasField("refused"):
            refused = message.refused
            _log.info(
                "drafter refused",
                session=f"{refused.session_id:016x}",
                draft=replica.address,
                detail=refused.detail,
            )
            self._metrics.draft_error("refused")
            self._act(self._state.refused(replica.address, refused.session_id, time.monotonic()))


async def _write(
    call: grpc.aio.StreamStreamCall[draft_pb2.AttendRequest, draft_pb2.AttendResponse],
    outbox: asyncio.Queue[draft_pb2.AttendRequest],
) -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(await outbox.get())


def _message(action: placement.Action) -> draft_pb2.AttendRequest:
    match action:
        case placement.Attend(_, wish):
            return draft_pb2.AttendRequest(
                attend=draft_pb2.AttendSession(
                    session_id=wish.session,
                    ticket=wish.ticket,
                    verify_address=wish.verify_address,
                    tier=tier_to_proto(wish.tier),
                    traceparent=wish.traceparent,
                    prediction_tokens=wish.prediction,
                )
            )
        case placement.ChangeTier(_, session, tier):
            return draft_pb2.AttendRequest(
                set_tier=draft_pb2.SetTier(session_id=session, tier=tier_to_proto(tier))
            )
        case placement.Release(_, session):
            return draft_pb2.AttendRequest(release=draft_pb2.ReleaseSession(session_id=session))


def _code(failure: BaseException) -> str:
    return failure.code().name if isinstance(failure, grpc.aio.AioRpcError) else str(failure)
