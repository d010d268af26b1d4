"""Cuts candidate trees so that a crowded step stays on the cheap side of the verify cost curve.

Every row of a step costs all its sessions time, and a node deep in a tree, or a last sibling, is
rarely accepted. With several sessions in a step the least promising nodes go, as long as the tokens
a second that the step is expected to commit go up; where no node is worth its row, the step decodes
plainly. Both sides are measured: seconds by rows of past steps, acceptance by depth and rank of
past trees, and how each session compares with that. Knows trees and times; knows no text, and can
change none: a tree that is cut commits fewer tokens, never others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from graft.common.tree import Tree

_LEAST_GAIN = 1.05
_LEAST_STEPS = 8
_TIME_SHARE = 0.2
_KEEP_SHARE = 0.98
_PROBE_ROUNDS = 16
_SESSION_ROUNDS = 8.0
_MAX_DEPTH = 12
_MAX_RANK = 3
_PRIOR_FIRST = (1.2, 2.0)
_PRIOR_OTHER = (0.2, 2.0)


class CostCurve:
    """Seconds of a step by its rows, from steps that ran. Never falls as rows grow."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self.num_steps = 0

    @property
    def known(self) -> bool:
        """True when steps of different sizes were seen often enough to compare them."""
        return self.num_steps >= _LEAST_STEPS and len(self._seconds) >= 2

    def add(self, num_rows: int, seconds: float) -> None:
        """Takes the time of one step."""
        self.num_steps += 1
        place = _bucket(num_rows)
        former = self._seconds.get(place)
        self._seconds[place] = (
            seconds if former is None else former + _TIME_SHARE * (seconds - former)
        )

    def at(self, num_rows: int) -> float:
        """Seconds that a step of so many rows takes; on a straight line between known sizes."""
        points: list[tuple[int, float]] = []
        for rows, seconds in sorted(self._seconds.items()):
            points.append((rows, max(seconds, points[-1][1] if points else 0.0)))
        below = [point for point in points if point[0] <= num_rows]
        above = [point for point in points if point[0] > num_rows]
        if not below:
            return above[0][1]
        if not above and len(below) == 1:
            return below[0][1]
        (left, low), (right, high) = (below[-1], above[0]) if above else (below[-2], below[-1])
        return low + (high - low) * (num_rows - left) / (right - left)


