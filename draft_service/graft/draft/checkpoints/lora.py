"""Reads adapters in the layout of PEFT. Knows names and shapes; runs nothing.

The additions of matrices that are packed together (q, k, v; gate, up) become one adapter, with the
scaling in its second half.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from graft.common.errors import ModelNotFound, Unsupported
from graft.draft.checkpoints.tensors import Tensors
from graft.draft.nets.uno import Adapter, LayerAdapters
from graft.kernels.ops import Linear, Ops
from graft.models.config import DecoderConfig

_GROUPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_TARGETS = tuple(part.split(".")[1] for group in _GROUPS.values() for part in group)
_UNSUPPORTED = ("rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform")


def adapter_folder(folder: Path) -> Path:
    """The folder itself, or its `adapter`, where published repositories keep it."""
    inner = folder / "adapter"
    outer_config = folder / "adapter_config.json"
    return inner if inner.is_dir() and not outer_config.is_file() else folder


def read_adapters(
    config: Mapping[str, Any], tensors: Tensors, decoder: DecoderConfig, ops: Ops
) -> list[LayerAdapters]:
    """One entry a layer of the decoder. config: adapter_config.json as it stands.

    Raises:
        ModelNotFound: a tensor is missing, left over or mis-shaped.
        Unsupported: an adapter that does more than add low-rank products.
    """
    targets = _targets(config)
    rank, scaling = _rank(config), _scaling(config)
    tensors.rename(lambda name: name.replace(".default.weight", ".weight"))
    widths = {
        "self_attn.q_proj": (decoder.hidden_size, decoder.query_width),
        "self_attn.k_proj": (decoder.hidden_size, decoder.kv_width),
        "self_attn.v_proj": (decoder.hidden_size, decoder.kv_width),
        "self_attn.o_proj": (decoder.query_width, decoder.hidden_size),
        "mlp.gate_proj": (decoder.hidden_size, decoder.intermediate_size),
        "mlp.up_proj": (decoder.hidden_size, decoder.intermediate_size),
        "mlp.down_proj": (decoder.intermediate_size, decoder.hidden_size),
    }

    def adapter(layer: int, parts: tuple[str, ...]) -> Adapter | None:
        downs: list[Tensor] = []
        ups: list[tuple[slice, slice, Linear]] = []
        start = 0
        for part in parts:
            wide, high = widths[part]
            if part.split(".")[1] in targets:
                name = f"base_model.model.model.layers.{layer}.{part}"
                place = len(downs) * rank
                downs.append(tensors.weight(f"{name}.lora_A.weight", rank, wide))
                up = tensors.weight(f"{name}.lora_B.weight", high, rank) * scaling
                packed = ops.pack([up], [None])
                ups.append((slice(place, place + rank), slice(start, start + high), packed))
            start += high
        return Adapter(ops.pack(downs, [None] * len(downs)), tuple(ups)) if downs else None

    layers = [
        LayerAdapters(**{name: adapter(layer, parts) for name, parts in _GROUPS.items()})
        for layer in range(decoder.num_layers)
    ]
    tensors.finish()
    return layers


def _targets(config: Mapping[str, Any]) -> set[str]:
    stated = config.get("target_modules")
    if not isinstance(stated, list) or not stated:
        raise Unsupported(
            f"adapter_config.json: target_modules is {stated!r}, expected a list of names"
        )
    strange = sorted(set(stated) - set(_TARGETS))
    if strange:
        raise Unsupported(
            f"adapter_config.json: target_modules holds {', '.join(strange)},"
            f" expected some of {', '.join(_TARGETS)}"
        )
    return set(stated)


def _rank(config: Mapping[str, Any]) -> int:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA" or config.get("use_dora"):
        raise Unsupported(
            f"adapter_config.json: {'DoRA' if kind == 'LORA' else kind}, expected LORA"
        )
    if config.get("bias", "none") != "none":
        raise Unsupported(f"adapter_config.json: bias is {config['bias']!r}, expected none")
    for key in _UNSUPPORTED:
        if config.get(key):
            raise Unsupported(f"adapter_config.json: {key} is not offered")
    rank = config.get("r")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ModelNotFound(f"adapter_config.json: r is {rank!r}, expected a number from 1 on")
    return rank


def _scaling(config: Mapping[str, Any]) -> float:
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or alpha <= 0:
        raise ModelNotFound(
            f"adapter_config.json: lora_alpha is {alpha!r}, expected a positive number"
        )
    rank = _rank(config)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
