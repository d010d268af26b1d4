"""DFlash: a block of masks behind the newest token, all of them guessed in one forward.

Committed tokens enter as context: one state of the target each, fused once, from which every layer
takes keys and values at the token's own position. The block is [newest token, mask, mask, ...];
mask j becomes the token at its own position. What the block writes is scratch.

Source: DFlash (z-lab, 2026) and the layouts that z-lab and speculators publish.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graft.draft.features import FeatureNeed
from graft.draft.kv import KvShape
from graft.draft.rows import Sight
from graft.kernels.ops import KvCache, Linear, Ops, Recurrent, RopeTable, StepRows


@dataclass(frozen=True, slots=True, eq=False)
class DflashLayer:
    """One layer; keys and values apart from queries, for context has no queries.

    sight: which rows of the block and how much of the context a row sees.
    """

    attention_norm: Tensor
    query: Linear
    keys_values: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    sight: Sight


@dataclass(frozen=True, slots=True, eq=False)
class DflashWeights:
    """embedding: [vocab, hidden] of the target; mask: [hidden], what stands for the mask token.

    fc: the captured states side by side -> hidden; context_norm: [hidden], after fc.
    """

    embedding: Tensor
    mask: Tensor
    fc: Linear
    context_norm: Tensor
    layers: tuple[DflashLayer, ...]
    final_norm: Tensor
    head: Linear


@dataclass(frozen=True, slots=True)
class DflashBlock:
    """The block and what surrounds its layers.

    size: tokens of a block, the newest committed one included.
    from_anchor: every row guesses the token after it, the first one too.
    softcap: of the logits; 0 is none.
    """

    size: int
    from_anchor: bool = False
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float = 0.0

    @property
    def num_drafted(self) -> int:
        """Tokens that a block guesses."""
        return self.size if self.from_anchor else self.size - 1


@dataclass(frozen=True, slots=True, eq=False)
class DflashShape:
    """Heads, and the rope table, which has to reach `context_length` + one block."""

    num_heads: int
    head_dim: int
    eps: float
    rope: RopeTable
    context_length: int


class DflashNet:
    """A loaded DFlash drafter. `forward` takes context in; `draft` guesses blocks."""

    shift = 1
    recurrent: Recurrent | None = None

    def __init__(
        self,
        weights: DflashWeights,
        ops: Ops,
        needs: FeatureNeed,
        shape: DflashShape,
        block: DflashBlock,
        token_ids: Tensor | None = None,
    ) -> None:
        """token_ids: [draft vocab], int64, the target's id of each column of the logits."""
        self.needs: FeatureNeed | None = needs
        self.block = block
        self.vocab_size = int(weights.embedding.shape[0])
        self.token_ids = token_ids
        self.context_length = shape.context_length
        width = weights.layers[0].keys_values.out_features
        heads = width // 2 // shape.head_dim
        self.kv_shape = KvShape(len(weights.layers), heads, shape.head_dim)
        self.sights = tuple(dict.fromkeys(layer.sight for layer in weights.layers))
        self.weights = weights
        self._ops = ops
        self._shape = shape

    def fuse(self, features: Tensor) -> Tensor:
        """[rows, states] -> [rows, hidden], what the context is made of."""
        ops, weights = self._ops, self.weights
        fused = ops.linear(features, weights.fc)
        return ops.rms_norm(fused, weights.context_norm, self._shape.eps)

    def forward(self, tokens: Tensor, hidden: Tensor | None, rows: StepRows, kv: KvCache) -> Tensor:
        """Writes keys and values of context rows and returns them as they came.

        Context has no attention of its own, and its tokens are not read.
        """
        assert hidden is not None, "DFlash reads the target's states"
        for number, layer in enumerate(self.weights.layers):
            self._write(number, layer, hidden, rows, kv)
        return hidden

    def draft(self, anchors: Tensor, rows: Mapping[Sight, StepRows], kv: KvCache) -> Tensor:
        """Runs one block a session; [sessions * drafted, hidden], ready for `logits`.

        Shapes:
            anchors: [sessions], int32, the newest committed tokens.
            rows: one set for each of `sights`, block after block; they differ in what is seen.
        """
        ops, weights, block, eps = self._ops, self.weights, self.block, self._shape.eps
        width = int(weights.embedding.shape[1])
        blocks = weights.mask.expand(len(anchors), block.size, width).clone()
        blocks[:, 0] = ops.embed(anchors, weights.embedding)
        hidden = blocks.view(-1, width) * block.embedding_scale
        for number, layer in enumerate(weights.layers):
            normed = ops.rms_norm(hidden, layer.attention_norm, eps)
            ops.add_(hidden, self._attend(number, layer, normed, rows[layer.sight], kv))
            normed = ops.rms_norm(hidden, layer.mlp_norm, eps)
            ops.add_(
                hidden, ops.linear(ops.silu_mul(ops.linear(normed, layer.gate_up)), layer.down)
            )
        drafted = hidden.view(-1, block.size, width)[:, block.size - block.num_drafted :]
        return ops.rms_norm(drafted.reshape(-1, width), weights.final_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] of `draft` -> [n, draft vocab]."""
        logits = self._ops.linear(hidden, self.weights.head)
        if self.block.output_multiplier != 1:
            logits = logits * self.block.output_multiplier
        if self.block.softcap > 0:
            logits = torch.tanh(logits / self.block.softcap) * self.block.softcap
        return logits

    def _write(
        self, number: int, layer: DflashLayer, x: Tensor, rows: StepRows, kv: KvCache
    ) -> None:
        """Keys and values of rows, to their slots. x: [rows, hidden], normed for block rows."""
        ops, dim = self._ops, self._shape.head_dim
        halves = ops.linear(x, layer.keys_values).chunk(2, dim=1)
        keys, values = (half.contiguous().view(len(x), -1, dim) for half in halves)
        if layer.k_norm is not None:
            keys = ops.rms_norm(keys, layer.k_norm, self._shape.eps)
        ops.rope_(keys, rows.positions, self._shape.rope)
        ops.write_kv(kv, number, rows, keys, values)

    def _attend(
        self, number: int, layer: DflashLayer, x: Tensor, rows: StepRows, kv: KvCache
    ) -> Tensor:
        ops, shape = self._ops, self._shape
        self._write(number, layer, x, rows, kv)
        query = ops.linear(x, layer.query).view(len(x), shape.num_heads, shape.head_dim)
        if layer.q_norm is not None:
            query = ops.rms_norm(query, layer.q_norm, shape.eps)
        ops.rope_(query, rows.positions, shape.rope)
        window = layer.sight.window if layer.sight.causal else 0
        seen = ops.attend(query, kv, number, rows, shape.head_dim**-0.5, window)
        return ops.linear(seen.view(len(x), -1), layer.output)
