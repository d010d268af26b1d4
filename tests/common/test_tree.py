"""Trees: preorder links, checks with typed reasons, trimming."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.common.tree import (
    Tree,
    TreeLimits,
    TreeRefused,
    chain,
    check,
    from_parents,
    root_only,
    trim,
)
from graft.v1.tree_pb2 import TreeRefusal

LIMITS = TreeLimits(max_nodes=32, max_depth=8, vocab_size=100)


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 24, vocab_size: int = 100) -> Tree:
    """Any tree without duplicate siblings."""
    tokens, parents, used = [draw(st.integers(0, vocab_size - 1))], [-1], set()
    for node in range(1, draw(st.integers(1, max_nodes))):
        parent = draw(st.integers(0, node - 1))
        token = draw(st.integers(0, vocab_size - 1))
        if (parent, token) in used:
            token = next(t for t in range(vocab_size) if (parent, t) not in used)
        used.add((parent, token))
        tokens.append(token)
        parents.append(parent)
    return from_parents(tokens, parents)


def refusal(tree: Tree, limits: TreeLimits = LIMITS) -> TreeRefusal.ValueType:
    with pytest.raises(TreeRefused) as caught:
        check(tree, limits)
    return caught.value.refusal


def test_level_order_nodes_come_out_in_preorder_with_the_fields_links() -> None:
    # Reference T2, renumbered: 9 -> (3 -> 7), (5 -> 4 -> 8).
    tree = from_parents([9, 3, 5, 7, 4, 8], [-1, 0, 0, 1, 2, 4])
    assert tree.tokens.tolist() == [9, 3, 7, 5, 4, 8]
    assert tree.parent.tolist() == [-1, 0, 1, 0, 3, 4]
    assert tree.next_token.tolist() == [1, 2, -1, 4, 5, -1]
    assert tree.next_sibling.tolist() == [-1, 3, -1, -1, -1, -1]
    assert tree.positions(21).tolist() == [20, 21, 22, 21, 22, 23]
    assert tree.retrive_index(row=12).tolist() == [12, 13, 14, 15, 16, 17]
    assert tree.ancestors(5) == [0, 3, 4, 5]
    assert tree.children(0) == [1, 3]


@given(trees())
def test_first_child_of_a_node_follows_it_directly(tree: Tree) -> None:
    for node in range(tree.num_nodes):
        children = tree.children(node)
        assert int(tree.next_token[node]) == (children[0] if children else -1)
        if children:
            assert children[0] == node + 1
        for child in children:
            assert tree.parent[child] == node
            assert tree.depth[child] == tree.depth[node] + 1


@given(trees(), st.integers(1, 24), st.integers(0, 8))
def test_a_trimmed_tree_is_an_ancestor_closed_part(tree: Tree, nodes: int, depth: int) -> None:
    part = trim(tree, nodes, depth)
    paths = {tuple(tree.tokens[tree.ancestors(n)].tolist()) for n in range(tree.num_nodes)}
    kept = [tuple(part.tokens[part.ancestors(n)].tolist()) for n in range(part.num_nodes)]
    assert part.num_nodes <= nodes and part.max_depth <= depth
    assert set(kept) <= paths
    assert part.num_nodes == min(nodes, int((tree.depth <= depth).sum()))


def test_each_broken_limit_has_its_own_reason() -> None:
    assert refusal(chain(range(10))) == TreeRefusal.TREE_REFUSAL_TOO_DEEP
    wide = from_parents(range(33), [-1] + [0] * 32)
    assert refusal(wide) == TreeRefusal.TREE_REFUSAL_TOO_MANY_NODES
    assert refusal(chain([1, 100])) == TreeRefusal.TREE_REFUSAL_TOKEN_RANGE
    assert refusal(chain([1, -1])) == TreeRefusal.TREE_REFUSAL_TOKEN_RANGE
    twins = from_parents([1, 7, 7], [-1, 0, 0])
    assert refusal(twins) == TreeRefusal.TREE_REFUSAL_DUPLICATE_SIBLING
    cousins = from_parents([1, 7, 8, 7, 7], [-1, 0, 0, 1, 2])
    check(cousins, LIMITS)
    check(root_only(3), LIMITS)


@pytest.mark.parametrize("parents", [[], [0], [-1, -1], [-1, 1], [-1, 2, 0]])
def test_parents_that_are_no_tree_are_malformed(parents: list[int]) -> None:
    with pytest.raises(TreeRefused) as caught:
        from_parents(range(len(parents)), parents)
    assert caught.value.refusal == TreeRefusal.TREE_REFUSAL_MALFORMED


def test_nan_scores_are_refused() -> None:
    with pytest.raises(TreeRefused) as caught:
        from_parents([1, 2], [-1, 0], [0.0, float("nan")])
    assert caught.value.refusal == TreeRefusal.TREE_REFUSAL_BAD_SCORES


def test_scores_travel_with_their_nodes() -> None:
    tree = from_parents([9, 3, 5, 7], [-1, 0, 0, 1], [0.0, -1.0, -2.0, -3.0])
    assert tree.scores is not None
    np.testing.assert_array_equal(tree.scores, [0.0, -1.0, -3.0, -2.0])