class Survival:
    """How often a child is what the target chose, once its parent was, by depth and rank."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], tuple[float, float]] = {}

    def at(self, depth: int, rank: int) -> float:
        """The share of such children that were chosen, a guess before any was seen."""
        hits, trials = self._counts.get(_cell(depth, rank), (0.0, 0.0))
        prior_hits, prior_trials = _PRIOR_FIRST if rank == 0 else _PRIOR_OTHER
        return (hits + prior_hits) / (trials + prior_trials)

    def add(self, depth: int, rank: int, chosen: bool) -> None:
        """Takes one child of a node that was accepted."""
        cell = _cell(depth, rank)
        hits, trials = self._counts.get(cell, (0.0, 0.0))
        self._counts[cell] = (_KEEP_SHARE * hits + chosen, _KEEP_SHARE * trials + 1.0)


class VerifyBudget:
    """Decides how many nodes of each tree a step runs."""

    def __init__(self) -> None:
        self.cost = CostCurve()
        self.survival = Survival()
        self._fortune: dict[int, tuple[float, float]] = {}
        self._idle_rounds: dict[int, int] = {}

    def timed(self, num_rows: int, seconds: float) -> None:
        """A step of rounds alone took this long."""
        self.cost.add(num_rows, seconds)

    def walked(self, session_id: int, tree: Tree, accepted: Sequence[int]) -> None:
        """A session's tree was verified; `accepted` are the nodes of its path, the root first."""
        if tree.num_nodes == 1 or not accepted:
            return
        path = set(accepted)
        expected = sum(self._values(tree, 1.0)[1:])
        places = zip(tree.parent.tolist(), tree.depth.tolist(), _ranks(tree), strict=True)
        for node, (parent, depth, rank) in enumerate(places):
            if parent in path:
                self.survival.add(depth, rank, node in path)
        got, due = self._fortune.get(session_id, (_SESSION_ROUNDS, _SESSION_ROUNDS))
        keep = 1.0 - 1.0 / _SESSION_ROUNDS
        self._fortune[session_id] = (keep * got + len(path) - 1, keep * due + expected)

    def forget(self, session_id: int) -> None:
        """The session is over."""
        self._fortune.pop(session_id, None)
        self._idle_rounds.pop(session_id, None)

    def keep(self, session_ids: Sequence[int], trees: Sequence[Tree]) -> list[int]:
        """How many nodes of each tree to run, root included; nodes go from the end of preorder.

        A session alone keeps what its tier asked for. One whose drafts are never worth a row still
        gets one every so often, so that better times are noticed.
        """
        wanted = [tree.num_nodes for tree in trees]
        if len(trees) < 2 or not self.cost.known:
            return wanted
        kept = self._best(session_ids, trees)
        for place, session_id in enumerate(session_ids):
            if kept[place] > 1 or wanted[place] == 1:
                self._idle_rounds.pop(session_id, None)
                continue
            idle = self._idle_rounds.get(session_id, 0) + 1
            if idle >= _PROBE_ROUNDS:
                kept[place], idle = min(2, wanted[place]), 0
            self._idle_rounds[session_id] = idle
        return kept

    def _best(self, session_ids: Sequence[int], trees: Sequence[Tree]) -> list[int]:
        """The cut with the most expected tokens a second; none when it gains too little."""
        values = [
            self._values(tree, self._factor(session_id))
            for session_id, tree in zip(session_ids, trees, strict=True)
        ]
        kept = [1] * len(trees)
        rows, tokens = len(trees), float(len(trees))
        best_rate, best = tokens / self.cost.at(rows), [*kept]
        while True:
            block = max(
                (
                    found
                    for place, line in enumerate(values)
                    if (found := _next_block(place, line, kept[place])) is not None
                ),
                default=None,
            )
            if block is None:
                break
            _, place, stop = block
            tokens += sum(values[place][kept[place] : stop])
            rows += stop - kept[place]
            kept[place] = stop
            rate = tokens / self.cost.at(rows)
            if rate > best_rate:
                best_rate, best = rate, [*kept]
        whole_rate = tokens / self.cost.at(rows)
        return best if best_rate >= _LEAST_GAIN * whole_rate else kept

    def _factor(self, session_id: int) -> float:
        got, due = self._fortune.get(session_id, (1.0, 1.0))
        return max(0.05, got / due) if due > 0 else 1.0

    def _values(self, tree: Tree, factor: float) -> list[float]:
        """[num_nodes]: how likely each node is accepted; 1 for the root."""
        values = [1.0]
        places = zip(tree.parent.tolist(), tree.depth.tolist(), _ranks(tree), strict=True)
        for parent, depth, rank in islice(places, 1, None):
            share = min(1.0, factor * self.survival.at(depth, rank))
            values.append(values[parent] * share)
        return values


def _next_block(place: int, values: Sequence[float], start: int) -> tuple[float, int, int] | None:
    """(tokens a row, place, stop) of the nodes from `start` on that are best taken together."""
    if start >= len(values):
        return None
    total, best = 0.0, (-1.0, place, start + 1)
    for stop in range(start + 1, len(values) + 1):
        total += values[stop - 1]
        rate = total / (stop - start)
        if rate > best[0]:
            best = (rate, place, stop)
    return best


def _ranks(tree: Tree) -> list[int]:
    """[num_nodes]: place of each node among its siblings."""
    ranks = [0] * tree.num_nodes
    for node, sibling in enumerate(tree.next_sibling.tolist()):
        if sibling >= 0:
            ranks[sibling] = ranks[node] + 1
    return ranks


def _cell(depth: int, rank: int) -> tuple[int, int]:
    return min(depth, _MAX_DEPTH), min(rank, _MAX_RANK)


def _bucket(num_rows: int) -> int:
    """Sizes within an eighth of each other count as one."""
    step = 1 << max(0, num_rows.bit_length() - 4)
    return num_rows // step * step
