"""A drafter that starts in the middle of a text takes part in the rest of it."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import closing
from pathlib import Path

from graft.draft.server import DraftServer
from graft.draft.settings import DraftSettings
from graft.testing import scripted
from graft.testing.baseline import plain_tokens
from graft.testing.cluster import running_cluster
from graft.testing.models import write_tiny_model

PROMPT = list(b"Write about a tree.")
NUM_TOKENS = 1200


async def test_a_text_begun_without_a_drafter_ends_with_one(tmp_path: Path) -> None:
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    model = write_tiny_model(tmp_path / "tiny", context=2048)
    gateway = {"draft": [f"127.0.0.1:{port}"], "poll_s": 0.02}
    async with running_cluster(model, num_draft=0, gateway=gateway) as cluster:
        truth = await plain_tokens(cluster.verify_addresses[0], PROMPT, NUM_TOKENS + 8)
        proposers = [scripted.perfect(scripted.replay([PROMPT + truth]), 3)]
        drafter = DraftServer(DraftSettings.load(None, {"port": port}), proposers=proposers)
        fields = {
            "model": cluster.model,
            "prompt": PROMPT,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        tokens: list[int] = []
        accepted = 0
        async with cluster.client.stream("POST", "/v1/completions", json=fields) as answer:
            starting: asyncio.Task[int] | None = None
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                starting = starting or asyncio.create_task(drafter.start())
                chunk = json.loads(line.removeprefix("data: "))
                for choice in chunk["choices"]:
                    tokens += choice.get("token_ids") or []
                if chunk.get("metrics"):
                    record = chunk["metrics"]["speculative_decoding"]
                    accepted = record["num_accepted_draft_tokens"]
        assert starting is not None
        await starting
        await drafter.stop(0.5)
    assert tokens == truth[:NUM_TOKENS]
    assert accepted > 0
