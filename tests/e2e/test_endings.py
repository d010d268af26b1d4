"""Where an answer ends, at every place of an accepted block: the earliest end wins."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from graft.testing import scripted
from graft.testing.baseline import plain_tokens
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model

PROMPT = list(b"Say it again, please.")
DEPTH = 7
BLOCK = DEPTH + 1
NUM_KNOWN = 64


@dataclass(frozen=True)
class Known:
    """A cluster with a perfect drafter, and what the target writes after PROMPT."""

    cluster: Cluster
    tokens: list[int]

    async def ask(self, **fields: Any) -> dict[str, Any]:
        return await self.cluster.complete(PROMPT, temperature=0, logprobs=0, **fields)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A seed whose greedy text is plain ASCII with few repeats.
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=3)


@pytest.fixture
async def known(model: Path) -> AsyncIterator[Known]:
    async with running_cluster(model, num_draft=0) as plain:
        tokens = await plain_tokens(plain.verify_addresses[0], PROMPT, NUM_KNOWN)
    drafter = scripted.perfect(scripted.replay([PROMPT + tokens]), DEPTH)
    async with running_cluster(model, proposers=[drafter]) as cluster:
        yield Known(cluster, tokens)


def check(body: dict[str, Any], num_tokens: int, reason: str) -> None:
    choice = body["choices"][0]
    assert choice["finish_reason"] == reason
    assert body["usage"]["completion_tokens"] == num_tokens
    assert len(choice["logprobs"]["tokens"]) == num_tokens
    assert len(choice["logprobs"]["token_logprobs"]) == num_tokens
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


async def test_a_budget_is_met_to_the_token(known: Known) -> None:
    full = bytes(t for t in known.tokens if t < 256)
    for budget in range(1, 2 * BLOCK + 3):
        body = await known.ask(max_tokens=budget, ignore_eos=True)
        check(body, budget, "length")
        assert full.decode(errors="replace").startswith(body["choices"][0]["text"].rstrip("\ufffd"))


async def test_a_stop_id_ends_at_its_first_occurrence(known: Known) -> None:
    for index in range(1, 2 * BLOCK + 2):
        stop_id = known.tokens[index]
        first = known.tokens.index(stop_id)
        body = await known.ask(max_tokens=40, ignore_eos=True, stop_token_ids=[stop_id])
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] in (first, first + 1)
        visible = bytes(known.tokens[:first]).decode(errors="replace")
        assert body["choices"][0]["text"].rstrip("\ufffd") == visible.rstrip("\ufffd")


@pytest.mark.parametrize("length", [1, 2, 5])
async def test_a_stop_string_ends_at_its_first_occurrence(known: Known, length: int) -> None:
    text = bytes(known.tokens).decode("latin-1")
    for index in range(0, 2 * BLOCK + 1):
        piece = text[index : index + length]
        if not piece.isascii():
            continue
        first = text.index(piece)
        body = await known.ask(max_tokens=40, ignore_eos=True, stop=[piece])
        choice = body["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == bytes(known.tokens[:first]).decode(errors="replace")
        assert len(choice["logprobs"]["tokens"]) == body["usage"]["completion_tokens"]


async def test_the_earliest_end_wins(known: Known) -> None:
    text = bytes(known.tokens).decode("latin-1")
    at = next(i for i in range(3, 12) if text.index(text[i : i + 2]) == i and text[i].isascii())
    stop = text[at : at + 2]
    inside = await known.ask(max_tokens=at + 2, ignore_eos=True, stop=[stop])
    assert inside["choices"][0]["finish_reason"] == "stop"
    assert inside["choices"][0]["text"] == text[:at]
    cut = await known.ask(max_tokens=at + 1, ignore_eos=True, stop=[stop])
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["choices"][0]["text"] == text[: at + 1]


async def test_a_stream_never_shows_a_stop_string_or_what_follows(known: Known) -> None:
    text = bytes(known.tokens).decode("latin-1")
    for index in range(1, BLOCK + 2):
        piece = text[index : index + 4]
        if not piece.isascii():
            continue
        fields = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "stop": [piece]}
        shown = ""
        async with known.cluster.client.stream(
            "POST",
            "/v1/completions",
            json={"model": known.cluster.model, "prompt": PROMPT, "stream": True, **fields},
        ) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    shown += json.loads(line[6:])["choices"][0]["text"]
        assert shown == text[: text.index(piece)]
