"""A bitmask row for every node of a tree, from a grammar matcher. Knows no particular grammar.

The matcher has already accepted the root. A node's row says what may follow the node. Rows of
nodes that the grammar forbids, of everything below them, and of nodes after which the text has
ended stay all ones: they are never reached, and an all-zero row would make logits that are no law.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from graft.common.tree import Tree

ALL_ALLOWED: Final = -1


class Matcher(Protocol):
    """The part of xgrammar's GrammarMatcher that a walk uses."""

    def accept_token(self, token_id: int) -> bool:
        """Advances by a token; False, unchanged, when it is not allowed."""

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> bool:
        """Writes the allowed tokens into row `index`; True when it forbids something."""

    def rollback(self, num_tokens: int = 1) -> None:
        """Takes back the last accepted tokens."""

    def is_terminated(self) -> bool:
        """True when no token may follow."""


def words_of(vocab_size: int) -> int:
    """Number of int32 words of a bitmask row."""
    return (vocab_size + 31) // 32


def fill_tree_bitmask(matcher: Matcher, tree: Tree, vocab_size: int) -> Tensor:
    """[num_nodes, words], int32, bit set = allowed after the node; the matcher ends unchanged."""
    bitmask = torch.full((tree.num_nodes, words_of(vocab_size)), ALL_ALLOWED, dtype=torch.int32)
    if not matcher.is_terminated():
        _visit(matcher, tree, 0, vocab_size, bitmask)
    bitmask[(bitmask == 0).all(dim=1)] = ALL_ALLOWED
    return bitmask


def _visit(matcher: Matcher, tree: Tree, node: int, vocab_size: int, bitmask: Tensor) -> None:
    matcher.fill_next_token_bitmask(bitmask, node)
    for child in tree.children(node):
        token = int(tree.tokens[child])
        if not is_allowed(bitmask[node], token, vocab_size):
            continue
        if not matcher.accept_token(token):
            continue
        if not matcher.is_terminated():
            _visit(matcher, tree, child, vocab_size, bitmask)
        matcher.rollback(1)


def is_allowed(row: Tensor, token: int, vocab_size: int) -> bool:
    """True when the token's bit is set; a token outside the vocabulary is not allowed."""
    return 0 <= token < vocab_size and bool((int(row[token // 32]) >> (token % 32)) & 1)
