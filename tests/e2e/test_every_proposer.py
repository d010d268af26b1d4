"""Every proposer through every service: the text is the target's own, greedy and seeded.

One draft service holds all that can be held together; the layers of multi-layer MTP have the name
of the recurrent one, and so a service of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from graft.cli.drafters import served
from graft.common.model_files import EMBEDDED, resolve
from graft.testing.adapters import write_adapter
from graft.testing.checkpoints import write_eagle, write_eagle3
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.demo import DEMOS, TARGET, write_checkpoints
from graft.testing.dflash_checkpoints import write_dflash
from graft.testing.models import write_tiny_model
from graft.testing.mtp_checkpoints import write_mtp

LAWS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 7}]
TRIES = 30
TREE_OF_UNO = {"proposer": "uno", "num_steps": 5, "topk": 3, "num_draft_tokens": 9}
WISHES: list[Any] = [
    {"proposer": name}
    for name in ("ngram", "standalone", "eagle", "eagle3", "mtp", "dflash", "uno", "merged")
] + [TREE_OF_UNO]


def together(folder: Path, target: str, standalone: str = "") -> dict[str, Any]:
    """Settings of a draft service with everything that `write_checkpoints` wrote."""
    own = {"standalone": standalone or f"{folder}/standalone", "merged": "eagle3+ngram"}
    names = [wish["proposer"] for wish in WISHES[:-1]]
    words = [f"{name}={own.get(name) or folder / name}" for name in names if name != "ngram"]
    return {"proposers": ["ngram", *words], "model": target}


def layered(folder: Path, target: str) -> dict[str, Any]:
    """Settings of a draft service with multi-layer MTP."""
    words = [f"mtp={folder}/mtp-multi-layer"]
    return {"proposers": words, "model": target, "enable_multi_layer_eagle": True}


@asynccontextmanager
async def tiny_clusters(folder: Path) -> AsyncIterator[dict[str, Cluster]]:
    """One cluster with all, one with the several layers of MTP."""
    target = write_tiny_model(folder / TARGET, layers=6)
    write_checkpoints(folder, target)
    async with (
        running_cluster(target, draft=together(folder, str(target))) as first,
        running_cluster(target, draft=layered(folder, str(target))) as second,
    ):
        yield {"together": first, "layered": second}


async def same_texts(cluster: Cluster, wishes: list[Any], count: int, tokens: int) -> None:
    """Each of `count` prompts by both laws, four at a time."""
    places = asyncio.Semaphore(4)

    async def ask(index: int, law: Mapping[str, Any], mode: Any) -> tuple[str, int]:
        prompt = f"{index}: " + "the quick brown fox " * (1 + index % 3)
        fields = {"max_tokens": tokens, "ignore_eos": True, **law}
        async with places:
            body = await cluster.complete(prompt, speculation=mode, **fields)
        record = body["metrics"]["speculative_decoding"]
        return str(body["choices"][0]["text"]), int(record["num_draft_tokens"])

    async def every(mode: Any) -> list[tuple[str, int]]:
        asked = [ask(index, law, mode) for index in range(count) for law in LAWS]
        return await asyncio.gather(*asked)

    plain = [text for text, _ in await every("off")]
    for wish in wishes:
        # Look-up finds nothing in a text that does not repeat itself.
        least = 1 if wish["proposer"] == "ngram" else 2 * count
        total = 0
        # A forward of the tiny target takes a millisecond: where another process has the cores,
        # most trees come late, and the answers say little about the drafter.
        for _ in range(TRIES):
            drafted = await every(wish)
            assert [text for text, _ in drafted] == plain, wish
            total += sum(number for _, number in drafted)
            if total >= least:
                break
        assert total >= least, wish


async def test_every_proposer_keeps_the_text(tmp_path: Path) -> None:
    async with tiny_clusters(tmp_path) as clusters:
        await same_texts(clusters["together"], WISHES, 4, 16)
        await same_texts(clusters["layered"], [{"proposer": "mtp"}], 4, 16)
        for cluster in clusters.values():
            await is_listed(cluster)


async def is_listed(cluster: Cluster) -> None:
    """Each with its default tier and its checkpoint, in /v1/models and by `graft doctor`."""
    (model,) = (await cluster.client.get("/v1/models")).json()["data"]
    block = model["speculation"]
    lines = await asyncio.to_thread(served, cluster.draft_addresses[0])
    assert set(block["proposers"]) in ({wish["proposer"] for wish in WISHES}, {"mtp"})
    for name, tier, detail, line in zip(
        block["proposers"], block["tiers"], block["details"], lines, strict=True
    ):
        assert tier["proposer"] == name and tier["num_draft_tokens"] > 1
        assert line.startswith(f"{name} at ")
        assert f"{tier['num_steps']} steps, topk {tier['topk']}, " in line
        assert detail and line.endswith(detail)
        demo = next(demo for demo in DEMOS if demo.proposer == name)
        assert demo.write is None or demo.name in detail


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_hundred_prompts_keep_their_texts(tmp_path: Path) -> None:
    async with tiny_clusters(tmp_path) as clusters:
        await same_texts(clusters["together"], WISHES, 100, 24)
        await same_texts(clusters["layered"], [{"proposer": "mtp"}], 100, 24)


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.timeout(3600)
async def test_twenty_prompts_of_smollm2_keep_their_texts(tmp_path: Path) -> None:
    """The target is its own STANDALONE drafter; the other checkpoints are random."""
    target = resolve(EMBEDDED, weights=False).folder
    write_eagle(tmp_path / "eagle", target)
    write_eagle3(tmp_path / "eagle3", target)
    write_mtp(tmp_path / "mtp", target, "mimo")
    write_mtp(tmp_path / "mtp-multi-layer", target, "mimo_v2", steps=3)
    write_dflash(tmp_path / "dflash", target)
    write_adapter(tmp_path / "uno", target)
    for flags, wishes in (
        (together(tmp_path, EMBEDDED, standalone=EMBEDDED), WISHES),
        (layered(tmp_path, EMBEDDED), [{"proposer": "mtp"}]),
    ):
        async with running_cluster(Path(EMBEDDED), draft=flags) as cluster:
            await same_texts(cluster, wishes, 20, 24)
