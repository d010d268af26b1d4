"""The base of model proposers: lanes, catch-up, in-tree attention and the rank of children."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from graft.common.draft_probs import draw_uniform
from graft.common.sampling import Sampling
from graft.common.tier import Tier
from graft.common.tree import Tree, root_only
from graft.draft.features import FeatureStore
from graft.draft.nets.decoder import DecoderNet
from graft.draft.proposers.base import Sampled, Seat
from graft.draft.proposers.model import ModelOptions, state_of
from graft.draft.proposers.standalone import StandaloneProposer
from graft.kernels.cpu.choose import target_probs
from graft.kernels.rows import Law, choice_rows
from graft.testing.bits import agree
from graft.testing.lockstep import Lockstep, Script
from graft.testing.models import write_tiny_model
from graft.testing.plain import GREEDY, Plain
from graft.v1.sampling_pb2 import AcceptRule

CHAIN = Tier("standalone", num_steps=3, topk=1, num_draft_tokens=4)
BUSH = Tier("standalone", num_steps=4, topk=3, num_draft_tokens=12)
TIERS = pytest.mark.parametrize("tier", [CHAIN, BUSH], ids=["chain", "tree"])
SAMPLED = Sampling(temperature=1.0, seed=11)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    torch.set_num_threads(1)
    return Plain.load(write_tiny_model(tmp_path_factory.mktemp("target") / "tiny"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    folder: Path = tmp_path_factory.mktemp("other") / "tiny"
    return Plain.load(write_tiny_model(folder, layers=1, seed=5))


def standalone(model: Plain, tier: Tier = BUSH, **options: float) -> StandaloneProposer:
    return StandaloneProposer(
        "standalone",
        DecoderNet(model.target),
        model.ops,
        ModelOptions(tier, **options),  # type: ignore[arg-type]
    )


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(32, 127, 3 + 7 * i).tolist() for i in range(count)]


def run(model: Plain, writer: Plain, tier: Tier, sampling: Sampling = GREEDY) -> Lockstep:
    scripts = [Script.written(writer, prompt, 60, sampling) for prompt in prompts(3)]
    return Lockstep(standalone(model, tier), scripts, tier, writer.target.vocab_size)


@TIERS
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_drafter_that_is_the_target_is_always_right(
    target: Plain, tier: Tier, sampling: Sampling
) -> None:
    """In a bush the beams may leave the likeliest path at its end for others that weigh more."""
    steps = run(target, target, tier, sampling)
    counts = [steps.round() for _ in range(8)]
    assert np.mean(counts) > tier.num_steps - 1
    if tier.topk == 1:
        assert np.min(counts) == tier.num_steps


@TIERS
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_lanes_hold_what_a_prefill_would_have_written(
    target: Plain, other: Plain, tier: Tier, sampling: Sampling
) -> None:
    steps = run(other, target, tier, sampling)
    proposer = steps.proposer
    assert isinstance(proposer, StandaloneProposer)
    for _ in range(12):
        steps.round()
        with torch.inference_mode():
            proposer.catch_up(steps.seats)
        for seat in steps.seats:
            same_as_prefill(proposer, seat)


def same_as_prefill(proposer: StandaloneProposer, seat: Seat) -> None:
    """Keys, values and logits equal those of a drafter that has just joined, bit for bit."""
    fresh = Seat(seat.mirror, seat.tier, proposer.open(seat.mirror))
    with torch.inference_mode():
        proposer.catch_up([fresh])
    old, new = state_of(seat), state_of(fresh)
    assert old.lane.length == new.lane.length == len(seat.mirror.prefix) - proposer.net.shift
    cache = proposer.kv.cache
    for kept in (cache.keys, cache.values):
        left, right = (
            kept[:, one.lane.slots(one.lane.base, one.lane.length).astype(np.int64)]
            for one in (old, new)
        )
        assert agree(left, right)
    assert old.hidden is not None and new.hidden is not None
    assert agree(proposer.net.logits(old.hidden[None]), proposer.net.logits(new.hidden[None]))
    proposer.close(fresh)


def test_a_node_sees_its_own_path_and_nothing_else(target: Plain, other: Plain) -> None:
    """Scores of a tree equal the drafter's log-probabilities of each path, run from scratch."""
    script = Script.written(target, prompts(2)[1], 2)
    proposer = standalone(other)
    mirror = script.mirror(len(script.prompt) + 1, target.target.vocab_size)
    (tree,) = proposer.propose([Seat(mirror, BUSH, proposer.open(mirror))])
    assert tree is not None and tree.scores is not None and tree.num_nodes == 12
    for node in range(1, tree.num_nodes):
        path = tree.tokens[tree.ancestors(node)[1:]].tolist()
        text = [*mirror.prefix.tokens.tolist(), *path]
        logs = other.log_probs(text)
        first = len(mirror.prefix) - 1
        expected = sum(float(logs[first + i, token]) for i, token in enumerate(path))
        assert tree.scores[node] == pytest.approx(expected, abs=1e-4)


def test_company_changes_no_tree(target: Plain, other: Plain) -> None:
    together = run(other, target, BUSH, SAMPLED)
    alone = run(other, target, BUSH, SAMPLED)
    for _ in range(6):
        assert together.round() == [alone.round([place])[0] for place in range(3)]


def test_missed_rounds_are_caught_up_with(target: Plain, other: Plain) -> None:
    steps = run(other, target, BUSH)
    steps.round()
    for count in (1, 4, 9):
        steps.commit(0, count)
    steps.round([1])
    steps.round()
    with torch.inference_mode():
        steps.proposer.catch_up(steps.seats)  # type: ignore[attr-defined]
    for seat in steps.seats:
        same_as_prefill(steps.proposer, seat)  # type: ignore[arg-type]


