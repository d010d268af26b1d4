"""Trees on the wire: every byte string is one valid tree or one typed refusal."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.common.heap import working_time
from graft.common.tree import Tree, TreeLimits, TreeRefused, chain, from_parents, root_only
from graft.common.tree_codec import (
    decode,
    encode_scores,
    encode_shape,
    encode_tokens,
    token_width,
)
from graft.v1.tree_pb2 import CandidateTree, TreeRefusal

LIMITS = TreeLimits(max_nodes=64, max_depth=32, vocab_size=49_152)


def random_tree(rng: random.Random, num_nodes: int, vocab_size: int) -> Tree:
    tokens, parents, used = [rng.randrange(vocab_size)], [-1], set()
    while len(tokens) < num_nodes:
        edge = (rng.randrange(len(tokens)), rng.randrange(vocab_size))
        if edge not in used:
            used.add(edge)
            parents.append(edge[0])
            tokens.append(edge[1])
    return from_parents(tokens, parents)


def one_bit_off(rng: random.Random, tree: Tree) -> tuple[bytes, bytes]:
    columns = bytearray(encode_shape(tree)), bytearray(encode_tokens(tree, LIMITS.vocab_size))
    column = rng.choice([c for c in columns if c])
    column[rng.randrange(len(column))] ^= 1 << rng.randrange(8)
    return bytes(columns[0]), bytes(columns[1])


@given(st.integers(0, 2**32), st.integers(1, 64), st.sampled_from([200, 49_152, 70_000, 2**25]))
def test_a_tree_survives_the_wire(seed: int, num_nodes: int, vocab_size: int) -> None:
    tree = random_tree(random.Random(seed), num_nodes, vocab_size)
    limits = TreeLimits(max_nodes=64, max_depth=64, vocab_size=vocab_size)
    columns = encode_shape(tree), encode_tokens(tree, vocab_size), encode_scores(tree)
    back = decode(int(tree.tokens[0]), *columns, limits)
    for name in ("tokens", "next_token", "next_sibling", "parent", "depth"):
        np.testing.assert_array_equal(getattr(back, name), getattr(tree, name), err_msg=name)


def test_a_32_node_tree_takes_at_most_128_bytes() -> None:
    tree = random_tree(random.Random(1), 32, LIMITS.vocab_size)
    message = CandidateTree(
        session_id=2**64 - 1,
        prefix_length=8191,
        prefix_digest=2**64 - 1,
        shape=encode_shape(tree),
        tokens=encode_tokens(tree, LIMITS.vocab_size),
        draft_micros=900,
    )
    assert message.ByteSize() <= 128


def test_ten_thousand_random_byte_strings_decode_or_are_refused_quickly() -> None:
    rng = random.Random(7)
    slow = valid = 0
    for trial in range(10_000):
        num_nodes = rng.randrange(0, 70)
        shape = rng.randbytes(rng.choice([(num_nodes + 4) // 4, rng.randrange(0, 40)]))
        tokens = rng.randbytes(rng.choice([2 * num_nodes, rng.randrange(0, 150)]))
        scores = rng.randbytes(rng.choice([0, 0, 2 * num_nodes, rng.randrange(0, 150)]))
        if trial % 3 == 0:
            shape, tokens = one_bit_off(rng, random_tree(rng, 1 + num_nodes % 32, 40_000))
        start = working_time()
        try:
            tree = decode(5, shape, tokens, scores, LIMITS)
        except TreeRefused as error:
            assert error.refusal != TreeRefusal.TREE_REFUSAL_UNSPECIFIED
        else:
            valid += 1
            assert encode_shape(tree) == shape and encode_tokens(tree, LIMITS.vocab_size) == tokens
        # The machine interrupts now and then; what is slow by itself is so every time.
        taken = [working_time() - start]
        while taken[-1] > 1e-3 and len(taken) < 5:
            start = working_time()
            with suppress(TreeRefused):
                decode(5, shape, tokens, scores, LIMITS)
            taken.append(working_time() - start)
        slow += min(taken) > 1e-3
    assert valid > 50
    assert slow == 0


def test_every_shape_of_few_nodes_is_one_tree_or_malformed() -> None:
    seen = set()
    for bits in range(256):
        try:
            tree = decode(0, bytes([bits]), bytes([1, 0, 2, 0, 3, 0]), b"", LIMITS)
        except TreeRefused as error:
            assert error.refusal == TreeRefusal.TREE_REFUSAL_MALFORMED
        else:
            seen.add(tuple(tree.parent.tolist()))
    # Ordered trees of 4 nodes: the third Catalan number.
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("shape", "tokens", "scores", "refusal"),
    [
        (b"\x02", b"", b"", TreeRefusal.TREE_REFUSAL_MALFORMED),
        (b"\x01", b"\x00", b"", TreeRefusal.TREE_REFUSAL_MALFORMED),
        (b"", b"", b"", TreeRefusal.TREE_REFUSAL_MALFORMED),
        (b"\x01", b"\x00\xc0", b"", TreeRefusal.TREE_REFUSAL_TOKEN_RANGE),
        (b"\x01", b"\x01\x00", b"\x00\x7e", TreeRefusal.TREE_REFUSAL_BAD_SCORES),
        (b"\x01", b"\x01\x00", b"\x00\x3c", TreeRefusal.TREE_REFUSAL_BAD_SCORES),
        (b"\x01", b"\x01\x00", b"\x00", TreeRefusal.TREE_REFUSAL_MALFORMED),
        (b"\x09", b"\x01\x00\x01\x00", b"", TreeRefusal.TREE_REFUSAL_DUPLICATE_SIBLING),
        (b"\x11", b"\x01\x00", b"", TreeRefusal.TREE_REFUSAL_MALFORMED),
        (bytes(20), bytes(140), b"", TreeRefusal.TREE_REFUSAL_TOO_MANY_NODES),
    ],
)
def test_what_can_be_wrong_has_a_typed_reason(
    shape: bytes, tokens: bytes, scores: bytes, refusal: TreeRefusal.ValueType
) -> None:
    with pytest.raises(TreeRefused) as caught:
        decode(0, shape, tokens, scores, LIMITS)
    assert caught.value.refusal == refusal


def test_root_alone_has_one_byte_of_shape_and_no_tokens() -> None:
    assert encode_shape(root_only(7)) == b"\x00"
    assert encode_tokens(root_only(7), 49_152) == b""


def test_tokens_are_as_narrow_as_the_vocabulary_allows() -> None:
    assert [token_width(v) for v in (1 << 16, (1 << 16) + 1, 1 << 24, (1 << 24) + 1)] == [
        2,
        3,
        3,
        4,
    ]
    assert encode_tokens(chain([0, 1, 258]), 300) == b"\x01\x00\x02\x01"
