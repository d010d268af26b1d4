"""Writes a tiny Hugging Face folder again as one GGUF file, the way llama.cpp's converter does.

Written apart from the reader it tests: it knows llama.cpp's names and its order of rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

_Array = NDArray[np.float32]

_NAMES = (
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers.", "blk."),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("input_layernorm", "attn_norm"),
    ("mlp.", "ffn_"),
    ("_proj", ""),
)


def write_gguf(
    folder: Path,
    path: Path,
    block_type: gguf.GGMLQuantizationType,
    split: str = "gpt-2",
    others: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Writes matrices as `block_type` and vectors as F32 to `path`, and returns it.

    others: another type for matrices whose name in the file holds the key.
    """
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    _add_tokenizer(writer, folder, split)
    for name, weight in load_file(folder / "model.safetensors").items():
        stored = _reordered(weight, name, config) if family == "llama" else weight
        shown = name
        for theirs, ours in _NAMES:
            shown = shown.replace(theirs, ours)
        kind = block_type if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        for part, other in (others or {}).items():
            kind = other if part in shown else kind
        writer.add_tensor(shown, gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, split: str) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    special = {added["content"]: added["id"] for added in content["added_tokens"]}
    ids = {**content["model"]["vocab"], **special}
    # A file without merges cannot be written; this one adds a token of two bytes.
    tokens = [*sorted(ids, key=ids.__getitem__), "Ġt"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(special["<|im_end|>"])
    writer.add_chat_template("{{ messages }}")


def _reordered(weight: _Array, name: str, config: dict[str, int]) -> _Array:
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    for part, count in heads.items():
        if f"{part}_proj" in name:
            halves = weight.reshape(count, 2, len(weight) // count // 2, *weight.shape[1:])
            return halves.swapaxes(1, 2).reshape(weight.shape)
    return weight
