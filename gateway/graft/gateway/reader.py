"""Reads one Generate stream in order. Knows what a failure means; opens and replays nothing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import grpc.aio

from graft.common.errors import Draining, GraftError, Overloaded, SessionNotFound, Stalled
from graft.common.server import error_from_call
from graft.gateway.replicas import Replica
from graft.v1 import verify_pb2

_RETRY_AFTER_S = 1.0

VerifyReplica = Replica[verify_pb2.VerifyServiceDescribeResponse]
Call = grpc.aio.StreamStreamCall[verify_pb2.GenerateRequest, verify_pb2.GenerateResponse]


class Lost(Exception):
    """The replica, or the stream to it, is gone; the session may go on elsewhere."""


class Elsewhere(Exception):
    """The replica is healthy and will not take the session now."""

    def __init__(self, error: GraftError) -> None:
        super().__init__(str(error))
        self.error = error


class Reader:
    """Reads one Generate stream in order, with a watchdog. Errors come out sorted by remedy."""

    def __init__(self, call: Call, replica: VerifyReplica, progress_s: float) -> None:
        self.pending: asyncio.Future[Any] | None = None
        self._call = call
        self._replica = replica
        self._lost = replica.lost
        self._progress_s = progress_s
        self._sequence = 0

    async def write(self, message: verify_pb2.GenerateRequest) -> None:
        """Sends a message. A failure shows in the next read, with its status."""
        writing = asyncio.ensure_future(self._call.write(message))
        await asyncio.wait(
            {writing, self._lost},
            timeout=self._progress_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not writing.done():
            writing.cancel()
            raise Lost("a message could not be sent")
        if not writing.cancelled():
            writing.exception()

    async def next(self, deadline: float, *, started: bool) -> verify_pb2.GenerateResponse:
        """The next message.

        Raises:
            Lost: the stream broke or ended early, or the replica was given up.
            Elsewhere: the replica is full or draining.
            GraftError: anything that another replica would not mend.
        """
        left_s = deadline - time.monotonic()
        limit_s = min(left_s, self._progress_s) if started else left_s
        read: asyncio.Future[Any] = asyncio.ensure_future(self._call.read())
        self.pending = read
        await asyncio.wait(
            {read, self._lost}, timeout=max(0.0, limit_s), return_when=asyncio.FIRST_COMPLETED
        )
        if not read.done():
            if self._lost.done():
                raise Lost(self._replica.detail or "the replica was given up")
            raise Stalled(f"no token came for {limit_s:.1f} s", retry_after_s=_RETRY_AFTER_S)
        self.pending = None
        if read.cancelled():
            raise Lost("CANCELLED")
        failure = read.exception()
        if isinstance(failure, grpc.aio.AioRpcError):
            raise _sorted_error(failure, opened=self._sequence > 0) from None
        if failure is not None:
            raise Lost(str(failure))
        message = read.result()
        if not isinstance(message, verify_pb2.GenerateResponse):
            raise Lost("the stream ended without a finish")
        if message.sequence != self._sequence:
            raise GraftError(
                f"message {message.sequence} of the verify replica came in place of "
                f"{self._sequence}"
            )
        self._sequence += 1
        self._replica.heard()
        return message


def _sorted_error(failure: grpc.aio.AioRpcError, *, opened: bool) -> Exception:
    """What a failed stream means for the choice."""
    error = error_from_call(failure)
    if isinstance(error, (Overloaded, Draining)):
        return Lost(str(error)) if opened else Elsewhere(error)
    if isinstance(error, SessionNotFound):
        return Lost("SESSION_NOT_FOUND")
    if error is not None:
        return error
    code = failure.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Stalled("the request ran longer than its deadline")
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED):
        return GraftError(f"the verify replica refused the session: {failure.details()}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return GraftError("the verify replica does not speak this protocol")
    return Lost(code.name)
