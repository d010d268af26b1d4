"""What waits to be written on one Rounds stream, gathered into as few messages as order allows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from graft.common.features import spec_to_proto
from graft.draft.features import FeatureTerms
from graft.v1.tree_pb2 import CandidateTree
from graft.v1.verify_pb2 import EmptyProposal, LeaveSession, RoundsRequest

Sink = Callable[[RoundsRequest], bool]
"""Sends a message at once; False when it has to wait."""


class Outbox:
    """Filled by the link, emptied by its writer; one loop. `put_*` never wait.

    sink: what `flush` empties it into, where that can be done without waiting.

    Verify handles the parts of a message in the order joins, trees, empties, leaves. Whatever would
    come out of order in one message therefore starts the next one.
    """

    def __init__(self) -> None:
        self.sink: Sink | None = None
        self._waiting: list[RoundsRequest] = []
        self._some = asyncio.Event()

    def join(self, session_id: int, ticket: bytes, terms: FeatureTerms | None = None) -> None:
        """Asks to attend a session, and for the target's hidden states if `terms` are given."""
        last = self._last()
        if last.trees or last.empties or last.leaves:
            last = self._fresh()
        join = last.joins.add(session_id=session_id, ticket=ticket)
        if terms is not None:
            join.features.CopyFrom(spec_to_proto(terms.spec))
            join.feature_window_tokens = terms.window_tokens

    def tree(self, tree: CandidateTree) -> None:
        """Pushes a tree."""
        last = self._last()
        if any(left.session_id == tree.session_id for left in last.leaves):
            last = self._fresh()
        last.trees.append(tree)

    def empty(
        self, session_id: int, prefix_length: int, prefix_digest: int, behind: bool = False
    ) -> None:
        """Says that there is nothing to propose for a prefix.

        behind: nor for those after it, until a tree comes.
        """
        self._last().empties.append(
            EmptyProposal(
                session_id=session_id,
                prefix_length=prefix_length,
                prefix_digest=prefix_digest,
                behind=behind,
            )
        )

    def leave(self, session_id: int) -> None:
        """Ends the attendance of a session."""
        self._last().leaves.append(LeaveSession(session_id=session_id))

    def flush(self) -> None:
        """Hands what waits to the sink, as far as there is one that takes it."""
        while self._waiting and self.sink is not None and self.sink(self._waiting[0]):
            self._waiting.pop(0)

    async def next(self) -> RoundsRequest:
        """The next message, as soon as there is one."""
        while not self._waiting:
            self._some.clear()
            await self._some.wait()
        message = self._waiting.pop(0)
        return message

    def _last(self) -> RoundsRequest:
        return self._waiting[-1] if self._waiting else self._fresh()

    def _fresh(self) -> RoundsRequest:
        self._waiting.append(RoundsRequest())
        self._some.set()
        return self._waiting[-1]
