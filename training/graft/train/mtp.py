"""MTP in training: one layer that is applied over and over, unrolled over its own outputs.

Slot p joins the embedding of the token behind row p with the target's normed last state of row p;
at step k it joins the token k places on with its own normed output of step k - 1. What slots see
is as in EAGLE-3. The head is the target's; in training only the rows of the draft vocabulary are
computed, and some others by chance, so that words outside it stay as unlikely as they were. The
function is that of `graft.draft.nets.mtp`.

Source: DeepSeek-V3 (2024) and MiMo (2025); training-time test as in EAGLE-3 (Li et al. 2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from graft.draft.checkpoints.borrowed import Borrowed
from graft.models.rope import rope_table
from graft.models.weights import FINAL_NORM
from graft.train.decoder_layer import DecoderLayer, LayerShape, Rope, matrix, shape_of
from graft.train.eagle3 import Seen
from graft.train.export import Eagle3Target
from graft.train.layouts import read_checkpoint, write_checkpoint
from graft.train.trainee import Batch, Loss
from graft.train.unroll import Eagle3Trainee, UnrollOptions

_NUM_OTHERS = 1024


class MtpNet(nn.Module):
    """The weights of one step, with the passes that `Eagle3Trainee` unrolls."""

    def __init__(self, shape: LayerShape, rope: Rope, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        hidden = shape.hidden_size
        self.layer = DecoderLayer(shape, dtype)
        self.project = matrix(hidden, 2 * hidden)  # the state first, as MiMo has it
        self.embedding_norm = nn.Parameter(torch.ones(hidden))
        self.hidden_norm = nn.Parameter(torch.ones(hidden))
        self.final_norm = nn.Parameter(torch.ones(hidden))
        self.rope = rope
        self.head: Tensor
        self.register_buffer("head", torch.empty(0, hidden), persistent=False)
        self.target_norm: Tensor
        self.register_buffer("target_norm", torch.ones(hidden), persistent=False)

    def fuse(self, states: Tensor) -> Tensor:
        """The target's last state after its final norm. states: [..., hidden], before it."""
        return self.layer.norm(states, self.target_norm)

    def first(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor
    ) -> tuple[Tensor, Seen]:
        """Step 0 over whole windows; shapes as in `graft.train.eagle3`, but normed outputs."""
        embedded = embedded.masked_fill((positions == 0)[..., None], 0)
        state = self._joined(embedded, hidden)
        q, k, v = self._heads(state, positions)
        seen = Seen(k.flatten(1, 2), v.flatten(1, 2), mask)
        return self._rest(state, _attend(q, seen)), seen

    def later(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, seen: Seen
    ) -> tuple[Tensor, Seen]:
        """One more step of n slots a window; `seen` holds their masks and own earlier keys."""
        state = self._joined(embedded, hidden)
        q, k, v = self._heads(state, positions)
        grown = Seen(seen.keys, seen.values, seen.mask, (*seen.own, (k, v)))
        return self._rest(state, _attend(q, grown)), grown

    def normed(self, hidden: Tensor) -> Tensor:
        """What the head reads: the output as it is, in `dtype`."""
        return hidden.to(self.dtype)

    def _joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        layer = self.layer
        halves = (layer.norm(hidden, self.hidden_norm), layer.norm(embedded, self.embedding_norm))
        return layer.linear(torch.cat(halves, -1), self.project).float()

    def _heads(self, state: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, kv_heads, group, n, head_dim] of queries; keys and values with group 1."""
        layer = self.layer
        normed = layer.norm(state, layer.attention_norm)
        q, k, v = (
            part.unflatten(2, (layer.shape.num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
            for part in layer.heads(normed, self.rope, positions)
        )
        return q, k, v

    def _rest(self, state: Tensor, mixed: Tensor) -> Tensor:
        return self.layer.norm(self.layer.rest(state, mixed), self.final_norm)


class MtpTrainee(Eagle3Trainee):
    """An MTP layer in training, by the unrolling of EAGLE-3."""

    proposer = "mtp"
    net: MtpNet

    def __init__(
        self, net: MtpNet, target: Eagle3Target, head: Tensor, options: UnrollOptions
    ) -> None:
        """head: [vocab, hidden] of the target."""
        super().__init__(net, target, options)
        self.whole_head: Tensor
        self.register_buffer("whole_head", head, persistent=False)
        net.head = head[target.draft_tokens]

    def loss(self, batch: Batch, progress: float) -> Loss:
        """As EAGLE-3's, over the draft vocabulary and some words by chance."""
        with self._others(batch.seed):
            return super().loss(batch, progress)

    def save(self, folder: Path) -> None:
        """Writes the layout of MiMo: one step beside a target's layers, without the target."""
        config = {
            **self.target.config,
            "architectures": ["MiMoForCausalLM"],
            "model_type": "mimo",
            "attention_bias": True,
            "num_nextn_predict_layers": 1,
            "head_dim": self.target.head_dim,
            "torch_dtype": "bfloat16",
        }
        write_checkpoint(folder, config, self._tensors())

    def read(self, folder: Path) -> None:
        """In place: goes on from an MTP layer."""
        read_checkpoint(folder, self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        net, step = self.net, "model.mtp_layers.0"
        return {
            **net.layer.tensors(step),
            f"{step}.token_layernorm.weight": net.embedding_norm,
            f"{step}.hidden_layernorm.weight": net.hidden_norm,
            f"{step}.input_proj.weight": net.project,
            f"{step}.final_layernorm.weight": net.final_norm,
        }

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Matrices, and norms and biases."""
        named = [(name, one) for name, one in self.named_parameters() if one.requires_grad]
        return [
            {"params": [one for _, one in named if one.ndim == 2], "role": "matrix"},
            {
                "params": [one for _, one in named if one.ndim == 1],
                "role": "norm",
                "weight_decay": 0.0,
            },
        ]

    @contextmanager
    def _others(self, seed: int) -> Iterator[None]:
        """Puts rows of other words behind those of the draft vocabulary for a while."""
        net, narrow = self.net, self.net.head
        rows = torch.nonzero(~self.drafted)[:, 0]
        chance = torch.Generator().manual_seed(seed)
        some = rows[torch.randperm(len(rows), generator=chance)[:_NUM_OTHERS]]
        net.head = torch.cat([narrow, self.whole_head[some]])
        try:
            yield
        finally:
            net.head = narrow


def fresh_mtp(borrowed: Borrowed, dtype: torch.dtype, unit: float) -> MtpNet:
    """A net that starts as the target's last layer, run once more on its own output.

    The half of the projection that reads embeddings starts small. Random draws come from torch's
    global generator.

    unit: what one stands for in the residual, in the target's own sizes.
    """
    config = borrowed.config
    table = rope_table(config.rope, config.head_dim, config.context_length)
    net = MtpNet(shape_of(config, biases=True), Rope(table), dtype)
    hidden = config.hidden_size
    net.layer.start_as(borrowed, config.num_layers - 1, unit)
    norm = borrowed.source.read(FINAL_NORM)
    with torch.no_grad():
        net.project.mul_(0.3)
        net.project[:, :hidden] += torch.eye(hidden)
        net.final_norm.copy_(norm)
        net.target_norm.copy_(norm)
    return net


def _attend(q: Tensor, seen: Seen) -> Tensor:
    """[B, n, query width]; q: [B, kv_heads, group, n, head_dim]."""
    count, group, dim = q.shape[3], q.shape[2], q.shape[4]
    flat = q.flatten(2, 3) * dim**-0.5
    scores = (flat @ seen.keys.transpose(-1, -2)).float()
    scores = scores.unflatten(2, (group, count)) + seen.mask[:, None, None]
    scaled = flat.unflatten(2, (group, count)).float()
    own = [(scaled * key.float()).sum(-1, keepdim=True) for key, _ in seen.own]
    shares = functional.softmax(torch.cat([scores, *own], -1), -1)
    width = seen.keys.shape[2]
    mixed = shares[..., :width].flatten(2, 3).to(q.dtype) @ seen.values
    mixed = mixed.unflatten(2, (group, count)).float()
    for step, (_, value) in enumerate(seen.own):
        mixed = mixed + shares[..., width + step, None] * value
    return mixed.permute(0, 3, 1, 2, 4).flatten(2)
