"""Writes tiny random DFlash checkpoints with the names and keys of published layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from graft.testing.checkpoints import Random, head_dim, shape_of, target_config, write_config

DFLASH_LAYOUTS = ("z-lab", "nested", "encoder", "speculators")
MASK = 300  # an id past the words of a tiny model


def write_dflash(
    folder: Path,
    target: Path,
    layout: str = "z-lab",
    *,
    layers: int = 2,
    block_size: int = 6,
    layer_types: Sequence[str] | None = None,
    window: int | None = None,
    layer_ids: Sequence[int] | None = None,
    draft_vocab_size: int | None = None,
    mask_row: bool = False,
    options: Mapping[str, Any] | None = None,
    seed: int = 1,
) -> Path:
    """A DFlash drafter.

    layout: one of DFLASH_LAYOUTS. layer_ids: outputs of layers from zero. mask_row: a side file
    with a row for the mask. options: further keys, put where the layout puts such keys.
    """
    config, random = target_config(target), Random(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    count = len(layer_ids) if layer_ids else layers
    prefix = "model." if layout == "nested" else ""
    fc, norm = (
        ("encoder.fc", "encoder.output_norm_enc") if layout == "encoder" else ("fc", "hidden_norm")
    )
    tensors: dict[str, NDArray[Any]] = {
        f"{prefix}{fc}.weight": random.weight(hidden, count * hidden, 0.1),
        f"{prefix}{norm}.weight": random.gain(hidden),
        f"{prefix}norm.weight": random.gain(hidden),
    }
    for number in range(layers):
        tensors |= _layer(random, f"{prefix}layers.{number}", config)
    if draft_vocab_size is not None:
        ids = random.some_ids(draft_vocab_size, vocab)
        tensors["lm_head.weight"] = random.weight(draft_vocab_size, hidden, 0.4)
        tensors["d2t"] = ids - np.arange(draft_vocab_size)
        tensors["t2d"] = np.isin(np.arange(vocab), ids)
    shape = {
        **shape_of(config),
        "model_type": "qwen3",
        "head_dim": head_dim(config),
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "layer_types": list(layer_types) if layer_types else None,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "attention_bias": False,
    }
    drafts = {"block_size": block_size, "mask_token_id": MASK, **(options or {})}
    write_config(
        folder, _config(layout, shape, drafts, layer_ids, config, draft_vocab_size or vocab)
    )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if mask_row:
        row = torch.from_numpy(random.weight(1, hidden, 0.4)[0])
        torch.save({"embedding": row, "mask_token_id": MASK}, folder / "mask_embedding.pt")
    return folder


def _config(
    layout: str,
    shape: Mapping[str, Any],
    drafts: Mapping[str, Any],
    layer_ids: Sequence[int] | None,
    target: Mapping[str, Any],
    draft_vocab: int,
) -> dict[str, Any]:
    layers = target["num_hidden_layers"]
    if layout == "speculators":
        return {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "speculators_version": "0.3.0",
            "transformer_layer_config": dict(shape),
            "draft_vocab_size": draft_vocab,
            "aux_hidden_state_layer_ids": None if layer_ids is None else [k + 1 for k in layer_ids],
            "sample_from_anchor": False,
            **drafts,
        }
    top = {**shape, "architectures": ["DFlashDraftModel"], "num_target_layers": layers}
    ids = {} if layer_ids is None else {"target_layer_ids": list(layer_ids)}
    if layout == "nested":
        # Where both are there, the nested key wins.
        return {**top, "block_size": 3, "dflash_config": {**ids, **drafts}}
    return {**top, **ids, **drafts}


def _layer(random: Random, name: str, config: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    hidden, wide, dim = config["hidden_size"], config["intermediate_size"], head_dim(config)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    return {
        f"{name}.self_attn.q_proj.weight": random.weight(heads * dim, hidden),
        f"{name}.self_attn.k_proj.weight": random.weight(groups * dim, hidden),
        f"{name}.self_attn.v_proj.weight": random.weight(groups * dim, hidden),
        f"{name}.self_attn.o_proj.weight": random.weight(hidden, heads * dim),
        f"{name}.self_attn.q_norm.weight": random.gain(dim),
        f"{name}.self_attn.k_norm.weight": random.gain(dim),
        f"{name}.mlp.gate_proj.weight": random.weight(wide, hidden),
        f"{name}.mlp.up_proj.weight": random.weight(wide, hidden),
        f"{name}.mlp.down_proj.weight": random.weight(hidden, wide),
        f"{name}.input_layernorm.weight": random.gain(hidden),
        f"{name}.post_attention_layernorm.weight": random.gain(hidden),
    }
