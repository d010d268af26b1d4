"""Level acceptance: the closed form, the measurement, and what coupling is worth."""

import numpy as np
import pytest
import torch

from graft.bench.level_acceptance import closed_form_coupled, compare_embedded, measure
from graft.bench.prompts import read


def laws(seed: int, damage: float, vocab: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(vocab, generator=generator) * 1.5
    return target, target + damage * torch.randn(vocab, generator=generator)


def test_one_child_meets_the_known_overlap() -> None:
    target, draft = laws(0, 1.0)
    p, q = (torch.softmax(x.double(), 0).numpy() for x in (target, draft))
    known = sum(p[v] / (1 + np.maximum(q * p[v] / q[v] - p, 0).sum()) for v in range(len(p)))
    assert closed_form_coupled(p, q, 1) == pytest.approx(known, rel=1e-9)


def test_a_perfect_drafter_is_always_accepted() -> None:
    p = torch.softmax(laws(1, 0.0)[0].double(), 0).numpy()
    assert closed_form_coupled(p, p, 1) == pytest.approx(1.0)


@pytest.mark.parametrize("width", [1, 4])
def test_the_measurement_agrees_with_the_closed_form(width: int) -> None:
    target, draft = laws(2, 1.0)
    p, q = (torch.softmax(x.double(), 0).numpy() for x in (target, draft))
    level = measure(target.repeat(3000, 1), draft.repeat(3000, 1), draws=1, width=width)
    expected = closed_form_coupled(p, q, width)
    assert level.coupled == pytest.approx(expected, abs=4 * max(level.coupled_spread, 0.002))


@pytest.mark.parametrize("damage", [0.5, 1.0, 2.0])
def test_coupled_children_beat_fixed_ones(damage: float) -> None:
    ratios = []
    for seed in range(10):
        target, draft = laws(seed, damage)
        p, q = (torch.softmax(x.double(), 0).numpy() for x in (target, draft))
        fixed = p[np.argsort(-q)[:4]].sum()
        ratios.append(closed_form_coupled(p, q) / fixed)
    assert np.mean(ratios) > 1.15


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.timeout(600)
def test_coupled_children_beat_fixed_ones_for_a_damaged_smollm2() -> None:
    texts = [prompt.text for prompt in read(limit=6)]
    level = compare_embedded(texts, [10, 14, 18], draws=2)
    print(f"ratio {level.ratio:.2f} +- {level.ratio_spread:.2f}")
    assert level.ratio - 2 * level.ratio_spread > 1.15
