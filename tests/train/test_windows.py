"""Windows slice an endless stream of shuffled sequences, whole and in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graft.draft.checkpoints.borrowed import borrow
from graft.testing.models import write_tiny_model
from graft.testing.training import MemoryCorpus, law_maker
from graft.train.windows import Windows, WindowShape

LENGTHS = (9, 5, 14, 7)
LAYERS = (1, 2)


def windows(seed: int | None, length: int = 8, count: int = 2) -> tuple[MemoryCorpus, Windows]:
    corpus = MemoryCorpus(LENGTHS, LAYERS)
    return corpus, Windows(corpus, corpus.refs, LAYERS, WindowShape(length, 3, count), seed)


def test_an_epoch_holds_every_row_once() -> None:
    _, cut = windows(seed=5)
    rows = sum(n - 1 for n in LENGTHS)
    seen: list[int] = []
    for number in range(4):
        batch = cut.batch(number)
        seen += batch.tokens[:, : batch.length].flatten().tolist()
    corpus, _ = windows(seed=5)
    expected = sorted(int(token) for ref in corpus.refs for token in corpus.tokens(ref)[:-1])
    assert sorted(seen[:rows]) == expected


def test_rows_carry_the_token_behind_them_and_their_place() -> None:
    corpus, cut = windows(seed=None, length=16, count=1)
    batch = cut.batch(0)
    assert batch.segments[0].tolist() == [0] * 8 + [1] * 4 + [2] * 7
    assert batch.positions[0].tolist() == [*range(8), *range(4), *range(7)]
    first = corpus.tokens(corpus.refs[0])
    assert batch.tokens[0, :8].tolist() == first[:-1].tolist()
    assert batch.following[0, :8].tolist() == first[1:].tolist()
    assert batch.answer[0, :4].tolist() == [False, False, True, True]
    assert batch.greedy[0].tolist() == [True] * 8 + [False] * 4 + [True] * 7
    assert torch.equal(batch.states[0, :8], corpus.states(corpus.refs[0]))


def test_states_come_in_the_order_that_is_asked_for() -> None:
    corpus = MemoryCorpus(LENGTHS, LAYERS)
    cut = Windows(corpus, corpus.refs, (2, 1), WindowShape(8, 3, 1), None)
    assert torch.equal(cut.batch(0).states[0, :8], corpus.states(corpus.refs[0]).flip(1))


def test_margins_overlap_the_next_window() -> None:
    _, cut = windows(seed=1, count=1)
    one, two = cut.batch(0), cut.batch(1)
    assert torch.equal(one.tokens[0, 8:], two.tokens[0, :3])


def test_batches_are_a_function_of_their_number() -> None:
    _, cut = windows(seed=1)
    late = cut.batch(9)
    _, other = windows(seed=1)
    again = other.batch(9)
    assert torch.equal(late.tokens, again.tokens)
    assert late.seed == again.seed != cut.batch(8).seed


def test_epochs_are_shuffled_differently() -> None:
    _, cut = windows(seed=1, length=31, count=1)
    assert not torch.equal(cut.batch(0).tokens[0, :31], cut.batch(1).tokens[0, :31])


def test_laws_are_those_of_the_rows_last_states(tmp_path_factory: pytest.TempPathFactory) -> None:
    target = borrow(str(write_tiny_model(tmp_path_factory.mktemp("target"))))
    corpus = MemoryCorpus(LENGTHS, LAYERS)
    drafted = torch.arange(100) * 3
    maker = law_maker(target, drafted)
    table = corpus.laws(maker)
    cut = Windows(corpus, corpus.refs, LAYERS, WindowShape(8, 3, 2), 3, table)
    batch = cut.batch(2)
    assert batch.laws is not None
    states = batch.states[..., -1, :].flatten(0, 1)
    fresh = maker.of(states)
    assert torch.equal(batch.laws.columns.flatten(0, 1), fresh.columns.long())
    assert torch.allclose(batch.laws.masses.flatten(0, 1), fresh.masses.float(), atol=1e-3)
    whole = (
        torch.nn.functional.rms_norm(states, (64,), maker.final_norm, maker.eps) @ maker.head.T
    ).softmax(-1)
    top = whole.gather(1, fresh.columns.long())
    assert np.allclose(top.numpy(), fresh.masses.float().numpy(), atol=1e-3)
