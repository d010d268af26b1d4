"""Which verify replica gets a session, and which draft replica attends it.

Plain decisions and one state machine: events in, actions out, time passed in. No I/O.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from graft.common.tier import Tier

AFFINITY_TOKENS = 64
AFFINITY_SLACK = 2


@dataclass(frozen=True, slots=True)
class VerifyLoad:
    """How busy a usable verify replica is: sessions running or waiting there."""

    address: str
    num_sessions: int


def affinity_key(cache_salt: str, prompt: Sequence[int]) -> bytes:
    """Equal for requests that start alike under one salt: they share cached prefixes."""
    head = prompt[:AFFINITY_TOKENS]
    digest = hashlib.blake2b(cache_salt.encode(), digest_size=16)
    digest.update(struct.pack(f"<{len(head)}I", *head))
    return digest.digest()


def choose_verify(
    loads: Sequence[VerifyLoad], key: bytes, avoid: Collection[str] = ()
) -> str | None:
    """The replica for a session: of the least loaded, the one its prompt's start hashes to.

    Replicas within AFFINITY_SLACK sessions of the least loaded count as equally loaded.
    """
    free = [load for load in loads if load.address not in avoid]
    if not free:
        return None
    least = min(load.num_sessions for load in free)
    near = [load.address for load in free if load.num_sessions <= least + AFFINITY_SLACK]
    return max(near, key=lambda address: _weight(key, address))


def _weight(key: bytes, address: str) -> bytes:
    return hashlib.blake2b(key + address.encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class Wish:
    """A session that wants a drafter. `traceparent` is its request's span, where it is traced."""

    session: int
    ticket: bytes
    verify_address: str
    tier: Tier
    traceparent: str = ""
    prediction: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Attend:
    """Tell `draft` to attend the session."""

    draft: str
    wish: Wish


@dataclass(frozen=True, slots=True)
class ChangeTier:
    """Tell `draft` the session's new tier."""

    draft: str
    session: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Release:
    """Tell `draft` to leave the session."""

    draft: str
    session: int


Action = Attend | ChangeTier | Release


@dataclass(slots=True)
class _Link:
    proposers: frozenset[str]
    max_sessions: int
    sessions: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Session:
    wish: Wish
    draft: str | None = None
    refused_until: dict[str, float] = field(default_factory=dict)


class Attendance:
    """Which draft replica attends which session; sessions of a lost drafter go to another.

    A drafter that refused a session is asked again after `retry_s`, or at once when it is new.
    """

    def __init__(self, retry_s: float = 2.0) -> None:
        self._retry_s = retry_s
        self._links: dict[str, _Link] = {}
        self._sessions: dict[int, _Session] = {}

    @property
    def num_sessions(self) -> int:
        """Sessions that want a drafter."""
        return len(self._sessions)

    def drafter_of(self, session: int) -> str | None:
        """The draft replica that was told to attend the session."""
        found = self._sessions.get(session)
        return None if found is None else found.draft

    def link_up(
        self, draft: str, proposers: frozenset[str], max_sessions: int, now: float
    ) -> list[Action]:
        """A draft replica can be talked to."""
        actions = self.link_down(draft, now)
        self._links[draft] = _Link(proposers, max_sessions)
        for session in self._sessions.values():
            session.refused_until.pop(draft, None)
        return actions + self.tick(now)

    def link_down(self, draft: str, now: float) -> list[Action]:
        """A draft replica is gone; its sessions look for another."""
        link = self._links.pop(draft, None)
        actions: list[Action] = []
        for number in link.sessions if link is not None else ():
            session = self._sessions[number]
            session.draft = None
            actions += self._place(session, now)
        return actions

    def wish(self, wish: Wish, now: float) -> list[Action]:
        """A session wants a drafter from now on."""
        if wish.session in self._sessions:
            return []
        session = self._sessions[wish.session] = _Session(wish)
        return self._place(session, now)

    def change_tier(self, number: int, tier: Tier, now: float) -> list[Action]:
        """The session's tier changed; another proposer may mean another drafter."""
        session = self._sessions.get(number)
        if session is None:
            return []
        session.wish = replace(session.wish, tier=tier)
        draft = session.draft
        if draft is None:
            return self._place(session, now)
        if tier.off or tier.proposer in self._links[draft].proposers:
            return [ChangeTier(draft, number, tier)]
        self._unlink(session)
        return [Release(draft, number), *self._place(session, now)]

    def refused(self, draft: str, number: int, now: float) -> list[Action]:
        """The drafter will not attend the session, or no longer can."""
        session = self._sessions.get(number)
        if session is None or session.draft != draft:
            return []
        self._unlink(session)
        session.refused_until[draft] = now + self._retry_s
        return self._place(session, now)

    def release(self, number: int) -> list[Action]:
        """The session is over."""
        session = self._sessions.pop(number, None)
        if session is None or session.draft is None:
            return []
        self._links[session.draft].sessions.discard(number)
        return [Release(session.draft, number)]

    def tick(self, now: float) -> list[Action]:
        """Looks again for drafters of sessions that have none."""
        actions: list[Action] = []
        for session in self._sessions.values():
            if session.draft is None:
                actions += self._place(session, now)
        return actions

    def _unlink(self, session: _Session) -> None:
        assert session.draft is not None
        self._links[session.draft].sessions.discard(session.wish.session)
        session.draft = None

    def _place(self, session: _Session, now: float) -> list[Action]:
        """The least busy drafter that has the proposer and did not just refuse."""
        fit = [
            (len(link.sessions), draft)
            for draft, link in self._links.items()
            if session.wish.tier.proposer in link.proposers
            and session.refused_until.get(draft, now) <= now
            and (not link.max_sessions or len(link.sessions) < link.max_sessions)
        ]
        if not fit or session.wish.tier.off:
            return []
        _, draft = min(fit)
        session.draft = draft
        self._links[draft].sessions.add(session.wish.session)
        return [Attend(draft, session.wish)]
