"""What draft services are told of sessions, and which of them may speak for one.

Streams are numbers here. Knows no step and no page.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict

from graft.common.errors import BadTicket, SessionNotFound
from graft.v1.tree_pb2 import TreeRefusal
from graft.verify.events import ClosedTold, CommitTold, Event, PrefixTold, RefusalTold
from graft.verify.session import Phase, Session
from graft.verify.shelf import PrefixName, Proposal
from graft.verify.tally import Tally

_REMEMBERED_SESSIONS = 4096
_SILENT_WHEN_EMPTY = frozenset(
    {
        TreeRefusal.TREE_REFUSAL_STALE,
        TreeRefusal.TREE_REFUSAL_REPEATED,
        TreeRefusal.TREE_REFUSAL_NO_CREDIT,
    }
)


class Audience:
    """Tells streams of prefixes, commits, refusals and ends by appending to `events`."""

    def __init__(self, tally: Tally) -> None:
        self.events: list[Event] = []
        self._tally = tally
        self._closed: OrderedDict[int, frozenset[int]] = OrderedDict()

    def join(self, stream: int, session_id: int, session: Session | None, ticket: bytes) -> None:
        """Lets a stream attend a session; it learns the prefix once the first token is there."""
        if session is None:
            self.events.append(ClosedTold(stream, session_id, SessionNotFound.reason))
        elif not hmac.compare_digest(ticket, session.ticket):
            self.events.append(ClosedTold(stream, session_id, BadTicket.reason))
        elif stream not in session.streams:
            session.streams.add(stream)
            if session.phase is Phase.DECODING and not session.in_step:
                self._tell_prefix(session, stream)

    def offer(
        self,
        session_id: int,
        session: Session | None,
        name: PrefixName,
        proposal: Proposal,
        now: float,
    ) -> None:
        """Passes a stream's proposal on to the session it attends."""
        if session is None:
            was_here = proposal.stream in self._closed.get(session_id, frozenset())
            refusal = (
                TreeRefusal.TREE_REFUSAL_STALE if was_here else TreeRefusal.TREE_REFUSAL_FOREIGN
            )
            self.refuse(session_id, name, proposal, refusal)
        elif proposal.stream not in session.streams:
            self.refuse(session_id, name, proposal, TreeRefusal.TREE_REFUSAL_FOREIGN)
        else:
            dropped = session.offer(name, proposal, now)
            if dropped is not None and not proposal.refused:
                self.refuse(session_id, *dropped)

    def refuse(
        self,
        session_id: int,
        name: PrefixName,
        proposal: Proposal,
        refusal: TreeRefusal.ValueType,
    ) -> None:
        """Counts a tree that is not used and says so; an empty proposal is no tree."""
        if proposal.tree is None and refusal in _SILENT_WHEN_EMPTY:
            return
        if refusal == TreeRefusal.TREE_REFUSAL_STALE:
            self._tally.pushed["stale"] += 1
        self._tally.refused[refusal] += 1
        self.events.append(RefusalTold(proposal.stream, session_id, name[0], refusal))

    def tell_commit(
        self, session: Session, tokens: tuple[int, ...], accepted: int, num_drafted: int
    ) -> None:
        """Tells all that attend; who has not heard the prefix yet hears that instead."""
        length, digest = session.name
        for stream in sorted(session.streams):
            if stream not in session.told:
                self._tell_prefix(session, stream)
                continue
            self.events.append(
                CommitTold(
                    stream, session.session_id, tokens, length, digest, accepted, num_drafted
                )
            )

    def tell_end(self, session: Session) -> None:
        """Tells all that attend that the session is over."""
        self._closed[session.session_id] = frozenset(session.streams)
        if len(self._closed) > _REMEMBERED_SESSIONS:
            self._closed.popitem(last=False)
        for stream in sorted(session.streams):
            self.events.append(ClosedTold(stream, session.session_id))

    def _tell_prefix(self, session: Session, stream: int) -> None:
        session.told.add(stream)
        self.events.append(
            PrefixTold(
                stream,
                session.session_id,
                session.prefix.tokens.copy(),
                session.prompt_length,
                session.request.sampling,
                session.room,
                session.request.cache_salt,
            )
        )
