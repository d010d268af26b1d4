"""The reference of tree building against worked examples."""

import numpy as np
import pytest
import torch

from graft.common.tree import TreeRefused, from_parents
from graft.kernels.reference.build_tree import (
    build_tree,
    links_from_mask,
    links_from_parents,
    pack_flashinfer,
    parents_of_candidates,
    visibility,
    write_mask,
)
from graft.kernels.reference.candidates import organize_draft_results, select_top_k_tokens
from graft.kernels.reference.order import level_major, preorder
from graft.kernels.reference.uno import build_uno_trees
from graft.kernels.trees import BuiltTrees, DraftResults, LevelInfo, MaskMode
from graft.v1.tree_pb2 import TreeRefusal

F32 = torch.float32
HIDDEN = torch.arange(3, dtype=F32).reshape(1, 3)


def two_step_levels() -> tuple[list[LevelInfo], list[torch.Tensor]]:
    first = select_top_k_tokens(
        0, torch.tensor([[0.6, 0.35]]), torch.tensor([[3, 5]]), HIDDEN, None
    )
    beams = torch.tensor([[10.0], [11.0]])
    second = select_top_k_tokens(
        1,
        torch.tensor([[0.5, 0.4], [0.9, 0.1]]),
        torch.tensor([[7, 2], [4, 6]]),
        beams,
        first.scores,
    )
    return [first.info, second.info], [
        first.input_ids,
        first.scores,
        second.input_ids,
        second.scores,
        second.hidden_states,
    ]


def three_step_results() -> DraftResults:
    first = select_top_k_tokens(0, torch.tensor([[0.6, 0.4]]), torch.tensor([[3, 5]]), HIDDEN, None)
    second = select_top_k_tokens(
        1,
        torch.tensor([[0.5, 0.4], [0.8, 0.2]]),
        torch.tensor([[7, 2], [4, 6]]),
        first.hidden_states,
        first.scores,
    )
    assert second.input_ids.tolist() == [4, 7]
    third = select_top_k_tokens(
        2,
        torch.tensor([[0.9, 0.1], [0.7, 0.2]]),
        torch.tensor([[8, 9], [1, 0]]),
        second.hidden_states,
        second.scores,
    )
    assert third.info.parents.tolist() == [[6, 8]]
    return organize_draft_results([first.info, second.info, third.info], 6)


def built(results: DraftResults, topk: int, length: int, mode: MaskMode) -> BuiltTrees:
    parents = parents_of_candidates(results, topk)
    return build_tree(
        torch.tensor([9]), results.draft_tokens, parents, torch.tensor([length]), mode
    )


def rows_of(mask: torch.Tensor, width: int) -> list[str]:
    return ["".join(str(int(bit)) for bit in row) for row in mask.reshape(-1, width)]


def test_each_level_keeps_the_best_beams_and_all_candidates() -> None:
    levels, (first_ids, first_scores, second_ids, second_scores, hidden) = two_step_levels()
    assert first_ids.tolist() == [3, 5]
    assert torch.allclose(first_scores, torch.tensor([[0.6, 0.35]]))
    assert levels[0].parents.tolist() == [[-1, 0, 1]]
    assert torch.allclose(levels[1].scores, torch.tensor([[[0.30, 0.24], [0.315, 0.035]]]))
    assert torch.allclose(second_scores, torch.tensor([[0.315, 0.30]]))
    assert second_ids.tolist() == [4, 7]
    assert hidden.flatten().tolist() == [11.0, 10.0]
    assert levels[1].parents.tolist() == [[4, 2]]


def test_the_best_candidates_become_nodes_in_level_major_order() -> None:
    results = organize_draft_results(two_step_levels()[0], 5)
    assert results.top_scores_index.tolist() == [[0, 1, 2, 4]]
    assert results.draft_tokens.tolist() == [[3, 5, 7, 4]]
    assert results.parent_list.tolist() == [[-1, 0, 1]]


def test_a_two_step_tree_has_the_known_links_and_masks() -> None:
    results = organize_draft_results(two_step_levels()[0], 5)
    tree = built(results, 2, 3, MaskMode.QLEN_ONLY)
    assert parents_of_candidates(results, 2).tolist() == [[-1, 0, 0, 1, 2]]
    assert tree.draft_tokens.tolist() == [9, 3, 5, 7, 4]
    assert tree.positions.tolist() == [3, 4, 4, 5, 5]
    assert tree.retrive_index.tolist() == [[0, 1, 2, 3, 4]]
    assert tree.retrive_next_token.tolist() == [[1, 3, 4, -1, -1]]
    assert tree.retrive_next_sibling.tolist() == [[-1, 2, -1, -1, -1]]
    assert rows_of(tree.tree_mask, 5) == ["10000", "11000", "10100", "11010", "10101"]
    packed = built(results, 2, 3, MaskMode.QLEN_ONLY_BITPACKING).tree_mask
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [1, 3, 5, 11, 21]
    full = built(results, 2, 3, MaskMode.FULL_MASK).tree_mask
    expected = ["11110000", "11111000", "11110100", "11111010", "11110101"]
    assert rows_of(full, 8) == expected


