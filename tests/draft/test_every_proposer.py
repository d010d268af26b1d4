"""What holds for every proposer, however long a session runs: its state is that of a fresh start.

Each is loaded from a checkpoint by its settings, as the draft service does.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from graft.common.sampling import Sampling
from graft.common.tier import Tier
from graft.common.tree import Tree
from graft.draft.proposers.base import Proposal, Proposer, Seat
from graft.draft.proposers.merged import MergedProposer
from graft.draft.proposers.model import ModelProposer, state_of
from graft.draft.server import make_proposers
from graft.draft.settings import DraftSettings
from graft.testing.bits import agree
from graft.testing.demo import DEMOS, TARGET, Demo, write_checkpoints
from graft.testing.lockstep import Lockstep, Script
from graft.testing.models import write_tiny_model
from graft.testing.plain import GREEDY, Plain

VOCAB = 320
PROMPT = list(range(40, 62))
# A random head is seldom right by itself; at this temperature the shared noise does its part.
HOT = Sampling(temperature=2.0, seed=4)
EVERY = pytest.mark.parametrize("demo", DEMOS, ids=[demo.name for demo in DEMOS])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("every")
    write_checkpoints(folder, write_tiny_model(folder / TARGET, layers=6, context=1024))
    _soften(folder / "eagle" / "model.safetensors")
    return folder


def _soften(path: Path) -> None:
    """Makes a random EAGLE head less sure: its states have no norm, and would drown the noise."""
    weights = load_file(path)
    for name, one in weights.items():
        if "fc." in name or name.endswith(("o_proj.weight", "down_proj.weight")):
            one *= 0.1
    save_file(weights, path, {"format": "pt"})


@pytest.fixture(scope="module")
def target(folder: Path) -> Plain:
    return Plain.load(folder / TARGET)


@pytest.fixture(scope="module")
def texts(target: Plain) -> dict[float, list[int]]:
    """950 tokens by each law, by its temperature."""
    return {law.temperature: target.text(PROMPT, 950, law) for law in (GREEDY, HOT)}


def load(demo: Demo, folder: Path) -> Proposer:
    return make_proposers(DraftSettings.load(None, demo.flags(folder)))[0]


def script(proposer: Proposer, target: Plain, prompt: list[int], answer: list[int]) -> Script:
    """A session that says `answer`, with the states that the proposer reads."""
    need = proposer.describe().needs
    states = None
    if need is not None:
        states = target.states([*prompt, *answer], need.layers, need.final_norm)
    return Script(prompt, answer, states=states)


def model_of(proposer: Proposer, seat: Seat) -> tuple[ModelProposer, Seat] | None:
    """The network behind a proposer, and the seat's place there; None for look-up alone."""
    if isinstance(proposer, MergedProposer):
        (model,) = proposer._models
        assert isinstance(model, ModelProposer)
        return model, proposer._model_seat(seat)
    return (proposer, seat) if isinstance(proposer, ModelProposer) else None


def joined(proposer: Proposer, seat: Seat) -> Seat:
    """A seat of the same session, opened now and caught up."""
    fresh = Seat(seat.mirror, seat.tier, proposer.open(seat.mirror))
    found = model_of(proposer, fresh)
    if found is not None:
        with torch.inference_mode():
            found[0].catch_up([found[1]])
    return fresh


def same_proposal(left: Proposal, right: Proposal) -> None:
    assert isinstance(left, Tree | None) and isinstance(right, Tree | None)
    if left is None or right is None:
        assert left is right
        return
    assert np.array_equal(left.tokens, right.tokens)
    assert np.array_equal(left.next_token, right.next_token)
    assert left.scores is not None and right.scores is not None
    assert agree(torch.from_numpy(left.scores), torch.from_numpy(right.scores))


