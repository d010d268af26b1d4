"""Drafters with a network, through every service: the text stays the target's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from graft.testing.checkpoints import write_eagle, write_eagle3, write_token_map
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model

LAWS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.9, "seed": 11, "top_p": 0.9, "top_k": 40},
]
PROMPTS = ["Count to ten.", "The quick brown fox jumps over the lazy dog. " * 4, "x"]
TIERS: list[Any] = [
    "auto",
    {"num_steps": 4, "topk": 1, "num_draft_tokens": 5},
    {"num_steps": 3, "topk": 4, "num_draft_tokens": 16},
]

WRITERS: dict[str, Callable[[Path, Path], Path]] = {
    "standalone": lambda folder, target: write_tiny_model(folder, layers=1, seed=5),
    "eagle": lambda folder, target: write_eagle(folder, target),
    "eagle3": lambda folder, target: write_eagle3(folder, target),
}


@asynccontextmanager
async def cluster_with(name: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    target = write_tiny_model(tmp_path / "tiny", layers=6)
    checkpoint = WRITERS[name](tmp_path / "draft", target)
    flags = {
        "proposers": [name],
        "draft_model_path": str(checkpoint),
        "model": str(target),
    }
    async with running_cluster(target, draft=flags) as running:
        yield running


def text(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["message"]["content"])


@pytest.mark.parametrize("name", WRITERS)
async def test_the_text_is_the_one_without_a_drafter(name: str, tmp_path: Path) -> None:
    # A tiny target may have written the whole text before the drafter has read a long prompt.
    drafted_counts = [0] * len(TIERS)
    async with cluster_with(name, tmp_path) as cluster:
        for law in LAWS:
            for prompt in PROMPTS:
                fields = {"max_tokens": 40, **law}
                plain = await cluster.chat(prompt, speculation="off", **fields)
                for number, tier in enumerate(TIERS):
                    mode = tier if tier == "auto" else {"proposer": name, **tier}
                    drafted = await cluster.chat(prompt, speculation=mode, **fields)
                    assert text(drafted) == text(plain)
                    record = drafted["metrics"]["speculative_decoding"]
                    drafted_counts[number] += record["num_draft_tokens"]
    assert min(drafted_counts) > 0


@pytest.mark.parametrize("name", WRITERS)
async def test_sessions_side_by_side_keep_their_texts(name: str, tmp_path: Path) -> None:
    async with cluster_with(name, tmp_path) as cluster:

        def ask(index: int, mode: str) -> Any:
            law = LAWS[index % len(LAWS)]
            prompt = f"{index} {PROMPTS[index % len(PROMPTS)]}"
            return cluster.chat(prompt, max_tokens=30, speculation=mode, **law)

        alone = [text(await ask(index, "off")) for index in range(6)]
        together = await asyncio.gather(*(ask(index, "auto") for index in range(6)))
        assert [text(body) for body in together] == alone


async def test_a_drafter_that_is_the_target_is_accepted(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "tiny", layers=2)
    flags = {"proposers": ["standalone"], "draft_model_path": str(target), "num_steps": 4}
    async with running_cluster(target, draft=flags) as cluster:
        for law in LAWS:
            body = await cluster.chat("Go on.", max_tokens=60, ignore_eos=True, **law)
            record = body["metrics"]["speculative_decoding"]
            assert record["num_accepted_draft_tokens"] > 0.75 * record["num_draft_tokens"]


@pytest.mark.parametrize("rule", ["rejection", "block"])
async def test_rules_that_compare_probabilities_accept_what_was_drawn(
    rule: str, tmp_path: Path
) -> None:
    target = write_tiny_model(tmp_path / "tiny", layers=2)
    flags = {"proposers": ["standalone"], "draft_model_path": str(target), "num_steps": 4}
    async with running_cluster(target, draft=flags) as cluster:
        body = await cluster.chat(
            "Go on.", max_tokens=80, ignore_eos=True, temperature=0.7, seed=3, accept_rule=rule
        )
        record = body["metrics"]["speculative_decoding"]
        assert record["num_accepted_draft_tokens"] > 0.6 * record["num_draft_tokens"]


LAYOUTS: dict[str, tuple[str, Callable[[Path, Path], Path], dict[str, Any]]] = {
    "eagle3 safeailab": ("eagle3", lambda f, t: write_eagle3(f, t, "safeailab"), {}),
    "eagle3 sglang": ("eagle3", lambda f, t: write_eagle3(f, t, "sglang"), {}),
    "eagle3 speculators": (
        "eagle3",
        lambda f, t: write_eagle3(f, t, "speculators", layer_ids=[0, 3, 6]),
        {},
    ),
    "eagle3 with the target's head": (
        "eagle3",
        lambda f, t: write_eagle3(f, t, draft_vocab_size=None),
        {},
    ),
    "eagle safeailab": (
        "eagle",
        lambda f, t: write_eagle(f, t, "safeailab"),
        {"allow_pickle": True},
    ),
    "eagle qwen2": ("eagle", lambda f, t: write_eagle(f, t, "qwen2", fc_bias=False), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name, write, flags", LAYOUTS.values(), ids=LAYOUTS.keys())
async def test_every_published_layout_loads_serves_and_is_lossless(
    name: str, write: Callable[[Path, Path], Path], flags: dict[str, Any], tmp_path: Path
) -> None:
    await lossless(name, write, flags, tmp_path)


async def test_a_token_map_cuts_the_head_and_leaves_the_text(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "tiny", layers=6)
    flags = {"token_map": str(write_token_map(tmp_path / "freq.pt", target)), "allow_pickle": True}
    await lossless("eagle", write_eagle, flags, tmp_path)


async def lossless(
    name: str, write: Callable[[Path, Path], Path], flags: dict[str, Any], tmp_path: Path
) -> None:
    target = write_tiny_model(tmp_path / "tiny", layers=6)
    checkpoint = write(tmp_path / "draft", target)
    draft = {
        "proposers": [name],
        "draft_model_path": str(checkpoint),
        "model": str(target),
        **flags,
    }
    async with running_cluster(target, draft=draft) as cluster:
        for law in LAWS[:2]:
            bodies = [
                await cluster.chat("Go on.", max_tokens=30, speculation=mode, **law)
                for mode in ("off", "auto")
            ]
            assert text(bodies[0]) == text(bodies[1])
            assert bodies[1]["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
