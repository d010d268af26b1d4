"""Layers in one call give the bits of layers op by op, and of each row alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from graft.kernels.cpu.library import available, load
from graft.kernels.cpu.native_ops import NativeOps
from graft.kernels.cpu.torch_ops import TorchOps
from graft.kernels.ops import KvCache, LayerSpec, Ops, RopeTable, StepRows
from graft.testing.kernel_rows import StepBuilder, random_cache, same_bits

pytestmark = pytest.mark.skipif(not available(), reason="no native library was built")


@dataclass(frozen=True)
class Shape:
    hidden: int = 48
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 72
    head_norms: bool = False
    bias: bool = False
    window: int = 0


SHAPES = [Shape(), Shape(head_norms=True, window=5), Shape(heads=3, kv_heads=3, bias=True)]


def make_ops(isa: str, threads: int) -> NativeOps:
    found = load(isa)
    assert found is not None
    return NativeOps(found[1], isa, threads)


def make_layers(ops: Ops, shape: Shape) -> list[LayerSpec]:
    generator = torch.Generator().manual_seed(7)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) / size[-1] ** 0.5

    angles = torch.arange(64).unsqueeze(1) / 50.0 ** torch.linspace(0, 1, shape.head_dim // 2)
    rope = RopeTable(angles.cos().contiguous(), angles.sin().contiguous())
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layers = []
    for _ in range(2):
        biases = [normal(n) if shape.bias else None for n in (query, key, key)]
        layers.append(
            LayerSpec(
                attention_norm=normal(shape.hidden) + 1,
                qkv=ops.pack([normal(n, shape.hidden) for n in (query, key, key)], biases),
                q_norm=normal(shape.head_dim) + 1 if shape.head_norms else None,
                k_norm=normal(shape.head_dim) + 1 if shape.head_norms else None,
                output=ops.pack([normal(shape.hidden, query)], [None]),
                mlp_norm=normal(shape.hidden) + 1,
                gate_up=ops.pack([normal(shape.mlp, shape.hidden) for _ in range(2)], [None] * 2),
                down=ops.pack([normal(shape.hidden, shape.mlp)], [None]),
                rope=rope,
                num_heads=shape.heads,
                head_dim=shape.head_dim,
                eps=1e-5,
                window=shape.window,
            )
        )
    return layers


def op_by_op_(ops: Ops, layer: LayerSpec, n: int, x: Tensor, kv: KvCache, rows: StepRows) -> None:
    """In place: what a decoder does with the single ops."""
    kv_width = kv.keys.shape[2] * layer.head_dim
    flat = ops.linear(ops.rms_norm(x, layer.attention_norm, layer.eps), layer.qkv)
    parts = flat.split([layer.num_heads * layer.head_dim, kv_width, kv_width], dim=1)
    q, k, v = (part.reshape(len(x), -1, layer.head_dim).contiguous() for part in parts)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = ops.rms_norm(q, layer.q_norm, layer.eps), ops.rms_norm(k, layer.k_norm, layer.eps)
    ops.rope_(q, rows.positions, layer.rope)
    ops.rope_(k, rows.positions, layer.rope)
    ops.write_kv(kv, n, rows, k, v)
    seen = ops.attend(q, kv, n, rows, layer.head_dim**-0.5, layer.window)
    ops.add_(x, ops.linear(seen.view(len(x), -1), layer.output))
    hidden = ops.linear(ops.rms_norm(x, layer.mlp_norm, layer.eps), layer.gate_up)
    ops.add_(x, ops.linear(ops.silu_mul(hidden), layer.down))


def cache_for(shape: Shape) -> KvCache:
    generator = torch.Generator().manual_seed(1)
    return random_cache(
        generator, slots=128, kv_heads=shape.kv_heads, head_dim=shape.head_dim, page_tokens=4
    )


def chunk(first: int, end: int) -> StepRows:
    steps = StepBuilder(4, [[9, 3, 30, 1, 7, 12, 5, 20, 2, 25]])
    for position in range(first, end):
        steps.plain(0, position)
    return steps.rows()


def text(shape: Shape, length: int) -> Tensor:
    return torch.randn((length, shape.hidden), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("isa", list(available()))
def test_one_call_equals_the_single_ops(isa: str, shape: Shape) -> None:
    ops = make_ops(isa, 2)
    layers = make_layers(ops, shape)
    stack = ops.stack(layers)
    assert stack is not None
    fused, single = cache_for(shape), cache_for(shape)
    x, y = text(shape, 30), text(shape, 30)
    stack.run_(x, range(2), fused, chunk(0, 30))
    for n, layer in enumerate(layers):
        op_by_op_(ops, layer, n, y, single, chunk(0, 30))
    assert same_bits(x, y)
    assert same_bits(fused.keys, single.keys)


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_agree_with_torch(shape: Shape) -> None:
    ops, plain = make_ops(available()[0], 2), TorchOps(1)
    stack = ops.stack(make_layers(ops, shape))
    assert stack is not None
    x, y = text(shape, 20), text(shape, 20)
    kv, plain_kv = cache_for(shape), cache_for(shape)
    stack.run_(x, range(2), kv, chunk(0, 20))
    for n, layer in enumerate(make_layers(plain, shape)):
        op_by_op_(plain, layer, n, y, plain_kv, chunk(0, 20))
    torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 3, 7, 13, 30])
def test_any_chunking_gives_the_same_states(size: int, shape: Shape) -> None:
    whole, parts = make_ops(available()[0], 1), make_ops(available()[-1], 2)
    x, y = text(shape, 30), text(shape, 30)
    kv, other = cache_for(shape), cache_for(shape)
    one, many = whole.stack(make_layers(whole, shape)), parts.stack(make_layers(parts, shape))
    assert one is not None
    assert many is not None
    one.run_(x, range(2), kv, chunk(0, 30))
    for first in range(0, 30, size):
        end = min(30, first + size)
        piece = y[first:end].clone()
        many.run_(piece, range(2), other, chunk(first, end))
        y[first:end] = piece
    assert same_bits(x, y)


def test_layers_may_run_in_two_calls() -> None:
    ops = make_ops(available()[0], 2)
    stack = ops.stack(make_layers(ops, Shape()))
    assert stack is not None
    kv, other = cache_for(Shape()), cache_for(Shape())
    x, y = text(Shape(), 9), text(Shape(), 9)
    stack.run_(x, range(2), kv, chunk(0, 9))
    stack.run_(y, range(1), other, chunk(0, 9))
    stack.run_(y, range(1, 2), other, chunk(0, 9))
    assert same_bits(x, y)
    with pytest.raises(ValueError, match=r"within 0\.\.2"):
        stack.run_(y, range(1, 3), other, chunk(0, 9))


def test_a_cache_of_another_shape_is_refused() -> None:
    ops = make_ops(available()[0], 1)
    stack = ops.stack(make_layers(ops, Shape()))
    assert stack is not None
    with pytest.raises(ValueError, match="3 heads of 16"):
        stack.run_(text(Shape(), 2), range(2), cache_for(Shape(kv_heads=3)), chunk(0, 2))


def test_the_fallback_runs_layers_op_by_op() -> None:
    assert TorchOps(1).stack([]) is None
