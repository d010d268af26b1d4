"""Noise: the published Philox bits, exact uniforms, and a Gumbel law."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from graft.common.noise import Domain, derive_seed, gumbel, philox, uniform_at, uniforms


@pytest.mark.parametrize(
    ("seed", "counter", "words"),
    [  # Random123's known answers for philox4x32-10.
        (0, (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (0xFFFFFFFFFFFFFFFF, (0xFFFFFFFF,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(seed: int, counter: tuple[int, int, int, int], words: str) -> None:
    assert [f"{int(word):08x}" for word in philox(seed, *counter)] == words.split()


def test_a_token_has_the_same_uniform_whatever_the_vocabulary() -> None:
    small, large = uniforms(42, 7, 5), uniforms(42, 7, 103)
    np.testing.assert_array_equal(small, large[:5])
    assert uniform_at(42, 7, 102, Domain.CHOICE) == large[102]


def test_positions_seeds_and_domains_do_not_share_noise() -> None:
    draws = [
        uniforms(1, 7, 64),
        uniforms(1, 8, 64),
        uniforms(2, 7, 64),
        uniforms(1 << 32, 7, 64),
        uniforms(1, 7, 64, Domain.COIN),
    ]
    assert len({draw.tobytes() for draw in draws}) == len(draws)


def test_uniforms_lie_strictly_inside_the_unit_interval_and_are_uniform() -> None:
    draws = uniforms(3, 0, 200_000)
    assert 0.0 < draws.min() and draws.max() < 1.0
    assert stats.kstest(draws, "uniform").pvalue > 0.001


def test_noise_is_gumbel() -> None:
    assert stats.kstest(gumbel(9, 1, 100_000), "gumbel_r").pvalue > 0.001


def test_choices_of_one_request_have_their_own_seeds() -> None:
    assert derive_seed(5, 0) == 5
    assert len({derive_seed(5, index) for index in range(100)}) == 100
    assert all(0 <= derive_seed(2**64 - 1, index) < 2**64 for index in range(100))
