"""Predicted outputs speed a text up, are accounted for, and never change it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model

LAWS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 7}]
FIELDS: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(write_tiny_model(tmp_path / "tiny")) as running:
        yield running


def text(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["message"]["content"])


def predicted(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


@pytest.mark.parametrize("law", LAWS, ids=["greedy", "sampled"])
async def test_a_prediction_changes_no_text(cluster: Cluster, law: dict[str, Any]) -> None:
    plain = text(await cluster.chat("Go on.", speculation="off", **FIELDS, **law))
    edited = plain[:10] + "#" + plain[12:]
    for content in (plain, edited, "nothing of the kind", [{"type": "text", "text": plain}]):
        for lookahead in (0, 6):
            body = await cluster.chat(
                "Go on.",
                speculation={"proposer": "ngram", "lookahead": lookahead},
                **predicted(content),
                **FIELDS,
                **law,
            )
            assert text(body) == plain


async def test_what_came_and_what_did_not_is_in_the_usage(cluster: Cluster) -> None:
    """Letters are tokens of the tiny model, so a predicted text has as many as it has letters."""
    law = {"temperature": 0, "logit_bias": {str(code): 100 for code in range(97, 123)}}
    plain = await cluster.chat("Go on.", **FIELDS, **law)
    assert "accepted_prediction_tokens" not in plain["usage"]["completion_tokens_details"]
    said = text(plain)
    body = await cluster.chat("Go on.", **FIELDS, **law, **predicted(said + "and more"))
    assert text(body) == said
    details = body["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 48
    assert details["rejected_prediction_tokens"] == len("and more")
    rounds = body["metrics"]["speculative_decoding"]["num_rounds"]
    assert rounds < 16
    wrong = await cluster.chat("Go on.", **FIELDS, **law, **predicted("1234567890"))
    details = wrong["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 0
    assert details["rejected_prediction_tokens"] == 10
