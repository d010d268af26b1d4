"""UNO: the target's own weights, and an adapter that some rows of a forward pass through as well.

Plain rows give what the target gives, bit for bit. Rows with the adapter read noise where the text
is not written yet, and guess it. Knows rows and weights; knows no noise and no session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from graft.draft.nets.decoder import DecoderNet
from graft.kernels.ops import KvCache, LayerSpec, Linear, Ops, StepRows
from graft.models.block import heads
from graft.models.load import Target


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Low-rank additions to one packed linear layer.

    down: input -> all ranks. ups: the columns of `down` and of the output that each one joins, and
    its matrix, the scaling in it.
    """

    down: Linear
    ups: tuple[tuple[slice, slice, Linear], ...]


@dataclass(frozen=True, slots=True, eq=False)
class LayerAdapters:
    """What one decoder layer's matrices get; None leaves a matrix as it is."""

    qkv: Adapter | None
    output: Adapter | None
    gate_up: Adapter | None
    down: Adapter | None


class UnoNet(DecoderNet):
    """A target and its adapter."""

    def __init__(self, model: Target, adapters: Sequence[LayerAdapters]) -> None:
        super().__init__(model)
        self._adapters = tuple(adapters)

    def guess(self, tokens: Tensor, noisy: Tensor, rows: StepRows, kv: KvCache) -> Tensor:
        """Runs rows, those in `noisy` through the adapter too; [rows, hidden], ready for `logits`.

        Shapes:
            tokens: [rows], int32. noisy: [n], int64.
        """
        ops, weights = self._decoder.ops, self._decoder.weights
        hidden = ops.embed(tokens, weights.embedding)
        for number, (layer, adapters) in enumerate(
            zip(weights.layers, self._adapters, strict=True)
        ):
            normed = ops.rms_norm(hidden, layer.attention_norm, layer.eps)
            seen = _attend(
                ops, layer, number, _linear(ops, normed, layer.qkv, adapters.qkv, noisy), rows, kv
            )
            ops.add_(hidden, _linear(ops, seen, layer.output, adapters.output, noisy))
            normed = ops.rms_norm(hidden, layer.mlp_norm, layer.eps)
            wide = _linear(ops, normed, layer.gate_up, adapters.gate_up, noisy)
            narrow = _linear(ops, ops.silu_mul(wide), layer.down, adapters.down, noisy)
            ops.add_(hidden, narrow)
        return self._decoder.final_norm(hidden)


def _linear(ops: Ops, x: Tensor, weight: Linear, adapter: Adapter | None, noisy: Tensor) -> Tensor:
    """[rows, out]: the layer, and on `noisy` rows its adapter."""
    out = ops.linear(x, weight)
    if adapter is None or not len(noisy):
        return out
    ranks = ops.linear(x[noisy], adapter.down)
    added = out[noisy]
    for source, target, up in adapter.ups:
        added[:, target] += ops.linear(ranks[:, source].contiguous(), up)
    out[noisy] = added
    return out


def _attend(
    ops: Ops, layer: LayerSpec, number: int, qkv: Tensor, rows: StepRows, kv: KvCache
) -> Tensor:
    """[rows, query width], before the output projection."""
    q, k, v = heads(ops, layer, qkv, rows)
    ops.write_kv(kv, number, rows, k, v)
    seen = ops.attend(q, kv, number, rows, layer.head_dim**-0.5, layer.window)
    return seen.view(len(seen), -1)
