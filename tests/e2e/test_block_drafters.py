"""MTP, DFlash and UNO through every service: layouts load, serve and leave the text alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from graft.draft.checkpoints.fuse import write_fused
from graft.testing.adapters import write_adapter
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.dflash_checkpoints import DFLASH_LAYOUTS, write_dflash
from graft.testing.models import write_tiny_model
from graft.testing.mtp_checkpoints import write_mtp

LAWS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.9, "seed": 11, "top_p": 0.9, "top_k": 40},
]
PROMPTS = ["Count to ten.", "The quick brown fox jumps over the lazy dog. " * 4, "x"]
MULTI: dict[str, Any] = {"enable_multi_layer_eagle": True}

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"dflash {layout}": ("dflash", layout, {}) for layout in DFLASH_LAYOUTS},
    "dflash with a window": ("dflash", "z-lab", {"draft_window_size": 24}),
    "dflash of two": ("dflash", "z-lab", {"dflash_block_size": 2}),
    "mtp nextn": ("mtp", "nextn", {}),
    "mtp nextn alone": ("mtp", "nextn alone", {"eagle_topk": 2, "num_draft_tokens": 6}),
    "mtp mimo": ("mtp", "mimo", {"eagle_topk": 1, "num_steps": 2}),
    "multi-layer nextn": ("mtp", "nextn", MULTI),
    "multi-layer mimo_v2": ("mtp", "mimo_v2", MULTI),
    "multi-layer step3p5": ("mtp", "step3p5", MULTI),
    "uno": ("uno", "", {}),
    "uno on masks": ("uno", "", {"uno_noise": "mask", "uno_mask_token_id": 300}),
    "uno in trees": ("uno", "", {"num_steps": 4, "eagle_topk": 3, "num_draft_tokens": 8}),
}
QUICK = ("dflash z-lab", "mtp nextn", "multi-layer mimo_v2", "uno in trees")


@asynccontextmanager
async def cluster_with(case: str, folder: Path) -> AsyncIterator[Cluster]:
    target = write_tiny_model(folder / "tiny", layers=6)
    flags = written(case, folder / "draft", target)
    async with running_cluster(target, draft={**flags, "model": str(target)}) as running:
        yield running


def written(case: str, path: Path, target: Path) -> dict[str, Any]:
    """Writes a checkpoint for `target`; the flags that load it."""
    name, layout, flags = CASES[case]
    if name == "dflash":
        write_dflash(path, target, layout)
    elif name == "mtp":
        write_mtp(path, target, layout, steps=3 if flags.get("enable_multi_layer_eagle") else 1)
    else:
        write_adapter(path, target)
    where = "uno_lora_path" if name == "uno" else "draft_model_path"
    return {"proposers": [name], where: str(path), **flags}


def text(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["message"]["content"])


def drafting(body: dict[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = body["metrics"]["speculative_decoding"]
    return record


@pytest.mark.parametrize(
    "case", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in CASES]
)
async def test_the_text_is_the_one_without_a_drafter(case: str, tmp_path: Path) -> None:
    # A tiny target may have written a text before the drafter has read its prompt.
    num_drafted = 0
    async with cluster_with(case, tmp_path) as cluster:
        for law in LAWS:
            for prompt in PROMPTS:
                plain = await cluster.chat(prompt, speculation="off", max_tokens=30, **law)
                drafted = await cluster.chat(prompt, speculation="auto", max_tokens=30, **law)
                assert text(drafted) == text(plain)
                num_drafted += drafting(drafted)["num_draft_tokens"]
    assert num_drafted > 0


@pytest.mark.parametrize("case", QUICK)
async def test_sessions_side_by_side_keep_their_texts(case: str, tmp_path: Path) -> None:
    async with cluster_with(case, tmp_path) as cluster:

        def ask(index: int, mode: str) -> Any:
            law = LAWS[index % len(LAWS)]
            prompt = f"{index} {PROMPTS[index % len(PROMPTS)]}"
            return cluster.chat(prompt, max_tokens=30, speculation=mode, **law)

        alone = [text(await ask(index, "off")) for index in range(6)]
        together = await asyncio.gather(*(ask(index, "auto") for index in range(6)))
        assert [text(body) for body in together] == alone


async def test_uno_is_always_right_about_one_token(tmp_path: Path) -> None:
    """So a session takes at most half as many rounds as it has tokens, for over 100 rounds."""
    async with cluster_with("uno", tmp_path) as cluster:
        for law in LAWS[:2]:
            fields = {"max_tokens": 300, "ignore_eos": True, **law}
            body = await cluster.chat("Go on.", **fields)
            record = drafting(body)
            assert record["num_accepted_draft_tokens"] >= 0.45 * 300
            plain = await cluster.chat("Go on.", speculation="off", **fields)
            assert text(body) == text(plain)


async def test_verify_may_apply_the_projection_of_a_block_drafter(tmp_path: Path) -> None:
    """One state a token travels then, and the drafts are those of before."""
    target = write_tiny_model(tmp_path / "tiny", layers=6)
    path = write_dflash(tmp_path / "draft", target, layers=3)
    fused = tmp_path / "fused.safetensors"
    write_fused(str(path), str(target), fused)
    flags = {"proposers": ["dflash"], "model": str(target), "draft_model_path": str(path)}
    law = {"temperature": 1.0, "seed": 7, "max_tokens": 60, "ignore_eos": True}
    accepted = []
    for here, there in ({}, {}), ({"feature_fused": True}, {"fused_features": str(fused)}):
        async with running_cluster(target, draft={**flags, **here}, verify=there) as cluster:
            body = await cluster.chat("Go on.", **law)
            plain = await cluster.chat("Go on.", speculation="off", **law)
            assert text(body) == text(plain)
            accepted.append(drafting(body)["num_accepted_draft_tokens"])
    assert abs(accepted[0] - accepted[1]) <= 2
