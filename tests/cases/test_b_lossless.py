"""What speculation must leave alone: windows, laws, penalties, probabilities."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from graft.testing import scripted
from graft.testing.baseline import plain_tokens
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model
from graft.v1.sampling_pb2 import Sampling

PROMPT = list(b"one two three one two three one two")
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


async def ask(cluster: Cluster, **fields: Any) -> dict[str, Any]:
    values = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **fields}
    values["return_token_ids"] = True
    return await cluster.complete(PROMPT, **values)


def said(body: dict[str, Any]) -> tuple[str, list[int], str]:
    choice = body["choices"][0]
    return choice["text"], choice["token_ids"], choice["finish_reason"]


def record(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["metrics"]["speculative_decoding"]
    return found


async def test_a_text_three_windows_long_is_the_same_with_drafts(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "sliding", family="mistral")
    async with running_cluster(model) as cluster:
        plain = await ask(cluster, max_tokens=160, speculation="off")
        drafted = await ask(cluster, max_tokens=160)
    assert said(drafted) == said(plain)
    assert record(drafted)["num_draft_tokens"] > 0


async def test_one_request_has_one_text(model: Path) -> None:
    async with running_cluster(model) as cluster:
        texts = {(await ask(cluster))["choices"][0]["text"] for _ in range(20)}
    assert len(texts) == 1


@pytest.mark.parametrize("depth", [1, 4])
async def test_wrong_drafts_leave_a_sampled_text_alone(model: Path, depth: int) -> None:
    law = Sampling(temperature=0.8, seed=5, top_p=0.9)
    async with running_cluster(model, num_draft=0) as plain:
        known = await plain_tokens(plain.verify_addresses[0], PROMPT, NUM_TOKENS + 8, sampling=law)
    drafter = scripted.always_wrong(scripted.replay([PROMPT + known]), depth)
    async with running_cluster(model, proposers=[drafter]) as cluster:
        law_fields = {"temperature": 0.8, "seed": 5, "top_p": 0.9}
        plain_body = await ask(cluster, **law_fields, speculation="off")
        drafted = await ask(cluster, **law_fields)
    assert said(drafted) == said(plain_body)
    assert record(drafted)["draft_acceptance_rate"] == 0
    assert record(drafted)["num_rounds"] == NUM_TOKENS - 1


@pytest.mark.parametrize(
    "law",
    [
        {"frequency_penalty": 1.0},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.3},
        {"min_p": 0.05, "temperature": 1.0, "seed": 4},
        {"top_k": 5, "temperature": 1.0, "seed": 4},
        {"logit_bias": {"101": 5.0}},
        {"min_tokens": 20, "ignore_eos": False},
    ],
    ids=lambda law: next(iter(law)),
)
async def test_a_law_has_its_force_whatever_is_accepted(model: Path, law: dict[str, Any]) -> None:
    async with running_cluster(model, num_draft=0) as plain:
        body = await ask(plain, **law)
        without = await ask(plain)
    truth = scripted.replay([PROMPT + body["choices"][0]["token_ids"]])
    async with running_cluster(model, proposers=[scripted.perfect(truth, 8)]) as cluster:
        drafted = await ask(cluster, **law)
    assert said(drafted) == said(body)
    assert record(drafted)["num_accepted_draft_tokens"] > 0
    if "min_tokens" not in law:
        assert body["choices"][0]["text"] != without["choices"][0]["text"]


async def test_a_banned_token_never_comes(model: Path) -> None:
    async with running_cluster(model) as cluster:
        body = await ask(cluster)
        banned = body["choices"][0]["token_ids"][3]
        biased = await ask(cluster, logit_bias={str(banned): -100})
    assert banned not in biased["choices"][0]["token_ids"]


async def test_logprobs_and_drafts_go_together(model: Path) -> None:
    async with running_cluster(model) as cluster:
        messages = [{"role": "user", "content": "one two " * 8}]
        request = {
            "model": cluster.model,
            "messages": messages,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 5,
        }
        body = (await cluster.client.post("/v1/chat/completions", json=request)).json()
    entries = body["choices"][0]["logprobs"]["content"]
    assert len(entries) == NUM_TOKENS
    for entry in entries:
        assert len(entry["top_logprobs"]) == 5
        assert entry["logprob"] == max(top["logprob"] for top in entry["top_logprobs"])
        assert sum(math.exp(top["logprob"]) for top in entry["top_logprobs"]) <= 1.0001
    assert record(body)["num_accepted_draft_tokens"] > 0


async def test_the_second_and_third_request_are_drafted_for_too(model: Path) -> None:
    async with running_cluster(model) as cluster:
        bodies = [await ask(cluster) for _ in range(3)]
    assert all(record(body)["num_accepted_draft_tokens"] > 0 for body in bodies)


async def test_off_costs_the_drafter_nothing(model: Path) -> None:
    drafter = scripted.perfect(scripted.replay([]))
    async with running_cluster(model, proposers=[drafter]) as cluster:
        body = await ask(cluster, speculation="off")
        assert drafter.num_batches == 0 and not drafter.mirrors
    assert record(body)["num_draft_tokens"] == 0
