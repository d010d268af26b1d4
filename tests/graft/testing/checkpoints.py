"""Writes tiny random draft checkpoints with exactly the names and keys of published layouts.

Knows files; runs no model. A checkpoint fits the target in whose folder it finds its sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

_Tensors = dict[str, NDArray[Any]]

EAGLE3_LAYOUTS = ("safeailab", "specforge", "sglang", "speculators")
EAGLE_LAYOUTS = ("safeailab", "sglang", "qwen2")


class Random:
    """Random tensors of a checkpoint; equal seeds give equal files."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def weight(self, rows: int, columns: int, std: float = 0.2) -> NDArray[np.float32]:
        return (self._random.standard_normal((rows, columns)) * std).astype(np.float32)

    def bias(self, width: int) -> NDArray[np.float32]:
        return (self._random.standard_normal(width) * 0.1).astype(np.float32)

    def gain(self, width: int) -> NDArray[np.float32]:
        return (1 + self._random.standard_normal(width) * 0.1).astype(np.float32)

    def some_ids(self, count: int, vocab_size: int) -> NDArray[np.int64]:
        """`count` ids, ascending, all printable ASCII among them."""
        rest = np.concatenate([np.arange(32), np.arange(127, vocab_size)])
        more = self._random.permutation(rest)[: max(0, count - 95)]
        return np.sort(np.concatenate([np.arange(32, 127)[:count], more])).astype(np.int64)


def target_config(target: Path) -> dict[str, Any]:
    """config.json of a target's folder."""
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    return config


