"""Has proposers work ahead: prepares the likely outcomes of every session, one slice at a time.

A slice is one batch of one proposer, so that commits never wait long for it. What may come is made
on branches: the seat that follows the committed prefix only ever follows that. Knows no stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from graft.common import log
from graft.common.tree import TreeRefused
from graft.draft.credits import Credits
from graft.draft.foresee import Trust, widened
from graft.draft.lookahead import Ahead, Candidate, Outlook
from graft.draft.metrics import DraftMetrics
from graft.draft.predicted import Predictions
from graft.draft.proposers.base import Foreseen, Foreseer, Proposer, Seat
from graft.draft.sendable import messages
from graft.v1.tree_pb2 import CandidateTree

_log = log.get("prepare")

_SLICE = 4
_EMPTY_BYTES = 24


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is said of a prefix that may come: a tree, or no tree for nothing to propose."""

    key: int
    proposer: str
    prefix_length: int
    prefix_digest: int
    trees: tuple[CandidateTree, ...]


@dataclass(slots=True, eq=False)
class _Watched:
    """A session that is looked ahead of."""

    key: int
    name: str
    seat: Seat
    outlook: Outlook


class Preparer:
    """The outlooks of all sessions. Belongs to the engine's thread."""

    def __init__(
        self, proposers: Mapping[str, Proposer], metrics: DraftMetrics, predictions: Predictions
    ) -> None:
        self._foreseers = {
            name: one
            for name, one in proposers.items()
            if one.describe().foresees and isinstance(one, Foreseer)
        }
        self._metrics = metrics
        self._predictions = predictions
        self._trust = {name: Trust() for name in proposers}
        self._watched: dict[int, _Watched] = {}

    @property
    def wants_work(self) -> bool:
        """True when some outcome is worth a tree."""
        return any(one.outlook.wants_work for one in self._watched.values())

    def foresees(self, name: str, seat: Seat, max_trees: int) -> bool:
        """True when the session is looked ahead of: its tier, rule and proposer want it."""
        able = name in self._foreseers and not seat.mirror.sampling.compares_probs
        return able and min(seat.tier.lookahead, max_trees - 1) > 0

    def propose(self, name: str, seats: Sequence[Seat]) -> list[Foreseen]:
        """What the proposer makes of committed prefixes, and what it sees behind it."""
        found = self._foreseers[name].foresee(seats)
        return [self._blended(seat, one) for seat, one in zip(seats, found, strict=True)]

    def answered(
        self, key: int, name: str, seat: Seat, seen: Foreseen | None, max_trees: int
    ) -> None:
        """A committed prefix was answered, and verify is being sent `seen.tree`.

        seen: None where the session is not looked ahead of.
        """
        if seen is None:
            self.forget(key)
            return
        prefix = seat.mirror.prefix
        budget = min(seat.tier.lookahead, max_trees - 1)
        watched = self._watched.get(key)
        if watched is None or watched.seat is not seat:
            self.forget(key)
            credits = Credits(max_trees, (len(prefix), prefix.digest))
            watched = _Watched(key, name, seat, Outlook(budget, credits, self._trust[name]))
            self._watched[key] = watched
        outlook = watched.outlook
        outlook.budget = budget
        outlook.credits.take(len(prefix), prefix.digest)
        outlook.restart(seen.tree)
        outlook.root.seat = seat
        outlook.saw(outlook.root, seen.wide)

    def committed(self, key: int, tokens: tuple[int, ...], num_drafted: int) -> bool:
        """Moves on to the committed prefix; True when verify has what was prepared for it."""
        watched = self._watched.get(key)
        if watched is None:
            return False
        prefix = watched.seat.mirror.prefix
        name = (len(prefix), prefix.digest)
        moved = watched.outlook.committed(tokens, name, num_drafted)
        self._metrics.lookahead_outcomes.labels("hit" if moved.hit else "miss").inc()
        self._drop(watched, moved.dropped)
        if moved.hit:
            self._stand(watched)
        return moved.hit

    def _stand(self, watched: _Watched) -> None:
        """Has the session's own seat take over from the branch that came true."""
        root = watched.outlook.root
        branch, root.seat = root.seat, None
        if branch is None:
            return
        foreseer = self._foreseers[watched.name]
        if foreseer.adopt(watched.seat, branch):
            root.seat = watched.seat
        else:  # what the target made of the prefix is known now; guesses go on from that
            watched.outlook.renew()
        foreseer.close(branch)

    def refused(self, key: int, prefix_length: int) -> None:
        """Verify did not keep a tree for a prefix of this length."""
        watched = self._watched.get(key)
        if watched is not None:
            committed = len(watched.seat.mirror.prefix)
            self._drop(watched, watched.outlook.refused(prefix_length, committed))

    def forget(self, key: int) -> None:
        """The session is over, or its seat is: to be called before the seat is closed."""
        watched = self._watched.pop(key, None)
        if watched is not None:
            self._drop(watched, watched.outlook.all)

    def step(self) -> list[Prepared]:
        """One slice of work; what is to be sent, the likeliest first."""
        due = [one for one in self._watched.values() if one.outlook.wants_work]
        if not due:
            return []
        name = due[0].name
        batch = [one for one in due if one.name == name]
        # Whoever has had a turn goes to the end of the line.
        for one in batch:
            self._watched[one.key] = self._watched.pop(one.key)
        try:
            return self._slice(self._foreseers[name], batch)
        except Exception as error:
            self._metrics.failures.labels(name).inc()
            _log.error("look-ahead failed", proposer=name, exc_info=error)
            for one in batch:
                self.forget(one.key)
            return []

    def _slice(self, foreseer: Foreseer, batch: Sequence[_Watched]) -> list[Prepared]:
        roots = [one for one in batch if not one.outlook.seen]
        wanted: list[tuple[_Watched, Candidate, Seat]] = []
        if not roots:
            share = max(1, _SLICE // len(batch))
            for one in batch:
                for candidate in one.outlook.best(share):
                    seat = self._branch(foreseer, candidate)
                    if seat is None:
                        one.outlook.skip(candidate)
                    else:
                        wanted.append((one, candidate, seat))
        seats = [one.seat for one in roots] + [seat for _, _, seat in wanted]
        if not seats:
            return []
        seen = self.propose(batch[0].name, seats)
        for one, found in zip(roots, seen, strict=False):
            one.outlook.root.seat = one.seat
            one.outlook.saw(one.outlook.root, found.wide)
        made = zip(wanted, seen[len(roots) :], strict=True)
        return [
            prepared
            for (one, candidate, seat), found in made
            if (prepared := self._prepared(one, candidate, seat, found)) is not None
        ]

    def _blended(self, seat: Seat, found: Foreseen) -> Foreseen:
        """What is foreseen, with what the client predicted."""
        blended, mirror = self._predictions.blended, seat.mirror
        return Foreseen(
            blended(mirror, seat.tier, found.tree), blended(mirror, widened(seat.tier), found.wide)
        )

    def _branch(self, foreseer: Foreseer, candidate: Candidate) -> Seat | None:
        parent = candidate.parent
        if parent.seat is None:
            return None
        return foreseer.branch(parent.seat, candidate.tokens[len(parent.tokens) :])

    def _prepared(
        self, one: _Watched, candidate: Candidate, seat: Seat, found: Foreseen
    ) -> Prepared | None:
        """Books and packs what was found for an outcome; None when it must not be pushed."""
        prefix, outlook = seat.mirror.prefix, one.outlook
        trees: tuple[CandidateTree, ...] = ()
        if found.tree is not None:
            try:
                # Verify can do without scores and times; of many trees most are never looked at.
                trees = messages(replace(found.tree, scores=None), seat, 0.0)
            except TreeRefused:
                self._metrics.withheld.labels("malformed").inc()
                self._foreseers[one.name].close(seat)
                outlook.skip(candidate)
                return None
        withheld = outlook.credits.take(len(prefix), prefix.digest)
        if withheld is not None:
            self._metrics.withheld.labels(withheld).inc()
            self._foreseers[one.name].close(seat)
            outlook.skip(candidate)
            return None
        num_bytes = sum(tree.ByteSize() for tree in trees) or _EMPTY_BYTES
        ahead = outlook.prepared(candidate, seat, found.tree, num_bytes)
        outlook.saw(ahead, found.wide)
        if trees:
            self._metrics.lookahead_trees.labels("pushed").inc()
            self._metrics.lookahead_nodes.labels("pushed").inc(ahead.num_drafted)
        return Prepared(one.key, one.name, len(prefix), prefix.digest, trees)

    def _drop(self, watched: _Watched, dropped: Iterable[Ahead]) -> None:
        root = watched.outlook.root
        for ahead in dropped:
            self._close(watched, ahead)
            if ahead is not root and ahead.tokens and ahead.tree is not None:
                self._metrics.lookahead_trees.labels("wasted").inc()
                self._metrics.lookahead_nodes.labels("wasted").inc(ahead.num_drafted)

    def _close(self, watched: _Watched, ahead: Ahead) -> None:
        seat, ahead.seat = ahead.seat, None
        if seat is not None and seat is not watched.seat:
            self._foreseers[watched.name].close(seat)
