"""Writes tiny random models as complete Hugging Face folders. Knows files, runs no model.

Token ids are bytes: id b is byte b for b < 256, then the three specials of `SPECIALS`. Ids past
those have no token and a logit of zero. Rows of printable ASCII speak louder than the rest, so
that greedy text is mostly readable and still holds halves of characters now and then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ENDOFTEXT, IM_START, IM_END = 256, 257, 258
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n'"
    " + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Family:
    """What one family adds to the common Llama shape."""

    architecture: str
    model_type: str
    biases: bool = False
    head_norms: bool = False
    tied: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


_LLAMA = ("LlamaForCausalLM", "llama")
FAMILIES: Mapping[str, Family] = {
    "llama": Family(*_LLAMA),
    "mistral": Family("MistralForCausalLM", "mistral", config={"sliding_window": 48}),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", biases=True),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", head_norms=True, config={"head_dim": 32}),
    "smollm": Family(*_LLAMA, tied=True),
    "llama-linear": Family(*_LLAMA, config={"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama3": Family(
        *_LLAMA,
        config={
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "yarn": Family(
        "Qwen2ForCausalLM",
        "qwen2",
        biases=True,
        config={
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
}


def write_tiny_model(
    folder: Path,
    family: str = "llama",
    vocab_size: int = 320,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 512,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Writes config, weights, tokenizer and generation config to `folder` and returns it.

    Equal arguments give equal files. `overrides` replaces keys of config.json; the weights
    follow the sizes that the result states.
    """
    if vocab_size < 256 + len(SPECIALS):
        raise ValueError(f"vocab_size must hold 256 bytes and the specials, got {vocab_size}")
    kind = FAMILIES[family]
    config: dict[str, Any] = {
        "architectures": [kind.architecture],
        "model_type": kind.model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": kind.tied,
        "torch_dtype": "float32",
        "bos_token_id": ENDOFTEXT,
        "eos_token_id": IM_END,
        **kind.config,
        **(overrides or {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": ENDOFTEXT, "eos_token_id": [IM_END, ENDOFTEXT]},
    )
    save_file(_weights(kind, config, seed), folder / "model.safetensors", {"format": "pt"})
    write_byte_tokenizer(folder)
    return folder


def write_byte_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json whose ids are bytes, with a ChatML template."""
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIALS[0],
            "eos_token": SPECIALS[2],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _weights(kind: Family, config: Mapping[str, Any], seed: int) -> dict[str, _Array]:
    random = np.random.default_rng(seed)

    def normal(*shape: int, std: float = 0.12) -> _Array:
        return (random.standard_normal(shape) * std).astype(np.float32)

    def gain(width: int) -> _Array:
        return (1.0 + random.standard_normal(width) * 0.1).astype(np.float32)

    hidden, wide = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    widths = {
        "q": config["num_attention_heads"] * head_dim,
        "k": config["num_key_value_heads"] * head_dim,
        "v": config["num_key_value_heads"] * head_dim,
    }
    loudness = _loudness(config["vocab_size"])
    embedding = normal(config["vocab_size"], hidden, std=0.4) * loudness
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": gain(hidden)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, width in widths.items():
            weights[f"{name}.self_attn.{part}_proj.weight"] = normal(width, hidden, std=0.2)
            if kind.biases:
                weights[f"{name}.self_attn.{part}_proj.bias"] = normal(width)
            if kind.head_norms and part != "v":
                weights[f"{name}.self_attn.{part}_norm.weight"] = gain(head_dim)
        weights[f"{name}.self_attn.o_proj.weight"] = normal(hidden, widths["q"], std=0.2)
        weights[f"{name}.mlp.gate_proj.weight"] = normal(wide, hidden, std=0.2)
        weights[f"{name}.mlp.up_proj.weight"] = normal(wide, hidden, std=0.2)
        weights[f"{name}.mlp.down_proj.weight"] = normal(hidden, wide, std=0.2)
        weights[f"{name}.input_layernorm.weight"] = gain(hidden)
        weights[f"{name}.post_attention_layernorm.weight"] = gain(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden, std=0.4) * loudness
    return weights


def _loudness(vocab_size: int) -> _Array:
    """[vocab_size, 1]: 1 for printable ASCII, less for other bytes and specials, 0 past them."""
    loudness = np.zeros((vocab_size, 1), dtype=np.float32)
    loudness[: 256 + len(SPECIALS)] = 0.6
    loudness[32:127] = 1.0
    return loudness


def _byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
