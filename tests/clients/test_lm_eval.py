"""lm-eval over /v1/completions: the same scores with speculation and without."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from graft.testing.cluster import running_cluster
from graft.testing.models import write_tiny_model
from graft.testing.outside import python_of, run

PROGRAM = Path(__file__).parent / "programs" / "with_lm_eval.py"


async def scores(model: Path, speculation: str) -> list[Any]:
    python = await python_of("evals")
    async with running_cluster(model, gateway={"speculation": speculation}) as cluster:
        output = await run([str(python), str(PROGRAM)], cluster.url, GRAFT_MODEL=str(model))
        metrics = (await cluster.client.get("/metrics")).text
    counts = re.findall(r"^graft_draft_tokens_total\S* (\S+)$", metrics, re.MULTILINE)
    assert (sum(map(float, counts)) > 0) is (speculation != "off")
    found: list[Any] = json.loads(output.split("SCORES ", 1)[1].splitlines()[0])
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_scores_are_the_same_with_speculation_and_without(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    plain, drafted = await scores(model, "off"), await scores(model, "ngram")
    assert drafted == plain
    assert {"graft_choice", "graft_write"} <= set(plain[0])
