"""The sessions of one link: who joins, what is told to the engine, which trees may go.

A state machine without I/O: messages of verify and outcomes of the engine come in, events for the
engine and entries of the outbox go out. Knows credits and order; knows no stream and no proposer.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np

from graft.common import log
from graft.common.errors import GraftError, reason_name
from graft.common.prefix import Prefix
from graft.common.sampling import sampling_from_proto
from graft.common.tier import Tier
from graft.common.tree import IntArray, TreeLimits
from graft.common.tree_codec import token_width
from graft.draft.credits import Credits
from graft.draft.events import (
    Broke,
    Closed,
    Committed,
    Event,
    Featured,
    Opened,
    Outcome,
    Proposed,
    Refused,
    Retiered,
)
from graft.draft.features import FeatureChunk, FeatureStore, FeatureTerms
from graft.draft.metrics import DraftMetrics
from graft.draft.mirror import Mirror
from graft.draft.outbox import Outbox
from graft.draft.pairing import agree_features, tier_in_force
from graft.draft.proposers.base import ProposerInfo
from graft.draft.traced import SessionSpans
from graft.v1.error_reason_pb2 import ErrorReason
from graft.v1.features_pb2 import FeatureRows, SessionFeatures
from graft.v1.tree_pb2 import TreeRefusal
from graft.v1.verify_pb2 import (
    RoundsResponse,
    SessionClosed,
    SessionCommit,
    SessionPrefix,
    TreeRefused,
    VerifyServiceDescribeResponse,
)

_log = log.get("roster")

MAX_REJOINS = 3


class Listener(Protocol):
    """Who asked for a session to be attended, and wants to know how it goes."""

    def attended(self, session_id: int, tier: Tier) -> None:
        """The session has been joined; `tier` is in force."""
        ...

    def refused(self, session_id: int, reason: ErrorReason.ValueType, detail: str) -> None:
        """The session is not, or no longer, attended."""
        ...

    def closed(self, session_id: int) -> None:
        """Verify has finished the session, or somebody else has it attended."""
        ...


class Desk(Protocol):
    """Where events for the engine go."""

    def post(self, event: Event) -> None:
        """Queues an event."""
        ...


@dataclass(frozen=True, slots=True)
class Office:
    """What all rosters of a service share.

    keys: names for attendances, never used twice.
    routes: the roster of every attendance that the engine knows, by its key.
    emptied: set whenever a roster loses its last session.
    spans: of sessions whose requests are traced.
    """

    infos: Mapping[str, ProposerInfo]
    engine: Desk
    metrics: DraftMetrics
    keys: itertools.count[int] = field(default_factory=itertools.count)
    routes: dict[int, Roster] = field(default_factory=dict)
    emptied: asyncio.Event = field(default_factory=asyncio.Event)
    spans: SessionSpans = field(default_factory=SessionSpans)


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
    """A session to attend. prediction: [tokens], int32, what its client expects; None for none."""

    session_id: int
    ticket: bytes
    tier: Tier
    prediction: IntArray | None = None


class _Stage(Enum):
    WAITING = "waiting for the stream"
    JOINING = "waiting for the prefix"
    JOINED = "joined"


@dataclass(slots=True, eq=False)
class _Session:
    """One attendance. `key` is the engine's name for it while it is joined, else None.

    terms: the hidden states that its join asked for. early: rows that came before its prefix.
    """

    session_id: int
    ticket: bytes
    tier: Tier
    listener: Listener
    prediction: IntArray | None = None
    stage: _Stage = _Stage.WAITING
    key: int | None = None
    credits: Credits = field(default_factory=lambda: Credits(0))
    num_rejoins: int = 0
    announced: bool = False
    terms: FeatureTerms | None = None
    early: list[FeatureChunk] = field(default_factory=list)


class Roster:
    """Sessions at one verify replica. All methods are called on the loop's thread."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._sessions: dict[int, _Session] = {}
        self._by_key: dict[int, _Session] = {}
        self._outbox: Outbox | None = None
        self._limits = TreeLimits(0, 0, 0)
        self._welcome = VerifyServiceDescribeResponse()

    def __len__(self) -> int:
        """Sessions attended or being joined."""
        return len(self._sessions)

    def attend(self, wish: Wish, listener: Listener) -> None:
        """Joins a session, now or as soon as the stream is up; the newest listener keeps it."""
        session_id = wish.session_id
        former = self._sessions.get(session_id)
        if former is not None:
            self._drop(session_id, leave=True)
            former.listener.closed(session_id)
        session = _Session(session_id, wish.ticket, wish.tier, listener, wish.prediction)
        self._sessions[session_id] = session
        self._office.metrics.sessions.inc()
        if self._outbox is not None:
            self._join(session, self._outbox)

    def set_tier(self, session_id: int, tier: Tier, listener: Listener) -> None:
        """Changes the tier from the next tree on, unless somebody else has the session now."""
        session = self._sessions.get(session_id)
        if session is None or session.listener is not listener:
            return
        session.tier = tier
        if self._outbox is None:
            return
        try:
            terms = self._terms(tier)
        except GraftError as error:
            self._refuse(session, error.reason, str(error), leave=True)
            return
        if terms is not None and terms != session.terms:
            # Rows that flow already are kept by a tier that needs none, for a quick way back.
            self._forget_key(session)
            self._outbox.leave(session_id)
            self._join(session, self._outbox)
        elif session.key is not None:
            self._office.engine.post(Retiered(session.key, self._in_force(tier)))

    def release(self, session_id: int, listener: Listener) -> None:
        """Leaves a session, unless somebody else has taken it over."""
        session = self._sessions.get(session_id)
        if session is not None and session.listener is listener:
            self._drop(session_id, leave=True)

    def deliver(self, outcome: Outcome) -> None:
        """Takes what the engine made for one of this link's sessions."""
        session = self._by_key.get(outcome.key)
        if session is None or self._outbox is None:
            return
        if isinstance(outcome, Broke):
            self._rejoin(session, self._outbox, outcome.detail)
        else:
            self._push(session, self._outbox, outcome)
        self._outbox.flush()

    def connected(
        self, outbox: Outbox, limits: TreeLimits, welcome: VerifyServiceDescribeResponse
    ) -> None:
        """The stream is up, with these limits: every session that waited joins through `outbox`."""
        self._outbox, self._limits, self._welcome = outbox, limits, welcome
        for session in list(self._sessions.values()):
            self._join(session, outbox)

    def lost(self, reason: ErrorReason.ValueType, detail: str) -> None:
        """The stream is gone, or never came: its sessions are refused."""
        self._outbox = None
        self.refuse_all(reason, detail)

    def refuse_all(self, reason: ErrorReason.ValueType, detail: str) -> None:
        """Leaves every session and says why."""
        for session in list(self._sessions.values()):
            self._refuse(session, reason, detail, leave=True)

    def take(self, response: RoundsResponse) -> None:
        """One message of verify, its parts in order."""
        for features in response.features:
            self._features(features)
        for prefix in response.prefixes:
            self._prefix(prefix)
        for commit in response.commits:
            self._commit(commit)
        for refusal in response.refusals:
            self._refusal(refusal)
        for closed in response.closed:
            self._closed(closed)

    def _features(self, told: SessionFeatures) -> None:
        session = self._sessions.get(told.session_id)
        if session is None or session.stage is _Stage.WAITING:
            return
        chunk = self._chunk(told.rows)
        if session.key is not None:
            self._office.engine.post(Featured(session.key, chunk))
            return
        if session.early and session.early[-1].start + session.early[-1].count != chunk.start:
            # Those were for a join that has been taken back since.
            session.early.clear()
        session.early.append(chunk)

    def _chunk(self, rows: FeatureRows) -> FeatureChunk:
        self._office.metrics.feature_bytes.inc(len(rows.payload))
        self._office.metrics.feature_rows.inc(rows.row_count)
        return FeatureChunk(rows.start_position, rows.row_count, rows.payload)

    def _prefix(self, told: SessionPrefix) -> None:
        session = self._sessions.get(told.session_id)
        if session is None or session.stage is _Stage.WAITING:
            return
        self._forget_key(session)
        try:
            mirror = Mirror(
                session_id=told.session_id,
                prefix=Prefix(np.asarray(told.tokens, np.int64).astype(np.int32)),
                prompt_length=told.prompt_token_count,
                sampling=sampling_from_proto(told.sampling),
                limits=self._limits,
                room=told.room,
                cache_salt=told.cache_salt,
                features=_store(session.terms),
                prediction=session.prediction,
            )
        except GraftError as error:
            self._refuse(session, error.reason, str(error), leave=True)
            return
        tier = self._in_force(session.tier)
        session.key = key = next(self._office.keys)
        session.stage = _Stage.JOINED
        session.credits = Credits(
            self._welcome.max_trees, (len(mirror.prefix), mirror.prefix.digest)
        )
        self._by_key[key] = session
        self._office.routes[key] = self
        early, session.early = tuple(session.early), []
        self._office.engine.post(Opened(key, mirror, tier, early, self._welcome.max_trees))
        if not session.announced:
            session.announced = True
            session.listener.attended(session.session_id, tier)

    def _commit(self, told: SessionCommit) -> None:
        session = self._sessions.get(told.session_id)
        if session is None or session.key is None:
            return
        session.credits.moved(told.prefix_length, told.prefix_digest)
        self._office.metrics.committed.inc(len(told.tokens))
        self._office.metrics.accepted.inc(told.accepted_count)
        self._office.engine.post(
            Committed(
                session.key,
                tuple(told.tokens),
                told.prefix_length,
                told.prefix_digest,
                self._chunk(told.features) if told.HasField("features") else None,
                told.node_count,
            )
        )

    def _refusal(self, told: TreeRefused) -> None:
        self._office.metrics.tree_refusals.labels(_refusal_name(told.refusal)).inc()
        session = self._sessions.get(told.session_id)
        if session is not None:
            session.credits.refused(told.prefix_length)
            if session.key is not None:
                self._office.engine.post(Refused(session.key, told.prefix_length))

    def _closed(self, told: SessionClosed) -> None:
        session = self._sessions.get(told.session_id)
        if session is None:
            return
        if told.error:
            known = told.error in ErrorReason.values()
            reason = told.error if known else ErrorReason.ERROR_REASON_INTERNAL
            self._refuse(session, reason, "verify did not let the session be joined", leave=False)
        else:
            self._drop(told.session_id, leave=False)
            session.listener.closed(told.session_id)

    def _push(self, session: _Session, outbox: Outbox, made: Proposed) -> None:
        metrics = self._office.metrics
        self._office.spans.proposed(session.session_id, made)
        if made.verbatim:
            for tree in made.trees:
                outbox.tree(tree)
            return
        for tree in made.trees:
            withheld = session.credits.take(tree.prefix_length, tree.prefix_digest)
            if withheld is not None:
                metrics.withheld.labels(withheld).inc()
                if withheld == "stale" and not made.ahead:
                    # Verify went on without it; it learns how long to wait for the next one.
                    outbox.empty(session.session_id, tree.prefix_length, tree.prefix_digest)
                continue
            outbox.tree(tree)
            metrics.trees.labels(made.proposer).inc()
            metrics.nodes.labels(made.proposer).inc(
                len(tree.tokens) // token_width(self._limits.vocab_size)
            )
            metrics.tree_bytes.labels(made.proposer).inc(tree.ByteSize())
        if made.ahead and not made.trees:
            if session.credits.take(made.prefix_length, made.prefix_digest) is None:
                outbox.empty(session.session_id, made.prefix_length, made.prefix_digest)
        elif not made.trees:
            if (made.prefix_length, made.prefix_digest) == session.credits.prefix or made.behind:
                outbox.empty(
                    session.session_id, made.prefix_length, made.prefix_digest, made.behind
                )
                metrics.empties.labels(made.proposer).inc()
            else:
                metrics.withheld.labels("stale").inc()

    def _join(self, session: _Session, outbox: Outbox) -> None:
        try:
            session.terms = self._terms(session.tier)
        except GraftError as error:
            self._refuse(session, error.reason, str(error), leave=False)
            return
        session.stage = _Stage.JOINING
        session.early.clear()
        outbox.join(session.session_id, session.ticket, session.terms)

    def _terms(self, tier: Tier) -> FeatureTerms | None:
        """The hidden states that a tier's proposer needs.

        Raises:
            Mismatch: verify does not send them.
        """
        needs = self._office.infos[tier.proposer].needs
        return None if needs is None else agree_features(needs, self._welcome)

    def _rejoin(self, session: _Session, outbox: Outbox, detail: str) -> None:
        self._forget_key(session)
        if session.num_rejoins >= MAX_REJOINS:
            self._refuse(session, ErrorReason.ERROR_REASON_PROTOCOL, detail, leave=True)
            return
        session.num_rejoins += 1
        self._office.metrics.rejoins.inc()
        _log.warning("chain broke", session=f"{session.session_id:016x}", detail=detail)
        outbox.leave(session.session_id)
        self._join(session, outbox)

    def _in_force(self, tier: Tier) -> Tier:
        info = self._office.infos[tier.proposer]
        return tier_in_force(tier, info, self._limits, self._welcome.max_trees)

    def _refuse(
        self, session: _Session, reason: ErrorReason.ValueType, detail: str, *, leave: bool
    ) -> None:
        self._drop(session.session_id, leave=leave)
        self._office.metrics.session_refusals.labels(reason_name(reason)).inc()
        session.listener.refused(session.session_id, reason, detail)

    def _drop(self, session_id: int, *, leave: bool) -> None:
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        self._forget_key(session)
        self._office.spans.end(session_id)
        if leave and self._outbox is not None:
            self._outbox.leave(session_id)
        self._office.metrics.sessions.dec()
        if not self._sessions:
            self._office.emptied.set()

    def _forget_key(self, session: _Session) -> None:
        if session.key is not None:
            self._office.engine.post(Closed(session.key))
            del self._by_key[session.key], self._office.routes[session.key]
            session.key = None


def _store(terms: FeatureTerms | None) -> FeatureStore | None:
    if terms is None:
        return None
    return FeatureStore(terms.width, fused=bool(terms.spec.fused_id), codec=terms.spec.codec)


def _refusal_name(refusal: TreeRefusal.ValueType) -> str:
    if refusal not in TreeRefusal.values():
        return "unknown"
    return TreeRefusal.Name(refusal).removeprefix("TREE_REFUSAL_").lower()
