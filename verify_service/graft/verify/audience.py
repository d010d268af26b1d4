"""What draft services are told of sessions, and which of them may speak for one.

Streams are numbers here. Knows no step and no page.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict

from graft.common.errors import BadTicket, GraftError, NumericFailure, SessionNotFound
from graft.common.features import FeatureSpec
from graft.v1.tree_pb2 import TreeRefusal
from graft.verify.events import (
    ClosedTold,
    CommitTold,
    Event,
    FeaturesTold,
    PrefixTold,
    RefusalTold,
    Rows,
)
from graft.verify.features import Feed
from graft.verify.kept_rows import KeptRows
from graft.verify.offer import Announced, FeatureOffer, FeatureWish
from graft.verify.patience import Patience
from graft.verify.session import Phase, Session
from graft.verify.shelf import PrefixName, Proposal
from graft.verify.step import Captured
from graft.verify.tally import Tally

CHUNK_BYTES = 1 << 20
"""Hidden states sent in one piece at most, so that messages stay far below their cap."""

MAX_COMMIT_BYTES = 8 << 20
"""Those that go with one commit at most; what is more follows in pieces with the next one."""

_REMEMBERED_SESSIONS = 4096
_SILENT_WHEN_EMPTY = frozenset(
    {
        TreeRefusal.TREE_REFUSAL_STALE,
        TreeRefusal.TREE_REFUSAL_REPEATED,
        TreeRefusal.TREE_REFUSAL_NO_CREDIT,
    }
)


class Audience:
    """Tells streams of prefixes, commits, features, refusals and ends by appending to `events`.

    offer: the hidden states that can be had; None has none.
    """

    def __init__(self, tally: Tally, offer: FeatureOffer | None = None) -> None:
        self.events: list[Event] = []
        self._tally = tally
        self._closed: OrderedDict[int, frozenset[int]] = OrderedDict()
        self._announced = Announced(offer)
        self._patience: dict[int, Patience] = {}
        self._kept = KeptRows(0 if offer is None else offer.kept_bytes)

    def hello(self, stream: int, specs: tuple[FeatureSpec, ...]) -> None:
        """A draft service says which hidden states its joins may ask for."""
        self._announced.hello(stream, specs)

    def opened(self, session: Session) -> None:
        """From its first row on, a session that expects a drafter keeps what may be asked for."""
        self._keep(session)

    def placed(self, session: Session) -> None:
        """A session has its pages; of those that were cached, hidden states may be known, too."""
        if session.feed is not None and session.table is not None:
            self._tally.kept_rows += self._kept.restore(session.feed, session.table)

    def published(self, session: Session) -> None:
        """Pages of a session may be used by others from now on, and their hidden states, too."""
        if session.feed is not None and session.table is not None:
            self._kept.store(session.feed, session.table)

    def join(
        self,
        stream: int,
        session_id: int,
        session: Session | None,
        ticket: bytes,
        wish: FeatureWish | None = None,
    ) -> None:
        """Lets a stream attend a session; it learns the prefix once the first token is there."""
        try:
            if session is None:
                raise SessionNotFound(f"no session {session_id:x}")
            if not hmac.compare_digest(ticket, session.ticket):
                raise BadTicket(f"another ticket opens session {session_id:x}")
            if stream in session.streams:
                return
            if wish is not None:
                self._announced.check(wish.spec)
        except GraftError as error:
            self.events.append(ClosedTold(stream, session_id, error.reason))
            return
        session.streams.add(stream)
        session.patience = self._patience.setdefault(stream, Patience())
        if wish is not None:
            feed = session.feed or self._new_feed()
            first = session.length - wish.window_tokens if wish.window_tokens else 0
            feed.join(stream, wish.spec, max(0, first))
            session.feed = feed
        self._keep(session)
        self.placed(session)
        if session.phase is Phase.DECODING and not session.in_step:
            self._tell_features(session, stream)
            self._tell_prefix(session, stream)

    def leave(self, stream: int, session: Session) -> None:
        """A stream no longer attends a session."""
        session.leave(stream)
        if session.feed is not None:
            session.feed.leave(stream)
        self._keep(session)

    def gone(self, stream: int) -> None:
        """A stream ended; call it before `leave` is called for the stream's sessions."""
        self._announced.gone(stream)
        self._patience.pop(stream, None)

    def captured(self, session: Session, features: tuple[Captured, ...]) -> None:
        """Keeps hidden states of committed rows; nothing is sent before `tell_features`."""
        feed = session.feed
        for part in features:
            if feed is not None and part.payload is not None:
                feed.add(part.spec, part.start, part.payload)
            elif feed is not None:
                for stream in feed.listening(part.spec):
                    self.leave(stream, session)
                    reason = NumericFailure.reason
                    self.events.append(ClosedTold(stream, session.session_id, reason))

    def tell_features(self, session: Session) -> None:
        """Sends each stream the rows that are there, in pieces, and drops what is too old."""
        for stream in sorted(session.streams):
            self._tell_features(session, stream)
        if session.feed is not None:
            session.feed.trim(session.kv_length)

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
                self._tell_features(session, stream)
                self._tell_prefix(session, stream)
                continue
            rows = self._commit_rows(session, stream, len(tokens))
            self.events.append(
                CommitTold(
                    stream, session.session_id, tokens, length, digest, accepted, num_drafted, rows
                )
            )
        if session.feed is not None:
            session.feed.trim(session.kv_length)

    def tell_end(self, session: Session) -> None:
        """Tells all that attend that the session is over."""
        self._closed[session.session_id] = frozenset(session.streams)
        if len(self._closed) > _REMEMBERED_SESSIONS:
            self._closed.popitem(last=False)
        for stream in sorted(session.streams):
            self.events.append(ClosedTold(stream, session.session_id))

    def _tell_features(self, session: Session, stream: int, stop: int | None = None) -> None:
        if (feed := session.feed) is None:
            return
        while (rows := self._take(feed, stream, "prefix", CHUNK_BYTES, stop)) is not None:
            self.events.append(FeaturesTold(stream, session.session_id, rows))

    def _commit_rows(self, session: Session, stream: int, count: int) -> Rows | None:
        """The rows of a commit of `count` tokens; those a stream lacks from before go first.

        None while some of those are not there, and where the rows are too many for a message.
        """
        first = session.kv_length - count
        self._tell_features(session, stream, first)
        feed = session.feed
        if feed is None or feed.behind(stream) != first:
            return None
        return self._take(feed, stream, "commit", MAX_COMMIT_BYTES, session.kv_length)

    def _take(
        self, feed: Feed, stream: int, part: str, max_bytes: int, stop: int | None = None
    ) -> Rows | None:
        start, count, payload = feed.take(stream, max_bytes, stop)
        if not count:
            return None
        self._tally.feature_bytes[part] += len(payload)
        self._tally.feature_rows[part] += count
        return Rows(start, count, payload)

    def _new_feed(self) -> Feed:
        offer = self._announced.offer
        assert offer is not None, "features were promised that nobody offers"
        return Feed(offer.share_bytes, offer.row_bytes)

    def _keep(self, session: Session) -> None:
        """Keeps rows of the specs that streams listen to; of those announced while a drafter is
        expected and none is there."""
        awaited = session.request.speculate and not session.streams
        announced = self._announced.specs if awaited else ()
        if session.feed is None and announced:
            session.feed = self._new_feed()
        if session.feed is not None:
            session.feed.keep(announced)
            if not session.feed.specs:
                session.feed = None

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
