"""Which outcomes of a session's next rounds are prepared, and which of them came true.

A state machine of one session: trees and outcomes in, the next outcomes worth a tree out. A
prepared outcome may lie several rounds ahead: its own tree has outcomes too, and under one budget
the likeliest go first, whatever their round. Knows credits and probabilities; knows no proposer.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from graft.common.tree import Tree
from graft.draft.credits import Credits
from graft.draft.foresee import MOST_LEAD, Trust, outcomes
from graft.draft.proposers.base import Seat

_LEAST_LOG = math.log(0.004)
_MAX_CANDIDATES = 256
_COVERAGE = 0.8
_COVERAGE_SHARE = 0.05
_BYTES_A_TOKEN = 170.0
_MOST_BYTES = 2048.0
_LIKELY_SHARE = 0.25

Path = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Ahead:
    """One prefix: the committed one followed by `tokens`.

    log: of the probability that verify comes to stand there. seat: a proposer's seat that stands
    there; None before it was made. tree: what was pushed for it; None when there was nothing.
    old: a commit came since that nobody foresaw. It may still come true, by another way.
    lead, sent: rounds that end before one starts there, by now and when its tree was sent.
    """

    tokens: Path
    log: float
    seat: Seat | None = None
    tree: Tree | None = None
    old: bool = False
    lead: int = 0
    sent: int = 0

    @property
    def num_drafted(self) -> int:
        """Drafted nodes of its tree."""
        return 0 if self.tree is None else self.tree.num_nodes - 1


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """An outcome nobody has worked on. parent: the prefix whose round it may end."""

    tokens: Path
    log: float
    parent: Ahead
    lead: int = 1


@dataclass(frozen=True, slots=True)
class Moved:
    """What a commit made of the prepared outcomes.

    hit: one of them is the committed prefix now, and verify has what was pushed for it.
    dropped: those that can no longer come true.
    """

    hit: bool
    dropped: tuple[Ahead, ...]


class Outlook:
    """The prepared outcomes of one session; `root` is the committed prefix itself.

    budget: the most outcomes that are prepared at a time.
    """

    def __init__(self, budget: int, credits: Credits, trust: Trust | None = None) -> None:
        """trust: in what the proposer foresees; sessions share it."""
        self._trust = trust or Trust()
        self.budget = budget
        self.credits = credits
        self.root = Ahead((), 0.0)
        self.seen = False
        self.adrift = False
        self._coverage = _COVERAGE
        self._bytes_left = _MOST_BYTES
        self._prepared: dict[Path, Ahead] = {}
        self._candidates: dict[Path, Candidate] = {}

    @property
    def all(self) -> list[Ahead]:
        """The root and everything prepared."""
        return [self.root, *self._prepared.values()]

    @property
    def num_prepared(self) -> int:
        """Outcomes that are prepared, without old ones."""
        return sum(not ahead.old for ahead in self._prepared.values())

    @property
    def wants_work(self) -> bool:
        """True when another outcome is worth a tree, or the root was not looked at."""
        return not self.seen or (self._room > 0 and bool(self.best(1)))

    def restart(self, tree: Tree | None) -> None:
        """The proposer has answered the committed prefix with `tree`; what is prepared stays."""
        self.root.tree = tree
        self.seen = False
        self._candidates.clear()
        for ahead in self._prepared.values():
            ahead.old = True

    def renew(self) -> None:
        """The root is to be looked at anew; outcomes of prepared prefixes stay."""
        self.seen = False
        self._candidates = {
            path: one for path, one in self._candidates.items() if one.parent is not self.root
        }

    def saw(self, ahead: Ahead, wide: Tree | None) -> None:
        """Takes what may follow `ahead` from a wide tree that grows from it."""
        if ahead is self.root:
            self.seen = True
        if wide is None:
            return
        found = outcomes(ahead.tree, wide, self._trust, self._late(ahead))
        scale = ahead.log + math.log(self._coverage)
        for outcome in found:
            tokens, log = (*ahead.tokens, *outcome.tokens), scale + outcome.log
            known = self._candidates.get(tokens)
            if tokens in self._prepared:
                continue
            if known is None or known.log < log:
                lead = min(MOST_LEAD, ahead.lead + outcome.rounds)
                self._candidates[tokens] = Candidate(tokens, log, ahead, lead)
        if len(self._candidates) > _MAX_CANDIDATES:
            best = heapq.nlargest(_MAX_CANDIDATES // 2, self._candidates.values(), key=self._use)
            self._candidates = {one.tokens: one for one in best}

    def _late(self, ahead: Ahead) -> bool:
        """True where verify will most likely have gone on before the tree for `ahead` is there."""
        return self.adrift and (not ahead.lead or self._trust.in_time(ahead.lead) < 0.5)

    def best(self, count: int) -> list[Candidate]:
        """Up to `count` outcomes to prepare next, within budget and credit.

        The most useful goes first: likely, and far enough for its tree to come in time. Others go
        along while they are nearly as useful, since a batch takes longer than one alone.
        """
        room = max(0, min(self._room, count))
        likely = (one for one in self._candidates.values() if one.log >= _LEAST_LOG)
        found = heapq.nsmallest(room, likely, key=lambda one: (-self._use(one), len(one.tokens)))
        least = self._use(found[0]) + math.log(_LIKELY_SHARE) if found else 0.0
        return [one for one in found if self._use(one) >= least]

    def _use(self, candidate: Candidate) -> float:
        """Log of the chance that a tree for it is there in time and is used."""
        return candidate.log + math.log(self._trust.in_time(candidate.lead))

    @property
    def _room(self) -> int:
        """Outcomes that may be prepared beside those that are."""
        if self._bytes_left <= 0:
            return 0
        held = self.credits.num_held
        return min(self.budget - self.num_prepared, self.credits.max_trees - held)

    def skip(self, candidate: Candidate) -> None:
        """The outcome cannot be prepared."""
        self._candidates.pop(candidate.tokens, None)

    def prepared(
        self, candidate: Candidate, seat: Seat, tree: Tree | None, num_bytes: int = 0
    ) -> Ahead:
        """The outcome has been prepared and pushed, in a message of `num_bytes`."""
        self._bytes_left -= num_bytes
        self._candidates.pop(candidate.tokens, None)
        lead = candidate.lead
        ahead = Ahead(candidate.tokens, candidate.log, seat, tree, lead=lead, sent=lead)
        self._prepared[candidate.tokens] = ahead
        return ahead

    def refused(self, prefix_length: int, committed_length: int) -> tuple[Ahead, ...]:
        """Verify did not keep a tree for a prefix of this length; which one, it does not say."""
        self.credits.refused(prefix_length)
        size = prefix_length - committed_length
        return tuple(self._prepared.pop(path) for path in [*self._prepared] if len(path) == size)

    def committed(self, tokens: Path, name: tuple[int, int], num_drafted: int) -> Moved:
        """Moves on to the committed prefix of `name`, in place.

        num_drafted: nodes of the round's tree; a round without one, though there was one to use,
        shows that verify does not wait for this drafter.
        """
        size = len(tokens)
        pushed = self.root.tree
        self.credits.moved(*name)
        self._bytes_left = min(_MOST_BYTES, self._bytes_left + _BYTES_A_TOKEN * size)
        new_root = self._prepared.pop(tokens, None)
        foreseen = new_root is not None or tokens in self._candidates
        self._coverage += _COVERAGE_SHARE * (max(0.1, float(foreseen)) - self._coverage)
        if pushed is not None:
            self._learn(pushed, tokens, num_drafted > 0)
        gone = [path for path in self._prepared if path[:size] != tokens]
        dropped = [self._prepared.pop(path) for path in gone]
        shift = new_root.log if new_root is not None else self._shift()
        dropped.append(self.root)
        if new_root is not None:
            self.root = new_root
        else:
            self.root = Ahead((), 0.0)
        kept = [*self._prepared.values()]
        for ahead in kept:
            ahead.tokens, ahead.log = ahead.tokens[size:], min(0.0, ahead.log - shift)
            ahead.lead = max(1, ahead.lead - 1)
        self._prepared = {ahead.tokens: ahead for ahead in kept}
        self.root.tokens, self.root.log, self.root.lead = (), 0.0, 0
        alive = {id(ahead) for ahead in self.all}
        self._candidates = {
            one.tokens[size:]: Candidate(
                one.tokens[size:], min(0.0, one.log - shift), one.parent, max(1, one.lead - 1)
            )
            for one in self._candidates.values()
            if one.tokens[:size] == tokens and len(one.tokens) > size and id(one.parent) in alive
        }
        self.seen = new_root is not None
        return Moved(new_root is not None, tuple(dropped))

    def _learn(self, pushed: Tree, tokens: Path, used: bool) -> None:
        """Takes whether the tree for the root was there when its round began, in place."""
        sent = self.root.sent
        if used:
            self._trust.learn(pushed, tokens)
        if sent:
            self._trust.judge(sent, used)
        if not used or not sent:
            # A tree that was sent only after the commit tells whether verify waits for such.
            self.adrift = not used

    def _shift(self) -> float:
        """What the logs of what is left are measured from, when nobody foresaw the commit."""
        return max((ahead.log for ahead in self._prepared.values()), default=0.0)
