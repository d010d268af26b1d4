"""DFlash in training: blocks of masks behind anchors drawn from the answers, all guessed at once.

An anchor is a row of a window; its block is [the row's token, mask, mask, ...] at the row's own
position and those behind it. Blocks see the keys of the rows before their anchor, made of the
target's states, and all of themselves; they never see one another. Mask j learns the law of the
j-th token behind the anchor, early ones more than late ones. The function is that of
`graft.draft.nets.dflash`.

Source: DFlash (z-lab, 2026).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graft.train.decoder_layer import DecoderLayer, LayerShape, Rope, matrix
from graft.train.export import Eagle3Target
from graft.train.layouts import read_checkpoint, write_checkpoint
from graft.train.losses import cross_entropy, head_log_probabilities
from graft.train.trainee import Batch, Loss, Trainee

_NOWHERE = -1e9
_NUM_OTHERS = 1024


@dataclass(frozen=True, slots=True)
class DflashOptions:
    """How blocks are drawn and how their places count.

    block_size: tokens of a block with its anchor. num_anchors: of a window. decay: place j counts
    exp(-(j - 1) / decay); a draft is worth nothing when one before it was wrong. hard_from:
    progress at which the loss begins to turn from the target's law to its likeliest token; it ends
    with `hard_share` of it.
    """

    block_size: int = 6
    num_anchors: int = 64
    decay: float = 2.0
    hard_from: float = 0.6
    hard_share: float = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of a batch.

    anchors: [B, A], rows. rows: [B, A, drafted], whose laws the places learn. weights: of the
    places, 0 for those that do not count.
    """

    anchors: Tensor
    rows: Tensor
    weights: Tensor


