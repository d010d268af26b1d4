"""The gRPC face of the draft service: Describe, and Attend with many sessions on one stream.

Knows who asked for which session; knows no tree and no token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio
import numpy as np

from graft.common import log
from graft.common.channel import PROTOCOL_REVISION
from graft.common.errors import (
    GraftError,
    InvalidArgument,
    Overloaded,
    UnknownProposer,
    reason_name,
)
from graft.common.tier import Tier, tier_from_proto, tier_to_proto
from graft.draft.engine import Engine
from graft.draft.link import Link
from graft.draft.links import Links
from graft.draft.metrics import DraftMetrics
from graft.draft.proposers.base import ProposerInfo
from graft.draft.roster import Wish
from graft.draft.traced import SessionSpans
from graft.v1.draft_pb2 import (
    AttendRequest,
    AttendResponse,
    AttendSession,
    DraftServiceDescribeRequest,
    DraftServiceDescribeResponse,
    DraftStatus,
    ProposerDescription,
    SessionAttended,
    SessionRefused,
    SetTier,
)
from graft.v1.draft_pb2_grpc import DraftServiceServicer
from graft.v1.error_reason_pb2 import ErrorReason
from graft.v1.tree_pb2 import Tier as TierMessage
from graft.v1.verify_pb2 import DraftHello

_log = log.get("service")
_STATUS_S = 1.0
_MAX_WAITING = 1024


@dataclass(frozen=True, slots=True)
class Parts:
    """What the service stands on. `infos` has the proposers in order; the first is the default."""

    hello: DraftHello
    infos: Mapping[str, ProposerInfo]
    links: Links
    engine: Engine
    metrics: DraftMetrics
    max_sessions: int
    spans: SessionSpans = field(default_factory=SessionSpans)


class DraftService(DraftServiceServicer):
    """Serves gateways. While `unwilling` is set, new sessions are refused with that error."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._attendances: set[_Attendance] = set()
        self.unwilling: GraftError | None = None

    async def Describe(
        self, request: DraftServiceDescribeRequest, context: Any
    ) -> DraftServiceDescribeResponse:
        """What a gateway must know before it asks."""
        parts = self._parts
        return DraftServiceDescribeResponse(
            protocol_revision=PROTOCOL_REVISION,
            incarnation_id=parts.hello.incarnation_id,
            proposers=[
                ProposerDescription(
                    name=name,
                    default_tier=tier_to_proto(info.default_tier),
                    max_nodes=info.max_nodes,
                    max_depth=info.max_depth,
                    detail=info.detail,
                    sources=info.sources,
                )
                for name, info in parts.infos.items()
            ],
            session_count=parts.links.num_sessions,
            max_sessions=parts.max_sessions,
            vocab_size=parts.hello.vocab_size,
            tokenizer_digest=parts.hello.tokenizer_digest,
        )

    async def Attend(self, request_iterator: Any, context: Any) -> AsyncIterator[AttendResponse]:
        """Attends sessions until the gateway's half of the stream ends; then releases them all."""
        attendance = _Attendance(self._parts, self)
        self._attendances.add(attendance)
        reader = asyncio.create_task(attendance.read(request_iterator))
        try:
            async for response in attendance.responses():
                yield response
        finally:
            self._attendances.discard(attendance)
            reader.cancel()
            attendance.release_all()

    def end_streams(self) -> None:
        """Lets every Attend stream say what it still has to say, and end."""
        for attendance in self._attendances:
            attendance.end()


