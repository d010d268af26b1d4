"""The gRPC face of a replica: Describe, Generate and Rounds over one engine.

A thin shell: checks at the door, commands to the engine, events to the streams. Runs on the event
loop and only waits there.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio

from graft.common import log
from graft.common.channel import PROTOCOL_REVISION
from graft.common.errors import GraftError, NoReplica, ProtocolBroken, Stalled
from graft.common.grammar import GRAMMAR_KINDS
from graft.common.tracing import OFF, Tracing
from graft.v1 import verify_pb2, verify_pb2_grpc
from graft.verify.door import ACCEPT_RULES, tree_deadline
from graft.verify.engine import Engine
from graft.verify.events import (
    Committed,
    Event,
    Failed,
    Finished,
    Opened,
    SessionEvent,
    StreamEvent,
)
from graft.verify.metrics import VerifyMetrics
from graft.verify.outflow import Outflow
from graft.verify.serving import Serving
from graft.verify.session import Session
from graft.verify.streams import Streams, first_message
from graft.verify.tally import refusals
from graft.verify.traced import SessionSpan

_log = log.get("service")

_OF_SESSIONS = (Opened, Committed, Finished, Failed)


class VerifyService(verify_pb2_grpc.VerifyServiceServicer):
    """Answers for one replica; `serve` gives it its engine, `deliver` the engine's events."""

    def __init__(self, metrics: VerifyMetrics, tracing: Tracing = OFF) -> None:
        self.incarnation_id = secrets.randbits(64) or 1
        self.loading = "the model is loading"
        self.streams = Streams(metrics)
        self._metrics = metrics
        self._tracing = tracing
        self._loop = asyncio.get_running_loop()
        self._serving: Serving | None = None
        self._stalled = False
        self._sessions: dict[int, Outflow] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def serve(self, serving: Serving) -> None:
        """Begins to answer."""
        self._serving = serving

    def deliver(self, events: list[Event]) -> None:
        """Hands the engine's events to their streams; called on the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._dispatch, events)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def set_stalled(self, stalled: bool) -> None:
        """While stalled, running and new sessions end by an error, so that they move elsewhere."""
        if stalled and not self._stalled:
            self.fail_sessions(Stalled("this replica's engine makes no progress"))
        self._stalled = stalled

    async def wait_idle(self, timeout_s: float) -> None:
        """Returns when no Generate call is open, or when the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    def fail_sessions(self, error: GraftError) -> None:
        """Ends every Generate call by an error."""
        for session_id, outflow in self._sessions.items():
            outflow.tell(Failed(session_id, error))

    async def Describe(
        self,
        request: verify_pb2.VerifyServiceDescribeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> verify_pb2.VerifyServiceDescribeResponse:
        """What a peer must know before pairing."""
        return self._describe(self._ready())

    async def Generate(
        self,
        request_iterator: AsyncIterator[verify_pb2.GenerateRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[verify_pb2.GenerateResponse]:
        """Runs one session; leaving in any way but its end cancels it."""
        serving = self._ready()
        if self._stalled:
            raise Stalled("this replica's engine makes no progress", retry_after_s=1.0)
        first = await first_message(request_iterator)
        if first.WhichOneof("request") != "open":
            raise ProtocolBroken("the first message of Generate must be open", field="request")
        request, ending = serving.door.check(first.open)
        session = Session(
            self._new_session_id(),
            secrets.token_bytes(16),
            request,
            ending,
            serving.max_trees,
            serving.room,
        )
        if request.grammar is not None and serving.grammars is not None:
            committed = request.committed.tolist()
            session.grammar = await serving.grammars.session(request.grammar, committed)
        session_id = session.session_id
        span = SessionSpan(self._tracing, session)
        outflow = Outflow(span, serving.lanes, self._metrics, self._opened(session))
        self._sessions[session_id] = outflow
        self._idle.clear()
        serving.engine.submit(lambda scheduler, now: scheduler.open(session, now))
        self._read(self._read_session(request_iterator, session_id, serving.engine, outflow))
        try:
            while True:
                message = await outflow.next()
                yield message
                if message.HasField("finished"):
                    return
        finally:
            outflow.close()
            del self._sessions[session_id]
            if not self._sessions:
                self._idle.set()
            # Does nothing to a session that has ended.
            serving.engine.submit(lambda scheduler, _: scheduler.cancel(session_id))
            span.ended(outflow.end)
            _log.info(
                "session ended",
                session=f"{session_id:016x}",
                request=request.request_id,
                end=outflow.end,
                prompt=session.prompt_length,
                tokens=session.generated,
                rounds=session.num_rounds,
                accepted=session.num_accepted,
            )

    async def Rounds(
        self,
        request_iterator: AsyncIterator[verify_pb2.RoundsRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[verify_pb2.RoundsResponse]:
        """Carries trees in and commits out, for one draft service and many sessions."""
        serving = self._ready()
        first = await first_message(request_iterator)
        async with aclosing(
            self.streams.run(first, request_iterator, serving, lambda: self._describe(serving))
        ) as messages:
            async for message in messages:
                yield message

    def _ready(self) -> Serving:
        if self._serving is None:
            raise NoReplica(self.loading, retry_after_s=1.0)
        return self._serving

    def _new_session_id(self) -> int:
        while (session_id := secrets.randbits(64)) in self._sessions or not session_id:
            pass
        return session_id

    def _opened(self, session: Session) -> verify_pb2.SessionOpened:
        sampling = session.request.sampling
        return verify_pb2.SessionOpened(
            session_id=session.session_id,
            ticket=session.ticket,
            incarnation_id=self.incarnation_id,
            rule=sampling.rule,
            threshold_single=sampling.threshold_single,
            threshold_acc=sampling.threshold_acc,
            simulated=self._ready().description.HasField("simulated"),
        )

    def _describe(self, serving: Serving) -> verify_pb2.VerifyServiceDescribeResponse:
        snapshot = serving.engine.snapshot()
        description = verify_pb2.VerifyServiceDescribeResponse()
        description.CopyFrom(serving.description)
        description.protocol_revision = PROTOCOL_REVISION
        description.incarnation_id = self.incarnation_id
        description.accept_rules.extend(ACCEPT_RULES)
        if serving.grammars is not None:
            description.grammar_kinds.extend(GRAMMAR_KINDS)
        description.running_session_count = snapshot.num_running
        description.waiting_session_count = snapshot.num_waiting
        description.kv_page_count = snapshot.num_pages
        description.kv_page_free_count = snapshot.num_pages_free
        description.kv_page_tokens = snapshot.page_tokens
        tally = serving.tally
        description.pushed_tree_counts.update(dict(tally.pushed))
        description.rejected_tree_counts.update(refusals(tally))
        description.last_progress_micros = int(snapshot.busy_s * 1e6)
        return description

    def _dispatch(self, events: list[Event]) -> None:
        """Puts events into the queues of their streams; those of ended streams go nowhere."""
        of_sessions: list[SessionEvent] = []
        of_streams: list[StreamEvent] = []
        for event in events:
            if isinstance(event, _OF_SESSIONS):
                of_sessions.append(event)
            else:
                of_streams.append(event)
        # The next round waits for drafters; what clients are told can be written meanwhile.
        self.streams.tell(of_streams)
        for event in of_sessions:
            if (outflow := self._sessions.get(event.session_id)) is not None:
                outflow.tell(event)
        self._metrics.observe(events)

    def _read(self, reading: Any) -> asyncio.Task[object]:
        """Keeps a reader alive; it ends by itself when its call does."""
        task = self._loop.create_task(reading)
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        return task

    async def _read_session(
        self,
        requests: AsyncIterator[verify_pb2.GenerateRequest],
        session_id: int,
        engine: Engine,
        outflow: Outflow,
    ) -> None:
        """Follows the gateway's side of a session; its half-close cancels what is left of it."""
        try:
            async for message in requests:
                match message.WhichOneof("request"):
                    case "cancel":
                        engine.submit(lambda scheduler, _: scheduler.cancel(session_id))
                    case "set_deadline":
                        wait_s = tree_deadline(message.set_deadline.tree_deadline_micros)
                        engine.submit(
                            lambda scheduler, _, wait_s=wait_s: scheduler.set_deadline(  # type: ignore[misc]
                                session_id, wait_s
                            )
                        )
                    case "open":
                        raise ProtocolBroken("open was sent twice", field="open")
            engine.submit(lambda scheduler, _: scheduler.cancel(session_id))
        except GraftError as error:
            outflow.tell(Failed(session_id, error))
        except grpc.aio.BaseError:
            # The call is over; Generate itself sees to the rest.
            pass
