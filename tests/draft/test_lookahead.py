"""Prepared outcomes: the likeliest go first, what came true stays, the rest is dropped."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from graft.common.prefix import Prefix
from graft.common.sampling import Sampling
from graft.common.tier import Tier
from graft.common.tree import Tree, TreeLimits, chain, from_parents
from graft.draft.credits import Credits
from graft.draft.lookahead import Outlook
from graft.draft.mirror import Mirror
from graft.draft.proposers.base import Seat

TRUTH = [*range(100)]


def seat_of() -> Seat:
    mirror = Mirror(1, Prefix([0]), 1, Sampling(), TreeLimits(16, 8, 1000), 100)
    return Seat(mirror, Tier("x", 2, 1, 3))


def outlook_at(budget: int = 4, max_trees: int = 8) -> Outlook:
    """At root 0; a chain of 1, 2 was pushed, and 3 is likely to follow."""
    outlook = Outlook(budget, Credits(max_trees, (1, 1)))
    outlook.credits.take(1, 1)
    outlook.restart(chain([0, 1, 2]))
    outlook.saw(outlook.root, wide(0))
    return outlook


def wide(root: int) -> Tree:
    """A chain of the next three numbers, and 90 beside each of them."""
    tokens = [root, root + 1, 90, root + 2, 91, root + 3]
    return from_parents(tokens, [-1, 0, 0, 1, 1, 3], [0.0, -0.1, -3.0, -0.2, -2.0, -0.3])


def prepare(outlook: Outlook, count: int = 1, length: int = 1) -> list[tuple[int, ...]]:
    """length: of the committed prefix."""
    made = []
    for candidate in outlook.best(count):
        root = candidate.tokens[-1]
        size = length + len(candidate.tokens)
        assert outlook.credits.take(size, hash(candidate.tokens)) is None
        ahead = outlook.prepared(candidate, seat_of(), chain([root, root + 1, root + 2]))
        outlook.saw(ahead, wide(root))
        made.append(candidate.tokens)
    return made


def test_the_likeliest_outcome_is_prepared_first_whatever_its_round() -> None:
    outlook = outlook_at()
    assert prepare(outlook) == [(1, 2, 3)]
    assert prepare(outlook) == [(1, 2, 3, 4, 5, 6)]


def test_no_more_is_prepared_than_the_budget_allows() -> None:
    outlook = outlook_at(budget=2)
    while prepare(outlook):
        pass
    assert outlook.num_prepared == 2
    assert not outlook.wants_work


def test_no_more_is_prepared_than_verify_holds() -> None:
    outlook = outlook_at(budget=20, max_trees=3)
    while prepare(outlook):
        pass
    assert outlook.num_prepared == 2


def test_a_hit_makes_the_outcome_the_root_and_keeps_what_follows_it() -> None:
    outlook = outlook_at()
    prepare(outlook)
    prepare(outlook)
    prepare(outlook)
    moved = outlook.committed((1, 2, 3), (4, hash((1, 2, 3))), 2)
    assert moved.hit
    assert outlook.seen
    assert (4, 5, 6) in {ahead.tokens for ahead in outlook.all}
    assert all(one.tokens[0] in (4, 90) for one in outlook.best(9))


def test_a_miss_drops_what_can_no_longer_come() -> None:
    outlook = outlook_at()
    prepare(outlook)
    prepare(outlook)
    moved = outlook.committed((7,), (2, 7), 2)
    assert not moved.hit
    assert {ahead.tokens for ahead in moved.dropped} == {(), (1, 2, 3), (1, 2, 3, 4, 5, 6)}
    assert outlook.num_prepared == 0 and not outlook.seen


def test_a_shorter_commit_than_foreseen_keeps_the_outcomes_behind_it() -> None:
    outlook = outlook_at()
    prepare(outlook)
    moved = outlook.committed((1,), (2, 7), 0)
    assert not moved.hit
    assert [ahead.tokens for ahead in outlook.all] == [(), (2, 3)]
    assert outlook.adrift


def test_a_tree_verify_did_not_keep_is_no_hit() -> None:
    outlook = outlook_at()
    prepare(outlook)
    (gone,) = outlook.refused(4, 1)
    assert gone.tokens == (1, 2, 3)
    assert not outlook.committed((1, 2, 3), (4, 9), 2).hit


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(1, 6))
def test_credits_and_prepared_outcomes_stay_within_their_bounds(
    commits: list[int], budget: int
) -> None:
    outlook = outlook_at(budget=budget, max_trees=6)
    length, root = 1, 0
    for count in commits:
        while prepare(outlook, length=length):
            pass
        assert outlook.num_prepared <= budget
        assert outlook.credits.num_held <= 6
        tokens = tuple(range(root + 1, root + count + 1))
        length, root = length + count, root + count
        if not outlook.committed(tokens, (length, hash(tokens)), 2).hit:
            outlook.restart(chain([root, root + 1, root + 2]))
            outlook.saw(outlook.root, wide(root))
        for ahead in outlook.all:
            expected = tuple(range(root + 1, root + 1 + len(ahead.tokens)))
            assert ahead.tokens == expected or 90 in ahead.tokens or 91 in ahead.tokens


def test_bytes_are_spent_and_come_back_with_tokens() -> None:
    outlook = outlook_at(budget=20, max_trees=40)
    (candidate,) = outlook.best(1)
    outlook.prepared(candidate, seat_of(), None, num_bytes=2800)
    assert not outlook.best(1) and not outlook.wants_work
    outlook.committed((1, 2, 3, 4, 5, 6), (7, 1), 2)
    outlook.restart(chain([6, 7, 8]))
    outlook.saw(outlook.root, wide(6))
    assert outlook.best(1)
