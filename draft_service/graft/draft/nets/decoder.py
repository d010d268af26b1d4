"""A whole small decoder as a draft network: un-shifted tokens at their true positions."""

from __future__ import annotations

from torch import Tensor

from graft.draft.features import FeatureNeed
from graft.draft.kv import KvShape
from graft.kernels.ops import KvCache, Recurrent, StepRows
from graft.models.load import Target


class DecoderNet:
    """Any decoder with the target's vocabulary; it has its own embedding and head."""

    shift = 0
    needs: FeatureNeed | None = None
    token_ids: Tensor | None = None
    recurrent: Recurrent | None = None

    def __init__(self, model: Target) -> None:
        config = model.config
        self._decoder = model.decoder
        self.kv_shape = KvShape(config.num_layers, config.num_kv_heads, config.head_dim)
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length

    def fuse(self, features: Tensor) -> Tensor:
        """Takes no features."""
        return features

    def forward(self, tokens: Tensor, hidden: Tensor | None, rows: StepRows, kv: KvCache) -> Tensor:
        """[rows, hidden], after the final norm; `hidden` is not read."""
        return self._decoder.forward(tokens, rows, kv, None)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab]."""
        return self._decoder.logits(hidden)
