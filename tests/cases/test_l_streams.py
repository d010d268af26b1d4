"""What streams and bodies say of one answer, and what conversations find cached."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context=1024)


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(model) as running:
        yield running


async def chunks(cluster: Cluster, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": "one two " * 6}], "stream": True, **fields}
    response = await cluster.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_the_last_chunk_of_a_stream_has_the_usage_of_the_whole(cluster: Cluster) -> None:
    law = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "cache_salt": "a"}
    whole = await cluster.chat("one two " * 6, **law)
    law["cache_salt"] = "b"
    *others, last = await chunks(cluster, **law, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in others)
    details = whole["usage"].get("completion_tokens_details", {})
    assert not details.get("accepted_prediction_tokens")
    speculation = last["metrics"]["speculative_decoding"]
    assert speculation["num_accepted_draft_tokens"] > 0
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in others)
    assert text == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize("number", [0, -1, 1.5, "2", True])
async def test_a_number_of_choices_that_is_none_is_refused_before_the_stream(
    cluster: Cluster, number: Any
) -> None:
    response = await cluster.client.post(
        "/v1/completions", json={"prompt": "x", "n": number, "stream": True}
    )
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["param"] == "n"


async def test_a_conversation_finds_as_much_cached_with_drafts_as_without(model: Path) -> None:
    async def cached(speculation: str) -> list[int]:
        async with running_cluster(model) as cluster:
            messages: list[dict[str, str]] = []
            found = []
            for turn in range(10):
                messages.append({"role": "user", "content": f"turn {turn}, say more"})
                response = await cluster.client.post(
                    "/v1/chat/completions",
                    json={
                        "messages": messages,
                        "max_tokens": 24,
                        "temperature": 0,
                        "ignore_eos": True,
                        "speculation": speculation,
                    },
                )
                body = response.json()
                found.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
                messages.append(body["choices"][0]["message"])
            return found

    plain = await cached("off")
    assert await cached("auto") == plain
    assert plain[-1] > 300


async def test_a_prompt_of_a_million_characters_is_refused_in_words_and_at_once(
    cluster: Cluster,
) -> None:
    response = await cluster.client.post(
        "/v1/completions", json={"prompt": "many words " * 100_000}, timeout=30
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "1100000" in error["message"] and "1024" in error["message"]
