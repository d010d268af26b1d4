"""The native choice has the bits of the reference, with every instruction set it was built for."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.common.tree import Tree
from graft.kernels.cpu.accept import accept, verify_tree_greedy
from graft.kernels.cpu.choose import Native, choose, target_probs
from graft.kernels.cpu.library import available, load
from graft.kernels.ops import ChoiceRows
from graft.kernels.reference import accept as plain_accept
from graft.kernels.reference import choose as plain
from graft.kernels.reference.build_tree import links_from_parents
from graft.kernels.rows import tree_rows
from graft.kernels.trees import VerifyTrees
from graft.testing.trees import law_rows, parent_lists, trees

ISAS = available() or ("none",)


def by(isa: str) -> Native | None:
    found = load(isa)
    return None if found is None else Native(found[1])


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, ChoiceRows]:
    """Rows of mixed laws over logits with ties, -inf, NaN, adjustments and masks."""
    num_rows = draw(st.integers(1, 4))
    vocab = draw(st.sampled_from([1, 3, 31, 33, 64, 65, 200, 1000]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = generator.standard_normal((num_rows, vocab)) * draw(st.sampled_from([0, 1, 5, 40]))
    logits = logits.astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits * 2) / 2
    if draw(st.booleans()):
        logits[generator.random(logits.shape) < draw(st.sampled_from([0.1, 0.9, 1.0]))] = -np.inf
    if draw(st.integers(0, 9)) == 0:
        logits[draw(st.integers(0, num_rows - 1)), draw(st.integers(0, vocab - 1))] = draw(
            st.sampled_from([np.nan, -np.nan, np.inf])
        )

    def column(values: list[float]) -> list[float]:
        return [draw(st.sampled_from(values)) for _ in range(num_rows)]

    rows = law_rows(
        num_rows,
        temperature=column([0.0, 1e-6, 0.3, 1.0, 1.7]),
        top_k=[int(k) for k in column([0, 1, 2, 5, 50, 5000])],
        top_p=column([0.001, 0.5, 0.9, 0.9999999, 1.0]),
        min_p=column([0.0, 0.05, 0.9, 1.0]),
        seed=[draw(st.integers(-(2**63), 2**63 - 1)) for _ in range(num_rows)],
        position=[draw(st.integers(0, 2**31 - 1)) for _ in range(num_rows)],
    )
    if draw(st.booleans()):
        words = generator.integers(-(2**31), 2**31, (num_rows, (vocab + 31) // 32))
        rows = dataclasses.replace(rows, bitmask=torch.from_numpy(words.astype(np.int32)))
    if draw(st.booleans()):
        counts = [draw(st.integers(0, min(vocab, 5))) for _ in range(num_rows)]
        named = [generator.choice(vocab, count, replace=False) for count in counts]
        total = sum(counts)
        rows = dataclasses.replace(
            rows,
            adjust_ptr=torch.from_numpy(np.cumsum([0, *counts]).astype(np.int32)),
            adjust_tokens=torch.from_numpy(np.concatenate(named).astype(np.int32)),
            adjust_ratio=torch.from_numpy(generator.uniform(0.5, 2, total).astype(np.float32)),
            adjust_shift=torch.from_numpy(generator.normal(0, 3, total).astype(np.float32)),
        )
    return torch.from_numpy(logits), rows


@pytest.mark.parametrize("isa", ISAS)
@given(case=cases())
@settings(max_examples=150, deadline=None)
def test_choices_and_probabilities_are_the_reference_s(
    isa: str, case: tuple[torch.Tensor, ChoiceRows]
) -> None:
    logits, rows = case
    assert choose(logits, rows, by(isa)).tolist() == plain.choose(logits, rows).tolist()
    assert torch.equal(target_probs(logits, rows, by(isa)), plain.target_probs(logits, rows))


@pytest.mark.parametrize("isa", ISAS)
def test_a_large_vocabulary_gives_the_reference_s_choice(isa: str) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, 128_257, generator=generator) * 4
    rows = law_rows(
        6,
        temperature=[1.0, 0.7, 1.0, 1.3, 1.0, 100.0],
        top_k=[0, 0, 40, 0, 0, 0],
        top_p=[1.0, 1.0, 1.0, 0.95, 1.0, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.02, 0.0],
        seed=7,
        position=[1, 2, 3, 4, 5, 6],
    )
    assert choose(logits, rows, by(isa)).tolist() == plain.choose(logits, rows).tolist()


def long_rows(seed: int, vocab: int) -> torch.Tensor:
    """Rows of every flatness, with ties, -inf and likely tokens where a sample may miss them."""
    generator = np.random.default_rng(seed)
    rows = [generator.standard_normal(vocab) * scale for scale in (0.0, 0.01, 0.5, 2, 3, 8, 200)]
    rows.append(np.round(rows[4]))
    rows.append(np.where(generator.random(vocab) < 0.9, -np.inf, rows[3]))
    rows += [rows[2].copy() for _ in range(4)]
    rows[-4][generator.integers(0, vocab, 40)] += 9
    rows[-3][16 : vocab // 2 : 256] += 6  # just behind what is sampled
    rows[-2][0 : vocab // 2 : 256] += 6  # only what is sampled
    rows[-1] = np.where(np.arange(vocab) % 256 < 16, -np.inf, rows[-1])
    return torch.from_numpy(np.stack(rows).astype(np.float32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [8192, 8192 + 17, 20_000])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.95, 0.999, 0.9999999])
def test_the_law_of_a_long_row_is_the_reference_s(isa: str, vocab: int, top_p: float) -> None:
    logits = long_rows(vocab, vocab)
    num_rows = len(logits)
    for temperature in (0.8, 30.0):
        rows = law_rows(
            num_rows,
            temperature=temperature,
            top_p=top_p,
            seed=11,
            position=list(range(1, num_rows + 1)),
        )
        assert choose(logits, rows, by(isa)).tolist() == plain.choose(logits, rows).tolist()
        assert torch.equal(target_probs(logits, rows, by(isa)), plain.target_probs(logits, rows))


@pytest.mark.parametrize("isa", ISAS)
def test_ties_between_perturbed_logits_go_to_the_lowest_token(isa: str) -> None:
    # At 2^28 the noise is lost in rounding, so all tokens tie.
    logits = torch.full((1, 200), 2.0**28)
    rows = law_rows(1, seed=3, position=9)
    assert choose(logits, rows, by(isa)).tolist() == plain.choose(logits, rows).tolist() == [0]


def test_a_column_of_another_dtype_is_refused() -> None:
    rows = dataclasses.replace(law_rows(1), top_k=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="top_k is"):
        choose(torch.zeros(1, 4), rows)


def test_an_adjusted_token_outside_the_vocabulary_is_refused() -> None:
    rows = dataclasses.replace(
        law_rows(1),
        adjust_ptr=torch.tensor([0, 1], dtype=torch.int32),
        adjust_tokens=torch.tensor([4], dtype=torch.int32),
        adjust_ratio=torch.ones(1),
        adjust_shift=torch.ones(1),
    )
    with pytest.raises(ValueError, match="outside"):
        choose(torch.zeros(1, 4), rows)


@pytest.mark.parametrize("isa", ISAS)
@given(batch=st.lists(trees(vocab_size=4), max_size=5), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_walks_are_the_reference_s(isa: str, batch: list[Tree], seed: int) -> None:
    rows = tree_rows(batch)
    generator = np.random.default_rng(seed)
    chosen = torch.from_numpy(generator.integers(-1, 4, len(rows.tokens)).astype(np.int32))
    for left, right in zip(
        accept(rows, chosen, by(isa)), plain_accept.accept(rows, chosen), strict=True
    ):
        assert torch.equal(left, right)


@given(
    parents=parent_lists(),
    width=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=100, deadline=None)
def test_padded_walks_are_the_reference_s(parents: list[int], width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    links = links_from_parents(torch.tensor([parents] * 2))
    size = len(parents)
    padded = VerifyTrees(
        torch.randint(0, 3, (2, size), generator=generator),
        torch.arange(2 * size).reshape(2, size),
        links.retrive_next_token,
        links.retrive_next_sibling,
    )
    wanted = torch.randint(0, 3, (2, size), generator=generator)
    got = verify_tree_greedy(padded, wanted, width)
    expected = plain_accept.verify_tree_greedy(padded, wanted, width)
    for left, right in zip(got, expected, strict=True):
        assert torch.equal(left, right)
