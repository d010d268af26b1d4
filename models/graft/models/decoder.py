"""A decoder's forward pass over the rows of one step, written once for the Llama family.

Knows layers and their order; what a row sees is in `StepRows`, and how anything is computed is
behind `Ops`. Knows no session, no tree and no page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graft.kernels.ops import ChoiceRows, KvCache, LayerSpec, Linear, Ops, StepRows
from graft.models.block import layer_
from graft.models.config import DecoderConfig


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """All weights of a decoder. embedding: [vocab, hidden], or the head itself where it is tied."""

    embedding: Tensor | Linear
    layers: tuple[LayerSpec, ...]
    final_norm: Tensor
    head: Linear


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """Which hidden states to keep of a forward pass, in the numbering of Hugging Face.

    layers: state 0 is the embedding, state i what layer i - 1 (from zero) left behind; the last
        one is taken after the final norm if `final_norm`, else before it.
    rows: [captured], int64, rows of the step; None takes all.
    """

    layers: tuple[int, ...]
    rows: Tensor | None
    final_norm: bool = True


class Decoder:
    """A loaded model. One thread at a time may run it."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, ops: Ops) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self._stack = ops.stack(weights.layers)

    def forward(
        self, tokens: Tensor, rows: StepRows, kv: KvCache, output_rows: Tensor | None
    ) -> Tensor:
        """Runs the rows, writes their keys and values, and returns final hidden states.

        Shapes:
            tokens: [rows], int32.
            output_rows: [n], int64, the rows whose states are wanted; None wants all.
            returns: [n, hidden], after the final norm, ready for `logits`.
        """
        hidden = self._embed(tokens)
        self._layers_(hidden, range(self.config.num_layers), rows, kv)
        return self._normed(hidden, output_rows)

    def forward_capturing(
        self,
        tokens: Tensor,
        rows: StepRows,
        kv: KvCache,
        output_rows: Tensor | None,
        capture: Capture,
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, and the states that `capture` names: [captured, layers, hidden].

        The captured tensor is the caller's own.

        Raises:
            ValueError: a layer that the decoder does not have.
        """
        last = self.config.num_layers
        for layer in capture.layers:
            if not 0 <= layer <= last:
                raise ValueError(f"hidden state {layer} was asked for, the target has 0 to {last}")
        states: dict[int, Tensor] = {}
        hidden = self._embed(tokens)
        done = 0
        for layer in sorted(set(capture.layers)):
            self._layers_(hidden, range(done, layer), rows, kv)
            # A copy in either case: the next layers change `hidden` in place.
            taken = hidden.clone() if capture.rows is None else hidden[capture.rows]
            states[layer] = (
                self._normed(taken, None) if layer == last and capture.final_norm else taken
            )
            done = layer
        self._layers_(hidden, range(done, last), rows, kv)
        captured = torch.stack([states[layer] for layer in capture.layers], dim=1)
        return self._normed(hidden, output_rows), captured

    @property
    def num_layers(self) -> int:
        """Layers of the model, which is also the number of the last hidden state."""
        return self.config.num_layers

    def final_norm(self, states: Tensor) -> Tensor:
        """States captured before the final norm, [n, hidden] -> after it."""
        return self._normed(states, None)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] of `forward` -> [n, vocab]."""
        return self.ops.linear(hidden, self.weights.head)

    def choose(self, hidden: Tensor, rows: ChoiceRows) -> Tensor:
        """[n, hidden] of `forward` -> [n], int32: the choice at logits that stay unwritten."""
        return self.ops.choose_head(hidden, self.weights.head, rows)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.weights.head.out_features

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.ops.embed(tokens, self.weights.embedding)

    def _normed(self, hidden: Tensor, output_rows: Tensor | None) -> Tensor:
        if output_rows is not None:
            hidden = hidden[output_rows]
        return self.ops.rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps)

    def _layers_(self, hidden: Tensor, layers: range, rows: StepRows, kv: KvCache) -> None:
        """In place: hidden [rows, width] passes `layers`, in one call if there is one."""
        if self._stack is not None:
            self._stack.run_(hidden, layers, kv, rows)
            return
        for number in layers:
            layer_(self.ops, self.weights.layers[number], number, hidden, rows, kv)
