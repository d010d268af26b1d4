"""`graft sim`: its JSON object, and the table and plot that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graft.cli.sim import run
from graft.common.errors import InvalidArgument


def test_the_object_is_last_and_the_report_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(seeds=1, workload=["hopeless"], report=tmp_path / "found", as_json=True)
    body = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = body["workloads"]["hopeless"]
    assert body["seeds"] == 1
    assert found["goodput"]["tokens_per_s"] > 30
    table = (tmp_path / "found" / "tiers.md").read_text()
    assert f"| hopeless | {found['plain']:.1f} |" in table
    plot = (tmp_path / "found" / "tiers.svg").read_text()
    assert plot.startswith("<svg") and "hopeless, field" in plot


def test_a_workload_that_is_not_there_is_told() -> None:
    with pytest.raises(InvalidArgument, match="no workload 'nowhere'"):
        run(workload=["nowhere"])
