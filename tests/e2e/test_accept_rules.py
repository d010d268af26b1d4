"""Accept rules as a client sees them: asked for by name, honoured, refused or named lossy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model

PROMPT = "a b c a b c a b c a b c"
RULES = ["coupled", "target_only", "rejection", "block"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(model) as running:
        yield running


async def ask(cluster: Cluster, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Text and speculation record of one completion."""
    fields = {"max_tokens": 60, "seed": 5, "ignore_eos": True, **fields}
    body = await cluster.complete(PROMPT, **fields)
    return body["choices"][0]["text"], body["metrics"]["speculative_decoding"]


async def scraped(cluster: Cluster, name: str) -> float:
    lines = (await cluster.client.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("rule", RULES)
async def test_ngram_drafts_under_every_rule(cluster: Cluster, rule: str) -> None:
    _, record = await ask(cluster, accept_rule=rule, temperature=0.05)
    assert record["accept_rule"] == rule
    assert record["lossy"] is False
    assert "simulated" not in record
    assert record["num_draft_tokens"] > 0
    assert record["num_accepted_draft_tokens"] > 0


async def test_greedy_text_is_the_same_under_every_rule(cluster: Cluster) -> None:
    texts = {(await ask(cluster, accept_rule=rule, temperature=0))[0] for rule in RULES}
    assert len(texts) == 1


async def test_a_lossy_threshold_is_named_in_the_record_and_in_the_metrics(
    cluster: Cluster,
) -> None:
    _, record = await ask(cluster, accept_rule="target_only", threshold_acc=0.5)
    assert record["lossy"] is True
    _, record = await ask(cluster)
    assert record["lossy"] is False
    assert record["accept_rule"] == "coupled"
    assert await scraped(cluster, "graft_lossy_choices_total") == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"threshold_acc": 0.5}, "threshold_acc"),
        ({"accept_rule": "block", "threshold_single": 0.5}, "threshold_single"),
        ({"accept_rule": "target_only", "threshold_single": 0.0}, "threshold_single"),
        ({"accept_rule": "luck"}, "accept_rule"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(
    cluster: Cluster, fields: dict[str, Any], param: str
) -> None:
    response = await cluster.client.post(
        "/v1/completions", json={"model": cluster.model, "prompt": PROMPT, **fields}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_a_server_s_rule_is_for_those_who_name_none(model: Path) -> None:
    verify = {"accept_rule": "target_only", "threshold_single": 0.4}
    async with running_cluster(model, verify=verify) as cluster:
        _, unnamed = await ask(cluster)
        _, named = await ask(cluster, accept_rule="coupled")
        info = (await cluster.client.get("/server_info")).json()
    assert (unnamed["accept_rule"], unnamed["lossy"]) == ("target_only", True)
    assert (named["accept_rule"], named["lossy"]) == ("coupled", False)
    assert info["verify"][0]["accept_rules"] == RULES
    assert "simulated" not in info["verify"][0]


async def test_simulated_acceptance_shows_everywhere(model: Path) -> None:
    verify = {"simulate_accept_length": 2.0, "simulate_allow_clients": True}
    async with running_cluster(model, verify=verify) as cluster:
        _, record = await ask(cluster)
        info = (await cluster.client.get("/server_info")).json()
    assert record["simulated"] is True
    assert info["verify"][0]["simulated"] == {
        "accept_length": 2.0,
        "method": "match-expected",
        "token_mode": "fixed",
        "clients_allowed": True,
    }


async def test_a_benchmark_s_replica_refuses_clients_with_a_sentence(model: Path) -> None:
    async with running_cluster(model, verify={"simulate_accept_length": 2.0}) as cluster:
        response = await cluster.client.post(
            "/v1/completions", json={"model": cluster.model, "prompt": PROMPT}
        )
    assert 400 <= response.status_code < 600
    assert "its text means nothing" in response.json()["error"]["message"]
