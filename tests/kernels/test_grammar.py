"""A grammar's masks over a tree, by xgrammar's own traversal and by the plain walk."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
import xgrammar as xgr
from hypothesis import given, settings

from graft.common.tree import Tree, chain, from_parents, root_only
from graft.kernels.cpu import grammar as fast
from graft.kernels.cpu.choose import choose
from graft.kernels.ops import ChoiceRows
from graft.kernels.reference import grammar as plain
from graft.testing.trees import law_rows, trees

VOCAB = ["eos", "a", "b", "c", "ab", "{", "}", "1"]
A, B, C, AB, ONE, EOS = 1, 2, 3, 4, 7, 0
Fill = Callable[[xgr.GrammarMatcher, Tree, int], torch.Tensor]
FILLS = [plain.fill_tree_bitmask, fast.fill_tree_bitmask]


def matcher(grammar: str = 'root ::= "a" ("b"|"c") "1"') -> xgr.GrammarMatcher:
    info = xgr.TokenizerInfo(VOCAB, vocab_type=xgr.VocabType.RAW, stop_token_ids=[EOS])
    return xgr.GrammarMatcher(xgr.GrammarCompiler(info).compile_grammar(grammar))


def next_mask(m: xgr.GrammarMatcher) -> list[int]:
    row = torch.full((1, 1), -1, dtype=torch.int32)
    m.fill_next_token_bitmask(row, 0)
    return [int(bit) for bit in np.unpackbits(row.numpy().view(np.uint8), bitorder="little")[:8]]


def test_the_native_traversal_has_the_known_rows() -> None:
    m = matcher()
    assert m.accept_token(A)
    rows = torch.full((6, 1), -1, dtype=torch.int32)
    m.traverse_draft_tree(
        torch.tensor([1, 3, 4, -1, 5, -1]),
        torch.tensor([-1, 2, -1, -1, -1, -1]),
        torch.tensor([1, 2, 3, 7, 1, 7]),
        rows,
    )
    assert rows.flatten().tolist() == [12, 128, 128, 1, 0, -1]


@pytest.mark.parametrize("fill", FILLS)
def test_rows_allow_what_may_follow_each_node(fill: Fill) -> None:
    m = matcher()
    assert m.accept_token(A)
    # a -> (b -> 1), (c -> a -> 1); "a" after "c" is against the grammar.
    tree = from_parents([A, B, C, ONE, A, ONE], [-1, 0, 0, 1, 2, 4])
    rows = dict(zip(tree.tokens.tolist(), fill(m, tree, 8).flatten().tolist(), strict=False))
    assert fill(m, tree, 8).flatten().tolist() == [12, 128, 1, 128, -1, -1]
    assert rows[B] == 128
    assert next_mask(m) == [0, 0, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("fill", FILLS)
def test_rows_after_the_end_are_all_ones(fill: Fill) -> None:
    m = matcher()
    assert m.accept_token(A)
    rows = fill(m, chain([A, B, ONE, EOS, A]), 8).flatten().tolist()
    assert rows == [12, 128, 1, -1, -1]
    assert not m.is_terminated()


@pytest.mark.parametrize("fill", FILLS)
def test_a_terminated_matcher_allows_all_and_raises_nothing(fill: Fill) -> None:
    m = matcher()
    for token in (A, B, ONE, EOS):
        assert m.accept_token(token)
    assert m.is_terminated()
    assert fill(m, chain([EOS, A]), 8).flatten().tolist() == [-1, -1]
    assert m.is_terminated()


@pytest.mark.parametrize("fill", FILLS)
def test_tokens_outside_the_vocabulary_are_illegal(fill: Fill) -> None:
    m = matcher()
    tree = from_parents([EOS, 8, 2**31 - 1, A], [-1, 0, 0, 0])
    assert fill(m, tree, 8).flatten().tolist() == [18, -1, -1, 12]


@given(tree=trees(vocab_size=8))
@settings(max_examples=150, deadline=None)
def test_both_walks_agree_and_leave_the_matcher_as_it_was(tree: Tree) -> None:
    m = matcher('root ::= "a"* ("b"|"c") "1"? ("{" root "}")?')
    before = next_mask(m)
    first = fast.fill_tree_bitmask(m, tree, 8)
    assert next_mask(m) == before
    assert torch.equal(first, plain.fill_tree_bitmask(m, tree, 8))
    assert next_mask(m) == before
    assert bool((first != 0).any(dim=1).all()), "no row is all zero"


def test_masked_choices_obey_the_grammar() -> None:
    m = matcher()
    rows = fast.fill_tree_bitmask(m, root_only(EOS), 8)
    law: ChoiceRows = dataclasses.replace(law_rows(1), bitmask=rows)
    assert int(choose(torch.zeros(1, 8), law)) in (A, AB)
