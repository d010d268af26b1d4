"""Losses over k + 1 cells, against laws written out and against chance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from graft.train.losses import (
    coupled_agreement,
    cross_entropy,
    head_log_probabilities,
    overlap,
)

CELLS = 6


def laws(seed: int, rows: int = 7) -> tuple[Tensor, Tensor]:
    """Two laws of CELLS columns each; [rows, CELLS]."""
    torch.manual_seed(seed)
    p, q = (torch.randn(rows, CELLS).mul(1.5).softmax(1) for _ in range(2))
    return p, q


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_and_their_gradients_are_those_of_a_softmax(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(1100, 8).to(dtype).requires_grad_()
    weight = torch.randn(50, 8).to(dtype).requires_grad_()
    columns = torch.stack([torch.randperm(50)[:5] for _ in range(1100)])
    shares = torch.rand(1100, 5)
    got = head_log_probabilities(hidden, weight, columns)
    (got * shares).sum().backward()
    plain = [one.detach().float().requires_grad_() for one in (hidden, weight)]
    expected = (plain[0] @ plain[1].T).log_softmax(1).gather(1, columns)
    (expected * shares).sum().backward()
    loose = dtype is torch.bfloat16
    assert torch.allclose(got, expected, atol=0.1 if loose else 1e-5)
    for ours, theirs in zip((hidden, weight), plain, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        gap = (ours.grad.float() - theirs.grad).norm() / theirs.grad.norm()
        assert gap < (0.02 if loose else 1e-5)


def test_gradients_of_a_wide_head_keep_their_direction() -> None:
    torch.manual_seed(1)
    hidden = torch.randn(300, 16, requires_grad=True)
    weight = (torch.randn(6000, 16) * 1.2).requires_grad_()
    columns = (hidden @ weight.T).topk(5).indices
    head_log_probabilities(hidden, weight, columns).sum().backward()
    plain = [one.detach().clone().requires_grad_() for one in (hidden, weight)]
    (plain[0] @ plain[1].T).log_softmax(1).gather(1, columns).sum().backward()
    for ours, theirs in zip((hidden, weight), plain, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        gap = float((ours.grad - theirs.grad).norm() / theirs.grad.norm())
        assert 0 < gap < 0.1
    assert weight.grad is not None
    assert int((weight.grad != 0).any(1).sum()) <= 2048


def test_a_head_that_is_the_targets_gets_no_gradient() -> None:
    hidden = torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(9, 8)
    head_log_probabilities(hidden, weight, torch.tensor([[0, 3]] * 4)).sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_cross_entropy_is_the_plain_one_when_all_cells_are_named() -> None:
    p, q = laws(2)
    expected = -(p * q.log()).sum(1)
    assert torch.allclose(cross_entropy(q[:, :-1].log(), p[:, :-1]), expected, atol=1e-5)


def test_overlap_is_the_mass_that_rejection_sampling_accepts() -> None:
    p, q = laws(3)
    expected = torch.minimum(p, q).sum(1)
    assert torch.allclose(overlap(q[:, :-1].log(), p[:, :-1]), expected, atol=1e-5)


def test_coupled_agreement_is_the_sum_written_out() -> None:
    p, q = laws(4)
    expected = torch.zeros(len(p))
    for row in range(len(p)):
        for v in range(CELLS):
            total = sum(
                max(float(p[row, u] / p[row, v]), float(q[row, u] / q[row, v]))
                for u in range(CELLS)
            )
            expected[row] += 1 / total
    assert torch.allclose(coupled_agreement(q[:, :-1].log(), p[:, :-1]), expected, atol=1e-5)


def test_coupled_agreement_is_how_often_one_noise_chooses_alike() -> None:
    p, q = laws(5, rows=1)
    noise = np.random.default_rng(0).exponential(size=(200_000, CELLS))
    alike = np.argmin(noise / p.numpy(), 1) == np.argmin(noise / q.numpy(), 1)
    said = float(coupled_agreement(q[:, :-1].log(), p[:, :-1]))
    assert abs(alike.mean() - said) < 0.005


def test_equal_laws_always_agree() -> None:
    p, _ = laws(6)
    for loss in (overlap, coupled_agreement):
        assert torch.allclose(loss(p[:, :-1].log(), p[:, :-1]), torch.ones(len(p)), atol=1e-5)


@pytest.mark.parametrize("loss", [overlap, coupled_agreement])
def test_gradients_of_acceptance_are_those_of_small_steps(loss: object) -> None:
    assert callable(loss)
    p, q = (one.double() for one in laws(7, rows=3))
    logits = q.log()[:, :-1].clone().requires_grad_()

    def accepted(x: Tensor) -> Tensor:
        result: Tensor = loss(x, p[:, :-1]).sum()
        return result

    (gradient,) = torch.autograd.grad(accepted(logits), logits)
    for row in range(3):
        for column in range(CELLS - 1):
            step = torch.zeros_like(logits)
            step[row, column] = 1e-5
            slope = (accepted(logits + step) - accepted(logits - step)) / 2e-5
            assert abs(float((slope - gradient[row, column]).detach())) < 1e-4
