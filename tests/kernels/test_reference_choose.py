"""The law of one row, in numbers small enough to check by eye."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from graft.common.noise import gumbel, uniforms
from graft.kernels.ops import ChoiceRows
from graft.kernels.reference.choose import choose, target_probs
from graft.kernels.reference.float_math import exp32, log32, pick, to_weights
from graft.testing.trees import law_rows

NAN, INF = float("nan"), float("inf")


def probs_of(logits: list[float], rows: ChoiceRows) -> list[float]:
    return [round(p, 4) for p in target_probs(torch.tensor([logits]), rows)[0].tolist()]


def choice_of(logits: list[float], rows: ChoiceRows) -> int:
    return int(choose(torch.tensor([logits]), rows))


def logs(*probs: float) -> list[float]:
    return [math.log(p) for p in probs]


def test_log_and_exp_are_right_to_a_few_units() -> None:
    u = uniforms(3, 7, 4096)
    exact = np.log(u.astype(np.float64))
    assert np.abs(log32(u) / exact - 1).max() < 3e-7
    x = -np.linspace(0, 80, 4096).astype(np.float32)
    assert np.abs(exp32(x) / np.exp(x.astype(np.float64)) - 1).max() < 3e-7
    assert exp32([0.0, -0.0, -88.0, -np.inf]).tolist() == [1, 1, 0, 0]


def test_noise_is_the_noise_of_drafters_up_to_rounding() -> None:
    u = uniforms(3, 7, 4096)
    assert np.allclose(-log32(-log32(u)), gumbel(3, 7, 4096), rtol=1e-6, atol=1e-6)


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    assert choice_of([0.0, 2.0, 2.0, 1.0], law_rows(1, temperature=0.0)) == 1
    assert choice_of([0.0, 2.0, 2.0, 1.0], law_rows(1, top_k=1)) == 1
    assert probs_of([0.0, 2.0, 2.0], law_rows(1, temperature=0.0)) == [0, 1, 0]


def test_temperature_divides_the_logits() -> None:
    assert probs_of([2.0, 0.0], law_rows(1, temperature=2.0)) == [0.7311, 0.2689]


def test_top_k_keeps_ties_with_the_last() -> None:
    logits = logs(0.4, 0.2, 0.2, 0.1, 0.1)
    assert probs_of(logits, law_rows(1, top_k=2)) == [0.5, 0.25, 0.25, 0, 0]


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert probs_of(logs(0.5, 0.5), law_rows(1, top_k=99)) == [0.5, 0.5]


def test_top_p_keeps_the_smallest_set_with_the_mass() -> None:
    logits = logs(0.5, 0.3, 0.15, 0.05)
    assert probs_of(logits, law_rows(1, top_p=0.75)) == [0.625, 0.375, 0, 0]
    assert probs_of(logits, law_rows(1, top_p=0.01)) == [1, 0, 0, 0]


def test_top_p_counts_what_top_k_left() -> None:
    logits = logs(0.4, 0.3, 0.2, 0.1)
    # Of 0.4 and 0.3 the first has 0.571, so 0.6 needs both and 0.5 does not.
    assert probs_of(logits, law_rows(1, top_k=2, top_p=0.6)) == [0.5714, 0.4286, 0, 0]
    assert probs_of(logits, law_rows(1, top_k=2, top_p=0.5)) == [1, 0, 0, 0]


def test_min_p_is_a_share_of_the_likeliest() -> None:
    logits = logs(0.5, 0.3, 0.15, 0.05)
    assert probs_of(logits, law_rows(1, min_p=0.5)) == [0.625, 0.375, 0, 0]


def test_the_mask_allows_only_its_bits() -> None:
    rows = dataclasses.replace(law_rows(1), bitmask=torch.tensor([[0b101]], dtype=torch.int32))
    assert probs_of([0.0, 9.0, 0.0, 9.0], rows) == [0.5, 0, 0.5, 0]


def test_adjusted_logits_shrink_toward_zero_and_shift() -> None:
    rows = dataclasses.replace(
        law_rows(1, temperature=0.0),
        adjust_ptr=torch.tensor([0, 3], dtype=torch.int32),
        adjust_tokens=torch.tensor([0, 1, 2], dtype=torch.int32),
        adjust_ratio=torch.tensor([2.0, 2.0, 1.0]),
        adjust_shift=torch.tensor([0.0, 0.0, INF]),
    )
    assert choice_of([3.0, -1.0, 50.0, 1.6], rows) == 3
    assert choice_of([3.4, -1.0, 50.0, 1.6], rows) == 0
    assert choice_of([-9.0, -1.0, 50.0, -1.9], rows) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[0.0, NAN], [INF, 0.0], [-INF, -INF]])
def test_a_row_that_is_no_law_is_refused(temperature: float, row: list[float]) -> None:
    assert choice_of(row, law_rows(1, temperature=temperature)) == -1
    assert probs_of(row, law_rows(1, temperature=temperature)) == [0, 0]


def test_a_masked_nan_still_refuses_its_row() -> None:
    rows = dataclasses.replace(law_rows(1), bitmask=torch.tensor([[0b01]], dtype=torch.int32))
    assert choice_of([0.0, NAN], rows) == -1


def test_nothing_allowed_is_refused() -> None:
    rows = dataclasses.replace(law_rows(1), bitmask=torch.tensor([[0]], dtype=torch.int32))
    assert choice_of([0.0, 1.0], rows) == -1


def test_the_choice_is_the_highest_perturbed_logit() -> None:
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(0))
    noise = gumbel(11, 42, 100)
    expected = int(np.argmax(logits[0].numpy() + noise))
    assert int(choose(logits, law_rows(1, seed=11, position=42))) == expected


def test_a_coin_picks_by_running_weight() -> None:
    weights = to_weights([0.25, 0.0, 0.5, 0.25])
    assert [pick(weights, u) for u in (0.0, 0.24, 0.25, 0.74, 0.75, 1.0)] == [0, 0, 2, 2, 3, 3]
    assert pick(to_weights([0.0, 0.0]), 0.5) == -1
