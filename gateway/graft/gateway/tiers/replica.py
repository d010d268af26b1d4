"""What the sessions at one verify replica share: costs, switches and losses of late.

Knows no acceptance and makes no decision.
"""

from __future__ import annotations

from collections import deque

from graft.common.tier import Tier
from graft.gateway.tiers.costs import Costs
from graft.gateway.tiers.ledger import Ledger
from graft.gateway.tiers.starts import Starts

_BRIEF_S = 5.0
_FADES_S = 30.0


class Replica:
    """One verify replica as the sessions there have found it.

    last: the tier that a session there was given last.
    next_try_at: when a session at tier 0 there means to draft again.
    num_open: steered sessions there.
    """

    def __init__(self, deadline_s: float) -> None:
        self.costs = Costs(deadline_s)
        self.starts = Starts()
        self.last: Tier | None = None
        self.next_try_at = float("inf")
        self.num_open = 0
        self._ledger = Ledger()
        self._switched: deque[float] = deque(maxlen=256)
        self._turned: deque[tuple[float, float]] = deque(maxlen=64)

    def book(self, loss_s: float, now: float) -> None:
        """A session's round took so much longer than its tokens would have without drafts."""
        self._ledger.add(loss_s / max(1, self.num_open), now)

    def lost_s(self, now: float) -> float:
        """The worst stretch of late, of an average session."""
        return self._ledger.lost_s(now)

    def switched(self, now: float) -> None:
        """A session changed its tier."""
        self._switched.append(now)

    def turned(self, now: float) -> None:
        """A session began or ended drafting; the sooner after the last time, the more it counts."""
        weight = 0.0  # the first time is no going back and forth
        if self._turned:
            held_s = (now - self._turned[-1][0]) * max(1, self.num_open)
            weight = min(1.0, (_BRIEF_S / max(held_s, 1e-3)) ** 2)
        self._turned.append((now, weight))

    def late_switches(self, now: float, window_s: float) -> float:
        """Changes a session made on average in the last `window_s`."""
        while self._switched and now - self._switched[0] > window_s:
            self._switched.popleft()
        return len(self._switched) / max(1, self.num_open)

    def late_turns(self, now: float) -> float:
        """How often a session went back and forth of late on average; what is past fades."""
        fading: float = sum(weight * 0.5 ** ((now - at) / _FADES_S) for at, weight in self._turned)
        return fading / max(1, self.num_open)
