"""Reads DFlash checkpoints: the layouts of z-lab (top level or `dflash_config`) and speculators.

Neither holds an embedding, and only a cut vocabulary brings a head of its own; what is missing is
borrowed from the target. Layer ids become the numbering of Hugging Face on load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graft.common.errors import InvalidArgument, Mismatch, ModelNotFound, Unsupported
from graft.common.projection import Projection
from graft.common.tree import FloatArray
from graft.draft.checkpoints.borrowed import Borrowed
from graft.draft.checkpoints.detect import Checkpoint
from graft.draft.checkpoints.layers import LayerReader, draft_decoder_config, make_rope
from graft.draft.checkpoints.tensors import Tensors, read_pickle
from graft.draft.checkpoints.vocab import draft_token_ids
from graft.draft.features import FeatureNeed
from graft.draft.nets.dflash import (
    DflashBlock,
    DflashLayer,
    DflashNet,
    DflashShape,
    DflashWeights,
)
from graft.draft.rows import Sight
from graft.kernels.ops import Ops
from graft.models.config import SLIDING_ATTENTION, DecoderConfig

_SIDE_FILE = "mask_embedding.pt"
_MASK_TOKEN = "<|MASK|>"
_IGNORED = (
    r"t2d",
    r"embed_tokens\.weight",
    r"verifier_norm\.weight",
    r"verifier_lm_head\.weight",
    r".*rotary_emb\.inv_freq",
)
_ALIASES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
# Qwen3's own defaults, for speculators writes only what differs from them.
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}


@dataclass(frozen=True, slots=True)
class DflashConfig:
    """What config.json says, in our terms.

    layers: captured states, in Hugging Face numbering and in order of concatenation.
    sights: one a layer. mask_token_id: None where only a side file can tell, for the target's
        tokenizer has no `mask_token`.
    draft_vocab_size: None shares the target's head.
    """

    decoder: DecoderConfig
    layers: tuple[int, ...]
    sights: tuple[Sight, ...]
    block: DflashBlock
    mask_token_id: int | None
    mask_token: str
    draft_vocab_size: int | None


def dflash_config(config: Mapping[str, Any], target: Borrowed, block_size: int = 0) -> DflashConfig:
    """Normalises every layout's config. block_size: takes the place of the checkpoint's.

    Raises:
        ModelNotFound: a key is missing or holds what it cannot hold.
        Unsupported: a relative of DFlash that is not read here.
        InvalidArgument: a block that holds no drafted token.
    """
    nested = config.get("dflash_config") or {}
    layered = "transformer_layer_config" in config

    def said(key: str, default: Any = None) -> Any:
        return nested.get(key, config.get(key, default))

    _refuse_relatives(config, said)
    shape = {**_DEFAULTS, **config["transformer_layer_config"]} if layered else dict(config)
    shape = {"model_type": "qwen3", **shape}
    decoder = draft_decoder_config({**shape, "layer_types": None, "use_sliding_window": False})
    block = DflashBlock(
        size=block_size or int(said("block_size", 8 if layered else 16)),
        from_anchor=bool(said("sample_from_anchor", False)),
        embedding_scale=float(said("input_embedding_scale") or 1.0),
        output_multiplier=float(said("output_multiplier") or 1.0),
        softcap=float(said("final_logit_softcapping") or 0.0),
    )
    if block.num_drafted < 1:
        raise InvalidArgument(
            f"a block of {block.size} drafts nothing, expected 2 or more",
            field="dflash_block_size",
        )
    mask = said("mask_token_id")
    word = str(said("mask_token") or _MASK_TOKEN)
    if mask is None:
        mask = target.token_id(word)
    draft_vocab = config.get("draft_vocab_size", 32000) if layered else said("draft_vocab_size")
    return DflashConfig(
        decoder=decoder,
        layers=_captured_layers(said, layered, decoder.num_layers, target.num_layers),
        sights=_sights(shape, said, decoder.num_layers),
        block=block,
        mask_token_id=None if mask is None else int(mask),
        mask_token=word,
        draft_vocab_size=None if draft_vocab in (None, target.config.vocab_size) else draft_vocab,
    )


def default_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Layers, counted from zero, whose outputs are captured where config.json names none."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return [round(1 + place * step) for place in range(num_draft_layers)]


def load_dflash(
    checkpoint: Checkpoint, target: Borrowed, ops: Ops, *, block_size: int = 0, pickle: bool = False
) -> DflashNet:
    """A network from a checkpoint and what it borrows of its target.

    block_size: takes the place of the checkpoint's; 0 keeps it. pickle: a side file with the
    mask's embedding may be read.

    Raises:
        ModelNotFound: a tensor is missing, left over or mis-shaped.
        Mismatch: the checkpoint is for another target.
        Unsupported, InvalidArgument: as `dflash_config`.
    """
    config = dflash_config(checkpoint.config, target, block_size)
    decoder, tensors = config.decoder, checkpoint.tensors
    hidden = decoder.hidden_size
    if hidden != target.config.hidden_size:
        raise Mismatch(
            f"draft checkpoint {tensors.name} has hidden_size {hidden},"
            f" the target {target.name} has {target.config.hidden_size}"
        )
    tensors.rename(_plain_name)
    context = max(decoder.context_length, target.config.context_length)
    rope = make_rope(decoder, ops, context + config.block.size)
    reader = LayerReader(tensors, decoder, rope, ops)
    embedding = target.embedding().to(ops.device)
    ids = draft_token_ids(tensors, config.draft_vocab_size, target.config.vocab_size)
    size = config.draft_vocab_size
    weights = DflashWeights(
        embedding=embedding,
        mask=_mask(config, checkpoint, embedding, pickle),
        fc=reader.linear(["fc.weight"], [hidden], len(config.layers) * hidden),
        context_norm=reader.norm("hidden_norm.weight"),
        layers=tuple(_layer(reader, number, sight) for number, sight in enumerate(config.sights)),
        final_norm=reader.norm("norm.weight"),
        head=target.head(ops)
        if size is None
        else reader.linear(["lm_head.weight"], [size], hidden),
    )
    fused_id = _projection(config, tensors).fused_id
    tensors.finish((*_IGNORED, r"lm_head\.weight", "d2t") if size is None else _IGNORED)
    return DflashNet(
        weights,
        ops,
        FeatureNeed(config.layers, final_norm=False, fused_id=fused_id),
        DflashShape(decoder.num_heads, decoder.head_dim, decoder.rms_norm_eps, rope, context),
        config.block,
        ids,
    )


def dflash_projection(checkpoint: Checkpoint, target: Borrowed) -> Projection:
    """What turns target states into context, for a verify service to apply.

    Raises:
        ModelNotFound, Unsupported: as `load_dflash`.
    """
    checkpoint.tensors.rename(_plain_name)
    return _projection(dflash_config(checkpoint.config, target), checkpoint.tensors)


def _projection(config: DflashConfig, tensors: Tensors) -> Projection:
    hidden = config.decoder.hidden_size

    def read(name: str, *shape: int) -> FloatArray:
        return np.asarray(tensors.weight(name, *shape).numpy(), np.float32)

    return Projection(
        layers=config.layers,
        weight=read("fc.weight", hidden, len(config.layers) * hidden),
        final_norm=False,
        bias=read("fc.bias", hidden) if "fc.bias" in tensors else None,
        out_norm=read("hidden_norm.weight", hidden),
        eps=config.decoder.rms_norm_eps,
    )


def _refuse_relatives(config: Mapping[str, Any], said: Any) -> None:
    architecture = " ".join(config.get("architectures") or ())
    if "DFlash2" in architecture or said("selector_rank"):
        raise Unsupported(
            f"config.json names {architecture or 'selector_rank'}: the convolutions and the"
            " candidate selector of DFlash2 are not offered, expected DFlashDraftModel"
        )
    if "MuseGlimmer" in architecture:
        raise Unsupported(f"config.json names {architecture}, expected DFlashDraftModel")


def _captured_layers(
    said: Any, layered: bool, num_layers: int, target_layers: int
) -> tuple[int, ...]:
    """z-lab counts outputs of layers from zero; speculators writes Hugging Face numbers."""
    key = "aux_hidden_state_layer_ids" if layered else "target_layer_ids"
    ids = said(key)
    if ids is None:
        built_for = int(said("num_target_layers") or target_layers)
        layers = [one + 1 for one in default_layer_ids(built_for, num_layers)]
    else:
        layers = [int(one) + (0 if layered else 1) for one in ids]
    for layer in layers:
        if not 0 <= layer <= target_layers:
            raise ModelNotFound(
                f"config.json: {key} asks for hidden state {layer},"
                f" the target has 0 to {target_layers}"
            )
    return tuple(layers)


def _sights(shape: Mapping[str, Any], said: Any, num_layers: int) -> tuple[Sight, ...]:
    """Full layers look both ways inside a block and sliding ones only back, unless it is said."""
    kinds = shape.get("layer_types") or ["full_attention"] * num_layers
    if len(kinds) != num_layers:
        raise ModelNotFound(
            f"config.json: layer_types has {len(kinds)} entries, expected {num_layers}"
        )
    stated = said("is_causal", said("causal"))
    # Qwen's own config drops sliding_window unless use_sliding_window is set.
    kept = shape.get("sliding_window") if shape.get("use_sliding_window") else None
    window = int(said("swa_window_size") or kept or 0)
    all_sliding = bool(said("use_swa", False))
    sights = []
    for kind in kinds:
        sliding = all_sliding or kind == SLIDING_ATTENTION
        causal = sliding and not said("sliding_window_non_causal", False)
        if stated is not None:
            causal = bool(stated)
        sights.append(Sight(causal, window if sliding else 0))
    return tuple(sights)


def _plain_name(name: str) -> str:
    name = name.removeprefix("model.")
    for alias, plain in _ALIASES.items():
        if name.startswith(alias):
            return plain + name.removeprefix(alias)
    return name


def _mask(config: DflashConfig, checkpoint: Checkpoint, embedding: Tensor, pickle: bool) -> Tensor:
    """[hidden]: the side file's row where there is one, else the target's."""
    path = checkpoint.folder / _SIDE_FILE
    name = checkpoint.tensors.name
    if path.is_file():
        if not pickle:
            raise Unsupported(
                f"{path} is a pickle file: allow_pickle reads such files,"
                " without running code in them"
            )
        return _side_row(path, read_pickle(path), int(embedding.shape[1])).to(embedding.device)
    mask = config.mask_token_id
    if mask is None:
        raise ModelNotFound(
            f"draft checkpoint {name} names no mask_token_id and has no {_SIDE_FILE}, and the"
            f" target's tokenizer has no token {config.mask_token}"
        )
    if not 0 <= mask < len(embedding):
        raise ModelNotFound(
            f"draft checkpoint {name} has mask_token_id {mask}, the target's embedding ends at"
            f" {len(embedding) - 1}, and there is no {_SIDE_FILE}"
        )
    return embedding[mask].clone()


def _side_row(path: Any, content: Any, width: int) -> Tensor:
    row = content.get("embedding") if isinstance(content, dict) else None
    if not isinstance(row, Tensor) or row.numel() != width:
        raise ModelNotFound(f"{path} holds no embedding of {width} numbers")
    return row.reshape(width).to(torch.float32)


def _layer(reader: LayerReader, number: int, sight: Sight) -> DflashLayer:
    config, name = reader.config, f"layers.{number}"
    hidden, wide, attention = config.hidden_size, config.intermediate_size, f"{name}.self_attn"
    norms = [f"{attention}.{part}_norm.weight" for part in "qk"]
    q_norm, k_norm = (
        reader.norm(norm, config.head_dim) if config.head_norms else None for norm in norms
    )
    return DflashLayer(
        attention_norm=reader.norm(f"{name}.input_layernorm.weight"),
        query=reader.linear([f"{attention}.q_proj.weight"], [config.query_width], hidden),
        keys_values=reader.linear(
            [f"{attention}.{part}_proj.weight" for part in "kv"],
            [config.kv_width, config.kv_width],
            hidden,
        ),
        q_norm=q_norm,
        k_norm=k_norm,
        output=reader.linear([f"{attention}.o_proj.weight"], [hidden], config.query_width),
        mlp_norm=reader.norm(f"{name}.post_attention_layernorm.weight"),
        gate_up=reader.linear(
            [f"{name}.mlp.gate_proj.weight", f"{name}.mlp.up_proj.weight"], [wide, wide], hidden
        ),
        down=reader.linear([f"{name}.mlp.down_proj.weight"], [hidden], wide),
        sight=sight,
    )
