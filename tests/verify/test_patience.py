"""A tree that is late is waited for as long as that brings more tokens than going on without."""

from __future__ import annotations

import math

import pytest

from graft.verify.patience import Patience

STEP_S = 0.03


def seasoned(tokens: int = 3, late_s: tuple[float, ...] = (), num_rounds: int = 60) -> Patience:
    """Rounds with and without a tree by turns, and trees that came so late; inf never came."""
    patience = Patience()
    for number in range(num_rounds):
        drafted = number % 2 == 0
        patience.ran(tokens if drafted else 1, drafted, STEP_S, STEP_S)
    for number, late in enumerate(late_s):
        name = (number, number)
        patience.missed(1, name)
        if not math.isinf(late):
            patience.came(1, name, late)
    return patience


def test_what_is_not_known_yet_is_waited_for() -> None:
    assert Patience().wait_s() == math.inf
    assert seasoned(late_s=(0.5, 0.5, 0.5)).wait_s() == math.inf


@pytest.mark.parametrize("late_s", [0.001, 0.005])
def test_trees_that_are_a_little_late_are_waited_for(late_s: float) -> None:
    assert seasoned(late_s=(late_s,) * 8).wait_s() == late_s


def test_trees_that_come_after_two_rounds_are_not() -> None:
    assert seasoned(late_s=(2 * STEP_S,) * 8).wait_s() == 0.0


def test_trees_that_never_come_are_not() -> None:
    assert seasoned(late_s=(math.inf,) * 8).wait_s() == 0.0


def test_the_wait_ends_where_the_later_ones_begin() -> None:
    late = (0.002,) * 6 + (1.0,) * 2
    assert seasoned(late_s=late).wait_s() == 0.002


def test_few_that_would_come_soon_do_not_make_all_others_wait() -> None:
    late = (0.02, *(math.inf,) * 11)
    assert seasoned(late_s=late).wait_s() == 0.0


def test_trees_that_bring_nothing_are_not_waited_for() -> None:
    assert seasoned(tokens=1, late_s=(0.005,) * 8).wait_s() == 0.0


def test_the_newest_lateness_counts() -> None:
    patience = seasoned(late_s=(1.0,) * 12)
    for number in range(100, 112):
        patience.missed(1, (number, number))
        patience.came(1, (number, number), 0.001)
    assert patience.wait_s() == 0.001


def test_sessions_with_equal_texts_are_told_apart() -> None:
    patience = seasoned()
    for session_id in range(4):
        patience.missed(session_id, (7, 7))
        patience.came(session_id, (7, 7), 0.002 * (session_id + 1))
    assert patience.wait_s() == 0.008
