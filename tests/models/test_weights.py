"""Weights from every kind of file, and one clear sentence for each way they can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graft.common.errors import InvalidArgument, ModelNotFound, Unsupported
from graft.common.model_files import ModelFiles, resolve
from graft.kernels.ops import Ops, select
from graft.models.load import Target, estimate_memory, load_target, read_config
from graft.models.storage import storage_of
from graft.testing.gguf_models import write_gguf
from graft.testing.models import write_tiny_model
from graft.testing.steps import Layout, Piece

TOKENS = list(range(60, 100))
F32 = gguf.GGMLQuantizationType.F32


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select("cpu", threads=1, prefer="torch")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def files_of(folder: Path) -> ModelFiles:
    return ModelFiles(folder, "tiny")


def logits(target: Target) -> Tensor:
    config = target.config
    layout = Layout(config.num_layers, config.num_kv_heads, config.head_dim, 1, 64)
    tokens, rows = layout.rows([Piece(0, 0, TOKENS)])
    return target.decoder.logits(target.decoder.forward(tokens, rows, layout.kv, None))


def change(folder: Path, **changed: Tensor | None) -> None:
    path = folder / "model.safetensors"
    weights: dict[str, Any] = {**load_file(path), **changed}
    save_file({name: one for name, one in weights.items() if one is not None}, path)


def test_a_target_says_what_a_session_must_know(folder: Path, ops: Ops) -> None:
    heard: list[float] = []
    target = load_target(files_of(folder), ops, lambda what, share: heard.append(share))
    assert target.eos_token_ids == (258, 256)
    assert (target.vocab_size, target.context_length, target.name) == (320, 512, "tiny")
    assert len(target.tokenizer_digest) == 64
    assert heard == sorted(heard) and heard[-1] == 1.0


def test_the_context_can_be_shortened_and_not_stretched(folder: Path, ops: Ops) -> None:
    target = load_target(files_of(folder), ops, context_length=100)
    assert target.context_length == 100
    assert target.decoder.weights.layers[0].rope.cos.shape == (100, 8)
    with pytest.raises(InvalidArgument, match="context_length 513 is over the 512 of model tiny"):
        load_target(files_of(folder), ops, context_length=513)


def test_shards_are_read_as_one(folder: Path, ops: Ops) -> None:
    expected = logits(load_target(files_of(folder), ops))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = [dict(list(weights.items())[part::2]) for part in range(2)]
    placed = {}
    for number, half in enumerate(halves):
        name = f"model-0000{number + 1}-of-00002.safetensors"
        save_file(half, folder / name)
        placed.update(dict.fromkeys(half, name))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    torch.testing.assert_close(logits(load_target(files_of(folder), ops)), expected)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"has no model-00002-of-00002\.safetensors, which"):
        load_target(files_of(folder), ops)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_widened(folder: Path, ops: Ops, dtype: torch.dtype) -> None:
    path = folder / "model.safetensors"
    narrow = {name: one.to(dtype) for name, one in load_file(path).items()}
    save_file({name: one.float() for name, one in narrow.items()}, path)
    expected = logits(load_target(files_of(folder), ops))
    save_file(narrow, path)
    assert torch.equal(logits(load_target(files_of(folder), ops)), expected)


@pytest.mark.parametrize("family", ["llama", "smollm", "qwen2", "qwen3"])
def test_a_gguf_file_has_the_logits_of_its_safetensors(
    tmp_path: Path, ops: Ops, family: str
) -> None:
    folder = write_tiny_model(tmp_path / "folder", family)
    path = write_gguf(folder, tmp_path / "model.gguf", F32)
    files = resolve(str(path), weights=True, cache=tmp_path / "cache")
    expected = logits(load_target(files_of(folder), ops))
    target = load_target(files, ops)
    assert files.gguf == path and target.eos_token_ids == (258,)
    torch.testing.assert_close(logits(target), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_1", "Q4_0", "Q5_1"])
def test_quantised_blocks_are_dequantised(tmp_path: Path, ops: Ops, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    folder = write_tiny_model(tmp_path / "folder")
    path = write_gguf(folder, tmp_path / "model.gguf", kind)
    weights = load_file(folder / "model.safetensors")
    for tensor, weight in weights.items():
        if weight.ndim == 2:
            blocks = gguf.quants.quantize(weight.numpy(), kind)
            weights[tensor] = torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy())
    save_file(weights, folder / "model.safetensors")
    expected = logits(load_target(files_of(folder), ops))
    found = logits(load_target(resolve(str(path), weights=True, cache=tmp_path / "c"), ops))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_tied_model_may_carry_a_copy_of_its_head(tmp_path: Path, ops: Ops) -> None:
    folder = write_tiny_model(tmp_path, "smollm")
    expected = logits(load_target(files_of(folder), ops))
    change(folder, **{"lm_head.weight": torch.zeros(320, 64)})
    assert torch.equal(logits(load_target(files_of(folder), ops)), expected)


def test_computed_buffers_of_old_checkpoints_are_passed_over(folder: Path, ops: Ops) -> None:
    change(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    load_target(files_of(folder), ops)


def test_missing_tensors_are_named(folder: Path, ops: Ops) -> None:
    change(folder, **{"model.norm.weight": None})
    with pytest.raises(ModelNotFound, match=r"^model tiny lacks tensor model\.norm\.weight$"):
        load_target(files_of(folder), ops)
    change(folder, **{f"model.layers.1.mlp.{part}_proj.weight": None for part in ("up", "down")})
    with pytest.raises(ModelNotFound, match=r"lacks tensors model.layers.1.mlp.down_proj.weight,"):
        load_target(files_of(folder), ops)


def test_tensors_left_over_are_named(folder: Path, ops: Ops) -> None:
    change(folder, **{"model.layers.0.self_attn.q_norm.weight": torch.ones(16)})
    with pytest.raises(ModelNotFound, match=r"q_norm\.weight left over"):
        load_target(files_of(folder), ops)


def test_a_tensor_of_another_shape_is_named(folder: Path, ops: Ops) -> None:
    change(folder, **{"model.norm.weight": torch.ones(63)})
    sentence = r"model.norm.weight has the shape \[63\], expected \[64\] from config.json"
    with pytest.raises(ModelNotFound, match=sentence):
        load_target(files_of(folder), ops)


def test_integer_weights_are_refused(folder: Path, ops: Ops) -> None:
    change(folder, **{"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    with pytest.raises(
        Unsupported, match=r"model\.norm\.weight is stored as I8, expected one of F32"
    ):
        load_target(files_of(folder), ops)


@pytest.mark.parametrize("kept", [0, 5, 400, -1])
def test_a_safetensors_file_cut_short_is_named(folder: Path, ops: Ops, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelNotFound, match=r"model\.safetensors is damaged or cut short"):
        load_target(files_of(folder), ops)


def test_no_weights_are_one_sentence(folder: Path, ops: Ops) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"has no model\.safetensors$"):
        load_target(files_of(folder), ops)


def test_an_end_of_text_past_the_vocabulary_is_refused(folder: Path, ops: Ops) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 320}')
    with pytest.raises(ModelNotFound, match="eos_token_id 320 is no id below 320"):
        load_target(files_of(folder), ops)


@pytest.mark.parametrize("family", ["llama", "smollm", "qwen2", "qwen3"])
def test_memory_is_known_before_loading(tmp_path: Path, ops: Ops, family: str) -> None:
    files = files_of(write_tiny_model(tmp_path, family))
    config = read_config(files)
    estimate = estimate_memory(config, storage_of(files, config), ops)
    weights = load_target(files, ops).decoder.weights
    held = weights.head.nbytes + 4 * weights.final_norm.numel()
    held += sum(4 * table.numel() for table in (weights.layers[0].rope.cos,) * 2)
    if isinstance(weights.embedding, Tensor):
        held += 4 * weights.embedding.numel()
    for layer in weights.layers:
        norms = (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
        held += sum(4 * norm.numel() for norm in norms if norm is not None)
        held += layer.qkv.nbytes + layer.output.nbytes + layer.gate_up.nbytes + layer.down.nbytes
    assert estimate.weight_bytes == held
    assert estimate.kv_bytes_per_token == 2 * 2 * 2 * (32 if family == "qwen3" else 16) * 4
