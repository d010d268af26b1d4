"""A lane beside a Rounds stream: its messages travel there after the welcome, where one is offered.

Knows the stream's call and bytes; knows no session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from graft.common import lane_offer
from graft.common.channel import VERIFY_MESSAGE_BYTES
from graft.common.errors import NoReplica, ProtocolBroken
from graft.common.lane import Lane
from graft.v1 import verify_pb2
from graft.v1.verify_pb2 import RoundsRequest, RoundsResponse

_LAST_WORDS_S = 3.0

Call = grpc.aio.StreamStreamCall[RoundsRequest, RoundsResponse]


class Carrier:
    """Carries messages over a lane while the call stays silent, until it says why it ends.

    lost_alone: the lane has gone and the call has not, so the lane is to blame.
    """

    def __init__(self, call: Call, take: Callable[[RoundsResponse], None]) -> None:
        """take: called with each message that comes; what it raises ends the stream."""
        self._call = call
        self._take = take
        self._lane = Lane(self._came, VERIFY_MESSAGE_BYTES)
        self._failure: Exception | None = None
        self.lost_alone = False

    async def connect(self, offer: verify_pb2.Lane) -> bool:
        """False where the socket cannot be reached from here; the token was not sent then."""
        return await lane_offer.connect(self._lane, offer)

    def close(self) -> None:
        """Ends the lane; the call is left to who made it."""
        self._lane.close()

    async def write(self, message: RoundsRequest) -> None:
        """Sends a message.

        Raises:
            NoReplica: the lane is lost.
        """
        await self._lane.send(message.SerializeToString())

    def put(self, message: RoundsRequest) -> bool:
        """Sends a message at once; False, and nothing is sent, where that would have to wait."""
        if not self._lane.ready:
            return False
        self._lane.put(message.SerializeToString())
        return True

    async def follow(self) -> None:
        """Hands over what comes; never returns.

        Raises:
            Exception: why the stream ended: the call's error, the lane's, or what `take` raised.
        """
        reading: asyncio.Future[Any] = asyncio.ensure_future(self._call.read())
        reading.add_done_callback(_seen)
        ends = (reading, self._lane.lost)
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._broken() is None and not reading.cancelled():
                # The call says why the lane has gone; the lane has the messages before that.
                await asyncio.wait(ends, timeout=_LAST_WORDS_S)
            raise self._end(reading)
        finally:
            reading.cancel()

    def _broken(self) -> Exception | None:
        """What was wrong with a message of the lane."""
        lost = self._lane.lost
        if self._failure is None and lost.done() and not isinstance(lost.result(), NoReplica):
            return lost.result()
        return self._failure

    def _end(self, reading: asyncio.Future[Any]) -> BaseException:
        """Why the stream ended."""
        if (broken := self._broken()) is not None:
            return broken
        if not reading.done():
            self.lost_alone = True
            return self._lane.lost.result()
        if reading.cancelled():
            return NoReplica("the stream was cut")
        if (error := reading.exception()) is not None:
            return error
        if isinstance(reading.result(), RoundsResponse):
            return ProtocolBroken("a message came on the stream, which has a lane")
        return NoReplica("the replica ended the stream")

    def _came(self, message: bytes) -> None:
        try:
            self._take(RoundsResponse.FromString(message))
        except DecodeError:
            self._failure = ProtocolBroken("what came over the lane is no message")
        except Exception as error:
            self._failure = error
        if self._failure is not None:
            self._lane.close()


async def carrier_for(
    call: Call, address: str, welcome: RoundsResponse, take: Callable[[RoundsResponse], None]
) -> Carrier | None:
    """A carrier by the lane that a welcome offers; None where there is none or it does not fit.

    address: what was dialled.
    """
    if not welcome.HasField("lane") or not lane_offer.fits(welcome.lane, address):
        return None
    carrier = Carrier(call, take)
    return carrier if await carrier.connect(welcome.lane) else None


def _seen(reading: asyncio.Future[Any]) -> None:
    """What the lane tells may be the better reason; the call's is then nobody's."""
    if not reading.cancelled():
        reading.exception()
