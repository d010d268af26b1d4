"""A broadcast for many waiters. Knows nothing of what changed."""

from __future__ import annotations

import asyncio


class Signal:
    """`notify` wakes everybody who waits; nobody who comes later."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wakes all waiters."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout_s: float) -> bool:
        """True when notified within the time.

        Not by asyncio.wait_for, which on Python 3.11 loses a cancel that meets the notification.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True
