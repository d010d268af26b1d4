"""The law of emitted tokens under every accept rule, through the steps of a real, tiny target."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from graft.common.draft_probs import Distribution, distribution, draw_uniform
from graft.common.sampling import Sampling
from graft.common.tree import chain, from_parents
from graft.kernels.reference.choose import target_probs
from graft.testing.plain import Plain
from graft.testing.replica import Replica, Shape
from graft.testing.trees import law_rows
from graft.v1.sampling_pb2 import AcceptRule
from graft.v1.tree_pb2 import TreeRefusal
from graft.verify.shelf import Proposal

COUPLED = AcceptRule.ACCEPT_RULE_COUPLED
TARGET_ONLY = AcceptRule.ACCEPT_RULE_TARGET_ONLY
REJECTION = AcceptRule.ACCEPT_RULE_REJECTION
BLOCK = AcceptRule.ACCEPT_RULE_BLOCK
CHAINS = pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=["rejection", "block"])
EVERY = pytest.mark.parametrize(
    "rule",
    [COUPLED, TARGET_ONLY, REJECTION, BLOCK],
    ids=["coupled", "target_only", "rejection", "block"],
)
PROMPT = list(b"a fair coin")
EMITTED = 4
TOP_K = 3
TEMPERATURE = 0.8
FEW, MANY = 400, 20_000
WAVE = 128


class Truth:
    """The target's own probabilities, from forwards over whole texts."""

    def __init__(self, plain: Plain) -> None:
        self.plain = plain
        self._known: dict[tuple[int, ...], dict[int, float]] = {}

    def after(self, tokens: Sequence[int]) -> dict[int, float]:
        """What may follow, and how likely it is."""
        key = tuple(tokens)
        if key not in self._known:
            logits = self.plain.log_probs(key)[-1:].float()
            rows = law_rows(1, temperature=TEMPERATURE, top_k=TOP_K)
            probs = target_probs(logits, rows)[0]
            self._known[key] = {int(t): float(probs[t]) for t in torch.nonzero(probs).flatten()}
        return self._known[key]

    def joint(self, prompt: Sequence[int], count: int) -> dict[tuple[int, ...], float]:
        """The law of the next `count` tokens."""
        law: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(count):
            law = {
                (*text, token): p * q
                for text, p in law.items()
                for token, q in self.after([*prompt, *text]).items()
            }
        return law

    def ranked(self, tokens: Sequence[int]) -> list[int]:
        """Likeliest first."""
        law = self.after(tokens)
        return sorted(law, key=lambda token: -law[token])


Guess = Callable[[list[int], Sampling], Proposal]
Maker = Callable[[Truth], Guess]


def damaged(truth: Truth, tokens: Sequence[int]) -> Distribution:
    """A drafter's distribution: the target's, turned the wrong way round and mixed."""
    ranked = truth.ranked(tokens)
    weights = [0.1 + 0.3 * place for place in range(len(ranked))]
    outside = next(token for token in range(320) if token not in ranked)
    return distribution([*ranked, outside], [*weights, 0.2])


def drawn(truth: Truth) -> Guess:
    """Draws chains of three as the protocol says."""

    def guess(tokens: list[int], sampling: Sampling) -> Proposal:
        text, rows = list(tokens), []
        for step in range(3):
            rows.append(damaged(truth, text))
            text.append(rows[-1].draw(draw_uniform(sampling.seed, len(tokens), step)))
        return Proposal(chain(text[len(tokens) - 1 :]), probs=tuple(rows))

    return guess


def argmax_with_softmax(truth: Truth) -> Guess:
    """The fault: proposes its likeliest token and sends the distribution as if it had drawn it."""

    def guess(tokens: list[int], sampling: Sampling) -> Proposal:
        text, rows = list(tokens), []
        for _ in range(2):
            rows.append(damaged(truth, text))
            text.append(int(rows[-1].tokens[int(rows[-1].probs.argmax())]))
        return Proposal(chain(text[len(tokens) - 1 :]), probs=tuple(rows))

    return guess


def certain_chain(truth: Truth) -> Guess:
    """The second likeliest token all along, drawn from nothing."""

    def guess(tokens: list[int], sampling: Sampling) -> Proposal:
        text = list(tokens)
        for _ in range(3):
            text.append(truth.ranked(text)[1])
        return Proposal(chain(text[len(tokens) - 1 :]), one_hot=True)

    return guess


def likely_siblings(truth: Truth) -> Guess:
    """All that may follow as siblings, the likeliest last, and a level below the first two."""

    def guess(tokens: list[int], sampling: Sampling) -> Proposal:
        nodes, parents = [tokens[-1]], [-1]
        for token in truth.ranked(tokens)[::-1]:
            nodes.append(token)
            parents.append(0)
        for parent in (1, 2):
            for token in truth.ranked([*tokens, nodes[parent]])[:2]:
                nodes.append(token)
                parents.append(parent)
        return Proposal(from_parents(nodes, parents), one_hot=True)

    return guess


def always_wrong(length: int) -> Maker:
    """Tokens that the target cannot take."""

    def make(truth: Truth) -> Guess:
        def guess(tokens: list[int], sampling: Sampling) -> Proposal:
            wrong = next(t for t in range(320) if t not in truth.after(tokens))
            return Proposal(chain([tokens[-1], *[wrong] * length]), one_hot=True)

        return guess

    return make


