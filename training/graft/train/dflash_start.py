"""Where a DFlash drafter starts from: its target's last layers, with a first layer that looks back.

Masks know nothing but their place, so a drafter that starts at random first learns how frequent
words are, and only much later to look at the context. Here heads of the first layer start as what
every such drafter finds in the end: some look at the anchor, others at the newest context, and
pass on what varies most there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graft.draft.checkpoints.borrowed import Borrowed
from graft.models.rope import rope_table
from graft.models.weights import FINAL_NORM
from graft.train.decoder_layer import DecoderLayer, LayerShape, Rope, shape_of
from graft.train.dflash import DflashNet

_BLOCK_ROOM = 64
_NOISE = 0.2
_GAIN = 2.0
# Pairs of a head whose angles tell near places apart and do not come round within a block or two.
_PAIRS = (0.06, 0.32)
_SOFT = 0.3


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What a drafter will read, for statistics.

    states: [rows, states * hidden], without first rows of sequences. words: [rows, hidden],
    embeddings of tokens. mask: [hidden].
    """

    states: Tensor
    words: Tensor
    mask: Tensor


def fresh_dflash(
    borrowed: Borrowed,
    layers: Sequence[int],
    sample: Sample,
    num_layers: int,
    dtype: torch.dtype,
) -> DflashNet:
    """A net that starts as the target's last layers behind one that looks back.

    Every query head has keys and values of its own, for all that a mask learns of its context goes
    through them. Random draws come from torch's global generator.

    layers: states read, the deepest last.
    """
    config, hidden = borrowed.config, borrowed.config.hidden_size
    table = rope_table(config.rope, config.head_dim, config.context_length + _BLOCK_ROOM)
    shape = replace(shape_of(config, head_norms=True), num_kv_heads=config.num_heads)
    net = DflashNet(shape, Rope(table), num_layers, len(layers), dtype)
    sizes = sample.states.square().mean(0).sqrt()
    unit = float(sizes[-hidden:].median())
    with torch.no_grad():
        net.state_scale.copy_(1 / sizes.clamp(min=1e-6))
        net.fc.mul_(0.1)
        net.fc[:, -hidden:] += torch.eye(hidden)
        net.final_norm.copy_(borrowed.source.read(FINAL_NORM))
        for number, layer in enumerate(net.stack()):
            _start(layer, borrowed, max(0, config.num_layers - num_layers + number), unit)
        _look_back(net.stack()[0], net.context(sample.states), sample)
    return net


def _start(layer: DecoderLayer, borrowed: Borrowed, number: int, unit: float) -> None:
    """The target's layer, but for queries and keys: those of last layers look at first tokens."""

    def read(name: str) -> Tensor:
        return borrowed.source.read(f"model.layers.{number}.{name}.weight")

    shape, config = layer.shape, borrowed.config
    group = config.num_heads // config.num_kv_heads
    values = read("self_attn.v_proj").unflatten(0, (config.num_kv_heads, -1))
    layer.qkv[-shape.widths[2] :] = values.repeat_interleave(group, 0).flatten(0, 1)
    layer.output.copy_(read("self_attn.o_proj") / unit)
    layer.gate_up.copy_(torch.cat([read("mlp.gate_proj"), read("mlp.up_proj")]))
    layer.down.copy_(read("mlp.down_proj") / unit)
    layer.mlp_norm.copy_(read("post_attention_layernorm"))


def _look_back(layer: DecoderLayer, context: Tensor, sample: Sample) -> None:
    """In place: a third of the heads looks at the anchor, the others at the newest context.

    Keys of what a head is to see lie along one direction of near places, all others along its
    opposite; queries of masks lie along it too. So the nearest key of its kind wins.
    """
    shape = layer.shape
    words = layer.norm(sample.words, layer.attention_norm)
    mask = layer.norm(sample.mask, layer.attention_norm)
    kinds = torch.stack([context.mean(0), words.mean(0), mask])
    spread = context.T.cov() + words.T.cov()
    of_anchor = _telling(kinds, spread, (-1.0, 1.0, -1.0))
    of_context = _telling(kinds, spread, (1.0, -1.0, -1.0))
    of_mask = _telling(kinds, spread, (0.0, 0.0, 1.0))
    near, off = _near(shape)
    num_anchor = shape.num_heads // 3
    num_soft = shape.num_heads // 4
    queries, keys, values = layer.qkv.split(shape.widths)
    dim = shape.head_dim
    passed = torch.cat(
        [
            _varying(words, num_anchor * dim),
            _varying(context, (shape.num_heads - num_anchor) * dim),
        ]
    )
    values.copy_(passed)
    layer.output.copy_(passed.T)
    for head in range(shape.num_heads):
        rows = slice(head * dim, (head + 1) * dim)
        soft = head >= shape.num_heads - num_soft
        query = _SOFT * near + (1 - _SOFT**2) ** 0.5 * off if soft else near
        told = of_anchor if head < num_anchor else of_context
        queries[rows] = torch.outer(query, of_mask) + _noise(dim, sample.mask)
        keys[rows] = torch.outer(near, told) + _noise(dim, sample.mask)
    for gain in (layer.q_norm, layer.k_norm):
        assert gain is not None, "DFlash norms its heads"
        gain.fill_(_GAIN)


def _telling(kinds: Tensor, spread: Tensor, wanted: tuple[float, ...]) -> Tensor:
    """[hidden]: what gives the mean of each kind its wanted value, and varies least otherwise."""
    width = len(spread)
    inverse = torch.linalg.inv(spread + 0.05 * spread.diagonal().mean() * torch.eye(width))
    through = kinds @ inverse
    # A kind without an embedding of its own, all zeros, is told by nothing.
    return through.T @ (torch.linalg.pinv(through @ kinds.T) @ torch.tensor(wanted))


def _near(shape: LayerShape) -> tuple[Tensor, Tensor]:
    """Two [head_dim] directions of root mean square 1: of near places, and one that no key has."""
    half = shape.head_dim // 2
    first, stop = (round(share * half) for share in _PAIRS)
    near, off = torch.zeros(shape.head_dim), torch.zeros(shape.head_dim)
    near[first : max(stop, first + 1)] = 1.0
    off[half - 1] = 1.0
    size = shape.head_dim**0.5
    return near * (size / near.norm()), off * (size / off.norm())


def _varying(rows: Tensor, count: int) -> Tensor:
    """[count, hidden]: directions in which rows vary most; zeros where there are no more."""
    centred = rows - rows.mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    order = values.argsort(descending=True)[:count]
    found = torch.zeros(count, rows.shape[1])
    found[: len(order)] = vectors[:, order].T
    return found


def _noise(rows: int, like: Tensor) -> Tensor:
    return torch.randn(rows, len(like)) * (_NOISE * len(like) ** -0.5)
