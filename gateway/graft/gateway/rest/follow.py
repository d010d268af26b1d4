"""Follows an answer for as long as the client stays. Knows no shape of any body."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Self

from starlette.requests import Request
from starlette.types import Receive

from graft.gateway.job import ChoiceEvent
from graft.gateway.streams import settle


class ClientGone(Exception):
    """The client closed its connection."""


class Following:
    """The events of an answer, one at a time, until the client leaves.

    Leaving the context closes the events, which cancels what still runs everywhere.
    """

    def __init__(self, events: AsyncGenerator[ChoiceEvent, None], request: Request) -> None:
        self._events = events
        self._request = request
        self._first: asyncio.Future[ChoiceEvent | None] | None = None
        self._waiting: asyncio.Task[object] | None = None
        self._gone = asyncio.create_task(_until_gone(request.receive))
        self._gone.add_done_callback(self._interrupt)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def first(self, limit_s: float) -> bool:
        """Whether the first event, or what it failed with, comes in time; it stays for `next`.

        Raises:
            ClientGone: nobody waits for it any more.
        """
        self._first = asyncio.ensure_future(_step(self._events))
        waiting: set[asyncio.Future[Any]] = {self._first, self._gone}
        await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if self._gone.done() and not self._first.done():
            raise self._left()
        return self._first.done()

    async def next(self) -> ChoiceEvent | None:
        """The next event, or None after the last one.

        Raises:
            ClientGone: nobody waits for it any more.
            GraftError: the answer failed.
        """
        if self._gone.done():
            raise self._left()
        task = self._waiting = asyncio.current_task()
        try:
            if self._first is None:
                return await anext(self._events, None)
            event = await asyncio.shield(self._first)
            self._first = None
            return event
        except asyncio.CancelledError:
            if self._gone.done() and task is not None and not task.uncancel():
                raise self._left() from None
            raise
        finally:
            self._waiting = None

    async def close(self) -> None:
        """Ends everything; safe to call twice."""
        self._gone.cancel()
        if self._first is not None:
            self._first.cancel()
            await settle(self._first)
            self._first = None
        await self._events.aclose()
        await settle(self._gone)

    def _interrupt(self, gone: asyncio.Task[None]) -> None:
        if self._waiting is not None and not gone.cancelled():
            self._waiting.cancel()

    def _left(self) -> ClientGone:
        self._request.scope["state"]["client_gone"] = True
        return ClientGone()


async def _step(events: AsyncGenerator[ChoiceEvent, None]) -> ChoiceEvent | None:
    return await anext(events, None)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
