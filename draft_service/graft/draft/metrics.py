"""The draft service's own metrics, in a registry of its own. Knows no server that shows them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from graft.common.metrics import ROUND_SECONDS_BUCKETS


class DraftMetrics:
    """Counters of one draft service; every name starts with ``graft_draft_``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.sessions = Gauge(
            "graft_draft_sessions", "Sessions attended now.", registry=self.registry
        )
        self.links = Gauge(
            "graft_draft_links", "Verify replicas connected now.", registry=self.registry
        )
        self.trees = self._counter("trees", "Trees pushed.", "proposer")
        self.nodes = self._counter("nodes", "Drafted nodes pushed.", "proposer")
        self.tree_bytes = self._counter("tree_bytes", "Bytes of pushed trees.", "proposer")
        self.sent_bytes = self._counter(
            "sent_bytes", "Payload bytes of all messages to verify, trees and empties included."
        )
        self.empties = self._counter("empties", "Prefixes for which nothing was found.", "proposer")
        self.withheld = self._counter("withheld", "Trees made and not pushed.", "reason")
        self.tree_refusals = self._counter("tree_refusals", "Trees verify did not use.", "reason")
        self.committed = self._counter("committed_tokens", "Tokens verify committed.")
        self.accepted = self._counter("accepted_tokens", "Drafted tokens verify accepted.")
        self.feature_bytes = self._counter("feature_bytes", "Bytes of hidden states that came.")
        self.feature_rows = self._counter("feature_rows", "Rows of hidden states that came.")
        self.lookahead_outcomes = self._counter(
            "lookahead_commits", "Commits of sessions with look-ahead: hit or miss.", "outcome"
        )
        self.lookahead_trees = self._counter(
            "lookahead_trees", "Trees pushed ahead, and those in vain.", "outcome"
        )
        self.lookahead_nodes = self._counter(
            "lookahead_nodes", "Drafted nodes pushed ahead, and those in vain.", "outcome"
        )
        self.session_refusals = self._counter("session_refusals", "Sessions refused.", "reason")
        self.failures = self._counter("proposer_failures", "Exceptions in a proposer.", "proposer")
        self.rejoins = self._counter("rejoins", "Sessions joined anew after a broken chain.")
        self.link_losses = self._counter("link_losses", "Rounds streams lost.")
        self.propose_seconds = Histogram(
            "graft_draft_propose_seconds",
            "Time a proposer took for one batch.",
            ["proposer"],
            buckets=ROUND_SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.batch_sessions = Histogram(
            "graft_draft_batch_sessions",
            "Sessions in one batch.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"graft_draft_{name}", text, labels, registry=self.registry)
