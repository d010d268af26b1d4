"""Every example runs against a real gateway and shows what it says."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from graft.testing.cluster import running_cluster
from graft.testing.elsewhere import Elsewhere, gateway_elsewhere
from graft.testing.models import write_tiny_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NODE = EXAMPLES / "node"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    with gateway_elsewhere(tmp_path_factory.mktemp("served")) as running:
        yield running


def shown(command: Sequence[str], served: Elsewhere, folder: Path = EXAMPLES) -> str:
    """What a command prints; it must succeed and complain of nothing."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "GRAFT_URL": served.url, "GRAFT_GRPC": served.grpc},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_chat_prints_the_answer_twice_and_its_rounds(served: Elsewhere) -> None:
    out = shown([sys.executable, "chat.py"], served)
    answer = re.search(r"answer: (.*)\nstream: ", out, re.DOTALL)
    assert answer is not None
    assert f"stream: {answer[1]}\n" in out
    assert re.search(r"rounds: \d+, tokens a round: \d+\.\d\d\n$", out)


def test_tools_prints_the_call_that_had_to_be_made(served: Elsewhere) -> None:
    out = shown([sys.executable, "tools.py"], served)
    assert re.match(r"call: weather \{'city': '(Rome|Paris|Oslo)'\}\nanswer: ", out)


def test_rounds_prints_a_line_for_each(served: Elsewhere) -> None:
    lines = shown([sys.executable, "rounds.py"], served).splitlines()
    assert [int(line[:3]) for line in lines] == [*range(len(lines))]
    assert all("drafted kept" in line for line in lines)


def test_blocking_prints_a_text_and_a_refusal(served: Elsewhere) -> None:
    out = shown([sys.executable, "blocking.py"], served)
    assert out.startswith("tiny [")
    assert "INVALID_ARGUMENT invalid_argument in temperature:" in out


def test_curl_prints_json_and_a_stream(served: Elsewhere) -> None:
    if not shutil.which("curl"):
        pytest.skip("curl is not here")
    out = shown(["sh", "curl.sh"], served)
    assert '"object":"chat.completion"' in out.replace(" ", "")
    assert out.count("data: ") > 3 and "data: [DONE]" in out
    assert '"tokens"' in out


def test_grpcurl_lists_the_service_and_chats(served: Elsewhere) -> None:
    if not shutil.which("grpcurl"):
        pytest.skip("grpcurl is not here")
    out = shown(["sh", "grpcurl.sh"], served)
    assert "graft.v1.GatewayService" in out and '"answer"' in out and '"completed"' in out


def test_node_prints_the_answer_twice_and_a_refusal(served: Elsewhere) -> None:
    if not shutil.which("node") or not (NODE / "node_modules").is_dir():
        pytest.skip("run npm install in examples/node first")
    out = shown(["node", "chat.mjs"], served, NODE)
    answer = re.search(r"answer: (.*)\nstream: ", out, re.DOTALL)
    assert answer is not None
    assert f"stream: {answer[1]}\nrounds: " in out
    assert "refused: INVALID_ARGUMENT temperature" in out


def test_every_example_has_its_line_in_the_list() -> None:
    told = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    assert files == set(re.findall(r"\((\w+\.(?:py|sh))\)", told))


async def test_the_proposer_drafts_and_changes_no_word(tmp_path: Path) -> None:
    lookup = runpy.run_path(str(EXAMPLES / "proposer.py"))["Lookup"]()
    model = write_tiny_model(tmp_path / "tiny")
    async with running_cluster(model, proposers=[lookup]) as cluster:
        while not cluster.gateway.gateway.attendants.connected:
            await cluster.gateway.gateway.drafts.changed.wait(0.05)
        fields: dict[str, Any] = {
            "prompt": "a b a b a b",
            "max_tokens": 40,
            "temperature": 0,
            "ignore_eos": True,
        }
        drafted = await cluster.complete(**fields, speculation="lookup")
        plain = await cluster.complete(**fields, speculation="off")
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    assert drafted["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_the_proposer_takes_fifty_lines() -> None:
    assert len((EXAMPLES / "proposer.py").read_text().splitlines()) <= 50
