"""Compares policies over workloads and seeds. Knows numbers and bounds; prints nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from graft.common.tier import Tier
from graft.gateway.tiers.controller import FixedPilot, Policy
from graft.gateway.tiers.field_config import load
from graft.gateway.tiers.field_policy import Field
from graft.gateway.tiers.goodput import Goodput
from graft.gateway.tiers.seen import sentence
from graft.sim.run import Track, fixed_tokens, run
from graft.sim.workloads import UNSEEN, WORKLOADS
from graft.sim.world import DEADLINE_S, Workload

WINDOW_S = 5.0
NEVER_BELOW = 0.97
_GRID_S = 0.1
Tokens = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Result:
    """A policy on one workload, over all seeds.

    goodput: expected tokens a second, mean of the seeds. drawn: as the dice fell.
    worst_windows: of each seed the least ratio to plain decoding over any WINDOW_S.
    mean_window: the least such ratio of all seeds taken together, at equal times.
    """

    goodput: float
    drawn: float
    worst_windows: Sequence[float]
    mean_window: float
    switches_per_minute: float
    probes_per_minute: float

    @property
    def worst_window(self) -> float:
        """Of the worst seed."""
        return min(self.worst_windows)

    @property
    def share_held(self) -> float:
        """Seeds in which no window was below NEVER_BELOW of plain decoding."""
        return sum(worst >= NEVER_BELOW for worst in self.worst_windows) / len(self.worst_windows)

    def as_body(self) -> dict[str, float]:
        """Rounded, for JSON."""
        return {
            "tokens_per_s": round(self.goodput, 3),
            "tokens_per_s_drawn": round(self.drawn, 3),
            "worst_5s_of_plain": round(self.worst_window, 4),
            "worst_5s_of_plain_mean_of_seeds": round(self.mean_window, 4),
            "share_of_seeds_never_below": round(self.share_held, 4),
            "switches_per_minute": round(self.switches_per_minute, 3),
            "probes_per_minute": round(self.probes_per_minute, 3),
        }


@dataclass(frozen=True, slots=True)
class Compared:
    """One workload: plain decoding, every fixed tier and both policies, tokens a second."""

    workload: Workload
    plain: float
    fixed: dict[str, float]
    field: Result
    goodput: Result

    @property
    def best_fixed(self) -> tuple[str, float]:
        """The best single tier over the whole workload, tier 0 included."""
        name = max(self.fixed, key=lambda one: self.fixed[one])
        if self.plain >= self.fixed[name]:
            return "off", self.plain
        return name, self.fixed[name]

    @property
    def of_best_fixed(self) -> float:
        """The goodput policy against the best single tier."""
        return self.goodput.goodput / self.best_fixed[1]

    def as_body(self) -> dict[str, Any]:
        """For JSON."""
        name, best = self.best_fixed
        return {
            "kind": self.workload.kind,
            "machine": self.workload.machine.name,
            "seconds": self.workload.seconds,
            "plain": round(self.plain, 3),
            "fixed": {tier: round(rate, 3) for tier, rate in self.fixed.items()},
            "best_fixed": {"tier": name, "tokens_per_s": round(best, 3)},
            "field": self.field.as_body(),
            "goodput": self.goodput.as_body(),
            "goodput_of_best_fixed": round(self.of_best_fixed, 4),
            "field_of_best_fixed": round(self.field.goodput / best, 4),
        }


def compare(workload: Workload, seeds: Sequence[int]) -> Compared:
    """Both policies over all seeds, each against the same sessions and plain decoding."""
    plain = [run(workload, seed, Plain()) for seed in seeds]
    exact = [fixed_tokens(workload, seed, Tier())(workload.seconds) for seed in seeds]
    fixed = {
        sentence(tier): statistics.fmean(
            fixed_tokens(workload, seed, tier)(workload.seconds) / workload.seconds
            for seed in seeds
        )
        for tier in workload.fixed
    }
    return Compared(
        workload,
        statistics.fmean(exact) / workload.seconds,
        fixed,
        _result(workload, seeds, plain, lambda: Field(load("default")), peers=True),
        _result(workload, seeds, plain, lambda: Goodput(DEADLINE_S), peers=False),
    )


class Plain:
    """Decodes without drafts, whatever is on offer."""

    def open(self, *_: object) -> FixedPilot:
        """A pilot that stays at tier 0."""
        return FixedPilot(Tier())

    def as_body(self) -> dict[str, object]:
        """Nothing is estimated."""
        return {}


def _result(
    workload: Workload,
    seeds: Sequence[int],
    plain: Sequence[Track],
    policy: Callable[[], Policy],
    *,
    peers: bool,
) -> Result:
    tracks = [run(workload, seed, policy(), peers=peers) for seed in seeds]
    minutes = sum(track.times[-1] for track in tracks) / 60
    ours = [_by_window(track, workload.seconds) for track in tracks]
    theirs = [_by_window(track, workload.seconds) for track in plain]
    return Result(
        statistics.fmean(track.expected[-1] / track.times[-1] for track in tracks),
        statistics.fmean(track.drawn / track.times[-1] for track in tracks),
        [float((one / other).min()) for one, other in zip(ours, theirs, strict=True)],
        float((np.sum(ours, axis=0) / np.sum(theirs, axis=0)).min()),
        sum(track.switches for track in tracks) / minutes,
        sum(track.probes for track in tracks) / minutes,
    )


def _by_window(track: Track, seconds: float) -> Tokens:
    """Expected tokens of every stretch of WINDOW_S, by where it begins."""
    begins = np.arange(0.0, max(seconds - WINDOW_S, 0.0) + _GRID_S / 2, _GRID_S)
    until = np.interp(begins + WINDOW_S, track.times, track.expected)
    gained: Tokens = until - np.interp(begins, track.times, track.expected)
    return gained


def compare_all(
    num_seeds: int, names: Sequence[str] = (), told: Callable[[Compared], None] | None = None
) -> list[Compared]:
    """All workloads, or those named; `told` hears of each as it is done."""
    found = []
    for workload in WORKLOADS + UNSEEN:
        if names and workload.name not in names:
            continue
        compared = compare(workload, range(1, num_seeds + 1))
        found.append(compared)
        if told is not None:
            told(compared)
    return found
