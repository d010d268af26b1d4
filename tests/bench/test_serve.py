"""Load on a real gateway with a tiny model: closed and open loop, counts and failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from graft.bench import serve
from graft.bench.ask import Question
from graft.bench.latency import Goal, Streamed
from graft.common.errors import GraftError
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model

QUESTIONS = [Question("a b c a b c a b c", 12), Question("Count to ten.", 12, 0.8, 3)]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(write_tiny_model(tmp_path / "tiny")) as running:
        yield running


async def test_a_closed_loop_asks_every_question_in_turn(cluster: Cluster) -> None:
    heard: list[Streamed] = []
    served = await serve.run(
        cluster.url, QUESTIONS, serve.Load(5, clients=2), on_answer=heard.append
    )
    answer = served.as_json()
    assert (answer["requests"], answer["failed"]) == (5, 0)
    assert answer["goodput_requests_per_s"] == answer["requests_per_s"] > 0
    assert len(heard) == 5
    for one in served.answers:
        assert 1 <= one.num_tokens <= 12
        assert one.ttft > 0 and one.e2e >= one.ttft
        assert len(one.arrivals) <= one.num_tokens
    assert set(answer["itl_ms"]) == {"mean", "p50", "p90", "p95", "p99"}
    assert len(served.page({}).tables[1].rows) == 5


async def test_an_open_loop_does_not_wait_for_answers(cluster: Cluster) -> None:
    served = await serve.run(cluster.url, QUESTIONS, serve.Load(6, rate=400.0, seed=1))
    dues = [one.due for one in served.answers]
    assert dues == sorted(dues) and dues[-1] < 1.0
    assert not any(one.error for one in served.answers)


async def test_goodput_counts_only_what_kept_the_goal(cluster: Cluster) -> None:
    served = await serve.run(cluster.url, QUESTIONS, serve.Load(2), goal=Goal(ttft_s=0.0))
    answer = served.as_json()
    assert answer["goodput_requests_per_s"] == 0 < answer["requests_per_s"]


async def test_refused_requests_are_counted_and_shown(cluster: Cluster) -> None:
    questions = [QUESTIONS[0], Question("too long", 100_000)]
    served = await serve.run(cluster.url, questions, serve.Load(4))
    assert served.as_json()["failed"] == 2
    assert "400" in served.answers[1].error


async def test_a_gateway_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(GraftError, match="did not answer"):
        async with asyncio.timeout(30):
            await serve.run("http://127.0.0.1:1", QUESTIONS, serve.Load(1))
