"""Whether acceptance is still what it was: two running likelihood ratios over rounds.

Knows chances by depth; knows no cost and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_SANK_TO = 0.3
_ROSE_TO = 0.3
_ALARM = 9.0
_ALARM_WARY = 3.5
_WARY_ROUNDS = 10
_STAKE_SHARE = 0.5


class Change:
    """Tells a lasting fall or rise of acceptance from bad or good luck.

    Source:
        Page's cumulative sum test (1954), against acceptance at 0.3 of its chance, and against
        rejection at 0.3 of its chance.
    """

    __slots__ = ("_fall", "_rise", "_wary", "num_fallen", "num_risen")

    def __init__(self) -> None:
        self._fall = 0.0
        self._rise = 0.0
        self._wary = 0
        self.num_fallen = 0
        self.num_risen = 0

    @property
    def wary(self) -> bool:
        """True for some rounds after something else has changed."""
        return self._wary > 0

    def beware(self) -> None:
        """Something else has just changed, so that a fall is likelier for some rounds."""
        self._wary = _WARY_ROUNDS

    def add(self, accepted: int, depth: int, first: Sequence[float], stake: float = 0.0) -> str:
        """Takes a round, tested down to `depth`; "fell", "rose" or "".

        num_fallen, num_risen then say how many rounds back the change seems to lie. The evidence
        that a fall needs shrinks with the `stake`, from 0 to 1.
        """
        fall = rise = 0.0
        for place in range(min(accepted, len(first))):
            fall += math.log(_SANK_TO)
            rise += math.log((1.0 - _ROSE_TO * (1.0 - first[place])) / first[place])
        if accepted < min(depth, len(first)):
            chance = first[accepted]
            fall += math.log((1.0 - _SANK_TO * chance) / (1.0 - chance))
            rise += math.log(_ROSE_TO)
        self._fall, self.num_fallen = _step(self._fall, self.num_fallen, fall)
        self._rise, self.num_risen = _step(self._rise, self.num_risen, rise)
        limit = _ALARM
        if self._wary:
            self._wary -= 1
            limit = _ALARM_WARY
        if self._fall > limit * (1.0 - _STAKE_SHARE * min(max(stake, 0.0), 1.0)):
            return "fell"
        if self._rise > _ALARM:
            return "rose"
        return ""

    def reset(self) -> None:
        """Begins anew, as after an alarm."""
        self._fall = self._rise = 0.0
        self.num_fallen = self.num_risen = 0


def _step(total: float, count: int, more: float) -> tuple[float, int]:
    total += more
    return (total, count + 1) if total > 0 else (0.0, 0)
