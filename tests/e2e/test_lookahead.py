"""Trees that are there before they are asked for: the same text, fewer waits, few bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from graft.common.relay import Conditions
from graft.draft.proposers.base import Proposer
from graft.testing.checkpoints import write_eagle, write_eagle3
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model
from graft.testing.scripted import accept_n, likely, perfect, replay

LAWS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 7}]
PROMPTS = ["a b c a b c a b c a b c", "The quick brown fox jumps over the lazy dog. The quick"]
SYNCHRONOUS = {"num_steps": 3, "topk": 2, "num_draft_tokens": 8}
AHEAD = {**SYNCHRONOUS, "lookahead": 6}
WRITERS: dict[str, Any] = {
    "ngram": None,
    "standalone": lambda folder, target: write_tiny_model(folder, layers=2),
    "eagle": lambda folder, target: write_eagle(folder, target),
    "eagle3": lambda folder, target: write_eagle3(folder, target),
    "merged": lambda folder, target: write_eagle3(folder, target),
}


@asynccontextmanager
async def cluster_of(
    tmp_path: Path, name: str = "ngram", proposers: Sequence[Proposer] | None = None, **more: Any
) -> AsyncIterator[Cluster]:
    target = write_tiny_model(tmp_path / "tiny", layers=2 if name == "standalone" else 6)
    flags: dict[str, Any] = {}
    if (write := WRITERS.get(name)) is not None:
        flags = {
            "proposers": ["merged=eagle3+ngram" if name == "merged" else name],
            "draft_model_path": str(write(tmp_path / "draft", target)),
            "model": str(target),
        }
    async with running_cluster(target, proposers=proposers, draft=flags, **more) as cluster:
        yield cluster


def text(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["message"]["content"])


def drafted(cluster: Cluster, name: str, **labels: str) -> float:
    registry = cluster.drafters[0].metrics.registry
    return registry.get_sample_value(f"graft_draft_{name}_total", labels) or 0.0


def pushed(cluster: Cluster, outcome: str) -> float:
    registry = cluster.verifiers[0].metrics.registry
    return registry.get_sample_value("graft_pushed_trees_total", {"outcome": outcome}) or 0.0


@pytest.mark.parametrize("name", WRITERS)
async def test_off_synchronous_and_look_ahead_write_the_same_text(
    name: str, tmp_path: Path
) -> None:
    async with cluster_of(tmp_path, name, relayed=True) as cluster:
        cluster.relays[0].set_rtt(0.01)
        for law in LAWS:
            fields = {"max_tokens": 20, "ignore_eos": True, **law}
            plain = text(await cluster.chat(PROMPTS[0], speculation="off", **fields))
            for tier in (SYNCHRONOUS, AHEAD):
                wish = {"proposer": name, **tier}
                body = await cluster.chat(PROMPTS[0], speculation=wish, **fields)
                assert text(body) == plain
        assert drafted(cluster, "lookahead_trees", outcome="pushed") > 0


async def test_sessions_side_by_side_look_ahead_and_keep_their_texts(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "standalone") as cluster:

        def ask(index: int, wish: Any) -> Any:
            law = LAWS[index % len(LAWS)]
            prompt = f"{index} {PROMPTS[index % len(PROMPTS)]}"
            return cluster.chat(prompt, max_tokens=16, speculation=wish, **law)

        alone = [text(await ask(index, "off")) for index in range(4)]
        wish = {"proposer": "standalone", **AHEAD}
        together = await asyncio.gather(*(ask(index, wish) for index in range(4)))
        assert [text(body) for body in together] == alone


async def truth_of(tmp_path: Path, prompt: list[int], count: int) -> list[int]:
    """What the target says after a prompt."""
    async with cluster_of(tmp_path / "truth") as cluster:
        body = await cluster.complete(
            prompt,
            max_tokens=count,
            temperature=0,
            ignore_eos=True,
            return_token_ids=True,
            speculation="off",
        )
    found: list[int] = body["choices"][0]["token_ids"]
    return found


def take_time(cluster: Cluster, step_s: float) -> None:
    """Has every step of the target take so long: a drafter is to have a turn on a busy machine."""
    engine = cluster.verifiers[0].engine
    assert engine is not None
    run = engine._runner.run

    def slowly(step: Any) -> Any:
        time.sleep(step_s)
        return run(step)

    engine._runner.run = slowly  # type: ignore[method-assign]


async def with_script(
    tmp_path: Path,
    script: str,
    tier: dict[str, int],
    rtt_s: float,
    count: int,
    step_s: float = 0.0,
) -> tuple[Cluster, float, float]:
    """A cluster after one answer, its hit rate among rounds with a tree, and bytes a token."""
    prompt = [40, 41, 42, 43]
    truth = await truth_of(tmp_path, prompt, count)
    after = replay([[*prompt, *truth]])
    scripts = {
        "perfect": lambda: perfect(after, 3),
        "accept_n": lambda: accept_n(after, 2, 4),
        "likely": lambda: likely(after, 2, 4),
    }
    proposer = scripts[script]()
    async with cluster_of(tmp_path, script, [proposer], relayed=True) as cluster:
        cluster.relays[0].set_rtt(rtt_s)
        take_time(cluster, step_s)
        body = await cluster.complete(
            prompt,
            max_tokens=count,
            temperature=0,
            ignore_eos=True,
            return_token_ids=True,
            speculation={"proposer": proposer.name, **tier},
        )
        assert body["choices"][0]["token_ids"] == truth
        record = body["metrics"]["speculative_decoding"]
        rate = pushed(cluster, "hit") / max(1, record["num_spec_steps"] - 1)
        spent = drafted(cluster, "sent_bytes") / drafted(cluster, "committed_tokens")
    return cluster, rate, spent


async def test_a_drafter_that_is_always_right_is_always_there(tmp_path: Path) -> None:
    tier = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4, "lookahead": 8}
    cluster, rate, _ = await with_script(tmp_path, "perfect", tier, 0.004, 100, step_s=0.02)
    # The first commit comes with the prefix, before anything could be foreseen; on a busy machine
    # a few more come before the drafter had a turn.
    hits, misses = (
        drafted(cluster, "lookahead_commits", outcome=outcome) for outcome in ("hit", "miss")
    )
    assert hits > 4 * misses
    assert rate > 0.5


async def test_a_synchronous_drafter_sends_few_bytes_a_token(tmp_path: Path) -> None:
    """Trees of 8 nodes, of which 2 are accepted: what a trained drafter reaches."""
    tier = {"num_steps": 4, "topk": 4, "num_draft_tokens": 8}
    cluster, rate, spent = await with_script(tmp_path, "accept_n", tier, 0.0, 90)
    assert rate == 0.0
    assert spent <= 60
    assert drafted(cluster, "lookahead_trees", outcome="pushed") == 0


async def test_a_drafter_that_looks_ahead_sends_at_most_four_times_as_many(
    tmp_path: Path,
) -> None:
    """One that is right twice in a row, and has the right token among four after that."""
    tier = {"num_steps": 4, "topk": 1, "num_draft_tokens": 5, "lookahead": 24}
    cluster, _, spent = await with_script(tmp_path, "likely", tier, 0.02, 90)
    # How many of the 24 are worth it, the drafter learns by when its trees arrive.
    assert drafted(cluster, "lookahead_trees", outcome="pushed") > 4
    assert spent <= 256


@pytest.mark.parametrize("law", LAWS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["standalone", "eagle3", "merged"])
async def test_faults_of_the_wire_change_no_text(
    name: str, law: dict[str, Any], tmp_path: Path
) -> None:
    """Answers go on being asked for until the wire has had every fault, and once after."""
    async with cluster_of(tmp_path, name, relayed=True) as cluster:
        fields = {"max_tokens": 60, "ignore_eos": True, **law}
        plain = text(await cluster.chat(PROMPTS[0], speculation="off", **fields))
        relay = cluster.relays[0]
        wish = {"proposer": name, **AHEAD}

        async def break_wire() -> None:
            for delay_s, fault in ((0.15, "jitter"), (0.15, "hang"), (0.3, "on"), (0.1, "reset")):
                await asyncio.sleep(delay_s)
                if fault == "jitter":
                    relay.change(Conditions(0.002, 0.01), Conditions(0.002, 0.01, 200_000))
                elif fault == "reset":
                    relay.reset()
                else:
                    relay.hang(fault == "hang")

        breaking = asyncio.create_task(break_wire())
        bodies = []
        while not breaking.done():
            bodies.append(await cluster.chat(PROMPTS[0], speculation=wish, **fields))
        await breaking
        bodies.append(await cluster.chat(PROMPTS[0], speculation=wish, **fields))
        assert {text(body) for body in bodies} == {plain}
        assert relay.num_resets == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "standalone", "eagle3"])
async def test_a_hundred_prompts_and_seeds_keep_their_texts(name: str, tmp_path: Path) -> None:
    """Three hundred pairs over the three drafters, each off, synchronous and looking ahead."""
    async with cluster_of(tmp_path, name, relayed=True) as cluster:
        cluster.relays[0].set_rtt(0.004)
        places = asyncio.Semaphore(4)

        async def ask(index: int, wish: Any) -> str:
            law = LAWS[0] if index % 2 else {"temperature": 0.8, "seed": index}
            prompt = f"{index}: {PROMPTS[index % len(PROMPTS)]}"
            async with places:
                return text(await cluster.chat(prompt, max_tokens=24, speculation=wish, **law))

        plain = await asyncio.gather(*(ask(index, "off") for index in range(100)))
        for tier in (SYNCHRONOUS, AHEAD):
            wish = {"proposer": name, **tier}
            texts = await asyncio.gather(*(ask(index, wish) for index in range(100)))
            assert texts == plain
