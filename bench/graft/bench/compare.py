"""Systems side by side in one run: every prompt goes to each of them before the next one does.

Per prompt the median over repeats is taken, so that a busy moment does not decide; a system's
tokens/s are all its tokens over all these seconds, prefill included.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from graft.bench.report.page import Bars, Page, Table
from graft.bench.systems import Job, System, Written
from graft.common.errors import GraftError


@dataclass(frozen=True, slots=True)
class Asked:
    """A job and the category of its prompt."""

    job: Job
    category: str


@dataclass(frozen=True, slots=True)
class Taken:
    """One system's answers to one block of prompts, asked at once."""

    system: str
    block: int
    category: str
    seconds: float
    written: tuple[Written, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the block."""
        return sum(one.num_tokens for one in self.written)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run over blocks of `clients` prompts; systems in the order they were asked."""

    clients: int
    taken: tuple[Taken, ...]
    skipped: tuple[str, ...] = ()

    @property
    def systems(self) -> list[str]:
        """Names, in order."""
        return list(dict.fromkeys(one.system for one in self.taken))

    def tokens_per_s(self, system: str, category: str | None = None) -> float:
        """All tokens over all seconds, each block with its medians over repeats."""
        blocks: dict[int, list[Taken]] = defaultdict(list)
        for one in self.taken:
            if one.system == system and category in (None, one.category):
                blocks[one.block].append(one)
        tokens = sum(
            statistics.median(one.num_tokens for one in repeats) for repeats in blocks.values()
        )
        seconds = sum(
            statistics.median(one.seconds for one in repeats) for repeats in blocks.values()
        )
        return tokens / seconds if seconds else 0.0

    def accept_length(self, system: str) -> float | None:
        """Tokens of a round, bonus included; None where the system does not say.

        The first token of an answer is the prompt's.
        """
        written = [answer for one in self.taken if one.system == system for answer in one.written]
        rounds = sum(answer.num_rounds for answer in written)
        if not rounds:
            return None
        return sum(answer.num_tokens - 1 for answer in written) / rounds

    def as_json(self) -> dict[str, Any]:
        """One object for machines; accept lengths of those that say theirs."""
        lengths = {name: self.accept_length(name) for name in self.systems}
        return {
            "systems": {name: round(self.tokens_per_s(name), 2) for name in self.systems},
            "accept_length": {
                name: round(length, 3) for name, length in lengths.items() if length is not None
            },
        }

    def page(self, facts: dict[str, str]) -> Page:
        """The report: bars, tokens/s by category and every block."""
        rates = {name: self.tokens_per_s(name) for name in self.systems}
        overall = [(name, round(rate, 2), self.accept_length(name)) for name, rate in rates.items()]
        tables = [Table("Tokens/s", ("system", "tokens/s", "accept length"), overall)]
        categories = list(dict.fromkeys(one.category for one in self.taken))
        if self.clients == 1 and len(categories) > 1:
            tables.append(
                Table(
                    "Tokens/s by category",
                    ("category", *self.systems),
                    [
                        (
                            category or "none",
                            *(round(self.tokens_per_s(name, category), 2) for name in rates),
                        )
                        for category in categories
                    ],
                )
            )
        tables.append(
            Table(
                "Blocks",
                ("system", "block", "category", "seconds", "tokens"),
                [
                    (one.system, one.block, one.category, round(one.seconds, 4), one.num_tokens)
                    for one in self.taken
                ],
            )
        )
        clients = f"{self.clients} client{'' if self.clients == 1 else 's'}"
        return Page(
            "compare",
            f"Systems side by side, {clients}",
            self.as_json(),
            facts,
            tables,
            [Bars("Tokens/s", "tokens/s", {name: {"": rate} for name, rate in rates.items()})],
            self.skipped,
        )


async def measure(
    systems: Sequence[System],
    asked: Sequence[Asked],
    *,
    clients: int = 1,
    repeats: int = 1,
    skipped: Sequence[str] = (),
    on_block: Callable[[], None] | None = None,
) -> Comparison:
    """Asks every block of every system that takes so many at once; the first block warms up.

    A system that fails is left out from there on, and of what is reported, with a line.

    Raises:
        GraftError: all have failed.
    """
    able = [system for system in systems if system.most_clients >= clients]
    out = [f"{one.name}: {_too_few(one)}" for one in systems if one not in able]
    blocks = [asked[start : start + clients] for start in range(0, len(asked), clients)]
    taken: list[Taken] = []
    for repeat in range(-1, repeats):
        for number, block in enumerate(blocks if repeat >= 0 else blocks[:1]):
            for system in list(able):
                try:
                    one = await _take(system, number, block, f"{repeat}-{number}")
                except GraftError as error:
                    able.remove(system)
                    taken = [other for other in taken if other.system != system.name]
                    out.append(f"{system.name}: left out, it failed: {error}")
                    if not able:
                        raise GraftError("; ".join(out)) from None
                    continue
                if repeat >= 0:
                    taken.append(one)
                if on_block is not None:
                    on_block()
    return Comparison(clients, tuple(taken), (*skipped, *out))


def _too_few(system: System) -> str:
    most = system.most_clients
    return "takes one client at a time" if most == 1 else f"takes at most {most} clients at a time"


async def _take(system: System, number: int, block: Sequence[Asked], salt: str) -> Taken:
    began = time.perf_counter()
    written = await system.write([one.job for one in block], salt)
    seconds = time.perf_counter() - began
    return Taken(system.name, number, block[0].category, seconds, tuple(written))
