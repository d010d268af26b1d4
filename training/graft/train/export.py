"""Writes an EAGLE-3 head as SpecForge and SGLang publish it, in bfloat16. Knows no training."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from graft.train.eagle3 import Eagle3Net

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


def _weights(net: Eagle3Net) -> dict[str, Tensor]:
    shape = net.shape
    q, k, v = net.qkv.split((shape.query_width, shape.kv_width, shape.kv_width))
    gate, up = net.gate_up.chunk(2)
    return {
        "fc.weight": net.fc * net.state_scale,
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
        "lm_head.weight": net.head,
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
        # There an id names the layer that ends in the state, not the one that the state enters.
        ids = [layer - 1 for layer in layers]
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": ids,
            "use_aux_hidden_state": True,
        }
    return config
