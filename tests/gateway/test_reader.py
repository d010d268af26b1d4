"""A session's messages come in order over two ways, and a failure means what it did over one."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from graft.common.errors import GraftError, ProtocolBroken, Stalled
from graft.common.lane import Lane
from graft.gateway.reader import Lost, Reader
from graft.gateway.replicas import Replica
from graft.gateway.streams import Closings
from graft.v1 import verify_pb2
from graft.v1.verify_pb2 import GenerateResponse
from graft.verify.lanes import Lanes

PORT = 4242
EOF = grpc.aio.EOF  # type: ignore[attr-defined]


class Call:
    """A session's call, played by the test."""

    def __init__(self) -> None:
        self.coming: asyncio.Queue[Any] = asyncio.Queue()
        self.said: list[Any] = []
        self.half_closed = self.cancelled = False

    async def read(self) -> Any:
        came = await self.coming.get()
        if isinstance(came, BaseException):
            raise came
        return came

    async def write(self, message: Any) -> None:
        self.said.append(message)

    async def done_writing(self) -> None:
        self.half_closed = True
        self.coming.put_nowait(EOF)

    def cancel(self) -> None:
        self.cancelled = True
        self.coming.put_nowait(asyncio.CancelledError())


class Wire:
    """A reader, its call, and the lane that a replica offered it."""

    def __init__(self, lanes: Lanes, address: str = f"127.0.0.1:{PORT}") -> None:
        self.call: Any = Call()
        channel: Any = None
        self.replica: Replica[verify_pb2.VerifyServiceDescribeResponse] = Replica(address, channel)
        self.reader = Reader(self.call, self.replica, 5.0)
        self.lane: asyncio.Future[Lane] = asyncio.get_running_loop().create_future()
        offer = lanes.offer(self.lane.set_result)
        assert offer is not None
        self.offer = offer

    async def take_lane(self) -> Lane:
        self.reader.take_lane(self.offer)
        return await asyncio.wait_for(self.lane, 5)

    async def next(self, limit_s: float = 5.0) -> int:
        """The number of the next message."""
        message = await self.reader.next(time.monotonic() + limit_s, started=True)
        return message.sequence


def message(number: int) -> GenerateResponse:
    commit = verify_pb2.TokensCommitted(tokens=[number])
    return GenerateResponse(sequence=number, committed=commit)


def frame(number: int) -> bytes:
    return message(number).SerializeToString()


@pytest_asyncio.fixture
async def lanes() -> AsyncIterator[Lanes]:
    found = Lanes()
    await found.open(PORT)
    yield found
    found.close()


@pytest_asyncio.fixture
async def wire(lanes: Lanes) -> AsyncIterator[Wire]:
    found, closings = Wire(lanes), Closings()
    yield found
    found.reader.close(closings, None)
    await closings.drain()
    assert found.call.half_closed and found.call.cancelled


@pytest.mark.parametrize("seed", range(20))
async def test_messages_come_in_order_however_two_ways_share_them(wire: Wire, seed: int) -> None:
    """Each way keeps its own order; one may be a hundred messages behind the other."""
    rng, count = random.Random(seed), 100
    lane = await wire.take_lane()
    by_lane = [rng.random() < seed / 20 for _ in range(count)]
    ways: dict[bool, list[int]] = {True: [], False: []}
    for number, way in enumerate(by_lane):
        ways[way].append(number)

    async def send() -> None:
        while ways[True] or ways[False]:
            way = rng.choice([way for way in ways if ways[way]])
            for _ in range(rng.randint(1, 40)):
                if ways[way]:
                    number = ways[way].pop(0)
                    if way:
                        lane.put(frame(number))
                    else:
                        wire.call.coming.put_nowait(message(number))
            if rng.random() < 0.5:
                await asyncio.sleep(0)

    sending = asyncio.create_task(send())
    assert [await wire.next() for _ in range(count)] == list(range(count))
    await sending


