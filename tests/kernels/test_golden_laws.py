"""Laws that 200,000 rounds must show: exact with distinct siblings, wrong with repeated ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from graft.kernels.cpu import sample
from graft.kernels.cpu.accept import verify_tree_greedy
from graft.kernels.cpu.choose import choose
from graft.kernels.cpu.library import available
from graft.kernels.trees import VerifyResult, VerifyTrees
from graft.testing.trees import law_rows

RUNS = 200_000
BLOCK = 50_000
VOCAB = 10
ROWS = [
    {3: 0.5, 5: 0.3, 1: 0.2},
    {7: 0.5, 2: 0.5},
    {4: 0.6, 6: 0.4},
    {0: 1.0},
    {8: 0.2, 9: 0.3, 2: 0.5},
    {0: 0.25, 1: 0.75},
]
TOKENS, NEXT_TOKEN, NEXT_SIBLING = [9, 3, 5, 7, 4, 8], [1, 3, 4, -1, 5, -1], [-1, 2, -1, -1, -1, -1]
REPEATED, ROOT_LAW = [9, 3, 0, 0, 0], {0: 0.2, 3: 0.5, 5: 0.3}
WIDTH = 4


def probs_of(rows: list[dict[int, float]]) -> torch.Tensor:
    probs = torch.zeros(len(rows), VOCAB)
    for node, row in enumerate(rows):
        for token, p in row.items():
            probs[node, token] = p
    return probs


def trees_of(
    tokens: list[int], next_token: list[int], next_sibling: list[int], runs: int
) -> VerifyTrees:
    def repeat(values: list[int]) -> torch.Tensor:
        return torch.tensor(values).repeat(runs, 1)

    index = torch.arange(runs * len(tokens)).reshape(runs, -1)
    return VerifyTrees(repeat(tokens), index, repeat(next_token), repeat(next_sibling))


def first_two(result: VerifyResult) -> np.ndarray:
    """[runs, 2]: the first emitted tokens; -1 where there is only one."""
    path = result.accept_index[:, :2].long()
    tokens = result.predicts.long()[path.clamp(min=0)]
    return torch.where(path >= 0, tokens, -1).numpy()


def by_coins(trees: VerifyTrees, probs: torch.Tensor, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    runs, num_nodes = trees.candidates.shape
    coins = torch.from_numpy(generator.random((runs, num_nodes), np.float32))
    final = torch.from_numpy(generator.random(runs, np.float32))
    shared = probs.expand(runs, -1, -1).contiguous()
    return first_two(
        sample.tree_speculative_sampling_target_only(
            trees, (coins, final), shared, (1.0, 1.0), WIDTH
        )
    )


def p_value(tokens: np.ndarray, law: dict[int, float]) -> float:
    seen = np.bincount(tokens, minlength=VOCAB)[list(law)]
    assert seen.sum() == len(tokens), "a token of no probability was emitted"
    return float(chisquare(seen, np.array(list(law.values())) * len(tokens)).pvalue)


def test_coins_over_a_tree_of_distinct_siblings_follow_the_target() -> None:
    trees = trees_of(TOKENS, NEXT_TOKEN, NEXT_SIBLING, BLOCK)
    out = np.concatenate([by_coins(trees, probs_of(ROWS), seed) for seed in range(RUNS // BLOCK)])
    assert p_value(out[:, 0], ROWS[0]) > 0.001
    second = out[out[:, 0] == 5, 1]
    assert (second >= 0).all(), "an accepted token is followed by at least one more"
    assert p_value(second, ROWS[2]) > 0.001


def star(runs: int) -> VerifyTrees:
    return trees_of(REPEATED, [1, -1, -1, -1, -1], [-1, 2, 3, 4, -1], runs)


def test_coins_over_repeated_siblings_are_wrong_and_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probs = probs_of([ROOT_LAW, *[{0: 1.0}] * 4])
    with pytest.raises(ValueError, match="token 0"):
        by_coins(star(1), probs, 0)
    monkeypatch.setattr(sample, "refuse_duplicate_siblings", lambda trees: None)
    out = np.concatenate([by_coins(star(BLOCK), probs, seed) for seed in range(RUNS // BLOCK)])
    share = np.bincount(out[:, 0], minlength=VOCAB) / RUNS
    # Each repetition adds its mass again, until nothing is left for the token that was not drafted.
    assert share[3] == pytest.approx(0.5, abs=0.005)
    assert share[0] == pytest.approx(0.5, abs=0.005)
    assert share[5] == pytest.approx(0.0, abs=0.0005)


def test_the_coupled_rule_is_right_even_over_repeated_siblings() -> None:
    # Without a native library the reference chooses row by row, in a minute for all of them.
    runs = RUNS if available() else 20_000
    logits = torch.log(probs_of([ROOT_LAW])).repeat(runs, 1)
    rows = law_rows(runs, seed=list(range(runs)), position=7)
    chosen = torch.full((runs, len(REPEATED)), -1, dtype=torch.int32)
    chosen[:, 0] = choose(logits, rows)
    out = first_two(verify_tree_greedy(star(runs), chosen, WIDTH))
    assert p_value(out[:, 0], ROOT_LAW) > 0.001