def write_eagle(
    folder: Path,
    target: Path,
    layout: str = "sglang",
    *,
    fc_bias: bool = True,
    layers: int = 1,
    seed: int = 1,
) -> Path:
    """An EAGLE head. layout: one of EAGLE_LAYOUTS; "safeailab" is a pickle file, as published."""
    config, random = target_config(target), Random(seed)
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    family = "qwen2" if layout == "qwen2" else "llama"
    shown = {"safeailab": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLMEagle"}
    prefix = "model." if layout == "sglang" else ""
    tensors: _Tensors = {
        f"{prefix}embed_tokens.weight": random.weight(config["vocab_size"], hidden)
    }
    tensors[f"{prefix}fc.weight"] = random.weight(hidden, 2 * hidden)
    if fc_bias:
        tensors[f"{prefix}fc.bias"] = random.bias(hidden)
    for number in range(layers):
        name = f"{prefix}layers.{number}"
        tensors |= _layer(random, name, config, hidden, wide, biases=layout == "qwen2")
        if number:
            tensors[f"{name}.input_layernorm.weight"] = random.gain(hidden)
    write_config(
        folder,
        {
            **shape_of(config),
            "architectures": [shown.get(layout, "LlamaForCausalLMEagle")],
            "model_type": family,
            "num_hidden_layers": layers,
            "vocab_size": config["vocab_size"],
            "bias": fc_bias,
            **({"qkv_bias": True} if layout == "qwen2" else {}),
        },
    )
    if layout == "safeailab":
        loaded = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
        torch.save(loaded, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_eagle3(
    folder: Path,
    target: Path,
    layout: str = "specforge",
    *,
    draft_vocab_size: int | None = 120,
    layer_ids: list[int] | None = None,
    hidden: int = 0,
    layers: int = 1,
    options: Mapping[str, Any] | None = None,
    seed: int = 1,
) -> Path:
    """An EAGLE-3 head.

    layout: one of EAGLE3_LAYOUTS; "sglang" writes names as its server holds them.
    layer_ids: as that layout writes them; None leaves them out.
    hidden: of the drafter, the target's by default. options: norm_before_fc, fc_norm,
    use_aux_norm, norm_before_residual, norm_output.
    """
    config, random, chosen = target_config(target), Random(seed), dict(options or {})
    wide_target = config["hidden_size"]
    hidden, wide = hidden or wide_target, config["intermediate_size"]
    states = (len(layer_ids) if layer_ids else 3) * wide_target
    vocab = config["vocab_size"]
    first = "layers.0" if layout == "speculators" else "midlayer"
    tensors: _Tensors = {
        "fc.weight": random.weight(hidden, states, 0.1),
        "norm.weight": random.gain(hidden),
        f"{first}.hidden_norm.weight": random.gain(hidden),
        f"{first}.input_layernorm.weight": random.gain(hidden),
    }
    tensors |= _layer(random, first, config, 2 * hidden, wide, hidden=hidden)
    for number in range(1, layers):
        name = f"layers.{number}"
        tensors |= _layer(random, name, config, hidden, wide, hidden=hidden)
        norm = "input_layernorm" if layout == "speculators" else "hidden_norm"
        tensors[f"{name}.{norm}.weight"] = random.gain(hidden)
    if chosen.get("norm_before_fc"):
        tensors["input_norm.weight"] = random.gain(states)
    for place, legacy in enumerate(("low", "mid", "high")):
        if chosen.get("fc_norm"):
            tensors[f"fc_norm.{place}.weight"] = random.gain(wide_target)
        if chosen.get("use_aux_norm"):
            tensors[f"aux_norm_{legacy}.weight"] = random.gain(wide_target)
    if draft_vocab_size is not None:
        tensors["lm_head.weight"] = random.weight(draft_vocab_size, hidden, 0.4)
        ids = random.some_ids(draft_vocab_size, vocab)
        tensors["d2t"] = ids - np.arange(draft_vocab_size)
        tensors["t2d"] = np.isin(np.arange(vocab), ids)
    if hidden != wide_target or layout in ("safeailab", "speculators"):
        tensors["embed_tokens.weight"] = random.weight(vocab, hidden, 0.4)
    if layout == "sglang":
        bare = ("d2t", "t2d")
        tensors = {x if x in bare else f"model.{x}": y for x, y in tensors.items()}
    shape = {**shape_of(config), "hidden_size": hidden, "vocab_size": vocab}
    shape |= {"head_dim": head_dim(config), "num_hidden_layers": layers}
    write_config(
        folder,
        _eagle3_config(layout, shape, draft_vocab_size, layer_ids, wide_target, chosen, target),
    )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_token_map(path: Path, target: Path, count: int = 120, as_list: bool = True) -> Path:
    """An FR-Spec map of printable ASCII and more, as a list or a tensor."""
    ids = Random(2).some_ids(count, target_config(target)["vocab_size"])[::-1].copy()
    torch.save(ids.tolist() if as_list else torch.from_numpy(ids), path)
    return path


def _eagle3_config(
    layout: str,
    shape: Mapping[str, Any],
    draft_vocab_size: int | None,
    layer_ids: list[int] | None,
    target_hidden: int,
    chosen: Mapping[str, Any],
    target: Path,
) -> dict[str, Any]:
    if layout == "speculators":
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "draft_vocab_size": draft_vocab_size,
            "target_hidden_size": target_hidden,
            "eagle_aux_hidden_state_layer_ids": layer_ids,
            "transformer_layer_config": {
                **shape,
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
            },
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {
                    "name_or_path": str(target),
                    "architectures": target_config(target)["architectures"],
                },
            },
            **chosen,
        }
    name = "LlamaForCausalLM" if layout == "safeailab" else "LlamaForCausalLMEagle3"
    made = {
        **shape,
        "architectures": [name],
        "model_type": "llama",
        "draft_vocab_size": draft_vocab_size,
        **chosen,
    }
    if shape["hidden_size"] != target_hidden:
        made["target_hidden_size"] = target_hidden
    if layer_ids is not None:
        made["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": layer_ids,
            "use_aux_hidden_state": True,
        }
    return made


def _layer(
    random: Random,
    name: str,
    config: Mapping[str, Any],
    width: int,
    wide: int,
    *,
    hidden: int = 0,
    biases: bool = False,
) -> _Tensors:
    """A decoder layer without the norm of its input; `width` is what its attention reads."""
    hidden = hidden or config["hidden_size"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    heads["v"] = heads["k"]
    tensors: _Tensors = {}
    for part, count in heads.items():
        rows = count * head_dim(config)
        tensors[f"{name}.self_attn.{part}_proj.weight"] = random.weight(rows, width)
        if biases:
            tensors[f"{name}.self_attn.{part}_proj.bias"] = random.bias(rows)
    tensors[f"{name}.self_attn.o_proj.weight"] = random.weight(
        hidden, heads["q"] * head_dim(config)
    )
    tensors[f"{name}.mlp.gate_proj.weight"] = random.weight(wide, hidden)
    tensors[f"{name}.mlp.up_proj.weight"] = random.weight(wide, hidden)
    tensors[f"{name}.mlp.down_proj.weight"] = random.weight(hidden, wide)
    tensors[f"{name}.post_attention_layernorm.weight"] = random.gain(hidden)
    return tensors


def head_dim(config: Mapping[str, Any]) -> int:
    """Of a target, by its key or by division."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def shape_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a target that its drafters share."""
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "hidden_act",
    )
    return {key: config[key] for key in keys} | {"tie_word_embeddings": False}


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes config.json to a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
