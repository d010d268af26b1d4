"""What a GGUF file says in Hugging Face words: config, tokenizer, tensor names and weights.

Knows the Llama family as llama.cpp stores it; knows no cache and no decoder. Sources: the GGUF
specification, and llama.cpp's converter for names and for the order of query and key rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from graft.common.errors import ModelNotFound, Unsupported
from graft.common.gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROPE_FACTORS = "rope_freqs.weight"

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def config_of(gguf: GgufFile) -> dict[str, Any]:
    """config.json for the model in the file.

    Raises:
        Unsupported: an architecture whose weights are not laid out as ours.
    """
    family = gguf.text("general.architecture")
    if family not in _ARCHITECTURES:
        raise Unsupported(
            f"{gguf.path} holds a {family or 'nameless'} model,"
            f" expected one of {', '.join(_ARCHITECTURES)}"
        )
    if gguf.count(f"{family}.expert_count", 0):
        raise Unsupported(f"{gguf.path} holds a mixture of experts, which is not offered")
    architecture, model_type = _ARCHITECTURES[family]
    heads = gguf.count(f"{family}.attention.head_count")
    hidden = gguf.count(f"{family}.embedding_length")
    head_dim = gguf.count(f"{family}.attention.key_length", hidden // heads)
    rotated = gguf.count(f"{family}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise Unsupported(f"{gguf.path} rotates {rotated} of {head_dim} entries, expected all")
    if "token_embd.weight" not in gguf.tensors:
        raise ModelNotFound(f"{gguf.path} has no tensor token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": gguf.count(f"{family}.feed_forward_length"),
        "num_hidden_layers": gguf.count(f"{family}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.count(f"{family}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": gguf.count(f"{family}.context_length"),
        "rms_norm_eps": _as_written(gguf.number(f"{family}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _as_written(gguf.number(f"{family}.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(gguf, family),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "float32",
    }
    for name in ("bos", "eos"):
        token = gguf.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None:
            config[f"{name}_token_id"] = token
    if family != "qwen2" and "blk.0.attn_q.bias" in gguf.tensors:
        config["attention_bias"] = True
    return config


def generation_config_of(gguf: GgufFile) -> dict[str, Any]:
    """generation_config.json: end of text and, where it is another token, end of turn."""
    found: dict[str, Any] = {}
    ends = [gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    kept = list(dict.fromkeys(end for end in ends if end is not None))
    if kept:
        found["eos_token_id"] = kept[0] if len(kept) == 1 else kept
    for name in ("bos", "padding"):
        token = gguf.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None:
            found[f"{'pad' if name == 'padding' else name}_token_id"] = token
    return found


def tokenizer_config_of(gguf: GgufFile) -> dict[str, Any]:
    """tokenizer_config.json: names of the special tokens and the chat template."""
    tokens = gguf.texts("tokenizer.ggml.tokens")
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.count(f"{gguf.text('general.architecture')}.context_length"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        token = gguf.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token, int) and token < len(tokens):
            found[f"{key}_token"] = tokens[token]
    template = gguf.text("tokenizer.chat_template")
    if template:
        found["chat_template"] = template
    return found


def tokenizer_of(gguf: GgufFile) -> Tokenizer:
    """The byte-level BPE tokenizer in the file.

    Raises:
        Unsupported: another kind of tokenizer, or an unknown way to split words.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    kind = gguf.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise Unsupported(
            f"{gguf.path} has a {kind or 'nameless'} tokenizer, expected gpt2;"
            " put the model's tokenizer.json and config.json beside it"
        )
    tokens = gguf.texts("tokenizer.ggml.tokens")
    merges = [merge.partition(" ") for merge in gguf.texts("tokenizer.ggml.merges")]
    split = gguf.text("tokenizer.ggml.pre", "default")
    try:
        words = models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(left, right) for left, _, right in merges],
            ignore_merges=split == "llama-bpe",
        )
    except Exception as error:  # the library raises nothing narrower
        raise ModelNotFound(f"{gguf.path} has a damaged tokenizer: {error}") from None
    tokenizer = Tokenizer(words)
    _split_words(tokenizer, split, gguf)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = gguf.metadata.get("tokenizer.ggml.token_type")
    marked = kinds if isinstance(kinds, list) else []
    for token, mark in zip(tokens, marked, strict=False):
        if mark == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif mark == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    if gguf.metadata.get("tokenizer.ggml.add_bos_token", split == "llama-bpe"):
        bos = gguf.count("tokenizer.ggml.bos_token_id")
        first = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, bos)]
        )
    return tokenizer


