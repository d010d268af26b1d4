"""Reads a Hugging Face config.json of the Llama family. Knows no weights and no device.

What the decoder cannot run exactly is refused here, with a sentence that names the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from graft.common.errors import ModelNotFound, Unsupported

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
NO_WINDOW = 0


class RopeKind(Enum):
    """How the frequencies of rotary positions are scaled."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    FACTORS = "factors"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: the base and, by kind, the numbers its scaling needs.

    factor: LINEAR, LLAMA3, YARN. original_context: LLAMA3, YARN. low and high: the frequency
    factors of LLAMA3, or beta_slow and beta_fast of YARN. attention_factor scales cos and sin.
    factors: FACTORS, one divisor a frequency, as llama.cpp stores them.
    """

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    original_context: int = 0
    low: float = 1.0
    high: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of one decoder; everything that its forward pass depends on but the weights.

    windows: one a layer, the number of keys a row sees with itself; 0 sees everything.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_length: int
    rope: RopeConfig
    windows: tuple[int, ...]
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False

    @property
    def query_width(self) -> int:
        """Width of all query heads side by side."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key (or value) heads side by side."""
        return self.num_kv_heads * self.head_dim


_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ARCHITECTURES = tuple(_BY_MODEL_TYPE.values())


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes.

    Raises:
        Unsupported: the model needs something this decoder does not do exactly.
        ModelNotFound: a key is missing or holds what it cannot hold.
    """
    architecture = _architecture(config)
    _refuse_what_is_not_ours(config, architecture)
    hidden, num_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    num_layers = _count(config, "num_hidden_layers")
    num_kv_heads = _count(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelNotFound(
            f"config.json: num_attention_heads {num_heads} is no multiple of"
            f" num_key_value_heads {num_kv_heads}"
        )
    head_dim = _count(config, "head_dim", _default_head_dim(architecture, hidden, num_heads))
    if head_dim % 2:
        raise Unsupported(f"config.json: head_dim {head_dim} is odd, expected an even number")
    max_positions = _count(config, "max_position_embeddings")
    rope = _rope(config, max_positions)
    attention_bias = bool(config.get("attention_bias", False))
    takes_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and attention_bias
    return DecoderConfig(
        architecture=architecture,
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        context_length=_context_length(max_positions, rope),
        rope=rope,
        windows=_windows(config, architecture, num_layers),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=takes_bias or architecture == "Qwen2ForCausalLM",
        output_bias=takes_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
        head_norms=architecture == "Qwen3ForCausalLM",
    )


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or [_BY_MODEL_TYPE.get(str(config.get("model_type")))]
    architecture = named[0] if isinstance(named, list) else named
    if architecture not in _ARCHITECTURES:
        shown = architecture or config.get("model_type") or "no architecture"
        raise Unsupported(f"config.json names {shown}, expected one of {', '.join(_ARCHITECTURES)}")
    return str(architecture)


def _refuse_what_is_not_ours(config: Mapping[str, Any], architecture: str) -> None:
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "some") if isinstance(quantised, dict) else "some"
        raise Unsupported(
            f"config.json: the weights are quantised ({method}),"
            " expected fp32, fp16 or bf16 safetensors, or GGUF"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise Unsupported(f"config.json: hidden_act {activation} is not offered, expected silu")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key):
            raise Unsupported(f"config.json: {key} {config[key]}: experts are not offered")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise Unsupported("config.json: partial_rotary_factor is not offered, expected 1")
    known = {FULL_ATTENTION, SLIDING_ATTENTION}
    for kind in config.get("layer_types") or ():
        if kind not in known:
            raise Unsupported(
                f"config.json: layer_types holds {kind}, expected {' or '.join(sorted(known))}"
            )
    if config.get("attention_bias") and architecture == "MistralForCausalLM":
        raise Unsupported("config.json: attention_bias is not offered for MistralForCausalLM")


def _windows(config: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int, ...]:
    """One window a layer, by each family's own rule."""
    layer_types = config.get("layer_types")
    if architecture in ("LlamaForCausalLM", "MistralForCausalLM"):
        # Both families run all layers alike, whatever layer_types would ask for.
        if layer_types and len(set(layer_types)) > 1:
            raise Unsupported(f"config.json: mixed layer_types are not offered for {architecture}")
        if architecture == "LlamaForCausalLM":
            if config.get("sliding_window") and layer_types and SLIDING_ATTENTION in layer_types:
                raise Unsupported("config.json: sliding_window is not offered for LlamaForCausalLM")
            return (NO_WINDOW,) * num_layers
        window = config.get("sliding_window", 4096)
        return (_window(window),) * num_layers
    if not config.get("use_sliding_window", False):
        if layer_types and SLIDING_ATTENTION in layer_types:
            raise Unsupported(
                "config.json: layer_types asks for sliding_attention, use_sliding_window is off"
            )
        return (NO_WINDOW,) * num_layers
    window = _window(config.get("sliding_window", 4096))
    if layer_types is None:
        full = _count(config, "max_window_layers", 28, least=0)
        return tuple(window if layer >= full else NO_WINDOW for layer in range(num_layers))
    if len(layer_types) != num_layers:
        raise ModelNotFound(
            f"config.json: layer_types has {len(layer_types)} entries, expected {num_layers}"
        )
    return tuple(window if kind == SLIDING_ATTENTION else NO_WINDOW for kind in layer_types)


