"""What speculation did for one request: rounds, drafted and accepted tokens. Only counts.

A round is one target forward over a tree or over the root alone; the prefill is none. Only kept
tokens count as accepted: those up to the end of the text, the stop included.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from graft.common.tier import OFF, Tier


@dataclass(slots=True)
class SpeculationRecord:
    """Counts of one choice, or of all choices of a request when merged."""

    tier: Tier = OFF
    inactive_reason: str = ""
    rule: str = "coupled"
    lossy: bool = False
    simulated: bool = False
    num_rounds: int = 0
    num_tree_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_round_tokens: int = 0
    num_ahead: int = 0
    accepted_by_round: Counter[int] = field(default_factory=Counter)
    accepted_by_position: Counter[int] = field(default_factory=Counter)

    def add_round(self, *, drafted: int, accepted: int, kept: int, ahead: bool = False) -> None:
        """Counts one round of `kept` tokens, of which the first `accepted` were drafted.

        ahead: its tree was there before the round could begin.
        """
        assert 0 <= accepted <= drafted, f"accepted {accepted} of {drafted} drafted tokens"
        self.num_rounds += 1
        self.num_round_tokens += kept
        if not drafted:
            return
        accepted = min(accepted, kept)
        self.num_tree_rounds += 1
        self.num_ahead += ahead
        self.num_drafted += drafted
        self.num_accepted += accepted
        self.accepted_by_round[accepted] += 1
        self.accepted_by_position.update(range(accepted))

    def ruled(self, rule: str, lossy: bool, simulated: bool) -> None:
        """Notes the accept rule in force; lossy and simulated sessions stain the whole request."""
        self.rule = rule
        self.lossy = self.lossy or lossy
        self.simulated = self.simulated or simulated

    def merge(self, other: SpeculationRecord) -> None:
        """Adds the counts of another choice to this one, in place."""
        if self.tier.off:
            self.tier = other.tier
        self.inactive_reason = self.inactive_reason or other.inactive_reason
        self.ruled(other.rule, other.lossy, other.simulated)
        self.num_rounds += other.num_rounds
        self.num_tree_rounds += other.num_tree_rounds
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        self.num_round_tokens += other.num_round_tokens
        self.num_ahead += other.num_ahead
        self.accepted_by_round += other.accepted_by_round
        self.accepted_by_position += other.accepted_by_position

    @property
    def active(self) -> bool:
        """True when the request speculates."""
        return not self.tier.off and not self.inactive_reason

    @property
    def by_position(self) -> list[int]:
        """Accepted tokens by depth, the first below the root first."""
        counts = self.accepted_by_position
        return [counts[position] for position in range(len(counts))]

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the drafted tokens, 0 when nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round with a tree gave on average, bonus included."""
        return 1.0 + (self.num_accepted / self.num_tree_rounds if self.num_tree_rounds else 0.0)

    @property
    def accept_length(self) -> float:
        """Tokens a round gave on average, rounds without a tree and bonus included."""
        return self.num_round_tokens / self.num_rounds if self.num_rounds else 0.0

    def as_body(self) -> dict[str, Any]:
        """The `metrics.speculative_decoding` object: vLLM's names, then ours."""
        body: dict[str, Any] = {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.acceptance_rate,
            "acceptance_histogram": {
                str(count): self.accepted_by_round[count]
                for count in sorted(self.accepted_by_round)
            },
            "num_spec_steps": self.num_tree_rounds,
            "num_accepted_draft_tokens": self.num_accepted,
            "num_draft_tokens": self.num_drafted,
            "num_spec_tokens": 0 if self.tier.off else self.tier.num_steps,
            "num_rounds": self.num_rounds,
            "num_lookahead_hits": self.num_ahead,
            "accept_length": self.accept_length,
            "accepted_per_position": self.by_position,
            "accept_rule": self.rule,
            "lossy": self.lossy,
            "active": self.active,
            "tier": None if self.tier.off else tier_body(self.tier),
        }
        if self.simulated:
            body["simulated"] = True
        if self.inactive_reason:
            body["inactive_reason"] = self.inactive_reason
        return body


def tier_body(tier: Tier) -> dict[str, Any]:
    """A tier as clients see it."""
    return {
        "proposer": tier.proposer,
        "num_steps": tier.num_steps,
        "topk": tier.topk,
        "num_draft_tokens": tier.num_draft_tokens,
        "lookahead": tier.lookahead,
    }
