"""The law of emitted tokens is the target's own, whatever the drafter does.

A Markov target over 12 tokens is decoded by rounds of speculation until three tokens are out, in
many runs at once; a G-test compares the 12^3 outcomes with the product of the target's own
probabilities. The same test must catch planted bugs, or it would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import chi2

from graft.common.noise import Domain, philox, to_uniform
from graft.kernels.cpu import sample
from graft.kernels.cpu.accept import verify_tree_greedy
from graft.kernels.cpu.build_tree import links_from_parents
from graft.kernels.cpu.choose import choose
from graft.kernels.cpu.library import available
from graft.kernels.ops import ChoiceRows
from graft.kernels.reference.choose import target_probs
from graft.kernels.trees import ChainResult, VerifyResult, VerifyTrees
from graft.testing.trees import law_rows

VOCAB = 12
EMITTED = 3
FIRST_ROOT = 4
FIRST_PREFIX = 9
TEMPERATURE, TOP_K = 0.9, 9
CHAIN = [-1, 0, 1, 2]
TREES = [[-1, 0, 0, 1, 1, 2, 3, 0], [-1, 0, 1, 0, 1, 3, 3, 4, 4, 0]]

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]
Seeds = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Models:
    """Logits after each token, [VOCAB, VOCAB]: of the target, and of a drafter that errs."""

    target: Floats
    draft: Floats

    def law(self) -> Floats:
        """[VOCAB, VOCAB]: the target's probabilities under the test's sampling parameters."""
        rows = law_rows(VOCAB, temperature=TEMPERATURE, top_k=TOP_K)
        return cast(Floats, target_probs(torch.from_numpy(self.target), rows).numpy())


@dataclass(frozen=True, slots=True)
class Round:
    """One round of many runs: the roots, the seeds, and how long each prefix is."""

    models: Models
    seeds: Seeds
    roots: Longs
    prefix: Longs

    def uniforms(self, position: Longs, count: int, domain: Domain) -> Floats:
        """[runs, count]: each run's uniforms at its own position."""
        block = np.arange((count + 3) // 4)
        seeds = cast(int, self.seeds[:, None])  # philox works on arrays of seeds as well
        words = np.stack(philox(seeds, block, position[:, None], 0, domain), axis=-1)
        return to_uniform(words.reshape(len(self.seeds), -1)[:, :count])

    def gumbel(self, position: Longs, domain: Domain) -> Floats:
        """[runs, VOCAB]."""
        return np.asarray(-np.log(-np.log(self.uniforms(position, VOCAB, domain))), np.float32)


Step = Callable[[Round], tuple[Longs, Longs]]


def models(seed: int = 1) -> Models:
    generator = np.random.default_rng(seed)
    target = generator.normal(0, 1.5, (VOCAB, VOCAB))
    draft = target + generator.normal(0, 1.0, (VOCAB, VOCAB))
    return Models(target.astype(np.float32), draft.astype(np.float32))


def emit(step: Step, runs: int, seed: int = 7) -> Longs:
    """[runs, EMITTED]: the first tokens of each run, committed round by round."""
    seeds = np.random.default_rng(seed).integers(0, 2**64, runs, np.uint64)
    out = np.full((runs, EMITTED), -1)
    count = np.zeros(runs, np.int64)
    roots = np.full(runs, FIRST_ROOT)
    shared = models()
    while (open_runs := np.flatnonzero(count < EMITTED)).size:
        prefix = FIRST_PREFIX + count[open_runs]
        tokens, lengths = step(Round(shared, seeds[open_runs], roots[open_runs], prefix))
        for j in range(tokens.shape[1]):
            line = open_runs[(j < lengths) & (count[open_runs] + j < EMITTED)]
            out[line, count[line] + j] = tokens[np.isin(open_runs, line), j]
        count[open_runs] = np.minimum(count[open_runs] + lengths, EMITTED)
        roots[open_runs] = out[open_runs, count[open_runs] - 1]
    return out


def p_value(out: Longs) -> float:
    """Of the G-test; outcomes that are expected less than 5 times are pooled."""
    law = models().law().astype(np.float64)
    joint = law[FIRST_ROOT][:, None, None] * law[:, :, None] * law[None, :, :]
    expected = joint.reshape(-1) * len(out)
    flat = (out[:, 0] * VOCAB + out[:, 1]) * VOCAB + out[:, 2]
    seen = np.bincount(flat, minlength=VOCAB**3).astype(np.float64)
    if seen[expected == 0].any():
        return 0.0
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    seen = np.append(seen[~rare], seen[rare].sum())
    used = expected > 0
    expected, seen = expected[used] * (seen.sum() / expected.sum()), seen[used]
    g = 2 * np.sum(np.where(seen > 0, seen * np.log(np.maximum(seen, 1) / expected), 0))
    return float(chi2.sf(g, len(seen) - 1))


def grow(run: Round, parents: list[int], domain: Domain, position_keyed: bool) -> VerifyTrees:
    """Trees of one shape whose children are the best by q and noise, distinct per parent."""
    runs, num_nodes = len(run.roots), len(parents)
    links = links_from_parents(torch.tensor([parents]))
    depth = links.depth[0].tolist()
    tokens = np.zeros((runs, num_nodes), np.int64)
    tokens[:, 0] = run.roots
    for node in range(num_nodes):
        children = [child for child in range(num_nodes) if parents[child] == node]
        if not children:
            continue
        position = run.prefix + depth[node] if position_keyed else run.prefix
        noise = run.gumbel(position + (0 if position_keyed else 1000 * depth[node]), domain)
        scores = run.models.draft[tokens[:, node]] / TEMPERATURE + noise
        tokens[:, children] = np.argsort(-scores, axis=1)[:, : len(children)]
    index = torch.arange(runs * num_nodes).reshape(runs, num_nodes)
    return VerifyTrees(
        torch.from_numpy(tokens),
        index,
        links.retrive_next_token.repeat(runs, 1),
        links.retrive_next_sibling.repeat(runs, 1),
    )


def emitted(result: VerifyResult) -> tuple[Longs, Longs]:
    path = result.accept_index.long().clamp(min=0)
    return result.predicts[path].long().numpy(), result.accept_token_num.long().numpy() + 1


def chain_emitted(result: ChainResult) -> tuple[Longs, Longs]:
    return result.tokens.long().numpy(), result.accept_token_num.long().numpy() + 1


def coupled(parents: list[int]) -> Step:
    """Drafters see the very noise that the target's choice uses."""
    depth = links_from_parents(torch.tensor([parents])).depth[0].numpy()

    def step(run: Round) -> tuple[Longs, Longs]:
        trees = grow(run, parents, Domain.CHOICE, position_keyed=True)
        tokens = trees.candidates.numpy()
        rows: ChoiceRows = law_rows(
            tokens.size,
            temperature=TEMPERATURE,
            top_k=TOP_K,
            seed=np.repeat(run.seeds.view(np.int64), len(parents)).tolist(),
            position=(run.prefix[:, None] + depth).reshape(-1).tolist(),
        )
        logits = torch.from_numpy(run.models.target[tokens.reshape(-1)])
        chosen = choose(logits, rows).reshape(tokens.shape)
        return emitted(verify_tree_greedy(trees, chosen, len(parents)))

    return step


def target_only(parents: list[int], thresholds: tuple[float, float] = (1.0, 1.0)) -> Step:
    def step(run: Round) -> tuple[Longs, Longs]:
        trees = grow(run, parents, Domain.DRAFT, position_keyed=False)
        probs = torch.from_numpy(run.models.law()[trees.candidates.numpy()])
        coins = run.uniforms(run.prefix, len(parents), Domain.COIN)
        final = run.uniforms(run.prefix, 1, Domain.FINAL)[:, 0]
        both = (torch.from_numpy(coins), torch.from_numpy(final))
        return emitted(
            sample.tree_speculative_sampling_target_only(
                trees, both, probs, thresholds, len(parents)
            )
        )

    return step


def chain_rule(verify: Callable[..., ChainResult], shared_noise: bool = False) -> Step:
    def step(run: Round) -> tuple[Longs, Longs]:
        domain = Domain.CHOICE if shared_noise else Domain.DRAFT
        trees = grow(run, CHAIN, domain, position_keyed=shared_noise)
        tokens, steps = trees.candidates, len(CHAIN) - 1
        target = torch.from_numpy(run.models.law()[tokens.numpy()])
        draft = torch.softmax(torch.from_numpy(run.models.draft) / TEMPERATURE, dim=1)
        coins = run.uniforms(run.prefix, steps, Domain.COIN)
        if shared_noise:
            for j in range(steps):
                own = run.uniforms(run.prefix + j, VOCAB, Domain.CHOICE)
                coins[:, j] = np.take_along_axis(own, tokens[:, j + 1 : j + 2].numpy(), 1)[:, 0]
        final = run.uniforms(run.prefix, 1, Domain.FINAL)[:, 0]
        return chain_emitted(
            verify(
                tokens[:, 1:],
                torch.full((len(tokens),), steps),
                (torch.from_numpy(coins), torch.from_numpy(final)),
                target,
                draft[tokens[:, :steps]],
            )
        )

    return step


RULES = {
    "coupled": coupled(TREES[0]),
    "coupled wide": coupled(TREES[1]),
    "target_only": target_only(TREES[0]),
    "target_only wide": target_only(TREES[1]),
    "rejection": chain_rule(sample.chain_speculative_sampling),
    "block": chain_rule(sample.block_speculative_sampling),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_first_three_tokens_follow_the_target_s_law(rule: str) -> None:
    # Without a native library the reference chooses row by row, in minutes for 20,000 runs.
    assert p_value(emit(RULES[rule], 20_000 if available() else 4_000)) > 0.001


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", RULES)
def test_the_law_holds_over_200_000_runs(rule: str) -> None:
    p = p_value(emit(RULES[rule], 200_000, seed=8))
    print(f"{rule}: p = {p:.4f}")
    assert p > 0.001


def test_shared_noise_with_a_ratio_test_is_caught() -> None:
    bug = chain_rule(sample.chain_speculative_sampling, shared_noise=True)
    assert p_value(emit(bug, 20_000)) < 1e-6


def test_duplicate_siblings_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = target_only(TREES[0])
    plain_grow = grow

    def repeat_first_child(run: Round, *rest: object) -> VerifyTrees:
        trees = plain_grow(run, TREES[0], Domain.DRAFT, position_keyed=False)
        trees.candidates[:, 2] = trees.candidates[:, 1]
        return trees

    monkeypatch.setattr(sample, "refuse_duplicate_siblings", lambda trees: None)
    monkeypatch.setitem(
        honest.__globals__, "grow", lambda *rest, **named: repeat_first_child(*rest)
    )
    assert p_value(emit(honest, 20_000)) < 1e-6


def test_a_lossy_threshold_is_caught() -> None:
    assert p_value(emit(target_only(TREES[0], (1.0, 0.7)), 20_000)) < 1e-6


def test_block_verification_accepts_more_than_one_by_one() -> None:
    def mean_length(verify: Callable[..., ChainResult]) -> float:
        runs = 20_000
        run = Round(
            models(),
            np.arange(runs, dtype=np.uint64),
            np.full(runs, FIRST_ROOT),
            np.full(runs, FIRST_PREFIX),
        )
        return float(chain_rule(verify)(run)[1].mean())

    one_by_one = mean_length(sample.chain_speculative_sampling)
    assert mean_length(sample.block_speculative_sampling) > one_by_one + 0.01
