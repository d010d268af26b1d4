"""The whole command on a tiny target: corpus, training, evaluation, and a drafter that drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from graft.cli.train import command
from graft.draft.checkpoints.borrowed import borrow
from graft.draft.checkpoints.detect import open_checkpoint
from graft.draft.checkpoints.eagle3 import load_eagle3
from graft.kernels.ops import select
from graft.testing.predictable import write_predictable_model
from graft.train.corpus import Corpus
from graft.train.loop import evaluate
from graft.train.make_trainee import UnrollChoice, make_trainee
from graft.train.windows import Windows, WindowShape


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The target, and the folder of `graft train --smoke`."""
    folder = tmp_path_factory.mktemp("smoke")
    target = write_predictable_model(folder / "target")
    order = ["--smoke", "--target", str(target), "--out", str(folder / "out")]
    result = CliRunner().invoke(command("train"), order)
    assert result.exit_code == 0, result.output
    return target, folder / "out"


def test_the_drafter_accepts_clearly_more_than_an_untrained_one(run: tuple[Path, Path]) -> None:
    target, out = run
    trained = json.loads((out / "eagle3/held.json").read_text())
    torch.manual_seed(0)
    corpus = Corpus(out / "corpus")
    fresh = make_trainee("eagle3", borrow(str(target)), corpus, torch.float32, UnrollChoice())
    shape = WindowShape(64, fresh.margin, 4)
    held = Windows(corpus, corpus.sequences("held"), fresh.layers, shape, None)
    untrained = evaluate(fresh, held)
    assert untrained["chain"] < 1.2
    assert trained["chain"] > 1.5
    assert trained["agree_1"] > untrained["agree_1"] + 0.25


def test_the_drafter_loads_as_a_published_one(run: tuple[Path, Path]) -> None:
    target, out = run
    net = load_eagle3(
        open_checkpoint(out / "eagle3"), borrow(str(target)), select("cpu", 1, "torch")
    )
    assert net.token_ids is not None
    assert net.token_ids.tolist() == Corpus(out / "corpus").draft_vocab().tolist()


def test_the_curves_of_the_run_are_drawn(run: tuple[Path, Path]) -> None:
    page = (run[1] / "eagle3/training.html").read_text()
    assert page.count("<svg") == 4 and "http" not in page.replace("http://www.w3.org", "")
