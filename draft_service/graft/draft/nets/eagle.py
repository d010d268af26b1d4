"""EAGLE and EAGLE-2: one decoder layer over the next token's embedding and the target's state.

Slot p holds embed(x_{p+1}) joined with the target's normed last state of position p. What leaves
the layer is both the input of the target's head and the state of the next step; there is no norm.

Source: EAGLE (Li et al. 2024), EAGLE-2 (Li et al. 2024); layout of the published checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graft.draft.features import FeatureNeed
from graft.draft.kv import KvShape
from graft.kernels.ops import KvCache, LayerSpec, Linear, Ops, Recurrent, StepRows
from graft.models.block import attention, layer_, mlp


@dataclass(frozen=True, slots=True, eq=False)
class EagleWeights:
    """embedding: [vocab, hidden]. fc: 2 * hidden -> hidden. head: hidden -> draft vocab.

    The first layer's attention_norm is not used; the layer has none.
    """

    embedding: Tensor
    fc: Linear
    layers: tuple[LayerSpec, ...]
    head: Linear


class EagleNet:
    """A loaded EAGLE head."""

    shift = 1
    recurrent: Recurrent | None = None

    def __init__(
        self,
        weights: EagleWeights,
        ops: Ops,
        target_layers: int,
        context_length: int,
        token_ids: Tensor | None = None,
    ) -> None:
        """target_layers: of the target, whose last state is read.

        token_ids: [draft vocab], int64, of a head that was cut to frequent tokens (FR-Spec).
        """
        self.needs: FeatureNeed | None = FeatureNeed((target_layers,), final_norm=True)
        self.vocab_size = int(weights.embedding.shape[0])
        self.token_ids = token_ids
        self.context_length = context_length
        self.kv_shape = kv_shape(weights.layers)
        self._weights = weights
        self._ops = ops

    def fuse(self, features: Tensor) -> Tensor:
        """The target's state goes in as it is."""
        return features

    def forward(self, tokens: Tensor, hidden: Tensor | None, rows: StepRows, kv: KvCache) -> Tensor:
        """[rows, hidden]: the layer's output, un-normed."""
        assert hidden is not None, "EAGLE reads the target's states"
        ops, weights = self._ops, self._weights
        embedded = ops.embed(tokens, weights.embedding)
        state = ops.linear(torch.cat([embedded, hidden], dim=1), weights.fc)
        first, *others = weights.layers
        ops.add_(state, attention(ops, first, 0, state, rows, kv))
        ops.add_(state, mlp(ops, first, ops.rms_norm(state, first.mlp_norm, first.eps)))
        for number, layer in enumerate(others, 1):
            layer_(ops, layer, number, state, rows, kv)
        return state

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, draft vocab], by the target's head."""
        return self._ops.linear(hidden, self._weights.head)


def kv_shape(layers: tuple[LayerSpec, ...]) -> KvShape:
    """What a token keeps in these layers."""
    first = layers[0]
    heads = (first.qkv.out_features // first.head_dim - first.num_heads) // 2
    return KvShape(len(layers), heads, first.head_dim)
