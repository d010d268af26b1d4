"""One decision per session and round boundary, whatever the policy behind it.

Knows the policies by name; knows no stream, no session id and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from graft.common.tier import Tier
from graft.gateway.tiers.choose import Offer
from graft.gateway.tiers.field_config import load
from graft.gateway.tiers.field_policy import Field
from graft.gateway.tiers.goodput import Goodput
from graft.gateway.tiers.seen import Seen, Switch, sentence

PolicyName = Literal["fixed", "field", "goodput"]


class Pilot(Protocol):
    """Decides for one session."""

    @property
    def tier(self) -> Tier:
        """The tier in force, or on its way to the drafter."""
        ...

    def observe(self, seen: Seen, now: float) -> Switch | None:
        """Takes one round; what to change before the next tree, if anything."""
        ...

    def estimates(self) -> dict[str, object]:
        """What the session is thought to get, for people."""
        ...

    def close(self) -> None:
        """The session is over."""
        ...


class Policy(Protocol):
    """Decides for all sessions of a gateway."""

    def open(
        self, verify: str, offers: Sequence[Offer], num_sessions: int, context: int, now: float
    ) -> Pilot:
        """The pilot of a new session at a verify replica; of the offers the first is the default.

        num_sessions: sessions that share its steps. context: its length.
        """
        ...

    def as_body(self) -> dict[str, object]:
        """The policy's estimates, for people."""
        ...


class Fixed:
    """Every session keeps the tier it begins with."""

    def open(
        self, verify: str, offers: Sequence[Offer], num_sessions: int, context: int, now: float
    ) -> FixedPilot:
        """A pilot that holds the default tier."""
        return FixedPilot(offers[0].base)

    def as_body(self) -> dict[str, object]:
        """Nothing is estimated."""
        return {}


class FixedPilot:
    """Holds one tier."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier

    def observe(self, seen: Seen, now: float) -> Switch | None:
        """Nothing changes."""
        return None

    def estimates(self) -> dict[str, object]:
        """The tier alone."""
        return {"tier": sentence(self.tier)}

    def close(self) -> None:
        """Nothing to give back."""


def make_policy(name: PolicyName, tier_config: str, deadline_s: float) -> Policy:
    """The policy of a name. `tier_config` is for the field's: a preset or a file.

    Raises:
        InvalidArgument: the config cannot be read.
    """
    if name == "fixed":
        return Fixed()
    if name == "field":
        return Field(load(tier_config))
    return Goodput(deadline_s)
