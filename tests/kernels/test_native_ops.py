"""Every op against plain torch, on each instruction set that runs here and on the fallback."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graft.kernels.cpu.library import available, load
from graft.kernels.cpu.native_ops import NativeOps
from graft.kernels.cpu.torch_ops import TorchOps
from graft.kernels.ops import KvCache, Ops, RopeTable, StepRows
from graft.testing.kernel_rows import StepBuilder, random_cache, shuffled_pages


def make_ops(kind: str) -> Ops:
    if kind == "torch":
        return TorchOps(1)
    found = load(kind)
    assert found is not None
    return NativeOps(found[1], found[0], threads=2)


@pytest.fixture(params=["torch", *available()])
def ops(request: pytest.FixtureRequest) -> Ops:
    return make_ops(request.param)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13, 16, 31, 64])
@pytest.mark.parametrize("shape", [(7, 5), (96, 64), (200, 33), (70, 1100)])
def test_linear_is_the_matrix_product(ops: Ops, rows: int, shape: tuple[int, int]) -> None:
    weight, x = normal(*shape, seed=1), normal(rows, shape[1], seed=2)
    packed = ops.pack([weight], [None])
    assert (packed.out_features, packed.in_features) == shape
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(ops.linear(x, packed), expected, atol=2e-4, rtol=1e-4)


def test_stacked_weights_come_out_side_by_side(ops: Ops) -> None:
    parts = [normal(n, 24, seed=n) for n in (40, 9, 16)]
    biases = [normal(40, seed=3), None, normal(16, seed=4)]
    x = normal(3, 24, seed=5)
    expected = torch.cat([F.linear(x, w, b) for w, b in zip(parts, biases, strict=True)], dim=1)
    torch.testing.assert_close(ops.linear(x, ops.pack(parts, biases)), expected)


def test_embed_reads_rows_of_a_table_and_of_a_packed_head(ops: Ops) -> None:
    table, tokens = normal(70, 19), torch.tensor([69, 0, 33, 33], dtype=torch.int32)
    assert torch.equal(ops.embed(tokens, table), table[tokens.long()])
    packed = ops.pack([table], [None])
    assert torch.equal(ops.embed(tokens, packed), table[tokens.long()])


@pytest.mark.parametrize("shape", [(1, 576), (5, 3, 24), (2, 7)])
def test_rms_norm_divides_by_the_root_mean_square(ops: Ops, shape: tuple[int, ...]) -> None:
    x, weight = 3 * normal(*shape), normal(shape[-1], seed=1)
    expected = x / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), expected.float())


def test_add_changes_the_residual_in_place(ops: Ops) -> None:
    residual, x = normal(5, 37), normal(5, 37, seed=1)
    expected = residual + x
    ops.add_(residual, x)
    assert torch.equal(residual, expected)


def test_silu_mul_gates_the_second_half(ops: Ops) -> None:
    gate_up = 8 * normal(4, 2 * 51)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -88.5])
    expected = F.silu(gate_up[:, :51].double()) * gate_up[:, 51:]
    torch.testing.assert_close(ops.silu_mul(gate_up), expected.float(), atol=1e-6, rtol=3e-6)


@pytest.mark.parametrize(("dim", "half"), [(64, 32), (64, 8), (12, 6), (40, 17)])
def test_rope_turns_pairs_and_leaves_the_rest(ops: Ops, dim: int, half: int) -> None:
    angle = torch.arange(50).unsqueeze(1) / 100.0 ** (torch.arange(half) / half)
    table = RopeTable(angle.cos().contiguous(), angle.sin().contiguous())
    positions = torch.tensor([0, 49, 7], dtype=torch.int32)
    x = normal(3, 2, dim)
    turned = torch.polar(torch.ones(3, 1, half), angle[positions.long()].unsqueeze(1)) * (
        torch.complex(x[..., :half], x[..., half : 2 * half])
    )
    expected = torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1)
    ops.rope_(x, positions, table)
    torch.testing.assert_close(x, expected)


def test_rope_takes_rows_that_lie_apart(ops: Ops) -> None:
    table = RopeTable(normal(9, 4).cos(), normal(9, 4).sin())
    positions = torch.tensor([3, 8], dtype=torch.int32)
    wide = normal(2, 40)
    alone = wide[:, 8:24].reshape(2, 2, 8).clone()
    before, after = wide[:, :8].clone(), wide[:, 24:].clone()
    ops.rope_(wide[:, 8:24].view(2, 2, 8), positions, table)
    ops.rope_(alone, positions, table)
    assert torch.equal(wide[:, 8:24].reshape(2, 2, 8), alone)
    assert torch.equal(wide[:, :8], before)
    assert torch.equal(wide[:, 24:], after)


def test_write_kv_fills_the_slots_of_one_layer(ops: Ops) -> None:
    generator = torch.Generator().manual_seed(0)
    kv = random_cache(generator, slots=12, kv_heads=2, head_dim=5, page_tokens=4)
    other = kv.keys[0].clone()
    steps = StepBuilder(4, [[1, 2]])
    steps.plain(0, 3)
    steps.plain(0, 4)
    k, v = normal(2, 2, 5, seed=8), normal(2, 2, 5, seed=9)
    ops.write_kv(kv, 1, steps.rows(), k, v)
    assert torch.equal(kv.keys[1, [7, 8]], k)
    assert torch.equal(kv.values[1, [7, 8]], v)
    assert torch.equal(kv.keys[0], other)


def test_keep_moves_slots_in_order_in_all_layers(ops: Ops) -> None:
    generator = torch.Generator().manual_seed(0)
    kv = random_cache(generator, slots=9, kv_heads=1, head_dim=6, page_tokens=3)
    keys, values = kv.keys.clone(), kv.values.clone()
    source = torch.tensor([5, 6, 8], dtype=torch.int32)
    target = torch.tensor([3, 5, 8], dtype=torch.int32)
    ops.keep(kv, source, target)
    for now, old in ((kv.keys, keys), (kv.values, values)):
        assert torch.equal(now[:, 3], old[:, 5])
        assert torch.equal(now[:, 5], old[:, 6])
        assert torch.equal(now[:, [0, 1, 2, 4, 6, 7, 8]], old[:, [0, 1, 2, 4, 6, 7, 8]])
    ops.keep(kv, source[:0], target[:0])


def slow_attention(
    q: Tensor, kv: KvCache, layer: int, rows: StepRows, scale: float, window: int
) -> Tensor:
    """One row and one head at a time, in float64."""
    out = torch.empty_like(q)
    group = q.shape[1] // kv.keys.shape[2]
    for r in range(len(q)):
        pages = rows.page_table[int(rows.sequence[r])]
        slots = [
            int(pages[j // kv.page_tokens]) * kv.page_tokens + j % kv.page_tokens
            for j in range(int(rows.prefix_len[r]))
        ]
        slots += rows.extra_slots[rows.extra_ptr[r] : rows.extra_ptr[r + 1]].tolist()
        slots = slots[-window:] if window else slots
        for h in range(q.shape[1]):
            keys = kv.keys[layer, slots, h // group].double()
            values = kv.values[layer, slots, h // group].double()
            out[r, h] = torch.softmax(keys @ q[r, h].double() * scale, 0) @ values
    return out


@pytest.mark.parametrize("window", [0, 1, 20, 300])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 8), (5, 1, 24), (8, 2, 128), (2, 2, 80)]
)
def test_attend_mixes_values_by_softmax(
    ops: Ops, heads: int, kv_heads: int, dim: int, window: int
) -> None:
    generator = torch.Generator().manual_seed(heads)
    steps = StepBuilder(16, shuffled_pages(generator, [40, 3, 20]))
    steps.plain(0, 600)
    steps.node(0, 530, [steps.slot(0, 530)])
    steps.node(0, 530, [steps.slot(0, 530), steps.slot(0, 535)])
    for position in range(5):
        steps.plain(1, position)
    steps.plain(2, 255)
    steps.node(2, 250, [steps.slot(2, 300 - j) for j in range(18)])
    kv = random_cache(generator, slots=64 * 16, kv_heads=kv_heads, head_dim=dim, page_tokens=16)
    rows = steps.rows()
    q = torch.randn((len(rows.positions), heads, dim), generator=generator)
    expected = slow_attention(q, kv, 1, rows, dim**-0.5, window)
    mixed = ops.attend(q, kv, 1, rows, dim**-0.5, window)
    torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", list(available()))
def test_wrong_inputs_are_named(kind: str) -> None:
    ops = make_ops(kind)
    packed = ops.pack([normal(8, 4)], [None])
    with pytest.raises(ValueError, match="5 columns, expected 4"):
        ops.linear(normal(2, 5), packed)
    with pytest.raises(ValueError, match="contiguous float32"):
        ops.linear(normal(2, 4).double(), packed)
    with pytest.raises(ValueError, match=r"expected \(6,\)"):
        ops.rms_norm(normal(2, 6), normal(5), 1e-5)
    with pytest.raises(ValueError, match="contiguous int32"):
        ops.embed(torch.tensor([1]), normal(3, 3))
