"""Triton's walks, tree building, masks and KV moves against the reference, in its interpreter."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.common.tree import Tree, from_parents
from graft.kernels.gpu import accept as gpu_accept
from graft.kernels.gpu import build_tree as gpu_build
from graft.kernels.gpu import keep as gpu_keep
from graft.kernels.gpu import masks as gpu_masks
from graft.kernels.ops import KvCache, TreeRows
from graft.kernels.reference import accept as reference_accept
from graft.kernels.reference import build_tree as reference_build
from graft.kernels.reference import keep as reference_keep
from graft.kernels.rows import tree_rows
from graft.kernels.trees import DraftResults, MaskMode, VerifyTrees

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SEEDS = st.integers(0, 2**32 - 1)


def random_parents(rng: np.random.Generator, num_nodes: int) -> list[int]:
    """Chains, stars and everything between; node 0 is the root."""
    reach = int(rng.choice([1, 2, 4, num_nodes]))
    return [-1] + [int(rng.integers(max(0, node - reach), node)) for node in range(1, num_nodes)]


def random_tree(rng: np.random.Generator, num_nodes: int, vocab: int) -> Tree:
    """Siblings have distinct tokens, both ends of the vocabulary among them."""
    parents = random_parents(rng, num_nodes)
    tokens = [0]
    taken: dict[int, set[int]] = {}
    for parent in parents[1:]:
        used = taken.setdefault(parent, set())
        free = [t for t in (0, vocab - 1, *rng.permutation(vocab).tolist()) if t not in used]
        used.add(free[0])
        tokens.append(free[0])
    return from_parents(tokens, parents)


def follow(rng: np.random.Generator, trees: TreeRows, vocab: int) -> torch.Tensor:
    """Choices that often name a child, sometimes nothing."""
    chosen = []
    for start, end in zip(trees.ptr[:-1].tolist(), trees.ptr[1:].tolist(), strict=True):
        for row in range(start, end):
            child = int(trees.next_token[row])
            options = [-1, int(rng.integers(vocab))]
            while child >= 0:
                options += [int(trees.tokens[start + child])] * 2
                child = int(trees.next_sibling[start + child])
            chosen.append(int(rng.choice(options)))
    return torch.tensor(chosen, dtype=torch.int32)


def padded(tree: Tree, batch: int) -> VerifyTrees:
    def rows(column: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(column).long().repeat(batch, 1)

    index = torch.arange(batch * tree.num_nodes).view(batch, tree.num_nodes)
    return VerifyTrees(rows(tree.tokens), index, rows(tree.next_token), rows(tree.next_sibling))


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.lists(st.integers(1, 24), min_size=0, max_size=5))
def test_walks_over_ragged_trees_equal_the_reference(seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    trees = tree_rows([random_tree(rng, size, 40) for size in sizes])
    chosen = follow(rng, trees, 40)
    expected_num, expected_index = reference_accept.accept(trees, chosen)
    num, index = gpu_accept.accept(trees, chosen, width=max(sizes, default=1))
    assert torch.equal(num, expected_num)
    assert torch.equal(index[:, : expected_index.shape[1]], expected_index)
    wide = gpu_accept.accept(trees, chosen)[1]
    assert wide.shape[1] == sum(sizes)


def test_a_tree_without_nodes_accepts_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    trees = TreeRows(torch.zeros(2, dtype=torch.int32), none, none, none)
    num, index = gpu_accept.accept(trees, none, width=3)
    assert num.tolist() == [0]
    assert index.tolist() == [[-1, -1, -1]]


def test_a_walk_over_links_that_run_in_a_circle_ends() -> None:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    trees = TreeRows(ints(0, 3), ints(5, 6, 7), ints(1, -1, -1), ints(-1, 2, 1))
    num, _ = gpu_accept.accept(trees, ints(9, 9, 9))
    assert num.tolist() == [0]


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(1, 20), st.integers(1, 3), st.integers(1, 6))
def test_greedy_walks_over_padded_trees_equal_the_reference(
    seed: int, num_nodes: int, batch: int, width: int
) -> None:
    rng = np.random.default_rng(seed)
    trees = padded(random_tree(rng, num_nodes, 30), batch)
    predict = torch.stack(
        [
            torch.tensor([int(rng.choice(trees.candidates[b].numpy())) for _ in range(num_nodes)])
            for b in range(batch)
        ]
    )
    expected = reference_accept.verify_tree_greedy(trees, predict, width)
    result = gpu_accept.verify_tree_greedy(trees, predict, width)
    for left, right in zip(result, expected, strict=True):
        assert torch.equal(left, right)


@settings(max_examples=5, deadline=None)
@given(SEEDS, st.integers(1, 70), st.integers(1, 2))
def test_built_trees_equal_the_reference_in_every_mask_mode(
    seed: int, num_nodes: int, batch: int
) -> None:
    rng = np.random.default_rng(seed)
    parents = torch.tensor([random_parents(rng, num_nodes) for _ in range(batch)])
    drafts = torch.from_numpy(rng.integers(0, 1000, (batch, num_nodes - 1)))
    bonus = torch.from_numpy(rng.integers(0, 1000, batch))
    seq_lens = torch.from_numpy(rng.integers(0, 40, batch))
    for mode in MaskMode:
        if mode is MaskMode.QLEN_ONLY_BITPACKING and num_nodes > 32:
            continue
        expected = reference_build.build_tree(bonus, drafts, parents, seq_lens, mode)
        result = gpu_build.build_tree(bonus, drafts, parents, seq_lens, mode)
        for name, left, right in zip(expected._fields, result, expected, strict=True):
            assert left.dtype == right.dtype, name
            assert left.tolist() == right.tolist(), name
    visible = gpu_build.visibility(parents)
    for left, right in zip(
        gpu_masks.pack_flashinfer(visible, seq_lens),
        reference_build.pack_flashinfer(visible, seq_lens),
        strict=True,
    ):
        assert torch.equal(left, right)
    for left, right in zip(
        gpu_build.links_from_mask(visible), reference_build.links_from_mask(visible), strict=True
    ):
        assert torch.equal(left, right)


def test_a_mask_that_is_given_too_little_room_is_cut() -> None:
    parents = torch.tensor([[-1, 0, 0], [-1, 0, 1]])
    lengths = torch.tensor([5, 9])
    visible = gpu_build.visibility(parents)
    whole = gpu_masks.write_mask(visible, lengths, MaskMode.FULL_MASK)
    cut = gpu_masks.write_mask(visible, lengths, MaskMode.FULL_MASK, 40)
    assert torch.equal(cut, whole[:40])
    packed, _ = gpu_masks.pack_flashinfer(visible, lengths)
    assert torch.equal(gpu_masks.pack_flashinfer(visible, lengths, 4)[0], packed[:4])


def test_parents_come_from_candidates_across_levels() -> None:
    results = DraftResults(
        parent_list=torch.tensor([[-1, 0, 1, 4, 2], [-1, 0, 1, 4, 2]]),
        top_scores_index=torch.tensor([[0, 1, 2, 4, 6], [0, 1, 2, 4, 6]]),
        draft_tokens=torch.tensor([[3, 5, 7, 4, 8]] * 2),
    )
    parents = gpu_build.parents_of_candidates(results, 2)
    assert parents.tolist() == [[-1, 0, 0, 1, 2, 4]] * 2
    assert torch.equal(parents, reference_build.parents_of_candidates(results, 2))


def test_one_level_of_candidates_has_the_root_as_parent() -> None:
    results = DraftResults(
        torch.empty(1, 0, dtype=torch.int64), torch.tensor([[0, 1]]), torch.tensor([[3, 5]])
    )
    assert gpu_build.parents_of_candidates(results, 2).tolist() == [[-1, 0, 0]]


def test_a_node_without_its_parent_is_left_unlinked() -> None:
    orphan = DraftResults(
        torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 4]]), torch.tensor([[3, 4]])
    )
    parents = gpu_build.parents_of_candidates(orphan, 2)
    assert parents.tolist() == [[-1, 0, -1]]
    assert gpu_build.malformed(parents).tolist() == [True]
    links = gpu_build.links_from_parents(parents)
    assert links.retrive_next_token.tolist() == [[1, -1, -1]]
    assert links.retrive_next_sibling.tolist() == [[-1, -1, -1]]
    assert gpu_build.visibility(parents)[0, 2].tolist() == [False, False, True]


def random_kv(rng: np.random.Generator, num_slots: int) -> KvCache:
    shape = (2, num_slots, 2, 3)
    return KvCache(
        keys=torch.from_numpy(rng.normal(size=shape).astype(np.float32)),
        values=torch.from_numpy(rng.normal(size=shape).astype(np.float32)),
        page_tokens=4,
    )


def copy_of(kv: KvCache) -> KvCache:
    return KvCache(kv.keys.clone(), kv.values.clone(), kv.page_tokens)


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_accepted_rows_move_as_in_the_reference(seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    trees = tree_rows([random_tree(rng, size, 40) for size in sizes])
    accepted, index = reference_accept.accept(trees, follow(rng, trees, 40))
    slots = torch.from_numpy(rng.permutation(64)[: sum(sizes)].astype(np.int32))
    source, target = gpu_keep.keep_moves(trees.ptr, accepted, index, slots)
    expected = reference_keep.keep_moves(trees.ptr, accepted, index, slots)
    assert source[source >= 0].tolist() == expected[0].tolist()
    assert target[target >= 0].tolist() == expected[1].tolist()
    kv = random_kv(rng, 64)
    reference = copy_of(kv)
    gpu_keep.keep(kv, source, target)
    reference_keep.keep(reference, *expected)
    assert torch.equal(kv.keys, reference.keys)
    assert torch.equal(kv.values, reference.values)


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.integers(0, 40))
def test_moves_that_meet_are_made_in_order(seed: int, num_moves: int) -> None:
    rng = np.random.default_rng(seed)
    source = torch.from_numpy(rng.integers(0, 12, num_moves).astype(np.int32))
    target = torch.from_numpy(rng.integers(0, 12, num_moves).astype(np.int32))
    kv = random_kv(rng, 12)
    reference = copy_of(kv)
    gpu_keep.keep(kv, source, target)
    reference_keep.keep(reference, source, target)
    assert torch.equal(kv.keys, reference.keys)
    assert torch.equal(kv.values, reference.values)


def test_a_tensor_of_another_type_is_refused_by_name() -> None:
    trees = tree_rows([])
    with pytest.raises(ValueError, match=r"chosen is torch\.int64, expected torch\.int32"):
        gpu_accept.accept(trees, torch.zeros(0, dtype=torch.int64))
