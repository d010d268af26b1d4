"""What happened, as values: from the scheduler to the streams of gateways and draft services."""

from __future__ import annotations

from dataclasses import dataclass

from graft.common.errors import GraftError
from graft.common.sampling import Sampling
from graft.common.tree import IntArray
from graft.v1.error_reason_pb2 import ErrorReason
from graft.v1.tree_pb2 import TreeRefusal
from graft.v1.verify_pb2 import FinishReason, PlainReason


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token and of the most likely ones beside it, best first."""

    token: int
    logprob: float
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TreeTrace:
    """The tree of a round and what the target made of it; the fields of RoundTrace.

    tokens: one a node. parents, logprobs: one a node from node 1 on. path: the accepted nodes below
    the root. choices, choice_logprobs: one a node, or empty.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    logprobs: tuple[float, ...]
    choices: tuple[int, ...]
    choice_logprobs: tuple[float, ...]
    bonus_logprob: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a round's time went; the fields of RoundTiming in seconds."""

    draft_s: float = 0.0
    tree_wait_s: float = 0.0
    queue_s: float = 0.0
    forward_s: float = 0.0
    choice_s: float = 0.0
    num_rows: int = 0
    num_sessions: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """The session has its place; its prefill begins."""

    session_id: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The target has decided tokens.

    accepted_ranks: the places of the accepted tokens among their siblings.
    rejected_children: drafted children of the last accepted node, none of which the target chose.
    """

    session_id: int
    tokens: tuple[int, ...]
    accepted: int
    num_drafted: int
    depth: int
    prefix_length: int
    plain_reason: PlainReason.ValueType
    timing: Timing
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    trace: TreeTrace | None = None
    accepted_ranks: tuple[int, ...] = ()
    rejected_children: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The session ended as it should."""

    session_id: int
    reason: FinishReason.ValueType
    stop_token: int
    num_rounds: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The session ended by an error."""

    session_id: int
    error: GraftError


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of hidden states as they are sent, of `count` positions from `start` on."""

    start: int
    count: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class FeaturesTold:
    """A joined stream is sent hidden states outside of a commit."""

    stream: int
    session_id: int
    rows: Rows


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTold:
    """A joined stream learns the committed prefix."""

    stream: int
    session_id: int
    tokens: IntArray
    prompt_length: int
    sampling: Sampling
    room: int
    cache_salt: str


@dataclass(frozen=True, slots=True)
class CommitTold:
    """A joined stream learns what a round committed.

    rows: the hidden states up to the new root; None when it wants none, or lacks earlier ones.
    """

    stream: int
    session_id: int
    tokens: tuple[int, ...]
    prefix_length: int
    prefix_digest: int
    accepted: int
    num_drafted: int
    rows: Rows | None = None


@dataclass(frozen=True, slots=True)
class RefusalTold:
    """A stream learns that a tree was not used."""

    stream: int
    session_id: int
    prefix_length: int
    refusal: TreeRefusal.ValueType


@dataclass(frozen=True, slots=True)
class ClosedTold:
    """A stream learns that a session needs no more trees, or could not be joined."""

    stream: int
    session_id: int
    error: ErrorReason.ValueType = ErrorReason.ERROR_REASON_UNSPECIFIED


SessionEvent = Opened | Committed | Finished | Failed
StreamEvent = FeaturesTold | PrefixTold | CommitTold | RefusalTold | ClosedTold
Event = SessionEvent | StreamEvent
