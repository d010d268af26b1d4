"""Each branch of a tree is penalised for its own history."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.common.sampling import Sampling
from graft.common.tree import Tree, chain, from_parents, root_only
from graft.kernels.cpu import history as fast
from graft.kernels.ops import Adjust
from graft.kernels.reference import history as plain
from graft.kernels.reference.history import History
from graft.testing.trees import trees

PENALISED = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
Rows = list[dict[int, tuple[float, float]]]


def by_row(adjust: Adjust | None, num_nodes: int) -> Rows:
    if adjust is None:
        return [{} for _ in range(num_nodes)]
    rows: Rows = []
    ptr = adjust.ptr.tolist()
    for start, end in pairwise(ptr):
        tokens = adjust.tokens[start:end].tolist()
        pairs = zip(adjust.ratio[start:end].tolist(), adjust.shift[start:end].tolist(), strict=True)
        rows.append(dict(zip(tokens, pairs, strict=True)))
        assert len(rows[-1]) == end - start, "a row names a token at most once"
    return rows


def test_branches_that_differ_in_one_token_are_penalised_differently() -> None:
    tree = from_parents([9, 1, 3, 2, 3], [-1, 0, 1, 0, 3])
    history = History(prompt=frozenset({7}), generated=Counter({9: 1, 1: 1}))
    rows = by_row(fast.adjust_rows(PENALISED, history, tree), 5)
    assert rows[0] == {7: (2.0, 0.0), 9: (2.0, 0.75), 1: (2.0, 0.75)}
    assert rows[2] == {7: (2.0, 0.0), 9: (2.0, 0.75), 1: (2.0, 1.0), 3: (2.0, 0.75)}
    assert rows[4] == {
        7: (2.0, 0.0),
        9: (2.0, 0.75),
        1: (2.0, 0.75),
        2: (2.0, 0.75),
        3: (2.0, 0.75),
    }


def test_end_tokens_are_forbidden_only_so_deep() -> None:
    history = History(forbidden=(2,), forbidden_depth=2)
    rows = by_row(fast.adjust_rows(Sampling(), history, chain([5, 6, 7, 8])), 4)
    assert [row[2][1] for row in rows] == [float("inf"), float("inf"), 0.0, 0.0]


def test_a_law_without_penalties_adjusts_nothing() -> None:
    history = History(prompt=frozenset({1}), generated=Counter({2: 3}))
    assert fast.adjust_rows(Sampling(), history, chain([2, 3])) is None
    assert plain.adjust_rows(Sampling(), history, chain([2, 3])) is None


def test_bias_is_added_and_penalties_still_count() -> None:
    sampling = Sampling(logit_bias={4: 1.5, 8: -100.0}, frequency_penalty=1.0)
    history = History(generated=Counter({4: 2}))
    rows = by_row(fast.adjust_rows(sampling, history, root_only(4)), 1)
    assert rows == [{4: (1.0, 0.5), 8: (1.0, 100.0)}]


def test_committed_tokens_are_counted() -> None:
    history = History()
    history.commit([3, 3, 5])
    assert history.generated == Counter({3: 2, 5: 1})


@given(
    tree=trees(vocab_size=9),
    prompt=st.frozensets(st.integers(0, 8), max_size=5),
    generated=st.lists(st.integers(0, 8), max_size=12),
    sampling=st.builds(
        Sampling,
        presence_penalty=st.sampled_from([0.0, 0.7, -1.1]),
        frequency_penalty=st.sampled_from([0.0, 0.3]),
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
        logit_bias=st.dictionaries(st.integers(0, 8), st.floats(-100, 100), max_size=3),
    ),
    forbidden=st.lists(st.integers(0, 8), max_size=2, unique=True),
    forbidden_depth=st.integers(-1, 3),
)
@settings(max_examples=150, deadline=None)
def test_adjustments_are_the_reference_s(
    tree: Tree,
    prompt: frozenset[int],
    generated: list[int],
    sampling: Sampling,
    forbidden: list[int],
    forbidden_depth: int,
) -> None:
    history = History(prompt, Counter(generated), tuple(forbidden), forbidden_depth)
    got = by_row(fast.adjust_rows(sampling, history, tree), tree.num_nodes)
    expected = by_row(plain.adjust_rows(sampling, history, tree), tree.num_nodes)
    assert got == expected


@given(tree=trees(vocab_size=9), generated=st.lists(st.integers(0, 8), max_size=6))
@settings(max_examples=80, deadline=None)
def test_a_node_is_adjusted_as_plain_decoding_would_be(tree: Tree, generated: list[int]) -> None:
    history = History(generated=Counter([*generated, int(tree.tokens[0])]))
    rows = by_row(fast.adjust_rows(PENALISED, history, tree), tree.num_nodes)
    for node in range(tree.num_nodes):
        path = [int(tree.tokens[i]) for i in tree.ancestors(node)]
        alone = History(generated=Counter([*generated, *path]))
        plainly = by_row(fast.adjust_rows(PENALISED, alone, root_only(path[-1])), 1)
        assert rows[node] == plainly[0]


@pytest.mark.parametrize("module", [fast, plain])
def test_adjustments_have_the_dtypes_of_the_contract(module: object) -> None:
    adjust = module.adjust_rows(PENALISED, History(), chain([1, 2]))  # type: ignore[attr-defined]
    assert [part.dtype for part in adjust] == [
        torch.int32,
        torch.int32,
        torch.float32,
        torch.float32,
    ]