def test_a_batch_has_global_rows_and_local_links() -> None:
    one = organize_draft_results(two_step_levels()[0], 5)
    parents = parents_of_candidates(one, 2).repeat(2, 1)
    tree = build_tree(
        torch.tensor([9, 9]),
        one.draft_tokens.repeat(2, 1),
        parents,
        torch.tensor([3, 4]),
        MaskMode.FULL_MASK,
    )
    assert len(tree.tree_mask) == 85
    assert rows_of(tree.tree_mask[40:], 9)[1] == "111111000"
    assert tree.positions.tolist() == [3, 4, 4, 5, 5, 4, 5, 5, 6, 6]
    assert tree.retrive_index.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert tree.retrive_next_token.tolist() == [[1, 3, 4, -1, -1]] * 2
    assert tree.retrive_next_sibling.tolist() == [[-1, 2, -1, -1, -1]] * 2


def test_a_three_step_tree_follows_beams_across_levels() -> None:
    results = three_step_results()
    assert results.parent_list.tolist() == [[-1, 0, 1, 4, 2]]
    assert results.top_scores_index.tolist() == [[0, 1, 2, 4, 6]]
    assert results.draft_tokens.tolist() == [[3, 5, 7, 4, 8]]
    tree = built(results, 2, 20, MaskMode.QLEN_ONLY_BITPACKING)
    assert parents_of_candidates(results, 2).tolist() == [[-1, 0, 0, 1, 2, 4]]
    assert tree.positions.tolist() == [20, 21, 21, 22, 22, 23]
    assert tree.retrive_next_token.tolist() == [[1, 3, 4, -1, 5, -1]]
    assert tree.retrive_next_sibling.tolist() == [[-1, 2, -1, -1, -1, -1]]
    assert tree.tree_mask.tolist() == [1, 3, 5, 11, 21, 53]
    assert len(built(results, 2, 20, MaskMode.FULL_MASK).tree_mask) == 156


def test_a_chain_is_a_tree_of_width_one() -> None:
    one = torch.ones(1, 1)
    step = select_top_k_tokens(0, one, torch.tensor([[4]]), HIDDEN, None)
    levels = [step.info]
    for i in (1, 2):
        step = select_top_k_tokens(i, one, torch.tensor([[4 + i]]), step.hidden_states, step.scores)
        levels.append(step.info)
    results = organize_draft_results(levels, 4)
    assert results.parent_list.tolist() == [[-1, 0, 1]]
    assert results.top_scores_index.tolist() == [[0, 1, 2]]
    tree = built(results, 1, 20, MaskMode.QLEN_ONLY_BITPACKING)
    assert tree.positions.tolist() == [20, 21, 22, 23]
    assert tree.retrive_next_token.tolist() == [[1, 2, 3, -1]]
    assert tree.retrive_next_sibling.tolist() == [[-1] * 4]
    assert tree.tree_mask.tolist() == [1, 3, 7, 15]


def test_one_level_has_an_empty_parent_list() -> None:
    step = select_top_k_tokens(0, torch.tensor([[0.6, 0.3]]), torch.tensor([[3, 5]]), HIDDEN, None)
    results = organize_draft_results([step.info], 3)
    assert results.parent_list.shape == (1, 0)
    assert parents_of_candidates(results, 2).tolist() == [[-1, 0, 0]]


def test_a_parent_wins_a_tie_with_its_child() -> None:
    first = select_top_k_tokens(0, torch.tensor([[0.5, 0.5]]), torch.tensor([[3, 5]]), HIDDEN, None)
    second = select_top_k_tokens(
        1,
        torch.tensor([[1.0, 0.0], [1.0, 0.0]]),
        torch.tensor([[7, 2], [4, 6]]),
        first.hidden_states,
        first.scores,
    )
    results = organize_draft_results([first.info, second.info], 3)
    assert results.top_scores_index.tolist() == [[0, 1]]


