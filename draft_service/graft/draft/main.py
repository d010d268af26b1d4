"""Runs one draft replica until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio

import uvloop

from graft.common import log
from graft.common.heap import settle
from graft.common.server import wait_for_signal
from graft.draft.server import DraftServer
from graft.draft.settings import DraftSettings

_log = log.get("main")


def run(settings: DraftSettings) -> None:
    """Blocks until a signal came and the replica has drained.

    Raises:
        InvalidArgument: the replica could not start with these settings.
    """
    log.setup("draft", settings.log_level, settings.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings))


async def _serve(settings: DraftSettings) -> None:
    server = DraftServer(settings)
    # Handlers come first: a supervisor may stop us as soon as we are seen to listen.
    arrived = asyncio.create_task(wait_for_signal())
    await asyncio.sleep(0)
    await server.start()
    settle()
    name = await arrived
    _log.info("draining", signal=name)
    await server.stop(settings.drain_s)
    _log.info("stopped")