class DflashNet(nn.Module):
    """The weights, and the forward pass over many blocks."""

    def __init__(
        self, shape: LayerShape, rope: Rope, num_layers: int, num_states: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.shape, self.dtype, self.rope = shape, dtype, rope
        self.layers = nn.ModuleList(DecoderLayer(shape, dtype) for _ in range(num_layers))
        self.fc = matrix(hidden, num_states * hidden)
        self.context_norm = nn.Parameter(torch.ones(hidden))
        self.final_norm = nn.Parameter(torch.ones(hidden))
        # States differ in size by channel a thousandfold; fc learns in units of each channel.
        self.state_scale: Tensor
        self.register_buffer("state_scale", torch.ones(num_states * hidden))
        self.mask: Tensor
        self.register_buffer("mask", torch.zeros(hidden), persistent=False)

    def context(self, states: Tensor) -> Tensor:
        """[..., states * hidden] -> [..., hidden], what keys and values of rows are made of."""
        layer = self.stack()[0]
        return layer.norm(layer.linear(states * self.state_scale, self.fc), self.context_norm)

    def forward(
        self, context: Tensor, positions: Tensor, anchors: Tensor, starts: Tensor, seen: Tensor
    ) -> Tensor:
        """Runs blocks; [B, A, size - 1, hidden], normed, one row a mask.

        Shapes:
            context: [B, W, hidden]. positions: [B, W].
            anchors: [B, A, size, hidden], embeddings of the first token of each block and masks.
            starts: [B, A], positions of the anchors. seen: [B, A, W], bool.
        """
        size = anchors.shape[2]
        places = starts[..., None] + torch.arange(size)
        mask = torch.zeros(seen.shape).masked_fill_(~seen, _NOWHERE)
        state = anchors
        for layer in self.stack():
            keys = layer.keys_values(context, self.rope, positions)
            own = layer.heads(layer.norm(state, layer.attention_norm), self.rope, places)
            state = layer.rest(state, _attend(own, keys, mask))
        return self.stack()[0].norm(state[:, :, 1:], self.final_norm)

    def stack(self) -> list[DecoderLayer]:
        """The layers, the first one first."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]


class DflashTrainee(Trainee):
    """A DFlash drafter in training."""

    proposer = "dflash"

    def __init__(
        self,
        net: DflashNet,
        target: Eagle3Target,
        head: Tensor,
        mask_token: int,
        options: DflashOptions,
    ) -> None:
        """head: [vocab, hidden] of the target. mask_token: a word that no text has."""
        super().__init__()
        self.net, self.target, self.options = net, target, options
        self.layers = target.layers
        self.margin = options.block_size - 2
        self.mask_token = mask_token
        net.mask = target.embedding[mask_token].float()
        self.embedding: Tensor
        self.register_buffer("embedding", target.embedding, persistent=False)
        self.head: Tensor
        self.register_buffer("head", head, persistent=False)
        others = torch.ones(len(head), dtype=torch.bool)
        others[target.draft_tokens] = False
        self.others: Tensor
        self.register_buffer("others", others, persistent=False)

    def loss(self, batch: Batch, progress: float) -> Loss:
        """Cross-entropy to the target's laws, at places drawn as often as they count.

        The head costs as much as the layers, so late places are left out more often than not.
        """
        options, laws = self.options, batch.laws
        assert laws is not None, "DFlash learns laws of the draft vocabulary"
        blocks = self.blocks(batch, options.num_anchors)
        chance = torch.Generator().manual_seed(batch.seed + 1)
        counted = torch.rand(blocks.weights.shape, generator=chance) < blocks.weights
        rows = blocks.rows
        at = torch.arange(len(rows))[:, None, None], rows
        columns, masses = laws.columns[at][counted], laws.masses[at][counted]
        hidden = self.drafted(batch, blocks)[counted].to(self.net.dtype)
        head = torch.cat([self.head[self.target.draft_tokens], self._some_others(batch.seed)])
        said = head_log_probabilities(hidden, head.to(self.net.dtype), columns)
        losses = cross_entropy(said, masses)
        # A batch of prompts alone has no place.
        count = max(1, len(losses))
        figures = {"entropy": float(losses.detach().sum()) / count}
        share = min(1.0, max(0.0, (progress - options.hard_from) / 0.1)) * options.hard_share
        if share:
            losses = (1 - share) * losses - share * said[:, 0]
        return Loss(losses.sum() / count, figures)

    def figures(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Agreement at each place, and accept length, at anchors in greedy answers."""
        blocks = self.blocks(batch, self.options.num_anchors)
        at = torch.arange(len(blocks.rows))[:, None, None], blocks.rows
        head = self.head[self.target.draft_tokens].to(self.net.dtype)
        with torch.no_grad():
            top = (self.drafted(batch, blocks).to(self.net.dtype) @ head.T).argmax(-1)
        right = self.target.draft_tokens[top] == batch.following[at]
        counted = (blocks.weights > 0) & batch.greedy[at]
        sums = {
            f"agree_{place + 1}": (
                float((right & counted)[..., place].sum()),
                float(counted[..., place].sum()),
            )
            for place in range(right.shape[-1])
        }
        whole = counted.all(-1)
        lengths = right.long().cumprod(-1).sum(-1)[whole] + 1
        sums["accept_length"] = (float(lengths.sum()), float(whole.sum()))
        return sums

    def blocks(self, batch: Batch, num_anchors: int) -> Blocks:
        """Anchors drawn by the batch's seed among rows of answers, and what their masks learn."""
        length, drafted = batch.length, self.options.block_size - 1
        able = batch.answer[:, :length] & (batch.segments[:, :length] >= 0)
        chance = torch.rand(able.shape, generator=torch.Generator().manual_seed(batch.seed))
        drawn = (chance + able).topk(min(num_anchors, length), 1).indices
        anchors = drawn.sort(1).values
        rows = anchors[..., None] + torch.arange(drafted)
        at = torch.arange(len(rows))[:, None], anchors
        rows_at = torch.arange(len(rows))[:, None, None], rows
        real = (batch.segments[rows_at] == batch.segments[at][..., None]) & batch.answer[rows_at]
        real &= able[at][..., None]
        decay = torch.tensor([math.exp(-place / self.options.decay) for place in range(drafted)])
        return Blocks(anchors, rows, real * decay)

    def drafted(self, batch: Batch, blocks: Blocks) -> Tensor:
        """[B, A, drafted, hidden], what the head reads at each mask."""
        length, size = batch.length, self.options.block_size
        at = torch.arange(len(blocks.anchors))[:, None], blocks.anchors
        embedded = self.net.mask.expand(*blocks.anchors.shape, size, -1).clone()
        embedded[:, :, 0] = self.embedding[batch.tokens[at]].float()
        segments = batch.segments[:, :length]
        before = torch.arange(length) < blocks.anchors[..., None]
        seen = before & (segments[:, None] == batch.segments[at][..., None])
        positions = batch.positions[:, :length]
        context = self.net.context(batch.states[:, :length].flatten(2))
        hidden: Tensor = self.net(context, positions, embedded, batch.positions[at], seen)
        return hidden

    def save(self, folder: Path) -> None:
        """Writes the layout of z-lab."""
        net = self.net
        config = {
            **self.target.config,
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "head_dim": self.target.head_dim,
            "num_key_value_heads": net.shape.num_kv_heads,
            "num_hidden_layers": len(net.layers),
            "num_target_layers": self.target.num_layers,
            "attention_bias": False,
            "block_size": self.options.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token,
                # Counted from zero, by the layer whose output the state is.
                "target_layer_ids": [layer - 1 for layer in self.layers],
            },
            "torch_dtype": "bfloat16",
        }
        write_checkpoint(folder, config, {**self._tensors(), "fc.weight": net.fc * net.state_scale})

    def read(self, folder: Path) -> None:
        """In place: goes on from a DFlash drafter of as many layers."""
        read_checkpoint(folder, self._tensors())
        with torch.no_grad():
            self.net.fc.div_(self.net.state_scale)

    def _tensors(self) -> dict[str, Tensor]:
        """Where fc stands in units of each channel."""
        net = self.net
        tensors = {
            "fc.weight": net.fc,
            "hidden_norm.weight": net.context_norm,
            "norm.weight": net.final_norm,
        }
        for number, layer in enumerate(net.stack()):
            tensors |= layer.tensors(f"layers.{number}")
        return tensors

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Matrices, and norms."""
        named = [one for one in self.parameters() if one.requires_grad]
        return [
            {"params": [one for one in named if one.ndim == 2], "role": "matrix"},
            {
                "params": [one for one in named if one.ndim == 1],
                "role": "norm",
                "weight_decay": 0.0,
            },
        ]

    def _some_others(self, seed: int) -> Tensor:
        """Rows of the head outside the draft vocabulary: they are to stay unlikely too."""
        rows = torch.nonzero(self.others)[:, 0]
        chance = torch.Generator().manual_seed(seed)
        return self.head[rows[torch.randperm(len(rows), generator=chance)[:_NUM_OTHERS]]]


def _attend(
    own: tuple[Tensor, Tensor, Tensor], context: tuple[Tensor, Tensor], mask: Tensor
) -> Tensor:
    """Each block over the context it sees and over itself; [B, A, size, query width].

    Shapes:
        own: [B, A, size, heads, dim], twice [B, A, size, kv_heads, dim].
        context: twice [B, W, kv_heads, dim]. mask: [B, A, W], added to scores.
    """
    q, k, v = own
    batch, count, size, _, dim = q.shape
    groups = k.shape[3]
    # [B, kv_heads, A, group * size, dim]: rows of a block side by side for each key head.
    asked = q.unflatten(3, (groups, -1)).permute(0, 3, 1, 4, 2, 5).flatten(3, 4) * dim**-0.5
    keys, values = (one.transpose(1, 2) for one in context)
    far = (asked.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, (count, -1)).float()
    far = far + mask[:, None, :, None]
    own_keys, own_values = (one.permute(0, 3, 1, 2, 4) for one in (k, v))
    near = (asked @ own_keys.transpose(-1, -2)).float()
    width = keys.shape[2]
    shares = torch.cat([far, near], -1).softmax(-1).to(q.dtype)
    mixed = (shares[..., :width].flatten(2, 3) @ values).unflatten(2, (count, -1))
    mixed = mixed + shares[..., width:] @ own_values
    mixed = mixed.unflatten(3, (-1, size)).permute(0, 2, 4, 1, 3, 5)
    return mixed.reshape(batch, count, size, -1)