def test_acceptance_does_not_decay_over_300_rounds(target: Plain, other: Plain) -> None:
    script = Script.written(target, prompts(1)[0], 480, Sampling(temperature=1.0, seed=4))
    steps = Lockstep(standalone(other, CHAIN), [script], CHAIN, target.target.vocab_size)
    counts = [steps.round()[0] for _ in range(300) if len(steps.left(0)) > 1]
    assert len(counts) == 300 or not steps.left(0)[1:]
    early, late = np.mean(counts[:100]), np.mean(counts[-100:])
    assert late > early - 0.35


def test_a_full_pool_drafts_nothing_and_recovers(target: Plain, other: Plain) -> None:
    scripts = [Script.written(target, prompt, 40) for prompt in prompts(3)]
    proposer = standalone(other, CHAIN, kv_tokens=48)
    steps = Lockstep(proposer, scripts, CHAIN, target.target.vocab_size)
    trees = proposer.propose(steps.seats)
    assert [tree is not None for tree in trees] == [True, True, False]
    proposer.close(steps.seats[0])
    assert proposer.propose(steps.seats[2:])[0] is not None


def test_closing_gives_every_page_back(target: Plain, other: Plain) -> None:
    steps = run(other, target, BUSH)
    for _ in range(3):
        steps.round()
    proposer = steps.proposer
    assert isinstance(proposer, StandaloneProposer)
    assert proposer.kv.num_free < proposer.kv.num_pages
    for seat in steps.seats:
        proposer.close(seat)
    assert proposer.kv.num_free == proposer.kv.num_pages


def test_a_long_prompt_runs_in_chunks(target: Plain, other: Plain) -> None:
    script = Script.written(target, list(range(40, 120)), 4)
    whole, chunked = standalone(other), standalone(other, chunk_rows=7)
    trees = []
    for proposer in (whole, chunked):
        mirror = script.mirror(81, target.target.vocab_size)
        trees.append(proposer.propose([Seat(mirror, BUSH, proposer.open(mirror))])[0])
    assert trees[0] is not None and trees[1] is not None
    assert np.array_equal(trees[0].tokens, trees[1].tokens)
    assert np.array_equal(trees[0].parent, trees[1].parent)


def test_logits_equal_those_of_transformers(tmp_path: Path, target: Plain) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_tiny_model(tmp_path / "draft", "qwen3", layers=2, seed=8)
    drafter = standalone(Plain.load(folder))
    script = Script.written(target, prompts(3)[2], 9)
    mirror = script.mirror(len(script.prompt) + 1, target.target.vocab_size)
    seat = Seat(mirror, BUSH, drafter.open(mirror))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for count in (1, 4, 3):
        drafter.propose([seat])
        hidden = state_of(seat).hidden
        assert hidden is not None
        with torch.inference_mode():
            theirs = model(torch.tensor([mirror.prefix.tokens.tolist()])).logits[0, -1]
        ours = drafter.net.logits(hidden[None])[0]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        said = len(mirror.prefix) - len(script.prompt)
        script.commit(mirror, script.answer[said : said + count])


def test_a_long_prompt_is_read_a_chunk_at_a_time(target: Plain, other: Plain) -> None:
    proposer = standalone(other, chunk_rows=8)
    seats = []
    for prompt in ([65] * 30, [66] * 3):
        mirror = Script(prompt, [70]).mirror(len(prompt) + 1, target.target.vocab_size)
        seats.append(Seat(mirror, BUSH, proposer.open(mirror)))
    assert [proposer.behind(seat) for seat in seats] == [31, 0]
    for expected in (23, 15, 0):
        proposer.follow(seats[:1])
        assert proposer.behind(seats[0]) == expected
    assert None not in proposer.propose(seats)
    same_as_prefill(proposer, seats[0])


def test_features_behind_the_lane_are_let_go(target: Plain, other: Plain) -> None:
    proposer = standalone(other, window_rows=4)
    mirror = Script([65] * 30, [70]).mirror(31, target.target.vocab_size)
    mirror.features = FeatureStore(1)
    mirror.features.append(np.zeros((30, 1), np.float32))
    proposer.propose([Seat(mirror, BUSH, proposer.open(mirror))])
    assert (mirror.features.start, mirror.features.length) == (27, 30)


def test_rules_that_compare_probabilities_get_chains_that_were_drawn(
    target: Plain, other: Plain
) -> None:
    """Each token is drawn from the drafter's law after the ones before it, by known uniforms."""
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=5, rule=AcceptRule.ACCEPT_RULE_REJECTION)
    proposer = standalone(other)
    coupled = Script([65, 66, 67], [70]).mirror(4, 320)
    drawn = Script([68, 69], [70], sampling).mirror(3, 320)
    seats = [Seat(mirror, BUSH, proposer.open(mirror)) for mirror in (coupled, drawn)]
    plain, made = proposer.propose(seats)
    assert isinstance(plain, Tree) and isinstance(made, Sampled)
    tokens = made.tree.tokens.tolist()
    assert len(tokens) == 5 and len(made.probs) == 4
    for step, one in enumerate(made.probs):
        assert one.draw(draw_uniform(5, 3, step)) == tokens[step + 1]
        logs = other.log_probs([68, 69, *tokens[: step + 1]])[-1].float()[None]
        rows = choice_rows([Law(sampling, root_only(0), 3)], 320)
        law = target_probs(logs, rows)[0]
        assert torch.topk(law, 64).values.sum() == pytest.approx(1, abs=0.2)
        ratio = law[one.tokens.astype(np.int64)] / torch.from_numpy(one.probs)
        assert ratio.max() == pytest.approx(float(ratio.min()), rel=1e-3)
