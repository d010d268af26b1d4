"""EAGLE-3: one layer whose attention reads embedding and state side by side, at twice the width.

Target states of several layers pass `fuse` (norms and fc) once; recurrent steps feed the layer's
own output and skip it. Slots and positions are those of EAGLE.

Source: EAGLE-3 (Li et al. 2025) and the layouts that SpecForge, SGLang and speculators publish.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graft.draft.features import FeatureNeed
from graft.draft.nets.eagle import kv_shape
from graft.kernels.ops import KvCache, LayerSpec, Linear, Ops, RecurrentSpec, StepRows
from graft.models.block import attention, layer_, mlp


@dataclass(frozen=True, slots=True, eq=False)
class Eagle3Weights:
    """embedding: [vocab, hidden]. fc: states side by side -> hidden; None takes them as they are.

    input_norm: [states], over all states at once; chunk_norms: one [target hidden] a state; at
        most one of the two is there.
    embedding_norm, hidden_norm: [hidden], the two halves of what the first layer's attention
        reads. final_norm: [hidden], before the head.
    """

    embedding: Tensor
    fc: Linear | None
    input_norm: Tensor | None
    chunk_norms: tuple[Tensor, ...]
    embedding_norm: Tensor
    hidden_norm: Tensor
    layers: tuple[LayerSpec, ...]
    final_norm: Tensor
    head: Linear


@dataclass(frozen=True, slots=True)
class Eagle3Variant:
    """How a network differs from the first one published.

    norm_before_residual: the residual is the normed state. norm_output: the normed output is what
        the next step reads.
    """

    norm_before_residual: bool = False
    norm_output: bool = False


class Eagle3Net:
    """A loaded EAGLE-3 head."""

    shift = 1

    def __init__(
        self,
        weights: Eagle3Weights,
        ops: Ops,
        needs: FeatureNeed,
        context_length: int,
        token_ids: Tensor | None = None,
        variant: Eagle3Variant | None = None,
    ) -> None:
        """token_ids: [draft vocab], int64, the target's id of each column of the logits."""
        self.needs: FeatureNeed | None = needs
        self.vocab_size = int(weights.embedding.shape[0])
        self.token_ids = token_ids
        self.context_length = context_length
        self.kv_shape = kv_shape(weights.layers)
        self.weights = weights
        self._ops = ops
        self._variant = variant or Eagle3Variant()
        self._eps = weights.layers[0].eps
        self.recurrent = ops.recurrent(_spec(weights, token_ids, self._variant))

    def fuse(self, features: Tensor) -> Tensor:
        """[rows, states] -> [rows, hidden]."""
        ops, weights = self._ops, self.weights
        if weights.input_norm is not None:
            features = ops.rms_norm(features, weights.input_norm, self._eps)
        if weights.chunk_norms:
            chunks = features.chunk(len(weights.chunk_norms), dim=1)
            normed = [
                ops.rms_norm(chunk.contiguous(), norm, self._eps)
                for chunk, norm in zip(chunks, weights.chunk_norms, strict=True)
            ]
            features = torch.cat(normed, dim=1)
        return features if weights.fc is None else ops.linear(features, weights.fc)

    def forward(self, tokens: Tensor, hidden: Tensor | None, rows: StepRows, kv: KvCache) -> Tensor:
        """[rows, hidden]: the output before the final norm, or after it with norm_output."""
        assert hidden is not None, "EAGLE-3 reads the target's states"
        if self.recurrent is not None:
            return self.recurrent.forward(tokens, hidden, rows, kv)
        return self._by_ops(tokens, hidden, rows, kv)

    def _by_ops(self, tokens: Tensor, hidden: Tensor, rows: StepRows, kv: KvCache) -> Tensor:
        ops, weights = self._ops, self.weights
        embedded = ops.embed(tokens, weights.embedding)
        normed = ops.rms_norm(hidden, weights.hidden_norm, self._eps)
        joined = torch.cat(
            [ops.rms_norm(embedded, weights.embedding_norm, self._eps), normed], dim=1
        )
        first, *others = weights.layers
        state = normed if self._variant.norm_before_residual else hidden.clone()
        ops.add_(state, attention(ops, first, 0, joined, rows, kv))
        ops.add_(state, mlp(ops, first, ops.rms_norm(state, first.mlp_norm, self._eps)))
        for number, layer in enumerate(others, 1):
            layer_(ops, layer, number, state, rows, kv)
        return self._final(state) if self._variant.norm_output else state

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, draft vocab]."""
        normed = hidden if self._variant.norm_output else self._final(hidden)
        return self._ops.linear(normed, self.weights.head)

    def _final(self, hidden: Tensor) -> Tensor:
        return self._ops.rms_norm(hidden, self.weights.final_norm, self._eps)


def _spec(
    weights: Eagle3Weights, token_ids: Tensor | None, variant: Eagle3Variant
) -> RecurrentSpec:
    return RecurrentSpec(
        fc=weights.fc,
        input_norm=weights.input_norm,
        state_norms=weights.chunk_norms,
        embedding=weights.embedding,
        embedding_norm=weights.embedding_norm,
        hidden_norm=weights.hidden_norm,
        layers=weights.layers,
        final_norm=weights.final_norm,
        head=weights.head,
        token_ids=token_ids,
        norm_before_residual=variant.norm_before_residual,
        norm_output=variant.norm_output,
    )
