"""The field's policy for sessions of a gateway: commits gathered into the batches it thinks in.

Knows which rounds came together; leaves every decision to AdaptiveSteps.
"""

from __future__ import annotations

from collections.abc import Sequence

from graft.common.tier import Tier
from graft.gateway.tiers.choose import Offer
from graft.gateway.tiers.field import AdaptiveSteps, at_depth
from graft.gateway.tiers.field_config import FieldConfig
from graft.gateway.tiers.seen import Seen, Switch, sentence


class Batches:
    """Rounds of the sessions at one verify replica with one proposer.

    A batch is over when a session of it comes round again: then every session that took part has
    been heard.
    """

    def __init__(self, config: FieldConfig) -> None:
        self.params = AdaptiveSteps(config)
        self._accepted: dict[int, int] = {}

    def add(self, session: int, accepted: int, num_sessions: int) -> None:
        """Takes a session's round; `num_sessions` shared its step."""
        if session in self._accepted:
            self.params.update(list(self._accepted.values()), num_sessions)
            self._accepted.clear()
        self._accepted[session] = accepted

    def leave(self, session: int) -> None:
        """The session is over."""
        self._accepted.pop(session, None)


class Field:
    """One set of slots for each verify replica and proposer; all sessions there share it."""

    def __init__(self, config: FieldConfig) -> None:
        self._config = config
        self._batches: dict[tuple[str, str], Batches] = {}
        self._num_opened = 0

    def open(
        self, verify: str, offers: Sequence[Offer], num_sessions: int, context: int, now: float
    ) -> FieldPilot:
        """The pilot of a new session; this policy knows the default proposer alone."""
        key = (verify, offers[0].name)
        batches = self._batches.get(key)
        if batches is None:
            batches = self._batches[key] = Batches(self._config)
        self._num_opened += 1
        return FieldPilot(self._num_opened, batches, offers[0], num_sessions)

    def as_body(self) -> dict[str, object]:
        """Depth and EMA of every slot, for people."""
        return {
            f"{proposer} at {verify}": {
                str(least): {
                    "num_steps": batches.params.slot(least).steps,
                    "ema_accepted": round(batches.params.slot(least).ema, 4),
                }
                for least in self._config.slots
            }
            for (verify, proposer), batches in sorted(self._batches.items())
        }


class FieldPilot:
    """Follows the depth of the slot that the session's batch is in."""

    def __init__(self, number: int, batches: Batches, offer: Offer, num_sessions: int) -> None:
        self._number = number
        self._batches = batches
        self._offer = offer
        self._steps = batches.params.steps(num_sessions)
        self.tier = self._at(self._steps)

    def observe(self, seen: Seen, now: float) -> Switch | None:
        """Feeds the batch; a new depth of the slot, or another slot, is a new tier."""
        self._batches.add(self._number, seen.accepted, seen.num_sessions)
        slot = self._batches.params.slot(seen.num_sessions)
        if slot.steps == self._steps:
            return None
        tier = self._at(slot.steps)
        self._steps = slot.steps
        if tier == self.tier:
            return None
        reason = "acceptance" if tier.num_steps < self.tier.num_steps else "gain"
        switch = Switch(self.tier, tier, reason, f"{slot.ema:.2f} drafts accepted on average")
        self.tier = tier
        return switch

    def close(self) -> None:
        """The session is over."""
        self._batches.leave(self._number)

    def estimates(self) -> dict[str, object]:
        """The tier alone; the EMA belongs to the batch."""
        return {"tier": sentence(self.tier)}

    def _at(self, steps: int) -> Tier:
        depth = min(steps, self._offer.max_depth)
        tier = at_depth(self._offer.base, depth)
        return tier.within(self._offer.max_nodes, self._offer.max_depth)
