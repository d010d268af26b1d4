"""One Rounds stream to one verify replica: hello, welcome, numbered messages, reconnection.

Knows the order of the stream; its sessions are in `roster`. A broken stream ends the attendance of
its sessions, and is opened again when somebody is to be attended there.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import grpc
import grpc.aio
from prometheus_client import Counter

from graft.common import log
from graft.common.errors import GraftError, NoReplica, ProtocolBroken
from graft.common.server import error_from_call
from graft.common.tier import Tier
from graft.draft.carrier import Call, Carrier, carrier_for
from graft.draft.outbox import Outbox, Sink
from graft.draft.pairing import agree
from graft.draft.roster import Listener, Office, Roster, Wish
from graft.v1.error_reason_pb2 import ErrorReason
from graft.v1.verify_pb2 import DraftHello, RoundsRequest, RoundsResponse
from graft.v1.verify_pb2_grpc import VerifyServiceStub

_log = log.get("link")

_WRITE_TIMEOUT_S = 10.0
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_IDLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Pairing:
    """How links reach verify replicas, and what they say first."""

    hello: DraftHello
    open_channel: Callable[[str], grpc.aio.Channel]
    connect_timeout_s: float


class Link:
    """The pairing with one verify replica. All methods are called on the loop's thread."""

    def __init__(self, address: str, pairing: Pairing, office: Office) -> None:
        self.address = address
        self._pairing = pairing
        self._metrics = office.metrics
        self._roster = Roster(office)
        self._wanted = asyncio.Event()
        self._ended = False
        self._takes_lanes = True
        self._num_welcomes = 0
        self._channel = pairing.open_channel(address)
        self._task = asyncio.create_task(self._run(), name=f"link {address}")

    @property
    def ended(self) -> bool:
        """True when the link has closed itself after a time without sessions."""
        return self._ended

    @property
    def num_sessions(self) -> int:
        """Sessions attended or being joined."""
        return len(self._roster)

    def attend(self, wish: Wish, listener: Listener) -> None:
        """Joins a session, now or as soon as the stream is up; the newest listener keeps it."""
        self._roster.attend(wish, listener)
        self._wanted.set()

    def set_tier(self, session_id: int, tier: Tier, listener: Listener) -> None:
        """Changes the tier from the next tree on, unless somebody else has the session now."""
        self._roster.set_tier(session_id, tier, listener)

    def release(self, session_id: int, listener: Listener) -> None:
        """Leaves a session, unless somebody else has taken it over."""
        self._roster.release(session_id, listener)

    def refuse_all(self, error: GraftError) -> None:
        """Leaves every session and says why; the stream stays."""
        self._roster.refuse_all(error.reason, str(error))

    async def close(self) -> None:
        """Ends the stream and the channel; its sessions are refused as DRAINING."""
        self._roster.lost(ErrorReason.ERROR_REASON_DRAINING, "the draft service is shutting down")
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        try:
            while await self._is_wanted():
                started = self._num_welcomes
                error = await self._stream()
                self._metrics.link_losses.inc()
                _log.warning(
                    "stream lost", verify=self.address, sessions=self.num_sessions, error=str(error)
                )
                self._wanted.clear()
                self._roster.lost(error.reason, str(error))
                backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)
                if self._num_welcomes > started:
                    backoff_s = _FIRST_BACKOFF_S
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                if self._num_welcomes == 0 and not self._wanted.is_set():
                    # An address where nobody ever answered is not dialled for its own sake.
                    return
        finally:
            self._ended = True
            await self._channel.close(None)

    async def _is_wanted(self) -> bool:
        """Waits for a session; False after a long time without one."""
        try:
            async with asyncio.timeout(_IDLE_S):
                await self._wanted.wait()
        except TimeoutError:
            return False
        return True

    async def _stream(self) -> GraftError:
        """One life of the stream, from hello to its end; returns why it ended."""
        call: Call = VerifyServiceStub(self._channel).Rounds(wait_for_ready=True)  # type: ignore[call-arg]
        outbox = Outbox()
        writer: asyncio.Task[None] | None = None
        carrier: Carrier | None = None
        try:
            try:
                async with asyncio.timeout(self._pairing.connect_timeout_s):
                    await call.write(RoundsRequest(hello=self._pairing.hello))
                    first = await self._read(call, 0)
            except TimeoutError:
                return NoReplica(f"verify replica at {self.address} did not answer")
            self._welcome(first, outbox)
            numbers = itertools.count(1)
            if self._takes_lanes:
                carrier = await carrier_for(
                    call, self.address, first, lambda message: self._take(message, next(numbers))
                )
            if carrier is not None:
                outbox.sink = self._sink(carrier)
            writer = asyncio.create_task(
                _write(call, carrier, outbox, self._metrics.sent_bytes),
                name=f"writer {self.address}",
            )
            self._metrics.links.inc()
            self._roster.take(first)
            if carrier is not None:
                await carrier.follow()
            for number in numbers:
                self._roster.take(await self._read(call, number))
            raise AssertionError("a stream has no last number")
        except grpc.aio.AioRpcError as failure:
            return error_from_call(failure) or NoReplica(
                f"lost verify replica at {self.address}: {failure.code().name}"
            )
        except GraftError as error:
            return error
        except Exception:
            _log.exception("stream failed", verify=self.address)
            return GraftError("internal error of the draft service")
        finally:
            if carrier is not None:
                carrier.close()
                self._takes_lanes = not carrier.lost_alone
            if writer is not None:
                self._metrics.links.dec()
                writer.cancel()
            call.cancel()

    async def _read(self, call: Call, sequence: int) -> RoundsResponse:
        try:
            response = await call.read()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise NoReplica(f"lost verify replica at {self.address}") from None
        if not isinstance(response, RoundsResponse):
            raise NoReplica(f"verify replica at {self.address} ended the stream")
        return self._in_order(response, sequence)

    def _sink(self, carrier: Carrier) -> Sink:
        sent_bytes = self._metrics.sent_bytes

        def put(message: RoundsRequest) -> bool:
            sent = carrier.put(message)
            if sent:
                sent_bytes.inc(message.ByteSize())
            return sent

        return put

    def _take(self, response: RoundsResponse, sequence: int) -> None:
        self._roster.take(self._in_order(response, sequence))

    def _in_order(self, response: RoundsResponse, sequence: int) -> RoundsResponse:
        if response.sequence != sequence:
            raise ProtocolBroken(
                f"message {response.sequence} came from {self.address}, expected {sequence}"
            )
        return response

    def _welcome(self, response: RoundsResponse, outbox: Outbox) -> None:
        if not response.HasField("welcome"):
            raise ProtocolBroken(f"{self.address} did not answer the hello with a welcome")
        welcome = response.welcome
        limits = agree(self._pairing.hello, welcome)
        _log.info(
            "paired",
            verify=self.address,
            model=welcome.model_id,
            incarnation=f"{welcome.incarnation_id:016x}",
            max_nodes=limits.max_nodes,
            max_depth=limits.max_depth,
        )
        self._num_welcomes += 1
        self._roster.connected(outbox, limits, welcome)


async def _write(call: Call, carrier: Carrier | None, outbox: Outbox, sent_bytes: Counter) -> None:
    """Writes what comes into the outbox; a write that fails or takes too long ends the stream."""
    try:
        while True:
            message = await outbox.next()
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await (carrier or call).write(message)
            sent_bytes.inc(message.ByteSize())
    except NoReplica:
        pass  # The carrier ends the stream once it has heard from the call why the lane ended.
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
        call.cancel()
