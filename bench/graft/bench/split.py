"""Measures where a round's time goes, and what three processes cost against one.

For every prompt the services and the same code in this process take turns, plain and speculative,
and plain once more through the gateway, so that a busy moment of the machine hits all of them.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from graft.bench.ask import Client
from graft.bench.direct import Pair
from graft.bench.one_process import OneProcess
from graft.bench.report.page import Bars, Page, Table
from graft.bench.rounds import STAGES, Mode, Passage, overhead, same_text
from graft.bench.streamed import seconds_a_token
from graft.common.sampling import Sampling

_KINDS = ("plain", "speculative")


@dataclass(frozen=True, slots=True)
class Split:
    """One run: the services' modes, then those of one process, in the order of the kinds.

    gateway: seconds a token of every prompt, plain, as a client of the gateway reads it.
    """

    services: tuple[Mode, Mode]
    one_process: tuple[Mode, Mode]
    gateway: tuple[float, ...]

    @property
    def modes(self) -> list[Mode]:
        """All four, a kind at a time."""
        pairs = zip(self.services, self.one_process, strict=True)
        return [mode for pair in pairs for mode in pair]

    def as_json(self) -> dict[str, Any]:
        """One object for machines."""
        found: dict[str, Any] = {mode.name: mode.as_json() for mode in self.modes}
        for kind, split, whole in zip(_KINDS, self.services, self.one_process, strict=True):
            found[f"split_overhead_{kind}"] = round(overhead(split, whole), 4)
        ratios = [
            seconds * len(passage.rounds) / passage.wall
            for seconds, passage in zip(self.gateway, self.one_process[0].passages, strict=True)
            if passage.wall
        ]
        found["gateway_ms_a_token"] = round(statistics.median(self.gateway) * 1e3, 3)
        found["gateway_overhead_plain"] = round(statistics.median(ratios) - 1, 4)
        found["same_text"] = same_text(self.modes)
        return found

    def page(self, facts: dict[str, str]) -> Page:
        """The report: stages as stacked bars, and a table of means."""
        lines = {mode.name: mode.as_json() for mode in self.modes}
        rows = [
            (name, *(line[name] for line in lines.values())) for name in next(iter(lines.values()))
        ]
        bars = {mode.name: {stage: mode.mean_ms(stage) for stage in STAGES} for mode in self.modes}
        answer = self.as_json()
        costs = {kind: f"{answer[f'split_overhead_{kind}']:.1%}" for kind in _KINDS}
        return Page(
            "rounds",
            "Where the time of a round goes",
            answer,
            {
                **facts,
                **{f"overhead of the split, {kind}": cost for kind, cost in costs.items()},
                "overhead of the gateway, plain": f"{answer['gateway_overhead_plain']:.1%}",
            },
            [Table("Means of a round", ("", *lines), rows)],
            [Bars("Stages of a round", "ms", bars)],
            () if answer["same_text"] else ("The modes wrote different texts.",),
        )


async def measure(
    pair: Pair,
    one: OneProcess,
    gateway: Client,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling,
    on_passage: Callable[[], None] | None = None,
) -> Split:
    """Runs every prompt five times. The first prompt is run once more, to warm up.

    gateway: one before the same replicas.

    Raises:
        GraftError: a session failed.
    """
    passages: list[list[Passage]] = [[], [], [], []]
    streamed: list[float] = []
    for number, prompt in enumerate([prompts[0], *prompts]):
        for place, speculate in enumerate((False, True)):
            salt = f"{number}-{place}"
            split = await pair.passage(
                prompt, max_tokens, sampling, speculate=speculate, cache_salt=salt
            )
            whole = one.passage(prompt, max_tokens, sampling, speculate=speculate)
            if number:
                passages[place].append(split)
                passages[2 + place].append(whole)
            if not speculate:
                # Right beside the passages that it is compared with.
                salt = f"{number}-gateway"
                seconds = await asyncio.to_thread(
                    seconds_a_token, gateway.url, gateway.model, prompt, max_tokens, sampling, salt
                )
                if number:
                    streamed.append(seconds)
            if on_passage is not None:
                on_passage()
    named = [
        Mode(f"{kind}, {where}", tuple(found))
        for (where, kind), found in zip(
            [(where, kind) for where in ("services", "one process") for kind in _KINDS],
            passages,
            strict=True,
        )
    ]
    return Split((named[0], named[1]), (named[2], named[3]), tuple(streamed))
