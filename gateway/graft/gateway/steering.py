"""Steers sessions through their tiers: feeds a policy with commits and tells what it decides.

A shell around graft.gateway.tiers: it reads the clock, counts, logs and remembers; the policy
decides. Sessions whose request names a tier are not steered.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from graft.common import log
from graft.common.tier import Tier
from graft.gateway.metrics import Level, Metrics
from graft.gateway.tiers.choose import Offer
from graft.gateway.tiers.controller import Pilot, Policy
from graft.gateway.tiers.seen import Seen, Switch, sentence, word
from graft.v1 import verify_pb2
from graft.v1.verify_pb2 import PlainReason

_log = log.get("tiers")
_REMEMBERED = 32
_SHOWN_SESSIONS = 16
_MICROS = 1e-6


@dataclass(frozen=True, slots=True)
class Past:
    """A switch that happened; `at` is a time of day."""

    at: float
    session: int
    switch: Switch

    def as_body(self) -> dict[str, Any]:
        """For /server_info."""
        return {
            "at": round(self.at, 3),
            "session": f"{self.session:016x}",
            "from": sentence(self.switch.before),
            "to": sentence(self.switch.after),
            "reason": self.switch.reason,
            "detail": self.switch.detail,
        }


class Steering:
    """All steered sessions of a gateway, under one policy."""

    def __init__(self, name: str, policy: Policy, metrics: Metrics) -> None:
        self._name = name
        self._policy = policy
        self._metrics = metrics
        self._open: dict[Steered, None] = {}
        self._past: deque[Past] = deque(maxlen=_REMEMBERED)
        self._num_switches = 0
        self._num_probes = 0
        metrics.watch(
            Level("graft_tier_sessions", "Steered sessions by tier in force", "tier", self._levels)
        )

    def open(
        self, verify: str, offers: Sequence[Offer], num_sessions: int, context: int
    ) -> Steered:
        """Takes the helm of a session at a verify replica; the first offer is the default."""
        pilot = self._policy.open(verify, offers, num_sessions, context, time.monotonic())
        steered = Steered(pilot, self)
        self._open[steered] = None
        return steered

    def close(self, steered: Steered) -> None:
        """The session is over here."""
        self._open.pop(steered, None)

    def switched(self, session: int, switch: Switch) -> None:
        """Counts a switch, remembers it and says why."""
        self._metrics.tier_switch(word(switch.before), word(switch.after), switch.reason)
        self._past.append(Past(time.time(), session, switch))
        if switch.probe:
            self._num_probes += 1
        else:
            self._num_switches += 1
        tell = _log.debug if switch.probe else _log.info
        tell(
            "tier switched",
            session=f"{session:016x}",
            before=sentence(switch.before),
            after=sentence(switch.after),
            reason=switch.reason,
            detail=switch.detail,
        )

    def as_body(self) -> dict[str, Any]:
        """The `tiers` block of /server_info."""
        shown = list(self._open)[:_SHOWN_SESSIONS]
        return {
            "policy": self._name,
            "switches": self._num_switches,
            "probes": self._num_probes,
            "sessions": {f"{one.session:016x}": one.estimates() for one in shown},
            "estimates": self._policy.as_body(),
            "last_switches": [past.as_body() for past in self._past],
        }

    def _levels(self) -> dict[str, float]:
        return dict(Counter(word(steered.tier) for steered in self._open))


class Steered:
    """One session at one verify replica. `session` is its id there, once it is open."""

    def __init__(self, pilot: Pilot, steering: Steering) -> None:
        self.session = 0
        self._pilot = pilot
        self._steering = steering
        self._in_force = pilot.tier

    @property
    def tier(self) -> Tier:
        """The tier that was decided last."""
        return self._pilot.tier

    @property
    def in_force(self) -> Tier:
        """The tier that the next commit was drafted at: one decided a round ago is still new."""
        return self._in_force

    def observe(self, message: verify_pb2.TokensCommitted) -> Switch | None:
        """Takes a commit; what to tell the drafter and verify, if anything."""
        self._in_force = self._pilot.tier
        if message.plain_reason == PlainReason.PLAIN_REASON_PREFILL:
            return None
        switch = self._pilot.observe(_seen(message), time.monotonic())
        if switch is not None:
            self._steering.switched(self.session, switch)
        return switch

    def estimates(self) -> dict[str, object]:
        """What the policy expects of the session."""
        return self._pilot.estimates()

    def close(self) -> None:
        """The session is over here."""
        self._pilot.close()
        self._steering.close(self)


def cut_offers(
    offers: Sequence[Offer], max_nodes: int, max_depth: int, *, chains_only: bool
) -> list[Offer]:
    """Offers within the limits of a verify replica and of the session's accept rule."""
    cut = []
    for offer in offers:
        base = offer.base.within(max_nodes, max_depth)
        if chains_only:
            base = replace(base, topk=1)
        cut.append(Offer(base, min(offer.max_nodes, max_nodes), min(offer.max_depth, max_depth)))
    return cut


def _seen(message: verify_pb2.TokensCommitted) -> Seen:
    timing = message.timing
    reason = message.plain_reason
    missing = ""
    if reason != PlainReason.PLAIN_REASON_UNSPECIFIED:
        missing = PlainReason.Name(reason).removeprefix("PLAIN_REASON_").lower()
    return Seen(
        accepted=message.accepted_count,
        num_drafted=message.node_count,
        depth=message.depth,
        draft_s=timing.draft_micros * _MICROS,
        wait_s=timing.tree_wait_micros * _MICROS,
        queue_s=timing.queue_micros * _MICROS,
        forward_s=timing.forward_micros * _MICROS,
        choice_s=timing.choice_micros * _MICROS,
        num_rows=max(1, timing.batch_row_count),
        num_sessions=max(1, timing.batch_session_count),
        context=message.prefix_length,
        ranks=tuple(message.accepted_ranks),
        rejected_children=message.rejected_child_count,
        missing=missing,
    )
