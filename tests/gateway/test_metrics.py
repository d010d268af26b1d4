"""What /metrics shows: the names that are promised, and numbers that agree with the answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from graft.gateway.tree_counts import TreeCounts
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model
from graft.v1.tree_pb2 import TreeRefusal
from graft.v1.verify_pb2 import VerifyServiceDescribeResponse

PROMISED = {
    "graft_rounds": {"tier", "outcome"},
    "graft_draft_tokens": set(),
    "graft_accepted_tokens": set(),
    "graft_accepted_per_pos": {"position"},
    "graft_tree_nodes": set(),
    "graft_accept_length": set(),
    "graft_round_seconds": {"stage"},
    "graft_draft_timeouts": set(),
    "graft_fallback_rounds": {"reason"},
    "graft_tier_switches": {"from", "to", "reason"},
    "graft_pushed_trees": {"outcome"},
    "graft_rejected_trees": {"reason"},
    "graft_verify_replays": set(),
    "graft_sessions_open": set(),
    "graft_kv_pages": {"state"},
    "graft_request_seconds": set(),
    "graft_time_to_first_token_seconds": set(),
    "graft_time_per_output_token_seconds": set(),
    "graft_request_acceptance_rate": set(),
    "vllm:spec_decode_num_drafts": set(),
    "vllm:spec_decode_num_draft_tokens": set(),
    "vllm:spec_decode_num_accepted_tokens": set(),
    "vllm:spec_decode_num_accepted_tokens_per_pos": {"position"},
}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    model = write_tiny_model(tmp_path / "tiny")
    async with running_cluster(model, gateway={"poll_s": 0.05}) as running:
        while not running.gateway.gateway.attendants.connected:
            await running.gateway.gateway.drafts.changed.wait(0.05)
        yield running


async def families(cluster: Cluster) -> dict[str, Metric]:
    text = (await cluster.client.get("/metrics")).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(family: Metric, **labels: str) -> float:
    """The sum of a counter's samples with these labels."""
    return sum(
        sample.value
        for sample in family.samples
        if sample.name.endswith("_total") and labels.items() <= sample.labels.items()
    )


async def test_every_promised_name_is_there_with_its_labels(cluster: Cluster) -> None:
    await cluster.complete("a b a b a b", max_tokens=24, temperature=0, ignore_eos=True)
    found = await families(cluster)
    assert PROMISED.keys() - found.keys() == set()
    for name, labels in PROMISED.items():
        for sample in found[name].samples:
            assert set(sample.labels) - {"le"} == labels, name


async def test_trees_are_counted_as_the_verify_replica_counts_them(cluster: Cluster) -> None:
    engine = cluster.verifiers[0].engine
    assert engine is not None
    engine.scheduler.tally.pushed.update(hit=3, stale=2)
    engine.scheduler.tally.refused[TreeRefusal.TREE_REFUSAL_MALFORMED] += 4
    while True:
        found = await families(cluster)
        if value(found["graft_rejected_trees"], reason="malformed") == 4:
            break
        await cluster.gateway.gateway.verify.changed.wait(0.05)
    pushed = {name: value(found["graft_pushed_trees"], outcome=name) for name in ("hit", "stale")}
    assert pushed == {"hit": 3, "stale": 2}


def test_what_a_former_life_counted_stays_in_the_sum() -> None:
    now = VerifyServiceDescribeResponse(incarnation_id=1, pushed_tree_counts={"hit": 5})
    counts = TreeCounts(lambda: [now])

    def hits() -> float:
        return value(next(iter(counts.collect())), outcome="hit")

    assert hits() == 5
    now = VerifyServiceDescribeResponse(incarnation_id=2, pushed_tree_counts={"hit": 2})
    assert hits() == 7
    now.pushed_tree_counts["hit"] = 3
    assert hits() == 8


def test_outcomes_are_there_before_anything_happened() -> None:
    counts = TreeCounts(lambda: [])
    pushed = next(iter(counts.collect()))
    assert {sample.labels["outcome"] for sample in pushed.samples} == {"hit", "miss", "stale"}
