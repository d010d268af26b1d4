from __future__ import annotations

import asyncio

from graft.gateway.broadcast import Signal


async def test_a_notification_wakes_all_who_wait() -> None:
    signal = Signal()
    tasks = [asyncio.create_task(signal.wait(10)) for _ in range(3)]
    await asyncio.sleep(0)
    signal.notify()
    assert await asyncio.gather(*tasks) == [True] * 3
    assert not await signal.wait(0)


async def test_a_cancel_that_meets_a_notification_is_not_lost() -> None:
    signal = Signal()

    async def forever() -> None:
        while True:
            await signal.wait(10)

    task = asyncio.create_task(forever())
    await asyncio.sleep(0)
    signal.notify()
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()
