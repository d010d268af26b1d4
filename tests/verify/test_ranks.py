"""Places of an accepted path among its siblings, on a tree small enough to see."""

from __future__ import annotations

from graft.common.tree import from_parents
from graft.verify.ranks import ranks

#        0
#    1       4
#  2   3   5
TREE = from_parents([9, 1, 2, 3, 4, 5], [-1, 0, 1, 1, 0, 4])


def test_the_first_guess_has_rank_zero_and_a_leaf_rejects_nothing() -> None:
    assert ranks(TREE, [0, 1, 2]) == ((0, 0), 0)


def test_a_second_guess_has_rank_one() -> None:
    assert ranks(TREE, [0, 1, 3]) == ((0, 1), 0)
    assert ranks(TREE, [0, 4, 5]) == ((1, 0), 0)


def test_children_that_were_not_chosen_are_counted() -> None:
    assert ranks(TREE, [0]) == ((), 2)
    assert ranks(TREE, [0, 4]) == ((1,), 1)


def test_a_round_without_a_path_has_neither() -> None:
    assert ranks(TREE, []) == ((), 0)
