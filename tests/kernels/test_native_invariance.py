"""A row has the same bits alone and in any batch, chunk, tree, thread count and instruction set."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graft.kernels.cpu.library import available, load
from graft.kernels.cpu.native_ops import NativeOps
from graft.kernels.ops import KvCache, Linear, RopeTable
from graft.testing.kernel_rows import StepBuilder, same_bits

pytestmark = pytest.mark.skipif(not available(), reason="no native library was built")

PAGE = 8
SLOTS = 1024

seeds = st.integers(0, 2**31)
threads = st.sampled_from([1, 2])
isas = st.sampled_from(available() or ("portable",))
many = settings(max_examples=150, deadline=None)


@cache
def ops_for(isa: str, num_threads: int) -> NativeOps:
    found = load(isa)
    assert found is not None
    return NativeOps(found[1], isa, num_threads)


@cache
def plain_ops() -> NativeOps:
    """What everything is compared with: one thread, the portable build."""
    return ops_for("portable", 1)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


@cache
def packed(ops: NativeOps, outputs: int, inputs: int, bias: bool) -> Linear:
    generator = torch.Generator().manual_seed(outputs * inputs)
    weight = normal(generator, outputs, inputs)
    return ops.pack([weight], [normal(generator, outputs) if bias else None])


@many
@given(
    seed=seeds,
    shape=st.sampled_from([(40, 33), (64, 576), (33, 1536), (96, 64), (31, 7)]),
    rows=st.integers(1, 64),
    bias=st.booleans(),
    num_threads=threads,
    isa=isas,
)
def test_linear_row_alone_equals_row_in_any_batch(
    seed: int, shape: tuple[int, int], rows: int, bias: bool, num_threads: int, isa: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ops = ops_for(isa, num_threads)
    x = normal(generator, rows, shape[1])
    batch = ops.linear(x, packed(ops, *shape, bias))
    row = seed % rows
    alone = plain_ops().linear(x[row : row + 1], packed(plain_ops(), *shape, bias))
    assert same_bits(batch[row : row + 1], alone)


@many
@given(seed=seeds, rows=st.integers(1, 64), num_threads=threads, isa=isas)
def test_row_steps_do_not_see_their_neighbours(
    seed: int, rows: int, num_threads: int, isa: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ops, plain = ops_for(isa, num_threads), plain_ops()
    x, weight = 4 * normal(generator, rows, 384), normal(generator, 384)
    table = RopeTable(normal(generator, 90, 12), normal(generator, 90, 12))
    positions = torch.randint(0, 90, (rows,), generator=generator, dtype=torch.int32)
    row = slice(seed % rows, seed % rows + 1)
    assert same_bits(ops.rms_norm(x, weight, 1e-6)[row], plain.rms_norm(x[row], weight, 1e-6))
    assert same_bits(ops.silu_mul(x)[row], plain.silu_mul(x[row]))
    turned, alone = x.view(rows, 12, 32).clone(), x[row].view(1, 12, 32).clone()
    ops.rope_(turned, positions, table)
    plain.rope_(alone, positions[row], table)
    assert same_bits(turned[row], alone)


class Text:
    """Keys and values of one sequence by position, and the queries of its rows."""

    def __init__(
        self, generator: torch.Generator, length: int, shape: tuple[int, int, int]
    ) -> None:
        heads, kv_heads, dim = shape
        self.keys = normal(generator, length, kv_heads, dim)
        self.values = normal(generator, length, kv_heads, dim)
        self.q = normal(generator, length, heads, dim)


class Placement:
    """A cache of noise with texts laid into slots of its choosing."""

    def __init__(self, generator: torch.Generator, shape: tuple[int, int, int]) -> None:
        self._generator = generator
        self._free = torch.randperm(SLOTS // PAGE, generator=generator).tolist()
        size = (1, SLOTS, shape[1], shape[2])
        self.kv = KvCache(normal(generator, *size), normal(generator, *size), PAGE)
        self.steps = StepBuilder(PAGE, [])
        self.q: list[Tensor] = []

    def add(self, text: Text, committed: int) -> int:
        """Lays the first keys of a text into pages; returns the sequence."""
        pages = [self._free.pop() for _ in range((committed + PAGE - 1) // PAGE)]
        self.steps.sequence_pages.append(pages)
        sequence = len(self.steps.sequence_pages) - 1
        for j in range(committed):
            self._put(self.steps.slot(sequence, j), text, j)
        return sequence

    def plain(self, text: Text, sequence: int, position: int) -> None:
        self.steps.plain(sequence, position)
        self.q.append(text.q[position])

    def path(self, text: Text, sequence: int, committed: int, end: int) -> None:
        """Rows committed..end - 1 as tree nodes below one another, in scattered slots."""
        pages = [self._free.pop() for _ in range((end - committed + PAGE - 1) // PAGE)]
        spots = [page * PAGE + i for page in pages for i in range(PAGE)]
        order = torch.randperm(len(spots), generator=self._generator).tolist()
        slots = [spots[i] for i in order][: end - committed]
        for depth, slot in enumerate(slots):
            self._put(slot, text, committed + depth)
            self.steps.node(sequence, committed, slots[: depth + 1])
            self.q.append(text.q[committed + depth])

    def attend(self, ops: NativeOps, window: int) -> Tensor:
        return ops.attend(torch.stack(self.q), self.kv, 0, self.steps.rows(), 0.125, window)

    def _put(self, slot: int, text: Text, position: int) -> None:
        self.kv.keys[0, slot] = text.keys[position]
        self.kv.values[0, slot] = text.values[position]


shapes = st.sampled_from([(9, 3, 64), (4, 4, 16), (5, 1, 24), (4, 2, 8)])
windows = st.sampled_from([0, 0, 0, 1, 13, 64, 270])


@many
@given(
    seed=seeds,
    shape=shapes,
    length=st.integers(1, 560),
    path=st.integers(1, 24),
    window=windows,
    num_threads=threads,
    isa=isas,
    neighbours=st.integers(0, 3),
)
def test_tree_node_equals_the_plain_row_at_its_place(
    seed: int,
    shape: tuple[int, int, int],
    length: int,
    path: int,
    window: int,
    num_threads: int,
    isa: str,
    neighbours: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    text = Text(generator, length, shape)
    alone = Placement(generator, shape)
    alone.plain(text, alone.add(text, length), length - 1)
    expected = alone.attend(plain_ops(), window)

    committed = max(0, length - path)
    batch = Placement(generator, shape)
    for n in range(neighbours):
        other = Text(generator, 40 + n, shape)
        sequence = batch.add(other, 30)
        batch.path(other, sequence, 30, 33 + n)
    sequence = batch.add(text, committed)
    batch.path(text, sequence, committed, length)
    assert same_bits(batch.attend(ops_for(isa, num_threads), window)[-1:], expected)


@many
@given(
    seed=seeds,
    shape=shapes,
    length=st.integers(1, 560),
    chunk=st.integers(1, 64),
    window=windows,
    num_threads=threads,
    isa=isas,
)
def test_prefill_chunk_equals_plain_rows(
    seed: int,
    shape: tuple[int, int, int],
    length: int,
    chunk: int,
    window: int,
    num_threads: int,
    isa: str,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    text = Text(generator, length, shape)
    whole = Placement(generator, shape)
    sequence = whole.add(text, length)
    first = max(0, length - chunk)
    for position in range(first, length):
        whole.plain(text, sequence, position)
    rows = whole.attend(ops_for(isa, num_threads), window)
    picked = seed % (length - first)
    alone = Placement(generator, shape)
    alone.plain(text, alone.add(text, length), first + picked)
    assert same_bits(rows[picked : picked + 1], alone.attend(plain_ops(), window))
