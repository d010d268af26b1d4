"""Trees of a recurrent network are the same on every build and in any company; ties are settled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graft.kernels.cpu.library import available, load
from graft.kernels.cpu.native_ops import NativeOps
from graft.kernels.cpu.torch_ops import TorchOps
from graft.kernels.ops import (
    Bush,
    BushStem,
    KvCache,
    LayerSpec,
    Ops,
    Recurrent,
    RecurrentSpec,
    RopeTable,
)
from graft.testing.kernel_rows import same_bits

pytestmark = pytest.mark.skipif(not available(), reason="no native library was built")

HIDDEN, VOCAB, DRAFT_VOCAB, STATES = 64, 300, 150, 192
HEADS, KV_HEADS, HEAD_DIM, MLP = 4, 2, 16, 96


def make_ops(isa: str, threads: int = 1) -> NativeOps:
    found = load(isa)
    assert found is not None
    return NativeOps(found[1], isa, threads)


def make_spec(ops: Ops, head: Tensor | None = None, **changed: Any) -> RecurrentSpec:
    generator = torch.Generator().manual_seed(7)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) / size[-1] ** 0.5

    angles = torch.arange(64).unsqueeze(1) / 50.0 ** torch.linspace(0, 1, HEAD_DIM // 2)
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = LayerSpec(
        attention_norm=torch.empty(0),
        qkv=ops.pack([normal(n, 2 * HIDDEN) for n in (query, key, key)], [None] * 3),
        q_norm=None,
        k_norm=None,
        output=ops.pack([normal(HIDDEN, query)], [None]),
        mlp_norm=normal(HIDDEN) + 1,
        gate_up=ops.pack([normal(MLP, HIDDEN) for _ in range(2)], [None] * 2),
        down=ops.pack([normal(HIDDEN, MLP)], [None]),
        rope=RopeTable(angles.cos().contiguous(), angles.sin().contiguous()),
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        eps=1e-5,
        window=0,
    )
    values: dict[str, Any] = {
        "fc": ops.pack([normal(HIDDEN, STATES)], [None]),
        "input_norm": None,
        "state_norms": (),
        "embedding": normal(VOCAB, HIDDEN),
        "embedding_norm": normal(HIDDEN) + 1,
        "hidden_norm": normal(HIDDEN) + 1,
        "layers": (layer,),
        "final_norm": normal(HIDDEN) + 1,
        "head": ops.pack([8 * normal(DRAFT_VOCAB, HIDDEN) if head is None else head], [None]),
        "token_ids": torch.arange(DRAFT_VOCAB) * 2,
        "norm_before_residual": False,
        "norm_output": False,
    }
    return RecurrentSpec(**values | changed)


def make_net(ops: Ops, head: Tensor | None = None, **changed: Any) -> Recurrent:
    net = ops.recurrent(make_spec(ops, head, **changed))
    assert net is not None
    return net


def cache() -> KvCache:
    shape = (1, 64 * 4, KV_HEADS, HEAD_DIM)
    generator = torch.Generator().manual_seed(1)
    return KvCache(
        torch.randn(shape, generator=generator), torch.randn(shape, generator=generator), 4
    )


def stem(seed: int, rows: int = 0, **changed: Any) -> BushStem:
    """Behind 13 slots, of pages of its own."""
    random = np.random.default_rng(seed)
    features = random.standard_normal((rows, STATES if rows else HIDDEN))
    values: dict[str, Any] = {
        "topk": 3,
        "num_steps": 3,
        "num_nodes": 9,
        "position": 20,
        "cached": 13,
        "pages": [8 * seed + page for page in (3, 0, 5, 1, 7, 2)],
        "tokens": random.integers(0, VOCAB, rows).astype(np.int32),
        "features": features.astype(np.float32),
    }
    return BushStem(**values | changed)


def root(seed: int) -> Tensor:
    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed))


def drawn(seed: int, temperature: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    noise = tuple(torch.randn(DRAFT_VOCAB, generator=generator) for _ in range(3))
    return {"noise": noise, "temperature": temperature}


STEMS = [
    stem(0, 3),
    stem(1, 1, topk=1, num_nodes=4),
    stem(2, 5, **drawn(2, 0.7)),
    stem(3, 2, num_steps=1, num_nodes=3),
    stem(4, 4, topk=5, num_nodes=20, **drawn(4, 1.5), top_k=9, top_p=0.9),
]


def assert_same(one: Bush, other: Bush) -> None:
    assert one.tokens == other.tokens
    assert one.parents == other.parents
    assert one.scores == other.scores
    assert (one.run_tokens, one.run_parents) == (other.run_tokens, other.run_parents)
    assert same_bits(one.root, other.root)
    assert same_bits(one.states, other.states)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("isa", list(available()))
def test_stems_together_grow_as_each_alone_on_every_build(isa: str, threads: int) -> None:
    together = make_net(make_ops(isa, threads)).grow(STEMS, [None] * 5, cache(), fused=False)
    net = make_net(make_ops(available()[0]))
    for one, bush in zip(STEMS, together, strict=True):
        (alone,) = net.grow([one], [None], cache(), fused=False)
        assert_same(bush, alone)


def test_rows_before_a_tree_may_come_in_a_call_of_their_own() -> None:
    net, kv, other = make_net(make_ops(available()[0])), cache(), cache()
    whole = stem(0, 5)
    (expected,) = net.grow([whole], [None], kv, fused=False)
    first = stem(0, position=18, cached=11, tokens=whole.tokens[:3], features=whole.features[:3])
    net.grow([first], [None], other, fused=False)
    rest = stem(0, tokens=whole.tokens[3:], features=whole.features[3:])
    (bush,) = net.grow([rest], [None], other, fused=False)
    assert_same(bush, expected)
    nothing = stem(0, tokens=whole.tokens[:0], features=np.empty((0, HIDDEN), np.float32))
    (again,) = net.grow([nothing], [bush.root], other, fused=True)
    assert_same(again, expected)


@pytest.mark.parametrize("norm", ["none", "joined", "each"])
def test_features_that_passed_the_projection_give_the_same_tree(norm: str) -> None:
    ops = make_ops(available()[0])
    weight = 1 + torch.rand(STATES, generator=torch.Generator().manual_seed(2))
    changed: dict[str, Any] = {}
    if norm == "joined":
        changed["input_norm"] = weight
    if norm == "each":
        changed["state_norms"] = weight.chunk(3)
    spec = make_spec(ops, **changed)
    net = make_net(ops, **changed)
    raw = stem(0, 4)
    states = torch.from_numpy(raw.features)
    if norm == "joined":
        states = ops.rms_norm(states, weight, 1e-5)
    if norm == "each":
        parts = zip(states.chunk(3, dim=1), weight.chunk(3), strict=True)
        states = torch.cat([ops.rms_norm(x.contiguous(), w, 1e-5) for x, w in parts], dim=1)
    assert spec.fc is not None
    fused = stem(0, tokens=raw.tokens, features=ops.linear(states, spec.fc).numpy())
    (bush,) = net.grow([raw], [None], cache(), fused=False)
    (other,) = net.grow([fused], [None], cache(), fused=True)
    assert_same(bush, other)


def test_of_equal_tokens_and_candidates_the_lower_ones_win() -> None:
    net = make_net(make_ops(available()[0]), torch.zeros(DRAFT_VOCAB, HIDDEN))
    (bush,) = net.grow([stem(0, num_nodes=6)], [root(1)], cache(), fused=True)
    assert bush.run_tokens == [0, 2, 4] * 2
    assert bush.run_parents == [0, 0, 0] * 2
    assert bush.tokens == [0, 2, 4, 0, 2]
    assert bush.parents == [0, 0, 0, 1, 1]
    level = -np.log(DRAFT_VOCAB)
    np.testing.assert_allclose(bush.scores, [level] * 3 + [2 * level] * 2, rtol=1e-5)


def test_probabilities_are_those_of_all_columns() -> None:
    ops = make_ops(available()[0])
    spec = make_spec(ops)
    made = stem(0, topk=4, num_steps=1, num_nodes=5, **drawn(3, 0.5) | {"noise": (noise(),)})
    (bush,) = make_net(ops).grow([made], [root(5)], cache(), fused=True)
    logits = ops.linear(ops.rms_norm(root(5)[None], spec.final_norm, 1e-5), spec.head)[0]
    logs = torch.log_softmax((logits + 0.5 * noise()).double(), dim=0)
    best, columns = logs.topk(4)
    assert bush.tokens == (2 * columns).tolist()
    np.testing.assert_allclose(bush.scores, best, rtol=1e-5)


def noise() -> Tensor:
    return torch.randn(DRAFT_VOCAB, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_cannot_be_ranked_are_refused(value: float) -> None:
    net = make_net(make_ops(available()[0]))
    with pytest.raises(ValueError, match="NaN"):
        net.grow([stem(0)], [torch.full((HIDDEN,), value)], cache(), fused=True)


@pytest.mark.parametrize(
    "changed",
    [
        {"num_nodes": 23},
        {"num_nodes": 1},
        {"topk": 151},
        {"num_steps": 0},
        {"cached": 19},
        {"noise": (torch.zeros(DRAFT_VOCAB),)},
        {"tokens": np.zeros(1, np.int32)},
    ],
)
def test_a_stem_that_does_not_fit_is_refused(changed: dict[str, Any]) -> None:
    net = make_net(make_ops(available()[0]))
    with pytest.raises(ValueError, match=r"expected|does not fit"):
        net.grow([stem(0, **changed)], [root(1)], cache(), fused=True)


def test_a_cache_of_another_shape_is_refused() -> None:
    net = make_net(make_ops(available()[0]))
    kv = KvCache(torch.zeros(2, 8, KV_HEADS, HEAD_DIM), torch.zeros(2, 8, KV_HEADS, HEAD_DIM), 4)
    with pytest.raises(ValueError, match="2 layers"):
        net.grow([stem(0)], [root(1)], kv, fused=True)


def test_the_fallback_runs_networks_op_by_op() -> None:
    ops = TorchOps(1)
    assert ops.recurrent(make_spec(ops)) is None
