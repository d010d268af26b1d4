"""Tree building on the CPU equals the reference on random batches, refusals included."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.common.tree import Tree, TreeRefused
from graft.kernels.cpu import build_tree as fast
from graft.kernels.cpu import uno as fast_uno
from graft.kernels.cpu.candidates import organize_draft_results, select_top_k_tokens
from graft.kernels.reference import build_tree as plain
from graft.kernels.reference import uno as plain_uno
from graft.kernels.reference.order import level_major, preorder
from graft.kernels.trees import DraftResults, LevelInfo, MaskMode
from graft.testing.trees import parent_lists, trees


@st.composite
def parent_batches(draw: st.DrawFn, max_nodes: int = 12) -> torch.Tensor:
    first = draw(parent_lists(max_nodes))
    rows = [first]
    for _ in range(draw(st.integers(0, 2))):
        rows.append([-1] + [draw(st.integers(0, i - 1)) for i in range(1, len(first))])
    return torch.tensor(rows)


@given(parents=parent_batches(), lengths=st.lists(st.integers(0, 9), min_size=3, max_size=3))
@settings(max_examples=100, deadline=None)
def test_links_masks_and_positions_are_the_reference_s(
    parents: torch.Tensor, lengths: list[int]
) -> None:
    batch, num_nodes = parents.shape
    bonus = torch.arange(batch)
    drafted = torch.arange(batch * (num_nodes - 1)).reshape(batch, num_nodes - 1)
    seq_lens = torch.tensor(lengths[:batch])
    for mode in MaskMode:
        got = fast.build_tree(bonus, drafted, parents, seq_lens, mode)
        expected = plain.build_tree(bonus, drafted, parents, seq_lens, mode)
        for left, right in zip(got, expected, strict=True):
            assert left.dtype == right.dtype
            assert torch.equal(left, right)
    visible = plain.visibility(parents)
    for left, right in zip(
        fast.links_from_mask(visible), plain.links_from_parents(parents), strict=True
    ):
        assert torch.equal(left, right)
    for left, right in zip(
        fast.pack_flashinfer(visible, seq_lens),
        plain.pack_flashinfer(visible, seq_lens),
        strict=True,
    ):
        assert torch.equal(left, right)


@given(parents=parent_batches(32))
@settings(max_examples=30, deadline=None)
def test_packed_rows_are_the_reference_s_up_to_32_nodes(parents: torch.Tensor) -> None:
    visible = plain.visibility(parents)
    lengths = torch.zeros(len(parents), dtype=torch.int64)
    mode = MaskMode.QLEN_ONLY_BITPACKING
    got = fast.write_mask(visible, lengths, mode)
    assert torch.equal(got, plain.write_mask(visible, lengths, mode))


def grown_levels(seed: int, batch: int, topk: int, steps: int, tied: bool) -> list[LevelInfo]:
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        probs = torch.softmax(torch.randn(rows, 3 * topk, generator=generator) * 2, dim=1)
        if tied:
            probs = (probs * 4).ceil() / 4
        top = torch.sort(probs, dim=1, descending=True, stable=True)
        return top.values[:, :topk], top.indices[:, :topk]

    hidden = torch.zeros(batch, 1)
    beams = select_top_k_tokens(0, *draw(batch), hidden, None)
    levels = [beams.info]
    for step in range(1, steps):
        beams = select_top_k_tokens(step, *draw(batch * topk), beams.hidden_states, beams.scores)
        levels.append(beams.info)
    return levels


@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    topk=st.integers(1, 4),
    steps=st.integers(1, 4),
    share=st.floats(0, 1),
    tied=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_picked_candidates_are_closed_under_parents_even_with_ties(
    seed: int, batch: int, topk: int, steps: int, share: float, tied: bool
) -> None:
    pool = topk + (steps - 1) * topk * topk
    levels = grown_levels(seed, batch, topk, steps, tied)
    results = organize_draft_results(levels, 2 + int(share * (pool - 1)))
    parents = plain.parents_of_candidates(results, topk)
    assert torch.equal(fast.parents_of_candidates(results, topk), parents)
    links = fast.links_from_parents(parents)
    assert int(links.depth.max()) <= steps


@pytest.mark.parametrize("parents", [[-1, 1], [-1, -1], [0, 0], [-1, 0, 5]])
@pytest.mark.parametrize("links", [fast.links_from_parents, plain.links_from_parents])
def test_parents_that_are_no_tree_are_refused(
    links: Callable[[torch.Tensor], object], parents: list[int]
) -> None:
    with pytest.raises(TreeRefused):
        links(torch.tensor([parents]))


@pytest.mark.parametrize(
    ("parent_list", "picked"),
    [([-1, 0, 1], [0, 4]), ([-1, 0, 1], [4, 1]), ([], [0, 2]), ([-1, 0, 1], [0, 9])],
)
def test_a_node_without_its_parent_is_refused(parent_list: list[int], picked: list[int]) -> None:
    results = DraftResults(
        torch.tensor([parent_list], dtype=torch.int64),
        torch.tensor([picked]),
        torch.tensor([[7, 8]]),
    )
    for module in (fast, plain):
        with pytest.raises(TreeRefused, match="no earlier node"):
            module.parents_of_candidates(results, 2)


def test_masks_that_are_no_tree_are_refused() -> None:
    skipped = plain.visibility(torch.tensor([[-1, 0, 1]]))
    skipped[0, 2, 0] = False
    lonely = plain.visibility(torch.tensor([[-1, 0, 1]]))
    lonely[0, 1, 0] = False
    for module in (fast, plain):
        with pytest.raises(TreeRefused, match="closed"):
            module.links_from_mask(skipped)
        with pytest.raises(TreeRefused, match="no earlier"):
            module.links_from_mask(lonely)


@given(tree=trees())
@settings(max_examples=100, deadline=None)
def test_orders_convert_exactly_both_ways(tree: Tree) -> None:
    level = level_major(tree)
    back, order = preorder(level.tokens.tolist(), level.parents.tolist())
    for name in ("tokens", "next_token", "next_sibling", "parent", "depth"):
        assert np.array_equal(getattr(back, name), getattr(tree, name)), name
    assert level.order[order].tolist() == list(range(tree.num_nodes))
    assert np.all(np.diff(tree.depth[level.order]) >= 0)


@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    levels=st.integers(1, 4),
    topk=st.integers(1, 4),
    share=st.floats(0, 1),
    tied=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_uno_trees_are_the_reference_s_even_with_ties(
    seed: int, batch: int, levels: int, topk: int, share: float, tied: bool
) -> None:
    generator = np.random.default_rng(seed)
    tokens = np.stack(
        [[generator.choice(9, topk, replace=False) for _ in range(levels)] for _ in range(batch)]
    )
    probs = -np.sort(-generator.random((batch, levels, topk)), axis=2).astype(np.float32)
    if tied:
        probs = (np.ceil(probs * 2) / 2).astype(np.float32)
    pool = sum(topk**level for level in range(levels + 1))
    num_nodes = 1 + int(share * (pool - 1))
    given_as = (torch.from_numpy(tokens), torch.from_numpy(probs), num_nodes)
    got, expected = fast_uno.build_uno_trees(*given_as), plain_uno.build_uno_trees(*given_as)
    for left, right in zip(got, expected, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("module", [fast_uno, plain_uno])
def test_uno_refuses_what_it_cannot_grow(module: object) -> None:
    build = module.build_uno_trees  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="hold 3 nodes"):
        build(torch.tensor([[[1, 2]]]), torch.tensor([[[0.5, 0.4]]]), 4)
    with pytest.raises(ValueError, match="NaN"):
        build(torch.tensor([[[1, 2]]]), torch.tensor([[[0.5, float("nan")]]]), 2)
