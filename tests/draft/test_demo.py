"""The checkpoints of `make demo-checkpoints`: each printed command's words load a drafter."""

from __future__ import annotations

from pathlib import Path

import torch

from graft.draft.server import make_proposers
from graft.draft.settings import DraftSettings
from graft.testing.demo import DEMOS, TARGET, write_demo


def test_every_demo_checkpoint_loads_as_its_command_says(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    commands = write_demo(tmp_path)
    assert len(commands) == len(DEMOS)
    for demo, command in zip(DEMOS, commands, strict=True):
        word, *switches = command.split("--proposers ")[1].split()
        assert word == f"{demo.proposer}={tmp_path / demo.folder}"
        flags = {"proposers": [word], "model": str(tmp_path / TARGET)}
        flags |= {switch.removeprefix("--").replace("-", "_"): True for switch in switches}
        (made,) = make_proposers(DraftSettings.load(None, flags))
        assert made.name == demo.proposer
        assert made.describe().default_tier.num_draft_tokens > 1
