"""MTP: what a model was trained to guess further tokens with, one decoder layer a step.

Slot p joins the normed embedding of a later token with the normed state of position p, passes one
layer, one norm and a head. `MtpNet` applies one such step over and over; `MultiLayerNet` has a step
of its own for every token ahead.

Source: DeepSeek-V3 (2024), MiMo (2025) and the layouts of their checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graft.draft.features import FeatureNeed
from graft.draft.kv import KvShape
from graft.draft.nets.eagle import kv_shape
from graft.draft.nets.gated import Gates, gated_attention
from graft.kernels.ops import KvCache, LayerSpec, Linear, Ops, Recurrent, StepRows
from graft.models.block import attention, mlp


@dataclass(frozen=True, slots=True, eq=False)
class MtpStep:
    """Weights of one step.

    project: normed embedding | normed state -> hidden. gates: None for plain attention.
    """

    embedding_norm: Tensor
    hidden_norm: Tensor
    project: Linear
    layer: LayerSpec
    final_norm: Tensor
    head: Linear
    gates: Gates | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MtpWeights:
    """embedding: [vocab, hidden] of the target.

    blank_start: the embedding at position 0 is zero.
    """

    embedding: Tensor
    steps: tuple[MtpStep, ...]
    blank_start: bool = False


class MtpNet:
    """One step that is applied over and over, as EAGLE is."""

    shift = 1
    token_ids: Tensor | None = None
    recurrent: Recurrent | None = None

    def __init__(
        self, weights: MtpWeights, ops: Ops, target_layers: int, context_length: int
    ) -> None:
        """target_layers: of the target, whose last state is read after its final norm."""
        self.needs: FeatureNeed | None = FeatureNeed((target_layers,), final_norm=True)
        self.vocab_size = int(weights.embedding.shape[0])
        self.context_length = context_length
        self.kv_shape = kv_shape((weights.steps[0].layer,))
        self._weights = weights
        self._ops = ops

    def fuse(self, features: Tensor) -> Tensor:
        """The target's state goes in as it is."""
        return features

    def forward(self, tokens: Tensor, hidden: Tensor | None, rows: StepRows, kv: KvCache) -> Tensor:
        """[rows, hidden], after the step's final norm: what the head and the next step read."""
        assert hidden is not None, "MTP reads the target's states"
        step = self._weights.steps[0]
        embedded = embed(self._ops, self._weights, tokens, rows)
        state = run_step(self._ops, step, 0, torch.stack([embedded, hidden]), rows, kv)
        return self._ops.rms_norm(state, step.final_norm, step.layer.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab]."""
        return self._ops.linear(hidden, self._weights.steps[0].head)


class MultiLayerNet:
    """One step for each token ahead, each with keys and values of its own.

    Step s joins the state of position p with the token at p + 1 + s. `forward` and `logits` are
    those of the first step.
    """

    shift = 1
    token_ids: Tensor | None = None
    recurrent: Recurrent | None = None

    def __init__(
        self,
        weights: MtpWeights,
        ops: Ops,
        target_layers: int,
        context_length: int,
        chain: bool,
    ) -> None:
        """target_layers: of the target, whose last state is read before its final norm.

        chain: a step reads the state that the step before made of the position, not the target's.
        """
        self.needs: FeatureNeed | None = FeatureNeed((target_layers,), final_norm=False)
        self.vocab_size = int(weights.embedding.shape[0])
        self.context_length = context_length
        one = kv_shape((weights.steps[0].layer,))
        self.kv_shape = KvShape(len(weights.steps), one.num_kv_heads, one.head_dim)
        self.num_steps = len(weights.steps)
        self.chain = chain
        self._weights = weights
        self._ops = ops

    def fuse(self, features: Tensor) -> Tensor:
        """The target's state goes in as it is."""
        return features

    def forward(self, tokens: Tensor, hidden: Tensor | None, rows: StepRows, kv: KvCache) -> Tensor:
        """As `run`, of the first step."""
        assert hidden is not None, "MTP reads the target's states"
        return self.run(0, tokens, hidden, rows, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `logits_of`, of the first step."""
        return self.logits_of(0, hidden)

    def run(self, step: int, tokens: Tensor, hidden: Tensor, rows: StepRows, kv: KvCache) -> Tensor:
        """One step over rows; [rows, hidden], before its final norm."""
        embedded = embed(self._ops, self._weights, tokens, rows)
        joined = torch.stack([embedded, hidden])
        return run_step(self._ops, self._weights.steps[step], step, joined, rows, kv)

    def logits_of(self, step: int, state: Tensor) -> Tensor:
        """[n, hidden] of `run` of this step -> [n, vocab]."""
        weights = self._weights.steps[step]
        normed = self._ops.rms_norm(state, weights.final_norm, weights.layer.eps)
        return self._ops.linear(normed, weights.head)


def embed(ops: Ops, weights: MtpWeights, tokens: Tensor, rows: StepRows) -> Tensor:
    """[rows, hidden]."""
    embedded = ops.embed(tokens, weights.embedding)
    if weights.blank_start:
        embedded = embedded.masked_fill((rows.positions == 0)[:, None], 0)
    return embedded


def run_step(
    ops: Ops, step: MtpStep, number: int, joined: Tensor, rows: StepRows, kv: KvCache
) -> Tensor:
    """One step over rows; [rows, hidden], before its final norm.

    number: where its keys and values are. joined: [2, rows, hidden], embeddings and states.
    """
    layer = step.layer
    embedded, hidden = joined
    halves = [
        ops.rms_norm(embedded, step.embedding_norm, layer.eps),
        ops.rms_norm(hidden, step.hidden_norm, layer.eps),
    ]
    state = ops.linear(torch.cat(halves, dim=1), step.project)
    normed = ops.rms_norm(state, layer.attention_norm, layer.eps)
    if step.gates is None:
        ops.add_(state, attention(ops, layer, number, normed, rows, kv))
    else:
        ops.add_(state, gated_attention(ops, layer, number, normed, rows, kv, step.gates))
    ops.add_(state, mlp(ops, layer, ops.rms_norm(state, layer.mlp_norm, layer.eps)))
    return state
