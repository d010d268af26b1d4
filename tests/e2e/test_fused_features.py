"""An EAGLE-3 drafter whose projection verify applies: same trees, same text, fewer bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graft.common.errors import Unsupported
from graft.common.feature_codec import encode
from graft.draft.checkpoints.fuse import write_fused
from graft.testing.checkpoints import write_eagle, write_eagle3
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model
from graft.v1.features_pb2 import FeatureCodec, FeatureRows
from graft.v1.verify_pb2 import SessionCommit

LAWS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "seed": 11, "top_k": 40}]
PROMPTS = ["Count to ten.", "The quick brown fox jumps over the lazy dog. " * 4]


@asynccontextmanager
async def cluster_with(
    target: Path, checkpoint: Path, projection: Path | None, codec: str
) -> AsyncIterator[Cluster]:
    draft = {
        "proposers": ["eagle3"],
        "draft_model_path": str(checkpoint),
        "model": str(target),
        "feature_codec": codec,
        "feature_fused": projection is not None,
    }
    verify = {} if projection is None else {"fused_features": str(projection)}
    async with running_cluster(target, draft=draft, verify=verify) as running:
        yield running


async def texts_and_counts(cluster: Cluster) -> list[tuple[str, int, int]]:
    found = []
    for law in LAWS:
        for prompt in PROMPTS:
            body = await cluster.chat(prompt, max_tokens=40, ignore_eos=True, **law)
            record = body["metrics"]["speculative_decoding"]
            accepted = record["num_accepted_draft_tokens"]
            text = body["choices"][0]["message"]["content"]
            found.append((str(text), int(record["num_draft_tokens"]), int(accepted)))
    return found


def bytes_of_a_row(cluster: Cluster) -> float:
    registry = cluster.verifiers[0].metrics.registry
    num_bytes, rows = (
        registry.get_sample_value(f"graft_feature_{what}_total", {"part": "commit"})
        for what in ("bytes", "rows")
    )
    assert num_bytes is not None and rows
    return num_bytes / rows


async def test_verify_applies_the_projection_and_text_and_drafting_go_on(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "tiny", layers=6)
    checkpoint = write_eagle3(tmp_path / "draft", target)
    projection = tmp_path / "fused.safetensors"
    assert write_fused(str(checkpoint), str(target), projection).width == 64
    found = {}
    for name, fused, codec, row in (
        ("plain", None, "bf16", 3 * 64 * 2),
        ("fused", projection, "bf16", 64 * 2),
        ("small", projection, "int8", 64 + 4),
    ):
        async with cluster_with(target, checkpoint, fused, codec) as cluster:
            found[name] = await texts_and_counts(cluster)
            assert bytes_of_a_row(cluster) == row
    for name in ("fused", "small"):
        assert [text for text, _, _ in found[name]] == [text for text, _, _ in found["plain"]]
        assert all(drafted > 0 for _, drafted, _ in found[name])


def test_a_committed_token_takes_640_bytes_with_all_that_goes_along() -> None:
    """The row of a state 576 wide in the message of a round that committed one token."""
    row = np.random.default_rng(0).standard_normal((1, 576)).astype(np.float32)
    message = SessionCommit(
        session_id=2**64 - 1,
        tokens=[49151],
        prefix_length=8192,
        prefix_digest=2**64 - 1,
        accepted_count=1,
        node_count=24,
        features=FeatureRows(
            start_position=8191,
            row_count=1,
            payload=encode(row, FeatureCodec.FEATURE_CODEC_INT8).tobytes(),
        ),
    )
    assert 576 < message.ByteSize() <= 640


def test_a_checkpoint_without_a_projection_is_named(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "tiny", layers=6)
    checkpoint = write_eagle(tmp_path / "draft", target)
    with pytest.raises(Unsupported, match="is an eagle checkpoint without a projection"):
        write_fused(str(checkpoint), str(target), tmp_path / "out.safetensors")
