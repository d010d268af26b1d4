"""Lanes of a replica: who gets one, what goes over it, and that it ends with its stream."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import struct
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from graft.common.channel import PROTOCOL_REVISION, VERIFY_MESSAGE_BYTES, Tls, open_channel
from graft.common.errors import GraftError, NoReplica, ProtocolBroken, Stalled
from graft.common.lane import Lane
from graft.common.server import error_from_call
from graft.common.tree import chain
from graft.testing.plain import Plain
from graft.testing.verify_client import (
    LaneDrafter,
    Say,
    Seat,
    VerifyBench,
    eventually,
    open_lane,
    running_verify,
)
from graft.v1 import verify_pb2, verify_pb2_grpc
from graft.verify.lanes import Lanes

PROMPT = list(b"a prompt")
COUNT = 12
WAIT_S = 10.0
HELLO = verify_pb2.DraftHello(protocol_revision=PROTOCOL_REVISION)
NOBODYS = verify_pb2.EmptyProposal(session_id=1, prefix_length=1, prefix_digest=1)


@pytest_asyncio.fixture
async def bench(tiny_model: Path) -> AsyncIterator[VerifyBench]:
    async with running_verify(tiny_model) as running:
        yield running


async def silent(seat: Seat) -> Say | None:
    return None


async def guess(seat: Seat) -> Say:
    return Say(trees=[seat.propose(chain([seat.tokens[-1], 113, 50]))])


async def welcomed(bench: VerifyBench) -> tuple[Any, verify_pb2.Lane | None]:
    """A stream by hand, and the lane it is offered."""
    return await welcomed_by(bench.stub)


async def welcomed_by(stub: Any) -> tuple[Any, verify_pb2.Lane | None]:
    call = stub.Rounds()
    await call.write(Say(hello=HELLO))
    welcome = await call.read()
    assert welcome.HasField("welcome")
    return call, welcome.lane if welcome.HasField("lane") else None


@asynccontextmanager
async def carried(bench: VerifyBench) -> AsyncIterator[tuple[Any, Lane]]:
    """A stream by hand, and its lane once the replica has it."""
    call, offer = await welcomed(bench)
    assert offer is not None
    before = bench.metric("graft_lanes")
    lane = await open_lane(offer, lambda _: None)
    await eventually(lambda: bench.metric("graft_lanes") == before + 1)
    try:
        yield call, lane
    finally:
        call.cancel()
        lane.close()


async def ended(lane: Lane) -> GraftError:
    async with asyncio.timeout(WAIT_S):
        return await lane.lost


async def failure_of(call: Any) -> GraftError | None:
    """What the call fails with."""
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    return error_from_call(caught.value)


async def test_an_offer_names_a_socket_that_only_this_user_reaches(bench: VerifyBench) -> None:
    (first, one), (second, other) = await welcomed(bench), await welcomed(bench)
    assert one is not None and other is not None
    socket = os.stat(one.path)
    folder = os.stat(os.path.dirname(one.path))
    assert stat.S_ISSOCK(socket.st_mode)
    assert stat.S_IMODE(folder.st_mode) == 0o700
    assert one.port == int(bench.address.rpartition(":")[2])
    assert one.path == other.path and one.token != other.token
    assert len(one.token) == 16
    first.cancel()
    second.cancel()


async def test_a_replica_that_is_told_to_stop_removes_its_folder(tiny_model: Path) -> None:
    async with running_verify(tiny_model) as bench, carried(bench) as (call, lane):
        _, offer = await welcomed(bench)
        assert offer is not None
        await bench.server.stop(0.1)
        assert not Path(offer.path).parent.exists()
        assert isinstance(await ended(lane), NoReplica)
        assert await call.code() == grpc.StatusCode.OK


async def test_a_replica_without_lanes_offers_none(tiny_model: Path) -> None:
    async with running_verify(tiny_model, lane=False) as bench:
        call, offer = await welcomed(bench)
        assert offer is None
        call.cancel()


def certified(folder: Path) -> tuple[Path, Path]:
    """A certificate for this machine, and its key."""
    certificate, key = folder / "own.pem", folder / "own.key"
    words = f"req -x509 -nodes -days 2 -subj /CN=localhost -keyout {key} -out {certificate}"
    words += " -newkey ec -pkeyopt ec_paramgen_curve:prime256v1"
    words += " -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(["openssl", *words.split()], check=True, capture_output=True)
    return certificate, key


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes the certificate")
async def test_a_replica_with_tls_offers_none(tiny_model: Path, tmp_path: Path) -> None:
    certificate, key = certified(tmp_path)
    secure = {"tls_certificate": str(certificate), "tls_key": str(key)}
    async with (
        running_verify(tiny_model, **secure) as bench,
        open_channel(bench.address, tls=Tls(ca=certificate)) as channel,
    ):
        call, offer = await welcomed_by(verify_pb2_grpc.VerifyServiceStub(channel))
        assert offer is None
        call.cancel()


async def test_a_replica_that_cannot_have_a_socket_serves_without(
    tiny_model: Path, plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a Unix socket has about a hundred bytes."""
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    async with running_verify(tiny_model) as bench:
        call, offer = await welcomed(bench)
        assert offer is None
        assert (await bench.generate(PROMPT, COUNT)).tokens == plain.text(PROMPT, COUNT)
        assert not list(folder.iterdir())
        call.cancel()


