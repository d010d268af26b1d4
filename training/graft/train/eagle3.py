"""EAGLE-3 in training: one layer at twice the attention width, unrolled over its own outputs.

Slot p holds the token behind row p and, at step 0, the target's states of row p; at step k it
holds the token k places on and the output of step k - 1. A slot of step k sees the keys of step 0
up to its own and its own keys of steps 1 to k: what it will see when it drafts a chain. The
function is that of `graft.draft.nets.eagle3`, which runs what `graft.train.export` writes.

Source: EAGLE-3 (Li et al. 2025), training-time test.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from graft.kernels.ops import RopeTable


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    """Sizes of the layer; those of the target but for the vocabulary and what attention reads."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_states: int
    draft_vocab_size: int
    eps: float

    @property
    def query_width(self) -> int:
        """Of all query heads side by side."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Of all key heads side by side."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What slots may read: keys and values of step 0, and those of their own later steps.

    keys, values: [B, kv_heads, W, head_dim]. mask: [B, n, W], added to scores; n slots ask.
    own: pairs of [B, kv_heads, 1, n, head_dim], one a later step.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor
    own: tuple[tuple[Tensor, Tensor], ...] = ()


class Eagle3Net(nn.Module):
    """The weights in float32 and the forward passes in `dtype`; norms and residual stay float32."""

    def __init__(self, shape: Eagle3Shape, rope: RopeTable, dtype: torch.dtype) -> None:
        """rope: of the target, for as many positions as training has."""
        super().__init__()
        self.shape, self.dtype = shape, dtype
        hidden, wide = shape.hidden_size, shape.intermediate_size
        width = shape.num_states * hidden
        self.fc = _matrix(hidden, width)
        self.qkv = _matrix(shape.query_width + 2 * shape.kv_width, 2 * hidden)
        self.output = _matrix(hidden, shape.query_width)
        self.gate_up = _matrix(2 * wide, hidden)
        self.down = _matrix(hidden, wide)
        self.head = _matrix(shape.draft_vocab_size, hidden)
        self.embedding_norm = nn.Parameter(torch.ones(hidden))
        self.hidden_norm = nn.Parameter(torch.ones(hidden))
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        self.final_norm = nn.Parameter(torch.ones(hidden))
        # States differ in size by channel a thousandfold; fc learns in units of each channel.
        self.state_scale: Tensor
        self.register_buffer("state_scale", torch.ones(width))
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", rope.cos, persistent=False)
        self.register_buffer("sin", rope.sin, persistent=False)

    def fuse(self, states: Tensor) -> Tensor:
        """[..., states * hidden] -> [..., hidden], float32."""
        return self._linear(states * self.state_scale, self.fc).float()

    def first(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor
    ) -> tuple[Tensor, Seen]:
        """Step 0 over whole windows.

        Shapes:
            embedded, hidden: [B, W, hidden]. positions: [B, W]. mask: [B, W, W], added to scores.
            returns: [B, W, hidden], before the final norm, and what later steps may see.
        """
        q, k, v = self._heads(embedded, hidden, positions)
        seen = Seen(k.flatten(1, 2), v.flatten(1, 2), mask)
        return self._rest(hidden, self._attend(q, seen)), seen

    def later(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, seen: Seen
    ) -> tuple[Tensor, Seen]:
        """One more step of n slots a window; `seen` holds their masks and own earlier keys.

        Shapes:
            embedded, hidden: [B, n, hidden]. positions: [B, n], of the step.
            returns: [B, n, hidden], before the final norm, and `seen` with this step's keys.
        """
        q, k, v = self._heads(embedded, hidden, positions)
        grown = Seen(seen.keys, seen.values, seen.mask, (*seen.own, (k, v)))
        return self._rest(hidden, self._attend(q, grown)), grown

    def normed(self, hidden: Tensor) -> Tensor:
        """What the head reads, in `dtype`."""
        return self._norm(hidden, self.final_norm).to(self.dtype)

    def _heads(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, kv_heads, group, n, head_dim], keys and values with group 1."""
        shape = self.shape
        joined = torch.cat(
            [self._norm(embedded, self.embedding_norm), self._norm(hidden, self.hidden_norm)], -1
        )
        flat = self._linear(joined, self.qkv)
        parts = flat.split((shape.query_width, shape.kv_width, shape.kv_width), -1)
        q, k, v = (
            part.unflatten(-1, (shape.num_kv_heads, -1, shape.head_dim)).permute(0, 2, 3, 1, 4)
            for part in parts
        )
        cos, sin = self.cos[positions][:, None, None], self.sin[positions][:, None, None]
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def _attend(self, q: Tensor, seen: Seen) -> Tensor:
        """[B, n, query width]"""
        count, group = q.shape[3], q.shape[2]
        queries = q.flatten(2, 3) * self.shape.head_dim**-0.5
        scores = queries @ seen.keys.transpose(-1, -2)
        scores = scores.unflatten(2, (group, count)) + seen.mask[:, None, None]
        scaled = queries.unflatten(2, (group, count))
        own = [(scaled * key).sum(-1, keepdim=True) for key, _ in seen.own]
        shares = torch.cat([scores, *own], -1).softmax(-1) if own else scores.softmax(-1)
        width = seen.keys.shape[2]
        mixed = shares[..., :width].flatten(2, 3) @ seen.values
        mixed = mixed.unflatten(2, (group, count))
        for step, (_, value) in enumerate(seen.own):
            mixed = mixed + shares[..., width + step, None] * value
        return mixed.permute(0, 3, 1, 2, 4).flatten(2)

    def _rest(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The residual, and what attention and MLP add to it."""
        state = hidden + self._linear(mixed, self.output)
        gate, up = self._linear(self._norm(state, self.mlp_norm), self.gate_up).chunk(2, -1)
        return state + self._linear(functional.silu(gate) * up, self.down)

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), gain, self.shape.eps)

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x.to(self.dtype), weight.to(self.dtype))


def _matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * columns**-0.5)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs half a head apart. x: [..., head_dim], cos and sin: [..., head_dim / 2]."""
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)
