"""What drafting has lost of late against plain decoding. Knows seconds; knows no tier."""

from __future__ import annotations

from collections import deque

WINDOW_S = 5.0
_BUCKET_S = 0.25


class Ledger:
    """Losses and gains of the last WINDOW_S, and the worst stretch that lasts until now."""

    __slots__ = ("_buckets",)

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, float]] = deque()

    def add(self, loss_s: float, now: float) -> None:
        """Books a round; a gain is a negative loss."""
        place = int(now / _BUCKET_S)
        if self._buckets and self._buckets[-1][0] == place:
            self._buckets[-1] = (place, self._buckets[-1][1] + loss_s)
            return
        self._buckets.append((place, loss_s))
        while self._buckets[0][0] <= place - WINDOW_S / _BUCKET_S:
            self._buckets.popleft()

    def lost_s(self, now: float) -> float:
        """The most that was lost from some moment of the window until now; 0 after gains."""
        oldest = int(now / _BUCKET_S) - WINDOW_S / _BUCKET_S
        worst = total = 0.0
        for place, loss_s in reversed(self._buckets):
            if place <= oldest:
                break
            total += loss_s
            worst = max(worst, total)
        return worst