async def test_an_end_told_by_the_call_waits_for_what_is_on_the_lane(wire: Wire) -> None:
    lane = await wire.take_lane()
    wire.call.coming.put_nowait(message(2))
    wire.call.coming.put_nowait(EOF)
    await asyncio.sleep(0.02)
    lane.put(frame(0))
    lane.put(frame(1))
    lane.close()
    assert [await wire.next() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(Lost, match="without a finish"):
        await wire.next()


@pytest.mark.parametrize("first", ["call", "lane"])
async def test_a_lane_lost_with_messages_on_it_loses_the_session(wire: Wire, first: str) -> None:
    lane = await wire.take_lane()
    lane.put(frame(0))
    assert await wire.next() == 0
    if first == "call":
        wire.call.coming.put_nowait(message(2))
        await asyncio.sleep(0.02)
        lane.close()
    else:
        lane.close()
        await asyncio.sleep(0.02)
        wire.call.coming.put_nowait(message(2))
    with pytest.raises(Lost, match="lane was lost"):
        await wire.next()


async def test_a_lane_lost_with_nothing_on_it_goes_unnoticed(wire: Wire) -> None:
    lane = await wire.take_lane()
    lane.put(frame(0))
    assert await wire.next() == 0
    lane.close()
    for number in (1, 2):
        wire.call.coming.put_nowait(message(number))
    assert [await wire.next(), await wire.next()] == [1, 2]


@pytest.mark.parametrize("ahead", ["lane", "call"])
async def test_one_way_may_be_thousands_of_messages_ahead(wire: Wire, ahead: str) -> None:
    """It is held up in its socket until what is missing has come by the other."""
    lane, count = await wire.take_lane(), 3000
    late, early = range(1, count // 2), range(count // 2, count)
    lane.put(frame(0))

    def send(number: int) -> None:
        if (number in early) is (ahead == "lane"):
            lane.put(frame(number))
        else:
            wire.call.coming.put_nowait(message(number))

    async def lag() -> None:
        for number in late:
            send(number)
            if number % 10 == 0:
                await asyncio.sleep(0.001)

    for number in early:
        send(number)
    lagging = asyncio.create_task(lag())
    assert [await wire.next() for _ in range(count)] == list(range(count))
    await lagging


async def test_who_reads_late_finds_what_went_by_the_call_when_the_lane_was_full(
    wire: Wire,
) -> None:
    lane, by_call = await wire.take_lane(), 0
    padding = list(range(100))
    for number in range(3000):
        commit = verify_pb2.TokensCommitted(tokens=padding)
        said = GenerateResponse(sequence=number, committed=commit)
        if lane.ready:
            lane.put(said.SerializeToString())
        else:
            by_call += 1
            wire.call.coming.put_nowait(said)
        if number % 50 == 0:
            await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert by_call > 256
    assert [await wire.next() for _ in range(3000)] == list(range(3000))


@pytest.mark.parametrize("owed", ["nothing", "by the call"])
async def test_a_call_that_fails_under_an_open_lane_loses_the_session(
    wire: Wire, owed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No honest replica leaves a lane open; a watchdog would wait for a minute."""
    monkeypatch.setattr("graft.gateway.reader._LAST_WORDS_S", 0.05)
    lane = await wire.take_lane()
    lane.put(frame(0))
    assert await wire.next() == 0
    if owed == "by the call":
        for number in range(2, 700):
            lane.put(frame(number))
        await asyncio.sleep(0.05)
    wire.call.coming.put_nowait(RuntimeError("UNAVAILABLE"))
    with pytest.raises(Lost, match="UNAVAILABLE"):
        await wire.next(3.0)


async def test_closing_far_behind_leaves_nothing(lanes: Lanes) -> None:
    wire, closings = Wire(lanes), Closings()
    await wire.take_lane()
    for number in range(1, 1000):
        wire.call.coming.put_nowait(message(number))
    await asyncio.sleep(0.02)
    wire.reader.close(closings, None)
    await asyncio.wait_for(closings.drain(), 5)


async def test_a_socket_that_is_not_there_leaves_the_call(wire: Wire) -> None:
    wire.offer.path += ".not"
    wire.reader.take_lane(wire.offer)
    for number in range(3):
        wire.call.coming.put_nowait(message(number))
    assert [await wire.next() for _ in range(3)] == [0, 1, 2]
    assert not wire.lane.done()


@pytest.mark.parametrize("address", [f"10.0.0.7:{PORT}", "127.0.0.1:4243", f"localhost:{PORT}0"])
async def test_a_replica_elsewhere_or_behind_a_relay_has_no_lane(
    lanes: Lanes, address: str
) -> None:
    wire = Wire(lanes, address)
    wire.reader.take_lane(wire.offer)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(wire.lane), 0.05)
    closings = Closings()
    wire.reader.close(closings, None)
    await closings.drain()


@pytest.mark.parametrize("said", ["no message", "again", "far ahead"])
async def test_a_lane_that_breaks_the_order_is_an_error(wire: Wire, said: str) -> None:
    lane = await wire.take_lane()
    lane.put(frame(0))
    assert await wire.next() == 0
    lane.put({"no message": b"\xff\xff\xff", "again": frame(0)}.get(said, frame(5000)))
    with pytest.raises(GraftError):
        await wire.next()


async def test_without_a_lane_a_gap_is_an_error_at_once(wire: Wire) -> None:
    wire.call.coming.put_nowait(message(1))
    with pytest.raises(GraftError, match="message 1 of the verify replica came in place of 0"):
        await wire.next()


async def test_a_failed_call_is_told_after_the_lane_has_ended(wire: Wire) -> None:
    lane = await wire.take_lane()
    wire.call.coming.put_nowait(asyncio.CancelledError())
    lane.put(frame(0))
    assert await wire.next() == 0
    with pytest.raises(Stalled):
        await wire.next(0.01)
    lane.close()
    with pytest.raises(Lost, match="CANCELLED"):
        await wire.next()


async def test_a_replica_that_is_given_up_is_lost_on_both_ways(wire: Wire) -> None:
    lane = await wire.take_lane()
    lane.put(frame(0))
    assert await wire.next() == 0
    waiting = asyncio.create_task(wire.next())
    await asyncio.sleep(0)
    wire.replica.lose()
    with pytest.raises(Lost):
        await waiting


async def test_who_reads_nothing_holds_up_both_ways(wire: Wire) -> None:
    """What is not read stays in the sockets, so that the replica notices."""
    lane = await wire.take_lane()
    for number in range(100):
        wire.call.coming.put_nowait(message(number))
    await asyncio.sleep(0.02)
    assert wire.call.coming.qsize() > 30
    assert [await wire.next() for _ in range(100)] == list(range(100))

    big = verify_pb2.TokensCommitted(tokens=range(20_000))
    for number in range(100, 400):
        lane.put(GenerateResponse(sequence=number, committed=big).SerializeToString())
    await asyncio.sleep(0.05)
    assert not lane.ready
    assert [await wire.next() for _ in range(300)] == list(range(100, 400))
    assert lane.ready


async def test_closing_ends_the_lane_and_says_farewell(lanes: Lanes) -> None:
    wire, closings = Wire(lanes), Closings()
    lane = await wire.take_lane()
    farewell = verify_pb2.GenerateRequest(cancel=verify_pb2.CancelSession(reason="enough"))
    wire.reader.close(closings, farewell)
    await closings.drain()
    assert wire.call.said == [farewell]
    await asyncio.wait_for(asyncio.shield(lane.lost), 5)
    assert not isinstance(lane.lost.result(), ProtocolBroken)


async def test_closing_while_the_lane_connects_leaves_nothing(lanes: Lanes) -> None:
    wire, closings = Wire(lanes), Closings()
    wire.reader.take_lane(wire.offer)
    wire.reader.close(closings, None)
    await closings.drain()
    if wire.lane.done():
        await asyncio.wait_for(asyncio.shield(wire.lane.result().lost), 5)
