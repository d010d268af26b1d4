"""Eight sessions through one drafter cost far less than eight times one session."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from graft.common.model_files import resolve
from graft.common.tier import Tier
from graft.draft.checkpoints.borrowed import borrow_files
from graft.draft.checkpoints.detect import open_checkpoint
from graft.draft.checkpoints.eagle3 import load_eagle3
from graft.draft.nets.eagle3 import Eagle3Net
from graft.draft.proposers.model import ModelOptions, ModelProposer
from graft.kernels.ops import Ops, select
from graft.testing.checkpoints import write_eagle3
from graft.testing.lockstep import Lockstep, Script
from graft.testing.models import write_tiny_model
from graft.testing.plain import GREEDY

HIDDEN, VOCAB, STATES = 576, 8192, 3 * 576


def drafting(net: Eagle3Net, ops: Ops, tier: Tier, num_sessions: int) -> Lockstep:
    """Sessions of one drafter, their prompts run."""
    random = np.random.default_rng(0)
    scripts = [
        Script(
            random.integers(0, VOCAB, 64).tolist(),
            random.integers(0, VOCAB, 80).tolist(),
            GREEDY,
            random.standard_normal((144, STATES)).astype(np.float32),
        )
        for _ in range(num_sessions)
    ]
    steps = Lockstep(ModelProposer("eagle3", net, ops, ModelOptions(tier)), scripts, tier, VOCAB)
    steps.proposer.propose(steps.seats)
    return steps


def round_s(steps: Lockstep) -> float:
    """Seconds of one round's drafting, with three tokens a session to catch up."""
    for place in range(len(steps.seats)):
        steps.commit(place, 3)
    began = time.perf_counter()
    steps.proposer.propose(steps.seats)
    return time.perf_counter() - began


@pytest.mark.slow
def test_eight_sessions_cost_less_than_three_times_one(tmp_path: Path) -> None:
    """Both are timed in turns, and the least of each counts: others use this machine too."""
    torch.set_num_threads(1)
    folder = write_tiny_model(
        tmp_path / "tiny", vocab_size=VOCAB, hidden=HIDDEN, layers=4, heads=9, kv_heads=3
    )
    ops = select("cpu")
    path = write_eagle3(tmp_path / "draft", folder, draft_vocab_size=VOCAB // 2)
    net = load_eagle3(open_checkpoint(path), borrow_files(resolve(str(folder), weights=True)), ops)
    chain = Tier("eagle3", num_steps=3, topk=1, num_draft_tokens=4)
    alone, company = (drafting(net, ops, chain, count) for count in (1, 8))
    times = [(round_s(alone), round_s(company)) for _ in range(20)]
    one, eight = (min(column) for column in zip(*times, strict=True))
    assert eight < 3 * one, f"one session {one * 1e3:.1f} ms, eight {eight * 1e3:.1f} ms"
