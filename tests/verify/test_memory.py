"""Memory is shared out before use; what does not fit is named in the agreed order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.common.errors import InvalidArgument
from graft.verify.memory import Demand, ModelSizes, available_bytes, plan_memory

MB = 1 << 20
SIZES = ModelSizes(
    weight_bytes=100 * MB,
    kv_bytes_per_token=1024,
    vocab_size=10_000,
    hidden_size=256,
    widest=1024,
    context_length=2048,
)
DEMAND = Demand(
    kv_tokens=0, page_tokens=16, max_step_rows=256, max_nodes=64, max_trees=8, max_running=16
)


def test_without_a_wish_the_kv_gets_four_contexts() -> None:
    plan = plan_memory(SIZES, DEMAND, 1 << 33)
    assert plan.kv_tokens == 4 * 2048 + 16 * 64
    assert plan.total_bytes <= plan.budget_bytes


def test_without_a_wish_the_kv_takes_what_is_left() -> None:
    plan = plan_memory(SIZES, DEMAND, 130 * MB)
    assert 16 <= plan.kv_tokens < 4 * 2048
    assert plan.kv_tokens % 16 == 0
    assert plan.total_bytes <= 130 * MB


def test_a_wish_is_rounded_to_whole_pages() -> None:
    assert plan_memory(SIZES, replace(DEMAND, kv_tokens=1000), 1 << 33).kv_tokens == 1008


@pytest.mark.parametrize(
    ("demand", "budget", "advice"),
    [
        (replace(DEMAND, kv_tokens=1 << 20), 200 * MB, "lower kv_tokens from 1048576 to"),
        (DEMAND, 110 * MB, "lower max_step_rows from 256 to"),
        (
            replace(DEMAND, max_step_rows=17, max_nodes=1024, max_trees=64, max_running=16),
            110 * MB,
            "lower max_nodes from 1024 to",
        ),
        (
            replace(DEMAND, max_step_rows=4097, max_nodes=1, max_running=4096),
            110 * MB,
            "choose a smaller model or more memory",
        ),
        (DEMAND, 50 * MB, "the weights alone take 100.00 MiB"),
    ],
)
def test_what_does_not_fit_names_the_first_number_that_mends_it(
    demand: Demand, budget: int, advice: str
) -> None:
    with pytest.raises(InvalidArgument, match=advice):
        plan_memory(SIZES, demand, budget)


@given(st.integers(101, 400), st.integers(0, 1 << 20), st.integers(32, 4096))
def test_the_advice_works(budget_mb: int, kv_tokens: int, rows: int) -> None:
    demand = replace(DEMAND, kv_tokens=kv_tokens, max_step_rows=rows)
    try:
        plan_memory(SIZES, demand, budget_mb * MB)
    except InvalidArgument as error:
        words = str(error).split()
        if "lower" not in words:
            return
        name, value = words[words.index("lower") + 1], int(words[words.index("to") + 1])
        assert value < getattr(demand, name)
        mended = replace(demand, **{name: value})
        if name != "kv_tokens" and kv_tokens:
            mended = replace(mended, kv_tokens=0)
        plan_memory(SIZES, mended, budget_mb * MB)


def test_a_budget_in_gigabytes_is_taken_at_its_word() -> None:
    assert available_bytes(2.0) == 2 << 30
    assert available_bytes(0.0) > 0


def test_the_shares_add_up_in_the_log() -> None:
    plan = plan_memory(SIZES, DEMAND, 1 << 33)
    shares = {line["share"]: line["size"] for line in plan.lines()}
    assert shares["weights"] == "100.00 MiB"
    assert list(shares)[-2:] == ["total", "budget"]


def test_features_have_a_share_that_stays_small() -> None:
    demand = replace(DEMAND, kv_tokens=2048, feature_bytes=64 * MB)
    without = plan_memory(SIZES, replace(demand, feature_bytes=0), 1 << 33).total_bytes
    assert plan_memory(SIZES, demand, 1 << 33).total_bytes == without + 64 * MB
    tight = without + 30 * MB
    plan = plan_memory(SIZES, demand, tight)
    assert plan.feature_bytes == tight // 16
    assert plan.total_bytes <= tight
