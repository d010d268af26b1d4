"""One session's commit by each accept rule."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.common.sampling import Sampling
from graft.common.tree import Tree, chain, from_parents, root_only
from graft.kernels.reference.accept import accept
from graft.kernels.reference.choose import choose, target_probs
from graft.kernels.reference.simulate import SimulatedTokens, Simulation
from graft.kernels.rows import Law, choice_rows, tree_rows
from graft.kernels.rules import (
    REFUSED,
    Decision,
    SimulatedCommit,
    decide,
    first_path,
    simulate,
)
from graft.testing.trees import random_tree
from graft.v1.sampling_pb2 import AcceptRule

VOCAB = 6
ROOT = 5
PREFIX = 11
RULES = [
    AcceptRule.ACCEPT_RULE_COUPLED,
    AcceptRule.ACCEPT_RULE_TARGET_ONLY,
    AcceptRule.ACCEPT_RULE_REJECTION,
    AcceptRule.ACCEPT_RULE_BLOCK,
]
by_rule = pytest.mark.parametrize("rule", RULES, ids=AcceptRule.Name)


def law(rule: AcceptRule.ValueType, tree: Tree, **sampling: float) -> Law:
    return Law(Sampling(rule=rule, **sampling), tree, PREFIX)  # type: ignore[arg-type]


def peaked(tokens: list[int]) -> torch.Tensor:
    logits = torch.zeros(len(tokens), VOCAB)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 30.0
    return logits


@by_rule
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_certain_target_accepts_its_own_path(
    rule: AcceptRule.ValueType, temperature: float
) -> None:
    tree = from_parents([ROOT, 1, 2, 3], [-1, 0, 1, 0])
    decision = decide(law(rule, tree, temperature=temperature), peaked([1, 2, 4, 0]))
    assert decision == Decision((0, 1, 2), 4)


@by_rule
def test_a_root_alone_commits_one_token(rule: AcceptRule.ValueType) -> None:
    assert decide(law(rule, root_only(ROOT)), peaked([3])) == Decision((0,), 3)


@by_rule
def test_a_wrong_drafter_costs_nothing(rule: AcceptRule.ValueType) -> None:
    decision = decide(law(rule, chain([ROOT, 1, 2])), peaked([3, 0, 0]))
    assert decision == Decision((0,), 3)


@by_rule
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_nan_refuses_the_bonus(rule: AcceptRule.ValueType, temperature: float) -> None:
    logits = peaked([1, 2, 4])
    logits[1] = float("nan")
    decision = decide(law(rule, chain([ROOT, 1, 2]), temperature=temperature), logits)
    assert decision == Decision((0, 1), REFUSED)


def test_rules_of_a_tree_use_all_children_and_rules_of_a_chain_the_first_path() -> None:
    tree = from_parents([ROOT, 1, 2], [-1, 0, 0])
    logits = peaked([2, 0, 4])
    taken = {rule: decide(law(rule, tree), logits).nodes for rule in RULES}
    assert taken[AcceptRule.ACCEPT_RULE_COUPLED] == (0, 2)
    assert taken[AcceptRule.ACCEPT_RULE_TARGET_ONLY] == (0, 2)
    assert taken[AcceptRule.ACCEPT_RULE_REJECTION] == (0,)
    assert taken[AcceptRule.ACCEPT_RULE_BLOCK] == (0,)
    assert first_path(tree) == 1


def test_a_lossy_threshold_takes_a_likely_child() -> None:
    logits = torch.log(torch.tensor([[0.3, 0.4, 0.3, 1e-9, 1e-9, 1e-9]])).repeat(2, 1)
    always = law(
        AcceptRule.ACCEPT_RULE_TARGET_ONLY,
        chain([ROOT, 1]),
        temperature=1.0,
        threshold_single=0.35,
    )
    seeds = range(50)
    for seed in seeds:
        one = dataclasses.replace(always, sampling=dataclasses.replace(always.sampling, seed=seed))
        assert decide(one, logits).nodes == (0, 1)


@by_rule
def test_the_decided_tokens_follow_the_law(rule: AcceptRule.ValueType) -> None:
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(VOCAB, VOCAB, generator=generator)
    draft = torch.softmax(torch.randn(VOCAB, generator=generator), dim=0)
    weights = draft.double().numpy() / float(draft.double().sum())
    numbers = np.random.default_rng(3)
    chains = rule in (AcceptRule.ACCEPT_RULE_REJECTION, AcceptRule.ACCEPT_RULE_BLOCK)
    tree = from_parents([ROOT, 1, 4, 2], [-1, 0, 0, 1])
    runs = 1000
    counts = np.zeros(VOCAB)
    for seed in range(runs):
        if chains:
            drafted = numbers.choice(VOCAB, 2, p=weights)
            tree = chain([ROOT, *drafted.tolist()])
        decision = decide(
            law(rule, tree, temperature=1.0, seed=seed),
            table[torch.from_numpy(tree.tokens).long()],
            draft.repeat(2, 1) if chains else None,
        )
        path = [*tree.tokens[list(decision.nodes[1:])].tolist(), decision.token]
        counts[path[0]] += 1
    expected = torch.softmax(table[ROOT], dim=0).numpy() * runs
    assert ((counts - expected) ** 2 / expected).sum() < 20.5  # chi-square, 5 degrees, p = 0.001


@given(seed=st.integers(0, 2**32 - 1), temperature=st.sampled_from([0.0, 0.8]))
@settings(max_examples=60, deadline=None)
def test_the_coupled_decision_is_the_choice_and_the_walk(seed: int, temperature: float) -> None:
    generator = np.random.default_rng(seed)
    tree = random_tree(generator, 9, VOCAB)
    logits = torch.from_numpy(generator.normal(0, 1, (tree.num_nodes, VOCAB)).astype(np.float32))
    one = law(AcceptRule.ACCEPT_RULE_COUPLED, tree, temperature=temperature, seed=seed)
    chosen = choose(logits, choice_rows([one], VOCAB))
    accepted, index = accept(tree_rows([tree]), chosen)
    nodes = index[0, : int(accepted[0]) + 1].tolist()
    assert decide(one, logits) == Decision(tuple(nodes), int(chosen[nodes[-1]]))


def test_rows_of_a_step_keep_each_session_s_law() -> None:
    first = Law(Sampling(temperature=0.5, top_k=3, seed=2**64 - 1), chain([1, 2]), 5)
    mask = torch.tensor([[0b1]], dtype=torch.int32)
    second = Law(Sampling(top_p=0.5, min_p=0.25), root_only(4), 9, bitmask=mask)
    rows = choice_rows([first, second], VOCAB)
    assert rows.temperature.tolist() == [0.5, 0.5, 0.0]
    assert rows.top_k.tolist() == [3, 3, 0]
    assert rows.top_p.tolist() == [1.0, 1.0, 0.5]
    assert rows.min_p.tolist() == [0.0, 0.0, 0.25]
    assert rows.seed.tolist() == [-1, -1, 0]
    assert rows.position.tolist() == [5, 6, 9]
    assert rows.bitmask is not None
    assert rows.bitmask.tolist() == [[-1], [-1], [1]]
    assert rows.adjust_ptr is None
    assert tree_rows([first.tree, second.tree]).ptr.tolist() == [0, 2, 3]


def test_an_empty_step_has_no_rows() -> None:
    assert tree_rows([]).ptr.tolist() == [0]
    rows = choice_rows([], VOCAB)
    assert len(rows.position) == 0
    assert target_probs(torch.zeros(0, VOCAB), rows).shape == (0, VOCAB)


def test_simulated_rounds_accept_the_first_nodes_and_no_more_than_there_are() -> None:
    tree = from_parents([ROOT, 1, 2, 3], [-1, 0, 1, 0])
    one = law(AcceptRule.ACCEPT_RULE_COUPLED, tree, seed=2**64 - 1)
    real = Simulation(2.0, tokens=SimulatedTokens.REAL_DRAFT_TOKEN)
    assert simulate(real, one, peaked([0, 4, 0, 0])) == SimulatedCommit((0, 1), (1, 4))
    assert simulate(Simulation(9.0), one, peaked([0] * 4)) == SimulatedCommit((0, 1, 2), (100,) * 3)
