"""What passes between a link's sessions and the engine: events in, outcomes out.

Values only; knows no thread and no stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from graft.common.tier import Tier
from graft.draft.features import FeatureChunk
from graft.draft.mirror import Mirror
from graft.v1.tree_pb2 import CandidateTree


@dataclass(frozen=True, slots=True)
class Opened:
    """A session has joined. `key` names this one attendance of it and is never used again.

    features: rows that came before its prefix. max_trees: the most verify holds for it.
    """

    key: int
    mirror: Mirror
    tier: Tier
    features: tuple[FeatureChunk, ...] = ()
    max_trees: int = 1


@dataclass(frozen=True, slots=True)
class Committed:
    """Verify has committed tokens. num_drafted: nodes of the round's tree."""

    key: int
    tokens: tuple[int, ...]
    prefix_length: int
    prefix_digest: int
    features: FeatureChunk | None = None
    num_drafted: int = 0


@dataclass(frozen=True, slots=True)
class Featured:
    """Verify has sent hidden states outside of a commit."""

    key: int
    features: FeatureChunk


@dataclass(frozen=True, slots=True)
class Retiered:
    """The gateway has changed the tier, from the next tree on."""

    key: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Closed:
    """The session is over, or left."""

    key: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Verify did not keep a tree for a prefix of this length."""

    key: int
    prefix_length: int


Event = Opened | Committed | Featured | Retiered | Closed | Refused


@dataclass(frozen=True, slots=True)
class Proposed:
    """What was made for one prefix.

    trees: messages ready to send; none when nothing was found.
    verbatim: the proposer wrote the messages itself, so they pass unchecked.
    elapsed_s: how long the proposer worked, for all sessions of its batch.
    ahead: the prefix is not committed, only likely to be.
    behind: the proposer still reads what came before; there is nothing until it has.
    """

    key: int
    proposer: str
    prefix_length: int
    prefix_digest: int
    trees: tuple[CandidateTree, ...]
    verbatim: bool = False
    elapsed_s: float = 0.0
    ahead: bool = False
    behind: bool = False


@dataclass(frozen=True, slots=True)
class Broke:
    """A session's mirror no longer follows verify; the engine has forgotten it."""

    key: int
    detail: str


Outcome = Proposed | Broke
