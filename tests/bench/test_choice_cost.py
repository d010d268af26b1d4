"""Deciding is cheap beside the target's forward."""

import pytest

from graft.bench.choice_cost import run
from graft.kernels.cpu.choose import native


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.timeout(600)
@pytest.mark.skipif(native() is None, reason="the bar is for native kernels")
def test_choice_walk_and_keep_take_less_than_a_tenth_of_the_forward() -> None:
    for cost in run(rounds=3):
        print(f"{cost.law}: {cost.ratio:.1%}")
        assert cost.ratio < 0.1, cost
