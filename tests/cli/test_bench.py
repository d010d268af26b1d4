"""`graft bench` as a command: JSON last on stdout, files on request, one sentence for a mistake."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from graft.testing.checkpoints import write_eagle3
from graft.testing.cluster import running_cluster
from graft.testing.models import write_tiny_model
from graft.testing.mtp_checkpoints import write_mtp

_DEADLINE_S = 90.0


async def bench(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `graft bench WORDS`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "graft.cli.main", "bench", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(_DEADLINE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_verify_cost_prints_its_object_last_and_writes_a_report(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    report = tmp_path / "report"
    code, out, err = await bench(
        "verify-cost",
        *(f"--model={model}", "--precision=fp32", "--rows=4,1", "--rounds=1", "--context=16"),
        *("--threads=1", "--json", f"--report={report}"),
    )
    assert code == 0, err
    answer = json.loads(out.splitlines()[-1])
    assert list(answer) == ["stream_gb_s", "fp32"] and list(answer["fp32"]) == ["1", "4"]
    names = sorted(path.name for path in report.iterdir())
    assert names == ["verify-cost-2.csv", "verify-cost.csv", "verify-cost.html", "verify-cost.json"]


async def test_serve_measures_a_running_gateway(tmp_path: Path) -> None:
    async with running_cluster(write_tiny_model(tmp_path / "tiny")) as cluster:
        code, out, err = await bench(
            "serve",
            *(f"--url={cluster.url}", "--limit=3", "--max-tokens=6", "--clients=2"),
            *("--goal-ttft-ms=60000", "--json"),
        )
    assert code == 0, err
    answer = json.loads(out.splitlines()[-1])
    assert (answer["requests"], answer["failed"]) == (3, 0)
    assert answer["goodput_requests_per_s"] == answer["requests_per_s"]


async def test_acceptance_starts_services_with_every_drafter(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "tiny", layers=6)
    eagle3 = write_eagle3(tmp_path / "eagle3", target)
    mtp = write_mtp(tmp_path / "mtp", target, "mimo_v2", steps=3)
    report = tmp_path / "report"
    code, out, err = await bench(
        "acceptance",
        *(f"--model={target}", f"--eagle3={eagle3}", f"--mtp={mtp}"),
        "--only=eagle3,mtp,dflash,merged",
        *("--limit=2", "--max-tokens=6", "--threads=1", "--json", f"--report={report}"),
    )
    assert code == 0, err
    answer = json.loads(out.splitlines()[-1])
    ways = list(answer["eagle3"])
    assert ways == ["chain4_T0", "tree24_T0", "tree24_T1", "per_position", "spread"]
    assert next(iter(answer["mtp"])) == "chain3_T0"
    assert next(iter(answer["merged"])) == "tree24_T0"
    assert "none for" in answer["dflash"]["absent"]
    assert "dflash is left out" in err
    assert (report / "acceptance.html").is_file()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("verify-cost", "--precision=int3"), "error: precision is 'int3', expected some of"),
        (("verify-cost", "--rows=0"), "error: rows are '0', expected numbers like"),
        (("acceptance", "--only=nope"), "error: unknown drafter 'nope', expected some of"),
        (("acceptance", "--only=ngram", "--features=int8-fused"), "needs --only eagle3"),
        (("acceptance", "--only=ngram", "--vllm"), "--vllm runs an EAGLE-3 checkpoint"),
        (("compare", "--peers=nope"), "error: unknown peer 'nope', expected one of"),
        (("serve", "--url=http://127.0.0.1:1", "--limit=1"), "did not answer"),
    ],
)
async def test_a_mistake_is_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    code, out, err = await bench(*words)
    assert code == 2 and out == ""
    assert sentence in err.splitlines()[-1]