def same_state(proposer: Proposer, old: Seat, new: Seat) -> None:
    """Lanes hold what is committed and no more, and both the same keys and values."""
    there, fresh = model_of(proposer, old), model_of(proposer, new)
    if there is None or fresh is None:
        return
    model = there[0]
    if isinstance(proposer, MergedProposer):
        # Its model rests while matches hold.
        with torch.inference_mode():
            model.catch_up([there[1], fresh[1]])
    lanes = [state_of(seat).lane for _, seat in (there, fresh)]
    # A drafter with the target's own network has run the newest token, too.
    assert all(lane.length == len(old.mirror.prefix) - model.net.shift for lane in lanes)
    for cache in (model.kv.cache.keys, model.kv.cache.values):
        left, right = (cache[:, one.slots(0, one.length).astype(np.int64)] for one in lanes)
        assert agree(left, right)


@EVERY
@pytest.mark.parametrize("law", [GREEDY, Sampling(temperature=1.0, seed=11)], ids=["0", "1"])
def test_a_drafter_that_rejoins_has_the_state_of_one_that_stayed(
    demo: Demo, law: Sampling, folder: Path, target: Plain
) -> None:
    """After every round, in company, and for sessions that missed some."""
    proposer = load(demo, folder)
    tier = proposer.describe().default_tier
    scripts = []
    for prompt in (PROMPT, PROMPT[:2], list(range(60, 100))):
        one = script(proposer, target, prompt, target.text(prompt, 40, law))
        scripts.append(replace(one, sampling=law))
    steps = Lockstep(proposer, scripts, tier, VOCAB)
    for number in range(6):
        steps.round([number % 3, (number + 1) % 3])
        fresh = [joined(proposer, seat) for seat in steps.seats]
        stayed, anew = proposer.propose(steps.seats), proposer.propose(fresh)
        for old, new, left, right in zip(steps.seats, fresh, stayed, anew, strict=True):
            same_proposal(left, right)
            same_state(proposer, old, new)
            proposer.close(new)


def short(proposer: Proposer) -> Tier:
    """Two tokens ahead, so that 300 rounds fit into the context."""
    tier = proposer.describe().default_tier
    nodes = 3 if tier.topk == 1 else tier.num_draft_tokens
    return replace(tier, num_steps=2, num_draft_tokens=nodes)


def accepted_in_300_rounds(
    proposer: Proposer, target: Plain, law: Sampling, answer: list[int]
) -> list[int]:
    one = replace(script(proposer, target, PROMPT, answer), sampling=law)
    steps = Lockstep(proposer, [one], short(proposer), VOCAB)
    counts = [steps.round()[0] for _ in range(300)]
    (seat,) = steps.seats
    fresh = joined(proposer, seat)
    left, right = proposer.propose([seat]), proposer.propose([fresh])
    if not isinstance(proposer, MergedProposer):
        same_proposal(left[0], right[0])
    same_state(proposer, seat, fresh)
    return counts


def with_repeats(text: list[int]) -> list[int]:
    """As long, made of its beginning over and over; every 13th token stays another."""
    return [token if i % 13 == 12 else text[i % 50] for i, token in enumerate(text)]


@EVERY
def test_acceptance_does_not_decay_over_300_rounds(
    demo: Demo, folder: Path, target: Plain, texts: dict[float, list[int]]
) -> None:
    answer = texts[HOT.temperature]
    if demo.name in ("ngram", "merged"):
        answer = with_repeats(answer)
    counts = accepted_in_300_rounds(load(demo, folder), target, HOT, answer)
    assert np.mean(counts) > 0.2
    assert np.mean(counts[200:]) > 0.65 * np.mean(counts[:100])


def test_a_drafter_that_is_the_target_is_right_for_300_rounds(
    folder: Path, target: Plain, texts: dict[float, list[int]]
) -> None:
    """Where one wrong key would show, for it has no other reason ever to be wrong."""
    demo = Demo("standalone", (f"standalone={folder / TARGET}",), settings={"eagle_topk": 1})
    proposer = load(demo, folder)
    for law in (GREEDY, HOT):
        answer = texts[law.temperature]
        assert accepted_in_300_rounds(proposer, target, law, answer) == [2] * 300
