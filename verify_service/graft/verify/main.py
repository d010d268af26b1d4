"""Runs one verify replica until it is told to end."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from graft.common import log
from graft.common.heap import settle
from graft.common.server import wait_for_signal
from graft.verify.server import VerifyServer
from graft.verify.settings import VerifySettings

_log = log.get("main")
# The engine's thread runs Python between kernels; five milliseconds, the default, is how long it
# could keep the event loop waiting each time.
_SWITCH_INTERVAL_S = 0.0005


def run(settings: VerifySettings) -> None:
    """Serves until SIGINT or SIGTERM, then drains and returns.

    Raises:
        GraftError: the settings, the port or the model make serving impossible.
    """
    log.setup("verify", settings.log_level, settings.log_format)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings))


async def _serve(settings: VerifySettings) -> None:
    server = VerifyServer(settings)
    # Handlers come first: a supervisor may stop us as soon as we are seen to listen.
    stopped = asyncio.ensure_future(wait_for_signal())
    await asyncio.sleep(0)
    await server.start()
    ready = asyncio.ensure_future(server.ready())
    warming: asyncio.Future[None] | None = None
    try:
        await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            settle()
            warming = asyncio.ensure_future(server.warm())
        _log.info("stopping", signal=await stopped)
    finally:
        ready.cancel()
        stopped.cancel()
        if warming is not None:
            warming.cancel()
        await server.stop(settings.drain_s)
