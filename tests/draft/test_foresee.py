"""What a round may commit is read from a tree that is one level deeper and wider."""

from __future__ import annotations

import math

import pytest

from graft.common.tier import Tier
from graft.common.tree import chain, from_parents
from graft.draft.foresee import Trust, outcomes, path_logs, split, widened


def test_the_best_nodes_that_fit_are_proposed() -> None:
    #            0 -> 1 (-.1) -> 3 (-.2) -> 5 (-.3);  0 -> 2 (-2);  1 -> 4 (-1)
    wide = from_parents(
        [9, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 1, 3], [0.0, -0.1, -2.0, -0.2, -1.0, -0.3]
    )
    tree = split(wide, Tier("x", num_steps=2, topk=2, num_draft_tokens=4)).tree
    assert tree is not None
    assert tree.tokens.tolist() == [9, 1, 3, 4]
    only = split(wide, Tier("x", num_steps=3, topk=1, num_draft_tokens=8)).tree
    assert only is not None
    assert only.tokens.tolist() == [9, 1, 3, 5]


def test_outcomes_are_what_follows_a_node_and_is_not_drafted() -> None:
    """The root's child and its child are accepted with 0.8 and 0.9, by their own word."""
    logs = [math.log(0.8), math.log(0.15), math.log(0.72), math.log(0.04), math.log(0.36)]
    wide = from_parents([9, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 1, 3], [0.0, *logs])
    found = {one.tokens: math.exp(one.log) for one in outcomes(chain([9, 1, 3]), wide)}
    assert found == {
        (2,): pytest.approx(0.2),
        (1, 4): pytest.approx(0.08),
        (1, 3, 5): pytest.approx(0.72),
    }


def test_a_round_over_the_root_alone_ends_after_one_token() -> None:
    wide = from_parents([9, 1, 2, 3], [-1, 0, 0, 1], [0.0, -0.1, -2.0, -0.2])
    assert {outcome.tokens for outcome in outcomes(None, wide)} == {(1,), (2,)}


def test_of_a_late_tree_every_path_may_be_committed_before_it_arrives() -> None:
    wide = from_parents([9, 1, 2, 3], [-1, 0, 0, 1], [0.0, -0.1, -2.0, -0.2])
    found = {one.tokens: one.rounds for one in outcomes(chain([9, 1, 3]), wide, late=True)}
    assert found == {(1,): 1, (2,): 1, (1, 3): 2}


def test_a_drafter_that_is_right_and_unsure_is_trusted_more_than_it_says() -> None:
    trust = Trust()
    assert trust.of(0.3) == pytest.approx(0.3)
    tree = from_parents([9, 1, 2], [-1, 0, 1], [0.0, math.log(0.1), math.log(0.01)])
    for _ in range(100):
        trust.learn(tree, [1, 2, 7])
    assert trust.of(0.1) > 0.9
    for _ in range(300):
        trust.learn(tree, [8])
    assert trust.of(0.1) < 0.15


def test_a_tree_without_scores_is_ranked_by_depth_and_place() -> None:
    tree = from_parents([9, 1, 2, 3], [-1, 0, 0, 1])
    logs = path_logs(tree).tolist()
    by_token = dict(zip(tree.tokens.tolist(), logs, strict=True))
    assert by_token[9] == 0.0
    assert 0 > by_token[1] > by_token[3] > by_token[2] > -math.inf


def test_a_wide_tier_is_deeper_wider_and_larger() -> None:
    wide = widened(Tier("x", num_steps=3, topk=1, num_draft_tokens=4, lookahead=5))
    assert wide.num_steps == 4 and wide.topk > 1 and wide.num_draft_tokens > 4
