"""Decoder layers of draft checkpoints: the common tensors of a layer, its odd ones left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graft.draft.checkpoints.tensors import Tensors
from graft.kernels.ops import LayerSpec, Linear, Ops, RopeTable
from graft.models.config import DecoderConfig, decoder_config
from graft.models.rope import rope_table

_FAMILIES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def draft_decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The shape of a drafter's layers; its architecture's own name says nothing of them.

    Raises:
        Unsupported, ModelNotFound: as for any decoder.
    """
    family = _FAMILIES.get(str(config.get("model_type")), "LlamaForCausalLM")
    layer_types = {}
    if family == "LlamaForCausalLM":
        layer_types = {"layer_types": None}
    return decoder_config({**config, "architectures": [family], **layer_types})


def make_rope(config: DecoderConfig, ops: Ops, context_length: int) -> RopeTable:
    """Rotary positions for `context_length` slots."""
    table = rope_table(config.rope, config.head_dim, context_length)
    return RopeTable(cos=table.cos.to(ops.device), sin=table.sin.to(ops.device))


@dataclass(frozen=True, slots=True, eq=False)
class LayerReader:
    """Reads layers of one checkpoint into the device's layout."""

    tensors: Tensors
    config: DecoderConfig
    rope: RopeTable
    ops: Ops

    def norm(self, name: str, width: int = 0) -> Tensor:
        """[width], the hidden size by default."""
        weight = self.tensors.weight(name, width or self.config.hidden_size)
        return weight.to(self.ops.device)

    def linear(self, names: list[str], rows: list[int], columns: int) -> Linear:
        """Weights one below the other, with biases where the checkpoint has them."""
        tensors = self.tensors
        weights = [
            tensors.weight(name, height, columns) for name, height in zip(names, rows, strict=True)
        ]
        biases = [
            tensors.optional(name.removesuffix("weight") + "bias", height)
            for name, height in zip(names, rows, strict=True)
        ]
        return self.ops.pack(weights, biases)

    def layer(self, prefix: str, *, norm: str | None, number: int = 0, width: int = 0) -> LayerSpec:
        """One layer.

        norm: name of the tensor that norms the input of attention; None for a layer that has
            none, or norms its inputs itself.
        width: of the input of attention, the hidden size by default.
        """
        config, hidden = self.config, self.config.hidden_size
        attention = f"{prefix}.self_attn"
        queries, keys = config.query_width, config.kv_width
        head_norms = f"{attention}.q_norm.weight" in self.tensors
        q_norm, k_norm = (
            self.norm(f"{attention}.{part}_norm.weight", config.head_dim) if head_norms else None
            for part in "qk"
        )
        wide = config.intermediate_size
        return LayerSpec(
            attention_norm=torch.empty(0) if norm is None else self.norm(norm),
            qkv=self.linear(
                [f"{attention}.{part}_proj.weight" for part in "qkv"],
                [queries, keys, keys],
                width or hidden,
            ),
            q_norm=q_norm,
            k_norm=k_norm,
            output=self.linear([f"{attention}.o_proj.weight"], [hidden], queries),
            mlp_norm=self.norm(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self.linear(
                [f"{prefix}.mlp.gate_proj.weight", f"{prefix}.mlp.up_proj.weight"],
                [wide, wide],
                hidden,
            ),
            down=self.linear([f"{prefix}.mlp.down_proj.weight"], [hidden], wide),
            rope=self.rope,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            window=config.windows[number],
        )
