"""Crowded steps drop the least promising nodes where they cost more than they bring."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from graft.common.tree import Tree, chain, from_parents
from graft.testing.shadow import ShadowTarget, new_session, text_after
from graft.verify.budget import CostCurve, VerifyBudget
from graft.verify.events import Committed
from graft.verify.pages import PagePool
from graft.verify.scheduler import Scheduler, SchedulerLimits
from graft.verify.shelf import Proposal
from graft.verify.step import StepTiming

CHAIN = chain([0, 1, 2, 3, 4])
BUSH = from_parents([0, 1, 2, 3, 4], [-1, 0, 0, 0, 0])


def curve(*points: tuple[int, float], times: int = 8) -> CostCurve:
    made = CostCurve()
    for _ in range(times):
        for rows, seconds in points:
            made.add(rows, seconds)
    return made


def budget(*points: tuple[int, float]) -> VerifyBudget:
    made = VerifyBudget()
    made.cost = curve(*points)
    return made


def test_costs_lie_on_straight_lines_between_known_sizes() -> None:
    found = curve((2, 0.010), (6, 0.030))
    assert found.at(4) == pytest.approx(0.020)
    assert found.at(8) == pytest.approx(0.040)
    assert found.at(1) == pytest.approx(0.010)


def test_a_lucky_large_step_never_makes_more_rows_cheaper() -> None:
    found = curve((2, 0.010), (8, 0.005))
    assert found.at(8) == pytest.approx(0.010)


def test_nothing_is_cut_before_steps_of_two_sizes_were_timed() -> None:
    assert budget().keep([1, 2], [CHAIN, CHAIN]) == [5, 5]
    assert budget((4, 0.01)).keep([1, 2], [CHAIN, CHAIN]) == [5, 5]


def test_free_rows_are_all_used() -> None:
    assert budget((2, 0.01), (32, 0.01)).keep([1, 2], [CHAIN, CHAIN]) == [5, 5]


def test_a_session_alone_keeps_what_its_tier_asked_for() -> None:
    assert budget((2, 0.01), (32, 0.5)).keep([1], [CHAIN]) == [5]


def test_rows_that_cost_more_than_they_bring_end_in_plain_decoding() -> None:
    trees = [BUSH] * 4
    made = budget((4, 0.004), (20, 0.200))
    for _ in range(40):
        for session_id in range(4):
            made.walked(session_id, BUSH, [0])
    assert made.keep([0, 1, 2, 3], trees) == [1, 1, 1, 1]


def test_a_step_stays_on_the_cheap_side_of_a_jump() -> None:
    made = budget((2, 0.010), (6, 0.0101), (7, 0.050), (10, 0.055))
    kept = made.keep([1, 2], [CHAIN, CHAIN])
    assert 2 < sum(kept) <= 6


def test_the_last_nodes_of_preorder_go_first_and_luck_counts() -> None:
    made = budget((2, 0.010), (6, 0.012), (10, 0.030))
    for _ in range(30):
        made.walked(1, CHAIN, [0, 1, 2, 3, 4])
        made.walked(2, CHAIN, [0])
    lucky, unlucky = made.keep([1, 2], [CHAIN, CHAIN])
    assert lucky > unlucky


def test_a_session_without_nodes_is_tried_again_every_so_often() -> None:
    made = budget((4, 0.004), (20, 0.200))
    sessions = [1, 2, 3, 4]
    for _ in range(40):
        for session_id in sessions:
            made.walked(session_id, BUSH, [0])
    rounds = [made.keep(sessions, [BUSH] * 4) for _ in range(40)]
    probes = [kept for kept in rounds if max(kept) > 1]
    assert 1 <= len(probes) <= 4 and all(max(kept) == 2 for kept in probes)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=5),
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.001, 0.1)), min_size=2, max_size=6),
)
def test_a_cut_leaves_every_session_its_root_and_adds_nothing(
    sizes: list[int], points: list[tuple[int, float]]
) -> None:
    trees: list[Tree] = [chain([*range(size)]) for size in sizes]
    kept = budget(*points).keep(list(range(len(trees))), trees)
    assert all(1 <= count <= tree.num_nodes for count, tree in zip(kept, trees, strict=True))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 5), min_size=4, max_size=30), st.floats(0.0001, 0.05))
def test_the_text_of_crowded_sessions_is_their_own(depths: list[int], row_s: float) -> None:
    """Steps that take `row_s` a row, and drafters that are right to some depth and then wrong."""
    budgeted = VerifyBudget()
    scheduler = Scheduler(SchedulerLimits(4, 8, 64, 16), PagePool(128, 4), None, budgeted)
    target, now, texts = ShadowTarget(), 0.0, {1: [1, 5], 2: [2, 5, 6], 3: [3]}
    sessions = [
        new_session(number, prompt, max_tokens=24, speculate=True)
        for number, prompt in texts.items()
    ]
    said: dict[int, list[int]] = {number: [] for number in texts}
    for session in sessions:
        scheduler.open(session, now)
        scheduler.join(1, session.session_id, session.ticket)
    turn = 0
    while scheduler.num_sessions:
        turn += 1
        for session in sessions:
            prefix = session.prefix.tokens.tolist()
            right = text_after(prefix, depths[(turn + session.session_id) % len(depths)])
            tree = chain([prefix[-1], *right, 49, 48])
            scheduler.offer(
                session.session_id, session.name, Proposal(tree, arrived=now, stream=1), now
            )
        plan = scheduler.plan(now)
        now += 0.05
        if plan.step is None:
            continue
        outcomes = target.run(plan.step)
        scheduler.complete(
            plan.step, outcomes, StepTiming(now, row_s * plan.step.num_rows, 0.0), now
        )
        scheduler.check()
        for event in scheduler.take_events():
            if isinstance(event, Committed):
                said[event.session_id] += event.tokens
    for number, prompt in texts.items():
        assert said[number] == text_after(prompt, 24)
