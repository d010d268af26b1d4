"""Reads EAGLE and EAGLE-2 checkpoints (they are the same), and FR-Spec token maps.

The published folders hold a copy of the target's embedding and no head; both are borrowed from the
target, whatever copies lie in the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graft.common.errors import Mismatch, ModelNotFound, Unsupported
from graft.draft.checkpoints.borrowed import Borrowed
from graft.draft.checkpoints.detect import Checkpoint
from graft.draft.checkpoints.layers import LayerReader, draft_decoder_config, make_rope
from graft.draft.checkpoints.tensors import read_pickle
from graft.draft.nets.eagle import EagleNet, EagleWeights
from graft.kernels.ops import Ops

_COPIES = (r"embed_tokens\.weight", r"lm_head\.weight", r".*rotary_emb\.inv_freq")


def load_eagle(
    checkpoint: Checkpoint, target: Borrowed, ops: Ops, token_map: Tensor | None = None
) -> EagleNet:
    """A network from a checkpoint and what it borrows of its target.

    token_map: [draft vocab], int64, from `read_token_map`.

    Raises:
        ModelNotFound: a tensor is missing, left over or mis-shaped.
        Mismatch: the checkpoint is for another target.
        Unsupported: a layout that is not read here.
    """
    if "transformer_layer_config" in checkpoint.config:
        raise Unsupported(
            f"draft checkpoint {checkpoint.tensors.name} has the speculators layout of EAGLE,"
            " expected the one of SafeAILab or SGLang"
        )
    config = draft_decoder_config({"num_hidden_layers": 1, **checkpoint.config})
    tensors, hidden = checkpoint.tensors, config.hidden_size
    if hidden != target.config.hidden_size:
        raise Mismatch(
            f"draft checkpoint {tensors.name} has hidden_size {hidden},"
            f" the target {target.name} has {target.config.hidden_size}"
        )
    tensors.rename(lambda name: name.removeprefix("model."))
    context = max(config.context_length, target.config.context_length)
    reader = LayerReader(tensors, config, make_rope(config, ops, context), ops)
    layers = [
        reader.layer(
            f"layers.{number}",
            norm=f"layers.{number}.input_layernorm.weight" if number else None,
            number=number,
        )
        for number in range(config.num_layers)
    ]
    fc = reader.linear(["fc.weight"], [hidden], 2 * hidden)
    tensors.finish(_COPIES)
    weights = EagleWeights(
        embedding=target.embedding(),
        fc=fc,
        layers=tuple(layers),
        head=target.head(ops, token_map),
    )
    return EagleNet(weights, ops, target.num_layers, context, token_map)


def read_token_map(path: Path, vocab_size: int) -> Tensor:
    """[draft vocab], int64: the target's ids that a cut head keeps, most frequent first.

    Raises:
        ModelNotFound: there is no such file, or it holds no such list.
        Unsupported: it holds more than numbers.
    """
    content = read_pickle(path)
    try:
        ids = torch.as_tensor(content)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0)
    if ids.ndim != 1 or not len(ids) or ids.is_floating_point() or ids.dtype is torch.bool:
        raise ModelNotFound(f"{path} holds no list of token ids")
    ids = ids.to(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise ModelNotFound(f"{path} names token {bad}, the target has 0 to {vocab_size - 1}")
    if len(ids.unique()) != len(ids):
        raise ModelNotFound(f"{path} names a token twice")
    return ids
