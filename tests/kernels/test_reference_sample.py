"""The reference of the accept rules against worked examples."""

import pytest
import torch

from graft.kernels.ops import TreeRows
from graft.kernels.reference.accept import accept, verify_tree_greedy
from graft.kernels.reference.sample import (
    block_speculative_sampling,
    chain_speculative_sampling,
    tree_speculative_sampling_target_only,
)
from graft.kernels.trees import VerifyResult, VerifyTrees

X = -1
TREES = VerifyTrees(
    candidates=torch.tensor([[9, 3, 5, 7, 4, 8]]),
    retrive_index=torch.arange(6).unsqueeze(0),
    retrive_next_token=torch.tensor([[1, 3, 4, -1, 5, -1]]),
    retrive_next_sibling=torch.tensor([[-1, 2, -1, -1, -1, -1]]),
)
FINAL = torch.tensor([0.4])


def target_rows() -> torch.Tensor:
    rows: list[dict[int, float]] = [
        {3: 0.5, 5: 0.3, 1: 0.2},
        {7: 0.5, 2: 0.5},
        {4: 0.6, 6: 0.4},
        {0: 1.0},
        {8: 0.2, 9: 0.3, 2: 0.5},
        {0: 0.25, 1: 0.75},
    ]
    probs = torch.zeros(1, 6, 10)
    for node, row in enumerate(rows):
        for token, p in row.items():
            probs[0, node, token] = p
    return probs


def walk(coins: list[float], thresholds: tuple[float, float] = (1.0, 1.0)) -> VerifyResult:
    return tree_speculative_sampling_target_only(
        TREES, (torch.tensor([coins]), FINAL), target_rows(), thresholds, 4
    )


def shown(result: VerifyResult) -> tuple[list[int], list[int], int]:
    return (
        result.predicts.tolist(),
        result.accept_index[0].tolist(),
        int(result.accept_token_num[0]),
    )


@pytest.mark.parametrize(
    ("target_predict", "predicts", "accept_index", "accepted"),
    [
        ([5, 7, 4, 0, 2, 6], [5, X, 4, X, 2, X], [0, 2, 4, -1], 2),
        ([1, 7, 4, 0, 2, 6], [1, X, X, X, X, X], [0, -1, -1, -1], 0),
        ([5, 7, 4, 0, 8, 6], [5, X, 4, X, 8, 6], [0, 2, 4, 5], 3),
    ],
)
def test_the_greedy_walk_follows_equal_children(
    target_predict: list[int], predicts: list[int], accept_index: list[int], accepted: int
) -> None:
    result = verify_tree_greedy(TREES, torch.tensor([target_predict]), 4)
    assert shown(result) == (predicts, accept_index, accepted)


def test_the_walk_over_ragged_trees_is_the_same_walk() -> None:
    trees = TreeRows(
        ptr=torch.tensor([0, 1, 7], dtype=torch.int32),
        tokens=torch.tensor([2, 9, 3, 5, 7, 4, 8], dtype=torch.int32),
        next_token=torch.tensor([-1, 1, 3, 4, -1, 5, -1], dtype=torch.int32),
        next_sibling=torch.tensor([-1, -1, 2, -1, -1, -1, -1], dtype=torch.int32),
    )
    chosen = torch.tensor([6, 5, 7, 4, 0, 2, 6], dtype=torch.int32)
    accepted, index = accept(trees, chosen)
    assert accepted.tolist() == [0, 2]
    assert index.tolist() == [[0, -1, -1, -1, -1, -1], [0, 2, 4, -1, -1, -1]]


def test_a_refused_row_matches_no_child() -> None:
    trees = TreeRows(
        ptr=torch.tensor([0, 2], dtype=torch.int32),
        tokens=torch.tensor([2, -1], dtype=torch.int32),
        next_token=torch.tensor([1, -1], dtype=torch.int32),
        next_sibling=torch.tensor([-1, -1], dtype=torch.int32),
    )
    accepted, _ = accept(trees, torch.tensor([-1, -1], dtype=torch.int32))
    assert accepted.tolist() == [0]


def test_a_coin_between_the_children_takes_the_second() -> None:
    result = walk([0.65, 0.9, 0.3, 0.1, 0.95, 0.5])
    assert shown(result) == ([5, X, 4, X, 2, X], [0, 2, 4, -1], 2)


