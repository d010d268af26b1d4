"""The text and its account stay the same over a lane, over gRPC, through a relay and undrafted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model
from graft.testing.verify_client import eventually

PROMPTS = ["a b c a b c a b c a b c", "Count to ten and back again.", "x" * 90]
LAWS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 7}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


async def answers(cluster: Cluster, speculation: str) -> list[str]:
    """All prompts under all laws, all at once."""
    bodies = await asyncio.gather(
        *(
            cluster.chat(prompt, max_tokens=40, ignore_eos=True, speculation=speculation, **law)
            for prompt in PROMPTS
            for law in LAWS
        )
    )
    return [str(body["choices"][0]["message"]["content"]) for body in bodies]


def counted(cluster: Cluster, name: str) -> float:
    return cluster.verifiers[0].metrics.registry.get_sample_value(name) or 0.0


async def test_answers_are_the_same_by_whatever_way_drafts_come(model: Path) -> None:
    ways: dict[str, dict[str, Any]] = {
        "lane": {},
        "grpc": {"verify": {"lane": False}},
        "relay": {"relayed": True},
    }
    said: dict[str, list[str]] = {}
    for way, how in ways.items():
        async with running_cluster(model, **how) as cluster:
            said[way] = await answers(cluster, "auto")
            assert counted(cluster, "graft_accepted_tokens_total") > 0
            assert counted(cluster, "graft_lanes") == (way == "lane")
            await eventually(lambda: counted(cluster, "graft_session_lanes") == 0)
            if way == "lane":
                assert await answers(cluster, "off") == said[way]
    assert said["grpc"] == said["relay"] == said["lane"]


async def test_each_replica_has_a_lane_to_each_drafter(model: Path) -> None:
    async with running_cluster(model, num_draft=2) as cluster:
        await asyncio.gather(*(answers(cluster, "auto") for _ in range(2)))
        assert counted(cluster, "graft_lanes") == 2
        # A drafter that goes takes its lane along; the other's stays.
        await cluster.drafters[0].stop(0)
        await eventually(lambda: counted(cluster, "graft_lanes") == 1)
        await answers(cluster, "auto")
        assert counted(cluster, "graft_lanes") == 1


async def test_commits_come_over_a_lane_and_a_lost_one_changes_no_text(model: Path) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 400, "ignore_eos": True}
    async with running_cluster(model) as cluster:
        plain = await cluster.chat(PROMPTS[0], speculation="off", **fields)
        asking = asyncio.create_task(cluster.chat(PROMPTS[0], speculation="off", **fields))
        await eventually(lambda: counted(cluster, "graft_session_lanes") == 1)
        service = cluster.verifiers[0]._service
        assert service is not None
        (outflow,) = service._sessions.values()
        assert outflow._lane is not None and outflow._lane._transport is not None
        outflow._lane._transport.abort()
        body = await asking
        text = body["choices"][0]["message"]["content"]
        assert text == plain["choices"][0]["message"]["content"]
        assert body["usage"]["completion_tokens"] == 400