def hf_names(gguf: GgufFile) -> dict[str, str]:
    """Hugging Face tensor name -> name in the file, for every tensor that has one."""
    names = {}
    for stored in gguf.tensors:
        layer = _LAYER.fullmatch(stored)
        if stored in _OUTER_NAMES:
            names[_OUTER_NAMES[stored]] = stored
        elif layer and layer[2] in _LAYER_NAMES:
            names[f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"] = stored
        elif stored != ROPE_FACTORS:
            names[stored] = stored
    return names


def weight_of(gguf: GgufFile, stored: str) -> NDArray[np.float32]:
    """One tensor as float32, its rows in Hugging Face order."""
    tensor = gguf.tensors[stored]
    return _float32(gguf, stored)[row_order(gguf, stored)].reshape(tensor.shape)


def row_order(gguf: GgufFile, stored: str) -> NDArray[np.int64] | slice:
    """Which stored row is each Hugging Face row; valid for blocks and for float32 rows alike.

    llama.cpp keeps the two halves of a head interleaved in query and key rows of the llama
    architecture: stored row 2i is row i, stored row 2i + 1 is row i + head_dim / 2.
    """
    layer = _LAYER.fullmatch(stored)
    if gguf.text("general.architecture") != "llama" or layer is None:
        return slice(None)
    if layer[2] not in ("attn_q", "attn_k"):
        return slice(None)
    heads = gguf.count("llama.attention.head_count")
    if layer[2] == "attn_k":
        heads = gguf.count("llama.attention.head_count_kv", heads)
    rows = gguf.tensors[stored].shape[0]
    order: NDArray[np.int64] = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    return order.swapaxes(1, 2).reshape(-1)


def _float32(gguf: GgufFile, stored: str) -> NDArray[np.float32]:
    """[rows, width] (a vector: [width]) in the order of the file."""
    tensor, blocks = gguf.tensors[stored], gguf.blocks(stored)
    if tensor.type_name == "F32":
        values = blocks.view(np.float32)
    elif tensor.type_name in ("F16", "F64"):
        values = blocks.view(np.float16 if tensor.type_name == "F16" else np.float64)
    elif tensor.type_name == "BF16":
        values = (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = _dequantised(blocks, tensor.block_type)
    return values.astype(np.float32, copy=False).reshape(tensor.shape)


def _dequantised(blocks: NDArray[np.uint8], block_type: int) -> NDArray[Any]:
    try:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise ModelNotFound(
            "reading quantised GGUF weights needs the package gguf: pip install gguf"
        ) from None
    values: NDArray[Any] = dequantize(blocks, GGMLQuantizationType(block_type))
    return values


def _split_words(tokenizer: Tokenizer, split: str, gguf: GgufFile) -> None:
    from tokenizers import Regex, normalizers, pre_tokenizers

    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def by(pattern: str) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)

    if split in ("smollm", "codeshell"):
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, whole])
    elif split == "gpt-2":
        tokenizer.pre_tokenizer = whole
    elif split == "llama-bpe":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([by(_LLAMA3_SPLIT), bytes_only])
    elif split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([by(_QWEN2_SPLIT), bytes_only])
    else:
        raise Unsupported(
            f"{gguf.path} splits words the {split} way, expected smollm, gpt-2, llama-bpe or"
            " qwen2; put the model's tokenizer.json and config.json beside it"
        )


def _rope_scaling(gguf: GgufFile, family: str) -> Mapping[str, Any] | None:
    if ROPE_FACTORS in gguf.tensors:
        return {"rope_type": "factors", "factors": _float32(gguf, ROPE_FACTORS).tolist()}
    kind = gguf.text(f"{family}.rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": gguf.number(f"{family}.rope.scaling.factor"),
    }
    original = gguf.metadata.get(f"{family}.rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _as_written(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
