"""One setting of how boldly to speculate. Knows the field's names; knows no proposer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graft.common.errors import InvalidArgument
from graft.common.tree import HARD_MAX_NODES
from graft.v1 import tree_pb2


@dataclass(frozen=True, slots=True)
class Tier:
    """Proposer, depth (num_steps), width (topk), nodes with the root (num_draft_tokens), lookahead.

    `num_draft_tokens` of 0 or 1 drafts nothing: tier 0.

    Raises:
        InvalidArgument: a number is out of its range.
    """

    proposer: str = ""
    num_steps: int = 0
    topk: int = 1
    num_draft_tokens: int = 0
    lookahead: int = 0

    def __post_init__(self) -> None:
        limits = {
            "num_steps": (self.num_steps, 0, HARD_MAX_NODES - 1),
            "topk": (self.topk, 1, HARD_MAX_NODES),
            "num_draft_tokens": (self.num_draft_tokens, 0, HARD_MAX_NODES),
            "lookahead": (self.lookahead, 0, 64),
        }
        for name, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise InvalidArgument(
                    f"speculation.{name} is {value}, expected {low} to {high}",
                    field=f"speculation.{name}",
                )

    @property
    def off(self) -> bool:
        """True when nothing is drafted."""
        return self.num_draft_tokens <= 1 or self.num_steps == 0

    def within(self, max_nodes: int, max_depth: int) -> Tier:
        """This tier cut to a peer's limits; negotiation at connect time, no failure per request."""
        return replace(
            self,
            num_draft_tokens=min(self.num_draft_tokens, max_nodes),
            num_steps=min(self.num_steps, max_depth),
        )


OFF = Tier()


def tier_from_proto(message: tree_pb2.Tier) -> Tier:
    """Reads the wire form."""
    return Tier(
        proposer=message.proposer,
        num_steps=message.num_steps,
        topk=message.topk or 1,
        num_draft_tokens=message.num_draft_tokens,
        lookahead=message.lookahead,
    )


def tier_to_proto(tier: Tier) -> tree_pb2.Tier:
    """The wire form."""
    return tree_pb2.Tier(
        proposer=tier.proposer,
        num_steps=tier.num_steps,
        topk=tier.topk,
        num_draft_tokens=tier.num_draft_tokens,
        lookahead=tier.lookahead,
    )
