"""What distance between draft and verify costs: goodput against round-trip time.

A relay between the two adds the time. For every prompt and distance, plain decoding, synchronous
speculation and look-ahead take turns, so that a busy moment of the machine hits all of them. The
distances are multiples of the time of a verify step, which is measured first.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from graft.bench.direct import Pair
from graft.bench.report.page import Lines, Page, Table
from graft.bench.rounds import Passage, Round
from graft.common.errors import GraftError
from graft.common.relay import Relay
from graft.common.sampling import Sampling
from graft.v1 import tree_pb2

MULTIPLES = (0.0, 0.5, 1.0, 2.5)
_SETTLE_S = 0.03
_WARM_S = 5.0
_STEADY = 0.9
_LATE_STEPS = 12
_MOST_PASSAGES = 12
MODES = ("off", "synchronous", "lookahead")

Sent = Callable[[], Awaitable[float]]
"""Payload bytes that the draft service has sent so far."""


@dataclass(slots=True)
class Point:
    """One mode at one distance. sent_bytes: payload from draft to verify."""

    passages: list[Passage] = field(default_factory=list)
    sent_bytes: float = 0.0

    @property
    def rounds(self) -> list[Round]:
        """Rounds of all passages."""
        return [one for passage in self.passages for one in passage.rounds]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rounds."""
        return sum(one.num_tokens for one in self.rounds)

    @property
    def tokens_per_s(self) -> float:
        """Goodput after the prefill."""
        return self.num_tokens / sum(one.wall for one in self.rounds)

    @property
    def hit_rate(self) -> float:
        """Share of rounds that found their tree there; the first of a session cannot."""
        later = [one for passage in self.passages for one in passage.rounds[1:]]
        return sum(one.ahead for one in later) / len(later) if later else 0.0

    def as_json(self) -> dict[str, Any]:
        """Numbers for machines."""
        return {
            "tokens_per_s": round(self.tokens_per_s, 3),
            "accept_length": round(self.num_tokens / len(self.rounds), 3),
            "hit_rate": round(self.hit_rate, 4),
            "payload_bytes_per_token": round(self.sent_bytes / self.num_tokens, 1),
        }


@dataclass(frozen=True, slots=True)
class Distance:
    """A whole run. points: by multiple of the verify time, then by mode."""

    verify_s: float
    points: dict[float, dict[str, Point]]

    @property
    def same_text(self) -> bool:
        """True when every prompt got one text, whatever the mode and the distance."""
        columns = [point.passages for modes in self.points.values() for point in modes.values()]
        return all(
            len({passage.tokens for passage in line}) == 1 for line in zip(*columns, strict=True)
        )

    def kept(self, multiple: float, mode: str) -> float:
        """Goodput at a distance against that of the same mode without any."""
        return self.points[multiple][mode].tokens_per_s / self.points[0.0][mode].tokens_per_s

    def formula(self, multiple: float) -> float:
        """What synchronous rounds keep when each waits for one round trip more."""
        rounds = self.points[0.0]["synchronous"].rounds
        wall_s = sum(one.wall for one in rounds) / len(rounds)
        return wall_s / (wall_s + multiple * self.verify_s)

    def as_json(self) -> dict[str, Any]:
        """One object for machines."""
        return {
            "verify_ms": round(self.verify_s * 1e3, 3),
            "points": [
                {
                    "rtt_verify_times": multiple,
                    "rtt_ms": round(multiple * self.verify_s * 1e3, 3),
                    "synchronous_by_formula": round(self.formula(multiple), 4),
                    **{
                        mode: {**point.as_json(), "kept": round(self.kept(multiple, mode), 4)}
                        for mode, point in modes.items()
                    },
                }
                for multiple, modes in self.points.items()
            ],
            "same_text": self.same_text,
        }

    def page(self, facts: dict[str, str]) -> Page:
        """The report: a table of all points, and goodput against distance."""
        columns = ("RTT / verify", "mode", "tokens/s", "kept", "hit rate", "bytes/token")
        rows = [
            (
                multiple,
                mode,
                round(point.tokens_per_s, 2),
                f"{self.kept(multiple, mode):.0%}",
                f"{point.hit_rate:.2f}",
                round(point.sent_bytes / point.num_tokens, 1),
            )
            for multiple, modes in self.points.items()
            for mode, point in modes.items()
        ]
        curves = {
            mode: [
                (multiple * self.verify_s * 1e3, modes[mode].tokens_per_s)
                for multiple, modes in self.points.items()
            ]
            for mode in MODES
        }
        return Page(
            "distance",
            "Speculation over distance",
            self.as_json(),
            {**facts, "verify step": f"{self.verify_s * 1e3:.2f} ms"},
            [Table("Goodput by round-trip time", columns, rows)],
            [Lines("Goodput by round-trip time", "RTT, ms", "tokens/s", curves)],
            () if self.same_text else ("The modes wrote different texts.",),
        )


