"""Drafters that are perfect, wrong, late or hostile: the text is the target's own with each."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graft.draft.proposers.base import Proposer
from graft.testing import scripted
from graft.testing.baseline import plain_tokens
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import IM_END, write_tiny_model

PROMPTS = [list(text.encode()) for text in ("Write about a tree.", "Count: 1 2 3", "abc " * 12)]
NUM_TOKENS = 40
DEPTH = 4

Make = Callable[[scripted.Baseline], Proposer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


async def outcome(model: Path, make: Make, **flags: Any) -> tuple[list[Any], list[Any], Cluster]:
    """Bodies without and with the drafter, all prompts at once, and the cluster they came from."""
    async with running_cluster(model, num_draft=0) as plain:
        runs = [
            prompt + await plain_tokens(plain.verify_addresses[0], prompt, NUM_TOKENS + DEPTH + 2)
            for prompt in PROMPTS
        ]
        alone = [await ask(plain, prompt) for prompt in PROMPTS]
    proposers = [make(scripted.replay(runs))]
    async with running_cluster(model, proposers=proposers, **flags) as cluster:
        drafted = await asyncio.gather(*(ask(cluster, prompt) for prompt in PROMPTS))
        again = await ask(cluster, PROMPTS[0])
    return alone, [*drafted, again], cluster


async def ask(cluster: Cluster, prompt: list[int]) -> dict[str, Any]:
    return await cluster.complete(
        prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=2
    )


def record(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["metrics"]["speculative_decoding"]
    return found


def assert_same_text(alone: list[Any], drafted: list[Any]) -> None:
    for plain, body in zip([*alone, alone[0]], drafted, strict=True):
        for key in ("text", "finish_reason"):
            assert body["choices"][0][key] == plain["choices"][0][key]
        mine, theirs = body["choices"][0]["logprobs"], plain["choices"][0]["logprobs"]
        assert mine["tokens"] == theirs["tokens"]
        assert mine["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-4)
        assert body["usage"]["completion_tokens"] == NUM_TOKENS


async def test_perfect_accepts_everything_in_the_fewest_rounds(model: Path) -> None:
    alone, drafted, _ = await outcome(model, lambda truth: scripted.perfect(truth, DEPTH))
    assert_same_text(alone, drafted)
    for body in drafted:
        assert record(body)["draft_acceptance_rate"] == 1.0
        # The first token comes from the prompt's forward.
        assert record(body)["num_rounds"] == math.ceil((NUM_TOKENS - 1) / (DEPTH + 1))


async def test_always_wrong_accepts_nothing(model: Path) -> None:
    alone, drafted, _ = await outcome(model, scripted.always_wrong)
    assert_same_text(alone, drafted)
    for body in drafted:
        assert record(body)["draft_acceptance_rate"] == 0.0
        assert record(body)["num_draft_tokens"] > 0
        assert record(body)["num_rounds"] == NUM_TOKENS - 1


HARMLESS: dict[str, Make] = {
    "first_wrong": scripted.first_wrong,
    "accept_2": lambda truth: scripted.accept_n(truth, 2),
    "eos_everywhere": lambda truth: scripted.eos_everywhere(IM_END, truth),
    "off_schema": lambda truth: scripted.off_schema([0, 255], truth),
    "bad_ids": lambda truth: scripted.bad_ids(),
    "nan_scores": scripted.nan_scores,
    "stale": scripted.stale,
    "double": scripted.double,
    "foreign": scripted.foreign,
    "slow": lambda truth: scripted.slow(scripted.perfect(truth), 20),
    "failing": lambda truth: scripted.failing(scripted.perfect(truth), frozenset({2, 3, 5})),
}


@pytest.mark.parametrize("name", HARMLESS)
async def test_no_drafter_changes_the_text(model: Path, name: str) -> None:
    alone, drafted, _ = await outcome(model, HARMLESS[name], gateway={"tree_deadline_ms": 60})
    assert_same_text(alone, drafted)


REFUSED = {
    "bad_ids": "token_range",
    "nan_scores": "bad_scores",
    "stale": "stale",
    "double": "repeated",
    "foreign": "foreign",
}


@pytest.mark.parametrize("name", REFUSED)
async def test_trees_that_may_not_be_used_are_counted(model: Path, name: str) -> None:
    _, _, cluster = await outcome(model, HARMLESS[name], gateway={"tree_deadline_ms": 60})
    registry = cluster.verifiers[0].metrics.registry
    counted = registry.get_sample_value("graft_rejected_trees_total", {"reason": REFUSED[name]})
    assert counted is not None and counted > 0


async def test_a_hanging_drafter_costs_one_deadline(model: Path) -> None:
    hang = scripted.Hang()
    try:
        alone, drafted, _ = await outcome(
            model, lambda truth: hang, gateway={"tree_deadline_ms": 60}
        )
    finally:
        hang.released.set()
    assert_same_text(alone, drafted)
    assert all(record(body)["num_draft_tokens"] == 0 for body in drafted)


async def test_a_drafter_that_dies_leaves_the_text_alone(model: Path) -> None:
    loop = asyncio.get_running_loop()
    running: list[Cluster] = []

    def die() -> None:
        loop.call_soon_threadsafe(lambda: loop.create_task(running[0].drafters[0].stop(0)))

    async with running_cluster(model, num_draft=0) as plain:
        runs = [
            prompt + await plain_tokens(plain.verify_addresses[0], prompt, NUM_TOKENS + 6)
            for prompt in PROMPTS
        ]
        alone = [await ask(plain, prompt) for prompt in PROMPTS]
    mortal = scripted.die_at(scripted.perfect(scripted.replay(runs)), 4, die)
    async with running_cluster(model, proposers=[mortal]) as cluster:
        running.append(cluster)
        drafted = await asyncio.gather(*(ask(cluster, prompt) for prompt in PROMPTS))
        again = await ask(cluster, PROMPTS[0])
    assert_same_text(alone, [*drafted, again])


async def test_a_drafter_for_another_vocabulary_is_not_used_and_says_why(model: Path) -> None:
    alone, drafted, _ = await outcome(model, scripted.wrong_vocab, gateway={"tree_deadline_ms": 60})
    assert_same_text(alone, drafted)
    assert all(record(body)["num_draft_tokens"] == 0 for body in drafted)
