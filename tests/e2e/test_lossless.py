"""The text never changes: with or without drafts, whatever the tier, alone or in company."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model

PROMPTS = [
    "Count to ten and back again.",
    "a b c a b c a b c a b c",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "x" * 90,
    "Tell me: what is a tree?",
    "0123456789 0123456789 0123456789",
]
LAWS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.2, "seed": 11, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(write_tiny_model(tmp_path / "tiny")) as running:
        yield running


def text(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["message"]["content"])


@pytest.mark.parametrize("law", LAWS, ids=["greedy", "sampled", "filtered"])
async def test_speculation_on_equals_off(cluster: Cluster, law: dict[str, Any]) -> None:
    for prompt in PROMPTS:
        answers = [
            await cluster.chat(prompt, max_tokens=48, speculation=mode, **law)
            for mode in ("auto", "off")
        ]
        assert text(answers[0]) == text(answers[1])
        counted = [body["usage"]["completion_tokens"] for body in answers]
        assert counted[0] == counted[1]
        assert (
            answers[0]["choices"][0]["finish_reason"] == answers[1]["choices"][0]["finish_reason"]
        )


async def test_company_does_not_change_an_answer(cluster: Cluster) -> None:
    def ask(index: int) -> Any:
        law = LAWS[index % len(LAWS)]
        return cluster.chat(PROMPTS[index % len(PROMPTS)], max_tokens=40, **law)

    alone = [text(await ask(index)) for index in range(12)]
    together = [text(body) for body in await asyncio.gather(*(ask(i) for i in range(12)))]
    assert together == alone


async def test_every_tier_gives_the_same_text(cluster: Cluster) -> None:
    tiers: list[Any] = ["off", "auto"] + [
        {"proposer": "ngram", "num_steps": steps, "topk": width, "num_draft_tokens": nodes}
        for steps, width, nodes in [(1, 1, 2), (1, 8, 9), (4, 1, 5), (8, 8, 32), (31, 4, 64)]
    ]
    texts = {
        text(await cluster.chat(PROMPTS[1], max_tokens=60, temperature=0.7, seed=3, speculation=t))
        for t in tiers
    }
    assert len(texts) == 1


async def test_a_repeated_question_reuses_its_prefix_and_its_text(cluster: Cluster) -> None:
    question = "y" * 200
    bodies = [await cluster.chat(question, max_tokens=24, temperature=0) for _ in range(3)]
    assert len({text(body) for body in bodies}) == 1
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in bodies]
    assert cached[0] == 0
    assert cached[1] == cached[2] >= bodies[0]["usage"]["prompt_tokens"] - 32


async def test_ngram_finds_what_repeats_and_says_so(cluster: Cluster) -> None:
    body = await cluster.chat(PROMPTS[1], max_tokens=100, temperature=0, ignore_eos=True)
    record = body["metrics"]["speculative_decoding"]
    assert record["num_accepted_draft_tokens"] > 0
    assert record["num_accepted_draft_tokens"] <= record["num_draft_tokens"]
    assert record["num_rounds"] + record["num_accepted_draft_tokens"] + 1 == 100


async def test_seeds_matter_only_when_sampling(cluster: Cluster) -> None:
    async def answers(**law: Any) -> set[str]:
        return {
            text(await cluster.chat("Go on.", max_tokens=24, seed=seed, **law)) for seed in range(4)
        }

    assert len(await answers(temperature=0)) == 1
    assert len(await answers(temperature=1.0)) > 1


async def test_unseeded_requests_differ(cluster: Cluster) -> None:
    texts = [text(await cluster.chat("Go on.", max_tokens=24, temperature=1)) for _ in range(6)]
    assert len(set(texts)) > 3
