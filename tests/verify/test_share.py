"""Rows of a step are shared fairly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graft.verify.share import share


def test_everyone_gets_what_they_want_when_there_is_enough() -> None:
    assert share([3, 0, 5], 10) == [3, 0, 5]


def test_the_modest_are_served_and_the_greedy_split_the_rest() -> None:
    assert share([2, 50, 50], 22) == [2, 10, 10]


def test_a_remainder_goes_to_those_who_want_most() -> None:
    assert share([6, 5], 7) == [4, 3]


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(0, 200))
def test_shares_are_fair_and_complete(wants: list[int], total: int) -> None:
    given_rows = share(wants, total)
    assert sum(given_rows) == min(total, sum(wants))
    assert all(0 <= got <= want for got, want in zip(given_rows, wants, strict=True))
    unserved = [got for got, want in zip(given_rows, wants, strict=True) if got < want]
    assert not unserved or max(given_rows) <= min(unserved) + 1
