"""Reads one session's messages in order, by whichever way they come. Opens and replays nothing.

They come over the session's call, or over the lane that its replica offers to gateways of the same
machine. They are numbered, so the two need not agree on when the one takes over from the other; the
call alone says how the session ends. Knows what a failure means.
"""

from __future__ import annotations

import asyncio
import time

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from graft.common import lane_offer
from graft.common.channel import VERIFY_MESSAGE_BYTES
from graft.common.errors import Draining, GraftError, Overloaded, SessionNotFound, Stalled
from graft.common.lane import Lane
from graft.common.server import error_from_call
from graft.gateway.mailbox import Mailbox
from graft.gateway.replicas import Replica
from graft.gateway.streams import Closings
from graft.v1 import verify_pb2
from graft.v1.verify_pb2 import GenerateRequest, GenerateResponse

_RETRY_AFTER_S = 1.0
_MAX_AHEAD = 64
_MAX_EARLY = 256
_LAST_WORDS_S = 3.0

VerifyReplica = Replica[verify_pb2.VerifyServiceDescribeResponse]
Call = grpc.aio.StreamStreamCall[GenerateRequest, GenerateResponse]


class Lost(Exception):
    """The replica, or the stream to it, is gone; the session may go on elsewhere."""


class Elsewhere(Exception):
    """The replica is healthy and will not take the session now."""

    def __init__(self, error: GraftError) -> None:
        super().__init__(str(error))
        self.error = error


