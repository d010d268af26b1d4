"""Weights held as the blocks of a GGUF file: close to float32, the same bits in every batch."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from graft.common.errors import Unsupported
from graft.common.model_files import ModelFiles
from graft.kernels.ops import Linear, Ops, select
from graft.models.load import Target, estimate_memory, load_target, read_config
from graft.models.storage import Precision, Storage, resolve_for, storage_of
from graft.testing.gguf_models import write_gguf
from graft.testing.models import write_tiny_model
from graft.testing.steps import Layout, Piece

Q4_1, Q8_0 = (gguf.GGMLQuantizationType[name] for name in ("Q4_1", "Q8_0"))
Q5_1 = gguf.GGMLQuantizationType.Q5_1
KINDS = {Precision.Q4_1: Q4_1, Precision.Q8_0: Q8_0}
TOKENS = [(17 * at + at * at) % 259 for at in range(96)]


@pytest.fixture(scope="module", params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> Ops:
    try:
        return select("cpu", threads=1, prefer=request.param)
    except Unsupported as error:
        pytest.skip(str(error))


def write(
    folder: Path, kind: gguf.GGMLQuantizationType, family: str = "llama", **others: object
) -> ModelFiles:
    """A folder whose only weights are a GGUF file."""
    write_tiny_model(folder, family)
    path = write_gguf(folder, folder / "tiny.gguf", kind, others=others)
    (folder / "model.safetensors").unlink()
    return ModelFiles(folder, "tiny", path)


def held(files: ModelFiles, precision: Precision) -> Storage:
    return storage_of(files, read_config(files), precision)


def load(files: ModelFiles, ops: Ops, precision: Precision) -> Target:
    return load_target(files, ops, storage=held(files, precision))


def layout_of(target: Target) -> Layout:
    config = target.config
    return Layout(config.num_layers, config.num_kv_heads, config.head_dim, 2, 128)


def logits(target: Target, layout: Layout, pieces: list[Piece]) -> Tensor:
    tokens, rows = layout.rows(pieces)
    return target.decoder.logits(target.decoder.forward(tokens, rows, layout.kv, None))


@pytest.mark.parametrize("family", ["llama", "smollm", "qwen3"])
@pytest.mark.parametrize("precision", KINDS)
def test_blocks_have_nearly_the_logits_of_their_float32_values(
    tmp_path: Path, ops: Ops, family: str, precision: Precision
) -> None:
    files = write(tmp_path, KINDS[precision], family)
    found, expected = (
        logits(target, layout_of(target), [Piece(0, 0, TOKENS)])
        for target in (load(files, ops, precision), load(files, ops, Precision.FP32))
    )
    difference = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert difference < (0.06 if ops.keeps_blocks else 1e-6)


@pytest.mark.parametrize("precision", KINDS)
def test_a_row_has_the_same_bits_in_a_batch_a_chunk_a_tree_and_alone(
    tmp_path: Path, ops: Ops, precision: Precision
) -> None:
    if not ops.batch_invariant:
        pytest.skip(f"{ops.name} does not promise it")
    target = load(write(tmp_path, KINDS[precision], "smollm"), ops, precision)
    alone, count = layout_of(target), len(TOKENS)
    expected = torch.cat(
        [logits(target, alone, [Piece(0, at, [TOKENS[at]])]) for at in range(count)]
    )
    assert torch.equal(logits(target, layout_of(target), [Piece(0, 0, TOKENS)]), expected)
    shared = layout_of(target)
    for start in range(0, 80, 20):
        mine = Piece(1, start, TOKENS[start : start + 20])
        found = logits(target, shared, [Piece(0, start, [3, 1, 4]), mine])[3:]
        assert torch.equal(found, expected[start : start + 20])
    parents = list(range(-1, count - 80 - 1))
    tree = Piece(1, 80, [*TOKENS[80:], 7, 8], [*parents, 3, 0])
    assert torch.equal(logits(target, shared, [tree])[: count - 80], expected[80:])


def test_a_mixed_file_keeps_what_has_a_kernel_and_says_what_has_not(
    tmp_path: Path, ops: Ops
) -> None:
    files = write(tmp_path, Q4_1, token_embd=Q8_0, attn_v=Q8_0, ffn_down=Q5_1)
    storage = held(files, Precision.Q4_1)
    assert storage.unpacked == ("Q4_1", "Q5_1", "Q8_0")
    forms = {name.split(".", 3)[-1]: form for name, form in storage.forms.items()}
    assert forms["self_attn.v_proj.weight"] is forms["self_attn.q_proj.weight"] is Precision.FP32
    assert forms["mlp.down_proj.weight"] is Precision.FP32
    assert forms["mlp.up_proj.weight"] is Precision.Q4_1
    assert storage.forms["model.embed_tokens.weight"] is Precision.Q8_0
    target = load(files, ops, Precision.Q4_1)
    assert target.precision == storage.summary == "q4_1+fp32+q8_0"
    whole = load(files, ops, Precision.FP32)
    found, expected = (
        logits(one, layout_of(one), [Piece(0, 0, TOKENS)]) for one in (target, whole)
    )
    assert (found - expected).square().mean().sqrt() < 0.06 * expected.square().mean().sqrt()


@pytest.mark.parametrize("family", ["llama", "smollm"])
def test_memory_is_known_before_loading(tmp_path: Path, ops: Ops, family: str) -> None:
    files = write(tmp_path, Q4_1, family, token_embd=Q8_0)
    storage, config = held(files, Precision.Q4_1), read_config(files)
    estimate = estimate_memory(config, storage, ops)
    weights = load_target(files, ops, storage=storage).decoder.weights
    kept: list[Linear] = [weights.head]
    if weights.embedding is not weights.head:
        assert not isinstance(weights.embedding, Tensor)
        kept.append(weights.embedding)
    floats = weights.final_norm.numel() + 2 * weights.layers[0].rope.cos.numel()
    for layer in weights.layers:
        kept += [layer.qkv, layer.output, layer.gate_up, layer.down]
        floats += layer.attention_norm.numel() + layer.mlp_norm.numel()
    assert estimate.weight_bytes == sum(one.nbytes for one in kept) + 4 * floats


def test_auto_takes_blocks_where_there_is_a_kernel(tmp_path: Path) -> None:
    assert held(write(tmp_path / "a", Q8_0), Precision.AUTO).summary == "q8_0"
    other = held(write(tmp_path / "b", Q5_1), Precision.AUTO)
    assert other.summary == "fp32" and other.unpacked == ()
    folder = write_tiny_model(tmp_path / "c")
    assert held(ModelFiles(folder, "tiny"), Precision.AUTO).summary == "fp32"


def test_another_type_than_the_file_s_is_refused(tmp_path: Path) -> None:
    files = write(tmp_path, Q8_0)
    with pytest.raises(Unsupported, match="q4_1 was asked for, and model tiny is stored as q8_0"):
        held(files, Precision.Q4_1)


def test_blocks_without_a_gguf_file_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    with pytest.raises(Unsupported, match="takes its blocks from a GGUF file, and model tiny has"):
        resolve_for(str(folder), Precision.Q4_1)
    assert resolve_for(str(folder), Precision.AUTO).folder == folder


def test_the_gguf_file_of_a_folder_is_found(tmp_path: Path) -> None:
    files = write(tmp_path / "tiny", Q4_1)
    assert resolve_for(str(files.folder), Precision.Q4_1) == files
