"""The committed prefix: one digest for one sequence, however it grew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graft.common.prefix import Prefix

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(TOKENS, TOKENS)
def test_digest_does_not_depend_on_how_the_prefix_grew(first: list[int], second: list[int]) -> None:
    grown = Prefix(first)
    announced = grown.digest_after(second)
    grown.extend(second)
    whole = Prefix(first + second)
    assert grown.digest == whole.digest == announced
    assert grown.tokens.tolist() == first + second


@given(TOKENS, TOKENS)
def test_different_prefixes_have_different_digests(first: list[int], second: list[int]) -> None:
    assert (Prefix(first).digest == Prefix(second).digest) == (first == second)


def test_trailing_zeros_count() -> None:
    assert len({Prefix([0] * n).digest for n in range(100)}) == 100


def test_a_long_prompt_chains_over_blocks() -> None:
    tokens = [(i * 7919) % 49_152 for i in range(10_000)]
    one_by_one = Prefix()
    for token in tokens:
        one_by_one.extend([token])
    assert one_by_one.digest == Prefix(tokens).digest
    assert one_by_one.root == tokens[-1]


def test_tokens_are_read_only() -> None:
    assert not Prefix([1, 2]).tokens.flags.writeable
