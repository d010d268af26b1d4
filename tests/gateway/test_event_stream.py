"""A stream before uvicorn's own way of sending: what is said while the client does not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request

from graft.gateway.job import ChoiceEvent, Delta, Finished, Started
from graft.gateway.rest.follow import Following
from graft.gateway.rest.sse import Cadence, EventStream, Shaper


class Words(Shaper):
    """One object for the beginning of a choice, and none after it."""

    def started(self, event: Started) -> list[dict[str, Any]]:
        return [{"started": event.index}]

    def delta(self, event: Delta) -> list[dict[str, Any]]:
        return []

    def finished(self, event: Finished) -> list[dict[str, Any]]:
        return []

    def last(self) -> list[dict[str, Any]]:
        return []


class Cycle:
    """uvicorn's cycle by its rules: it waits for room, and takes nothing after the end."""

    def __init__(self) -> None:
        self.room = asyncio.Event()
        self.room.set()
        self.sent: list[Any] = []

    async def send(self, message: Any) -> None:
        await self.room.wait()
        assert not self.sent or self.sent[-1].get("more_body", True), "the response was complete"
        self.sent.append(message)
        if b"[DONE]" in message.get("body", b""):
            self.room.clear()


async def test_nothing_follows_an_end_that_waits_for_room() -> None:
    async def events() -> AsyncGenerator[ChoiceEvent, None]:
        yield Started(0)

    async def receive() -> Any:
        await asyncio.Event().wait()

    cycle = Cycle()
    scope: Any = {"type": "http", "state": {"send": cycle.send}}
    following = Following(events(), Request(scope, receive))
    assert await following.first(5)
    stream = EventStream(following, await following.next(), Words(), Cadence(1, 0.02), {})
    answering = asyncio.create_task(stream(scope, receive, cycle.send))
    # Keep-alives would have been due.
    await asyncio.sleep(0.2)
    cycle.room.set()
    await asyncio.wait_for(answering, 5)
    bodies = [message["body"] for message in cycle.sent[1:]]
    assert bodies == [b'data: {"started":0}\n\n', b"data: [DONE]\n\n", b""]
