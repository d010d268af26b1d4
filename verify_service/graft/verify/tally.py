"""Counts of what happened, as plain numbers. Knows no metrics library."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from graft.common.sampling import Sampling
from graft.common.tree import Tree
from graft.v1.tree_pb2 import TreeRefusal
from graft.v1.verify_pb2 import FinishReason, PlainReason


@dataclass(slots=True)
class Tally:
    """Counters that only grow. pushed: hit, miss or stale, of trees sent before they were asked;
    wasted_nodes: drafted nodes of those that missed. trimmed: nodes cut for a cheaper step.

    feature_bytes, feature_rows: hidden states sent, with commits ("commit") and beside ("prefix").
    """

    rounds: Counter[str] = field(default_factory=Counter)
    plain: Counter[PlainReason.ValueType] = field(default_factory=Counter)
    refused: Counter[TreeRefusal.ValueType] = field(default_factory=Counter)
    pushed: Counter[str] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    finished: Counter[FinishReason.ValueType] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    prefilled: int = 0
    reused: int = 0
    draft_timeouts: int = 0
    preemptions: int = 0
    failures: int = 0
    recalled: int = 0
    kept_rows: int = 0
    feature_bytes: Counter[str] = field(default_factory=Counter)
    feature_rows: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    streams_dropped: int = 0
    wasted_nodes: int = 0
    trimmed: int = 0
    trees_cut: int = 0
    trees_redrawn: int = 0

    def count_rule(self, sampling: Sampling) -> None:
        """One commit by the session's accept rule; a lossy one is named apart."""
        self.rules[f"{sampling.rule_name}_lossy" if sampling.lossy else sampling.rule_name] += 1

    def count_miss(self, tree: Tree | None) -> None:
        """A tree that was here before it could be used, for a prefix that did not come."""
        if tree is not None:
            self.pushed["miss"] += 1
            self.wasted_nodes += tree.num_nodes - 1

    def count_round(
        self, kept: int, accepted: int, num_drafted: int, reason: PlainReason.ValueType
    ) -> None:
        """One commit of `kept` tokens, of which `accepted` were drafted."""
        plain = "prefill" if reason == PlainReason.PLAIN_REASON_PREFILL else "plain"
        self.rounds["tree" if num_drafted else plain] += 1
        self.committed += kept
        self.drafted += num_drafted
        self.accepted += accepted
        for position in range(accepted):
            self.accepted_at[position] += 1
        if reason != PlainReason.PLAIN_REASON_UNSPECIFIED:
            self.plain[reason] += 1


def refusals(tally: Tally) -> dict[str, int]:
    """Trees that were not used, by the lower-case name of the reason; from any thread."""
    return {
        TreeRefusal.Name(refusal).removeprefix("TREE_REFUSAL_").lower(): count
        for refusal, count in dict(tally.refused).items()
    }
