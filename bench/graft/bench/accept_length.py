"""Accept length: tokens of a target's forward, drafter by drafter, counted by the services.

A round is one forward of the target over a tree or over the root alone; what it gives is what was
accepted and the target's own token behind it. The prefill is no round, and its token none of a
round's. Time does not matter here, so rounds wait as long as a drafter may need.

Knows ways to draft and their counts; knows no checkpoint and starts no service.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graft.bench.ask import Client, Question
from graft.bench.prompts import Prompt
from graft.bench.report.page import Bars, Lines, Page, Table
from graft.common.errors import GraftError

CHAIN_OF_4 = {"num_steps": 4, "topk": 1, "num_draft_tokens": 5}
TREE_OF_24 = {"num_steps": 7, "topk": 8, "num_draft_tokens": 24}
OWN_TIER: Mapping[str, int] = {}

_START_S = 300.0
_ASK_S = 0.5


@dataclass(frozen=True, slots=True)
class Way:
    """One way to draft. tier: as in a request's `speculation`; empty takes the drafter's own."""

    drafter: str
    tier: Mapping[str, int]
    temperature: float = 0.0

    def name(self, tier: Mapping[str, Any]) -> str:
        """For example chain4_T0: drafted tokens of a chain, or nodes of a tree with its root.

        tier: what was in force.
        """
        chain = tier["topk"] == 1 and tier["num_draft_tokens"] == tier["num_steps"] + 1
        shape = f"chain{tier['num_steps']}" if chain else f"tree{tier['num_draft_tokens']}"
        return f"{shape}_T{self.temperature:g}"


WAYS = (
    Way("eagle3", CHAIN_OF_4),
    Way("eagle3", TREE_OF_24),
    Way("eagle3", TREE_OF_24, 1.0),
    Way("mtp", CHAIN_OF_4),
    Way("mtp", TREE_OF_24),
    Way("dflash", OWN_TIER),
    Way("ngram", OWN_TIER),
    Way("merged", TREE_OF_24),
)
DRAFTERS = tuple(dict.fromkeys(way.drafter for way in WAYS))


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts of one answer.

    num_tokens: of its rounds. num_tree_rounds: rounds that had a tree or chain to check.
    per_position: accepted tokens at each depth, the first below the root first.
    """

    category: str
    num_rounds: int
    num_tree_rounds: int
    num_tokens: int
    num_drafted: int
    per_position: tuple[int, ...]

    @staticmethod
    def of(category: str, record: Mapping[str, Any]) -> Counted:
        """From `metrics.speculative_decoding` of a response."""
        return Counted(
            category,
            record["num_rounds"],
            record["num_spec_steps"],
            round(record["accept_length"] * record["num_rounds"]),
            record["num_draft_tokens"],
            tuple(record["accepted_per_position"]),
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """All answers of one way. name: see `Way.name`."""

    drafter: str
    name: str
    answers: tuple[Counted, ...] = field(repr=False)

    @property
    def num_rounds(self) -> int:
        """Of all answers."""
        return sum(one.num_rounds for one in self.answers)

    @property
    def num_plain_rounds(self) -> int:
        """Rounds that had nothing to check: the drafter had no guess, or was late."""
        return self.num_rounds - sum(one.num_tree_rounds for one in self.answers)

    @property
    def accept_length(self) -> float:
        """Tokens of a round."""
        return sum(one.num_tokens for one in self.answers) / max(1, self.num_rounds)

    @property
    def spread(self) -> float:
        """Standard error of the accept length over questions, as of a ratio of sums."""
        rounds = np.asarray([one.num_rounds for one in self.answers], np.float64)
        tokens = np.asarray([one.num_tokens for one in self.answers], np.float64)
        if len(rounds) < 2 or not rounds.sum():
            return 0.0
        off = tokens - self.accept_length * rounds
        return float(np.sqrt((off**2).sum() * len(off) / (len(off) - 1)) / rounds.sum())

    @property
    def per_position(self) -> list[float]:
        """Share of rounds with a draft in which the token of each depth was accepted."""
        depth = max((len(one.per_position) for one in self.answers), default=0)
        counts = np.zeros(depth)
        for one in self.answers:
            counts[: len(one.per_position)] += one.per_position
        rounds = sum(one.num_tree_rounds for one in self.answers)
        return [round(float(count) / max(1, rounds), 4) for count in counts]

    def within(self, category: str) -> float | None:
        """Accept length of one category; None where it has no round."""
        some = [one for one in self.answers if one.category == category and one.num_rounds]
        if not some:
            return None
        return sum(one.num_tokens for one in some) / sum(one.num_rounds for one in some)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """One run. absent: why drafters are not in it, by their names."""

    measured: tuple[Measured, ...]
    max_tokens: int
    absent: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """One object a drafter: accept length by way, then `per_position` of its first way."""
        found: dict[str, Any] = {}
        others = (one.drafter for one in self.measured)
        for drafter in dict.fromkeys([*DRAFTERS, *others, *self.absent]):
            ways = [one for one in self.measured if one.drafter == drafter]
            if not ways:
                found[drafter] = {"absent": self.absent.get(drafter, "not asked for")}
                continue
            found[drafter] = {one.name: round(one.accept_length, 3) for one in ways}
            found[drafter]["per_position"] = ways[0].per_position
            found[drafter]["spread"] = {one.name: round(one.spread, 3) for one in ways}
        return found

    def page(self, facts: dict[str, str]) -> Page:
        """The report: accept lengths, acceptance by position and by category."""
        titles = {f"{one.drafter} {one.name}": one for one in self.measured}
        depth = max((len(one.per_position) for one in self.measured), default=0)
        positions = [
            (title, *_padded(one.per_position, depth), *_padded(_given(one.per_position), depth))
            for title, one in titles.items()
        ]
        categories = sorted({one.category for way in self.measured for one in way.answers})
        return Page(
            "acceptance",
            "Accept length of drafters",
            self.as_json(),
            {**facts, "answers": f"at most {self.max_tokens} tokens"},
            [
                Table(
                    "Accept length",
                    ("drafter", "tokens/round", "+-", "rounds", "plain", "drafted/round"),
                    [(title, *_line(one)) for title, one in titles.items()],
                ),
                Table(
                    "Acceptance by depth: of all drafts, and where all before were accepted",
                    (
                        "drafter",
                        *(f"{place + 1}" for place in range(depth)),
                        *(f"{place + 1} after {place}" for place in range(depth)),
                    ),
                    positions,
                ),
                Table(
                    "Accept length by category",
                    ("drafter", *categories),
                    [
                        (title, *(one.within(category) for category in categories))
                        for title, one in titles.items()
                    ],
                ),
            ],
            [
                Bars(
                    "Accept length",
                    "tokens/round",
                    {title: {"": round(one.accept_length, 3)} for title, one in titles.items()},
                ),
                Lines(
                    "Share of drafts accepted down to a depth",
                    "depth",
                    "share",
                    {
                        title: [(place + 1.0, share) for place, share in enumerate(shares)]
                        for title, one in titles.items()
                        if (shares := one.per_position)
                    },
                ),
            ],
            tuple(f"{name} is left out: {why}" for name, why in self.absent.items()),
        )


async def measure(
    url: str,
    ways: Sequence[Way],
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    clients: int = 1,
    seed: int = 0,
    absent: Mapping[str, str] | None = None,
    on_answer: Callable[[], None] | None = None,
) -> Acceptance:
    """Asks every prompt in every way. Prompt i is sampled with seed + i, in all ways alike.

    Raises:
        GraftError: the gateway did not answer, or refused a question.
    """
    measured = []
    async with Client(url, connections=clients + 1) as client:
        for drafter in dict.fromkeys(way.drafter for way in ways):
            await _drafting(client, drafter)
        for number, way in enumerate(ways):
            counted: list[Counted | None] = [None] * len(prompts)
            names: list[str] = []
            waiting = iter(range(len(prompts)))

            async def ask(
                way: Way = way,
                waiting: Any = waiting,
                counted: list[Counted | None] = counted,
                names: list[str] = names,
                salt: int = number,
            ) -> None:
                for place in waiting:
                    prompt = prompts[place]
                    question = Question(
                        prompt.text,
                        max_tokens,
                        way.temperature,
                        seed + place,
                        {"proposer": way.drafter, **way.tier},
                        f"{salt}-{place}",
                    )
                    record = await _record(client, question)
                    names.append(way.name(record["tier"]))
                    counted[place] = Counted.of(prompt.category, record)
                    if on_answer is not None:
                        on_answer()

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(clients):
                        group.create_task(ask())
            except* GraftError as failures:
                raise failures.exceptions[0] from None
            answers = tuple(one for one in counted if one is not None)
            measured.append(Measured(way.drafter, names[0], answers))
    return Acceptance(tuple(measured), max_tokens, dict(absent or {}))


async def _drafting(client: Client, drafter: str) -> None:
    """Waits until a draft service has the drafter: it may still load when the gateway is ready."""
    until = time.monotonic() + _START_S
    question = Question("Hello", 2, speculation={"proposer": drafter})
    while True:
        try:
            await _record(client, question)
            return
        except _Undrafted:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(_ASK_S)


class _Undrafted(GraftError):
    """An answer that was not speculated, and why."""


async def _record(client: Client, question: Question) -> Any:
    """What speculation did for one answer."""
    record = (await client.ask(question))["metrics"]["speculative_decoding"]
    if record["tier"] is None:
        raise _Undrafted(f"nothing drafts: {record.get('inactive_reason', 'no reason is given')}")
    return record


def _line(one: Measured) -> tuple[float | int, ...]:
    drafted = sum(answer.num_drafted for answer in one.answers)
    return (
        round(one.accept_length, 3),
        round(one.spread, 3),
        one.num_rounds,
        one.num_plain_rounds,
        round(drafted / max(1, one.num_rounds), 2),
    )


def _given(shares: Sequence[float]) -> list[float]:
    """Shares among the drafts that were accepted down to the depth before."""
    before = [1.0, *shares]
    return [
        round(share / above, 3) if above else 0.0
        for share, above in zip(shares, before, strict=False)
    ]


def _padded(shares: Sequence[float], depth: int) -> tuple[float | None, ...]:
    return (*shares, *(None for _ in range(depth - len(shares))))
