"""Rounds through real services and in one process: the same text and the same rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from graft.bench.ask import Client
from graft.bench.direct import paired
from graft.bench.one_process import load_one
from graft.bench.rounds import STAGES
from graft.bench.split import measure
from graft.common.sampling import Sampling
from graft.testing.cluster import running_cluster
from graft.testing.models import write_tiny_model

PROMPTS = [list(b"a b c a b c a b c"), list(b"Count to ten and back again.")]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)])
async def test_services_and_one_process_write_the_same(tmp_path: Path, sampling: Sampling) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    config = tmp_path / "config.yaml"
    config.write_text("verify: {kv_tokens: 2048}\n")
    one = load_one(str(model), "fp32", 1, config)
    heard: list[None] = []
    async with running_cluster(model) as cluster, Client(str(cluster.client.base_url)) as client:
        async with paired(cluster.verify_addresses[0], cluster.draft_addresses[0]) as pair:
            split = await measure(
                pair, one, client, PROMPTS, 24, sampling, lambda: heard.append(None)
            )
    answer = split.as_json()
    assert answer["same_text"]
    assert len(heard) == 2 * (len(PROMPTS) + 1)
    plain, drafted = (answer[f"{kind}, services"] for kind in ("plain", "speculative"))
    assert plain["accept_length"] == 1.0 < drafted["accept_length"]
    assert drafted["accept_length"] == answer["speculative, one process"]["accept_length"]
    assert plain["draft_ms"] == plain["wire_ms"] == 0 < drafted["draft_ms"]
    assert answer["plain, one process"]["rows"] == 1
    assert all(answer["speculative, services"][f"{stage}_ms"] >= 0 for stage in STAGES)
    assert len(split.gateway) == len(PROMPTS) and min(split.gateway) > 0
    expected = [
        seconds / (passage.wall / len(passage.rounds))
        for seconds, passage in zip(split.gateway, split.one_process[0].passages, strict=True)
    ]
    assert answer["gateway_overhead_plain"] == round(sum(expected) / 2 - 1, 4)
    page = split.page({})
    assert len(page.tables[0].columns) == 5 and not page.notes
