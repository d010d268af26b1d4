"""What rounds cost: verify time by rows and context, draft time by depth, the wait for a tree.

Estimates from what commits tell, nothing else. Knows seconds; knows no acceptance and no policy.
"""

from __future__ import annotations

from bisect import bisect_left

from graft.common.tier import Tier
from graft.gateway.tiers.gauge import Gauge
from graft.gateway.tiers.seen import EMPTY, LATE, Seen

_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512)
_SHAPE_SLOPE = 0.02
_FLOOR_S = 0.001
_CONTEXT_STEP = 512
_HIT_PRIOR = 0.6
_LATE_SHARE = 0.95
_LATE_FACTOR = 2.0
_SURPRISE = 0.15
_FIRST_MOST = 1.6
_FACTOR_SHARE = 0.02


class VerifyTable:
    """Forward time over rows, and a factor for each range of contexts; gaps are interpolated."""

    def __init__(self) -> None:
        self._table: dict[int, Gauge] = {}
        self._factors: dict[int, float] = {}
        self._curves: dict[tuple[int, int, int], list[float]] = {}
        self.surprised = False

    def add(self, rows: int, context: int, seconds: float) -> bool:
        """Takes a measurement; True when an estimate jumped. One may be chance, so that a first
        one that is not as guessed only sets `surprised`.
        """
        self.surprised = False
        table, span = self._table, _range_of(context)
        factor = self._factors.setdefault(span, self._factor(span))
        bucket = _ROWS[min(bisect_left(_ROWS, rows), len(_ROWS) - 1)]
        gauge = table.get(bucket)
        level_s = seconds / factor
        if gauge is None:
            guessed = _interpolated(table, bucket) if table else level_s
            gauge = table[bucket] = Gauge(_FLOOR_S)
            gauge.add(min(level_s, _FIRST_MOST * guessed) if len(table) > 2 else level_s)
            self._curves.clear()
            self.surprised = abs(level_s - guessed) > _SURPRISE * guessed
            return False
        before = gauge.get(level_s)
        if before > 0:
            ratio = min(max(level_s / before, 0.5), 2.0)
            self._factors[span] = factor * (1.0 + _FACTOR_SHARE * (ratio - 1.0))
        jumped = gauge.add(level_s)
        if abs(gauge.get(0.0) - before) > 0.01 * before:
            self._curves.clear()
        return jumped

    def curve(self, num_sessions: int, max_nodes: int, context: int) -> list[float] | None:
        """Seconds of a step in which each session has 0 (unused), 1, .. `max_nodes` rows.

        None before the first measurement.
        """
        if not self._table:
            return None
        key = (num_sessions, max_nodes, _range_of(context))
        curve = self._curves.get(key)
        if curve is None:
            factor = self._factor(key[2])
            curve = self._curves[key] = [
                factor * _interpolated(self._table, max(1, num_sessions * nodes))
                for nodes in range(max_nodes + 1)
            ]
        return curve

    def _factor(self, span: int) -> float:
        """That of a range, or of the nearest one known."""
        if not self._factors:
            return 1.0
        return self._factors[min(self._factors, key=lambda known: (abs(known - span), known))]

    def as_body(self) -> dict[str, object]:
        """Milliseconds by rows, and factors by context, for people."""
        return {
            "ms_by_rows": {
                str(rows): round(gauge.get(0.0) * 1e3, 3)
                for rows, gauge in sorted(self._table.items())
            },
            "factor_by_context": {
                str(span * _CONTEXT_STEP): round(factor, 3)
                for span, factor in sorted(self._factors.items())
            },
        }


