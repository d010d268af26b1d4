"""A lane hands over whole messages in order, however its bytes are torn, and says how it ended."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from graft.common.errors import GraftError, NoReplica, ProtocolBroken
from graft.common.lane import Lane

MAX_BYTES = 4 << 20
WAIT_S = 10.0


@pytest.fixture(
    params=[asyncio.DefaultEventLoopPolicy(), uvloop.EventLoopPolicy()], ids=["asyncio", "uvloop"]
)
def event_loop_policy(request: pytest.FixtureRequest) -> Any:
    """Services run on uvloop, tests and bench also on asyncio's own."""
    return request.param


def frame(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


class End(Lane):
    """A lane that keeps what comes."""

    def __init__(self, ends: asyncio.Queue[End] | None = None) -> None:
        super().__init__(self._came, MAX_BYTES)
        self.ends = ends
        self.came: list[bytes] = []
        self.changed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.ends is not None:
            self.ends.put_nowait(self)

    def _came(self, message: bytes) -> None:
        self.came.append(message)
        self.changed.set()

    async def until(self, count: int) -> list[bytes]:
        """What has come, once it is so many."""
        async with asyncio.timeout(WAIT_S):
            while len(self.came) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.came

    async def ended(self) -> GraftError:
        """Why it ended."""
        async with asyncio.timeout(WAIT_S):
            return await self.lost


@asynccontextmanager
async def listening(folder: Path) -> AsyncIterator[tuple[str, asyncio.Queue[End]]]:
    """A socket, and the ends of whoever connects to it."""
    loop = asyncio.get_running_loop()
    ends: asyncio.Queue[End] = asyncio.Queue()
    path = str(folder / "lane")
    server = await loop.create_unix_server(lambda: End(ends), path)
    try:
        yield path, ends
    finally:
        server.close()


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[End, End]]:
    """Both ends of a lane."""
    async with listening(folder) as (path, ends):
        _, near = await asyncio.get_running_loop().create_unix_connection(End, path)
        far = await ends.get()
        try:
            yield near, far
        finally:
            near.close()
            far.close()


@asynccontextmanager
async def by_hand(folder: Path) -> AsyncIterator[tuple[End, asyncio.StreamWriter]]:
    """An end, and a peer that writes what a test wants and reads nothing."""
    async with listening(folder) as (path, ends):
        _, writer = await asyncio.open_unix_connection(path)
        end = await ends.get()
        try:
            yield end, writer
        finally:
            writer.transport.abort()
            end.close()


async def test_messages_come_whole_and_in_order_both_ways(tmp_path: Path) -> None:
    sent = [b"one", b"", b"x" * 1_000_000, b"", b"four"]
    async with pair(tmp_path) as (near, far):
        for message in sent:
            near.put(message)
            far.put(message[::-1])
        assert await far.until(len(sent)) == sent
        assert await near.until(len(sent)) == [message[::-1] for message in sent]


async def test_messages_torn_at_every_place_come_whole() -> None:
    sent = [b"ab", b"", b"cdefg"]
    stream = b"".join(map(frame, sent))
    for first in range(len(stream) + 1):
        for second in range(first, len(stream) + 1):
            end = End()
            for piece in (stream[:first], stream[first:second], stream[second:]):
                end.data_received(piece)
            assert end.came == sent


@pytest.mark.parametrize("seed", range(5))
async def test_any_messages_in_any_pieces_come_whole(seed: int) -> None:
    draw = random.Random(seed)
    sent = [draw.randbytes(draw.choice((0, 1, 3, 4, 5, 100, 5000))) for _ in range(60)]
    stream, end = b"".join(map(frame, sent)), End()
    while stream:
        size = draw.choice((1, 2, 3, 4, 5, 7, 200, 9000))
        end.data_received(stream[:size])
        stream = stream[size:]
    assert end.came == sent


async def test_a_message_that_is_too_long_ends_the_lane_after_those_before(tmp_path: Path) -> None:
    async with by_hand(tmp_path) as (end, writer):
        writer.write(frame(b"fits") + struct.pack("<I", MAX_BYTES + 1) + b"rest" + frame(b"late"))
        error = await end.ended()
        assert isinstance(error, ProtocolBroken)
        assert str(MAX_BYTES + 1) in str(error)
        assert end.came == [b"fits"]


async def test_the_longest_message_is_taken(tmp_path: Path) -> None:
    async with pair(tmp_path) as (near, far):
        await asyncio.wait_for(near.send(b"x" * MAX_BYTES), WAIT_S)
        assert [len(message) for message in await far.until(1)] == [MAX_BYTES]


