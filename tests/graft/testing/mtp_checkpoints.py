"""Writes tiny random MTP checkpoints with the names and keys of published layouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors.numpy import save_file

from graft.testing.checkpoints import Random, head_dim, shape_of, target_config, write_config

MTP_LAYOUTS = ("nextn", "nextn alone", "mimo", "mimo_v2", "step3p5")

_Tensors = dict[str, NDArray[Any]]


def write_mtp(
    folder: Path, target: Path, layout: str = "nextn", *, steps: int = 1, seed: int = 1
) -> Path:
    """MTP layers. layout: one of MTP_LAYOUTS; "nextn" lies in a folder with a target's layers."""
    config, random = target_config(target), Random(seed)
    write = {"mimo": _mimo, "mimo_v2": _mimo_v2, "step3p5": _step3p5}.get(layout, _nextn)
    tensors, keys = write(random, config, steps, alone=layout == "nextn alone")
    shape = {**shape_of(config), "vocab_size": config["vocab_size"]}
    write_config(folder, {**shape, "num_hidden_layers": config["num_hidden_layers"], **keys})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _nextn(
    random: Random, config: Mapping[str, Any], steps: int, alone: bool
) -> tuple[_Tensors, dict[str, Any]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    first = 0 if alone else config["num_hidden_layers"]
    tensors: _Tensors = {}
    if not alone:
        tensors["model.embed_tokens.weight"] = random.weight(vocab, hidden)
        tensors["model.norm.weight"] = random.gain(hidden)
        tensors["lm_head.weight"] = random.weight(vocab, hidden)
        tensors["model.layers.0.mlp.experts.0.up_proj.weight"] = random.weight(2, hidden)
    for number in range(steps):
        name = f"model.layers.{first + number}"
        tensors |= _step(random, name, config)
        tensors[f"{name}.shared_head.norm.weight"] = random.gain(hidden)
        tensors[f"{name}.shared_head.head.weight"] = random.weight(vocab, hidden)
        tensors[f"{name}.embed_tokens.weight"] = random.weight(vocab, hidden)
    name = "DeepseekV3ForCausalLMNextN" if alone else "DeepseekV3ForCausalLM"
    keys = {
        "architectures": [name],
        "model_type": "deepseek_v3",
        "n_routed_experts": 4,
        "num_nextn_predict_layers": steps,
    }
    return tensors, keys | ({"num_hidden_layers": 1} if alone else {})


def _mimo(
    random: Random, config: Mapping[str, Any], steps: int, alone: bool
) -> tuple[_Tensors, dict[str, Any]]:
    hidden = config["hidden_size"]
    names = ("token_layernorm", "hidden_layernorm", "input_proj")
    tensors: _Tensors = {}
    for number in range(steps):
        name = f"model.mtp_layers.{number}"
        tensors |= _step(random, name, config, names=names, biases=True)
        tensors[f"{name}.final_layernorm.weight"] = random.gain(hidden)
    keys = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    return tensors, {**keys, "num_nextn_predict_layers": steps, "attention_bias": True}


def _mimo_v2(
    random: Random, config: Mapping[str, Any], steps: int, alone: bool
) -> tuple[_Tensors, dict[str, Any]]:
    """Sliding attention with sinks; values narrower than keys, a part of each head rotating."""
    own = {
        "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 3,
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
    }
    tensors: _Tensors = {}
    for number in range(steps):
        name = f"model.mtp.layers.{number}"
        made = _step(random, name, config, heads=(6, 3, 24, 16))
        norm = made.pop(f"{name}.post_attention_layernorm.weight")
        tensors |= made
        tensors[f"{name}.pre_mlp_layernorm.weight"] = norm
        tensors[f"{name}.final_layernorm.weight"] = random.gain(config["hidden_size"])
        tensors[f"{name}.self_attn.attention_sink_bias"] = random.bias(6) * 10
    keys = {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "num_key_value_heads": 1,
        "swa_rope_theta": 5000.0,
        "layernorm_epsilon": 1e-6,
        "sliding_window": 8,
        "partial_rotary_factor": 0.5,
        "attention_value_scale": 0.707,
        "n_routed_experts": 8,
        "hybrid_layer_pattern": [0, 1],
    }
    return tensors, {**keys, **own}


def _step3p5(
    random: Random, config: Mapping[str, Any], steps: int, alone: bool
) -> tuple[_Tensors, dict[str, Any]]:
    """Norms around zero, gated heads, a head of each step; lists with an entry a layer."""
    hidden, vocab, layers = (
        config["hidden_size"],
        config["vocab_size"],
        config["num_hidden_layers"],
    )
    tensors: _Tensors = {}
    for number in range(steps):
        name = f"model.layers.{layers + number}"
        made = _step(random, name, config, heads=(6, 2, 16, 16), head_norms=True)
        made[f"{name}.transformer.shared_head.norm.weight"] = random.gain(hidden)
        for one in made:
            if "norm" in one:
                made[one] = made[one] - 1
        made[f"{name}.transformer.shared_head.output.weight"] = random.weight(vocab, hidden, 0.4)
        made[f"{name}.self_attn.g_proj.weight"] = random.weight(6, hidden)
        tensors |= made
    every = layers + steps
    return tensors, {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        "num_attention_groups": 4,
        "num_nextn_predict_layers": steps,
        "layer_types": ["full_attention"] * layers + ["sliding_attention"] * steps,
        "sliding_window": 9,
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 6,
            "num_attention_groups": 2,
            "head_dim": 16,
        },
        "rope_theta": [5000000.0] * layers + [10000.0] * steps,
        "partial_rotary_factors": [0.5] * layers + [1.0] * (every - layers),
    }


def _step(
    random: Random,
    name: str,
    config: Mapping[str, Any],
    *,
    heads: tuple[int, int, int, int] | None = None,
    names: tuple[str, str, str] = ("enorm", "hnorm", "eh_proj"),
    biases: bool = False,
    head_norms: bool = False,
) -> _Tensors:
    """heads: queries, groups, width of keys, width of values; None takes the target's."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    plain = (config["num_attention_heads"], config["num_key_value_heads"])
    count, groups, dim, value_dim = heads or (*plain, head_dim(config), head_dim(config))
    tensors: _Tensors = {
        f"{name}.{names[0]}.weight": random.gain(hidden),
        f"{name}.{names[1]}.weight": random.gain(hidden),
        f"{name}.{names[2]}.weight": random.weight(hidden, 2 * hidden, 0.1),
        f"{name}.input_layernorm.weight": random.gain(hidden),
        f"{name}.post_attention_layernorm.weight": random.gain(hidden),
        f"{name}.self_attn.o_proj.weight": random.weight(hidden, count * value_dim),
        f"{name}.mlp.gate_proj.weight": random.weight(wide, hidden),
        f"{name}.mlp.up_proj.weight": random.weight(wide, hidden),
        f"{name}.mlp.down_proj.weight": random.weight(hidden, wide),
    }
    for part, rows in (("q", count * dim), ("k", groups * dim), ("v", groups * value_dim)):
        tensors[f"{name}.self_attn.{part}_proj.weight"] = random.weight(rows, hidden)
        if biases:
            tensors[f"{name}.self_attn.{part}_proj.bias"] = random.bias(rows)
        if head_norms and part != "v":
            tensors[f"{name}.self_attn.{part}_norm.weight"] = random.gain(dim)
    return tensors
