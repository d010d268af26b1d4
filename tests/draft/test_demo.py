"""The checkpoints of `make demo-checkpoints`: each printed command's words load a drafter."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch

from graft.draft.server import PROPOSERS, make_proposers
from graft.draft.settings import DraftSettings
from graft.testing.demo import DEMOS, TARGET, write_demo


def test_every_demo_checkpoint_loads_as_its_command_says(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    commands = write_demo(tmp_path)
    assert {demo.proposer for demo in DEMOS} == set(PROPOSERS)
    for demo, command in zip(DEMOS, commands, strict=True):
        words = shlex.split(command)
        start = words.index("graft")
        variables = dict(word.split("=") for word in words[:start])
        flags = {name.removeprefix("GRAFT_DRAFT_").lower(): int(n) for name, n in variables.items()}
        _, up, _, model, _, proposers, *switches = words[start:]
        assert (up, model) == ("up", str(tmp_path / TARGET))
        flags |= {switch.removeprefix("--").replace("-", "_"): True for switch in switches}
        named = {"proposers": proposers.split(","), "model": model}
        made = make_proposers(DraftSettings.load(None, {**named, **flags}))
        assert made[0].name == demo.proposer
        assert made[0].describe().default_tier.num_draft_tokens > 1
