"""`vllm bench serve` against the gateway: the acceptance it reports is the one our counters say.

It needs the environment that `graft bench compare --install vllm` makes; without it, it is skipped.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from graft.bench.peers.catalog import default_folder
from graft.testing.cluster import running_cluster
from graft.testing.models import write_tiny_model
from graft.testing.outside import run

PROGRAM = Path(__file__).parent / "programs" / "with_vllm_bench.py"
NUM_PROMPTS = 6
NUM_TOKENS = 24
COMMAND = """--backend openai --endpoint /v1/completions --dataset-name random
--random-input-len 24 --random-range-ratio 0 --max-concurrency 2 --temperature 0 --ignore-eos
--seed 3 --disable-tqdm --ready-check-timeout-sec 0 --save-result --result-filename result.json"""


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_it_reports_the_acceptance_of_our_counters(tmp_path: Path) -> None:
    python = default_folder() / "vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("vLLM is not installed: graft bench compare --install vllm")
    model = write_tiny_model(tmp_path / "tiny")
    async with running_cluster(model, gateway={"speculation": "ngram"}) as cluster:
        where = ["--base-url", cluster.url, "--model", "tiny", "--tokenizer", str(model)]
        size = ["--num-prompts", str(NUM_PROMPTS), "--random-output-len", str(NUM_TOKENS)]
        command = [
            str(python),
            str(PROGRAM),
            *COMMAND.split(),
            *where,
            *size,
            "--result-dir",
            str(tmp_path),
        ]
        output = await run(command, cluster.url, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
        metrics = (await cluster.client.get("/metrics")).text

    def counted(family: str) -> int:
        values = re.findall(rf"^{family}(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)
        return int(sum(map(float, values)))

    found = json.loads((tmp_path / "result.json").read_text())
    assert found["completed"] == NUM_PROMPTS
    assert found["total_output_tokens"] == NUM_PROMPTS * NUM_TOKENS
    drafted, accepted = counted("graft_draft_tokens_total"), counted("graft_accepted_tokens_total")
    assert found["spec_decode_draft_tokens"] == drafted > 0
    assert found["spec_decode_accepted_tokens"] == accepted > 0
    assert found["spec_decode_num_drafts"] == counted("vllm:spec_decode_num_drafts_total")
    assert found["spec_decode_acceptance_rate"] == pytest.approx(100 * accepted / drafted)
    assert "Acceptance length" in output
