"""Reads EAGLE-3 checkpoints: the layouts of SafeAILab and SpecForge, of SGLang, of speculators.

What one consumer calls layer k another calls k + 1. On load all of it becomes the numbering of
Hugging Face, in which state k is what enters layer k, and nothing later asks where an id came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from graft.common.errors import Mismatch, ModelNotFound, Unsupported
from graft.common.projection import Projection
from graft.common.tree import FloatArray
from graft.draft.checkpoints.borrowed import Borrowed
from graft.draft.checkpoints.detect import Checkpoint
from graft.draft.checkpoints.layers import LayerReader, draft_decoder_config, make_rope
from graft.draft.checkpoints.tensors import Tensors
from graft.draft.checkpoints.vocab import draft_token_ids
from graft.draft.features import FeatureNeed
from graft.draft.nets.eagle3 import Eagle3Net, Eagle3Variant, Eagle3Weights
from graft.kernels.ops import Ops
from graft.models.config import DecoderConfig

_IDS = "eagle_aux_hidden_state_layer_ids"
_LEGACY_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
_IGNORED = (
    r"t2d",
    r"embed_tokens\.weight",
    r"layers\.[1-9]\d*\.(hidden_norm|input_layernorm)\.weight",
    r"verifier_norm\.weight",
    r"verifier_lm_head\.weight",
    r".*rotary_emb\.inv_freq",
)
# speculators writes only what differs from its family's defaults.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
}


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """What config.json says, in our terms.

    layers: captured states, in Hugging Face numbering and in order of concatenation.
    draft_vocab_size: None shares the target's head. target_hidden_size: width of one state.
    """

    decoder: DecoderConfig
    layers: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int | None
    norm_before_fc: bool
    fc_norm: bool
    variant: Eagle3Variant

    @property
    def width(self) -> int:
        """Of all states side by side."""
        return len(self.layers) * self.target_hidden_size


def eagle3_config(config: Mapping[str, Any], target: Borrowed) -> Eagle3Config:
    """Normalises every layout's config.

    `norm_before_residual` is off where it is not said, as in the library that trains with it.

    Raises:
        ModelNotFound: ids that the target's layers cannot have.
        Unsupported: two norms before fc that exclude each other.
    """
    eagle = config.get("eagle_config") or {}

    def said(key: str, default: Any = None) -> Any:
        return eagle.get(key, config.get(key, default))

    decoder = draft_decoder_config(_decoder_keys(config))
    if said("use_aux_hidden_state", True):
        layers = captured_layers(config, target.num_layers, str(target.raw.get("model_type")))
    else:
        layers = (target.num_layers,)
    norm_before_fc = bool(said("norm_before_fc", False))
    fc_norm = bool(said("fc_norm", False) or said("use_aux_norm", False))
    if norm_before_fc and fc_norm:
        raise Unsupported("config.json: norm_before_fc and fc_norm exclude each other")
    return Eagle3Config(
        decoder=decoder,
        layers=layers,
        target_hidden_size=int(said("target_hidden_size") or decoder.hidden_size),
        draft_vocab_size=config.get("draft_vocab_size"),
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        variant=Eagle3Variant(
            norm_before_residual=bool(said("norm_before_residual", False)),
            norm_output=bool(said("norm_output", False)),
        ),
    )


def captured_layers(
    config: Mapping[str, Any], num_layers: int, target_type: str
) -> tuple[int, ...]:
    """Captured states in Hugging Face numbering: state k enters layer k.

    Ids inside `eagle_config` are SGLang's, mostly "the output of layer k"; at the top level they
    are vLLM's and speculators', "what enters layer k", sorted and each once. Without ids it is
    the three of the paper's code.

    Raises:
        ModelNotFound: an id that the target does not have.
    """
    inner = (config.get("eagle_config") or {}).get(_IDS)
    outer = config.get(_IDS)
    if inner:
        layers = tuple(int(k) + _sglang_offset(inner, num_layers, target_type) for k in inner)
    elif outer:
        layers = tuple(sorted({int(k) for k in outer}))
    else:
        layers = (2, num_layers // 2, num_layers - 3)
    for layer in layers:
        if not 0 <= layer <= num_layers:
            raise ModelNotFound(
                f"config.json: {_IDS} asks for hidden state {layer},"
                f" the target has 0 to {num_layers}"
            )
    return layers


def _sglang_offset(ids: Sequence[int], num_layers: int, target_type: str) -> int:
    if target_type.startswith("deepseek"):
        return 1 if ids[0] == 1 else 0
    if target_type == "gpt_oss":
        return 0 if max(ids) == num_layers else 1
    return 1


def _decoder_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    nested = config.get("transformer_layer_config")
    if not nested:
        return {"num_hidden_layers": 1, **config}
    family = str(nested.get("model_type", "qwen3"))
    return {"num_hidden_layers": 1, **_DEFAULTS.get(family, {}), "model_type": family, **nested}


def load_eagle3(checkpoint: Checkpoint, target: Borrowed, ops: Ops) -> Eagle3Net:
    """A network from a checkpoint and what it borrows of its target.

    Raises:
        ModelNotFound: a tensor is missing, left over or mis-shaped.
        Mismatch: the checkpoint is for another target.
    """
    config = eagle3_config(checkpoint.config, target)
    decoder, tensors = config.decoder, checkpoint.tensors
    _check_fit(config, target, tensors.name)
    tensors.rename(_plain_name)
    context = max(decoder.context_length, target.config.context_length)
    reader = LayerReader(tensors, decoder, make_rope(decoder, ops, context), ops)
    embedding = _embedding(config, target, tensors)
    token_ids = draft_token_ids(tensors, config.draft_vocab_size, target.config.vocab_size)
    first = "layers.0"
    layers = [reader.layer(first, norm=None, width=2 * decoder.hidden_size)]
    layers += [
        reader.layer(f"layers.{number}", norm=_later_norm(checkpoint, number), number=number)
        for number in range(1, decoder.num_layers)
    ]
    weights = Eagle3Weights(
        embedding=embedding,
        fc=_fc(config, reader),
        input_norm=reader.norm("input_norm.weight", config.width)
        if config.norm_before_fc
        else None,
        chunk_norms=_chunk_norms(config, reader),
        embedding_norm=reader.norm(f"{first}.input_layernorm.weight"),
        hidden_norm=reader.norm(f"{first}.hidden_norm.weight"),
        layers=tuple(layers),
        final_norm=reader.norm("norm.weight"),
        head=_head(config, target, reader, embedding),
    )
    # A head that is shared with the target may lie in the checkpoint too.
    projection = _projection(config, tensors)
    tensors.finish((*_IGNORED, r"lm_head\.weight") if config.draft_vocab_size is None else _IGNORED)
    fused_id = "" if projection is None else projection.fused_id
    needs = FeatureNeed(config.layers, final_norm=False, fused_id=fused_id)
    return Eagle3Net(weights, ops, needs, context, token_ids, config.variant)


def projection_of(checkpoint: Checkpoint, target: Borrowed) -> Projection | None:
    """What turns target states into the network's own, for a verify service to apply.

    None for a network that takes the states as they come.
    """
    config = eagle3_config(checkpoint.config, target)
    checkpoint.tensors.rename(_plain_name)
    return _projection(config, checkpoint.tensors)


def _projection(config: Eagle3Config, tensors: Tensors) -> Projection | None:
    if "fc.weight" not in tensors:
        return None
    hidden, width = config.decoder.hidden_size, config.target_hidden_size

    def read(name: str, *shape: int) -> FloatArray:
        return np.asarray(tensors.weight(name, *shape).numpy(), np.float32)

    places = range(len(config.layers)) if config.fc_norm else ()
    return Projection(
        layers=config.layers,
        weight=read("fc.weight", hidden, config.width),
        final_norm=False,
        bias=read("fc.bias", hidden) if "fc.bias" in tensors else None,
        joined_norm=read("input_norm.weight", config.width) if config.norm_before_fc else None,
        state_norms=tuple(read(f"fc_norm.{place}.weight", width) for place in places),
        eps=config.decoder.rms_norm_eps,
    )


def _plain_name(name: str) -> str:
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    stem = name.removesuffix(".weight")
    if stem in _LEGACY_NORMS:
        return f"fc_norm.{_LEGACY_NORMS.index(stem)}.weight"
    return name


def _check_fit(config: Eagle3Config, target: Borrowed, name: str) -> None:
    fits = {
        "target_hidden_size": (config.target_hidden_size, target.config.hidden_size),
        "vocab_size": (config.decoder.vocab_size, target.config.vocab_size),
    }
    for key, (ours, theirs) in fits.items():
        if ours != theirs:
            raise Mismatch(
                f"draft checkpoint {name} has {key} {ours}, the target {target.name} has {theirs}"
            )


def _embedding(config: Eagle3Config, target: Borrowed, tensors: Tensors) -> Tensor:
    """The target's; the checkpoint's own where the widths differ."""
    hidden = config.decoder.hidden_size
    if hidden == target.config.hidden_size:
        return target.embedding()
    return tensors.weight("embed_tokens.weight", config.decoder.vocab_size, hidden)


def _fc(config: Eagle3Config, reader: LayerReader) -> Any:
    hidden = config.decoder.hidden_size
    if "fc.weight" not in reader.tensors and config.width == hidden:
        return None
    return reader.linear(["fc.weight"], [hidden], config.width)


def _chunk_norms(config: Eagle3Config, reader: LayerReader) -> tuple[Tensor, ...]:
    if not config.fc_norm:
        return ()
    width = config.target_hidden_size
    return tuple(
        reader.norm(f"fc_norm.{place}.weight", width) for place in range(len(config.layers))
    )


def _later_norm(checkpoint: Checkpoint, number: int) -> str:
    """The norm that feeds a further layer: SGLang reads hidden_norm, vLLM input_layernorm."""
    plain, other = (f"layers.{number}.{one}.weight" for one in ("input_layernorm", "hidden_norm"))
    if "speculators_model_type" in checkpoint.config or other not in checkpoint.tensors:
        return plain
    return other


def _head(config: Eagle3Config, target: Borrowed, reader: LayerReader, embedding: Tensor) -> Any:
    hidden, size = config.decoder.hidden_size, config.draft_vocab_size
    if size is None:
        if hidden != target.config.hidden_size:
            raise Mismatch(
                f"draft checkpoint {reader.tensors.name} has no draft_vocab_size and would share"
                f" the target's head, which is {target.config.hidden_size} wide, not {hidden}"
            )
        return target.head(reader.ops)
    if "lm_head.weight" not in reader.tensors and config.decoder.tied_embeddings:
        return reader.ops.pack([embedding], [None])
    return reader.linear(["lm_head.weight"], [size], hidden)
