"""Coin rules, simulated acceptance and KV moves on the CPU equal the reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.common.tree import Tree, chain
from graft.kernels.cpu import keep as fast_keep
from graft.kernels.cpu import sample as fast
from graft.kernels.cpu import simulate as fast_simulate
from graft.kernels.cpu.accept import accept
from graft.kernels.ops import KvCache
from graft.kernels.reference import keep as plain_keep
from graft.kernels.reference import sample as plain
from graft.kernels.reference import simulate as plain_simulate
from graft.kernels.reference.simulate import SimulatedMethod, SimulatedTokens, Simulation
from graft.kernels.rows import tree_rows
from graft.kernels.trees import VerifyTrees
from graft.testing.trees import random_tree, trees

VOCAB = 7


def padded(batch: list[Tree]) -> VerifyTrees:
    size = max(tree.num_nodes for tree in batch)

    def column(name: str, fill: int) -> torch.Tensor:
        rows = np.full((len(batch), size), fill, np.int64)
        for row, tree in zip(rows, batch, strict=True):
            row[: tree.num_nodes] = getattr(tree, name)
        return torch.from_numpy(rows)

    return VerifyTrees(
        column("tokens", 0),
        torch.arange(len(batch) * size).reshape(len(batch), size),
        column("next_token", -1),
        column("next_sibling", -1),
    )


def random_probs(generator: torch.Generator, *shape: int) -> torch.Tensor:
    logits = torch.randn(*shape, VOCAB, generator=generator) * 2
    logits[torch.rand(logits.shape, generator=generator) < 0.3] = -30.0
    probs = torch.softmax(logits, dim=-1)
    return torch.where(probs < 1e-6, 0.0, probs)


@given(
    batch=st.lists(trees(vocab_size=VOCAB), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    width=st.integers(1, 5),
    thresholds=st.tuples(st.sampled_from([1.0, 0.3, 0.0]), st.sampled_from([1.0, 0.5, 0.0])),
)
@settings(max_examples=150, deadline=None)
def test_target_only_walks_are_the_reference_s(
    batch: list[Tree], seed: int, width: int, thresholds: tuple[float, float]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    given_trees = padded(batch)
    shape = given_trees.candidates.shape
    coins = torch.rand(*shape, generator=generator), torch.rand(shape[0], generator=generator)
    probs = random_probs(generator, *shape)
    arguments = (given_trees, coins, probs, thresholds, width)
    got = fast.tree_speculative_sampling_target_only(*arguments)
    expected = plain.tree_speculative_sampling_target_only(*arguments)
    for left, right in zip(got, expected, strict=True):
        assert torch.equal(left, right)


@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 4),
    steps=st.integers(0, 5),
    spoiled=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_chain_and_block_verdicts_are_the_reference_s(
    seed: int, batch: int, steps: int, spoiled: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(0, VOCAB, (batch, steps), generator=generator)
    target = random_probs(generator, batch, steps + 1)
    draft = random_probs(generator, batch, steps)
    if seed % 3 == 0:
        draft = target[:, :steps].clone()
    if spoiled and steps:
        draft[0, 0, : VOCAB // 2] = float("nan")
        target[-1, -1] = 0.0
    arguments = (
        drafts,
        torch.randint(0, steps + 1, (batch,), generator=generator),
        (
            torch.rand(batch, steps, generator=generator) ** 2,
            torch.rand(batch, generator=generator),
        ),
        target,
        draft,
    )
    for name in ("chain_speculative_sampling", "block_speculative_sampling"):
        got, expected = getattr(fast, name)(*arguments), getattr(plain, name)(*arguments)
        assert torch.equal(got.tokens, expected.tokens), name
        assert torch.equal(got.accept_token_num, expected.accept_token_num), name


def test_duplicate_siblings_are_refused() -> None:
    twins = VerifyTrees(
        torch.tensor([[9, 1, 2, 3, 3]]),
        torch.arange(5).unsqueeze(0),
        torch.tensor([[1, 3, -1, -1, -1]]),
        torch.tensor([[-1, 2, -1, 4, -1]]),
    )
    for module in (fast, plain):
        with pytest.raises(ValueError, match="children of node 1 of tree 0 hold token 3"):
            module.refuse_duplicate_siblings(twins)


@given(
    seed=st.integers(0, 2**31),
    length=st.floats(1, 9),
    method=st.sampled_from(SimulatedMethod),
    tokens=st.sampled_from(SimulatedTokens),
    steps=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_simulated_results_are_the_reference_s(
    seed: int, length: float, method: SimulatedMethod, tokens: SimulatedTokens, steps: int
) -> None:
    simulation = Simulation(length, method, tokens)
    given_trees = padded([chain(range(seed % 7, seed % 7 + steps + 1))] * 2)
    lengths = fast_simulate.simulated_lengths(
        simulation, torch.tensor([seed, -seed]), torch.tensor([1, 2]), steps + 1
    )
    assert bool(((lengths >= 1) & (lengths <= steps + 1)).all())
    predict = torch.arange(2 * (steps + 1)).reshape(2, steps + 1)
    arguments = (simulation, given_trees, predict, lengths, steps + 1)
    for left, right in zip(
        fast_simulate.simulate_accept(*arguments),
        plain_simulate.simulate_accept(*arguments),
        strict=True,
    ):
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("method", "wanted", "spread"),
    [(SimulatedMethod.MATCH_EXPECTED, 3.3, 0.21), (SimulatedMethod.MULTINOMIAL, 5.0, 1.083)],
)
def test_simulated_lengths_have_the_wanted_mean_and_variance(
    method: SimulatedMethod, wanted: float, spread: float
) -> None:
    count = 4000
    lengths = plain_simulate.simulated_lengths(
        Simulation(wanted, method), torch.arange(count), torch.arange(count), 10
    ).double()
    assert float(lengths.mean()) == pytest.approx(wanted, abs=0.06)
    assert float(lengths.var()) == pytest.approx(spread, rel=0.08)


def test_a_simulated_length_below_the_bonus_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Simulation(0.5)


def test_fixed_tokens_are_written_at_the_accepted_rows() -> None:
    result = fast_simulate.simulate_accept(
        Simulation(2.0), padded([chain([4, 5, 6])]), torch.zeros(1, 3), torch.tensor([2]), 3
    )
    assert result.predicts.tolist() == [100, 100, -1]
    assert result.accept_index.tolist() == [[0, 1, -1]]
    assert result.accept_token_num.tolist() == [1]


def test_nothing_moves_when_the_first_path_is_accepted() -> None:
    rows = tree_rows([chain([1, 2, 3])])
    accepted, index = accept(rows, torch.tensor([2, 3, 0], dtype=torch.int32))
    slots = torch.tensor([5, 6, 7], dtype=torch.int32)
    assert fast_keep.keep_moves(rows.ptr, accepted, index, slots)[0].tolist() == []


@given(seed=st.integers(0, 2**31), count=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_kept_keys_stand_in_path_order(seed: int, count: int) -> None:
    generator = np.random.default_rng(seed)
    rows = tree_rows([random_tree(generator, 10, 3) for _ in range(count)])
    chosen = torch.from_numpy(generator.integers(0, 3, len(rows.tokens)).astype(np.int32))
    slots = torch.from_numpy(generator.permutation(60)[: len(rows.tokens)].astype(np.int32))
    accepted, index = accept(rows, chosen)
    moves = fast_keep.keep_moves(rows.ptr, accepted, index, slots)
    for left, right in zip(
        moves, plain_keep.keep_moves(rows.ptr, accepted, index, slots), strict=True
    ):
        assert torch.equal(left, right)
    values = torch.arange(2 * 60, dtype=torch.float32).reshape(2, 60, 1, 1)
    caches = [KvCache(values.clone(), -values, 4) for _ in range(2)]
    fast_keep.keep(caches[0], *moves)
    plain_keep.keep(caches[1], *moves)
    assert torch.equal(caches[0].keys, caches[1].keys)
    assert torch.equal(caches[0].values, caches[1].values)
    for tree in range(count):
        start = int(rows.ptr[tree])
        path = index[tree, : int(accepted[tree]) + 1].long() + start
        here = slots[start : start + len(path)].long()
        assert torch.equal(caches[0].keys[:, here], values[:, slots[path].long()])
