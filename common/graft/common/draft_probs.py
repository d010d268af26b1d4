"""What a drafter drew its tokens from, for rules that compare it with the target. Knows no session.

A distribution is sparse: drafters keep their likeliest tokens and renormalise, which is lawful,
since any distribution may be drafted from as long as it is the one that is sent. Tokens are drawn
by the noise of (seed, prefix length, step), so the receiver can draw them again and need not trust
that they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from graft.common.noise import Domain, uniform_at
from graft.common.tree import FloatArray, IntArray, Tree, TreeRefused
from graft.common.tree_codec import pack_tokens, token_width
from graft.v1.tree_pb2 import NodeProbs, TreeRefusal

SUM_TOLERANCE = 1e-4
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Some tokens and their probabilities.

    tokens: [count], int32, ascending. probs: [count], float32, above 0; their sum is 1.
    """

    tokens: IntArray
    probs: FloatArray

    def draw(self, u: float) -> int:
        """The token whose part of the cumulated probabilities holds `u` of (0, 1)."""
        edges = np.cumsum(self.probs, dtype=np.float64)
        place = int(np.searchsorted(edges, u * edges[-1], side="right"))
        return int(self.tokens[min(place, len(self.tokens) - 1)])

    def dense(self, vocab_size: int) -> FloatArray:
        """[vocab_size], float32."""
        row = np.zeros(vocab_size, np.float32)
        row[self.tokens] = self.probs
        return row


def distribution(tokens: Sequence[int] | IntArray, weights: Sequence[float]) -> Distribution:
    """Sorted, without tokens of no weight, and renormalised to what float32 can hold.

    Raises:
        ValueError: nothing has weight, or a token comes twice.
    """
    ids, mass = np.asarray(tokens, np.int32), np.asarray(weights, np.float64)
    order = np.argsort(ids, kind="stable")
    ids, mass = ids[order], mass[order]
    probs = (mass / mass.sum()).astype(np.float32) if mass.sum() > 0 else np.zeros(0, np.float32)
    kept = probs > 0
    if not kept.any() or np.unique(ids).size != ids.size:
        raise ValueError(f"{len(ids)} tokens are no distribution")
    return Distribution(ids[kept], probs[kept])


def certain(token: int) -> Distribution:
    """All probability on one token."""
    return Distribution(np.array([token], np.int32), np.ones(1, np.float32))


def draw_uniform(seed: int, prefix_length: int, step: int) -> float:
    """The uniform that draws the token of `step`, from 0, of a chain grown from a prefix."""
    return uniform_at(seed, prefix_length, step, Domain.DRAFT)


def encode_probs(rows: Iterable[Distribution], vocab_size: int) -> list[NodeProbs]:
    """The wire form, one message a drafted node."""
    return [
        NodeProbs(
            tokens=pack_tokens(row.tokens, vocab_size),
            probabilities=row.probs.astype("<f4").tobytes(),
        )
        for row in rows
    ]


def decode_probs(
    messages: Sequence[NodeProbs], tree: Tree, vocab_size: int
) -> tuple[Distribution, ...]:
    """One distribution a drafted node of `tree`, from wire bytes.

    Raises:
        TreeRefused: BAD_PROBS, when they are not that; nothing else, whatever the bytes are.
    """
    if len(messages) != tree.num_nodes - 1:
        raise _bad(f"{len(messages)} distributions came for {tree.num_nodes - 1} drafted nodes")
    return tuple(
        _decode_row(message, int(token), vocab_size)
        for message, token in zip(messages, tree.tokens[1:], strict=True)
    )


def _decode_row(message: NodeProbs, drafted: int, vocab_size: int) -> Distribution:
    width = token_width(vocab_size)
    count = len(message.probabilities) // 4
    if len(message.probabilities) != 4 * count or len(message.tokens) != width * count:
        raise _bad(
            f"{len(message.tokens)} bytes of tokens do not fit "
            f"{len(message.probabilities)} bytes of probabilities"
        )
    columns = np.zeros((count, 4), np.uint8)
    columns[:, :width] = np.frombuffer(message.tokens, np.uint8).reshape(-1, width)
    ids = columns.view("<u4").reshape(-1).astype(np.int64)
    probs = np.frombuffer(message.probabilities, "<f4").astype(np.float32)
    if not (bool((np.diff(ids) > 0).all()) and bool((ids < vocab_size).all())):
        raise _bad(f"tokens are not ascending ids below {vocab_size}")
    if not (bool(np.isfinite(probs).all()) and bool((probs > 0).all())):
        raise _bad("a probability is not a number above 0")
    total = float(probs.sum(dtype=np.float64))
    if abs(total - 1.0) > SUM_TOLERANCE:
        raise _bad(f"probabilities sum to {total:.6f}, expected 1")
    if drafted not in ids:
        raise _bad(f"token {drafted} was drafted from a distribution that gives it nothing")
    if abs(total - 1.0) > _ROUNDING:
        probs = (probs / total).astype(np.float32)
    return Distribution(ids.astype(np.int32), probs)


def _bad(message: str) -> TreeRefused:
    return TreeRefused(TreeRefusal.TREE_REFUSAL_BAD_PROBS, message)
