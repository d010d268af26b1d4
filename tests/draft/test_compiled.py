"""A compiled draft step guesses what the plain one guesses; native kernels say it is inactive."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from graft.common.tier import Tier
from graft.draft.checkpoints.load import Workshop
from graft.draft.proposers.model import ModelProposer
from graft.draft.settings import DraftSettings
from graft.kernels.ops import select
from graft.testing.checkpoints import write_eagle3
from graft.testing.lockstep import Lockstep, Script
from graft.testing.models import write_tiny_model
from graft.testing.plain import Plain


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("target") / "tiny", layers=6)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return write_eagle3(tmp_path_factory.mktemp("heads") / "eagle3", target)


def load(target: Path, head: Path, **settings: object) -> ModelProposer:
    made = Workshop(DraftSettings.load(None, {"model": str(target), **settings})).load(
        "eagle3", str(head)
    )
    assert isinstance(made, ModelProposer)
    return made


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_and_plain_steps_accept_the_same(target: Path, head: Path) -> None:
    plain = Plain.load(target)
    counts = []
    for compiled in (False, True):
        proposer = load(target, head, kernels="torch", torch_compile=compiled)
        assert hasattr(proposer.net.forward, "__wrapped__") == compiled
        need = proposer.net.needs
        assert need is not None
        scripts = [Script.written(plain, list(b"one two"), 20, need=need) for _ in range(2)]
        steps = Lockstep(proposer, scripts, Tier("eagle3", 3, 2, 7), 320)
        counts.append([steps.round() for _ in range(6)])
    assert counts[0] == counts[1]


def test_native_kernels_say_that_nothing_is_compiled(target: Path, head: Path) -> None:
    if select("cpu").name != "native":
        pytest.skip("no native library was built")
    with capture_logs() as logs:
        load(target, head, torch_compile=True)
    assert [line["setting"] for line in logs if line["event"] == "setting is inactive"] == [
        "torch_compile"
    ]
