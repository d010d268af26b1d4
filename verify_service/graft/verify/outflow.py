"""What a session's gateway is told: over the session's call, or over the lane that it took.

Messages are numbered, whichever way they go; how the session ends is said by the call alone. Runs
on the event loop; decides nothing about the session.
"""

from __future__ import annotations

import asyncio

from graft.common.errors import GraftError, ProtocolBroken, reason_name
from graft.common.lane import Lane
from graft.v1 import verify_pb2
from graft.v1.verify_pb2 import FinishReason
from graft.verify.events import Committed, Failed, Finished, Opened, SessionEvent
from graft.verify.lanes import Lanes
from graft.verify.metrics import VerifyMetrics
from graft.verify.traced import SessionSpan
from graft.verify.wire import committed_message, finished_message

# A client that reads slowly holds its gateway up, as it would on the call. The gateway closes the
# lane when it needs no more.
_FLUSH_S = 600.0


class Outflow:
    """One session's way out. `end` is a word for how it ended, "left" until it did."""

    def __init__(
        self,
        span: SessionSpan,
        lanes: Lanes,
        metrics: VerifyMetrics,
        opened: verify_pb2.SessionOpened,
    ) -> None:
        """opened: what the gateway is told first, but for what only the scheduler knows."""
        self.end = "left"
        self._span = span
        self._lanes = lanes
        self._metrics = metrics
        self._opened = opened
        self._offer = lanes.offer(self._carry)
        self._lane: Lane | None = None
        self._sequence = 0
        self._waiting: asyncio.Queue[verify_pb2.GenerateResponse | GraftError] = asyncio.Queue()

    def tell(self, event: SessionEvent) -> None:
        """Sends an event, or has it wait for `next`."""
        if isinstance(event, Failed):
            self._waiting.put_nowait(event.error)
            return
        message = self._message(event)
        message.sequence = self._sequence
        self._sequence += 1
        if isinstance(event, Committed) and self._lane is not None and self._lane.ready:
            self._lane.put(message.SerializeToString())
        else:
            self._waiting.put_nowait(message)

    async def next(self) -> verify_pb2.GenerateResponse:
        """The next message that the call is to carry.

        Raises:
            GraftError: what the session failed with.
        """
        message = await self._waiting.get()
        if isinstance(message, GraftError):
            self.end = reason_name(message.reason)
            raise message
        return message

    def close(self) -> None:
        """The call is over, and so is the lane; what was sent over it still arrives."""
        self._lanes.withdraw(self._offer)
        if self._lane is not None:
            self._lane.close(flush_s=_FLUSH_S)

    def _carry(self, lane: Lane) -> None:
        def heard(_: bytes) -> None:
            raise ProtocolBroken("a session's lane carries nothing to the replica")

        lane.on_message = heard
        self._lane = lane
        self._metrics.session_lanes(1)
        lane.lost.add_done_callback(lambda _: self._metrics.session_lanes(-1))

    def _message(self, event: Opened | Committed | Finished) -> verify_pb2.GenerateResponse:
        match event:
            case Opened():
                self._opened.cached_token_count = event.cached_tokens
                if self._offer is not None:
                    self._opened.lane.CopyFrom(self._offer)
                return verify_pb2.GenerateResponse(opened=self._opened)
            case Committed():
                self._span.committed(event)
                return verify_pb2.GenerateResponse(committed=committed_message(event))
            case Finished():
                self.end = FinishReason.Name(event.reason).removeprefix("FINISH_REASON_").lower()
                return verify_pb2.GenerateResponse(finished=finished_message(event))
