"""The verify service's Prometheus metrics: the tally and snapshot read at scrape, and histograms.

Knows no session; no text and no id ever becomes a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from prometheus_client import Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from graft.common.metrics import ROUND_SECONDS_BUCKETS, Later, Registry
from graft.v1.verify_pb2 import FinishReason, PlainReason
from graft.verify.events import Committed, Event, Timing
from graft.verify.tally import Tally, refusals

_Number = TypeVar("_Number", bound=int)

_LENGTH_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
_NODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class _Round(NamedTuple):
    """What is counted of a commit."""

    timing: Timing
    num_tokens: int
    num_drafted: int
    prefill: bool


class VerifyMetrics:
    """One registry a server; `observe` is fed every list of events."""

    def __init__(self) -> None:
        self.registry = Registry()
        self._later: Later[_Round] = Later(self.registry, self._count)
        self._tree_nodes = Histogram(
            "graft_tree_nodes",
            "Nodes of a verified tree, root included",
            buckets=_NODE_BUCKETS,
            registry=self.registry,
        )
        self._accept_length = Histogram(
            "graft_accept_length",
            "Tokens per target forward of a session, bonus included",
            buckets=_LENGTH_BUCKETS,
            registry=self.registry,
        )
        self._round_seconds = Histogram(
            "graft_round_seconds",
            "Time of a round by stage",
            ["stage"],
            buckets=ROUND_SECONDS_BUCKETS,
            registry=self.registry,
        )
        self._simulated = Gauge(
            "graft_simulated_accept_length",
            "Accept length drawn for a benchmark in place of deciding, 0 when off",
            registry=self.registry,
        )

        self._lanes = Gauge(
            "graft_lanes", "Draft streams that go over a lane", registry=self.registry
        )

        self._session_lanes = Gauge(
            "graft_session_lanes", "Sessions whose commits go over a lane", registry=self.registry
        )

    def session_lanes(self, change: int) -> None:
        """Says that so many sessions more have a lane, or fewer."""
        self._session_lanes.inc(change)

    def lanes(self, count: int) -> None:
        """Says how many draft streams go over a lane now."""
        self._lanes.set(count)

    def simulated(self, accept_length: float) -> None:
        """Says for good that this replica draws its accept lengths."""
        self._simulated.set(accept_length)

    def attach(self, tally: Tally, gauges: Callable[[], dict[str, int]]) -> None:
        """Reads counters and gauges at every scrape from now on.

        gauges: running, waiting, free, used, cached and dropped_streams.
        """
        self.registry.register(_State(tally, gauges))

    def observe(self, events: Iterable[Event]) -> None:
        """Counts the rounds among the events in the histograms."""
        for event in events:
            if isinstance(event, Committed):
                prefill = event.plain_reason == PlainReason.PLAIN_REASON_PREFILL
                self._later.add(_Round(event.timing, len(event.tokens), event.num_drafted, prefill))

    def _count(self, one: _Round) -> None:
        timing = one.timing
        self._stage("verify", timing.forward_s)
        self._stage("commit", timing.choice_s)
        if one.prefill:
            return
        self._accept_length.observe(one.num_tokens)
        self._tree_nodes.observe(one.num_drafted + 1)
        if one.num_drafted:
            self._stage("draft", timing.draft_s)
            self._stage("wire", max(0.0, timing.tree_wait_s - timing.draft_s))

    def _stage(self, stage: str, seconds: float) -> None:
        self._round_seconds.labels(stage).observe(seconds)


class _State(Collector):
    """Turns plain counts into metric families when asked."""

    def __init__(self, tally: Tally, gauges: Callable[[], dict[str, int]]) -> None:
        self._tally = tally
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        """All counters and gauges as of now; copies first, another thread counts on."""
        tally, gauges = self._tally, self._gauges()
        yield _labelled("graft_rounds", "Commits by kind", "outcome", dict(tally.rounds))
        yield _labelled(
            "graft_rule_rounds",
            "Commits by accept rule; a lossy one trades exactness for acceptance",
            "rule",
            dict(tally.rules),
        )
        yield _total(
            "graft_cut_trees", "Trees cut to their first path, for rules of chains", tally.trees_cut
        )
        yield _total(
            "graft_redrawn_trees",
            "Chains with a token that its distribution does not give, which was replaced",
            tally.trees_redrawn,
        )
        yield _total("graft_draft_tokens", "Drafted nodes verified", tally.drafted)
        yield _total("graft_accepted_tokens", "Drafted tokens accepted and kept", tally.accepted)
        yield _total("graft_committed_tokens", "Tokens committed", tally.committed)
        yield _labelled(
            "graft_accepted_per_pos",
            "Drafted tokens accepted, by place in the path",
            "position",
            {str(position): count for position, count in dict(tally.accepted_at).items()},
        )
        yield _total("graft_draft_timeouts", "Deadlines missed by drafters", tally.draft_timeouts)
        yield _labelled(
            "graft_fallback_rounds",
            "Rounds decoded without a tree",
            "reason",
            _named(dict(tally.plain), PlainReason.Name, "PLAIN_REASON_"),
        )
        yield _labelled(
            "graft_pushed_trees",
            "Trees pushed before they were asked for",
            "outcome",
            {name: tally.pushed[name] for name in ("hit", "miss", "stale")},
        )
        yield _total(
            "graft_wasted_nodes",
            "Drafted nodes pushed ahead for prefixes that did not come",
            tally.wasted_nodes,
        )
        yield _total("graft_trimmed_nodes", "Drafted nodes cut to keep steps cheap", tally.trimmed)
        yield _labelled(
            "graft_rejected_trees",
            "Trees that were not used",
            "reason",
            refusals(tally),
        )
        yield _labelled(
            "graft_sessions_finished",
            "Sessions that ended as they should",
            "reason",
            _named(dict(tally.finished), FinishReason.Name, "FINISH_REASON_"),
        )
        yield _total("graft_sessions_failed", "Sessions that ended by an error", tally.failures)
        yield _total("graft_prefill_tokens", "Prefix tokens run", tally.prefilled)
        yield _total("graft_recalled_tokens", "Tokens run again for drafters", tally.recalled)
        yield _total(
            "graft_kept_feature_rows",
            "Hidden states of cached prefixes that were there for drafters",
            tally.kept_rows,
        )
        yield _labelled(
            "graft_feature_bytes", "Bytes of hidden states sent", "part", dict(tally.feature_bytes)
        )
        yield _labelled(
            "graft_feature_rows", "Rows of hidden states sent", "part", dict(tally.feature_rows)
        )
        yield _total("graft_reused_tokens", "Prefix tokens reused", tally.reused)
        yield _total("graft_preemptions", "Sessions that lost their pages", tally.preemptions)
        yield _total("graft_steps", "Target forwards", tally.steps)
        yield _total(
            "graft_dropped_streams", "Draft streams that did not read", gauges["dropped_streams"]
        )
        yield _gauges("graft_sessions_open", "Sessions", "state", gauges, ("running", "waiting"))
        yield _gauges("graft_kv_pages", "KV pages", "state", gauges, ("free", "used", "cached"))


def _total(name: str, about: str, value: int) -> Metric:
    return CounterMetricFamily(name, about, value=value)


def _labelled(name: str, about: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, about, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family


def _gauges(
    name: str, about: str, label: str, values: dict[str, int], keys: tuple[str, ...]
) -> Metric:
    family = GaugeMetricFamily(name, about, labels=[label])
    for key in keys:
        family.add_metric([key], values[key])
    return family


def _named(
    counts: dict[_Number, int], name_of: Callable[[_Number], str], prefix: str
) -> dict[str, int]:
    return {name_of(key).removeprefix(prefix).lower(): count for key, count in counts.items()}
