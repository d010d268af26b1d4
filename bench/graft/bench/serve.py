"""Load on a running gateway: a fixed number of clients, or requests that come at a rate.

Closed loop: each client asks again as soon as it is answered. Open loop: requests come as a
Poisson process whether or not earlier ones are done, and waiting counts from when each was due.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from graft.bench.ask import Client, Question, stopwatch
from graft.bench.latency import Goal, Streamed, summary
from graft.bench.report.page import Bars, Lines, Page, Table
from graft.common.errors import GraftError

NO_GOAL = Goal()
_METRICS = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come: `clients` at a time, or `rate` a second when it is above 0."""

    num_requests: int
    clients: int = 1
    rate: float = 0.0
    seed: int = 0

    @property
    def words(self) -> str:
        """For people."""
        if self.rate:
            return f"open loop, {self.rate:g} requests/s"
        return f"closed loop, {self.clients} client{'' if self.clients == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class Served:
    """The outcome of one load."""

    load: Load
    goal: Goal
    seconds: float
    answers: tuple[Streamed, ...] = field(repr=False)

    @property
    def good(self) -> list[Streamed]:
        """Answers that are there."""
        return [answer for answer in self.answers if not answer.error]

    @property
    def accept_length(self) -> float:
        """Tokens of a round, bonus included."""
        rounds = sum(answer.num_rounds for answer in self.good)
        accepted = sum(answer.num_accepted for answer in self.good)
        return 1.0 + accepted / rounds if rounds else 1.0

    def values(self, metric: str) -> list[float]:
        """All values of ttft, tpot, itl or e2e, in seconds."""
        if metric == "itl":
            return [gap for answer in self.good for gap in answer.gaps]
        found = [getattr(answer, metric) for answer in self.good]
        return [value for value in found if value is not None]

    def as_json(self) -> dict[str, Any]:
        """One object for machines; times in milliseconds."""
        tokens = sum(answer.num_tokens for answer in self.good)
        goals = sum(self.goal.met(answer) for answer in self.good)
        return {
            "load": self.load.words,
            "requests": len(self.answers),
            "failed": len(self.answers) - len(self.good),
            "seconds": round(self.seconds, 3),
            "requests_per_s": round(len(self.good) / self.seconds, 3),
            "tokens_per_s": round(tokens / self.seconds, 2),
            "goodput_requests_per_s": round(goals / self.seconds, 3),
            "accept_length": round(self.accept_length, 3),
            **{f"{metric}_ms": summary(self.values(metric)) for metric in _METRICS},
        }

    def page(self, facts: dict[str, str]) -> Page:
        """The report: percentiles, their curves, and every answer."""
        answer = self.as_json()
        names = [name for name in ("mean", "p50", "p90", "p95", "p99") if self.good]
        percentiles = Table(
            "Latencies in ms",
            ("metric", *names),
            [
                (metric, *(answer[f"{metric}_ms"].get(name) for name in names))
                for metric in _METRICS
            ],
        )
        every = Table(
            "Answers",
            ("due s", "ttft ms", "tpot ms", "e2e ms", "tokens", "rounds", "error"),
            [_line(one) for one in self.answers],
        )
        rates = {name: {"": answer[name]} for name in ("requests_per_s", "goodput_requests_per_s")}
        curves = {
            metric: [
                (share, value)
                for share, value in zip(
                    (50.0, 90.0, 95.0, 99.0),
                    list(answer[f"{metric}_ms"].values())[1:],
                    strict=False,
                )
            ]
            for metric in _METRICS
        }
        return Page(
            "serve",
            f"Load on a gateway: {self.load.words}",
            answer,
            {**facts, "tokens/s": f"{answer['tokens_per_s']:g}"},
            [percentiles, every],
            [
                Lines("Latency by percentile", "percentile", "ms", curves),
                Bars("Requests and those within the goal", "/s", rates),
            ],
        )


async def run(
    url: str,
    questions: Sequence[Question],
    load: Load,
    *,
    goal: Goal = NO_GOAL,
    api_key: str | None = None,
    on_answer: Callable[[Streamed], None] | None = None,
) -> Served:
    """Asks `load.num_requests` of the questions, over and over in order.

    Raises:
        GraftError: the gateway cannot be reached, or no request at all was answered.
    """
    asked = [questions[i % len(questions)] for i in range(load.num_requests)]
    connections = load.num_requests if load.rate else load.clients
    async with Client(url, api_key, connections + 1) as client:
        clock = stopwatch()

        async def ask(question: Question, due: float) -> Streamed:
            answer = await client.stream(question, due, clock)
            if on_answer is not None:
                on_answer(answer)
            return answer

        answers = await (
            _open(asked, load, ask, clock) if load.rate else _closed(asked, load, ask, clock)
        )
        seconds = clock()
    if all(answer.error for answer in answers):
        raise GraftError(f"none of {len(answers)} requests was answered: {answers[0].error}")
    return Served(load, goal, seconds, tuple(answers))


_Ask = Callable[[Question, float], Any]


async def _closed(
    asked: Sequence[Question], load: Load, ask: _Ask, clock: Callable[[], float]
) -> list[Streamed]:
    waiting = iter(asked)
    answers: list[Streamed] = []

    async def client() -> None:
        for question in waiting:
            answers.append(await ask(question, clock()))

    await asyncio.gather(*(client() for _ in range(load.clients)))
    return answers


async def _open(
    asked: Sequence[Question], load: Load, ask: _Ask, clock: Callable[[], float]
) -> list[Streamed]:
    random_gap = random.Random(load.seed)
    due = 0.0
    tasks = []
    async with asyncio.TaskGroup() as group:
        for question in asked:
            due += random_gap.expovariate(load.rate)
            await asyncio.sleep(max(0.0, due - clock()))
            tasks.append(group.create_task(ask(question, due)))
    return [task.result() for task in tasks]


def _line(answer: Streamed) -> tuple[str | float | int | None, ...]:
    if answer.error:
        return (round(answer.due, 3), None, None, None, 0, 0, answer.error)
    tpot = answer.tpot
    return (
        round(answer.due, 3),
        round(answer.ttft * 1e3, 2),
        None if tpot is None else round(tpot * 1e3, 3),
        round(answer.e2e * 1e3, 2),
        answer.num_tokens,
        answer.num_rounds,
        "",
    )
