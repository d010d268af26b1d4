"""EAGLE-3 heads as SpecForge and SGLang publish them, in bfloat16. Knows no training."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from graft.common.errors import InvalidArgument
from graft.train.eagle3 import Eagle3Net

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_SHARED_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
)


@dataclass(frozen=True, slots=True, eq=False)
class Eagle3Target:
    """What a head is for: the target's config and embedding, states read, tokens drafted.

    embedding: [vocab, hidden]. layers: in the numbering of Hugging Face. draft_tokens: [draft
        vocab], int64, ascending.
    """

    config: Mapping[str, Any]
    num_layers: int
    head_dim: int
    embedding: Tensor
    layers: tuple[int, ...]
    draft_tokens: Tensor


def write_eagle3(net: Eagle3Net, target: Eagle3Target, folder: Path) -> None:
    """config.json and model.safetensors; each appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: one.detach().to(torch.bfloat16) for name, one in _weights(net).items()}
    count = len(target.draft_tokens)
    stored["d2t"] = target.draft_tokens - torch.arange(count)
    kept = torch.zeros(len(target.embedding), dtype=torch.bool)
    kept[target.draft_tokens] = True
    stored["t2d"] = kept
    partial = folder / "model.safetensors.tmp"
    save_file({name: one.contiguous() for name, one in stored.items()}, partial, {"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    partial = folder / "config.json.tmp"
    partial.write_text(json.dumps(_config(net, target), indent=2, sort_keys=True) + "\n")
    os.replace(partial, folder / "config.json")


def read_eagle3(net: Eagle3Net, target: Eagle3Target, folder: Path) -> None:
    """In place: the net goes on from a head in `folder` that `write_eagle3` wrote.

    Its draft vocabulary may differ; columns that it lacks stay as they are.

    Raises:
        InvalidArgument: no such head, or one of another shape.
    """
    try:
        stored = load_file(folder / "model.safetensors")
        ids = stored.pop("d2t") + torch.arange(len(stored["lm_head.weight"]))
        del stored["t2d"]
        weights = {name: one.float() for name, one in stored.items()}
        rows = torch.full((len(target.embedding),), -1)
        rows[ids] = torch.arange(len(ids))
        at = rows[target.draft_tokens]
        with torch.no_grad():
            head = weights.pop("lm_head.weight")
            net.head[at >= 0] = head[at[at >= 0]]
            net.fc.copy_(weights.pop("fc.weight") / net.state_scale)
            for name, place in _places(net).items():
                place.copy_(weights[name])
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise InvalidArgument(
            f"{folder} holds no EAGLE-3 head of this shape: {error}", field="start_from"
        ) from None


def _weights(net: Eagle3Net) -> dict[str, Tensor]:
    return {
        **_places(net),
        "fc.weight": net.fc * net.state_scale,
        "lm_head.weight": net.head,
    }


def _places(net: Eagle3Net) -> dict[str, Tensor]:
    """Parts of the net's own tensors by their published names; all but fc and head."""
    shape = net.shape
    q, k, v = net.qkv.split((shape.query_width, shape.kv_width, shape.kv_width))
    gate, up = net.gate_up.chunk(2)
    return {
        "midlayer.self_attn.q_proj.weight": q,
        "midlayer.self_attn.k_proj.weight": k,
        "midlayer.self_attn.v_proj.weight": v,
        "midlayer.self_attn.o_proj.weight": net.output,
        "midlayer.mlp.gate_proj.weight": gate,
        "midlayer.mlp.up_proj.weight": up,
        "midlayer.mlp.down_proj.weight": net.down,
        "midlayer.input_layernorm.weight": net.embedding_norm,
        "midlayer.hidden_norm.weight": net.hidden_norm,
        "midlayer.post_attention_layernorm.weight": net.mlp_norm,
        "norm.weight": net.final_norm,
    }


def _config(net: Eagle3Net, target: Eagle3Target) -> dict[str, Any]:
    config: dict[str, Any] = {
        key: target.config[key] for key in _SHARED_KEYS if key in target.config
    }
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "draft_vocab_size": net.shape.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    layers, count = target.layers, target.num_layers
    if layers != (2, count // 2, count - 3):
        # vLLM looks here first, and counts as we do.
        config[_LAYER_IDS] = list(layers)
        # SGLang looks only here; an id names the layer that ends in the state, not the one that
        # the state enters.
        config["eagle_config"] = {
            _LAYER_IDS: [layer - 1 for layer in layers],
            "use_aux_hidden_state": True,
        }
    return config