async def test_an_error_of_who_takes_a_message_ends_the_lane(tmp_path: Path) -> None:
    broken, taken = ProtocolBroken("no such thing"), []

    def take(message: bytes) -> None:
        taken.append(message)
        raise broken

    async with pair(tmp_path) as (near, far):
        far.on_message = take
        near.put(b"one")
        near.put(b"two")
        assert await far.ended() is broken
        assert isinstance(await near.ended(), NoReplica)
        assert taken == [b"one"]


async def test_who_takes_a_message_may_have_the_next_taken_by_another(tmp_path: Path) -> None:
    others: list[bytes] = []
    async with by_hand(tmp_path) as (end, writer):

        def first(message: bytes) -> None:
            end.on_message = others.append
            end.came.append(message)
            end.changed.set()

        end.on_message = first
        writer.write(frame(b"token") + frame(b"one") + frame(b"two"))
        await end.until(1)
        assert others == [b"one", b"two"]


async def test_a_paused_lane_gives_nothing_and_loses_nothing(tmp_path: Path) -> None:
    async with by_hand(tmp_path) as (end, writer):
        take = end.on_message

        def take_one(message: bytes) -> None:
            take(message)
            end.pause()

        end.on_message = take_one
        writer.write(frame(b"one") + frame(b"two") + frame(b"three")[:6])
        await end.until(1)
        writer.write(frame(b"three")[6:])
        await asyncio.sleep(0)
        assert end.came == [b"one"]
        end.resume()
        assert end.came == [b"one", b"two"]
        end.on_message = take
        end.resume()
        assert await end.until(3) == [b"one", b"two", b"three"]


async def test_a_lane_whose_other_end_does_not_read_is_not_ready_and_senders_wait(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as (near, far):
        far.pause()
        num_put = 0
        while near.ready:
            near.put(b"x" * 10_000)
            num_put += 1
            await asyncio.sleep(0)
        # The socket's own buffers and what the lane lets wait; far from what a peer may miss.
        assert num_put < 100
        sending = asyncio.ensure_future(near.send(b"last"))
        await asyncio.wait({sending}, timeout=0.05)
        assert not sending.done()
        far.resume()
        await asyncio.wait_for(sending, WAIT_S)
        assert (await far.until(num_put + 1))[-1] == b"last"
        assert near.ready


@pytest.mark.parametrize("who", ["we", "they"])
async def test_a_sender_that_waits_is_let_go_when_the_lane_ends(tmp_path: Path, who: str) -> None:
    async with pair(tmp_path) as (near, far):
        far.pause()
        sending = asyncio.ensure_future(near.send(b"x" * MAX_BYTES))
        await asyncio.wait({sending}, timeout=0.05)
        assert not sending.done()
        (near if who == "we" else far).close()
        await asyncio.wait_for(sending, WAIT_S)
        assert not near.ready


async def test_what_was_put_before_the_end_still_comes(tmp_path: Path) -> None:
    sent = [b"x" * 500_000, b"last"]
    async with pair(tmp_path) as (near, far):
        for message in sent:
            near.put(message)
        near.close()
        assert await far.until(2) == sent
        assert isinstance(await far.ended(), NoReplica)


async def test_a_closed_lane_does_not_wait_for_ever_for_who_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graft.common.lane._FLUSH_S", 0.05)
    async with pair(tmp_path) as (near, far):
        far.pause()
        near.put(b"x" * MAX_BYTES)
        gone = asyncio.Event()
        monkeypatch.setattr(near, "connection_lost", lambda _: gone.set())
        near.close()
        await asyncio.wait_for(gone.wait(), WAIT_S)
        assert not far.came


async def test_a_lost_lane_takes_nothing_more(tmp_path: Path) -> None:
    async with pair(tmp_path) as (near, far):
        assert near.ready
        far.close()
        assert isinstance(await near.ended(), NoReplica)
        assert not near.ready
        with pytest.raises(NoReplica):
            near.put(b"late")
        with pytest.raises(NoReplica):
            await near.send(b"late")
        near.pause()
        near.resume()


async def test_a_lane_is_lost_for_its_first_reason(tmp_path: Path) -> None:
    async with pair(tmp_path) as (near, far):
        first = ProtocolBroken("first")
        near.close(first)
        near.close(ProtocolBroken("second"))
        await far.ended()
        assert await near.ended() is first


async def test_a_lane_that_is_not_connected_takes_nothing() -> None:
    lane = End()
    assert not lane.ready
    with pytest.raises(NoReplica):
        lane.put(b"early")


async def test_a_lane_closed_before_it_is_connected_does_not_stay(tmp_path: Path) -> None:
    near = End()
    near.close()
    async with listening(tmp_path) as (path, ends):
        await asyncio.get_running_loop().create_unix_connection(lambda: near, path)
        assert isinstance(await (await ends.get()).ended(), NoReplica)
