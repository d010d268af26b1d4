"""A TCP relay that makes a wire worse: delay, jitter, a bandwidth cap, resets and silence.

Each direction has its own conditions, which may be changed while connections are open. Bytes are
never changed, lost or reordered, as TCP promises; they come later, or the connection breaks. For
tests and measurements; knows nothing of what it carries.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from graft.common.errors import InvalidArgument

_CHUNK_BYTES = 1 << 16
_HELD_BYTES = 1 << 22
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What happens to bytes in one direction.

    delay_s: time every byte takes. jitter_s: up to so much more, drawn for each piece; later
        pieces never overtake. bytes_per_s: the most that pass; 0 is no limit.
    hung: bytes are taken and not passed on, until this is over; the sender notices nothing.

    Raises:
        InvalidArgument: a number is below zero.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    hung: bool = False

    def __post_init__(self) -> None:
        if min(self.delay_s, self.jitter_s, self.bytes_per_s) < 0:
            raise InvalidArgument("delay, jitter and bandwidth are 0 or more", field="conditions")


class _Direction:
    """Conditions that may change, an event for when they do, and bytes passed so far."""

    def __init__(self, conditions: Conditions, seed: int) -> None:
        self.conditions = conditions
        self.changed = asyncio.Event()
        self.num_bytes = 0
        self._random = random.Random(seed)

    def change(self, conditions: Conditions) -> None:
        self.conditions = conditions
        self.changed.set()
        self.changed = asyncio.Event()

    def delay_s(self) -> float:
        conditions = self.conditions
        return conditions.delay_s + self._random.uniform(0.0, conditions.jitter_s)

    async def until_passing(self) -> None:
        while self.conditions.hung:
            await self.changed.wait()


class Relay:
    """Listens, and joins every connection to one at `target`; `there` leads to it, `back` from it.

    seed: of the jitter.
    """

    def __init__(
        self,
        target: str,
        there: Conditions | None = None,
        back: Conditions | None = None,
        seed: int = 0,
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._there = _Direction(there or Conditions(), seed)
        self._back = _Direction(back or Conditions(), seed + 1)
        self._joined: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.num_connections = 0
        self.num_resets = 0

    @property
    def bytes_there(self) -> int:
        """Bytes passed on to the target."""
        return self._there.num_bytes

    @property
    def bytes_back(self) -> int:
        """Bytes passed on from the target."""
        return self._back.num_bytes

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listens; returns the address to connect to."""
        self._server = await asyncio.start_server(self._accept, host, port)
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Ends all connections and stops listening."""
        if self._server is not None:
            self._server.close()
        for task in [*self._joined]:
            task.cancel()
        await asyncio.gather(*self._joined, return_exceptions=True)

    def set_rtt(self, rtt_s: float) -> None:
        """Half of `rtt_s` in each direction; other conditions stay."""
        self.change(
            replace(self._there.conditions, delay_s=rtt_s / 2),
            replace(self._back.conditions, delay_s=rtt_s / 2),
        )

    def change(self, there: Conditions | None = None, back: Conditions | None = None) -> None:
        """New conditions, from the next piece on; a direction without any keeps its own."""
        if there is not None:
            self._there.change(there)
        if back is not None:
            self._back.change(back)

    def hang(self, hung: bool = True) -> None:
        """Both directions fall silent with their connections open, or go on where they stopped."""
        self.change(
            replace(self._there.conditions, hung=hung), replace(self._back.conditions, hung=hung)
        )

    def reset(self) -> int:
        """Breaks every connection with a TCP reset; returns how many ends that were."""
        writers = [*self._writers]
        for writer in writers:
            found = writer.get_extra_info("socket")
            if found is not None:
                with suppress(OSError):
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
        self.num_resets += bool(writers)
        return len(writers)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._joined.add(task)
        self.num_connections += 1
        ends = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            ends.append(far_writer)
            self._writers.update(ends)
            _no_delay(writer)
            _no_delay(far_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(_carry(reader, far_writer, self._there))
                group.create_task(_carry(far_reader, writer, self._back))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        except* asyncio.CancelledError:
            pass
        finally:
            self._writers.difference_update(ends)
            self._joined.discard(task)
            for end in ends:
                end.transport.abort()


async def _carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: _Direction
) -> None:
    """Takes pieces as they come and passes each on when its time has come; then the end."""
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_HELD_BYTES // _CHUNK_BYTES)
    async with asyncio.TaskGroup() as group:
        group.create_task(_take(reader, pieces, direction))
        group.create_task(_pass_on(pieces, writer, direction))


async def _take(
    reader: asyncio.StreamReader, pieces: asyncio.Queue[tuple[float, bytes]], direction: _Direction
) -> None:
    due = 0.0
    while True:
        piece = await reader.read(_CHUNK_BYTES)
        due = max(due, time.monotonic() + direction.delay_s())
        await pieces.put((due, piece))
        if not piece:
            return


async def _pass_on(
    pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, direction: _Direction
) -> None:
    free_at = 0.0
    while True:
        due, piece = await pieces.get()
        wait_s = max(due, free_at) - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        await direction.until_passing()
        if not piece:
            if writer.can_write_eof():
                writer.write_eof()
            return
        writer.write(piece)
        await writer.drain()
        direction.num_bytes += len(piece)
        if direction.conditions.bytes_per_s:
            free_at = time.monotonic() + len(piece) / direction.conditions.bytes_per_s


def _no_delay(writer: asyncio.StreamWriter) -> None:
    found = writer.get_extra_info("socket")
    if found is not None:
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
