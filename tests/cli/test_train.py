"""`graft train` as a command: its stages, and a kill in the middle of them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from graft.testing.corpora import ROWS, corpus_bytes, tiny_target

_DEADLINE_S = 110.0
_LOOK_S = 0.01


async def start(folder: Path, out: str, *words: str) -> asyncio.subprocess.Process:
    """`graft train` over the small rows, into `folder / out`."""
    prompts = folder / "rows.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    target = tiny_target(folder / "target")
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "graft.cli.main", "train", f"--out={folder / out}"),
        *(f"--target={target}", f"--prompts={prompts}", "--precision=fp32", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    """Exit code and stderr."""
    async with asyncio.timeout(_DEADLINE_S):
        _, err = await process.communicate()
    return process.returncode, err.decode()


@pytest.mark.timeout(400)
async def test_a_killed_corpus_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    words = ("--stage=corpus", "--synth=12", "--answers-tokens=64", "--sessions=2")
    code, err = await ended(await start(tmp_path, "whole", *words))
    assert code == 0
    assert "17 conversations" in err

    process = await start(tmp_path, "killed", *words)
    killed = tmp_path / "killed" / "corpus"
    async with asyncio.timeout(_DEADLINE_S):
        while not (killed / "prompts.jsonl").exists():  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
    process.kill()
    await ended(process)
    assert not (killed / "closed.json").exists(), "the kill came too late"

    assert (await ended(await start(tmp_path, "killed", *words)))[0] == 0
    assert corpus_bytes(tmp_path / "killed") == corpus_bytes(tmp_path / "whole")


async def test_a_run_with_other_settings_is_told_what_differs(tmp_path: Path) -> None:
    words = ("--stage=corpus", "--synth=0", "--answers-tokens=4")
    assert (await ended(await start(tmp_path, "run", *words)))[0] == 0

    code, err = await ended(await start(tmp_path, "run", *words, "--seed=7"))

    assert code == 2
    assert "has seed 0, expected 7" in err.splitlines()[-1]
