"""`graft bench tiers`: the adaptive tier against fixed ones, over a trace that shifts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated

import typer
import uvloop

from graft.bench import machine, prompts
from graft.cli.bench_screen import (
    Config,
    Json,
    MaxTokens,
    Model,
    Report,
    Threads,
    facts,
    finish,
    progress_of,
    say,
)
from graft.common.errors import InvalidArgument
from graft.common.model_files import EMBEDDED

if TYPE_CHECKING:
    from graft.bench.services import Setup
    from graft.bench.shifting import Shifting

_FIXED = ["merged", "ngram", "off"]
# Long chains, and those that come from afar, take longer than a tree is usually waited for.
_DEADLINE = "--tree-deadline-ms=500"


def run_tiers(
    model: Model = EMBEDDED,
    precision: Annotated[str, typer.Option(help="fp32, q8_0, q4_1 or auto.")] = "fp32",
    fixed: Annotated[
        list[str],
        typer.Option(help="A fixed way: off, a proposer, or a tier as JSON; may be repeated."),
    ] = _FIXED,
    policy: Annotated[str, typer.Option(help="The adaptive way: goodput or field.")] = "goodput",
    requests: Annotated[
        int, typer.Option(min=1, help="Requests of a phase with one client; crowds have more.")
    ] = 10,
    max_tokens: MaxTokens = 128,
    threads: Threads = 0,
    config: Config = None,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """A trace of chat, copying, distance, a crowd and code, by each way in turn.

    Starts its own services: one verify, one draft, and a gateway for each way.
    """
    from graft.bench.services import Setup
    from graft.bench.shifting import ADAPTIVE, TRACE

    if ADAPTIVE in fixed or len(set(fixed)) < len(fixed):
        raise InvalidArgument("the fixed ways must differ", field="fixed")
    if policy not in ("goodput", "field"):
        raise InvalidArgument(
            f"unknown policy {policy!r}, expected goodput or field", field="policy"
        )
    head = facts({"model": model, "precision": precision, "policy": policy})
    setup = Setup(model, precision, threads or machine.cores(), config)
    total = requests * sum(phase.share for phase in TRACE) * (1 + len(fixed))
    say("starting the services", 0.0)
    with progress_of("answers", total) as advance:
        found = uvloop.run(_tiers(setup, policy, fixed, requests, max_tokens, advance))
    finish(found.page(head), report, as_json)


async def _tiers(
    setup: Setup,
    policy: str,
    fixed: Sequence[str],
    requests: int,
    max_tokens: int,
    advance: Callable[[], None],
) -> Shifting:
    from graft.bench.ask import Client
    from graft.bench.gateways import gateways
    from graft.bench.services import running
    from graft.bench.shifting import ADAPTIVE, measure
    from graft.common.relay import Relay

    ways = {ADAPTIVE: [f"--tiers={policy}", _DEADLINE]}
    ways |= {way: ["--tiers=fixed", f"--speculation={way}", _DEADLINE] for way in fixed}
    async with AsyncExitStack() as stack:
        addresses = await stack.enter_async_context(running(setup))
        relay = Relay(addresses.verify)
        via = await relay.start()
        stack.push_async_callback(relay.stop)
        urls = await stack.enter_async_context(gateways(setup.model, via, addresses.draft, ways))
        clients = {way: await stack.enter_async_context(Client(url)) for way, url in urls.items()}
        return await measure(clients, relay, prompts.read(), requests, max_tokens, advance)
