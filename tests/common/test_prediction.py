"""A text is placed in its prediction by its end, and found again after it went its own way."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from graft.common.prediction import MAX_MATCH, NOWHERE, Follower, Place, align
from graft.common.tree import IntArray


def ids(*tokens: int) -> IntArray:
    return np.asarray(tokens, np.int32)


def test_the_beginning_of_the_prediction_is_a_sure_match() -> None:
    assert align(ids(5, 6, 7), ids()) == Place(0, MAX_MATCH)
    assert align(ids(5, 6, 7), ids(5)) == Place(1, MAX_MATCH)


def test_a_token_that_is_not_predicted_is_nowhere() -> None:
    assert align(ids(5, 6, 7), ids(5, 9)) == NOWHERE


def test_the_place_is_found_again_behind_a_replaced_a_missing_and_an_added_token() -> None:
    predicted = ids(1, 2, 3, 4, 5, 6, 7)
    assert align(predicted, ids(1, 2, 9, 4, 5)) == Place(5, 2)
    assert align(predicted, ids(1, 2, 4, 5)) == Place(5, 2)
    assert align(predicted, ids(1, 2, 8, 9, 3, 4)) == Place(4, 2)


def test_of_two_places_the_longer_match_wins_and_then_the_nearer_one() -> None:
    predicted = ids(1, 2, 7, 3, 2, 8, 1, 2)
    assert align(predicted, ids(9, 9, 9, 3, 2)) == Place(5, 2)
    assert align(predicted, ids(9, 9, 9, 9, 2)) == Place(5, 1)


def count_accepted(predicted: list[int], text: list[int]) -> int:
    follower = Follower(predicted)
    assert sum(follower.feed([token]) for token in text) == follower.num_accepted
    return follower.num_accepted


def test_accepted_tokens_are_those_that_came_where_they_were_due() -> None:
    assert count_accepted([1, 2, 3, 4], [1, 2, 3, 4]) == 4
    assert count_accepted([1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 5, 6]) == 4
    assert count_accepted([1, 2], [7, 8, 9]) == 0
    assert count_accepted([], [1]) == 0


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=30), st.lists(st.integers(0, 5), max_size=30))
def test_no_more_is_accepted_than_was_predicted_or_written(
    predicted: list[int], text: list[int]
) -> None:
    assert 0 <= count_accepted(predicted, text) <= min(len(predicted), len(text))
