"""Trees go out only for prefixes that can still come, once each, and never more than agreed."""

from __future__ import annotations

from graft.draft.credits import Credits


def test_one_tree_goes_for_the_committed_prefix_and_no_second() -> None:
    credits = Credits(4, (10, 1))
    assert credits.take(10, 1) is None
    assert credits.take(10, 1) == "repeated"


def test_a_tree_for_a_prefix_left_behind_is_stale() -> None:
    credits = Credits(4, (10, 1))
    assert credits.take(9, 5) == "stale"
    assert credits.take(10, 2) == "stale"


def test_trees_for_likely_prefixes_use_up_credit() -> None:
    credits = Credits(2, (10, 1))
    assert credits.take(12, 7) is None
    assert credits.take(12, 8) is None
    assert credits.take(13, 9) == "no_credit"


def test_a_commit_gives_back_the_credit_of_what_can_no_longer_come() -> None:
    credits = Credits(3, (10, 1))
    for named in ((10, 1), (12, 7), (12, 8)):
        assert credits.take(*named) is None
    credits.moved(12, 7)
    assert credits.num_held == 1
    assert credits.take(12, 7) == "repeated"
    assert credits.take(13, 1) is None


def test_a_refused_tree_gives_its_credit_back() -> None:
    credits = Credits(1, (10, 1))
    assert credits.take(10, 1) is None
    credits.refused(10)
    assert credits.take(11, 3) is None
