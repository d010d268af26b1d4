"""Compares policies over workloads and seeds. Knows numbers and bounds; prints nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graft.common.tier import Tier
from graft.gateway.tiers.controller import Policy
from graft.gateway.tiers.field_config import load
from graft.gateway.tiers.field_policy import Field
from graft.gateway.tiers.goodput import Goodput
from graft.gateway.tiers.seen import sentence
from graft.sim.run import Track, fixed_tokens, run
from graft.sim.workloads import WORKLOADS
from graft.sim.world import DEADLINE_S, Workload

WINDOW_S = 5.0
_GRID_S = 0.1


@dataclass(frozen=True, slots=True)
class Result:
    """A policy on one workload, over all seeds.

    goodput: expected tokens a second, mean of the seeds. drawn: as the dice fell.
    worst_window: the least ratio to plain decoding over any WINDOW_S of any seed.
    """

    goodput: float
    drawn: float
    worst_window: float
    switches_per_minute: float
    probes_per_minute: float

    def as_body(self) -> dict[str, float]:
        """Rounded, for JSON."""
        return {
            "tokens_per_s": round(self.goodput, 3),
            "tokens_per_s_drawn": round(self.drawn, 3),
            "worst_5s_of_plain": round(self.worst_window, 4),
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
    plain = [fixed_tokens(workload, seed, Tier()) for seed in seeds]
    fixed = {
        sentence(tier): statistics.fmean(
            fixed_tokens(workload, seed, tier)(workload.seconds) / workload.seconds
            for seed in seeds
        )
        for tier in workload.fixed
    }
    return Compared(
        workload,
        statistics.fmean(tokens(workload.seconds) for tokens in plain) / workload.seconds,
        fixed,
        _result(workload, seeds, plain, lambda: Field(load("default")), peers=True),
        _result(workload, seeds, plain, lambda: Goodput(DEADLINE_S), peers=False),
    )


def _result(
    workload: Workload,
    seeds: Sequence[int],
    plain: Sequence[Callable[[float], float]],
    policy: Callable[[], Policy],
    *,
    peers: bool,
) -> Result:
    tracks = [run(workload, seed, policy(), peers=peers) for seed in seeds]
    minutes = sum(track.times[-1] for track in tracks) / 60
    return Result(
        statistics.fmean(track.expected[-1] / track.times[-1] for track in tracks),
        statistics.fmean(track.drawn / track.times[-1] for track in tracks),
        min(worst_window(track, tokens) for track, tokens in zip(tracks, plain, strict=True)),
        sum(track.switches for track in tracks) / minutes,
        sum(track.probes for track in tracks) / minutes,
    )


def worst_window(track: Track, plain: Callable[[float], float]) -> float:
    """The least ratio of a run to plain decoding over any WINDOW_S of it."""
    end = track.times[-1]
    if end < WINDOW_S:
        return 1.0
    grid = np.arange(0.0, end - WINDOW_S, _GRID_S)
    ours = np.interp(grid + WINDOW_S, track.times, track.expected) - np.interp(
        grid, track.times, track.expected
    )
    knots = np.arange(0.0, end + _GRID_S, _GRID_S)
    known = np.array([plain(float(at)) for at in knots])
    theirs = np.interp(grid + WINDOW_S, knots, known) - np.interp(grid, knots, known)
    return float((ours / theirs).min())


def compare_all(
    num_seeds: int, names: Sequence[str] = (), told: Callable[[Compared], None] | None = None
) -> list[Compared]:
    """All workloads, or those named; `told` hears of each as it is done."""
    found = []
    for workload in WORKLOADS:
        if names and workload.name not in names:
            continue
        compared = compare(workload, range(1, num_seeds + 1))
        found.append(compared)
        if told is not None:
            told(compared)
    return found
