"""How far drafts survive: chance of each depth and rank, of one proposer.

Counts that fade with every round. Knows rounds; knows no cost and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from graft.gateway.tiers.seen import Seen

MAX_DEPTH = 16
MAX_WIDTH = 4
_FIRST = 0.5
_DEEPER = 0.97
_HAZARDS = (0.0, 0.35, 0.2, 0.15)
_OWN_PRIOR = 5.0
_DEPTH_PRIOR = 2.0
_RANK_PRIOR = 8.0
_RENORMALISE = 1e12
_TRUST_FALLEN = 0.5
_FALLEN_TO = 0.5


@dataclass(frozen=True, slots=True)
class Chances:
    """What a tree may hope for.

    first: chance that the first child of an accepted node is right, by depth from 1.
    hazards: chance of a child of rank r when those before it are wrong; unused for rank 0.
    offered: share of rounds in which there is a tree at all.
    """

    first: Sequence[float]
    hazards: Sequence[float]
    offered: float


class Survival:
    """Fading counts. `half_life` is in rounds; `crowd` gives the prior, where there is one."""

    def __init__(self, half_life: float, crowd: Survival | None = None) -> None:
        self._grow = 2.0 ** (1.0 / half_life)
        self._crowd = crowd
        self._weight = 1.0
        self._trust = 1.0
        self._fallen = 1.0
        self.num_rounds = 0
        self._clear()

    def _clear(self) -> None:
        self._hits = [0.0] * (MAX_DEPTH + 1)
        self._tries = [0.0] * (MAX_DEPTH + 1)
        self._rank_hits = [0.0] * MAX_WIDTH
        self._rank_tries = [0.0] * MAX_WIDTH
        self._trees = 0.0
        self._rounds = 0.0

    def add(self, seen: Seen, times: float = 1.0) -> None:
        """Takes a round of this proposer: with a tree, or with an empty one."""
        self.num_rounds += 1
        self._weight *= self._grow
        weight = self._weight * times
        self._rounds += weight
        if not seen.num_drafted:
            return
        self._trees += weight
        ranks = seen.ranks
        for place in range(min(seen.accepted, MAX_DEPTH)):
            rank = ranks[place] if place < len(ranks) else 0
            self._tries[place + 1] += weight
            if rank == 0:
                self._hits[place + 1] += weight
            else:
                self._rank(rank, weight, hit=True)
        end = seen.accepted + 1
        refused = seen.rejected_children if ranks or seen.rejected_children else 1
        if refused and seen.accepted < seen.depth and end <= MAX_DEPTH:
            self._tries[end] += weight
            self._rank(refused - 1, weight, hit=False)
        if self._weight > _RENORMALISE:
            self._rescale(1.0 / self._weight)
            self._weight = 1.0

    def _rank(self, last: int, weight: float, *, hit: bool) -> None:
        """Ranks 1 to `last` were tried; the last one was right, or none."""
        for rank in range(1, min(last, MAX_WIDTH - 1) + 1):
            self._rank_tries[rank] += weight
            if hit and rank == last:
                self._rank_hits[rank] += weight

    def fade(self, share: float) -> None:
        """Forgets all but a share of what was seen; new rounds then count for more."""
        self._rescale(share)

    def fell(self) -> None:
        """From now on this session is thought to have fallen from the crowd's chances."""
        self._trust, self._fallen = _TRUST_FALLEN, _FALLEN_TO

    def rose(self) -> None:
        """From now on the crowd's chances say little about this session."""
        self._trust, self._fallen = _TRUST_FALLEN, 1.0

    def _rescale(self, factor: float) -> None:
        for counts in (self._hits, self._tries, self._rank_hits, self._rank_tries):
            counts[:] = [count * factor for count in counts]
        self._trees *= factor
        self._rounds *= factor

    def seen_at(self, depth: int) -> float:
        """Rounds' worth of evidence at a depth, after fading."""
        return self._tries[depth] / self._weight

    def chances(self, max_depth: int, *, leaning: float = 0.0) -> Chances:
        """The estimates down to `max_depth`.

        leaning: how many standard deviations of the first depth's chance all chances lie off.
        """
        weight = self._weight
        crowd = None if self._crowd is None else self._crowd.chances(max_depth)
        first: list[float] = []
        former, crowd_former = _FIRST, _FIRST
        for depth in range(1, min(max_depth, MAX_DEPTH) + 1):
            if crowd is None:
                prior = former * _DEEPER if depth > 1 else former
                strength = _DEPTH_PRIOR * weight
            else:
                prior = crowd.first[depth - 1] * (self._fallen if depth == 1 else 1.0)
                if depth > 1:
                    prior = min(0.98, prior * former / crowd_former)
                crowd_former = crowd.first[depth - 1]
                strength = _OWN_PRIOR * self._trust * weight
            former = (prior * strength + self._hits[depth]) / (strength + self._tries[depth])
            former = min(max(former, 0.01), 0.99)
            first.append(former)
        if leaning and first:
            seen = self._tries[1] / weight + _OWN_PRIOR
            odds = math.exp(leaning / math.sqrt(seen * first[0] * (1.0 - first[0])))
            first = [odds * chance / (1.0 + (odds - 1.0) * chance) for chance in first]
        hazards = [0.0] * MAX_WIDTH
        for rank in range(1, MAX_WIDTH):
            prior = _HAZARDS[rank] if crowd is None else crowd.hazards[rank]
            strength = _RANK_PRIOR * weight
            hazards[rank] = (prior * strength + self._rank_hits[rank]) / (
                strength + self._rank_tries[rank]
            )
        offered = 1.0 if crowd is None else crowd.offered
        strength = _DEPTH_PRIOR * weight
        offered = (offered * strength + self._trees) / (strength + self._rounds)
        return Chances(first, hazards, offered)
