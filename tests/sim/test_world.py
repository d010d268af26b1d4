"""The simulated services: measured costs, trees that chance walks, and exact fixed tiers."""

from __future__ import annotations

import random

import pytest

from graft.common.tier import Tier
from graft.gateway.tiers.controller import Fixed
from graft.sim.run import fixed_tokens, ramped, run
from graft.sim.workloads import CHAT, CODE, UNSEEN, WORKLOADS
from graft.sim.world import FP32, Phase, Workload, cost, grow, mean_rate

CHAIN = Tier("eagle", 3, 1, 4)
TREE = Tier("eagle", 3, 2, 7)


def steady(seconds: float = 20.0) -> Workload:
    phase = Phase(seconds, {"eagle": CHAT}, 0.002)
    return Workload("steady", "stationary", FP32, (phase,), (CHAIN,), (CHAIN,))


def test_a_forward_costs_what_was_measured_and_straight_lines_between() -> None:
    assert FP32.forward_s(1) == pytest.approx(0.0241)
    assert FP32.forward_s(32) == pytest.approx(0.0498)
    assert FP32.forward_s(24) == pytest.approx((0.0258 + 0.0498) / 2)
    assert FP32.forward_s(64) == pytest.approx(0.0498 + 2 * (0.0498 - 0.0258))


@pytest.mark.parametrize("tier", [CHAIN, TREE])
def test_walks_accept_as_much_as_is_expected(tier: Tier) -> None:
    shape = grow(CHAT, 1.0, tier)
    assert len(shape.children) == tier.num_draft_tokens
    dice = random.Random(3)
    lengths = [
        len(shape.walk([dice.random() for _ in range(shape.depth)])[0]) for _ in range(20_000)
    ]
    assert sum(lengths) / len(lengths) == pytest.approx(shape.expected, rel=0.02)


def test_a_wider_tree_holds_the_chain_and_expects_more() -> None:
    assert grow(CHAT, 1.0, TREE).expected > grow(CHAT, 1.0, CHAIN).expected


def test_a_drafter_ten_times_as_slow_is_late() -> None:
    workload = steady()
    slowed = Phase(1.0, {"eagle": CODE}, slow=10.0)
    assert cost(workload, slowed, CHAIN, 4).late
    assert mean_rate(workload, slowed, 1.0, CHAIN) == mean_rate(workload, slowed, 1.0, Tier())


def test_a_run_that_never_switches_gets_what_is_computed_for_its_tier() -> None:
    workload = steady()
    track = run(workload, 5, Fixed())
    exact = fixed_tokens(workload, 5, CHAIN)(track.times[-1])
    assert track.expected[-1] == pytest.approx(exact, rel=0.02)
    assert track.drawn == pytest.approx(exact, rel=0.1)
    assert (track.switches, track.probes) == (0, 0)


def test_equal_seeds_give_equal_runs() -> None:
    workload = steady(5.0)
    assert run(workload, 7, Fixed()).times == run(workload, 7, Fixed()).times
    assert run(workload, 7, Fixed()).times != run(workload, 8, Fixed()).times


def test_sessions_of_a_phase_come_one_after_another() -> None:
    phases = ramped([Phase(5.0, {}, num_sessions=1), Phase(5.0, {}, num_sessions=4)])
    assert [phase.num_sessions for phase in phases] == [1, 2, 3, 4]
    assert sum(phase.seconds for phase in phases) == pytest.approx(10.0)


def test_there_is_a_workload_of_every_kind() -> None:
    kinds = {workload.kind for workload in WORKLOADS}
    assert kinds == {"stationary", "shifting", "oscillating", "slowed"}


def test_workloads_that_nobody_chose_are_the_same_every_time() -> None:
    first = UNSEEN[0].phases[0]
    assert first.rtt_s == pytest.approx(0.0128, abs=1e-4)
    assert first.num_sessions == 8
    assert len({workload.name for workload in WORKLOADS + UNSEEN}) == len(WORKLOADS + UNSEEN)
