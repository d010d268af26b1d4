"""`graft inspect`: rounds in the terminal, and a recording for the page, from a real cluster."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from graft.cli.inspect import command
from graft.cli.rounds import FORMAT, Recording, round_view, totals
from graft.testing import scripted
from graft.testing.baseline import plain_tokens
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model

PROMPT = "Write about a tree."
TIMES = {"draft": 100, "tree_wait": 2000, "queue": 300, "forward": 40000, "choice": 1600}


def one_round(**fields: Any) -> dict[str, Any]:
    """A root with two guesses below it, the second right, and the target's word after it."""
    return {
        "round": 1,
        "at_ms": 50.0,
        "plain_reason": None,
        "tokens": [5, 6],
        "texts": [" b", " c"],
        "num_accepted": 1,
        "num_drafted": 2,
        "timing_us": TIMES,
        "tree": {
            "texts": ["root", " a", " b"],
            "parents": [-1, 0, 0],
            "probabilities": [None, 0.25, 0.5],
            "accepted": [2],
            "bonus_probability": 0.75,
        },
        **fields,
    }


def printed(view: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=120)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_round_shows_its_tree_with_the_accepted_path() -> None:
    assert printed(round_view(one_round())) == [
        "round 1  1 of 2 accepted, 1 of its own  ' b' ' c'",
        "├── draft 0.1 ms, wait 2.0 ms, queue 0.3 ms, forward 40.0 ms, choice 1.6 ms",
        "└── 'root'",
        "    ├── ✕ ' a' 25%",
        "    └── ✓ ' b' 50%",
        "        └── + ' c' 75%",
    ]


def test_a_round_without_a_tree_says_why() -> None:
    plain = one_round(plain_reason="late", num_accepted=0, num_drafted=0, tree=None)
    assert printed(round_view(plain))[0] == "round 1  no tree (late)  ' b' ' c'"


def test_totals_count_rounds_tokens_and_reasons() -> None:
    prompt = one_round(plain_reason="prefill", num_accepted=0, num_drafted=0, tokens=[1])
    late = one_round(plain_reason="late", num_accepted=0, num_drafted=0, tokens=[1], tree=None)
    assert totals([prompt, one_round(), late])[:4] == [
        "4 tokens in 2 rounds, 1.50 a round",
        "1 of 2 drafted tokens accepted (50%)",
        "acceptance by depth: 1: 100%",
        "rounds without a tree: late 1",
    ]


def test_a_token_cannot_steer_the_terminal() -> None:
    hostile = one_round(texts=["\x1b[2J", " c"])
    assert "\x1b" not in "".join(printed(round_view(hostile)))


def test_a_recording_keeps_the_time_of_each_token() -> None:
    recording = Recording("hi", "tiny", {})
    choice = {"token_texts": [" b", " c"], "token_origins": ["accepted", "bonus"]}
    came = recording.take({"choices": [{**choice, "speculation_trace": [one_round()]}]})
    assert came == [one_round()]
    assert [token["at_ms"] for token in recording.tokens] == [50.0, 50.0]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    model = write_tiny_model(tmp_path / "tiny")
    prompt = list(PROMPT.encode())
    async with running_cluster(model, num_draft=0) as plain:
        truth = prompt + await plain_tokens(plain.verify_addresses[0], prompt, 40)
    proposers = [scripted.perfect(scripted.replay([truth]), 3)]
    async with running_cluster(model, proposers=proposers) as running:
        yield running


async def inspect(cluster: Cluster, *flags: str) -> str:
    arguments = [PROMPT, "--raw", "--max-tokens", "16", "--url", cluster.url, *flags]
    app: typer.Typer = command("inspect")
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


async def test_a_running_cluster_is_inspected(cluster: Cluster) -> None:
    shown = await inspect(cluster)
    assert "3 of 3 accepted, 1 of its own" in shown
    assert "✓" in shown and "16 tokens in" in shown
    off = await inspect(cluster, "--speculation", "off")
    assert "✓" not in off and "no tree (off)" in off


async def test_json_is_a_recording_with_all_tokens(cluster: Cluster) -> None:
    shown = await inspect(cluster, "--json")
    # The cluster runs in this process, and its log may stand beside the recording.
    body = json.loads(next(line for line in shown.splitlines() if line.startswith("{")))
    assert body["format"] == FORMAT
    assert len(body["tokens"]) == sum(len(one["tokens"]) for one in body["rounds"]) == 16
    assert {one["origin"] for one in body["tokens"]} >= {"accepted", "bonus"}
