"""GGUF weights are used as stored, activations are rounded once, and bits never differ."""

from __future__ import annotations

from functools import cache

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graft.kernels.cpu.library import available, load
from graft.kernels.cpu.native_ops import NativeOps
from graft.kernels.cpu.torch_ops import TorchOps
from graft.kernels.ops import Linear, Ops
from graft.testing.kernel_rows import same_bits

KINDS = ("q8_0", "q4_1")
TYPES = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
}
needs_library = pytest.mark.skipif(not available(), reason="no native library was built")


@cache
def ops_for(isa: str, threads: int = 1) -> Ops:
    if isa == "torch":
        return TorchOps(1)
    found = load(isa)
    assert found is not None
    return NativeOps(found[1], isa, threads)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(kind: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks of a GGUF file, and the weights they stand for."""
    raw = gguf.quants.quantize(weight.numpy(), TYPES[kind])
    return torch.from_numpy(raw), torch.from_numpy(gguf.quants.dequantize(raw, TYPES[kind]))


def pack(ops: Ops, kind: str, blocks: list[Tensor], biases: list[Tensor | None]) -> Linear:
    return ops.pack_q8_0(blocks, biases) if kind == "q8_0" else ops.pack_q4_1(blocks, biases)


def rounded(x: Tensor) -> Tensor:
    """Activations to the nearest of 255 steps of their block of 32."""
    blocks = x.view(len(x), -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0)
    return ((blocks * inverse).round() * scale).view(x.shape)


@pytest.fixture(params=["torch", *available()])
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_for(request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_read_back_are_the_weights_of_the_file(ops: Ops, kind: str) -> None:
    blocks, weight = stored(kind, 0.1 * normal(75, 96, seed=1))
    tokens = torch.tensor([0, 74, 31, 32, 17], dtype=torch.int32)
    read = ops.embed(tokens, pack(ops, kind, [blocks], [None]))
    torch.testing.assert_close(read, weight[tokens.long()], atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 16, 33])
def test_linear_is_the_product_with_rounded_activations(ops: Ops, kind: str, rows: int) -> None:
    parts = [stored(kind, normal(n, 160, seed=n)) for n in (70, 32, 9)]
    biases = [normal(70, seed=2), None, normal(9, seed=3)]
    packed = pack(ops, kind, [blocks for blocks, _ in parts], biases)
    assert (packed.out_features, packed.in_features) == (111, 160)
    x = normal(rows, 160, seed=rows)
    x[0, 32:64] = 0
    used = x if ops.name == "torch" else rounded(x)
    expected = used.double() @ torch.cat([w for _, w in parts]).double().T
    expected[:, :70] += biases[0]
    expected[:, 102:] += biases[2]
    torch.testing.assert_close(ops.linear(x, packed), expected.float(), atol=3e-4, rtol=1e-4)


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_quants_do_not_overflow(kind: str) -> None:
    raw, _ = stored(kind, torch.ones(32, 64))
    size, header = (34, 2) if kind == "q8_0" else (20, 4)
    blocks = raw.reshape(32, 2, size)
    blocks[..., header:] = 0x80 if kind == "q8_0" else 0xFF
    blocks[..., :2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    blocks[..., 2:header] = 0
    x = torch.full((1, 64), 127.0)
    expected = torch.full((1, 32), (-128 if kind == "q8_0" else 15) * 127.0 * 64)
    for isa in available():
        packed = pack(ops_for(isa), kind, [raw], [None])
        assert torch.equal(ops_for(isa).linear(x, packed), expected)
        assert torch.equal(ops_for(isa).linear(-x, packed), -expected)


@cache
def packed_for(isa: str, threads: int, kind: str, shape: tuple[int, int], bias: bool) -> Linear:
    blocks, _ = stored(kind, normal(*shape, seed=shape[0]))
    return pack(ops_for(isa, threads), kind, [blocks], [normal(shape[0], seed=4) if bias else None])


@needs_library
@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(KINDS),
    shape=st.sampled_from([(40, 64), (96, 576), (33, 1536)]),
    rows=st.integers(1, 64),
    bias=st.booleans(),
    threads=st.sampled_from([1, 2]),
    isa=st.sampled_from(available() or ("portable",)),
)
def test_row_alone_equals_row_in_any_batch(
    seed: int, kind: str, shape: tuple[int, int], rows: int, bias: bool, threads: int, isa: str
) -> None:
    x = normal(rows, shape[1], seed=seed)
    batch = ops_for(isa, threads).linear(x, packed_for(isa, threads, kind, shape, bias))
    row = slice(seed % rows, seed % rows + 1)
    alone = ops_for("portable").linear(x[row], packed_for("portable", 1, kind, shape, bias))
    assert same_bits(batch[row], alone)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_blocks_take_no_more_room_than_the_file(kind: str) -> None:
    if not available():
        pytest.skip("no native library was built")
    raw, _ = stored(kind, normal(64, 320, seed=0))
    assert pack(ops_for(available()[0]), kind, [raw], [None]).nbytes == raw.numel()


@needs_library
def test_blocks_of_another_type_are_refused() -> None:
    raw, _ = stored("q8_0", normal(32, 64, seed=0))
    with pytest.raises(ValueError, match="20 a block"):
        ops_for(available()[0]).pack_q4_1([raw], [None])