class Reader:
    """One session, with a watchdog. Errors come out sorted by remedy. `close` it in the end."""

    def __init__(self, call: Call, replica: VerifyReplica, progress_s: float) -> None:
        self._call = call
        self._replica = replica
        self._lost = replica.lost
        self._progress_s = progress_s
        self._came: Mailbox[GenerateResponse] = Mailbox(_MAX_AHEAD)
        self._early: dict[int, GenerateResponse] = {}
        self._near = asyncio.Event()
        self._near.set()
        self._sequence = 0
        self._last_called = -1
        self._lane: Lane | None = None
        self._lane_rests = self._lane_far = False
        self._connecting: asyncio.Task[bool] | None = None
        self._ended: Exception | None = None
        self._closed = False
        self._lost.add_done_callback(self._given_up)
        self._reading = asyncio.create_task(self._read())

    async def write(self, message: GenerateRequest) -> None:
        """Sends a message. A failure shows in the next read, with its status."""
        writing = asyncio.ensure_future(self._call.write(message))
        await asyncio.wait(
            {writing, self._lost},
            timeout=self._progress_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not writing.done():
            writing.cancel()
            raise Lost("a message could not be sent")
        if not writing.cancelled():
            writing.exception()

    async def next(self, deadline: float, *, started: bool) -> GenerateResponse:
        """The next message.

        Raises:
            Lost: the stream broke or ended early, or the replica was given up.
            Elsewhere: the replica is full or draining.
            GraftError: anything that another replica would not mend.
        """
        left_s = deadline - time.monotonic()
        limit_s = max(0.0, min(left_s, self._progress_s) if started else left_s)
        try:
            message = await self._came.get(limit_s)
        except TimeoutError:
            text = f"no token came for {limit_s:.1f} s"
            raise Stalled(text, retry_after_s=_RETRY_AFTER_S) from None
        behind = self._came.full or (self._lane_far and not self._near.is_set())
        if self._lane_rests and self._lane is not None and not behind:
            self._lane_rests = False
            self._lane.resume()
        return message

    def take_lane(self, offer: verify_pb2.Lane) -> None:
        """Has messages come over the lane from now on, where it can be reached from here."""
        if not lane_offer.fits(offer, self._replica.address):
            return
        self._lane = Lane(self._take_frame, VERIFY_MESSAGE_BYTES)
        self._lane.lost.add_done_callback(lambda _: self._conclude())
        self._connecting = asyncio.create_task(lane_offer.connect(self._lane, offer))

    def close(self, closings: Closings, farewell: GenerateRequest | None) -> None:
        """Reads no more; the call is wound up in the background, after `farewell` if any."""
        self._lost.remove_done_callback(self._given_up)
        self._came.fail(Lost("the reader was closed"))
        self._closed = True
        self._near.set()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._lane is not None:
            self._lane.close()
        closings.close(self._call, self._reading, farewell)

    async def _read(self) -> None:
        """Follows the call to its end, whatever that is."""
        try:
            while isinstance(message := await self._call.read(), GenerateResponse):
                self._last_called = max(self._last_called, message.sequence)
                self._take(message)
                if self._came.full:
                    await self._came.room()
                if message.sequence >= self._sequence:
                    # What is missing comes by the lane, which goes on meanwhile.
                    await self._near.wait()
            self._ended = Lost("the stream ended without a finish")
        except grpc.aio.AioRpcError as failure:
            self._ended = _sorted_error(failure, opened=self._sequence > 0)
        except asyncio.CancelledError:
            self._ended = Lost("CANCELLED")
        except Exception as failure:
            self._ended = Lost(str(failure))
        self._conclude()
        while self._lane is not None and not self._lane.lost.done():
            # A lane that outlasts its call is waited for only while it is we who do not read it.
            await asyncio.wait({self._lane.lost}, timeout=_LAST_WORDS_S)
            if not self._lane_rests:
                self._lane.close()

    def _conclude(self) -> None:
        """What the call ended with comes after all that was sent over the lane."""
        # A lane that rests for what the call owes would never be seen to end.
        owed = self._lane_far and not self._near.is_set() and self._ended is not None
        if self._lane is not None and not self._lane.lost.done() and not owed:
            return
        if self._ended is not None:
            self._came.fail(self._ended)
        elif self._sequence <= self._last_called:
            # The call's are in order, so what is missing was on the lane.
            self._came.fail(Lost("the lane was lost with messages on it"))

    def _take_frame(self, frame: bytes) -> None:
        try:
            message = GenerateResponse.FromString(frame)
        except DecodeError:
            self._came.fail(GraftError("what came over the lane is no message"))
            return
        self._take(message)
        # What is missing comes by the call then, which goes on meanwhile.
        self._lane_far = message.sequence >= self._sequence and not self._near.is_set()
        if (self._lane_far or self._came.full) and self._lane is not None:
            self._lane_rests = True
            self._lane.pause()

    def _take(self, message: GenerateResponse) -> None:
        """Hands on a message, and those after it that came before it."""
        self._replica.heard()
        if self._closed:
            return
        if message.sequence != self._sequence:
            self._keep(message)
            return
        following: GenerateResponse | None = message
        while following is not None:
            self._sequence += 1
            self._came.put(following)
            following = self._early.pop(self._sequence, None) if self._early else None
        if len(self._early) < _MAX_EARLY:
            self._near.set()

    def _keep(self, message: GenerateResponse) -> None:
        """Keeps a message until those before it have come by the other way."""
        known = message.sequence < self._sequence or message.sequence in self._early
        if self._lane is None or known:
            self._came.fail(
                GraftError(
                    f"message {message.sequence} of the verify replica came in place of "
                    f"{self._sequence}"
                )
            )
            return
        self._early[message.sequence] = message
        if len(self._early) >= _MAX_EARLY:
            self._near.clear()
        self._conclude()

    def _given_up(self, _: asyncio.Future[None]) -> None:
        self._came.fail(Lost(self._replica.detail or "the replica was given up"))


def _sorted_error(failure: grpc.aio.AioRpcError, *, opened: bool) -> Exception:
    """What a failed stream means for the choice."""
    error = error_from_call(failure)
    if isinstance(error, (Overloaded, Draining)):
        return Lost(str(error)) if opened else Elsewhere(error)
    if isinstance(error, SessionNotFound):
        return Lost("SESSION_NOT_FOUND")
    if error is not None:
        return error
    code = failure.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Stalled("the request ran longer than its deadline")
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED):
        return GraftError(f"the verify replica refused the session: {failure.details()}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return GraftError("the verify replica does not speak this protocol")
    return Lost(code.name)
