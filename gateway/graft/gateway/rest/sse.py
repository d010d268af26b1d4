"""Server-sent events, byte for byte. Knows when to say what; a Shaper knows the objects.

A stream says nothing until its session is open or a keep-alive is due, so that what fails at the
door is a plain HTTP error. Later failures are one error event, after which the stream ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graft.common import log
from graft.common.errors import GraftError
from graft.gateway.job import ChoiceEvent, Delta, Finished, Started
from graft.gateway.rest.errors import error_body
from graft.gateway.rest.follow import ClientGone, Following
from graft.gateway.streams import settle

_log = log.get("sse")
_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_SEND_TIMEOUT_S = 60.0


class Shaper(Protocol):
    """The objects of one route's stream."""

    def started(self, event: Started) -> list[dict[str, Any]]:
        """What to send when a choice begins."""
        ...

    def delta(self, event: Delta) -> list[dict[str, Any]]:
        """What to send for a piece of a choice."""
        ...

    def finished(self, event: Finished) -> list[dict[str, Any]]:
        """What to send at a choice's end; the last one has the finish_reason."""
        ...

    def last(self) -> list[dict[str, Any]]:
        """What to send after all choices: the usage, where it was asked for."""
        ...

    def failed(self, error: GraftError) -> list[dict[str, Any]]:
        """What to send last when the answer fails."""
        return [error_body(error)]

    def wire(self, body: Mapping[str, Any]) -> bytes:
        """One object as an event."""
        return b"data: " + to_json(body, inf_nan_mode="constants") + b"\n\n"

    @property
    def ending(self) -> bytes:
        """What a stream that did not fail ends with."""
        return _DONE


@dataclass(frozen=True, slots=True)
class Cadence:
    """How often a stream speaks: tokens an event holds at least, and seconds between comments."""

    interval: int = 1
    keepalive_s: float = 15.0


class Pacing:
    """Joins the pieces of a choice until they hold `interval` tokens; the first goes at once."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._begun: set[int] = set()
        self._held: dict[int, Delta] = {}

    def add(self, event: Delta) -> Delta | None:
        """The joined piece when it may leave, else None."""
        held = self._held.pop(event.index, None)
        if held is not None:
            event = held + event
        if event.index in self._begun and len(event.piece.tokens) < self._interval:
            self._held[event.index] = event
            return None
        self._begun.add(event.index)
        return event

    def rest(self, index: int) -> Delta | None:
        """What is still held of a choice."""
        return self._held.pop(index, None)


class EventStream(Response):
    """The response of a stream that has begun."""

    media_type = "text/event-stream"

    def __init__(
        self,
        following: Following,
        first: ChoiceEvent | None,
        shaper: Shaper,
        cadence: Cadence,
        headers: Mapping[str, str],
    ) -> None:
        self._following = following
        self._first = first
        self._shaper = shaper
        self._pacing = Pacing(cadence.interval)
        self._keepalive_s = cadence.keepalive_s
        self._said_at = time.monotonic()
        self._sending_since: float | None = None
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """As the base, without a content length."""
        self.body = b""
        super().init_headers(headers)
        self.raw_headers = [
            (name, value) for name, value in self.raw_headers if name != b"content-length"
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._following:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            # In a task of its own and past the applications around this one: each of those twenty
            # would be resumed for every piece.
            send = scope["state"]["send"]
            writing = asyncio.create_task(self._write(send))
            try:
                await self._attend(writing, send)
            except TimeoutError:
                scope["state"]["client_gone"] = True
                _log.warning("client did not read", seconds=_SEND_TIMEOUT_S)
            finally:
                writing.cancel()
                await settle(writing)

    async def _attend(self, writing: asyncio.Task[None], send: Send) -> None:
        """Speaks up where the stream is silent for long, until it is written.

        Raises:
            TimeoutError: the client does not read.
        """
        while not writing.done():
            since, limit_s = self._said_at, self._keepalive_s
            if self._sending_since is not None:
                since, limit_s = self._sending_since, _SEND_TIMEOUT_S
            left_s = since + limit_s - time.monotonic()
            if left_s > 0:
                await asyncio.wait({writing}, timeout=left_s)
            elif self._sending_since is not None:
                raise TimeoutError
            else:
                async with asyncio.timeout(_SEND_TIMEOUT_S):
                    await self._say(send, _KEEP_ALIVE)
        writing.result()

    async def _write(self, send: Send) -> None:
        try:
            await self._events(send)
        except ClientGone:
            return
        except GraftError as error:
            _log.warning("stream failed", error=str(error))
            await self._say(send, self._failure(error))
        except Exception:
            _log.exception("stream failed")
            await self._say(send, self._failure(GraftError("internal error")))
        # Nothing may be said while this waits for room, and nothing after it.
        self._sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, send: Send) -> None:
        if self._first is None:
            await self._say(send, _KEEP_ALIVE)
            self._first = await self._following.next()
        event = self._first
        while event is not None:
            if objects := self._objects(event):
                await self._say(send, b"".join(map(self._shaper.wire, objects)))
            event = await self._following.next()
        await self._say(
            send, b"".join([*map(self._shaper.wire, self._shaper.last()), self._shaper.ending])
        )

    async def _say(self, send: Send, chunk: bytes) -> None:
        self._said_at = self._sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._sending_since = None

    def _failure(self, error: GraftError) -> bytes:
        return b"".join(map(self._shaper.wire, self._shaper.failed(error)))

    def _objects(self, event: ChoiceEvent) -> list[dict[str, Any]]:
        if isinstance(event, Started):
            return self._shaper.started(event)
        if isinstance(event, Delta):
            paced = self._pacing.add(event)
            return [] if paced is None else self._shaper.delta(paced)
        rest = self._pacing.rest(event.index)
        objects = [] if rest is None else self._shaper.delta(rest)
        return objects + self._shaper.finished(event)


async def begin(
    events: AsyncGenerator[ChoiceEvent, None],
    request: Request,
    shaper: Shaper,
    cadence: Cadence,
    headers: Mapping[str, str],
) -> Response:
    """The response of a stream, once its first event is there or a keep-alive is due.

    Raises:
        GraftError: it failed before anything was sent.
        ClientGone: the client left before that.
    """
    following = Following(events, request)
    try:
        there = await following.first(cadence.keepalive_s)
        first = await following.next() if there else None
    except BaseException:
        await following.close()
        raise
    return EventStream(following, first, shaper, cadence, headers)