async def test_a_session_goes_over_the_lane_in_numbered_messages(
    bench: VerifyBench, plain: Plain
) -> None:
    drafter = LaneDrafter(bench.stub, guess)
    generation = await bench.generate(PROMPT, COUNT, drafter=drafter)
    assert generation.tokens == plain.text(PROMPT, COUNT)
    assert generation.finished is not None and generation.finished.drafted_count > 0
    await drafter.until(lambda: bool(drafter.closed))
    assert bench.metric("graft_lanes") == 1
    assert drafter.sequences == list(range(len(drafter.sequences)))
    # The prefix, a commit for each round but those that went out together, the end.
    assert len(drafter.sequences) > 3
    await drafter.die()
    await eventually(lambda: bench.metric("graft_lanes") == 0)


async def test_sessions_of_several_drafters_keep_their_lanes_apart(
    bench: VerifyBench, plain: Plain
) -> None:
    drafters = [LaneDrafter(bench.stub, guess) for _ in range(3)]
    prompts = [[*PROMPT, 65 + number] for number in range(3)]
    generations = await asyncio.gather(
        *(
            bench.generate(prompt, COUNT, drafter=drafter)
            for prompt, drafter in zip(prompts, drafters, strict=True)
        )
    )
    for prompt, generation in zip(prompts, generations, strict=True):
        assert generation.tokens == plain.text(prompt, COUNT)
    for drafter in drafters:
        assert drafter.sequences == list(range(len(drafter.sequences)))
        await drafter.die()
    await eventually(lambda: bench.metric("graft_lanes") == 0)


@pytest.mark.parametrize("fault", ["wrong", "used", "withdrawn"])
async def test_a_token_serves_one_lane_of_a_living_stream(bench: VerifyBench, fault: str) -> None:
    call, offer = await welcomed(bench)
    assert offer is not None
    first = await open_lane(offer, lambda _: None) if fault == "used" else None
    if fault == "wrong":
        offer.token = b"x" * 16
    if fault == "withdrawn":
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.OK
    lane = await open_lane(offer, lambda _: None)
    assert isinstance(await ended(lane), NoReplica)
    assert call.done() == (fault == "withdrawn")
    if first is not None:
        assert first.ready and bench.metric("graft_lanes") == 1
        first.close()
    call.cancel()


async def test_a_stream_whose_token_nobody_brought_goes_on_without_a_lane(
    bench: VerifyBench, plain: Plain
) -> None:
    drafter = bench.drafter(guess)
    generation = await bench.generate(PROMPT, COUNT, drafter=drafter)
    assert generation.tokens == plain.text(PROMPT, COUNT)
    assert generation.finished is not None and generation.finished.drafted_count > 0
    assert bench.metric("graft_lanes") == 0
    await drafter.die()


