"""Drafters with a network work ahead on branches, and their own state stays that of the prefix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graft.common.model_files import resolve
from graft.common.sampling import Sampling
from graft.common.tier import Tier
from graft.draft.checkpoints.borrowed import borrow_files
from graft.draft.checkpoints.detect import open_checkpoint
from graft.draft.checkpoints.eagle3 import load_eagle3
from graft.draft.engine import Engine
from graft.draft.events import Committed, Opened, Outcome
from graft.draft.metrics import DraftMetrics
from graft.draft.nets.decoder import DecoderNet
from graft.draft.proposers.base import Seat
from graft.draft.proposers.branching import BranchingProposer
from graft.draft.proposers.model import ModelOptions, state_of
from graft.draft.proposers.standalone import StandaloneProposer
from graft.testing.bits import agree
from graft.testing.checkpoints import write_eagle3
from graft.testing.lockstep import Lockstep, Script
from graft.testing.models import write_tiny_model
from graft.testing.plain import GREEDY, Plain

CHAIN = Tier("standalone", num_steps=3, topk=1, num_draft_tokens=4, lookahead=6)
BUSH = Tier("standalone", num_steps=3, topk=3, num_draft_tokens=8, lookahead=10)
TIERS = pytest.mark.parametrize("tier", [CHAIN, BUSH], ids=["chain", "tree"])
PROMPT = [40, 41, 42, 43, 44, 45, 46]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("target") / "tiny", layers=4)


@pytest.fixture(scope="module")
def target(folder: Path) -> Plain:
    return Plain.load(folder)


def standalone(model: Plain, tier: Tier) -> StandaloneProposer:
    return StandaloneProposer("standalone", DecoderNet(model.target), model.ops, ModelOptions(tier))


def kv_of(proposer: BranchingProposer, seat: Seat) -> list[torch.Tensor]:
    """Keys and values of what is committed, in order of position."""
    lane = state_of(seat).lane
    slots = torch.from_numpy(lane.slots(lane.base, lane.length)).long()
    return [part[:, slots].clone() for part in (proposer.kv.cache.keys, proposer.kv.cache.values)]


@TIERS
def test_a_branch_drafts_what_the_seat_drafts_once_the_branch_came_true(
    target: Plain, tier: Tier
) -> None:
    proposer = standalone(target, tier)
    steps = Lockstep(proposer, [Script.written(target, PROMPT, 40)], tier, 320)
    seat = steps.seats[0]
    proposer.propose([seat])
    root = proposer.branch(seat, ())
    assert root is not None
    proposer.foresee([root])
    likely = tuple(steps.left(0)[:4])
    branch = proposer.branch(root, likely)
    assert branch is not None
    (ahead,) = proposer.foresee([branch])
    steps.commit(0, 4)
    (then,) = proposer.foresee([seat])
    assert ahead.tree is not None and then.tree is not None
    assert ahead.tree.tokens.tolist() == then.tree.tokens.tolist()
    assert ahead.tree.parent.tolist() == then.tree.parent.tolist()


@TIERS
def test_branches_leave_the_seat_as_it_was_and_give_their_pages_back(
    target: Plain, tier: Tier
) -> None:
    proposer = standalone(target, tier)
    steps = Lockstep(proposer, [Script.written(target, PROMPT, 40)], tier, 320)
    seat = steps.seats[0]
    proposer.propose([seat])
    before, length = kv_of(proposer, seat), state_of(seat).lane.length
    free = proposer.kv.num_pages - proposer.kv.num_free
    branches = [proposer.branch(seat, ())]
    assert branches[0] is not None
    proposer.foresee([branches[0]])
    for token in (7, 8, 9):
        branch = proposer.branch(branches[0], (token,))
        assert branch is not None
        proposer.foresee([branch])
        branches.append(branch)
    after = kv_of(proposer, seat)
    assert state_of(seat).lane.length == length
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for branch in branches:
        assert branch is not None
        proposer.close(branch)
    assert proposer.kv.num_pages - proposer.kv.num_free == free


class Rounds:
    """An engine that looks ahead, against a target that has written its text beforehand."""

    def __init__(self, proposer: BranchingProposer, script: Script, tier: Tier) -> None:
        self.outcomes: list[Outcome] = []
        self.metrics = DraftMetrics()
        self.proposer = proposer
        self.engine = Engine({proposer.name: proposer}, self.outcomes.extend, self.metrics)
        self.script = script
        self.mirror = script.mirror(len(script.prompt) + 1, 320)
        self.said = 1
        self.engine.step([Opened(1, self.mirror, tier, max_trees=16)])

    @property
    def seat(self) -> Seat:
        seat = self.engine._sessions[1].seat
        assert seat is not None
        return seat

    def look_ahead(self) -> None:
        while self.engine._preparer.wants_work:
            self.engine.look_ahead()

    def commit(self, count: int) -> None:
        tokens = tuple(self.script.answer[self.said : self.said + count])
        self.said += count
        length = len(self.mirror.prefix)
        digest = self.mirror.prefix.digest_after(tokens)
        states = self.script.states
        if states is not None and self.mirror.features is not None:
            self.mirror.features.append(states[length - 1 : length - 1 + count])
        self.engine.step([Committed(1, tokens, length + count, digest, num_drafted=3)])


@TIERS
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=3)])
def test_a_drafter_that_is_the_target_foresees_every_round(
    target: Plain, tier: Tier, sampling: Sampling
) -> None:
    rounds = Rounds(standalone(target, tier), Script.written(target, PROMPT, 60, sampling), tier)

    def hits() -> float:
        value = rounds.metrics.registry.get_sample_value
        return value("graft_draft_lookahead_commits_total", {"outcome": "hit"}) or 0

    for number in range(14):
        if number == 6:  # it has seen by now that it is right, unsure as it is of every token
            before = hits()
        rounds.look_ahead()
        assert state_of(rounds.seat).lane.length == len(rounds.mirror.prefix)
        rounds.commit(4)
    assert hits() - before >= 6


@TIERS
def test_lanes_are_those_of_a_drafter_that_never_looked_ahead(target: Plain, tier: Tier) -> None:
    script = Script.written(target, PROMPT, 60)
    ahead = Rounds(standalone(target, tier), script, tier)
    plain = standalone(target, tier)
    steps = Lockstep(plain, [script], tier, 320)
    for count in (4, 1, 3, 2, 4, 1):
        ahead.look_ahead()
        ahead.commit(count)
        ahead.look_ahead()
        steps.commit(0, count)
        plain.propose([steps.seats[0]])
        found, expected = kv_of(ahead.proposer, ahead.seat), kv_of(plain, steps.seats[0])
        for one, other in zip(found, expected, strict=True):
            assert agree(one, other)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=3)])
def test_eagle3_goes_back_to_true_states_after_every_round(
    tmp_path: Path, folder: Path, target: Plain, sampling: Sampling
) -> None:
    """Guessed states never stay: lanes are those of a prefill over the target's own states."""
    borrowed = borrow_files(resolve(str(folder), weights=True))
    path = write_eagle3(tmp_path / "draft", folder)
    net = load_eagle3(open_checkpoint(path), borrowed, target.ops)
    proposer = BranchingProposer("eagle3", net, target.ops, ModelOptions(BUSH))
    tier = replace(BUSH, proposer="eagle3")
    rounds = Rounds(proposer, Script.written(target, PROMPT, 40, sampling, net.needs), tier)
    for count in (1, 4, 2, 1, 3, 1, 1, 2):
        rounds.look_ahead()
        rounds.commit(count)
        rounds.look_ahead()
        seat = rounds.seat
        fresh = Seat(seat.mirror, tier, proposer.open(seat.mirror))
        with torch.inference_mode():
            proposer.catch_up([fresh])
        assert state_of(seat).lane.length == len(rounds.mirror.prefix) - 1
        for one, other in zip(kv_of(proposer, seat), kv_of(proposer, fresh), strict=True):
            assert agree(one, other)
        proposer.close(fresh)
    value = rounds.metrics.registry.get_sample_value
    assert (value("graft_draft_lookahead_trees_total", {"outcome": "pushed"}) or 0) > 8
