"""A target served from quantised blocks: the same text with and without speculation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import gguf
import pytest

from graft.common.channel import open_channel
from graft.kernels.cpu.choose import native
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.gguf_models import write_gguf
from graft.testing.models import write_tiny_model
from graft.v1 import verify_pb2, verify_pb2_grpc

PROMPTS = ["Count to ten and back again.", "a b c a b c a b c a b c", "x" * 90]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    folder = write_tiny_model(tmp_path / "tiny")
    kinds = gguf.GGMLQuantizationType
    write_gguf(folder, folder / "tiny.gguf", kinds.Q4_1, others={"token_embd": kinds.Q8_0})
    (folder / "model.safetensors").unlink()
    async with running_cluster(folder, verify={"precision": "q4_1"}) as running:
        yield running


@pytest.mark.skipif(native() is None, reason="only native kernels promise equal bits")
async def test_speculation_on_equals_off(cluster: Cluster) -> None:
    async with open_channel(cluster.verify_addresses[0]) as channel:
        described = await verify_pb2_grpc.VerifyServiceStub(channel).Describe(
            verify_pb2.VerifyServiceDescribeRequest(), timeout=5
        )
    assert described.precision == "q4_1+q8_0"
    for prompt in PROMPTS:
        for law in ({"temperature": 0}, {"temperature": 0.9, "seed": 7}):
            bodies = [
                await cluster.chat(prompt, max_tokens=48, speculation=mode, **law)
                for mode in ("auto", "off")
            ]
            texts = [body["choices"][0]["message"]["content"] for body in bodies]
            assert texts[0] == texts[1]
            assert len({body["usage"]["completion_tokens"] for body in bodies}) == 1
