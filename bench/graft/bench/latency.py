"""Latencies of streamed answers: what one answer's times mean, and percentiles over many.

Knows times; knows no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Streamed:
    """One answer as a client saw it; times in seconds since the run began.

    due: when it was to be asked. arrivals: when each piece came, in order; a round's tokens come
    in one piece. error: why there is none.
    """

    due: float
    arrivals: tuple[float, ...] = ()
    num_tokens: int = 0
    num_rounds: int = 0
    num_accepted: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.arrivals[0] - self.due

    @property
    def e2e(self) -> float:
        """Time to the last token."""
        return self.arrivals[-1] - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        if self.num_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Times between pieces: inter-token latency as a reader feels it."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Goal:
    """What an answer must keep to count as good; None asks for nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def met(self, answer: Streamed) -> bool:
        """True when every limit that is set was kept."""
        pairs = ((self.ttft_s, answer.ttft), (self.tpot_s, answer.tpot), (self.e2e_s, answer.e2e))
        return all(limit is None or found is None or found <= limit for limit, found in pairs)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds; empty for no values."""
    if not values:
        return {}
    milliseconds = np.asarray(values) * 1e3
    found = {"mean": float(milliseconds.mean())}
    for percentile in PERCENTILES:
        found[f"p{percentile}"] = float(np.percentile(milliseconds, percentile))
    return {name: round(value, 3) for name, value in found.items()}
