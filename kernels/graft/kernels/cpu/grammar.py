"""A bitmask row for every node of a tree by xgrammar's own traversal.

Meaning: graft.kernels.reference.grammar. The native traversal writes all-zero rows at nodes that
the grammar forbids and where the text has ended; here they become all ones again.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from graft.common.tree import Tree
from graft.kernels.reference.grammar import ALL_ALLOWED, words_of


class TraversingMatcher(Protocol):
    """The part of xgrammar's GrammarMatcher that walks a tree natively."""

    def traverse_draft_tree(
        self,
        retrieve_next_token: Tensor,
        retrieve_next_sibling: Tensor,
        draft_tokens: Tensor,
        token_bitmask: Tensor,
    ) -> bool:
        """Fills a row a node and restores the matcher."""


def fill_tree_bitmask(matcher: TraversingMatcher, tree: Tree, vocab_size: int) -> Tensor:
    """[num_nodes, words], int32, bit set = allowed after the node; the matcher ends unchanged."""
    bitmask = torch.full((tree.num_nodes, words_of(vocab_size)), ALL_ALLOWED, dtype=torch.int32)
    done = matcher.traverse_draft_tree(
        torch.from_numpy(tree.next_token).long(),
        torch.from_numpy(tree.next_sibling).long(),
        torch.from_numpy(tree.tokens).long(),
        bitmask,
    )
    assert done, "a traversal without a time limit finishes"
    bitmask[(bitmask == 0).all(dim=1)] = ALL_ALLOWED
    return bitmask
