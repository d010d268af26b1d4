"""Messages over a socket between two processes of one machine: a length, then the message.

What a gRPC stream hands over costs threads and system calls of its own, several times those of the
bytes. Knows frames; knows no message and no peer. One loop; callbacks run on it.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import cast

from graft.common.errors import GraftError, NoReplica, ProtocolBroken

_LENGTH = struct.Struct("<I")
# As much as gRPC lets wait unread: who does not read is to be noticed by what waits above.
_HIGH_WATER_BYTES = 64 << 10
_FLUSH_S = 5.0


class Lane(asyncio.Protocol):
    """One end. `lost` is done once the other end has gone, by the reason.

    on_message: called with each message that comes; a GraftError of it ends the lane.
    max_bytes: the longest message taken.
    """

    def __init__(self, on_message: Callable[[bytes], None], max_bytes: int) -> None:
        self.on_message = on_message
        self.lost: asyncio.Future[GraftError] = asyncio.get_running_loop().create_future()
        self._max_bytes = max_bytes
        self._transport: asyncio.Transport | None = None
        self._held = bytearray()
        self._needed = 0
        self._paused = False
        self._room = asyncio.Event()
        self._room.set()

    @property
    def ready(self) -> bool:
        """True while messages can be put: it is not lost, and the other end reads."""
        return self._open and self._room.is_set()

    @property
    def _open(self) -> bool:
        # A transport whose write has failed is closing, and says so to us only later.
        transport = self._transport
        return not (transport is None or self.lost.done() or transport.is_closing())

    def put(self, message: bytes) -> None:
        """Sends a message without waiting.

        Raises:
            NoReplica: the lane is lost.
        """
        if self._transport is None or not self._open:
            raise NoReplica("the lane is lost")
        self._transport.write(_LENGTH.pack(len(message)) + message)

    async def send(self, message: bytes) -> None:
        """Sends a message; waits while the other end does not read, or until the lane is lost.

        Raises:
            NoReplica: the lane is lost.
        """
        self.put(message)
        if not self._room.is_set():
            await self._room.wait()

    def pause(self) -> None:
        """Has `on_message` get no more until `resume`; what comes stays in the socket."""
        self._paused = True
        if self._transport is not None and not self.lost.done():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Reads on, first what had come already."""
        if self.lost.done():
            return
        self._paused = False
        self.data_received(b"")
        if self._transport is not None and not (self._paused or self.lost.done()):
            self._transport.resume_reading()

    def close(self, error: GraftError | None = None, flush_s: float = _FLUSH_S) -> None:
        """Ends the lane, for a reason of ours; what was put is sent, unless that takes long."""
        if self.lost.done():
            return
        self.lost.set_result(error or NoReplica("the lane was closed"))
        self._room.set()
        if self._transport is not None:
            self._transport.close()
            if self._transport.get_write_buffer_size():
                self.lost.get_loop().call_later(flush_s, self._transport.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The loop calls it."""
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is none
        transport.set_write_buffer_limits(_HIGH_WATER_BYTES)
        if self.lost.done():
            transport.close()

    def data_received(self, data: bytes) -> None:
        """The loop calls it; a message may come in pieces, and several at once."""
        if self._held:
            self._held += data
            if self._paused or len(self._held) < self._needed:
                return
            data = bytes(self._held)
            self._held.clear()
        self._held += data[self._hand_over(data) :]

    def _hand_over(self, data: bytes) -> int:
        """Gives `on_message` the whole messages of `data`; returns where what is left begins."""
        start, self._needed = 0, _LENGTH.size
        while not (self._paused or self.lost.done()) and len(data) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, start)
            if length > self._max_bytes:
                self.close(
                    ProtocolBroken(
                        f"a message of {length} bytes came, the most is {self._max_bytes}"
                    )
                )
                break
            begin, end = start + _LENGTH.size, start + _LENGTH.size + length
            if end > len(data):
                self._needed = end - start
                break
            try:
                self.on_message(data[begin:end])
            except GraftError as error:
                self.close(error)
            start = end
        return start

    def pause_writing(self) -> None:
        """The loop calls it when much waits to be sent."""
        self._room.clear()

    def resume_writing(self) -> None:
        """The loop calls it when little is left of that."""
        self._room.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """The loop calls it once."""
        self.close(NoReplica("the other end of the lane has gone" + (f": {exc}" if exc else "")))
