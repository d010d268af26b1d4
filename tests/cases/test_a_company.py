"""Requests in company: nobody's text, pages or drafts depend on who else is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from graft.draft.proposers.base import Seat, chain
from graft.testing import scripted
from graft.testing.baseline import plain_tokens
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model
from graft.testing.verify_client import eventually

PREFIX = "The same long beginning of many different questions, page after page of it. "
NUM_TOKENS = 50


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(model, verify={"max_running": 16}) as running:
        yield running


def text(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["text"])


async def ask(cluster: Cluster, prompt: str | list[int], **fields: Any) -> str:
    values = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **fields}
    return text(await cluster.complete(prompt, **values))


async def test_24_streams_equal_their_solo_runs(cluster: Cluster) -> None:
    prompts = [PREFIX * (index % 2) + f"canary {index * 7919 % 1000} " * 3 for index in range(24)]
    laws = [{"temperature": 0.9 * (index % 3 > 0), "seed": index} for index in range(24)]
    together = await asyncio.gather(
        *(ask(cluster, prompt, **law) for prompt, law in zip(prompts, laws, strict=True))
    )
    alone = [await ask(cluster, p, **law) for p, law in zip(prompts, laws, strict=True)]
    assert together == alone


async def test_a_lone_request_after_a_burst_is_as_on_a_fresh_server(
    cluster: Cluster, model: Path
) -> None:
    for index in range(4):
        await ask(cluster, f"{PREFIX} solo {index}")
    await asyncio.gather(*(ask(cluster, f"{PREFIX} burst {index}") for index in range(8)))
    last = await ask(cluster, "An unrelated question.")
    async with running_cluster(model) as fresh:
        assert await ask(fresh, "An unrelated question.") == last


async def test_a_warm_cache_gives_the_texts_of_a_cold_one(cluster: Cluster) -> None:
    prompts = [PREFIX + f"and then {index}" * (1 + index % 3) for index in range(20)]
    cold = [await ask(cluster, prompt, cache_salt=f"own {i}") for i, prompt in enumerate(prompts)]
    warm = await asyncio.gather(*(ask(cluster, prompt) for prompt in prompts))
    assert [await ask(cluster, prompt) for prompt in prompts] == warm == cold


async def test_seeds_in_a_greedy_batch_change_nothing(cluster: Cluster) -> None:
    seeded = await asyncio.gather(*(ask(cluster, PREFIX, seed=seed) for seed in range(1, 9)))
    assert set(seeded) == {await ask(cluster, PREFIX)}


@pytest.mark.parametrize("at_once", [2, 5, 16])
async def test_a_text_does_not_depend_on_the_size_of_the_batch(
    cluster: Cluster, at_once: int
) -> None:
    prompts = [f"prompt number {index} " * (1 + index % 4) for index in range(16)]
    alone = [await ask(cluster, prompt) for prompt in prompts]
    places = asyncio.Semaphore(at_once)

    async def one(prompt: str) -> str:
        async with places:
            return await ask(cluster, prompt)

    assert await asyncio.gather(*map(one, prompts)) == alone


async def test_rows_of_one_batch_that_accept_0_2_and_4_stay_right(model: Path) -> None:
    prompts = [list(f"row {accepted} of a batch".encode()) for accepted in (0, 2, 4)]
    async with running_cluster(model, num_draft=0) as plain:
        runs = [
            prompt + await plain_tokens(plain.verify_addresses[0], prompt, 2 * NUM_TOKENS)
            for prompt in prompts
        ]
        alone = [await ask(plain, prompt) for prompt in prompts]
    truth = scripted.replay(runs)

    def guess(seat: Seat) -> Any:
        tokens = seat.mirror.prefix.tokens.tolist()
        accepted = int(chr(tokens[4]))
        coming = list(truth(tokens))[:4]
        wrong = [(token + 1) % 320 for token in coming[accepted:]]
        return chain(seat, coming[:accepted] + wrong)

    drafter = scripted.Scripted("mixed", guess)
    async with running_cluster(model, proposers=[drafter]) as mixed:
        bodies = await asyncio.gather(
            *(
                mixed.complete(p, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
                for p in prompts
            )
        )
    assert [text(body) for body in bodies] == alone
    lengths = [b["metrics"]["speculative_decoding"]["mean_acceptance_length"] for b in bodies]
    assert lengths[0] == 1.0
    assert lengths[0] < lengths[1] < lengths[2]


async def test_twins_finish_with_one_text_and_starve_nobody(cluster: Cluster) -> None:
    twins = [asyncio.create_task(ask(cluster, PREFIX, max_tokens=300)) for _ in range(2)]
    third = await asyncio.wait_for(ask(cluster, "me too", max_tokens=1), 10)
    assert not all(twin.done() for twin in twins)
    assert third == await ask(cluster, "me too", max_tokens=1)
    first, second = await asyncio.gather(*twins)
    assert first == second


async def test_one_ends_as_one_joins_and_one_leaves(cluster: Cluster) -> None:
    solo = [await ask(cluster, "first", max_tokens=9), await ask(cluster, "second", max_tokens=30)]
    for _ in range(15):
        first = asyncio.create_task(ask(cluster, "first", max_tokens=9))
        leaver = asyncio.create_task(ask(cluster, "leaver", max_tokens=300))
        await asyncio.sleep(0.005)
        second = asyncio.create_task(ask(cluster, "second", max_tokens=30))
        await first
        leaver.cancel()
        assert [await first, await second] == solo
        await asyncio.gather(leaver, return_exceptions=True)


async def test_choices_of_one_greedy_request_are_equal(cluster: Cluster) -> None:
    body = await cluster.complete(PREFIX, n=4, temperature=0, max_tokens=20, ignore_eos=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in body["choices"]}) == 1
    assert body["usage"]["prompt_tokens"] == len(PREFIX)
    assert body["usage"]["completion_tokens"] == 80


@pytest.mark.slow
async def test_two_thousand_requests_at_concurrency_50_leave_nothing(cluster: Cluster) -> None:
    places = asyncio.Semaphore(50)

    async def one(index: int) -> None:
        async with places:
            prompt = PREFIX[: 1 + index % 60] * (1 + index % 2)
            await ask(cluster, prompt, max_tokens=1 + index % 23, temperature=index % 2)

    await asyncio.gather(*map(one, range(2000)))
    engine = cluster.verifiers[0].engine
    assert engine is not None
    async with asyncio.timeout(5):
        await eventually(lambda: engine.snapshot().num_pages_free == engine.snapshot().num_pages)
    assert engine.snapshot().num_running == cluster.drafters[0].num_sessions == 0
