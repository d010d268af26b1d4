"""A day at a server in three minutes: load that changes its kind, its distance and its width.

The trace is a list of phases. In each of them every way of choosing the tier, the adaptive one and
some fixed ones, answers the same requests, one way after another and in turned order, so that a
busy moment of the machine hits all of them. Knows gateways and a relay; starts no service.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graft.bench.ask import Client, Question
from graft.bench.prompts import Prompt
from graft.bench.report.page import Bars, Cell, Lines, Page, Table
from graft.common.errors import GraftError
from graft.common.relay import Relay

ADAPTIVE = "adaptive"
_FAR_S = 0.06
_WARM_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the trace. share: its requests, in units of one client's."""

    name: str
    categories: tuple[str, ...]
    clients: int = 1
    share: int = 1
    rtt_s: float = 0.0
    temperature: float = 0.0


TRACE = (
    Phase("chat", ("writing", "knowledge", "roleplay"), temperature=0.8),
    Phase("copying", ("copy", "rewrite")),
    Phase("chat, far", ("writing", "knowledge", "roleplay"), rtt_s=_FAR_S, temperature=0.8),
    Phase("copying, far", ("copy", "extraction"), rtt_s=_FAR_S),
    Phase("crowd", ("knowledge", "reasoning", "math"), clients=6, share=3),
    Phase("code", ("code", "math")),
)
"""Prompt class, round-trip time between draft and verify, and clients all change."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What one way did with one phase. texts: of its requests, in order."""

    phase: str
    seconds: float
    num_tokens: int
    texts: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        """Goodput."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Shifting:
    """A whole run. answered: by way, phase after phase. switches: of the adaptive way's tier."""

    answered: Mapping[str, Sequence[Answered]]
    switches: Mapping[str, float]

    @property
    def same_text(self) -> bool:
        """True when all ways wrote one text."""
        columns = [[one.texts for one in line] for line in self.answered.values()]
        return all(column == columns[0] for column in columns)

    def tokens_per_s(self, way: str) -> float:
        """Goodput of the whole trace."""
        line = self.answered[way]
        return sum(one.num_tokens for one in line) / sum(one.seconds for one in line)

    @property
    def best_fixed(self) -> str:
        """The fixed way with the highest goodput."""
        return max((way for way in self.answered if way != ADAPTIVE), key=self.tokens_per_s)

    def as_json(self) -> dict[str, Any]:
        """One object for machines."""
        best = self.best_fixed
        return {
            "ways": {
                way: {
                    "tokens_per_s": round(self.tokens_per_s(way), 3),
                    "seconds": round(sum(one.seconds for one in line), 2),
                    "phases": {one.phase: round(one.tokens_per_s, 3) for one in line},
                }
                for way, line in self.answered.items()
            },
            "best_fixed": best,
            "adaptive_to_best_fixed": round(
                self.tokens_per_s(ADAPTIVE) / self.tokens_per_s(best), 4
            ),
            "switches": dict(self.switches),
            "same_text": self.same_text,
        }

    def page(self, facts: dict[str, str]) -> Page:
        """The report: goodput by way and phase, and how the tokens of each way add up."""
        phases = [one.phase for one in self.answered[ADAPTIVE]]
        rows: list[tuple[Cell, ...]] = [
            (
                way,
                *(round(one.tokens_per_s, 2) for one in line),
                round(self.tokens_per_s(way), 2),
                f"{self.tokens_per_s(way) / self.tokens_per_s(self.best_fixed):.3f}",
            )
            for way, line in self.answered.items()
        ]
        columns = ("tier", *phases, "all", "to the best fixed")
        notes = [f"{what}: {count:g}" for what, count in self.switches.items()]
        if not self.same_text:
            notes.append("The ways wrote different texts.")
        return Page(
            "tiers",
            "A trace that shifts: the adaptive tier and fixed ones",
            self.as_json(),
            facts,
            [Table("tokens/s by phase", columns, rows)],
            [
                Lines(
                    "Tokens written since the trace began",
                    "seconds",
                    "tokens",
                    {way: _running_sum(line) for way, line in self.answered.items()},
                ),
                Bars(
                    "The whole trace",
                    "tokens/s",
                    {way: {"": self.tokens_per_s(way)} for way in self.answered},
                ),
            ],
            notes,
        )


def _running_sum(line: Sequence[Answered]) -> list[tuple[float, float]]:
    points, seconds, tokens = [(0.0, 0.0)], 0.0, 0
    for one in line:
        seconds, tokens = seconds + one.seconds, tokens + one.num_tokens
        points.append((seconds, float(tokens)))
    return points


def requests_of(
    phase: Phase, prompts: Sequence[Prompt], count: int, max_tokens: int
) -> list[Question]:
    """The requests of a phase, `count` in units of its share; prompts are taken in turn.

    Raises:
        GraftError: no prompt is of its categories.
    """
    chosen = [prompt for prompt in prompts if prompt.category in phase.categories]
    if not chosen:
        raise GraftError(f"no prompt is of a category in {phase.categories}")
    return [
        Question(
            chosen[number % len(chosen)].text,
            max_tokens,
            phase.temperature,
            seed=number,
            cache_salt=f"{phase.name}-{number}",
        )
        for number in range(count * phase.share)
    ]


async def measure(
    clients: Mapping[str, Client],
    relay: Relay,
    prompts: Sequence[Prompt],
    count: int,
    max_tokens: int,
    on_answer: Callable[[], None] | None = None,
    trace: Sequence[Phase] = TRACE,
) -> Shifting:
    """Runs the trace. clients: a gateway a way, `ADAPTIVE` among them. relay: before verify.

    Raises:
        GraftError: a request failed.
    """
    ways = list(clients)
    answered: dict[str, list[Answered]] = {way: [] for way in ways}
    for way, client in clients.items():
        # What is slow only once is no way's fault.
        await client.ask(Question(prompts[0].text, _WARM_TOKENS, cache_salt=f"warm-{way}"))
    for place, phase in enumerate(trace):
        questions = requests_of(phase, prompts, count, max_tokens)
        relay.set_rtt(phase.rtt_s)
        turn = place % len(ways)
        for way in ways[turn:] + ways[:turn]:
            answered[way].append(await _run(clients[way], way, phase, questions, on_answer))
    relay.set_rtt(0.0)
    return Shifting(answered, await _switches(clients[ADAPTIVE]))


async def _run(
    client: Client,
    way: str,
    phase: Phase,
    questions: Sequence[Question],
    on_answer: Callable[[], None] | None,
) -> Answered:
    """A closed loop of the phase's clients."""
    texts = [""] * len(questions)
    tokens = 0
    left = iter(enumerate(questions))

    async def serve() -> None:
        nonlocal tokens
        for number, question in left:
            salted = Question(
                question.text,
                question.max_tokens,
                question.temperature,
                question.seed,
                question.speculation,
                f"{way}-{question.cache_salt}",
            )
            body = await client.ask(salted)
            texts[number] = str(body["choices"][0]["message"]["content"])
            tokens += int(body["usage"]["completion_tokens"])
            if on_answer is not None:
                on_answer()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(phase.clients):
            group.create_task(serve())
    return Answered(phase.name, time.perf_counter() - began, tokens, tuple(texts))


async def _switches(client: Client) -> dict[str, float]:
    """How often the tier was changed, by reason."""
    found: dict[str, float] = {}
    for line in (await client.page("/metrics")).splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("graft_tier_switches_total{"):
            reason = name.partition('reason="')[2].partition('"')[0]
            found[reason] = found.get(reason, 0.0) + float(value)
    return found
