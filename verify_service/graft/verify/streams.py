"""The Rounds streams of draft services: hello, welcome, what comes, what goes, and by which way.

A stream's messages go over its gRPC call, or over the lane that its drafter took. Runs on the event
loop; knows no session.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from graft.common import log
from graft.common.errors import GraftError, NoReplica, ProtocolBroken
from graft.common.lane import Lane
from graft.v1 import verify_pb2
from graft.verify.engine import Engine
from graft.verify.events import StreamEvent
from graft.verify.incoming import announced, check_hello, command_of
from graft.verify.metrics import VerifyMetrics
from graft.verify.outgoing import Outgoing
from graft.verify.scheduler import Scheduler
from graft.verify.serving import Serving

_log = log.get("streams")

FIRST_MESSAGE_S = 30.0
_MAX_UNAPPLIED = 256


class Streams:
    """All streams of a replica. num_dropped: those that were ended because they did not read."""

    def __init__(self, metrics: VerifyMetrics) -> None:
        self.num_dropped = 0
        self._metrics = metrics
        self._open: dict[int, Outgoing] = {}
        self._engines: dict[int, Engine] = {}
        self._lanes: dict[int, Lane] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Streams that are open."""
        return len(self._open)

    async def run(
        self,
        first: verify_pb2.RoundsRequest,
        requests: AsyncIterator[verify_pb2.RoundsRequest],
        serving: Serving,
        describe: Callable[[], verify_pb2.VerifyServiceDescribeResponse],
    ) -> AsyncGenerator[verify_pb2.RoundsResponse, None]:
        """One stream's life; yields what its call is to carry.

        Raises:
            GraftError: what ended it, to be told to the draft service.
        """
        if not first.HasField("hello"):
            raise ProtocolBroken("the first message of Rounds must hold hello", field="hello")
        check_hello(first.hello, serving.identity)
        specs = announced(first.hello)
        stream = next(self._numbers)
        outgoing = self._open[stream] = Outgoing()
        self._engines[stream] = serving.engine
        offer = serving.lanes.offer(lambda lane: self._carry(lane, stream, serving, outgoing))
        _log.info(
            "draft service joined", stream=stream, incarnation=f"{first.hello.incarnation_id:016x}"
        )
        try:
            # Before the welcome: joins may come over a lane as soon as that has been read.
            serving.engine.submit(lambda scheduler, _: scheduler.hello(stream, specs))
            yield outgoing.welcome(describe(), offer)
            first.ClearField("hello")
            reading = self._spawn(self._read(first, requests, stream, serving))
            outgoing.tasks = [reading, *filter(None, [asyncio.current_task()])]
            while (message := await outgoing.next()) is not None:
                if (lane := self._lanes.get(stream)) is not None:
                    await lane.send(message.SerializeToString())
                else:
                    yield message
        finally:
            del self._open[stream], self._engines[stream]
            serving.lanes.withdraw(offer)
            if (lane := self._lanes.pop(stream, None)) is not None:
                lane.close()
                self._metrics.lanes(len(self._lanes))
            serving.engine.submit(lambda scheduler, _: scheduler.stream_gone(stream))
            _log.info("draft service left", stream=stream)

    def tell(self, events: Iterable[StreamEvent]) -> None:
        """Sends events to their streams, or has them wait there; those of ended ones go nowhere."""
        now = time.monotonic()
        for event in events:
            outgoing = self._open.get(event.stream)
            if outgoing is not None and not outgoing.add(event, now):
                self._drop(event.stream)
        for stream, lane in self._lanes.items():
            outgoing = self._open[stream]
            while lane.ready and (message := outgoing.take()) is not None:
                lane.put(message.SerializeToString())

    def close(self) -> None:
        """Ends every stream after what waits."""
        for outgoing in self._open.values():
            outgoing.close()

    def _drop(self, stream: int) -> None:
        """Forgets a draft service that does not read; its sessions stop waiting for it at once."""
        self.num_dropped += 1
        _log.warning("draft service dropped", stream=stream)
        self._engines[stream].submit(lambda scheduler, _: scheduler.stream_gone(stream))
        if (lane := self._lanes.get(stream)) is not None:
            lane.close()  # who does not read there can still read why

    async def _read(
        self,
        first: verify_pb2.RoundsRequest,
        requests: AsyncIterator[verify_pb2.RoundsRequest],
        stream: int,
        serving: Serving,
    ) -> None:
        """Follows a draft service's side of its call; its half-close ends the stream."""
        outgoing = self._open[stream]
        try:
            message = first
            while True:
                if not _take(message, stream, serving):
                    await _applied(serving.engine)
                message = await anext(requests)
                if stream in self._lanes:
                    raise ProtocolBroken("a message came on the stream, which has a lane")
        except StopAsyncIteration:
            outgoing.close()
        except GraftError as error:
            outgoing.fail(error)
        except grpc.aio.BaseError:
            pass

    def _carry(self, lane: Lane, stream: int, serving: Serving, outgoing: Outgoing) -> None:
        """Has a lane carry on a stream: what comes there is taken, and both end together.

        Raises:
            ProtocolBroken: messages have gone out on the stream, and might come after the lane's.
        """
        if outgoing.begun:
            raise ProtocolBroken("a lane was opened for a stream that had begun without it")

        async def go_on() -> None:
            await _applied(serving.engine)
            lane.resume()

        def take(message: bytes) -> None:
            try:
                request = verify_pb2.RoundsRequest.FromString(message)
            except DecodeError:
                raise ProtocolBroken("what came over the lane is no message") from None
            if not _take(request, stream, serving):
                lane.pause()
                self._spawn(go_on())

        def ended(lost: asyncio.Future[GraftError]) -> None:
            error = lost.result()
            if isinstance(error, NoReplica):
                outgoing.close()
            else:
                outgoing.fail(error)

        lane.on_message = take
        lane.lost.add_done_callback(ended)
        self._lanes[stream] = lane
        self._metrics.lanes(len(self._lanes))
        _log.info("lane opened", stream=stream)

    def _spawn(self, work: Any) -> asyncio.Task[object]:
        """Keeps a task alive; it ends by itself when its call does."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def first_message(requests: AsyncIterator[Any]) -> Any:
    """The first message of a call.

    Raises:
        ProtocolBroken: there was none in time.
    """
    try:
        async with asyncio.timeout(FIRST_MESSAGE_S):
            return await anext(requests)
    except (StopAsyncIteration, TimeoutError):
        raise ProtocolBroken("the call ended, or was silent, before its first message") from None


def _take(message: verify_pb2.RoundsRequest, stream: int, serving: Serving) -> bool:
    """Passes on what a draft service said; False in a flood.

    The rest is then to be left in the socket until the running step is over.

    Raises:
        ProtocolBroken: it says hello again.
    """
    if message.HasField("hello"):
        raise ProtocolBroken("hello was sent twice", field="hello")
    serving.engine.submit(command_of(message, stream, serving.limits, time.monotonic()))
    return serving.engine.num_unapplied <= _MAX_UNAPPLIED


async def _applied(engine: Engine) -> None:
    """Returns once the engine has applied everything submitted before."""
    loop, applied = asyncio.get_running_loop(), asyncio.Event()

    def tell(_scheduler: Scheduler, _now: float) -> None:
        loop.call_soon_threadsafe(applied.set)

    engine.submit(tell)
    await applied.wait()
