"""The borders of the context, the chunk, the budget and the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graft.common.errors import InvalidArgument
from graft.draft.settings import DraftSettings
from graft.gateway.settings import GatewaySettings
from graft.testing import scripted
from graft.testing.baseline import plain_tokens
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model
from graft.verify.settings import VerifySettings

CONTEXT = 128
CHUNK = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context=CONTEXT)


async def ask(cluster: Cluster, prompt: list[int], max_tokens: int, **fields: Any) -> Any:
    values = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    return await cluster.complete(prompt, max_tokens=max_tokens, **values)


def said(body: Any) -> tuple[str, list[int], str]:
    choice = body["choices"][0]
    return choice["text"], choice["token_ids"], choice["finish_reason"]


def idle(cluster: Cluster) -> bool:
    engine = cluster.verifiers[0].engine
    assert engine is not None
    now = engine.snapshot()
    return now.num_pages_free == now.num_pages


@pytest.mark.parametrize("depth", [1, 3, 8, 15])
async def test_a_text_may_end_on_the_last_position_at_every_depth(model: Path, depth: int) -> None:
    prompt = list(b"up to the very end")
    room = CONTEXT - len(prompt)
    async with running_cluster(model, num_draft=0) as plain:
        known = await plain_tokens(plain.verify_addresses[0], prompt, room)
    assert len(known) == room
    drafter = scripted.perfect(scripted.replay([prompt + known + [7] * 20]), depth)
    async with running_cluster(model, proposers=[drafter]) as cluster:
        for short in range(3):
            body = await ask(cluster, prompt + known[:short], room - short)
            assert body["choices"][0]["token_ids"] == known[short:]
            assert body["choices"][0]["finish_reason"] == "length"
        refused = await cluster.client.post(
            "/v1/completions", json={"prompt": prompt, "max_tokens": room + 1}
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert idle(cluster)


@pytest.mark.parametrize("left", [1, 2, 3])
async def test_a_prompt_that_almost_fills_the_context_is_answered(model: Path, left: int) -> None:
    prompt = [100 + index % 7 for index in range(CONTEXT - left)]
    async with running_cluster(model) as cluster:
        body = await ask(cluster, prompt, left)
        plain = await ask(cluster, prompt, left, speculation="off")
        assert said(body) == said(plain)
        assert body["usage"]["total_tokens"] == CONTEXT
        full = await cluster.client.post("/v1/completions", json={"prompt": [5] * CONTEXT})
        assert full.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1])
@pytest.mark.parametrize("cached", [0, CHUNK + 5])
async def test_chunks_and_cached_beginnings_change_nothing(
    model: Path, length: int, cached: int
) -> None:
    prompt = [97 + index * index % 11 for index in range(length)]
    async with running_cluster(model, verify={"chunk_tokens": 512}) as whole:
        expected = said(await ask(whole, prompt, 20, cache_salt="x"))
    async with running_cluster(model, verify={"chunk_tokens": CHUNK}) as cluster:
        if cached:
            await ask(cluster, prompt[:cached], 1)
        body = await ask(cluster, prompt, 20)
        again = await ask(cluster, prompt, 20)
    assert said(body) == said(again) == expected
    found = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found >= length - 2 * 16


async def test_a_small_budget_is_not_overrun_by_a_repetitive_prompt(model: Path) -> None:
    prompt = list(b"abc abc abc abc abc abc ")
    async with running_cluster(model) as cluster:
        for budget in (1, 2, 3):
            body = await ask(cluster, prompt, budget)
            assert len(body["choices"][0]["token_ids"]) == budget
            assert body["usage"]["completion_tokens"] == budget


async def test_a_drafter_with_wider_trees_than_verify_takes_is_cut(model: Path) -> None:
    async with running_cluster(
        model, draft={"num_draft_tokens": 64}, verify={"max_nodes": 8, "max_depth": 3}
    ) as cluster:
        body = await ask(cluster, list(b"one two " * 8), 40)
        refused = cluster.verifiers[0].metrics.registry.get_sample_value(
            "graft_rejected_trees_total", {"reason": "too_many_nodes"}
        )
    record = body["metrics"]["speculative_decoding"]
    assert record["num_accepted_draft_tokens"] > 0
    assert record["num_draft_tokens"] <= 7 * record["num_rounds"]
    assert not refused


async def test_a_stop_inside_a_block_does_not_spoil_the_next_turn(model: Path) -> None:
    prompt = list(b"a question of some length, two pages of it")
    async with running_cluster(model, num_draft=0) as plain:
        known = await plain_tokens(plain.verify_addresses[0], prompt, 60)
        turn = prompt + known[:5] + list(b" next?")
        expected = said(await ask(plain, turn, 20))
    drafter = scripted.perfect(scripted.replay([prompt + known]), 8)
    async with running_cluster(model, proposers=[drafter]) as cluster:
        stopped = await ask(cluster, prompt, 40, stop_token_ids=[known[5]])
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert said(await ask(cluster, turn, 20)) == expected


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        (GatewaySettings, {"tree_deadline_ms": -1}),
        (GatewaySettings, {"tree_deadline_ms": 10**9}),
        (GatewaySettings, {"replay_timeout_s": -1}),
        (GatewaySettings, {"request_timeout_s": 0}),
        (GatewaySettings, {"progress_timeout_s": float("nan")}),
        (GatewaySettings, {"keepalive_s": float("inf")}),
        (GatewaySettings, {"silent_s": -0.5}),
        (DraftSettings, {"connect_timeout_s": -1}),
        (DraftSettings, {"stall_s": 0}),
        (VerifySettings, {"stall_s": -1}),
        (VerifySettings, {"drain_s": -1}),
        (VerifySettings, {"max_running": 0}),
        (VerifySettings, {"kv_tokens": -16}),
    ],
)
def test_a_time_or_count_without_sense_is_refused_at_start(kind: Any, flags: Any) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(flags))):
        kind.load(None, flags)
