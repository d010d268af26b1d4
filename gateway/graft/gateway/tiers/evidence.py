"""What one session has shown of its proposers: survival, changes of it, and the last rounds.

Knows rounds, and what is at stake; knows no cost and makes no decision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from graft.common.tier import Tier
from graft.gateway.tiers.change import Change
from graft.gateway.tiers.seen import Seen
from graft.gateway.tiers.survival import MAX_DEPTH, Chances, Survival

_CROWD_SHARE = 0.15
_OWN_SHARE = 0.02
_ARMED = 12.0
_ARMED_WARY = 4.0


@dataclass(slots=True)
class Own:
    """What this session has shown of a proposer.

    expected: chance of each depth as it was at the last decision; changes are told from it.
    next_try_at, failures: of tries of it while another proposer drafts.
    """

    survival: Survival
    tried_at: float
    change: Change = field(default_factory=Change)
    recent: deque[Seen] = field(default_factory=lambda: deque(maxlen=16))
    next_try_at: float = 0.0
    failures: int = 0
    expected: Sequence[float] | None = None


class Evidence:
    """Of every proposer of a session, with the crowd's as the prior."""

    def __init__(self, crowds: dict[str, Survival], half_life: float, now: float) -> None:
        self._crowds = crowds
        self._own = {name: Own(Survival(half_life, crowd), now) for name, crowd in crowds.items()}

    def of(self, proposer: str) -> Own:
        """What the session has shown of a proposer."""
        return self._own[proposer]

    def all(self) -> Iterable[tuple[str, Own]]:
        """Every proposer with its evidence."""
        return self._own.items()

    def crowd(self, proposer: str) -> Survival:
        """What all sessions have shown of it."""
        return self._crowds[proposer]

    def chances(self, proposer: str, max_depth: int = MAX_DEPTH) -> Chances:
        """The estimates for this session."""
        return self._own[proposer].survival.chances(max_depth)

    def settle(self) -> None:
        """After a change of tier rounds are no longer what they were; begins to compare anew."""
        for own in self._own.values():
            own.change.reset()

    def take(self, by: Tier, seen: Seen, now: float, stake: float | None) -> bool:
        """Counts what survived of a round; True when acceptance has changed.

        stake: what was lost of late, as a share of what may be; the more, the less evidence a fall
        needs. None while the tier is only tried. After few rounds the estimates follow by
        themselves, and are no basis for a test.
        """
        own, crowd = self._own[by.proposer], self._crowds[by.proposer]
        own.tried_at = now
        alarm = ""
        least = _ARMED_WARY if own.change.wary else _ARMED
        if seen.num_drafted and stake is not None and own.survival.seen_at(1) >= least:
            if own.expected is None:
                own.expected = levels(self.chances(by.proposer), by.topk)
            told = seen.rejected_children > 0 or not seen.ranks
            depth = seen.depth if told else seen.accepted
            alarm = own.change.add(seen.accepted, depth, own.expected, stake)
        own.survival.add(seen)
        crowd.add(seen)
        own.recent.append(seen)
        if not alarm:
            return False
        change = own.change
        count = change.num_fallen if alarm == "fell" else change.num_risen
        own.survival.fade(_OWN_SHARE)
        if alarm == "fell":
            own.survival.fell()
        else:
            own.survival.rose()
        crowd.fade(_CROWD_SHARE)
        for former in list(own.recent)[-count:]:
            own.survival.add(former)
            crowd.add(former)
        change.reset()
        own.expected = None
        return True


def levels(chances: Chances, width: int) -> Sequence[float]:
    """Chance of each depth that some child of an accepted node is right."""
    missed = 1.0
    for hazard in chances.hazards[1:width]:
        missed *= 1.0 - hazard
    return [min(0.99, 1.0 - (1.0 - chance) * missed) for chance in chances.first]
