"""The training stage settles once what a run is, and goes on with that after any stop."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from graft.common.errors import InvalidArgument
from graft.testing.predictable import write_predictable_model
from graft.train.author import Desk
from graft.train.loop import LoopOptions
from graft.train.make_corpus import CorpusOrder, make_corpus
from graft.train.prompts import OWN
from graft.train.stage import TrainOrder, evaluate_drafter, train_drafter

FILE = "model.safetensors"


class Stopped(Exception):
    """What ends a run in the middle."""


class Ears:
    """A teller that keeps what it was told, and stops a run at the n-th unit of a stage."""

    def __init__(self, stage: str = "", units: int = 0) -> None:
        self.lines: list[str] = []
        self._stage, self._units = stage, units
        self._now, self._done = "", 0.0

    def begin(self, what: str, total: float, done: float) -> None:
        """A stage begins."""
        self._now, self._done = what, done

    def advance(self, units: float, note: str) -> None:
        """More of it is done."""
        self._done += units
        if self._units and self._now == self._stage and self._done >= self._units:
            raise Stopped

    def say(self, line: str) -> None:
        """A line that stays."""
        self.lines.append(line)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TrainOrder:
    """An order whose folder holds a finished corpus and nothing else."""
    folder = tmp_path_factory.mktemp("stage")
    target = str(write_predictable_model(folder / "target"))
    make_corpus(
        CorpusOrder(
            out=folder / "out",
            desk=Desk(target, "fp32", 1, 16, kv_tokens=8192),
            prompts=(OWN,),
            answer_tokens=16,
            max_prompt_tokens=96,
            shard_prompts=8,
            tokens=1500,
            held=0.2,
        ),
        Ears(),
    )
    return TrainOrder(
        target=target,
        out=folder / "out",
        steps=6,
        window=32,
        windows=2,
        half=False,
        loop=LoopOptions(steps=0, accumulate=2, keep_every=2, look_every=4),
    )


def beside(made: TrainOrder, folder: Path) -> TrainOrder:
    """The same order in a folder of its own, which shares the corpus."""
    folder.mkdir()
    os.symlink(made.out / "corpus", folder / "corpus")
    return replace(made, out=folder)


def drafter(order: TrainOrder) -> bytes:
    return (order.folder / FILE).read_bytes()


@pytest.mark.parametrize("proposer", ["eagle3", "mtp", "dflash"])
def test_a_stop_at_any_stage_changes_no_byte(
    made: TrainOrder, tmp_path: Path, proposer: str
) -> None:
    whole = replace(beside(made, tmp_path / "whole"), proposer=proposer)
    train_drafter(whole, Ears())
    cut = replace(beside(made, tmp_path / "cut"), proposer=proposer)
    for stage, units in (("laws of the target", 40), (f"training {proposer}", 3)):
        with pytest.raises(Stopped):
            train_drafter(cut, Ears(stage, units))
    train_drafter(cut, Ears())
    assert drafter(cut) == drafter(whole)
    assert evaluate_drafter(cut, Ears()) == evaluate_drafter(whole, Ears())


def test_minutes_become_steps_once(made: TrainOrder, tmp_path: Path) -> None:
    order = replace(beside(made, tmp_path / "out"), steps=0, minutes=0.01)
    with pytest.raises(Stopped):
        train_drafter(order, Ears("training eagle3", 1))
    steps = json.loads((order.folder / "plan.json").read_text())["steps"]
    assert steps >= 1
    train_drafter(replace(order, minutes=30.0), Ears())
    lines = (order.folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == steps


@pytest.mark.parametrize("change", [{"seed": 9}, {"window": 64}, {"half": True}])
def test_a_run_goes_on_with_its_own_settings_only(
    made: TrainOrder, tmp_path: Path, change: dict[str, object]
) -> None:
    order = beside(made, tmp_path / "out")
    train_drafter(order, Ears())
    with pytest.raises(InvalidArgument, match="begun with"):
        train_drafter(replace(order, **change), Ears())  # type: ignore[arg-type]


@pytest.mark.parametrize("proposer", ["eagle3", "mtp", "dflash"])
def test_a_drafter_goes_on_from_another(made: TrainOrder, tmp_path: Path, proposer: str) -> None:
    first = replace(beside(made, tmp_path / "first"), proposer=proposer)
    train_drafter(first, Ears())
    second = replace(
        beside(made, tmp_path / "second"),
        proposer=proposer,
        start_from=first.folder,
        loop=replace(made.loop, rate=1e-9),
        steps=1,
    )
    train_drafter(second, Ears())
    # A step of no size leaves the drafter as it was read, but for what bfloat16 rounds twice.
    before, after = load_file(first.folder / FILE), load_file(second.folder / FILE)
    assert before.keys() == after.keys()
    for name, one in before.items():
        torch.testing.assert_close(after[name].float(), one.float(), rtol=0.01, atol=1e-4)
    shutil.rmtree(second.folder)
    with pytest.raises(InvalidArgument, match=r"holds no .*drafter|no EAGLE-3 head"):
        train_drafter(replace(second, start_from=tmp_path), Ears())
    del before["norm.weight" if proposer != "mtp" else "model.mtp_layers.0.input_proj.weight"]
    save_file(before, first.folder / FILE)
    with pytest.raises(InvalidArgument, match=r"is not there|no EAGLE-3 head"):
        train_drafter(second, Ears())


def test_without_a_drafter_there_is_nothing_to_evaluate(made: TrainOrder, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no trained drafter"):
        evaluate_drafter(beside(made, tmp_path / "out"), Ears())
