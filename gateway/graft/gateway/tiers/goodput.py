"""Goodput: the tier with the most tokens a second by live estimates, for each session.

What all sessions share: costs by verify replica, and acceptance by proposer as a prior for every
new one. Decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from graft.gateway.tiers.choose import Load, Offer
from graft.gateway.tiers.evidence import Evidence
from graft.gateway.tiers.knobs import KNOBS, Knobs
from graft.gateway.tiers.pilot import GoodputPilot
from graft.gateway.tiers.replica import Replica
from graft.gateway.tiers.survival import Survival


class Goodput:
    """The policy of a gateway. `deadline_s` is how long rounds wait for a tree."""

    def __init__(self, deadline_s: float, knobs: Knobs = KNOBS) -> None:
        self.knobs = knobs
        self._deadline_s = deadline_s
        self._replicas: dict[str, Replica] = {}
        self._crowds: dict[str, Survival] = {}

    def replica(self, verify: str) -> Replica:
        """What is known of a verify replica."""
        found = self._replicas.get(verify)
        if found is None:
            found = self._replicas[verify] = Replica(self._deadline_s)
        return found

    def crowd(self, proposer: str) -> Survival:
        """How far a proposer's drafts survive in all sessions."""
        found = self._crowds.get(proposer)
        if found is None:
            found = self._crowds[proposer] = Survival(self.knobs.crowd_half_life)
        return found

    def open(
        self, verify: str, offers: Sequence[Offer], num_sessions: int, context: int, now: float
    ) -> GoodputPilot:
        """The pilot of a new session; `offers` are the proposers it may have, the default first."""
        crowds = {offer.name: self.crowd(offer.name) for offer in offers}
        evidence = Evidence(crowds, self.knobs.own_half_life, now)
        opened = Load(num_sessions, context), now
        return GoodputPilot(self.knobs, self.replica(verify), offers, evidence, opened)

    def as_body(self) -> dict[str, object]:
        """The estimates, for people."""
        survival = {}
        for name, crowd in sorted(self._crowds.items()):
            chances = crowd.chances(8)
            survival[name] = {
                "by_depth": [round(chance, 3) for chance in chances.first],
                "by_later_rank": [round(chance, 3) for chance in chances.hazards[1:]],
                "offered": round(chances.offered, 3),
                "rounds": crowd.num_rounds,
            }
        costs = {
            verify: replica.costs.as_body() for verify, replica in sorted(self._replicas.items())
        }
        return {"costs": costs, "survival": survival}