async def test_who_opens_a_lane_and_says_nothing_is_cut(
    bench: VerifyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graft.verify.lanes._NAMED_S", 0.05)
    call, offer = await welcomed(bench)
    assert offer is not None
    reader, writer = await asyncio.open_unix_connection(offer.path)
    async with asyncio.timeout(WAIT_S):
        assert await reader.read() == b""
    writer.close()
    assert not call.done()
    call.cancel()


async def test_a_lane_named_in_time_is_not_cut(
    bench: VerifyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graft.verify.lanes._NAMED_S", 0.5)
    async with carried(bench) as (call, lane):
        await asyncio.wait({lane.lost}, timeout=0.7)
        assert lane.ready and not call.done()


async def test_a_lane_for_a_stream_that_has_begun_is_refused(bench: VerifyBench) -> None:
    """What went out on the stream might come after what goes over the lane."""
    call, offer = await welcomed(bench)
    assert offer is not None
    await call.write(Say(empties=[NOBODYS]))
    assert len((await call.read()).refusals) == 1
    assert isinstance(await ended(await open_lane(offer, lambda _: None)), NoReplica)
    await call.write(Say(empties=[NOBODYS]))
    assert (await call.read()).sequence == 2
    call.cancel()


@pytest.mark.parametrize("said", ["no message", "hello", "too much"])
async def test_what_breaks_the_order_of_a_lane_is_told_by_the_stream(
    bench: VerifyBench, said: str
) -> None:
    async with carried(bench) as (call, lane):
        if said == "no message":
            lane.put(b"\xff\xff\xff")
        elif said == "hello":
            lane.put(Say(hello=HELLO).SerializeToString())
        else:
            assert lane._transport is not None
            lane._transport.write(struct.pack("<I", VERIFY_MESSAGE_BYTES + 1))
        assert isinstance(await failure_of(call), ProtocolBroken)
        assert isinstance(await ended(lane), NoReplica)
    assert bench.metric("graft_lanes") == 0


async def test_a_stream_with_a_lane_stays_silent(bench: VerifyBench) -> None:
    async with carried(bench) as (call, lane):
        await call.write(Say(empties=[NOBODYS]))
        error = await failure_of(call)
        assert isinstance(error, ProtocolBroken)
        assert "which has a lane" in str(error)
        await ended(lane)


async def test_a_lost_lane_ends_its_stream(bench: VerifyBench, plain: Plain) -> None:
    async def lose(seat: Seat) -> Say | None:
        if seat.round == 2:
            drafter.lane.close()
            return None
        return await guess(seat)

    drafter = LaneDrafter(bench.stub, lose)
    generation = await bench.generate(PROMPT, COUNT, drafter=drafter)
    assert generation.tokens == plain.text(PROMPT, COUNT)
    async with asyncio.timeout(WAIT_S):
        assert await drafter.call.code() in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
    assert bench.metric("graft_lanes") == 0
    await drafter.die()


@pytest.mark.parametrize("end", ["cancelled", "done"])
async def test_the_end_of_a_stream_ends_its_lane(bench: VerifyBench, end: str) -> None:
    async with carried(bench) as (call, lane):
        if end == "done":
            await call.done_writing()
            assert await call.code() == grpc.StatusCode.OK
        else:
            call.cancel()
        assert isinstance(await ended(lane), NoReplica)
        await eventually(lambda: bench.metric("graft_lanes") == 0)


async def test_a_drafter_that_does_not_read_its_lane_is_dropped_and_told(
    bench: VerifyBench, plain: Plain
) -> None:
    async with carried(bench) as (call, lane):
        lane.pause()
        flood = Say(empties=[NOBODYS] * 1000).SerializeToString()

        async def talk() -> None:
            while True:
                await lane.send(flood)

        talking = asyncio.create_task(talk())
        await eventually(lambda: bench.metric("graft_dropped_streams_total") == 1, 20)
        assert (await bench.generate(PROMPT, 5)).tokens == plain.text(PROMPT, 5)
        # It has not read a byte of its lane, and hears of it on the stream.
        assert isinstance(await failure_of(call), Stalled)
        lane.close()
        await asyncio.gather(talking, return_exceptions=True)
    assert bench.metric("graft_lanes") == 0


async def test_a_flood_stays_in_the_socket_while_a_step_runs(bench: VerifyBench) -> None:
    engine, go, working = bench.server.engine, threading.Event(), threading.Event()
    assert engine is not None

    def work(_scheduler: object, _now: float) -> None:
        working.set()
        assert go.wait(WAIT_S)

    num_refused, count = 0, 20_000

    def take(message: bytes) -> None:
        nonlocal num_refused
        num_refused += len(verify_pb2.RoundsResponse.FromString(message).refusals)

    async with carried(bench) as (_, lane):
        lane.on_message = take
        engine.submit(work)
        await asyncio.to_thread(working.wait, WAIT_S)
        said = Say(empties=[NOBODYS]).SerializeToString()

        async def talk() -> None:
            for _ in range(count):
                await lane.send(said)

        talking = asyncio.create_task(talk())
        await eventually(lambda: not lane.ready and engine.num_unapplied > 256)
        # 256 may wait; one more was over, and the one who waits for it to be applied.
        assert engine.num_unapplied <= 258
        go.set()
        async with asyncio.timeout(WAIT_S):
            await talking
        await eventually(lambda: num_refused == count)


async def test_what_comes_over_a_lane_before_the_stream_goes_on_finds_the_hello_applied(
    bench: VerifyBench,
) -> None:
    """The call may be the slower one to learn that its welcome was sent."""
    service, engine = bench.server._service, bench.server.engine
    assert service is not None and engine is not None
    applied: list[str] = []

    def noting(name: str, method: Any) -> Any:
        def note(*told: Any) -> None:
            applied.append(name)
            method(*told)

        return note

    for name in ("hello", "offer"):
        setattr(engine.scheduler, name, noting(name, getattr(engine.scheduler, name)))

    async def requests() -> AsyncIterator[Say]:
        yield Say(hello=HELLO)

    context: Any = None
    stream = aiter(service.Rounds(requests(), context))
    welcome = await anext(stream)
    lane = await open_lane(welcome.lane, lambda _: None)
    lane.put(Say(empties=[NOBODYS]).SerializeToString())
    await eventually(lambda: len(applied) == 2)
    assert applied == ["hello", "offer"]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await ended(lane)


async def test_streams_leave_no_offers_behind(bench: VerifyBench) -> None:
    for lanes_used in (False, True):
        call, offer = await welcomed(bench)
        assert offer is not None
        if lanes_used:
            await ended_with(call, await open_lane(offer, lambda _: None))
        else:
            await call.done_writing()
            await call.code()
    lanes, service = bench.server._lanes, bench.server._service
    assert service is not None
    assert not lanes._expected and not lanes._unnamed
    assert not service.streams._lanes and not len(service.streams)


async def ended_with(call: Any, lane: Lane) -> None:
    await call.done_writing()
    await call.code()
    await ended(lane)


async def test_closing_cuts_who_has_not_been_named_and_offers_no_more() -> None:
    lanes, named = Lanes(), []
    await lanes.open(1)
    offer = lanes.offer(named.append)
    assert offer is not None
    lane = await open_lane(offer, lambda _: None)
    await eventually(lambda: len(named) == 1)
    nobody = Lane(lambda _: None, 100)
    await asyncio.get_running_loop().create_unix_connection(lambda: nobody, offer.path)
    await eventually(lambda: len(lanes._unnamed) == 1)
    lanes.close()
    await ended(nobody)
    assert lane.ready
    assert lanes.offer(named.append) is None
    assert not Path(offer.path).parent.exists()
    lane.close()
    named[0].close()
    await ended(lane)
