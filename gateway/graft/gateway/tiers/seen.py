"""What a policy is told and what it answers. Only values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graft.common.tier import Tier

LATE = "late"
EMPTY = "empty"
NO_DRAFTER = "no_drafter"


@dataclass(frozen=True, slots=True)
class Seen:
    """One round of a session as its commit tells it; times in seconds.

    accepted, num_drafted, depth: of the round's tree; all 0 when it had none.
    ranks: places of the accepted tokens among their siblings; none when verify does not say.
    rejected_children: children of the last accepted node that were not chosen.
    missing: why there was no tree, "" when there was one.
    num_rows, num_sessions: of the whole step that the round was part of.
    context: committed length after the round.
    """

    accepted: int
    num_drafted: int
    depth: int
    draft_s: float
    wait_s: float
    queue_s: float
    forward_s: float
    choice_s: float
    num_rows: int
    num_sessions: int = 1
    context: int = 0
    ranks: Sequence[int] = ()
    rejected_children: int = 0
    missing: str = ""

    @property
    def seconds(self) -> float:
        """From the commit before to this one."""
        return self.wait_s + self.queue_s + self.forward_s + self.choice_s


@dataclass(frozen=True, slots=True)
class Switch:
    """A change of tier from the next tree on.

    reason: one of a small set of words. detail: a sentence with the numbers behind it.
    probe: the tier is tried for a few rounds and is not yet the session's choice.
    """

    before: Tier
    after: Tier
    reason: str
    detail: str = ""
    probe: bool = False


def word(tier: Tier) -> str:
    """A tier as a label: of each proposer there are three, so that labels stay few."""
    if tier.off:
        return "off"
    depth = tier.num_steps
    return f"{tier.proposer}-{'shallow' if depth <= 2 else 'middle' if depth <= 5 else 'deep'}"


def sentence(tier: Tier) -> str:
    """A tier for people."""
    if tier.off:
        return "off"
    ahead = f", {tier.lookahead} ahead" if tier.lookahead else ""
    return f"{tier.proposer} {tier.num_steps}x{tier.topk}, {tier.num_draft_tokens} nodes{ahead}"
