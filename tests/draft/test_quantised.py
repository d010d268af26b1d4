"""Drafters held in blocks of 8 bits: a quarter of the bytes, nearly the same guesses."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from structlog.testing import capture_logs

from graft.common.model_files import resolve
from graft.draft.checkpoints.borrowed import borrow_files
from graft.draft.checkpoints.detect import open_checkpoint
from graft.draft.checkpoints.eagle3 import load_eagle3
from graft.draft.checkpoints.held import quantised
from graft.draft.checkpoints.load import Workshop
from graft.draft.loading import ModelLoader
from graft.draft.nets.eagle3 import Eagle3Net
from graft.draft.settings import DraftSettings
from graft.kernels.ops import Ops, select
from graft.testing.adapters import write_adapter
from graft.testing.checkpoints import write_eagle3
from graft.testing.gguf_models import write_gguf
from graft.testing.models import write_tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("target") / "tiny", layers=6)


@pytest.fixture(scope="module")
def ops() -> Ops:
    ops = select("cpu")
    if not ops.keeps_blocks:
        pytest.skip("these kernels unpack blocks")
    return ops


def head(path: Path, target: Path, ops: Ops) -> Eagle3Net:
    return load_eagle3(open_checkpoint(path), borrow_files(resolve(str(target), weights=True)), ops)


def test_rounded_logits_are_near_the_exact_ones(tmp_path: Path, target: Path, ops: Ops) -> None:
    path = write_eagle3(tmp_path / "draft", target)
    states = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    exact = head(path, target, ops).logits(states)
    rounded = head(path, target, quantised(ops)).logits(states)
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).abs().max() < 0.03 * exact.abs().max()


def test_rows_that_are_no_whole_blocks_stay_as_they_are(ops: Ops) -> None:
    weight = torch.randn(8, 40, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    held = quantised(ops).pack([weight], [None])
    assert torch.equal(ops.linear(x, held), ops.linear(x, ops.pack([weight], [None])))


def test_the_setting_rounds_eagle3_and_spares_uno(tmp_path: Path, target: Path, ops: Ops) -> None:
    settings = DraftSettings.load(
        None, {"model": str(target), "draft_model_quantization": "q8_0", "allow_pickle": False}
    )
    workshop = Workshop(settings)
    made = workshop.load("eagle3", str(write_eagle3(tmp_path / "eagle3", target)))
    exact = Workshop(DraftSettings.load(None, {"model": str(target)})).load(
        "eagle3", str(tmp_path / "eagle3")
    )
    states = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(made.net.logits(states), exact.net.logits(states))  # type: ignore[attr-defined]
    uno = workshop.load("uno", str(write_adapter(tmp_path / "uno", target)))
    assert uno.ops is workshop.exact_ops  # type: ignore[attr-defined]


def inactive(settings: DraftSettings, name: str, path: Path) -> list[str]:
    with capture_logs() as logs:
        ModelLoader(settings).load(name, str(path))
    return sorted(line["setting"] for line in logs if line["event"] == "setting is inactive")


def test_what_cannot_be_honoured_is_said(tmp_path: Path, target: Path) -> None:
    wanted = {
        "model": str(target),
        "draft_model_quantization": "q8_0",
        "torch_compile": True,
        "kernels": "torch",
    }
    settings = DraftSettings.load(None, wanted)
    eagle3 = write_eagle3(tmp_path / "eagle3", target)
    assert inactive(settings, "eagle3", eagle3) == ["draft_model_quantization"]
    uno = write_adapter(tmp_path / "uno", target)
    assert inactive(settings, "uno", uno) == ["draft_model_quantization", "torch_compile"]


def standalone_precision(path: Path, quantization: str) -> str:
    settings = DraftSettings.load(None, {"draft_model_quantization": quantization})
    made = Workshop(settings).load("standalone", str(path))
    return made.describe().detail.rsplit(" ", 1)[-1]


def test_standalone_keeps_the_blocks_of_its_file_where_asked(
    tmp_path: Path, target: Path, ops: Ops
) -> None:
    path = write_gguf(target, tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q4_1)
    assert standalone_precision(path, "stored") == "q4_1"
    assert standalone_precision(path, "none") == "fp32"


def test_without_blocks_of_its_own_they_are_made(tmp_path: Path, target: Path, ops: Ops) -> None:
    settings = {"model": str(target), "draft_model_quantization": "stored"}
    workshop = Workshop(DraftSettings.load(None, settings))
    eagle3 = str(write_eagle3(tmp_path / "eagle3", target))
    rounded = Workshop(DraftSettings.load(None, settings | {"draft_model_quantization": "q8_0"}))
    states = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    kept, made = (one.load("eagle3", eagle3).net for one in (workshop, rounded))  # type: ignore[attr-defined]
    assert torch.equal(kept.logits(states), made.logits(states))
    assert workshop.load("standalone", str(target)).describe().default_tier.num_steps == 7
