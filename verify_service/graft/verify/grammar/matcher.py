"""Where a session stands in its grammar: what may follow each node, and what was committed.

Knows trees and committed tokens; knows no schema and no logits. One thread uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from graft.common.errors import GraftError, InvalidArgument
from graft.common.heap import working_time
from graft.common.tree import Tree
from graft.kernels.cpu.grammar import TraversingMatcher, fill_tree_bitmask
from graft.kernels.reference.grammar import ALL_ALLOWED, Matcher, is_allowed, words_of

_STEP_LIMIT_S: Final = 0.25
_MEAN_LIMIT_S: Final = 0.02
_GRACE_S: Final = 1.0


class TreeMatcher(Matcher, TraversingMatcher, Protocol):
    """xgrammar's GrammarMatcher, as far as it is used here."""


class SessionGrammar:
    """One session's matcher. Once `failure` is set the session is to end with it.

    A grammar can be cheap to compile and dear to follow, and every session of the replica waits
    while one is followed. So the time it takes is counted: what takes too long ends its session.
    """

    def __init__(self, matcher: TreeMatcher, vocab_size: int, name: str) -> None:
        """name: what to call the grammar in an error."""
        self.failure: GraftError | None = None
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._name = name
        self._spent_s = 0.0
        self._num_steps = 0

    def replay(self, committed: Sequence[int]) -> None:
        """Advances by tokens that another replica has committed.

        Raises:
            InvalidArgument: they break the grammar.
        """
        for place, token in enumerate(committed):
            if not self._matcher.accept_token(int(token)):
                raise InvalidArgument(
                    f"committed token {place} is against {self._name}", field="committed_tokens"
                )

    def rows(self, tree: Tree, held_back: Iterable[int] = (), held_depth: int = 0) -> Tensor | None:
        """[num_nodes, words], int32, bit set = allowed after the node; None when it has failed.

        held_back: ids that may not be chosen after nodes of a depth below `held_depth`, as long
        as the grammar allows anything else there.
        """
        if self.failure is not None:
            return None
        started = working_time()
        bitmask = fill_tree_bitmask(self._matcher, tree, self._vocab_size)
        if bool((bitmask[0] == ALL_ALLOWED).all()) and self._is_stuck():
            self.failure = InvalidArgument(
                f"{self._name} leads nowhere from here: no token may follow, and it may not end",
                field="grammar",
            )
            return None
        self._hold_back(bitmask, tree, tuple(held_back), held_depth)
        self._count(working_time() - started)
        return None if self.failure is not None else bitmask

    def allows(self, row: Tensor, token: int) -> bool:
        """True when a row of `rows` lets the token follow."""
        return is_allowed(row, token, self._vocab_size)

    def commit(self, tokens: Iterable[int]) -> None:
        """Advances by tokens that were decided under `rows`."""
        started = working_time()
        for token in tokens:
            if not self._matcher.accept_token(token):
                self.failure = GraftError(f"a token was committed against {self._name}")
                return
        self._count(working_time() - started, steps=0)

    def _is_stuck(self) -> bool:
        """True when nothing may follow although the text has not ended."""
        if self._matcher.is_terminated():
            return False
        row = torch.full((1, words_of(self._vocab_size)), ALL_ALLOWED, dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(row, 0)
        return bool((row == 0).all())

    def _hold_back(
        self, bitmask: Tensor, tree: Tree, held_back: tuple[int, ...], held_depth: int
    ) -> None:
        """In place: clears the bits of ids that are held back where others remain."""
        if not held_back or held_depth <= 0:
            return
        keep = torch.full((bitmask.shape[1],), ALL_ALLOWED, dtype=torch.int32)
        for token in held_back:
            word, bit = divmod(token, 32)
            keep[word] &= ~(1 << bit) if bit < 31 else 0x7FFFFFFF
        early = torch.from_numpy(tree.depth < held_depth)
        held = bitmask & keep
        use = early & (held != 0).any(dim=1)
        bitmask[use] = held[use]

    def _count(self, spent_s: float, steps: int = 1) -> None:
        self._spent_s += spent_s
        self._num_steps += steps
        allowed_s = _GRACE_S + _MEAN_LIMIT_S * self._num_steps
        if spent_s > _STEP_LIMIT_S or self._spent_s > allowed_s:
            self.failure = InvalidArgument(
                f"{self._name} takes too long to follow: {self._spent_s:.1f} s for "
                f"{self._num_steps} steps; make it less ambiguous",
                field="grammar",
            )
