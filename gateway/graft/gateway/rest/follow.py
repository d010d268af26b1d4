"""Follows an answer for as long as the client stays. Knows no shape of any body."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Self

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
        self._gone = asyncio.create_task(_until_gone(request.receive))
        self._next: asyncio.Future[ChoiceEvent | None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def next(self, limit_s: float | None = None) -> ChoiceEvent | None:
        """The next event, or None after the last one.

        Raises:
            TimeoutError: none came within `limit_s`; ask again.
            ClientGone: nobody waits for it any more.
            GraftError: the answer failed.
        """
        if self._next is None:
            self._next = asyncio.ensure_future(_step(self._events))
        waiting: set[asyncio.Future[ChoiceEvent | None] | asyncio.Task[None]]
        waiting = {self._next, self._gone}
        await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if self._next.done():
            done, self._next = self._next, None
            return done.result()
        if self._gone.done():
            self._request.scope["state"]["client_gone"] = True
            raise ClientGone
        raise TimeoutError

    async def close(self) -> None:
        """Ends everything; safe to call twice."""
        self._gone.cancel()
        if self._next is not None:
            self._next.cancel()
            await settle(self._next)
            self._next = None
        await self._events.aclose()
        await settle(self._gone)


async def _step(events: AsyncGenerator[ChoiceEvent, None]) -> ChoiceEvent | None:
    return await anext(events, None)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