def test_nan_scores_are_refused() -> None:
    info = LevelInfo(
        torch.tensor([[[0.5, float("nan")]]]), torch.tensor([[1, 2]]), torch.tensor([[-1, 0, 1]])
    )
    with pytest.raises(ValueError, match="NaN"):
        organize_draft_results([info], 2)


def test_a_node_without_its_parent_is_refused() -> None:
    orphan = DraftResults(
        torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 4]]), torch.tensor([[3, 4]])
    )
    with pytest.raises(TreeRefused, match="candidate 1") as refused:
        parents_of_candidates(orphan, 2)
    assert refused.value.refusal == TreeRefusal.TREE_REFUSAL_MALFORMED


def test_links_come_back_from_their_mask() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 2, 4]])
    from_mask = links_from_mask(visibility(parents))
    for left, right in zip(from_mask, links_from_parents(parents), strict=True):
        assert torch.equal(left, right)


def test_a_mask_that_skips_an_ancestor_is_refused() -> None:
    mask = visibility(torch.tensor([[-1, 0, 1]]))
    mask[0, 2, 0] = False
    with pytest.raises(TreeRefused, match="closed"):
        links_from_mask(mask)


@pytest.mark.parametrize("parents", [[-1, 1], [-1, -1], [0, 0], [-1, 0, 5]])
def test_parents_that_are_no_tree_are_refused(parents: list[int]) -> None:
    with pytest.raises(TreeRefused):
        links_from_parents(torch.tensor([parents]))


def test_wide_trees_do_not_fit_a_packed_mask() -> None:
    parents = torch.tensor([[-1] + [0] * 32])
    with pytest.raises(ValueError, match="32"):
        write_mask(visibility(parents), torch.tensor([1]), MaskMode.QLEN_ONLY_BITPACKING)


def test_flashinfer_bytes_start_anew_for_each_tree() -> None:
    visible = visibility(torch.tensor([[-1, 0], [-1, 0]]))
    packed, indptr = pack_flashinfer(visible, torch.tensor([3, 1]))
    assert indptr.tolist() == [0, 2, 3]
    first = np.unpackbits(packed[:2].numpy(), bitorder="little")[:10].tolist()
    assert first == [1, 1, 1, 1, 0, 1, 1, 1, 1, 1]
    assert packed[2] == 0b111011


def test_preorder_and_level_order_convert_exactly() -> None:
    tokens, parents = [9, 3, 5, 7, 4, 8], [-1, 0, 0, 1, 2, 4]
    tree, order = preorder(tokens, parents)
    assert order.tolist() == [0, 1, 3, 2, 4, 5]
    assert tree.tokens.tolist() == [9, 3, 7, 5, 4, 8]
    back = level_major(tree)
    assert back.tokens.tolist() == tokens
    assert back.parents.tolist() == parents
    assert order[back.order].tolist() == list(range(6))
    assert from_parents(back.tokens.tolist(), back.parents.tolist()).tokens.tolist() == list(
        tree.tokens
    )


def test_uno_grows_the_heaviest_paths_first() -> None:
    trees = build_uno_trees(
        torch.tensor([[[3, 5], [7, 4], [8, 2]]]),
        torch.tensor([[[0.6, 0.3], [0.7, 0.2], [0.45, 0.4]]]),
        6,
    )
    assert trees.draft_tokens.tolist() == [[3, 7, 5, 7, 8]]
    assert trees.top_scores_index.tolist() == [[0, 2, 1, 6, 4]]
    assert trees.parent_list.tolist() == [[-1, 0, 2, 1, 6]]
    assert torch.allclose(trees.masses, torch.tensor([[0.6, 0.42, 0.3, 0.21, 0.189]]))
    assert trees.parent.tolist() == [[-1, 0, 1, 0, 3, 2]]
    results = DraftResults(trees.parent_list, trees.top_scores_index, trees.draft_tokens)
    assert torch.equal(parents_of_candidates(results, 2), trees.parent)
    tree = built(results, 2, 11, MaskMode.QLEN_ONLY)
    assert tree.positions.tolist() == [11, 12, 13, 12, 13, 14]
    assert tree.retrive_next_token.tolist() == [[1, 2, 5, 4, -1, -1]]
    assert tree.retrive_next_sibling.tolist() == [[-1, 3, -1, -1, -1, -1]]
    expected = ["100000", "110000", "111000", "100100", "100110", "111001"]
    assert rows_of(tree.tree_mask, 6) == expected


def test_uno_refuses_more_nodes_than_its_candidates_give() -> None:
    with pytest.raises(ValueError, match="hold 3 nodes"):
        build_uno_trees(torch.tensor([[[1, 2]]]), torch.tensor([[[0.5, 0.4]]]), 4)
