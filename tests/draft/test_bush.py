"""Trees grown in one call are those grown level by level, for every law, shape and mix of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from graft.common.model_files import resolve
from graft.common.sampling import Sampling
from graft.common.tier import Tier
from graft.common.tree import FloatArray, Tree
from graft.draft.checkpoints.borrowed import Borrowed, borrow_files
from graft.draft.checkpoints.detect import open_checkpoint
from graft.draft.checkpoints.eagle3 import load_eagle3
from graft.draft.checkpoints.held import quantised
from graft.draft.proposers.base import Seat
from graft.draft.proposers.model import ModelOptions, ModelProposer, state_of
from graft.draft.ran import Ran
from graft.kernels.cpu.library import available
from graft.kernels.ops import Ops, select
from graft.testing.checkpoints import write_eagle3
from graft.testing.lockstep import Lockstep, Script
from graft.testing.models import write_tiny_model
from graft.v1.sampling_pb2 import AcceptRule

pytestmark = pytest.mark.skipif(not available(), reason="no native library was built")

VOCAB = 320
BUSH = Tier("eagle3", num_steps=4, topk=3, num_draft_tokens=14)
TIERS = [
    BUSH,
    Tier("eagle3", 3, 4, 8),
    Tier("eagle3", 4, 1, 5),
    Tier("eagle3", 1, 5, 4),
    Tier("eagle3", 5, 2, 64),
    Tier("eagle3", 6, 1, 4),
]
GREEDY = Sampling()
LAWS = [
    GREEDY,
    Sampling(temperature=1.0, seed=11),
    Sampling(temperature=0.3, seed=7),
    Sampling(temperature=0.8, top_p=0.6, seed=1),
    Sampling(temperature=1.5, top_k=5, seed=2),
    Sampling(temperature=2.0, min_p=0.2, top_p=0.95, seed=3),
    Sampling(temperature=0.7, top_k=1, seed=4),
    Sampling(temperature=1.0, seed=5, rule=AcceptRule.ACCEPT_RULE_TARGET_ONLY),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("target") / "tiny", layers=6)


@pytest.fixture(scope="module")
def borrowed(folder: Path) -> Borrowed:
    return borrow_files(resolve(str(folder), weights=True))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    return write_eagle3(tmp_path_factory.mktemp("draft") / "head", folder)


def proposer(path: Path, borrowed: Borrowed, ops: Ops, whole: bool = True) -> ModelProposer:
    """whole: trees are grown in one call."""
    net = load_eagle3(open_checkpoint(path), borrowed, ops)
    if not whole:
        net.recurrent = None
    return ModelProposer("eagle3", net, ops, ModelOptions(BUSH))


def sessions(drafter: ModelProposer, laws: list[Sampling], tiers: list[Tier]) -> list[Seat]:
    """One for each law and tier, each in a text and with states of its own."""
    random = np.random.default_rng(3)
    seats = []
    need = drafter.net.needs
    assert need is not None
    for law, tier in zip(laws, tiers, strict=True):
        count = int(random.integers(5, 60))
        tokens = random.integers(0, VOCAB, count).tolist()
        states = random.standard_normal((count, 64 * len(need.layers))).astype(np.float32)
        script = Script(tokens[:2], tokens[2:], law, states)
        mirror = script.mirror(count, VOCAB)
        seats.append(Seat(mirror, tier, drafter.open(mirror)))
    return seats


def drafted(
    drafter: ModelProposer, laws: list[Sampling], tiers: list[Tier], wide: bool = False
) -> list[tuple[Tree, Ran]]:
    seats = sessions(drafter, laws, tiers)
    made = []
    with torch.inference_mode():
        trees = drafter.trees(seats, wide)
    for tree, seat in zip(trees, seats, strict=True):
        ran = state_of(seat).ran
        assert isinstance(tree, Tree)
        assert ran is not None
        made.append((tree, ran))
    return made


def scores(tree: Tree) -> FloatArray:
    assert tree.scores is not None
    return tree.scores


def filtered(law: Sampling) -> bool:
    return law.top_k > 1 or law.top_p < 1 or law.min_p > 0


def assert_same(
    laws: list[Sampling], ours: list[tuple[Tree, Ran]], expected: list[tuple[Tree, Ran]]
) -> None:
    """The same trees by the same runs; scores may differ in how exponentials round."""
    for law, (tree, ran), (other, other_ran) in zip(laws, ours, expected, strict=True):
        assert tree.tokens.tolist() == other.tokens.tolist()
        assert tree.parent.tolist() == other.parent.tolist()
        np.testing.assert_allclose(scores(tree), scores(other), rtol=1e-4, atol=1e-5)
        assert ran.num_run == other_ran.num_run
        if filtered(law):
            continue  # which of the tokens without a chance were run does not matter
        assert list(ran.tokens) == list(other_ran.tokens)
        assert list(ran.parents) == list(other_ran.parents)
        if ran.num_run:
            assert ran.states is not None
            assert other_ran.states is not None
            assert torch.equal(ran.states, other_ran.states)


@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: f"{tier.num_steps}-{tier.topk}")
@pytest.mark.parametrize("law", LAWS, ids=range(len(LAWS)))
def test_one_call_gives_the_tree_of_all_levels(
    checkpoint: Path, borrowed: Borrowed, law: Sampling, tier: Tier
) -> None:
    ops = select("cpu", 1, "native")
    whole = drafted(proposer(checkpoint, borrowed, ops), [law], [tier])
    levels = drafted(proposer(checkpoint, borrowed, ops, whole=False), [law], [tier])
    assert_same([law], whole, levels)


def test_sessions_of_all_laws_and_shapes_grow_side_by_side(
    checkpoint: Path, borrowed: Borrowed
) -> None:
    laws = LAWS * len(TIERS)
    tiers = [tier for tier in TIERS for _ in LAWS]
    one, two = select("cpu", 1, "native"), select("cpu", 2, "native")
    together = drafted(proposer(checkpoint, borrowed, two), laws, tiers)
    levels = drafted(proposer(checkpoint, borrowed, one, whole=False), laws, tiers)
    assert_same(laws, together, levels)


def test_wide_trees_show_more_children_than_go_on(checkpoint: Path, borrowed: Borrowed) -> None:
    laws = LAWS * len(TIERS)
    tiers = [tier for tier in TIERS for _ in LAWS]
    ops = select("cpu", 1, "native")
    whole = drafted(proposer(checkpoint, borrowed, ops), laws, tiers, wide=True)
    levels = drafted(proposer(checkpoint, borrowed, ops, whole=False), laws, tiers, wide=True)
    assert_same(laws, whole, levels)
    for tier, (tree, ran) in zip(tiers, whole, strict=True):
        assert ran.num_run == tier.topk * tier.num_steps
        assert tree.max_depth <= tier.num_steps + 1
    widest = [max(len(tree.children(node)) for node in range(tree.num_nodes)) for tree, _ in whole]
    assert max(widest) > max(tier.topk for tier in tiers)


def test_drawn_chains_grow_beside_bushes(checkpoint: Path, borrowed: Borrowed) -> None:
    drawn = Sampling(temperature=1.0, seed=9, rule=AcceptRule.ACCEPT_RULE_REJECTION)
    assert drawn.needs_draft_probs
    laws, tiers = [GREEDY, drawn, GREEDY], [BUSH, Tier("eagle3", 3, 1, 4), TIERS[1]]
    drafter = proposer(checkpoint, borrowed, select("cpu", 1, "native"))
    seats = sessions(drafter, laws, tiers)
    bush, chain, other = drafter.propose(seats)
    assert isinstance(bush, Tree)
    assert isinstance(other, Tree)
    assert chain is not None
    assert not isinstance(chain, Tree)
    assert len(chain.probs) == 3


@pytest.mark.parametrize("options", [{"layers": 2}, {"draft_vocab_size": None}, {"hidden": 32}])
def test_other_heads_give_the_same_trees_too(
    tmp_path: Path, folder: Path, borrowed: Borrowed, options: dict[str, int | None]
) -> None:
    path = write_eagle3(tmp_path / "head", folder, **options)  # type: ignore[arg-type]
    ops = select("cpu", 1, "native")
    laws, tiers = LAWS[:4], [BUSH] * 4
    whole = drafted(proposer(path, borrowed, ops), laws, tiers)
    assert_same(laws, whole, drafted(proposer(path, borrowed, ops, whole=False), laws, tiers))


def test_rounded_weights_give_the_same_trees_too(checkpoint: Path, borrowed: Borrowed) -> None:
    ops = quantised(select("cpu", 2, "native"))
    laws, tiers = LAWS, [BUSH] * len(LAWS)
    whole = drafted(proposer(checkpoint, borrowed, ops), laws, tiers)
    assert_same(laws, whole, drafted(proposer(checkpoint, borrowed, ops, whole=False), laws, tiers))


def test_torch_gives_the_same_trees(checkpoint: Path, borrowed: Borrowed) -> None:
    tiers = [BUSH] * len(LAWS)
    whole = drafted(proposer(checkpoint, borrowed, select("cpu", 1, "native")), LAWS, tiers)
    plain = drafted(proposer(checkpoint, borrowed, select("cpu", 1, "torch")), LAWS, tiers)
    for (tree, _), (other, _) in zip(whole, plain, strict=True):
        assert tree.tokens.tolist() == other.tokens.tolist()
        assert tree.parent.tolist() == other.parent.tolist()
        np.testing.assert_allclose(scores(tree), scores(other), rtol=1e-3, atol=1e-4)


def test_trees_stay_the_same_over_rounds(checkpoint: Path, borrowed: Borrowed) -> None:
    """Scratch of one round is written over by the catch-up of the next."""
    ops = select("cpu", 1, "native")
    made = []
    for whole in (True, False):
        drafter = proposer(checkpoint, borrowed, ops, whole)
        random = np.random.default_rng(8)
        tokens = random.integers(0, VOCAB, 60).tolist()
        states = random.standard_normal((60, 192)).astype(np.float32)
        script = Script(tokens[:14], tokens[14:], Sampling(temperature=1.0, seed=6), states)
        steps = Lockstep(drafter, [script], BUSH, VOCAB)
        trees = []
        for count in (1, 4, 2, 3, 1):
            (tree,) = drafter.propose(steps.seats)
            assert isinstance(tree, Tree)
            trees.append(tree)
            steps.commit(0, count)
        made.append(trees)
    for tree, other in zip(*made, strict=True):
        assert tree.tokens.tolist() == other.tokens.tolist()
        assert tree.parent.tolist() == other.parent.tolist()


def test_numbers_that_cannot_be_ranked_are_an_error(checkpoint: Path, borrowed: Borrowed) -> None:
    drafter = proposer(checkpoint, borrowed, select("cpu", 1, "native"))
    (seat,) = sessions(drafter, [GREEDY], [BUSH])
    with torch.inference_mode():
        ready = drafter.catch_up([seat])
        state = state_of(seat)
        assert state.hidden is not None
        state.hidden = torch.full_like(state.hidden, float("nan"))
        with pytest.raises(ValueError, match="NaN"):
            drafter.grow([seat], ready)


def test_a_context_that_ends_cuts_the_tree(checkpoint: Path, borrowed: Borrowed) -> None:
    drafter = proposer(checkpoint, borrowed, select("cpu", 1, "native"))
    (seat,) = sessions(drafter, [GREEDY], [replace(BUSH, num_steps=6, num_draft_tokens=30)])
    drafter.net.context_length = len(seat.mirror.prefix) + 1  # type: ignore[misc]
    (tree,) = drafter.propose([seat])
    assert isinstance(tree, Tree)
    assert tree.max_depth == 3
