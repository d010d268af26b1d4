"""Where the time of rounds goes, as values: stages of one round and their sums over many.

Knows times; knows neither services nor a model.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STAGES = ("draft", "wire", "queue", "forward", "choice", "commit")


@dataclass(frozen=True, slots=True)
class Round:
    """One round between two commits, in seconds.

    draft: the proposer's work. wire: waiting for the tree beyond that. queue: waiting for the
    target's thread. forward, choice: the target's step. commit: all that is left of `wall`.
    drafted: it had a tree. ahead: that was there before the round could begin.
    """

    wall: float
    num_tokens: int
    num_rows: int
    draft: float = 0.0
    wire: float = 0.0
    queue: float = 0.0
    forward: float = 0.0
    choice: float = 0.0
    drafted: bool = False
    ahead: bool = False

    @property
    def commit(self) -> float:
        """Telling what was decided, and the scheduler's own work."""
        known = self.draft + self.wire + self.queue + self.forward + self.choice
        return max(0.0, self.wall - known)


@dataclass(frozen=True, slots=True)
class Passage:
    """The rounds of one answer after its prefill, and all its tokens."""

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...]

    @property
    def wall(self) -> float:
        """Seconds of all rounds."""
        return sum(one.wall for one in self.rounds)


@dataclass(frozen=True, slots=True)
class Mode:
    """All passages of one way to run. name: for example "speculative, three processes"."""

    name: str
    passages: tuple[Passage, ...]

    @property
    def rounds(self) -> list[Round]:
        """Rounds of all passages."""
        return [one for passage in self.passages for one in passage.rounds]

    def mean_ms(self, stage: str) -> float:
        """Mean of a stage over all rounds."""
        return statistics.fmean(getattr(one, stage) for one in self.rounds) * 1e3

    def as_json(self) -> dict[str, Any]:
        """Means in milliseconds a round."""
        rounds = self.rounds
        wall = sum(one.wall for one in rounds)
        tokens = sum(one.num_tokens for one in rounds)
        return {
            "rounds": len(rounds),
            "tokens": tokens,
            "accept_length": round(tokens / len(rounds), 3),
            "rows": round(statistics.fmean(one.num_rows for one in rounds), 2),
            "tokens_per_s": round(tokens / wall, 2),
            "wall_ms": round(wall / len(rounds) * 1e3, 3),
            "median_wall_ms": round(statistics.median(one.wall for one in rounds) * 1e3, 3),
            **{f"{stage}_ms": round(self.mean_ms(stage), 3) for stage in STAGES},
        }


def overhead(split: Mode, whole: Mode) -> float:
    """What the split adds to the time of the same passages: 0.05 is five hundredths.

    The median of the ratios of passages, each measured one right after the other.
    """
    ratios = [
        a.wall / b.wall for a, b in zip(split.passages, whole.passages, strict=True) if b.wall
    ]
    return statistics.median(ratios) - 1.0 if ratios else 0.0


def same_text(modes: Sequence[Mode]) -> bool:
    """True when all modes wrote the same tokens for every prompt."""
    columns = zip(*(mode.passages for mode in modes), strict=True)
    return all(len({passage.tokens for passage in column}) == 1 for column in columns)