class _Attendance:
    """One Attend stream: the sessions asked for on it, and what waits to be told."""

    def __init__(self, parts: Parts, service: DraftService) -> None:
        self._parts = parts
        self._service = service
        self._links: dict[int, Link] = {}
        self._waiting: asyncio.Queue[AttendResponse | GraftError | None] = asyncio.Queue()
        self._taken = asyncio.Event()

    async def read(self, requests: AsyncIterator[AttendRequest]) -> None:
        """Follows the gateway's wishes; its end is the stream's end.

        While more waits to be told than the gateway reads, its wishes stay in the socket.
        """
        end: GraftError | None = None
        try:
            async for request in requests:
                self._take(request)
                while self._waiting.qsize() > _MAX_WAITING:
                    self._taken.clear()
                    await self._taken.wait()
        except GraftError as error:
            end = error
        except grpc.aio.BaseError:
            # The call is over; Attend itself sees to the rest.
            pass
        finally:
            self._waiting.put_nowait(end)

    async def responses(self) -> AsyncIterator[AttendResponse]:
        """Events as they come, and a status every second; the first one at once.

        Raises:
            GraftError: the gateway broke the stream.
        """
        status_due, busy_s = time.monotonic(), self._parts.engine.busy_s
        interval_s = _STATUS_S
        while True:
            now = time.monotonic()
            if now >= status_due:
                spent_s = self._parts.engine.busy_s - busy_s
                busy_s += spent_s
                yield AttendResponse(
                    status=DraftStatus(
                        session_count=self._parts.links.num_sessions,
                        busy_share=min(1.0, spent_s / interval_s),
                    )
                )
                interval_s = _STATUS_S + now - status_due
                status_due = now + _STATUS_S
            try:
                async with asyncio.timeout(max(0.0, status_due - time.monotonic())):
                    response = await self._waiting.get()
            except TimeoutError:
                continue
            self._taken.set()
            if response is None:
                return
            if isinstance(response, GraftError):
                raise response
            yield response

    def end(self) -> None:
        """Ends the stream after what waits has been sent."""
        self._waiting.put_nowait(None)

    def release_all(self) -> None:
        """Leaves every session that nobody else has taken over."""
        links, self._links = self._links, {}
        for session_id, link in links.items():
            link.release(session_id, self)

    def attended(self, session_id: int, tier: Tier) -> None:
        """The session has been joined."""
        self._waiting.put_nowait(
            AttendResponse(
                attended=SessionAttended(session_id=session_id, tier=tier_to_proto(tier))
            )
        )

    def refused(self, session_id: int, reason: ErrorReason.ValueType, detail: str) -> None:
        """The session is not, or no longer, attended."""
        self._links.pop(session_id, None)
        self._waiting.put_nowait(
            AttendResponse(
                refused=SessionRefused(session_id=session_id, reason=reason, detail=detail)
            )
        )

    def closed(self, session_id: int) -> None:
        """Verify has finished the session."""
        self._links.pop(session_id, None)

    def _take(self, request: AttendRequest) -> None:
        which = request.WhichOneof("request")
        if which == "attend":
            self._attend(request.attend)
        elif which == "set_tier":
            self._set_tier(request.set_tier)
        elif which == "release":
            self._release(request.release.session_id)

    def _attend(self, wish: AttendSession) -> None:
        self._release(wish.session_id)
        try:
            tier = self._tier(wish.tier)
            if self._service.unwilling is not None:
                raise self._service.unwilling
            if self._parts.links.num_sessions >= self._parts.max_sessions:
                raise Overloaded(f"all {self._parts.max_sessions} places are taken")
            if not wish.verify_address:
                raise InvalidArgument("no verify address was given", field="verify_address")
            link = self._parts.links.to(wish.verify_address)
        except GraftError as error:
            self._refuse(wish.session_id, error)
            return
        self._links[wish.session_id] = link
        prediction = np.asarray(wish.prediction_tokens, np.int64).astype(np.int32)
        link.attend(
            Wish(wish.session_id, wish.ticket, tier, prediction if len(prediction) else None), self
        )
        if wish.session_id in self._links:
            self._parts.spans.begin(wish.session_id, wish.traceparent, tier)

    def _set_tier(self, wish: SetTier) -> None:
        link = self._links.get(wish.session_id)
        if link is None:
            return
        try:
            tier = self._tier(wish.tier)
        except GraftError as error:
            self._release(wish.session_id)
            self._refuse(wish.session_id, error)
            return
        link.set_tier(wish.session_id, tier, self)

    def _release(self, session_id: int) -> None:
        link = self._links.pop(session_id, None)
        if link is not None:
            link.release(session_id, self)

    def _refuse(self, session_id: int, error: GraftError) -> None:
        self._parts.metrics.session_refusals.labels(reason_name(error.reason)).inc()
        _log.info("session refused", session=f"{session_id:016x}", detail=str(error))
        self.refused(session_id, error.reason, str(error))

    def _tier(self, message: TierMessage) -> Tier:
        """The tier asked for, by the name of a proposer that is here.

        Raises:
            InvalidArgument: a number is out of its range.
            UnknownProposer: there is no such proposer.
        """
        tier = tier_from_proto(message)
        if not tier.proposer:
            return replace(tier, proposer=next(iter(self._parts.infos)))
        if tier.proposer not in self._parts.infos:
            names = ", ".join(self._parts.infos)
            raise UnknownProposer(
                f"no proposer {tier.proposer!r} here, only {names}", field="speculation.proposer"
            )
        return tier
