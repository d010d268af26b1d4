"""The gateway's metrics, in Prometheus form. Knows names and numbers; no user text, no ids.

The `vllm:` aliases are read off our own numbers when scraped, so that they cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from graft.common.metrics import ROUND_SECONDS_BUCKETS, Later, Registry

_LATENCY_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
_LENGTH_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0)
_NODE_BUCKETS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0, 256.0)
_RATE_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_MICROS = 1e-6


@dataclass(frozen=True, slots=True)
class RoundStages:
    """Where a round's time went, in microseconds."""

    draft: int
    wire: int
    verify: int
    commit: int


@dataclass(frozen=True, slots=True)
class _Round:
    """What is counted of a round under labels and in histograms."""

    tier: str
    drafted: int
    accepted: int
    stages: RoundStages


@dataclass(frozen=True, slots=True)
class Level:
    """One gauge read at scrape time: name, help, label name and a value for each label value."""

    name: str
    documentation: str
    label: str
    read: Callable[[], dict[str, float]]


class Metrics:
    """All counters of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = Registry()
        self._later: Later[_Round] = Later(self.registry, self._count)
        self.num_drafts = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.num_rounds = 0
        self.num_round_tokens = 0
        self.accepted_by_position: dict[int, int] = {}

        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(name, documentation, labels, registry=self.registry)

        def histogram(
            name: str, documentation: str, buckets: tuple[float, ...], *labels: str
        ) -> Histogram:
            return Histogram(name, documentation, labels, registry=self.registry, buckets=buckets)

        self._rounds = counter("graft_rounds", "Target forwards after prefill", "tier", "outcome")
        self._fallbacks = counter(
            "graft_fallback_rounds", "Rounds decoded without a tree although one was due", "reason"
        )
        self._timeouts = counter("graft_draft_timeouts", "Rounds whose tree came too late")
        self._tier_switches = counter(
            "graft_tier_switches", "Changes of a session's tier", "from", "to", "reason"
        )
        self._replays = counter("graft_verify_replays", "Sessions moved to another verify replica")
        self._draft_errors = counter("graft_draft_errors", "Faults of draft replicas", "kind")
        self._requests = counter("graft_requests", "Requests by route and status", "route", "code")
        self._ignored = counter("graft_ignored_params", "Unknown request fields that were ignored")
        self._cancelled = counter("graft_cancelled", "Choices given up by the client", "cause")
        self._lossy = counter(
            "graft_lossy_choices", "Choices whose accept thresholds are below 1", "rule"
        )
        self._prompt_tokens = counter("graft_prompt_tokens", "Prompt tokens of requests")
        self._tokens = counter("graft_completion_tokens", "Tokens delivered to clients")
        self._tree_nodes = histogram(
            "graft_tree_nodes", "Drafted nodes of a round's tree", _NODE_BUCKETS
        )
        self._accept_length = histogram(
            "graft_accept_length", "Tokens of a round with a tree, bonus included", _LENGTH_BUCKETS
        )
        self._round_seconds = histogram(
            "graft_round_seconds", "Where a round's time went", ROUND_SECONDS_BUCKETS, "stage"
        )
        self._request_acceptance = histogram(
            "graft_request_acceptance_rate", "Accepted share of a request's drafts", _RATE_BUCKETS
        )
        self._first_token = histogram(
            "graft_time_to_first_token_seconds", "From request to first token", _LATENCY_BUCKETS
        )
        self._token_seconds = histogram(
            "graft_time_per_output_token_seconds",
            "(end - first token) / (tokens - 1) of a choice",
            ROUND_SECONDS_BUCKETS,
        )
        self._request_seconds = histogram(
            "graft_request_seconds", "From request to last token", _LATENCY_BUCKETS
        )
        self.sessions_open = Gauge(
            "graft_sessions_open", "Sessions open at verify replicas", registry=self.registry
        )
        self.registry.register(_Aliases(self))

    def watch(self, level: Level) -> None:
        """Adds a gauge that is read at every scrape."""
        self.registry.register(_LevelCollector(level))

    def round(
        self, *, tier: str, drafted: int, accepted: int, kept: int, stages: RoundStages
    ) -> None:
        """Counts one round; the numbers are those of the request's own record."""
        accepted = min(accepted, kept)
        self.num_rounds += 1
        self.num_round_tokens += kept
        self._later.add(_Round(tier, drafted, accepted, stages))
        if not drafted:
            return
        self.num_drafts += 1
        self.num_drafted += drafted
        self.num_accepted += accepted
        for position in range(accepted):
            self.accepted_by_position[position] = self.accepted_by_position.get(position, 0) + 1

    def _count(self, one: _Round) -> None:
        for stage in ("draft", "wire", "verify", "commit"):
            self._round_seconds.labels(stage).observe(getattr(one.stages, stage) * _MICROS)
        if not one.drafted:
            self._rounds.labels(one.tier, "plain").inc()
            return
        outcome = "rejected" if not one.accepted else "some"
        if one.accepted == one.drafted:
            outcome = "all"
        self._rounds.labels(one.tier, outcome).inc()
        self._tree_nodes.observe(one.drafted)
        self._accept_length.observe(one.accepted + 1)

    def fallback(self, reason: str) -> None:
        """A round was plain although the session speculates."""
        self._fallbacks.labels(reason).inc()
        if reason == "late":
            self._timeouts.inc()

    def tier_switch(self, before: str, after: str, reason: str) -> None:
        """A session's tier changed."""
        self._tier_switches.labels(before, after, reason).inc()

    def replay(self) -> None:
        """A session was lost and is opened again."""
        self._replays.inc()

    def draft_error(self, kind: str) -> None:
        """A draft replica was lost, silent or unwilling."""
        self._draft_errors.labels(kind).inc()

    def cancelled(self, cause: str) -> None:
        """A choice ended before its text did."""
        self._cancelled.labels(cause).inc()

    def request(self, route: str, code: str) -> None:
        """A request was answered."""
        self._requests.labels(route, code).inc()

    def ignored(self, count: int) -> None:
        """Unknown fields were ignored."""
        self._ignored.inc(count)

    def lossy(self, rule: str) -> None:
        """A choice trades exactness for acceptance."""
        self._lossy.labels(rule).inc()

    def prompt(self, tokens: int) -> None:
        """A prompt was admitted."""
        self._prompt_tokens.inc(tokens)

    def first_token(self, seconds: float) -> None:
        """The first token of a choice came."""
        self._first_token.observe(seconds)

    def choice(
        self, *, tokens: int, seconds: float, decode_seconds: float, rate: float | None
    ) -> None:
        """A choice ended; `rate` is None when nothing was drafted."""
        self._tokens.inc(tokens)
        self._request_seconds.observe(seconds)
        if tokens > 1:
            self._token_seconds.observe(decode_seconds / (tokens - 1))
        if rate is not None:
            self._request_acceptance.observe(rate)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class _Aliases(Collector):
    """Our speculation counters under both names."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        metrics = self._metrics
        plain = (
            ("graft_draft_tokens", "Drafted tokens verified", metrics.num_drafted),
            ("graft_accepted_tokens", "Drafted tokens kept", metrics.num_accepted),
            ("vllm:spec_decode_num_drafts", "Rounds with a tree", metrics.num_drafts),
            ("vllm:spec_decode_num_draft_tokens", "Drafted tokens", metrics.num_drafted),
            ("vllm:spec_decode_num_accepted_tokens", "Accepted tokens", metrics.num_accepted),
        )
        for name, documentation, value in plain:
            yield CounterMetricFamily(name, documentation, value=value)
        for name in ("graft_accepted_per_pos", "vllm:spec_decode_num_accepted_tokens_per_pos"):
            family = CounterMetricFamily(name, "Accepted tokens by position", labels=["position"])
            for position, count in sorted(metrics.accepted_by_position.items()):
                family.add_metric([str(position)], count)
            yield family


class _LevelCollector(Collector):
    def __init__(self, level: Level) -> None:
        self._level = level

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            self._level.name, self._level.documentation, labels=[self._level.label]
        )
        for label, value in self._level.read().items():
            family.add_metric([label], value)
        yield family
