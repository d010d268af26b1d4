"""What waits to be sent to one draft service: batched, ordered and bounded.

Knows messages and time; knows no session and no socket.
"""

from __future__ import annotations

import asyncio
from collections import deque

from graft.common.errors import GraftError, Stalled
from graft.v1 import verify_pb2
from graft.verify.events import (
    ClosedTold,
    CommitTold,
    FeaturesTold,
    PrefixTold,
    RefusalTold,
    StreamEvent,
)
from graft.verify.wire import add_told

MAX_EVENTS = 4096
MAX_AGE_S = 10.0
ERROR_S = 5.0
MAX_FEATURE_BYTES = 256 << 20
_MESSAGE_BYTES = 4 << 20

_RANK = {FeaturesTold: 0, PrefixTold: 1, CommitTold: 2, RefusalTold: 3, ClosedTold: 4}


class Outgoing:
    """The queue of one stream. Everything that waits goes out together, in as few messages as
    keep each session's events in the order in which the parts of a message are handled."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, StreamEvent]] = deque()
        self._changed = asyncio.Event()
        self._error: GraftError | None = None
        self._closed = False
        self._sequence = 0
        self._feature_bytes = 0
        self.tasks: list[asyncio.Task[object]] = []

    @property
    def begun(self) -> bool:
        """True once more than the welcome was taken to be sent."""
        return self._sequence > 1

    def add(self, event: StreamEvent, now: float) -> bool:
        """Queues an event; False when the peer has not read for too long or left too much unread.

        The stream is then of no use: its peer would only draft for prefixes long passed.
        """
        if self._closed:
            return True
        if self._waiting and (
            len(self._waiting) >= MAX_EVENTS
            or self._feature_bytes > MAX_FEATURE_BYTES
            or now - self._waiting[0][0] > MAX_AGE_S
        ):
            self.fail(Stalled("the draft service did not read its rounds in time"))
            return False
        self._waiting.append((now, event))
        self._feature_bytes += _feature_bytes(event)
        self._changed.set()
        return True

    def fail(self, error: GraftError) -> None:
        """Ends the stream by an error.

        A peer that takes nothing cannot take the error either: after a while the call is cut.
        """
        if self._closed:
            return
        self._error = error
        self.close()
        self._waiting.clear()
        self._feature_bytes = 0
        asyncio.get_running_loop().call_later(ERROR_S, self._cut)

    def _cut(self) -> None:
        # Both halves: grpc resets a call only once nobody reads it and nobody writes to it.
        for task in self.tasks:
            task.cancel()

    def close(self) -> None:
        """Ends the stream after what waits."""
        self._closed = True
        self._changed.set()

    def welcome(
        self,
        description: verify_pb2.VerifyServiceDescribeResponse,
        lane: verify_pb2.Lane | None = None,
    ) -> verify_pb2.RoundsResponse:
        """The first message. lane: what a drafter of this machine may go on over."""
        message = self._message(welcome=description)
        if lane is not None:
            message.lane.CopyFrom(lane)
        return message

    async def next(self) -> verify_pb2.RoundsResponse | None:
        """The next message; None at the end of the stream.

        Raises:
            GraftError: the stream was failed.
        """
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._gathered()

    def take(self) -> verify_pb2.RoundsResponse | None:
        """The next message, if there is one already."""
        return self._gathered() if self._waiting else None

    def _gathered(self) -> verify_pb2.RoundsResponse:
        """What waits, as one message."""
        message = self._message()
        ranks: dict[int, int] = {}
        num_bytes = 0
        while self._waiting:
            _, event = self._waiting[0]
            rank, size = _RANK[type(event)], _feature_bytes(event)
            full = num_bytes and size and num_bytes + size > _MESSAGE_BYTES
            if full or rank < ranks.get(event.session_id, 0):
                break
            ranks[event.session_id] = rank
            num_bytes += size
            add_told(message, event)
            self._waiting.popleft()
        self._feature_bytes -= num_bytes
        return message

    def _message(
        self, welcome: verify_pb2.VerifyServiceDescribeResponse | None = None
    ) -> verify_pb2.RoundsResponse:
        message = verify_pb2.RoundsResponse(sequence=self._sequence, welcome=welcome)
        self._sequence += 1
        return message


def _feature_bytes(event: StreamEvent) -> int:
    rows = event.rows if isinstance(event, FeaturesTold | CommitTold) else None
    return 0 if rows is None else len(rows.payload)
