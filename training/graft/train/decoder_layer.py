"""One decoder layer in training: the matrices of a target's layer, float32, run in `dtype`.

Norms, the residual and softmax stay float32. What its queries look at is the network's own
business; here are heads, rotary positions and what comes after attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from graft.draft.checkpoints.borrowed import Borrowed
from graft.kernels.ops import RopeTable
from graft.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a layer. biases: on queries, keys and values. head_norms: on queries and keys."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    biases: bool = False
    head_norms: bool = False

    @property
    def widths(self) -> tuple[int, int, int]:
        """Of all queries, keys and values side by side."""
        kv = self.num_kv_heads * self.head_dim
        return (self.num_heads * self.head_dim, kv, kv)


def shape_of(
    config: DecoderConfig, *, biases: bool = False, head_norms: bool = False
) -> LayerShape:
    """The sizes of a target's layer."""
    return LayerShape(
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.rms_norm_eps,
        biases,
        head_norms,
    )


class DecoderLayer(nn.Module):
    """A layer that reads its residual through a norm, as those of Llama and Qwen do."""

    def __init__(self, shape: LayerShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        hidden, wide = shape.hidden_size, shape.intermediate_size
        self.qkv = matrix(sum(shape.widths), hidden)
        self.output = matrix(hidden, shape.widths[0])
        self.gate_up = matrix(2 * wide, hidden)
        self.down = matrix(hidden, wide)
        self.attention_norm = nn.Parameter(torch.ones(hidden))
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        self.bias = nn.Parameter(torch.zeros(sum(shape.widths))) if shape.biases else None
        norms = (torch.ones(shape.head_dim), torch.ones(shape.head_dim))
        self.q_norm, self.k_norm = (
            nn.Parameter(norm) if shape.head_norms else None for norm in norms
        )

    def start_as(self, borrowed: Borrowed, number: int, unit: float = 1.0) -> None:
        """Takes the target's layer `number`. unit: what one stands for in this residual."""

        def read(name: str) -> Tensor:
            return borrowed.source.read(f"model.layers.{number}.{name}.weight")

        with torch.no_grad():
            self.qkv.copy_(torch.cat([read(f"self_attn.{part}_proj") for part in "qkv"]))
            self.output.copy_(read("self_attn.o_proj") / unit)
            self.gate_up.copy_(torch.cat([read("mlp.gate_proj"), read("mlp.up_proj")]))
            self.down.copy_(read("mlp.down_proj") / unit)
            self.attention_norm.copy_(read("input_layernorm"))
            self.mlp_norm.copy_(read("post_attention_layernorm"))

    def heads(self, x: Tensor, rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, of rows that are normed already.

        Shapes:
            x: [..., hidden]; positions: [...].
            returns: [..., heads, head_dim], and twice [..., kv_heads, head_dim], in `dtype`.
        """
        flat = self.linear(x, self.qkv)
        if self.bias is not None:
            flat = flat + self.bias.to(flat.dtype)
        q, k, v = flat.split(self.shape.widths, -1)
        return self._placed(q, rope, positions, self.q_norm), *self._keys(k, v, rope, positions)

    def keys_values(self, x: Tensor, rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `heads`, for rows that ask nothing."""
        skipped = self.shape.widths[0]
        flat = self.linear(x, self.qkv[skipped:])
        k, v = flat.chunk(2, -1)
        return self._keys(k, v, rope, positions)

    def rest(self, state: Tensor, mixed: Tensor) -> Tensor:
        """The residual with what attention and MLP add to it. mixed: [..., query width]."""
        state = state + self.linear(mixed, self.output)
        gate, up = self.linear(self.norm(state, self.mlp_norm), self.gate_up).chunk(2, -1)
        return state + self.linear(functional.silu(gate) * up, self.down)

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        """Root mean square norm over the last dimension, float32."""
        return functional.rms_norm(x.float(), (x.shape[-1],), gain, self.shape.eps)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """In `dtype`."""
        return functional.linear(x.to(self.dtype), weight.to(self.dtype))

    def tensors(self, prefix: str, mlp_norm: str = "post_attention_layernorm") -> dict[str, Tensor]:
        """Its weights by the names that Hugging Face gives them."""
        found = {
            "self_attn.o_proj.weight": self.output,
            "mlp.down_proj.weight": self.down,
            "input_layernorm.weight": self.attention_norm,
            f"{mlp_norm}.weight": self.mlp_norm,
        }
        for part, weight in zip("qkv", self.qkv.split(self.shape.widths), strict=True):
            found[f"self_attn.{part}_proj.weight"] = weight
        if self.bias is not None:
            for part, bias in zip("qkv", self.bias.split(self.shape.widths), strict=True):
                found[f"self_attn.{part}_proj.bias"] = bias
        if self.q_norm is not None and self.k_norm is not None:
            found["self_attn.q_norm.weight"] = self.q_norm
            found["self_attn.k_norm.weight"] = self.k_norm
        for part, weight in zip(("gate", "up"), self.gate_up.chunk(2), strict=True):
            found[f"mlp.{part}_proj.weight"] = weight
        return {f"{prefix}.{name}": one for name, one in found.items()}

    def _keys(self, k: Tensor, v: Tensor, rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
        values = v.unflatten(-1, (-1, self.shape.head_dim))
        return self._placed(k, rope, positions, self.k_norm), values

    def _placed(self, flat: Tensor, rope: Rope, positions: Tensor, gain: Tensor | None) -> Tensor:
        heads = flat.unflatten(-1, (-1, self.shape.head_dim))
        if gain is not None:
            heads = self.norm(heads, gain)
        return rope.rotated(heads, positions).to(self.dtype)


class Rope(nn.Module):
    """Rotary positions as a table."""

    def __init__(self, table: RopeTable) -> None:
        super().__init__()
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", table.cos, persistent=False)
        self.register_buffer("sin", table.sin, persistent=False)

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates pairs half a head apart. x: [..., heads, head_dim]; positions: [...]."""
        cos, sin = self.cos[positions][..., None, :], self.sin[positions][..., None, :]
        low, high = x.float().chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def matrix(rows: int, columns: int) -> nn.Parameter:
    """Random weights that keep the size of what they are applied to."""
    return nn.Parameter(torch.randn(rows, columns) * columns**-0.5)
