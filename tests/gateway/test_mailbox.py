"""A mailbox gives in order, says when it is full, and fails only after what it holds."""

from __future__ import annotations

import asyncio

import pytest

from graft.gateway.mailbox import Mailbox


async def test_things_come_in_order_whether_they_are_waited_for_or_not() -> None:
    box: Mailbox[int] = Mailbox(4)
    box.put(1)
    box.put(2)
    assert [await box.get(), await box.get(0.0)] == [1, 2]
    waiting = asyncio.create_task(box.get(5.0))
    await asyncio.sleep(0)
    box.put(3)
    box.put(4)
    assert [await waiting, await box.get()] == [3, 4]


async def test_nothing_in_time_is_a_timeout_and_the_next_wait_works() -> None:
    box: Mailbox[int] = Mailbox(1)
    for limit_s in (0.0, 0.01):
        with pytest.raises(TimeoutError):
            await box.get(limit_s)
    asyncio.get_running_loop().call_later(0.01, box.put, 1)
    assert await box.get(5.0) == 1


async def test_a_failure_comes_after_what_is_held_and_again_after_that() -> None:
    box: Mailbox[int] = Mailbox(4)
    box.put(1)
    box.fail(ValueError("first"))
    box.fail(ValueError("second"))
    box.put(2)
    assert await box.get() == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            await box.get()


async def test_a_failure_wakes_who_waits() -> None:
    box: Mailbox[int] = Mailbox(1)
    waiting = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    box.fail(ValueError("over"))
    with pytest.raises(ValueError, match="over"):
        await waiting


async def test_room_holds_up_until_something_is_taken() -> None:
    box: Mailbox[int] = Mailbox(2)
    box.put(1)
    await box.room()
    box.put(2)
    assert box.full
    waiting = asyncio.create_task(box.room())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await box.get()
    await asyncio.wait_for(waiting, 5)


async def test_after_a_failure_there_is_always_room() -> None:
    box: Mailbox[int] = Mailbox(1)
    box.put(1)
    waiting = asyncio.create_task(box.room())
    await asyncio.sleep(0)
    box.fail(ValueError("over"))
    await asyncio.wait_for(waiting, 5)
    assert not box.full


async def test_a_cancelled_wait_takes_nothing() -> None:
    box: Mailbox[int] = Mailbox(2)
    waiting = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    # Cancelled in the same turn of the loop in which something came for it.
    box.put(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await box.get(1.0) == 1
