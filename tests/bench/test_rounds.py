"""Stages of rounds add up to their walls, and the split's cost is a ratio of equal work."""

from __future__ import annotations

import pytest

from graft.bench.rounds import STAGES, Mode, Passage, Round, overhead, same_text


def passage(*walls: float, token: int = 5) -> Passage:
    return Passage((token,) * len(walls), tuple(Round(wall, 1, 1, forward=0.25) for wall in walls))


def test_what_no_stage_explains_is_the_commit() -> None:
    one = Round(1.0, 2, 4, draft=0.1, wire=0.2, queue=0.05, forward=0.5, choice=0.05)
    assert one.commit == pytest.approx(0.1)
    assert sum(getattr(one, stage) for stage in STAGES) == pytest.approx(one.wall)


def test_means_are_of_rounds_and_rates_of_tokens() -> None:
    mode = Mode("plain", (passage(0.5, 1.5), passage(1.0)))
    answer = mode.as_json()
    assert (answer["rounds"], answer["wall_ms"], answer["tokens_per_s"]) == (3, 1000.0, 1.0)
    assert (answer["forward_ms"], answer["commit_ms"]) == (250.0, 750.0)


def test_the_overhead_is_the_median_of_paired_passages() -> None:
    split = Mode("services", (passage(1.1), passage(2.2), passage(9.0)))
    whole = Mode("one process", (passage(1.0), passage(2.0), passage(3.0)))
    assert overhead(split, whole) == pytest.approx(0.1)


def test_a_differing_text_is_noticed() -> None:
    first, other = Mode("a", (passage(1.0),)), Mode("b", (passage(1.0, token=6),))
    assert same_text([first, first]) and not same_text([first, other])
