"""Triton's coin rules and simulated acceptance against the reference, in its interpreter."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.common.tree import Tree, from_parents
from graft.kernels.gpu import sample as gpu
from graft.kernels.gpu import simulate as gpu_simulate
from graft.kernels.reference import sample as reference
from graft.kernels.reference import simulate as reference_simulate
from graft.kernels.reference.simulate import SimulatedMethod, SimulatedTokens, Simulation
from graft.kernels.trees import VerifyTrees

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SEEDS = st.integers(0, 2**32 - 1)
VOCAB = 24


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks even at a small vocabulary."""
    monkeypatch.setattr(gpu, "BLOCK", 8)


def probabilities(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    """Rows that sum to about 1, half of their tokens without mass; some rows have one token."""
    raw = rng.exponential(size=(*shape, VOCAB)) * (rng.random((*shape, VOCAB)) < 0.5)
    raw[..., 0] += 1e-3
    sure = rng.random(shape) < 0.2
    raw[sure] = np.eye(VOCAB)[rng.integers(0, VOCAB, int(sure.sum()))]
    return torch.from_numpy((raw / raw.sum(-1, keepdims=True)).astype(np.float32))


def coins(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    """Both ends of the open interval among them."""
    drawn = rng.choice([rng.random(), 2.0**-24, 1 - 2.0**-24, *rng.random(6)], shape)
    return torch.from_numpy(drawn.astype(np.float32))


def random_tree(rng: np.random.Generator, num_nodes: int) -> Tree:
    parents = [-1] + [int(rng.integers(0, node)) for node in range(1, num_nodes)]
    order = rng.permutation(VOCAB)
    return from_parents([0] + [int(order[i % VOCAB]) for i in range(1, num_nodes)], parents)


def padded(trees: list[Tree]) -> VerifyTrees:
    def rows(name: str) -> torch.Tensor:
        return torch.from_numpy(np.stack([getattr(tree, name) for tree in trees])).long()

    index = torch.arange(len(trees) * trees[0].num_nodes).view(len(trees), -1)
    return VerifyTrees(rows("tokens"), index, rows("next_token"), rows("next_sibling"))


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(1, 14), st.integers(1, 3), st.integers(1, 6))
def test_target_only_walks_equal_the_reference(
    seed: int, num_nodes: int, batch: int, width: int
) -> None:
    rng = np.random.default_rng(seed)
    trees = padded([random_tree(rng, num_nodes) for _ in range(batch)])
    given_coins = (coins(rng, batch, num_nodes), coins(rng, batch))
    probs = probabilities(rng, batch, num_nodes)
    thresholds = (float(rng.choice([1.0, 0.3])), float(rng.choice([1.0, 0.6, 0.0])))
    expected = reference.tree_speculative_sampling_target_only(
        trees, given_coins, probs, thresholds, width
    )
    result = gpu.tree_speculative_sampling_target_only(trees, given_coins, probs, thresholds, width)
    for name, left, right in zip(expected._fields, result, expected, strict=True):
        assert torch.equal(left, right), name


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(0, 6), st.integers(1, 3), st.sampled_from(["chain", "block"]))
def test_chains_equal_the_reference(seed: int, steps: int, batch: int, rule: str) -> None:
    rng = np.random.default_rng(seed)
    target = probabilities(rng, batch, steps + 1)
    draft = probabilities(rng, batch, steps)
    mixed = (target[:, :steps] + draft) / 2 if rng.random() < 0.7 else draft
    drafts = torch.from_numpy(rng.integers(0, VOCAB, (batch, steps)))
    for b in range(batch):
        for step in range(steps):
            if rng.random() < 0.8:
                drafts[b, step] = int(mixed[b, step].argmax())
    if steps and rng.random() < 0.2:
        mixed[0, 0, int(drafts[0, 0])] = float(rng.choice([np.nan, 2.0, -1.0, 0.0]))
    name = f"{rule}_speculative_sampling"
    arguments = (
        drafts,
        torch.from_numpy(rng.integers(0, steps + 1, batch)),
        (coins(rng, batch, steps), coins(rng, batch)),
        target,
        mixed.contiguous(),
    )
    expected = getattr(reference, name)(*arguments)
    result = getattr(gpu, name)(*arguments)
    assert torch.equal(result.tokens, expected.tokens)
    assert torch.equal(result.accept_token_num, expected.accept_token_num)


def test_a_row_without_mass_gives_the_last_token() -> None:
    trees = padded([from_parents([0], [-1])])
    result = gpu.tree_speculative_sampling_target_only(
        trees, (torch.zeros(1, 1), torch.tensor([0.5])), torch.zeros(1, 1, VOCAB), (1.0, 1.0), 1
    )
    assert result.predicts.tolist() == [VOCAB - 1]


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.sampled_from(SimulatedMethod), st.floats(1.0, 9.0, width=32), st.integers(1, 7))
def test_simulated_lengths_equal_the_reference(
    seed: int, method: SimulatedMethod, accept_length: float, width: int
) -> None:
    rng = np.random.default_rng(seed)
    simulation = Simulation(accept_length, method)
    seeds = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, 9))
    positions = torch.from_numpy(rng.integers(0, 1 << 20, 9).astype(np.int32))
    expected = reference_simulate.simulated_lengths(simulation, seeds, positions, width)
    assert torch.equal(
        gpu_simulate.simulated_lengths(simulation, seeds, positions, width), expected
    )


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.sampled_from(SimulatedTokens), st.integers(1, 9), st.integers(1, 3))
def test_simulated_results_equal_the_reference(
    seed: int, tokens: SimulatedTokens, num_nodes: int, batch: int
) -> None:
    rng = np.random.default_rng(seed)
    chain = from_parents(range(num_nodes), range(-1, num_nodes - 1))
    trees = padded([chain] * batch)
    predict = torch.from_numpy(rng.integers(0, VOCAB, (batch, num_nodes)))
    lengths = torch.from_numpy(rng.integers(1, num_nodes + 1, batch).astype(np.int32))
    simulation = Simulation(2.0, tokens=tokens)
    arguments = (simulation, trees, predict, lengths, num_nodes)
    expected = reference_simulate.simulate_accept(*arguments)
    for left, right in zip(gpu_simulate.simulate_accept(*arguments), expected, strict=True):
        assert torch.equal(left, right)
