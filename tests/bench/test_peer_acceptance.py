"""Our checkpoint in vLLM: how its counts are read, and, where vLLM is, that they are ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graft.bench.peer_acceptance import Asked, measure_vllm, vllm_run
from graft.bench.peers import worker
from graft.bench.peers.catalog import default_folder, interpreter_of, peer_of
from graft.bench.systems import PeerRun
from graft.common.errors import GraftError
from graft.testing.models import write_tiny_model

SCRIPT = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    answers = [(job["max_tokens"], 4, [3, 2, 1, 0]) for job in json.loads(line)]
    print(json.dumps({"answers": answers}), flush=True)
"""


async def test_questions_go_out_in_blocks_and_the_first_token_is_no_round_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "scripted_worker.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(worker, "__file__", str(script))
    seen: list[None] = []
    run = PeerRun(peer_of("vllm"), Path(sys.executable), "eagle3=head", tmp_path, 1)
    found = await measure_vllm(
        run, [Asked([1, 2], "x")] * 20, max_tokens=11, on_answer=lambda: seen.append(None)
    )
    assert len(found.answers) == len(seen) == 20
    assert found.accept_length == 10 / 4
    assert found.per_position == [0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize(
    ("tokens", "histogram", "expected"),
    [
        (10, [1, 2, 1], (10, 5, [3, 1])),
        (8, [0, 0, 4], (8, 4, [4, 4])),
    ],
    ids=["a round without a draft gave one token", "the last round was cut short"],
)
def test_rounds_are_those_that_verified_and_those_of_one_token(
    tokens: int, histogram: list[int], expected: Any
) -> None:
    said = SimpleNamespace(to_dict=lambda: {"acceptance_histogram": histogram})
    answer = SimpleNamespace(token_ids=[0] * tokens, spec_decode_metrics=said)
    assert worker._counts(answer) == expected


def test_vllm_that_is_not_installed_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path / "cache"))
    if interpreter_of(peer_of("vllm"), tmp_path) is not None:
        pytest.skip("vLLM is in this environment")
    with pytest.raises(GraftError, match=r"vllm is not installed \(graft bench compare --install"):
        vllm_run(str(write_tiny_model(tmp_path / "tiny")), "head", 1, tmp_path)


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.timeout(3600)
def test_vllm_accepts_of_our_checkpoint_what_we_accept() -> None:
    if interpreter_of(peer_of("vllm"), default_folder()) is None:
        pytest.skip("vllm is not installed (graft bench compare --install vllm installs it)")
    words = "bench acceptance --only eagle3 --vllm --limit 12 --max-tokens 48 --json".split()
    ended = subprocess.run(
        [sys.executable, "-m", "graft.cli.main", *words], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    ours, theirs = (found[name]["chain4_T0"] for name in ("eagle3", "vllm eagle3"))
    assert theirs == pytest.approx(ours, rel=0.05)
