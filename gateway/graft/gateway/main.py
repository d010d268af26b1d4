"""The gateway as a process of its own."""

from __future__ import annotations

import asyncio

import uvloop

from graft.common import log
from graft.common.heap import settle
from graft.common.server import wait_for_signal
from graft.gateway.server import GatewayServer
from graft.gateway.settings import GatewaySettings

_log = log.get("gateway")


def run(settings: GatewaySettings) -> None:
    """Serves until SIGINT or SIGTERM, then drains and returns.

    Raises:
        GraftError: it cannot start; the sentence says why.
    """
    log.setup("gateway", settings.log_level, settings.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings))


async def _serve(settings: GatewaySettings) -> None:
    server = GatewayServer(settings)
    # Handlers come first: a supervisor may stop us as soon as we are seen to listen.
    arrived = asyncio.create_task(wait_for_signal())
    await asyncio.sleep(0)
    await server.start()
    settle()
    name = await arrived
    _log.info("draining", signal=name)
    await server.stop(settings.drain_s)
    _log.info("stopped")