def test_a_coin_above_all_children_takes_the_rest() -> None:
    result = walk([0.85, 0.9, 0.3, 0.1, 0.95, 0.5])
    assert shown(result) == ([1, X, X, X, X, X], [0, -1, -1, -1], 0)


def test_threshold_single_takes_a_likely_child_after_a_lost_coin() -> None:
    result = walk([0.85, 0.9, 0.3, 0.1, 0.95, 0.5], (0.3, 1.0))
    assert shown(result) == ([3, 7, X, 0, X, X], [0, 1, 3, -1], 2)


def test_threshold_acc_scales_the_mass() -> None:
    result = walk([0.85, 0.9, 0.3, 0.1, 0.95, 0.5], (1.0, 0.9))
    assert shown(result) == ([5, X, 4, X, 2, X], [0, 2, 4, -1], 2)


def test_the_deepest_node_samples_its_whole_row() -> None:
    result = walk([0.65, 0.9, 0.3, 0.1, 0.1, 0.5])
    assert shown(result) == ([5, X, 4, X, 8, 1], [0, 2, 4, 5], 3)


def test_a_child_of_no_mass_is_never_taken() -> None:
    trees = VerifyTrees(
        torch.tensor([[0, 1, 2]]),
        torch.arange(3).unsqueeze(0),
        torch.tensor([[1, -1, -1]]),
        torch.tensor([[-1, 2, -1]]),
    )
    probs = torch.tensor([[[0.0, 0.5, 0.0, 0.5]] * 3])
    result = tree_speculative_sampling_target_only(
        trees, (torch.tensor([[0.5, 0.0, 0.0]]), torch.tensor([0.1])), probs, (1.0, 1.0), 3
    )
    assert result.predicts.tolist() == [3, X, X]


def test_duplicate_siblings_are_refused() -> None:
    trees = VerifyTrees(
        torch.tensor([[9, 3, 3]]),
        torch.arange(3).unsqueeze(0),
        torch.tensor([[1, -1, -1]]),
        torch.tensor([[-1, 2, -1]]),
    )
    with pytest.raises(ValueError, match="token 3"):
        tree_speculative_sampling_target_only(
            trees, (torch.zeros(1, 3), FINAL), torch.ones(1, 3, 10), (1.0, 1.0), 3
        )


P = torch.tensor([[[0.5, 0.3, 0.2, 0], [0.1, 0.6, 0.3, 0], [0.25, 0.25, 0.25, 0.25]]])
Q = torch.tensor([[[0.2, 0.7, 0.1, 0], [0.3, 0.3, 0.4, 0]]])
DRAFTS = torch.tensor([[1, 0]])
BOTH = torch.tensor([2])


@pytest.mark.parametrize(
    ("coins", "final", "tokens", "accepted"),
    [
        ([0.4, 0.5], 0.3, [1, 1, -1], 1),
        ([0.5, 0.2], 0.3, [0, -1, -1], 0),
        ([0.4, 0.3], 0.9, [1, 0, 3], 2),
    ],
)
def test_a_chain_is_accepted_by_ratio(
    coins: list[float], final: float, tokens: list[int], accepted: int
) -> None:
    result = chain_speculative_sampling(
        DRAFTS, BOTH, (torch.tensor([coins]), torch.tensor([final])), P, Q
    )
    assert result.tokens[0].tolist() == tokens
    assert int(result.accept_token_num) == accepted


@pytest.mark.parametrize(
    ("coins", "tokens", "accepted"),
    [([0.4, 0.5], [0, -1, -1], 0), ([0.05, 0.1], [1, 0, 1], 2)],
)
def test_a_block_is_accepted_from_its_end(
    coins: list[float], tokens: list[int], accepted: int
) -> None:
    result = block_speculative_sampling(
        DRAFTS, BOTH, (torch.tensor([coins]), torch.tensor([0.3])), P, Q
    )
    assert result.tokens[0].tolist() == tokens
    assert int(result.accept_token_num) == accepted


def test_a_short_chain_ends_with_its_own_bonus_row() -> None:
    result = chain_speculative_sampling(
        DRAFTS, torch.tensor([1]), (torch.tensor([[0.1, 0.1]]), torch.tensor([0.05])), P, Q
    )
    assert result.tokens[0].tolist() == [1, 0, -1]
