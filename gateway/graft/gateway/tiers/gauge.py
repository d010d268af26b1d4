"""An estimate of one slowly changing number that now and then jumps. Knows no unit."""

from __future__ import annotations

_SHARE = 0.2
_JUMP = 1.6
_CLIP = 1.3


class Gauge:
    """A moving average that shrugs at one outlier and follows two of a kind at once."""

    __slots__ = ("_odd", "floor", "num_seen", "value")

    def __init__(self, floor: float) -> None:
        self.value: float | None = None
        self.num_seen = 0
        self.floor = floor
        self._odd: float | None = None

    def add(self, seen: float, *, believe: bool = False) -> bool:
        """Takes a measurement; True when the estimate jumped.

        believe: one outlier is enough, since there may be no second measurement for long.
        """
        self.num_seen += 1
        value = self.value
        if value is None:
            self.value = seen
            return False
        high, low = value * _JUMP + self.floor, value / _JUMP - self.floor
        if low <= seen <= high:
            self._odd = None
            self.value = value + _SHARE * (seen - value)
            return False
        if self.num_seen == 2:
            # One of the first two is odd; delays are commoner than miracles.
            self.value = min(value, seen)
            return True
        if believe:
            self._odd = None
            self.value = seen
            return True
        odd, self._odd = self._odd, seen
        if odd is not None and (odd > high) == (seen > high):
            self._odd = None
            self.value = (odd + seen) / 2
            return True
        clipped = min(max(seen, value / _CLIP), value * _CLIP + self.floor)
        self.value = value + _SHARE / 2 * (clipped - value)
        return False

    def set(self, value: float) -> None:
        """Puts the estimate where something else than a measurement says it is."""
        self.value = value
        self.num_seen += 1
        self._odd = None

    def get(self, default: float) -> float:
        """The estimate, or `default` before the first measurement."""
        return default if self.value is None else self.value
