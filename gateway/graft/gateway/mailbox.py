"""What comes from elsewhere on the loop, in order, for one task that waits for it.

Costs a future for each wait and no task. Knows nothing of what it holds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Anybody may `put`; one task at a time may `get`, until what was put is taken and it failed.

    limit: `room` holds up who waits for it while so many things are held.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: deque[T] = deque()
        self._failure: BaseException | None = None
        self._getter: asyncio.Future[bool] | None = None
        self._putters: list[asyncio.Future[None]] = []

    @property
    def full(self) -> bool:
        """True while it is better to wait for `room` than to put more."""
        return len(self._held) >= self._limit and self._failure is None

    def put(self, thing: T) -> None:
        """Adds a thing at once; after a failure it goes nowhere."""
        if self._failure is None:
            self._held.append(thing)
            self._wake(True)

    def fail(self, failure: BaseException) -> None:
        """Nothing comes after what is held: `get` then raises this. The first failure counts."""
        if self._failure is None:
            self._failure = failure
            self._wake(True)
            self._make_room()

    async def room(self) -> None:
        """Returns while it is not full."""
        while self.full:
            putter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._putters.append(putter)
            await putter

    async def get(self, limit_s: float | None = None) -> T:
        """The next thing.

        Raises:
            TimeoutError: none came within `limit_s`; ask again.
            BaseException: what it failed with.
        """
        while not self._held:
            if self._failure is not None:
                raise self._failure
            loop = asyncio.get_running_loop()
            getter = self._getter = loop.create_future()
            timer = None if limit_s is None else loop.call_later(limit_s, self._wake, False)
            try:
                if not await getter:
                    raise TimeoutError
            finally:
                self._getter = None
                if timer is not None:
                    timer.cancel()
        thing = self._held.popleft()
        if self._putters and not self.full:
            self._make_room()
        return thing

    def _wake(self, came: bool) -> None:
        if self._getter is not None and not self._getter.done():
            self._getter.set_result(came)

    def _make_room(self) -> None:
        putters, self._putters = self._putters, []
        for putter in putters:
            if not putter.done():
                putter.set_result(None)
