"""Where a session stands in its grammar: rows of a tree, what is held back, what ends it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graft.common.errors import InvalidArgument
from graft.common.tree import Tree, chain, from_parents, root_only
from graft.verify.grammar import matcher
from graft.verify.grammar.matcher import SessionGrammar
from graft.verify.grammar.source import Source

VOCAB = 320
EOS = 258
A, B, X = (ord(letter) for letter in "abx")
REGEX, EBNF = 3, 4


@pytest.fixture(scope="module")
def source() -> Source:
    vocabulary = [bytes([byte]) for byte in range(256)] + [b""] * (VOCAB - 256)
    return Source(vocabulary, (EOS,))


def grammar_of(source: Source, text: str, kind: int = REGEX) -> SessionGrammar:
    return SessionGrammar(source.matcher(source.compile(kind, text)), VOCAB, "the expression")


def allowed(rows: torch.Tensor | None, node: int = 0) -> set[int]:
    assert rows is not None
    bits = np.unpackbits(rows[node].numpy().view(np.uint8), bitorder="little")
    return {int(token) for token in np.flatnonzero(bits)}


def test_rows_follow_the_tree_and_commits_move_on(source: Source) -> None:
    grammar = grammar_of(source, "a(b|x)a")
    tree = from_parents([0, A, B, X, B], [-1, 0, 1, 1, 0])
    rows = grammar.rows(tree)
    assert [allowed(rows, node) for node in range(3)] == [{A}, {B, X}, {A}]
    assert allowed(grammar.rows(root_only(0))) == {A}
    grammar.commit([A, X])
    assert allowed(grammar.rows(root_only(X))) == {A}
    grammar.commit([A, EOS])
    assert grammar.failure is None


def test_the_end_is_held_back_by_depth_where_anything_else_may_follow(source: Source) -> None:
    grammar = grammar_of(source, "a*b?")
    tree: Tree = from_parents([0, A, A, B], [-1, 0, 1, 0])
    rows = grammar.rows(tree, (EOS,), held_depth=2)
    # Nodes: root, a, a a, b. After b nothing but the end may follow.
    assert [EOS in allowed(rows, node) for node in range(4)] == [False, False, True, True]
    assert allowed(rows, 3) == {EOS}


def test_every_bit_of_a_word_can_be_held_back(source: Source) -> None:
    grammar = grammar_of(source, "[ -~]*")
    held = tuple(range(31, 66))
    assert not allowed(grammar.rows(root_only(0), held, held_depth=1)) & set(held)


def test_a_grammar_that_leads_nowhere_ends_its_session(source: Source) -> None:
    grammar = grammar_of(source, 'root ::= "a" r\nr ::= r', EBNF)
    rows = grammar.rows(root_only(0))
    if rows is not None:
        grammar.commit([A])
        assert grammar.rows(root_only(A)) is None
    assert isinstance(grammar.failure, InvalidArgument)
    assert grammar.failure.field == "grammar"
    assert grammar.rows(root_only(A)) is None


def test_a_grammar_that_takes_too_long_ends_its_session(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))
    grammar = grammar_of(source, "a*")
    monkeypatch.setattr(matcher, "working_time", lambda: float(next(clock)))
    assert grammar.rows(root_only(0)) is None
    assert grammar.failure is not None and "too long" in str(grammar.failure)


def test_replays_move_on_and_are_refused_where_they_break_the_grammar(source: Source) -> None:
    grammar = grammar_of(source, "abx")
    grammar.replay([A, B])
    assert allowed(grammar.rows(chain([B, A]))) == {X}
    with pytest.raises(InvalidArgument, match="token 1 is against"):
        grammar_of(source, "abx").replay([A, A])


def test_a_commit_against_the_grammar_fails_the_session_and_nothing_else(source: Source) -> None:
    grammar = grammar_of(source, "ab")
    grammar.commit([X])
    assert grammar.failure is not None
