"""A run that was stopped and resumed ends as one that was not; figures and options are kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graft.common.errors import InvalidArgument
from graft.draft.checkpoints.borrowed import Borrowed, borrow
from graft.testing.models import write_tiny_model
from graft.testing.training import MemoryCorpus, law_maker, tiny_trainee
from graft.train.loop import LoopOptions, Progress, evaluate, share_of_rate, train
from graft.train.optimizer import Muon, orthogonalised
from graft.train.unroll import Eagle3Trainee, UnrollOptions
from graft.train.windows import Windows, WindowShape

OPTIONS = LoopOptions(steps=7, accumulate=2, warmup=2, keep_every=2, look_every=3)


class Stopped(Exception):
    """What ends a run in the middle."""


@pytest.fixture(scope="module")
def borrowed(tmp_path_factory: pytest.TempPathFactory) -> Borrowed:
    torch.set_num_threads(1)
    return borrow(str(write_tiny_model(tmp_path_factory.mktemp("target"))))


def run(
    borrowed: Borrowed,
    folder: Path,
    options: LoopOptions = OPTIONS,
    stop_behind: int = 0,
    dtype: torch.dtype = torch.float32,
) -> list[Progress]:
    """Trains a head in `folder`, up to the report of step `stop_behind` if that is not 0."""
    unroll = UnrollOptions(shares=(1.0, 0.5, 0.5, 0.25))
    trainee: Eagle3Trainee = tiny_trainee(borrowed, dtype=dtype, options=unroll)
    corpus = MemoryCorpus([30, 25, 41, 18, 22], trainee.layers)
    laws = corpus.laws(law_maker(borrowed, trainee.target.draft_tokens))
    shape = WindowShape(16, trainee.margin, 2)
    windows = Windows(corpus, corpus.refs, trainee.layers, shape, 4, laws)
    held = Windows(corpus, corpus.refs[:2], trainee.layers, shape, None)
    seen: list[Progress] = []

    def report(progress: Progress) -> None:
        seen.append(progress)
        if stop_behind and progress.step == stop_behind:
            raise Stopped

    train(trainee, windows, held, folder, options, report)
    return seen


def files(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "model.safetensors").read_bytes(), (folder / "config.json").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stop_behind", [1, 4, 5])
def test_a_resumed_run_ends_with_the_same_bytes(
    borrowed: Borrowed, tmp_path: Path, stop_behind: int, dtype: torch.dtype
) -> None:
    whole = run(borrowed, tmp_path / "whole", dtype=dtype)
    with pytest.raises(Stopped):
        run(borrowed, tmp_path / "cut", stop_behind=stop_behind, dtype=dtype)
    assert not (tmp_path / "cut/model.safetensors").exists()
    rest = run(borrowed, tmp_path / "cut", dtype=dtype)
    assert rest[0].step == (stop_behind - 1) // 2 * 2 + 1
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert rest[-1].figures == whole[-1].figures


def test_the_log_of_a_resumed_run_has_every_step_once(borrowed: Borrowed, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(borrowed, tmp_path, stop_behind=5)
    run(borrowed, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if not line["held"]] == list(range(1, 8))
    assert [line["step"] for line in lines if line["held"]] == [3, 6, 7]
    assert lines[-1]["accept_length"] >= 1


def test_a_finished_run_is_not_run_again(borrowed: Borrowed, tmp_path: Path) -> None:
    run(borrowed, tmp_path)
    before = files(tmp_path)
    assert run(borrowed, tmp_path) == []
    assert files(tmp_path) == before


def test_other_options_are_refused_on_resume(borrowed: Borrowed, tmp_path: Path) -> None:
    run(borrowed, tmp_path)
    with pytest.raises(InvalidArgument, match="another folder"):
        run(borrowed, tmp_path, replace(OPTIONS, rate=1e-4))


def test_the_rate_rises_to_one_and_falls_to_nothing() -> None:
    shares = [share_of_rate(step, 100, 10) for step in range(100)]
    assert shares[0] == 0.1 and max(shares) == shares[10] == 1.0
    assert shares[10:] == sorted(shares[10:], reverse=True) and shares[-1] < 0.001


def test_held_out_figures_are_sums_over_all_batches(borrowed: Borrowed) -> None:
    trainee = tiny_trainee(borrowed)
    corpus = MemoryCorpus([40, 40, 40], trainee.layers)
    small, large = (
        Windows(corpus, corpus.refs, trainee.layers, WindowShape(39, 4, count), None)
        for count in (1, 3)
    )
    one, other = evaluate(trainee, small), evaluate(trainee, large)
    assert one["agree_1"] == other["agree_1"] and one["accept_length"] == other["accept_length"]


def test_muon_moves_all_directions_alike() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(24, 12) @ torch.randn(12, 12)))
    assert float(values.min()) > 0.4 and float(values.max()) < 1.4
    matrix = torch.zeros(24, 12)
    matrix.grad = torch.randn(24, 12)
    Muon([matrix]).step(0.1, 0.0)
    assert 0.7 < float(matrix.pow(2).mean().sqrt() / (0.1 * 0.2)) < 1.3
    assert float((matrix * matrix.grad).sum()) < 0