def _window(value: Any) -> int:
    if value is None:
        return NO_WINDOW
    if not isinstance(value, int) or value < 1:
        raise ModelNotFound(f"config.json: sliding_window is {value!r}, expected a positive number")
    return value


def _rope(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Both spellings: rope_parameters, or rope_theta beside rope_scaling."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelNotFound(f"config.json: rope_scaling is {scaling!r}, expected an object")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise Unsupported("config.json: rope_parameters by layer type are not offered")
    theta = _number(scaling, "rope_theta", _number(config, "rope_theta", 10000.0))
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise Unsupported("config.json: partial_rotary_factor is not offered, expected 1")
    if kind == "dynamic":
        # Up to max_position_embeddings dynamic scaling is no scaling, and we serve no further.
        return RopeConfig(theta)
    if kind not in [known.value for known in RopeKind]:
        raise Unsupported(
            f"config.json: rope_type {kind} is not offered,"
            " expected default, linear, dynamic, llama3 or yarn"
        )
    if kind == RopeKind.DEFAULT.value:
        return RopeConfig(theta)
    if kind == RopeKind.FACTORS.value:
        return RopeConfig(theta, RopeKind.FACTORS, factors=tuple(scaling["factors"]))
    named = "original_max_position_embeddings"
    original = int(config.get(named) or scaling.get(named) or max_positions)
    factor = scaling.get("factor") or (max_positions / original if kind == "yarn" else None)
    if not isinstance(factor, int | float) or factor <= 0:
        raise ModelNotFound(f"config.json: rope factor is {factor!r}, expected a positive number")
    if kind == RopeKind.LINEAR.value:
        return RopeConfig(theta, RopeKind.LINEAR, factor=float(factor))
    if kind == RopeKind.LLAMA3.value:
        low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
        return RopeConfig(theta, RopeKind.LLAMA3, float(factor), original, low, high)
    attention_factor = scaling.get("attention_factor")
    return RopeConfig(
        theta,
        RopeKind.YARN,
        factor=float(factor),
        original_context=original,
        low=float(scaling.get("beta_slow") or 1),
        high=float(scaling.get("beta_fast") or 32),
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=float(scaling.get("mscale") or 0),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0),
        truncate=bool(scaling.get("truncate", True)),
    )


def _context_length(max_positions: int, rope: RopeConfig) -> int:
    """yarn may stretch the context past max_position_embeddings; other kinds state it there."""
    if rope.kind is RopeKind.YARN:
        return max(max_positions, int(rope.original_context * rope.factor))
    return max_positions


def _default_head_dim(architecture: str, hidden: int, num_heads: int) -> int:
    return 128 if architecture == "Qwen3ForCausalLM" else hidden // num_heads


def _count(config: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelNotFound(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ModelNotFound(f"config.json: {key} is {value!r}, expected a number from {least} on")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelNotFound(f"config.json: {key} is {value!r}, expected a positive number")
    return float(value)
