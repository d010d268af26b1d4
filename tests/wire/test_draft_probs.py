"""Draft probabilities on the wire: what comes back is a distribution, or a typed refusal."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from graft.common.draft_probs import (
    Distribution,
    certain,
    decode_probs,
    distribution,
    draw_uniform,
    encode_probs,
)
from graft.common.tree import TreeRefused, chain
from graft.v1.tree_pb2 import NodeProbs, TreeRefusal

VOCAB = 300
TREE = chain([9, 7])


def node(tokens: list[int], probs: list[float]) -> NodeProbs:
    return NodeProbs(
        tokens=np.asarray(tokens, "<u2").tobytes(),
        probabilities=np.asarray(probs, "<f4").tobytes(),
    )


def test_three_tokens_take_six_bytes_each() -> None:
    sent = encode_probs([distribution([258, 7, 1], [1, 2, 1])], VOCAB)
    assert sent[0].tokens == bytes([1, 0, 7, 0, 2, 1])
    assert np.frombuffer(sent[0].probabilities, "<f4").tolist() == [0.25, 0.5, 0.25]
    (row,) = decode_probs(sent, TREE, VOCAB)
    assert row.tokens.tolist() == [1, 7, 258]
    assert row.probs.tolist() == [0.25, 0.5, 0.25]


@given(st.integers(0, 2**32), st.integers(1, 200), st.sampled_from([300, 70_000, 1 << 25]))
def test_what_is_decoded_is_what_was_encoded_and_sums_to_one(
    seed: int, count: int, vocab_size: int
) -> None:
    generator = np.random.default_rng(seed)
    tokens = generator.choice(vocab_size, count, replace=False).astype(np.int32)
    row = distribution(tokens, generator.random(count) ** 8)
    tree = chain([0, int(row.tokens[0])])
    (back,) = decode_probs(encode_probs([row], vocab_size), tree, vocab_size)
    assert back.tokens.tolist() == row.tokens.tolist()
    assert back.probs.tolist() == row.probs.tolist()
    assert math.fsum(back.probs.tolist()) == pytest.approx(1.0, abs=1e-6)
    assert (back.probs > 0).all()


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "0 distributions came for 1 drafted nodes"),
        ([node([7], [1.0])] * 2, "2 distributions came for 1 drafted nodes"),
        ([node([7, 8], [0.5, 0.4])], "sum to 0.9"),
        ([node([7, 8], [0.8, 0.8])], "sum to 1.6"),
        ([node([7, 8], [1.5, -0.5])], "not a number above 0"),
        ([node([7, 8], [1.0, 0.0])], "not a number above 0"),
        ([node([7, 8], [math.nan, 0.5])], "not a number above 0"),
        ([node([7, 8], [math.inf, 0.5])], "not a number above 0"),
        ([node([8, 7], [0.5, 0.5])], "ascending"),
        ([node([7, 7], [0.5, 0.5])], "ascending"),
        ([node([7, 300], [0.5, 0.5])], "below 300"),
        ([node([8, 9], [0.5, 0.5])], "token 7 was drafted from a distribution that gives it"),
        ([node([], [])], "sum to 0"),
        ([node([7], [0.5, 0.5])], "do not fit"),
        ([NodeProbs(tokens=b"\7\0", probabilities=b"\0\0\x80")], "do not fit"),
    ],
)
def test_what_is_no_distribution_is_refused(messages: list[NodeProbs], says: str) -> None:
    with pytest.raises(TreeRefused, match=says) as caught:
        decode_probs(messages, TREE, VOCAB)
    assert caught.value.refusal == TreeRefusal.TREE_REFUSAL_BAD_PROBS


@given(st.binary(max_size=24), st.binary(max_size=48))
def test_no_bytes_do_harm(tokens: bytes, probs: bytes) -> None:
    try:
        (row,) = decode_probs([NodeProbs(tokens=tokens, probabilities=probs)], TREE, VOCAB)
    except TreeRefused:
        return
    assert 7 in row.tokens and abs(float(row.probs.sum()) - 1) < 1e-5


def test_a_sum_that_is_off_by_rounding_is_made_one() -> None:
    (row,) = decode_probs([node([7, 8], [0.5, 0.50005])], TREE, VOCAB)
    assert float(row.probs.sum(dtype=np.float64)) == pytest.approx(1.0, abs=1e-7)


def test_draws_follow_the_distribution() -> None:
    row = distribution([4, 9, 11], [0.2, 0.5, 0.3])
    drawn = [row.draw(draw_uniform(seed, 12, 0)) for seed in range(5000)]
    seen = [drawn.count(token) for token in (4, 9, 11)]
    assert chisquare(seen, np.array([0.2, 0.5, 0.3]) * 5000).pvalue > 0.001


def test_draws_of_other_prefixes_and_steps_are_others() -> None:
    row = Distribution(np.arange(100, dtype=np.int32), np.full(100, 0.01, np.float32))
    drawn = {row.draw(draw_uniform(3, prefix, step)) for prefix in range(10) for step in range(10)}
    assert len(drawn) > 50


def test_a_certain_token_is_always_drawn() -> None:
    assert {certain(7).draw(u) for u in (1e-7, 0.5, 1 - 1e-7)} == {7}
    assert certain(2).dense(4).tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize(("tokens", "weights"), [([], []), ([1], [0.0]), ([1, 1], [0.5, 0.5])])
def test_nothing_cannot_be_drawn_from(tokens: list[int], weights: list[float]) -> None:
    with pytest.raises(ValueError, match="no distribution"):
        distribution(tokens, weights)
