"""What a round of drafting costs: many sessions through one drafter share its weights.

CPU time of the process, on one thread, so that a busy machine changes little.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from graft.common.model_files import EMBEDDED, resolve
from graft.common.tier import Tier
from graft.draft.proposers.model import ModelProposer
from graft.draft.server import make_proposers
from graft.draft.settings import DraftSettings
from graft.testing.checkpoints import target_config, write_eagle3
from graft.testing.lockstep import Lockstep, Script

TIERS = {
    "chain of 4": Tier("eagle3", num_steps=4, topk=1, num_draft_tokens=5),
    "tree of 24": Tier("eagle3", num_steps=5, topk=4, num_draft_tokens=24),
}
ROUNDS = 7


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    target = resolve(EMBEDDED, weights=False).folder
    return write_eagle3(tmp_path_factory.mktemp("cost"), target, draft_vocab_size=8192)


def round_s(proposer: ModelProposer, tier: Tier, sessions: int) -> float:
    """CPU seconds of a usual round that drafts for all sessions; two tokens each are caught up."""
    random = np.random.default_rng(sessions)
    need = proposer.net.needs
    assert need is not None
    scripts = []
    for _ in range(sessions):
        tokens = random.integers(0, 49000, 64 + 2 * ROUNDS + 2).tolist()
        states = random.standard_normal((len(tokens), 3 * 576)).astype(np.float32)
        scripts.append(Script(tokens[:64], tokens[64:], states=states))
    steps = Lockstep(proposer, scripts, tier, 49152)
    with torch.inference_mode():
        proposer.catch_up(steps.seats)
    spent = []
    for _ in range(ROUNDS):
        for place in range(sessions):
            steps.commit(place, 2)
        started = time.process_time()
        trees = proposer.propose(steps.seats)
        spent.append(time.process_time() - started)
        assert all(tree is not None for tree in trees)
    for seat in steps.seats:
        proposer.close(seat)
    return float(np.median(spent))


def one_and_eight(checkpoint: Path, quantization: str, shape: str) -> tuple[float, float]:
    """CPU seconds of a round of one session and of eight."""
    flags = {"proposers": [f"eagle3={checkpoint}"], "model": EMBEDDED}
    settings = DraftSettings.load(None, {**flags, "draft_model_quantization": quantization})
    (proposer,) = make_proposers(settings)
    assert isinstance(proposer, ModelProposer)
    one, eight = (round_s(proposer, TIERS[shape], sessions) for sessions in (1, 8))
    print(f"{quantization} {shape}: {1e3 * one:.1f} ms for one, {1e3 * eight:.1f} for eight")
    return one, eight


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.parametrize("shape", TIERS)
def test_eight_sessions_share_the_weights_of_a_step(checkpoint: Path, shape: str) -> None:
    """Chains wait for weights; 32 rows a level of trees run at the peak of a core's arithmetic."""
    assert target_config(checkpoint)["hidden_size"] == 576
    one, eight = one_and_eight(checkpoint, "none", shape)
    assert eight < (3 if shape.startswith("chain") else 5) * one


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.parametrize("shape", TIERS)
def test_rounded_weights_cost_less_than_whole_ones(checkpoint: Path, shape: str) -> None:
    """One session's weights come from the cache, eight wait for arithmetic, which nobody shares."""
    whole, rounded = (one_and_eight(checkpoint, kind, shape) for kind in ("none", "q8_0"))
    assert rounded[0] < whole[0]
    assert rounded[1] < whole[1]