def _range_of(context: int) -> int:
    return min(context // _CONTEXT_STEP, 7)


def _interpolated(table: dict[int, Gauge], rows: int) -> float:
    known = sorted(table)
    at = bisect_left(known, rows)
    if at < len(known) and known[at] == rows:
        return table[rows].get(0.0)
    if at == 0:
        return table[known[0]].get(0.0)  # hardly less, until it is known
    low = known[at - 1]
    low_s = table[low].get(0.0)
    if at == len(known):
        slope = low_s * _SHAPE_SLOPE
        if at >= 2:
            former = known[at - 2]
            slope = max(slope, (low_s - table[former].get(0.0)) / (low - former))
        return low_s + slope * (rows - low)
    high = known[at]
    return low_s + (table[high].get(0.0) - low_s) * (rows - low) / (high - low)


class DraftCosts:
    """Draft time and wait of one proposer at one verify replica."""

    def __init__(self) -> None:
        self.wire = Gauge(_FLOOR_S)
        self.hidden = Gauge(_FLOOR_S)
        self._unit = Gauge(_FLOOR_S / 4)
        self._lates = 0

    @property
    def known(self) -> bool:
        """True once a tree of it has been waited for."""
        return self._unit.num_seen > 0

    def add(self, seen: Seen, tier: Tier, *, believe: bool = False) -> bool:
        """Takes a round with a tree, or one whose tree was empty; True when an estimate jumped."""
        depth = seen.depth or 1
        jumped = False
        self._lates = 0
        if not seen.missing:
            jumped = self._unit.add(seen.draft_s / _steps(depth, tier.topk), believe=believe)
        if tier.lookahead:
            return self.hidden.add(seen.wait_s, believe=believe) or jumped
        return self.wire.add(max(0.0, seen.wait_s - seen.draft_s), believe=believe) or jumped

    def add_late(self, tier: Tier, deadline_s: float) -> bool:
        """A tree did not come in `deadline_s`; after two of them, drafting takes at least that."""
        self._lates += 1
        if self._lates < 2:
            return False
        least = max(deadline_s - self.wire.get(0.0), 0.5 * deadline_s)
        if self.draft_s(tier.num_steps, tier.topk) < least:
            self._unit.set(_LATE_FACTOR * least / _steps(tier.num_steps, tier.topk))
            return True
        return False

    def draft_s(self, depth: int, topk: int) -> float:
        """Time to grow a tree."""
        return self._unit.get(0.0) * _steps(depth, topk)

    def wait_s(self, drafting_s: float, forward_s: float, *, lookahead: bool) -> float:
        """From a commit until the next tree is there, while forwards take `forward_s`."""
        waited = drafting_s + self.wire.get(0.0)
        if not lookahead:
            return waited
        guessed = (1 - _HIT_PRIOR) * waited + _HIT_PRIOR * max(0.0, waited - forward_s)
        return self.hidden.get(guessed)

    def as_body(self) -> dict[str, float]:
        """Milliseconds, for people."""
        return {
            "draft_step_ms": round(self._unit.get(0.0) * 1e3, 3),
            "wire_ms": round(self.wire.get(0.0) * 1e3, 3),
            "wait_with_lookahead_ms": round(self.hidden.get(0.0) * 1e3, 3),
        }


def _steps(depth: int, topk: int) -> float:
    """Draft time in steps of a chain; the first one has an overhead, width costs a little."""
    return (depth + 0.5) * (1.0 + 0.1 * (topk - 1))


class Costs:
    """All costs at one verify replica.

    plain_seen_at: when a round without drafts was last timed.
    wait_jumped: the tree of the round taken last took another time than was thought.
    """

    def __init__(self, deadline_s: float) -> None:
        self.plain_seen_at = -1e9
        self.wait_jumped = False
        self.deadline_s = deadline_s
        self.verify = VerifyTable()
        self.drafts: dict[str, DraftCosts] = {}
        self.beside = Gauge(_FLOOR_S)

    def draft(self, proposer: str) -> DraftCosts:
        """The costs of a proposer."""
        found = self.drafts.get(proposer)
        if found is None:
            found = self.drafts[proposer] = DraftCosts()
        return found

    @property
    def plain_known(self) -> bool:
        """True once a round without drafts was timed."""
        return self.plain_seen_at >= 0

    def add(
        self, seen: Seen, tier: Tier | None, *, believe: bool = False, crowded: bool = False
    ) -> bool:
        """Takes a round drafted at `tier`, None for one that no drafter had a part in.

        True when an estimate jumped, so that a decision is due.

        crowded: there was no tree, but a drafter at work beside the forward, perhaps on the same
        cores: the forward's time says nothing about plain decoding, once that is known.
        """
        self.beside.add(seen.queue_s + seen.choice_s)
        jumped = False
        self.verify.surprised = False
        if not crowded or not self.plain_known:
            jumped = self.verify.add(seen.num_rows, seen.context, seen.forward_s)
        self.wait_jumped = False
        if tier is None:
            return jumped
        if seen.missing == LATE:
            self.wait_jumped = self.draft(tier.proposer).add_late(tier, self.deadline_s)
        elif not seen.missing or seen.missing == EMPTY:
            self.wait_jumped = self.draft(tier.proposer).add(seen, tier, believe=believe)
        return jumped or self.wait_jumped

    def too_late(self, wait_s: float) -> bool:
        """True when a tree that takes so long is not likely to come before the deadline."""
        return wait_s > _LATE_SHARE * self.deadline_s

    def as_body(self) -> dict[str, object]:
        """For people."""
        return {
            "verify": self.verify.as_body(),
            "drafts": {name: draft.as_body() for name, draft in sorted(self.drafts.items())},
            "queue_and_choice_ms": round(self.beside.get(0.0) * 1e3, 3),
        }
