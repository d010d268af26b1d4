"""The optimizer of the loop: Muon for matrices, AdamW for the rest. Knows no network.

Source: Muon (Jordan et al. 2024), with the update scaled to AdamW's size (Liu et al. 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Coefficients of the quintic that pulls all singular values towards 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_NEWTON_STEPS = 5


class Muon:
    """Momentum whose matrices are replaced by the nearest ones with equal singular values."""

    def __init__(self, matrices: Sequence[Tensor], momentum: float = 0.95) -> None:
        self._matrices = list(matrices)
        self._momentum = momentum
        self._velocities = [torch.zeros_like(one) for one in matrices]

    @torch.no_grad()
    def step(self, rate: float, decay: float) -> None:
        """In place: moves every matrix against its gradient. decay: of weights, times rate."""
        for matrix, velocity in zip(self._matrices, self._velocities, strict=True):
            assert matrix.grad is not None, "every matrix took part in the loss"
            velocity.lerp_(matrix.grad, 1 - self._momentum)
            ahead = matrix.grad.lerp(velocity, self._momentum)
            update = orthogonalised(ahead)
            matrix.mul_(1 - rate * decay)
            matrix.add_(update, alpha=-rate * 0.2 * max(matrix.shape) ** 0.5)

    def state(self) -> list[Tensor]:
        """Velocities, in the order of the matrices; the tensors themselves."""
        return self._velocities


def orthogonalised(matrix: Tensor) -> Tensor:
    """[m, n] -> [m, n], float32: singular values about 1, singular vectors kept."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(torch.bfloat16)
    x = x / (x.norm() + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_NEWTON_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).float()


class Optimizer:
    """Steps the groups that a trainee names: role "matrix" by Muon, every other by AdamW.

    rate: of matrices; other groups take `others` times as much, their own "scale" on top.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], rate: float, others: float, decay: float
    ) -> None:
        self.rate, self._others, self._decay = rate, others, decay
        matrices = [
            one for group in groups if group.get("role") == "matrix" for one in group["params"]
        ]
        self._muon = Muon(matrices)
        self._matrices = matrices
        rest = [
            {
                "params": group["params"],
                "scale": float(group.get("scale", 1.0)),
                "weight_decay": group.get("weight_decay", decay),
            }
            for group in groups
            if group.get("role") != "matrix"
        ]
        self._adam = torch.optim.AdamW(rest, lr=rate * others, betas=(0.9, 0.95), fused=True)
        self.parameters = matrices + [one for group in rest for one in group["params"]]

    def step(self, share: float, clip: float) -> float:
        """In place: one step at `share` of the rate; returns the norm of the gradient before it.

        Gradients are scaled down to the norm `clip` and cleared afterwards.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, clip))
        for group in self._adam.param_groups:
            group["lr"] = self.rate * self._others * group["scale"] * share
        self._adam.step()
        self._muon.step(self.rate * share, self._decay)
        for one in self.parameters:
            one.grad = None
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on but the weights."""
        return {"adam": self._adam.state_dict(), "muon": self._muon.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """In place: takes over what `state_dict` returned."""
        self._adam.load_state_dict(state["adam"])
        for ours, stored in zip(self._muon.state(), state["muon"], strict=True):
            ours.copy_(stored)