@dataclass(frozen=True, slots=True)
class Wire:
    """A pair whose draft replica reaches verify through the relay. tier: without look-ahead."""

    pair: Pair
    relay: Relay
    sent: Sent
    tier: tree_pb2.Tier
    lookahead: int

    async def passage(
        self, mode: str, prompt: Sequence[int], max_tokens: int, sampling: Sampling, salt: str
    ) -> Passage:
        """One session in one of the modes."""
        tier = tree_pb2.Tier()
        tier.CopyFrom(self.tier)
        tier.lookahead = self.lookahead if mode == "lookahead" else 0
        self.pair.tier = tier
        return await self.pair.passage(
            prompt, max_tokens, sampling, speculate=mode != "off", cache_salt=salt
        )


async def measure(
    wire: Wire,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling,
    on_passage: Callable[[], None] | None = None,
    multiples: Sequence[float] = MULTIPLES,
) -> Distance:
    """Runs every prompt in every mode at every distance, once a step's time is steady.

    Raises:
        GraftError: a session failed, or nothing was ever drafted.
    """
    wire.relay.set_rtt(0.0)
    verify_s = await _step_time(wire, prompts, max_tokens, sampling)
    points = {multiple: {mode: Point() for mode in MODES} for multiple in multiples}
    for number, prompt in enumerate(prompts):
        for multiple, modes in points.items():
            wire.relay.set_rtt(multiple * verify_s)
            for mode, point in modes.items():
                before = await _settled(wire.sent)
                salt = f"{number}-{multiple}-{mode}"
                point.passages.append(await wire.passage(mode, prompt, max_tokens, sampling, salt))
                point.sent_bytes += await _settled(wire.sent) - before
                if on_passage is not None:
                    on_passage()
    return Distance(verify_s, points)


async def _step_time(
    wire: Wire, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling
) -> float:
    """Median seconds of a drafted step, once it no longer falls.

    For its first seconds a replica meets cold caches, sleeping cores and pages that are not in
    memory yet: steps take twice as long.
    """
    began, last = time.monotonic(), 0.0
    for number in itertools.count():
        prompt = prompts[number % len(prompts)]
        passage = await wire.passage("synchronous", prompt, max_tokens, sampling, f"warm-{number}")
        steps = [one.forward + one.choice for one in passage.rounds if one.drafted]
        if not steps and number + 1 >= len(prompts):
            raise GraftError("the proposer drafted nothing")
        if steps:
            former, last = last, statistics.median(steps[-_LATE_STEPS:])
            warm = time.monotonic() - began > _WARM_S and last > _STEADY * former
            if warm or number >= _MOST_PASSAGES:
                return last
    raise AssertionError("counting has no end")


async def _settled(sent: Sent) -> float:
    """What was sent, once nothing more is: trees of a session that is over may be on their way."""
    before = await sent()
    while True:
        await asyncio.sleep(_SETTLE_S)
        now = await sent()
        if now == before:
            return now
        before = now
