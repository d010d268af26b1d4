"""How long sessions that are looked ahead of wait for a tree that is not there. Knows no tree.

Without look-ahead a drafter answers what it heard last, so the tree is worth its way there and
back. One that works ahead may be a moment behind, or may have guessed the round wrong; then a round
without a tree brings a token sooner than the tree would come, and the drafter meets the session
further on. What trees were late by, and what rounds bring, decides.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from graft.verify.shelf import PrefixName

_REMEMBERED = 12
_LEAST_KNOWN = 4
_SHARE = 0.1


class Patience:
    """What the sessions of one drafter have seen of late trees and of rounds."""

    def __init__(self) -> None:
        self._late: OrderedDict[tuple[int, PrefixName], float] = OrderedDict()
        self._with = _Rounds()
        self._without = _Rounds()
        self._tokens = self._seconds = 0.0

    def missed(self, session_id: int, name: PrefixName) -> None:
        """A turn has come, and no tree for the prefix is there."""
        if (session_id, name) not in self._late:
            self._late[session_id, name] = math.inf
            if len(self._late) > _REMEMBERED:
                self._late.popitem(last=False)

    def came(self, session_id: int, name: PrefixName, late_s: float) -> None:
        """A tree for the prefix came, so long after its turn."""
        known = self._late.get((session_id, name))
        if known is not None:
            self._late[session_id, name] = min(late_s, known)

    def ran(self, num_tokens: int, drafted: bool, step_s: float, lasted_s: float) -> None:
        """A round is over: what it committed, its step, and the time since the one before."""
        (self._with if drafted else self._without).add(num_tokens, step_s)
        self._tokens += _SHARE * (num_tokens - self._tokens)
        self._seconds += _SHARE * (lasted_s - self._seconds)

    def wait_s(self) -> float:
        """Seconds to wait, inf for as long as it takes: what brings most beside the usual rate.

        Each lateness seen is tried as the limit: trees that were late by less are waited for, all
        others are waited for in vain.
        """
        if len(self._late) < _LEAST_KNOWN or not self._with.step_s:
            return math.inf
        rate = self._tokens / self._seconds
        with_tree = self._with.tokens - rate * self._with.step_s
        plain = 1.0 - rate * (self._without.step_s or self._with.step_s)
        late = sorted(self._late.values())
        best, best_s = len(late) * plain, 0.0
        spent = 0.0
        for count, late_s in enumerate(late, 1):
            if math.isinf(late_s):
                break
            spent += late_s
            vain = len(late) - count
            gain = count * with_tree + vain * plain - rate * (spent + vain * late_s)
            if gain > best:
                best, best_s = gain, late_s
        return best_s


class _Rounds:
    """Means of rounds of one kind, the newer ones counting more."""

    def __init__(self) -> None:
        self.tokens = self.step_s = 0.0

    def add(self, num_tokens: int, step_s: float) -> None:
        share = _SHARE if self.step_s else 1.0
        self.tokens += share * (num_tokens - self.tokens)
        self.step_s += share * (step_s - self.step_s)
