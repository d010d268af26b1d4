"""Times of streamed answers and what they are summed up to."""

from __future__ import annotations

import pytest

from graft.bench.latency import Goal, Streamed, summary


def test_an_answer_s_times_count_from_when_it_was_due() -> None:
    answer = Streamed(due=1.0, arrivals=(1.5, 1.75, 2.5), num_tokens=6)
    assert (answer.ttft, answer.e2e) == (0.5, 1.5)
    assert answer.gaps == [0.25, 0.75]
    assert answer.tpot == pytest.approx(1.0 / 5)


def test_a_single_token_has_no_time_per_further_token() -> None:
    assert Streamed(0.0, (0.1,), 1).tpot is None


def test_percentiles_are_in_milliseconds() -> None:
    found = summary([0.001 * value for value in range(1, 101)])
    assert found["mean"] == pytest.approx(50.5)
    assert found["p50"] == pytest.approx(50.5)
    assert found["p99"] == pytest.approx(99.01)
    assert summary([]) == {}


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        (Goal(), True),
        (Goal(ttft_s=0.5), True),
        (Goal(ttft_s=0.4), False),
        (Goal(ttft_s=1.0, tpot_s=0.1), False),
        (Goal(e2e_s=1.5), True),
    ],
)
def test_a_goal_is_met_when_every_limit_is_kept(goal: Goal, met: bool) -> None:
    assert goal.met(Streamed(1.0, (1.5, 1.75, 2.5), 6)) is met
