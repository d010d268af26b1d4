"""Head and choice in one pass: the bits of `choose` on the head's logits, for every layout."""

import dataclasses

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.kernels.cpu.choose_head import filtered
from graft.kernels.cpu.library import available, load
from graft.kernels.cpu.native_ops import NativeOps
from graft.kernels.cpu.torch_ops import TorchOps
from graft.kernels.ops import Linear, Ops
from graft.testing.trees import law_rows

ISAS = available()
KINDS = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
}


def ops_of(isa: str, threads: int) -> NativeOps:
    found = load(isa)
    assert found is not None
    return NativeOps(found[1], isa, threads)


def pack(ops: Ops, weight: np.ndarray, kind: str) -> Linear:
    if kind == "f32":
        return ops.pack([torch.from_numpy(weight)], [None])
    blocks = torch.from_numpy(gguf.quants.quantize(weight, KINDS[kind]))
    return (ops.pack_q8_0 if kind == "q8_0" else ops.pack_q4_1)([blocks], [None])


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_it_has_the_bits_of_the_long_way(isa: str, data: st.DataObject) -> None:
    draw = data.draw
    num_rows = draw(st.integers(1, 20))
    vocab = draw(st.sampled_from([1, 31, 33, 64, 65, 96, 200, 1000]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([0, 0.1, 1, 5]))
    weight = (generator.standard_normal((vocab, 64)) * scale).astype(np.float32)
    if draw(st.booleans()):
        weight = weight[generator.integers(0, vocab, vocab)]  # ties
    hidden = generator.standard_normal((num_rows, 64)).astype(np.float32)
    if draw(st.integers(0, 5)) == 0:
        hidden[draw(st.integers(0, num_rows - 1)), 3] = draw(st.sampled_from([np.nan, np.inf]))
    kind = draw(st.sampled_from(["f32", "q8_0", "q4_1"]))
    rows = law_rows(
        num_rows,
        temperature=[draw(st.sampled_from([0.0, 0.3, 1.0, 1.7, 1e-4])) for _ in range(num_rows)],
        top_k=[draw(st.sampled_from([0, 1, 5000])) for _ in range(num_rows)],
        top_p=[1.0] * num_rows,
        min_p=[0.0] * num_rows,
        seed=[draw(st.integers(-(2**63), 2**63 - 1)) for _ in range(num_rows)],
        position=[draw(st.integers(0, 2**31 - 1)) for _ in range(num_rows)],
    )
    assert not filtered(rows, vocab)
    ops = ops_of(isa, draw(st.sampled_from([1, 2])))
    head = pack(ops, weight, kind)
    x = torch.from_numpy(hidden)
    assert torch.equal(ops.choose_head(x, head, rows), ops.choose(ops.linear(x, head), rows))


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_chooses_the_same_in_every_batch(isa: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 96, generator=generator)
    weight = torch.randn(5000, 96, generator=generator).numpy()
    rows = law_rows(40, temperature=0.7, seed=list(range(40)), position=list(range(40)))
    ops = ops_of(isa, 2)
    head = pack(ops, weight, "f32")
    together = ops.choose_head(hidden, head, rows)
    for row in range(40):
        alone = dataclasses.replace(
            rows,
            **{
                name: getattr(rows, name)[row : row + 1]
                for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position")
            },
        )
        assert ops.choose_head(hidden[row : row + 1], head, alone) == together[row]


@pytest.mark.parametrize("isa", [*ISAS, "torch"])
def test_rows_with_filters_take_the_long_way(isa: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ops: Ops = TorchOps() if isa == "torch" else ops_of(isa, 1)
    head = ops.pack([torch.randn(300, 64, generator=generator)], [None])
    hidden = torch.randn(3, 64, generator=generator)
    rows = law_rows(3, top_k=[0, 5, 0], top_p=[0.5, 1, 1], min_p=[0, 0, 0.2], seed=[1, 2, 3])
    assert filtered(rows, 300)
    assert torch.equal(
        ops.choose_head(hidden, head, rows), ops.choose(ops.linear(hidden, head), rows)
    )


def test_filters_of_greedy_rows_count_for_nothing() -> None:
    greedy = law_rows(2, temperature=[0, 1], top_k=[40, 1], top_p=0.5, min_p=0.3)
    assert not filtered(greedy, 300)
    assert filtered(dataclasses.replace(greedy, bitmask=torch.zeros(2, 10, dtype=torch.int32)), 300)
