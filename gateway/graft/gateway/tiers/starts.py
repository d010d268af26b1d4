"""What it costs until a drafter is in step with a session: its own prefill, and late trees.

Learned by range of prompt lengths. Knows seconds; knows no acceptance.
"""

from __future__ import annotations

from graft.gateway.tiers.gauge import Gauge

_RANGE = 256
_FORGOTTEN_S = 60.0
_FLOOR_S = 0.01


class Starts:
    """Losses of starts at one verify replica, and how long its sessions last."""

    def __init__(self) -> None:
        self._losses: dict[tuple[str, int], tuple[Gauge, float]] = {}
        self._session_s = Gauge(0.5)

    def add(self, proposer: str, context: int, loss_s: float, now: float) -> None:
        """A drafter was in step with a session of this length after `loss_s` lost, or gave up."""
        key = (proposer, context // _RANGE)
        gauge, _ = self._losses.get(key, (Gauge(_FLOOR_S), now))
        gauge.add(max(0.0, loss_s))
        self._losses[key] = gauge, now

    def ended(self, seconds: float) -> None:
        """A session lasted so long."""
        self._session_s.add(seconds)

    def loss_s(self, proposer: str, context: int, now: float) -> float:
        """What a start is likely to cost: that of the next shorter range known, 0 for none.

        What was long ago is forgotten, so that it is seen again.
        """
        place = context // _RANGE
        known = [
            (span, gauge.get(0.0))
            for (name, span), (gauge, at) in self._losses.items()
            if name == proposer and span <= place and now - at < _FORGOTTEN_S
        ]
        return max(known)[1] if known else 0.0

    def worth(self, proposer: str, context: int, gain: float, now: float) -> bool:
        """True when a gain, as a share of the time, makes up for the start in half a session."""
        loss_s = self.loss_s(proposer, context, now)
        if loss_s < _FLOOR_S:
            return True
        return gain * self._session_s.get(float("inf")) / 2 > loss_s
