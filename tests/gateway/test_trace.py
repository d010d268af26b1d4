"""speculation_trace over a real cluster: rounds with their trees, for those who ask."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from graft.testing import scripted
from graft.testing.baseline import plain_tokens
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model

PROMPT = list(b"Write about a tree.")
NUM_TOKENS = 20
FIELDS: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": NUM_TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    """The drafter guesses the next three tokens, and is right."""
    async with running_cluster(model, num_draft=0) as plain:
        truth = PROMPT + await plain_tokens(plain.verify_addresses[0], PROMPT, NUM_TOKENS + 8)
    proposers = [scripted.perfect(scripted.replay([truth]), 3)]
    async with running_cluster(model, proposers=proposers) as running:
        yield running


async def test_rounds_show_the_trees_whose_tokens_were_committed(cluster: Cluster) -> None:
    body = await cluster.complete(**FIELDS, speculation_trace=True)
    choice = body["choices"][0]
    rounds = choice["speculation_trace"]
    assert [one["round"] for one in rounds] == list(range(len(rounds)))
    assert rounds[0]["plain_reason"] == "prefill"
    joined = [token for one in rounds for token in one["tokens"]]
    assert joined == choice["token_ids"]
    for before, one in itertools.pairwise(rounds):
        tree, path = one["tree"], one["tree"]["accepted"]
        assert tree["tokens"][0] == before["tokens"][-1], "the root is the last token decided"
        assert len(path) == one["num_accepted"]
        assert [tree["tokens"][node] for node in path] == one["tokens"][: len(path)]
        assert [tree["choices"][node] for node in (0, *path)][: len(one["tokens"])] == one["tokens"]
        assert one["timing_us"]["forward"] > 0
        assert all(0 <= value <= 1 for value in tree["probabilities"][1:])
    assert sum(one["num_accepted"] for one in rounds) > NUM_TOKENS / 2
    times = [one["at_ms"] for one in rounds]
    assert times == sorted(times)


async def test_a_trace_changes_no_word_and_comes_only_when_asked(cluster: Cluster) -> None:
    traced = await cluster.complete(**FIELDS, speculation_trace=True)
    silent = await cluster.complete(**FIELDS)
    assert "speculation_trace" not in silent["choices"][0]
    assert traced["choices"][0]["token_ids"] == silent["choices"][0]["token_ids"]


async def test_a_chat_streams_each_round_with_its_text(cluster: Cluster) -> None:
    fields = {**FIELDS, "messages": [{"role": "user", "content": "Hi"}], "speculation": "off"}
    del fields["prompt"]
    found: list[dict[str, Any]] = []
    body = {"model": cluster.model, "stream": True, "speculation_trace": True, **fields}
    async with cluster.client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                found += choice.get("speculation_trace", [])
    assert [one["plain_reason"] for one in found] == ["prefill"] + ["off"] * (len(found) - 1)
    assert sum(len(one["tokens"]) for one in found) == NUM_TOKENS
    assert {len(one["tree"]["tokens"]) for one in found} == {1}
    assert all(one["tier"] is None for one in found)
