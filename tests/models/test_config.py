"""What config.json may say: defaults of each family, both rope spellings, and clear refusals."""

from __future__ import annotations

from typing import Any

import pytest

from graft.common.errors import GraftError, ModelNotFound, Unsupported
from graft.models.config import RopeConfig, RopeKind, decoder_config


def config(**changed: Any) -> dict[str, Any]:
    base = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    return {key: value for key, value in {**base, **changed}.items() if value is not ...}


def test_llama_takes_its_defaults() -> None:
    found = decoder_config(config(num_key_value_heads=...))
    assert (found.num_kv_heads, found.head_dim, found.rms_norm_eps) == (4, 16, 1e-6)
    assert found.rope == RopeConfig(10000.0)
    assert found.windows == (0, 0, 0, 0)
    assert not (found.qkv_bias or found.output_bias or found.mlp_bias or found.head_norms)
    assert found.context_length == 512


def test_a_missing_architecture_is_told_by_model_type() -> None:
    found = decoder_config(config(architectures=..., model_type="qwen3"))
    assert found.architecture == "Qwen3ForCausalLM"
    assert (found.head_norms, found.head_dim) == (True, 128)


def test_biases_follow_the_family() -> None:
    llama = decoder_config(config(attention_bias=True, mlp_bias=True))
    qwen2 = decoder_config(config(architectures=["Qwen2ForCausalLM"]))
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias) == (True, False, False)


@pytest.mark.parametrize(
    ("said", "windows"),
    [
        ({}, (4096,) * 4),
        ({"sliding_window": None}, (0,) * 4),
        ({"sliding_window": 32}, (32,) * 4),
    ],
)
def test_mistral_slides_in_all_layers(said: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert decoder_config(config(architectures=["MistralForCausalLM"], **said)).windows == windows


@pytest.mark.parametrize(
    ("said", "windows"),
    [
        ({"sliding_window": 32}, (0, 0, 0, 0)),
        ({"sliding_window": 32, "use_sliding_window": True}, (0, 0, 0, 0)),
        (
            {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 3},
            (0, 0, 0, 32),
        ),
        (
            {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0},
            (32, 32, 32, 32),
        ),
        (
            {
                "sliding_window": 32,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (32, 0, 32, 0),
        ),
    ],
)
def test_qwen_slides_where_it_says(said: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert decoder_config(config(architectures=["Qwen2ForCausalLM"], **said)).windows == windows


def test_both_spellings_of_rope_are_the_same() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    old = decoder_config(config(rope_theta=5e5, rope_scaling=scaling))
    new = decoder_config(config(rope_parameters={"rope_theta": 5e5, **scaling}))
    assert old == new
    assert old.rope == RopeConfig(5e5, RopeKind.LLAMA3, 8.0, 128, 1.0, 4.0)


def test_yarn_stretches_the_context_and_dynamic_does_not() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    dynamic = {"type": "dynamic", "factor": 4.0}
    assert decoder_config(config(rope_scaling=yarn)).context_length == 2048
    assert decoder_config(config(rope_scaling=dynamic)).context_length == 512
    assert decoder_config(config(rope_scaling=dynamic)).rope.kind is RopeKind.DEFAULT


@pytest.mark.parametrize(
    ("changed", "kind", "sentence"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            Unsupported,
            "config.json names MixtralForCausalLM, expected one of LlamaForCausalLM",
        ),
        ({"architectures": ...}, Unsupported, "config.json names no architecture"),
        ({"quantization_config": {"quant_method": "gptq"}}, Unsupported, "quantised \\(gptq\\)"),
        ({"num_local_experts": 8}, Unsupported, "num_local_experts 8: experts are not offered"),
        ({"hidden_act": "gelu"}, Unsupported, "hidden_act gelu is not offered, expected silu"),
        (
            {"layer_types": ["linear_attention"] * 4},
            Unsupported,
            "layer_types holds linear_attention",
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, Unsupported, "rope_type longrope"),
        ({"rope_scaling": {"type": "mrope"}}, Unsupported, "rope_type mrope"),
        ({"rope_scaling": {"type": "linear"}}, ModelNotFound, "rope factor is None"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            Unsupported,
            "by layer type",
        ),
        ({"partial_rotary_factor": 0.5}, Unsupported, "partial_rotary_factor"),
        ({"head_dim": 15}, Unsupported, "head_dim 15 is odd"),
        ({"hidden_size": ...}, ModelNotFound, "config.json: hidden_size is missing"),
        ({"num_hidden_layers": "4"}, ModelNotFound, "num_hidden_layers is '4'"),
        ({"num_key_value_heads": 3}, ModelNotFound, "4 is no multiple of num_key_value_heads 3"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": -1},
            ModelNotFound,
            "sliding_window is -1",
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            ModelNotFound,
            "layer_types has 1 entries, expected 4",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(
    changed: dict[str, Any], kind: type[GraftError], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        decoder_config(config(**changed))
