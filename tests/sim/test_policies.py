"""What the goodput policy owes, by simulation: few seeds here, two hundred in the slow test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graft.gateway.tiers.controller import Fixed
from graft.gateway.tiers.goodput import Goodput
from graft.sim.compare import Plain, compare
from graft.sim.run import run
from graft.sim.workloads import UNSEEN, WORKLOADS
from graft.sim.world import DEADLINE_S, Workload

STATIONARY = [workload for workload in WORKLOADS if workload.kind == "stationary"]
FEW = range(1, 4)
MANY = range(1, 201)


def named(kind: str) -> Workload:
    return next(workload for workload in WORKLOADS if workload.kind == kind)


@pytest.mark.parametrize("workload", STATIONARY, ids=lambda workload: workload.name)
def test_a_steady_workload_gets_nearly_its_best_fixed_tier(workload: Workload) -> None:
    done = compare(workload, FEW)
    assert done.of_best_fixed >= 0.92
    assert done.goodput.worst_window >= 0.93
    assert done.goodput.mean_window >= 0.96


def test_a_shifting_workload_gets_more_than_any_fixed_tier_and_than_the_field() -> None:
    done = compare(named("shifting"), FEW)
    assert done.of_best_fixed >= 1.05
    assert done.goodput.goodput > done.field.goodput
    assert done.goodput.worst_window >= 0.88


def test_a_workload_about_the_threshold_causes_few_switches() -> None:
    done = compare(named("oscillating"), FEW)
    assert done.goodput.switches_per_minute < done.field.switches_per_minute / 4
    assert done.goodput.switches_per_minute <= 5
    assert done.goodput.worst_window >= 0.9


def test_a_slowed_drafter_is_left_and_taken_back_within_five_seconds() -> None:
    workload = named("slowed")
    slowed_at, restored_at = 10.0, 20.0
    for seed in FEW:
        track = run(workload, seed, Goodput(DEADLINE_S))
        in_force = [(at, tier) for at, tier, reason in track.tiers if reason != "probe"]
        left = [at for at, tier in in_force if slowed_at < at < restored_at and tier.off]
        assert left and left[0] < slowed_at + 1.0
        back = [at for at, tier in in_force if at > restored_at and not tier.off]
        assert back and back[0] < restored_at + 5.0


def test_plain_decoding_is_never_below_itself() -> None:
    """The yardstick of worst windows: the same moments of the machine, whatever is decoded."""
    workload = replace(named("slowed"), phases=named("slowed").phases[:1])
    one, other = (run(workload, 3, Plain()) for _ in range(2))
    assert one.times == other.times
    drafted = run(workload, 3, Fixed())
    assert drafted.expected[-1] > one.expected[-1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_seeds_hold_what_is_promised() -> None:
    for workload in WORKLOADS + UNSEEN:
        done = compare(workload, MANY)
        if workload.kind == "stationary":
            assert done.of_best_fixed >= 0.94, workload.name
            assert done.goodput.mean_window >= (0.94 if workload in UNSEEN else 0.97), workload.name
        if workload.name == "shifting":
            assert done.of_best_fixed >= 1.10
            assert done.goodput.goodput > done.field.goodput
        if workload.kind == "oscillating":
            assert done.goodput.switches_per_minute <= 4
