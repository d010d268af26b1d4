"""How gRPC streams end. A read is never cancelled alone: the call is, then it is awaited."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio


async def settle(task: asyncio.Future[Any]) -> None:
    """Waits for a task whose outcome no longer matters."""
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


class Closings:
    """Calls that are being wound up in the background, each within `limit_s`."""

    def __init__(self, limit_s: float = 2.0) -> None:
        self._limit_s = limit_s
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_pending(self) -> int:
        """Calls not wound up yet; it falls to zero within the limit."""
        return len(self._tasks)

    def close(self, call: Any, reading: asyncio.Future[Any], farewell: Any | None) -> None:
        """Ends a call: says `farewell`, half-closes, waits for the peer's end, then cancels.

        reading: what reads the call to its end.
        """
        task = asyncio.create_task(self._close(call, reading, farewell))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Waits for all of them."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _close(self, call: Any, reading: asyncio.Future[Any], farewell: Any) -> None:
        ending = asyncio.create_task(_end(call, reading, farewell))
        try:
            await asyncio.wait({ending}, timeout=self._limit_s)
        finally:
            call.cancel()
            await settle(ending)
            await settle(reading)


async def _end(call: Any, reading: asyncio.Future[Any], farewell: Any) -> None:
    try:
        if farewell is not None:
            await call.write(farewell)
        await call.done_writing()
        await asyncio.wait({reading})
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return