def emit(plain: Plain, guess: Guess, sampling: Sampling, runs: int) -> tuple[Counter, Replica]:
    """What `runs` sessions with seeds of their own write."""
    replica = Replica(plain, Shape(max_running=64, max_step_rows=1024, context=32))
    several = []
    for seed in range(runs):
        law = replace(sampling, seed=seed * 7919 + 13)
        several.append(
            replica.open(PROMPT, EMITTED, law, lambda tokens, law=law: guess(tokens, law))
        )
        if len(several) % WAVE == 0:
            replica.run()
    replica.run()
    return Counter(tuple(one.tokens) for one in several), replica


def p_value(seen: Counter, law: dict[tuple[int, ...], float]) -> float:
    """Of the G-test; outcomes expected less than 5 times are pooled."""
    runs = sum(seen.values())
    if set(seen) - set(law):
        return 0.0
    texts = sorted(law)
    expected = np.array([law[text] for text in texts]) * runs
    found = np.array([seen[text] for text in texts], float)
    rare = expected < 5
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        found = np.append(found[~rare], found[rare].sum())
    g = 2 * np.sum(np.where(found > 0, found * np.log(np.maximum(found, 1) / expected), 0))
    return float(chi2.sf(g, len(found) - 1))


def law_of(rule: AcceptRule.ValueType, **fields: float) -> Sampling:
    return Sampling(temperature=TEMPERATURE, top_k=TOP_K, rule=rule, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def truth(plain: Plain) -> Truth:
    return Truth(plain)


def check(truth: Truth, rule: AcceptRule.ValueType, make: Maker, runs: int) -> Replica:
    seen, replica = emit(truth.plain, make(truth), law_of(rule), runs)
    p = p_value(seen, truth.joint(PROMPT, EMITTED))
    assert p > 0.001, f"p = {p:.2g} over {runs} runs"
    return replica


@EVERY
def test_tokens_follow_the_target_under_likely_siblings(
    truth: Truth, rule: AcceptRule.ValueType
) -> None:
    tally = check(truth, rule, likely_siblings, FEW).scheduler.tally
    assert tally.accepted > FEW / 20
    assert (tally.trees_cut > 0) == (rule in (REJECTION, BLOCK))


@EVERY
def test_tokens_follow_the_target_under_a_certain_chain(
    truth: Truth, rule: AcceptRule.ValueType
) -> None:
    assert check(truth, rule, certain_chain, FEW).scheduler.tally.accepted > FEW / 20


@CHAINS
def test_tokens_follow_the_target_under_drawn_chains(
    truth: Truth, rule: AcceptRule.ValueType
) -> None:
    tally = check(truth, rule, drawn, FEW).scheduler.tally
    assert tally.accepted > FEW / 4
    assert tally.trees_redrawn == 0


@CHAINS
def test_a_drafter_that_lies_about_its_draws_is_corrected(
    truth: Truth, rule: AcceptRule.ValueType
) -> None:
    tally = check(truth, rule, argmax_with_softmax, FEW).scheduler.tally
    assert tally.trees_redrawn > FEW / 2


@CHAINS
def test_the_lie_would_show_without_the_correction(
    truth: Truth, rule: AcceptRule.ValueType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Distribution, "draw", lambda row, _: int(row.tokens[row.probs.argmax()]))
    seen, _ = emit(truth.plain, argmax_with_softmax(truth), law_of(rule), 2 * FEW)
    assert p_value(seen, truth.joint(PROMPT, EMITTED)) < 1e-6


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("rule", [TARGET_ONLY, REJECTION], ids=["target_only", "rejection"])
def test_a_drafter_that_is_always_wrong_changes_nothing(
    truth: Truth, rule: AcceptRule.ValueType, length: int
) -> None:
    assert check(truth, rule, always_wrong(length), FEW // 2).scheduler.tally.accepted == 0


@CHAINS
def test_a_tree_without_probabilities_is_refused_and_the_round_runs_without(
    truth: Truth, rule: AcceptRule.ValueType
) -> None:
    def silent(truth: Truth) -> Guess:
        inner = certain_chain(truth)
        return lambda tokens, sampling: replace(inner(tokens, sampling), one_hot=False)

    tally = check(truth, rule, silent, FEW // 2).scheduler.tally
    assert tally.drafted == 0
    assert tally.refused[TreeRefusal.TREE_REFUSAL_NO_PROBS] >= FEW // 2


def test_a_lossy_threshold_shows_in_the_law_and_in_the_count(truth: Truth) -> None:
    lossy = law_of(TARGET_ONLY, threshold_single=0.1)
    seen, replica = emit(truth.plain, certain_chain(truth), lossy, 2 * FEW)
    assert p_value(seen, truth.joint(PROMPT, EMITTED)) < 1e-6
    assert set(replica.scheduler.tally.rules) == {"target_only_lossy"}


ALL = (COUPLED, TARGET_ONLY, REJECTION, BLOCK)
CASES: list[tuple[AcceptRule.ValueType, Maker]] = [
    *itertools.product(ALL, (likely_siblings, certain_chain, always_wrong(1), always_wrong(4))),
    *itertools.product((REJECTION, BLOCK), (drawn, argmax_with_softmax)),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_laws_hold_over_twenty_thousand_runs(truth: Truth, case: int) -> None:
    rule, make = CASES[case]
    tally = check(truth, rule, make, MANY).scheduler.tally
    print(f"{AcceptRule.Name(rule)}, {make.__qualname__}: accepted {tally.accepted}")
