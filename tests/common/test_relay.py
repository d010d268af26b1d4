"""The relay makes a wire slow, thin, silent or broken, and never changes a byte."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from graft.common.errors import InvalidArgument
from graft.common.relay import Conditions, Relay

WAIT_S = 10.0
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def echoing(
    there: Conditions | None = None, back: Conditions | None = None
) -> AsyncIterator[tuple[Relay, Ends]]:
    """A relay in front of a server that sends back what it gets, and a connection to it."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(1 << 16):
                writer.write(piece)
                await writer.drain()
            writer.write_eof()
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    relay = Relay(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", there, back)
    host, _, port = (await relay.start()).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield relay, (reader, writer)
    finally:
        writer.transport.abort()
        await relay.stop()
        server.close()


async def asked(ends: Ends, sent: bytes) -> tuple[bytes, float]:
    """What comes back, and after how many seconds."""
    started = time.monotonic()
    ends[1].write(sent)
    async with asyncio.timeout(WAIT_S):
        found = await ends[0].readexactly(len(sent))
    return found, time.monotonic() - started


async def test_bytes_pass_unchanged_and_are_counted() -> None:
    async with echoing() as (relay, ends):
        sent = os.urandom(300_000)
        assert (await asked(ends, sent))[0] == sent
        assert relay.bytes_there == relay.bytes_back == len(sent)


async def test_each_direction_has_its_own_delay() -> None:
    async with echoing(Conditions(delay_s=0.05), Conditions(delay_s=0.1)) as (_, ends):
        found, spent_s = await asked(ends, b"hello")
        assert found == b"hello"
        assert spent_s >= 0.15


async def test_jitter_delays_and_never_reorders() -> None:
    async with echoing(Conditions(jitter_s=0.02)) as (_, ends):
        sent = [bytes([number]) * 3 for number in range(40)]
        for piece in sent:
            ends[1].write(piece)
            await asyncio.sleep(0)
        async with asyncio.timeout(WAIT_S):
            assert await ends[0].readexactly(120) == b"".join(sent)


async def test_bandwidth_is_capped() -> None:
    async with echoing(Conditions(bytes_per_s=1_000_000)) as (_, ends):
        _, spent_s = await asked(ends, bytes(300_000))
        assert spent_s >= 0.2


async def test_a_changed_delay_holds_from_then_on() -> None:
    async with echoing() as (relay, ends):
        await asked(ends, b"a")
        relay.set_rtt(0.2)
        assert (await asked(ends, b"b"))[1] >= 0.2


async def test_a_hang_keeps_the_connection_and_loses_nothing() -> None:
    async with echoing() as (relay, ends):
        await asked(ends, b"a")
        relay.hang()
        ends[1].write(b"later")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await ends[0].read(1)
        relay.hang(False)
        async with asyncio.timeout(WAIT_S):
            assert await ends[0].readexactly(5) == b"later"


async def test_a_reset_breaks_open_connections_and_lets_new_ones_in() -> None:
    async with echoing() as (relay, ends):
        await asked(ends, b"a")
        assert relay.reset() == 2
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(WAIT_S):
                await ends[0].readexactly(1)
        host, port = ends[1].get_extra_info("peername")
        again = await asyncio.open_connection(host, port)
        assert (await asked(again, b"b"))[0] == b"b"
        again[1].transport.abort()


async def test_the_end_of_one_side_reaches_the_other_after_all_its_bytes() -> None:
    async with echoing(Conditions(delay_s=0.02)) as (_, ends):
        ends[1].write(b"last words")
        ends[1].write_eof()
        async with asyncio.timeout(WAIT_S):
            assert await ends[0].read() == b"last words"


def test_conditions_below_zero_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        Conditions(delay_s=-1)
