"""A session's commits over a lane: the same messages under the same numbers, and the same end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from graft.common.errors import GraftError, NoReplica, Stalled
from graft.common.lane import Lane
from graft.common.server import error_from_call
from graft.testing.plain import Plain
from graft.testing.verify_client import VerifyBench, eventually, open_lane, running_verify
from graft.v1 import verify_pb2
from graft.v1.verify_pb2 import GenerateResponse
from graft.verify.service import VerifyService

PROMPT = list(b"a prompt")
COUNT = 400
WAIT_S = 10.0


@pytest_asyncio.fixture
async def bench(tiny_model: Path) -> AsyncIterator[VerifyBench]:
    async with running_verify(tiny_model) as running:
        yield running


class Session:
    """One session by hand: what its call and its lane said."""

    def __init__(self, call: Any, opened: verify_pb2.SessionOpened) -> None:
        self.call = call
        self.opened = opened
        self.by_call: list[GenerateResponse] = []
        self.by_lane: list[GenerateResponse] = []

    async def take_lane(self) -> Lane:
        return await open_lane(self.opened.lane, self._take)

    async def finish(self) -> None:
        """Follows the call to its end."""
        async with asyncio.timeout(WAIT_S):
            while isinstance(message := await self.call.read(), GenerateResponse):
                self.by_call.append(message)

    @property
    def tokens(self) -> list[int]:
        """All tokens, after a look that no number is missing or there twice."""
        messages = sorted([*self.by_call, *self.by_lane], key=lambda one: one.sequence)
        assert [one.sequence for one in messages] == list(range(1, len(messages) + 1))
        assert messages[-1].HasField("finished")
        return [token for one in messages[:-1] for token in one.committed.tokens]

    def _take(self, frame: bytes) -> None:
        self.by_lane.append(GenerateResponse.FromString(frame))


async def opened_at(bench: VerifyBench, count: int = COUNT) -> Session:
    call = bench.generate_call()
    stop = verify_pb2.OpenSession(
        prompt_tokens=PROMPT,
        stop={"max_tokens": count, "ignore_eos": True},  # type: ignore[arg-type]
    )
    await call.write(verify_pb2.GenerateRequest(open=stop))
    return Session(call, (await call.read()).opened)


@contextmanager
def standing(bench: VerifyBench) -> Iterator[None]:
    """The engine makes no step meanwhile."""
    go = threading.Event()
    assert bench.server.engine is not None
    bench.server.engine.submit(lambda _scheduler, _now: go.wait(WAIT_S) and None)
    try:
        yield
    finally:
        go.set()


async def carried(bench: VerifyBench, count: int = COUNT) -> tuple[Session, Lane]:
    """A session with most of its text to come, and its lane once the replica has it."""
    session = await opened_at(bench, count)
    with standing(bench):
        lane = await session.take_lane()
        await eventually(lambda: bench.metric("graft_session_lanes") == 1)
    return session, lane


def service_of(bench: VerifyBench) -> VerifyService:
    assert bench.server._service is not None
    return bench.server._service


async def ended(lane: Lane) -> GraftError:
    async with asyncio.timeout(WAIT_S):
        return await asyncio.shield(lane.lost)


async def test_commits_go_over_the_lane_and_the_end_by_the_call(
    bench: VerifyBench, plain: Plain
) -> None:
    session, lane = await carried(bench)
    await session.finish()
    assert isinstance(await ended(lane), NoReplica)
    assert session.tokens == plain.text(PROMPT, COUNT)
    assert len(session.by_lane) > COUNT // 2
    assert not any(one.HasField("finished") for one in session.by_lane)
    assert bench.metric("graft_session_lanes") == 0
    assert bench.metric("graft_lanes") == 0


async def test_who_takes_no_lane_hears_all_by_the_call(bench: VerifyBench, plain: Plain) -> None:
    session = await opened_at(bench)
    assert session.opened.HasField("lane")
    await session.finish()
    assert session.tokens == plain.text(PROMPT, COUNT)
    assert not bench.server._lanes._expected


async def test_a_lane_lost_on_the_way_leaves_the_call(bench: VerifyBench, plain: Plain) -> None:
    session, lane = await carried(bench)
    await eventually(lambda: len(session.by_lane) > 3)
    # Nothing is lost on it: what had come by then was taken, the rest is not read from the socket.
    lane.close()
    await session.finish()
    assert bench.metric("graft_session_lanes") == 0
    came = {one.sequence for one in [*session.by_call, *session.by_lane]}
    text = plain.text(PROMPT, COUNT)
    assert [t for one in session.by_lane for t in one.committed.tokens] == [
        text[one.sequence - 1] for one in session.by_lane
    ]
    assert len(came) == len(session.by_call) + len(session.by_lane)
    assert session.by_call[-1].HasField("finished")


async def test_a_lane_carries_nothing_to_the_replica(bench: VerifyBench, plain: Plain) -> None:
    session, lane = await carried(bench)
    lane.put(b"anything")
    assert isinstance(await ended(lane), NoReplica)
    await session.finish()
    assert session.by_call[-1].HasField("finished")
    assert (await bench.generate(PROMPT, 5)).tokens == plain.text(PROMPT, 5)


@pytest.mark.parametrize("end", ["cancelled", "half-closed", "failed"])
async def test_the_end_of_a_call_ends_its_lane(bench: VerifyBench, end: str) -> None:
    session, lane = await carried(bench, 450)
    await eventually(lambda: len(session.by_lane) > 3)
    if end == "cancelled":
        session.call.cancel()
    elif end == "half-closed":
        await session.call.done_writing()
    else:
        service_of(bench).fail_sessions(Stalled("no progress"))
    assert isinstance(await ended(lane), NoReplica)
    if end == "failed":
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await session.finish()
        assert isinstance(error_from_call(caught.value), Stalled)
    await eventually(lambda: bench.metric("graft_session_lanes") == 0)
    await eventually(bench.idle_pages)


async def test_a_gateway_that_does_not_read_its_lane_hears_the_rest_by_the_call(
    bench: VerifyBench, plain: Plain
) -> None:
    """What the socket does not take goes by the call, so no buffer grows."""
    call = bench.generate_call()
    opening = verify_pb2.OpenSession(
        prompt_tokens=PROMPT,
        stop={"max_tokens": COUNT, "ignore_eos": True},  # type: ignore[arg-type]
        want_logprobs=True,
        top_logprobs=20,
    )
    await call.write(verify_pb2.GenerateRequest(open=opening))
    session = Session(call, (await call.read()).opened)
    with standing(bench):
        lane = await session.take_lane()
        lane.pause()
        await eventually(lambda: bench.metric("graft_session_lanes") == 1)
        for outflow in service_of(bench)._sessions.values():
            assert outflow._lane is not None and outflow._lane._transport is not None
            outflow._lane._transport.set_write_buffer_limits(1)
    await session.finish()
    lane.resume()
    await eventually(lambda: len(session.by_lane) + len(session.by_call) == COUNT + 1)
    assert session.tokens == plain.text(PROMPT, COUNT)


async def test_without_lanes_none_is_offered(tiny_model: Path) -> None:
    async with running_verify(tiny_model, lane=False) as bench:
        session = await opened_at(bench)
        assert not session.opened.HasField("lane")
        session.call.cancel()
