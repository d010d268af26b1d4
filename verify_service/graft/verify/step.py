"""One step of the target, as planned and as it came out. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from graft.common.errors import GraftError
from graft.common.features import FeatureSpec
from graft.common.tree import IntArray, Tree
from graft.verify.events import TokenLogprob, TreeTrace
from graft.verify.session import Session, Turn


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Prefix tokens start..stop-1 of a session; the last chunk ends in a choice."""

    session: Session
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """Rows it takes in the step."""
        return self.stop - self.start

    @property
    def last(self) -> bool:
        """True when the prefix is complete after it."""
        return self.stop == self.session.length


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """A candidate tree, of the root alone for plain decoding, and the turn it came from."""

    session: Session
    tree: Tree
    turn: Turn

    @property
    def num_rows(self) -> int:
        """Rows it takes in the step."""
        return self.tree.num_nodes


@dataclass(frozen=True, slots=True, eq=False)
class Recall:
    """Committed tokens start..stop-1, run once more for the hidden states that a drafter missed.

    They read the keys that are there; their own go to `write_slots` on `pages`, which nobody reads,
    so that neither this session nor one that shares its pages can change by a bit.
    """

    session: Session
    start: int
    stop: int
    pages: tuple[int, ...]
    write_slots: IntArray

    @property
    def num_rows(self) -> int:
        """Rows it takes in the step."""
        return self.stop - self.start


Work = Chunk | Round | Recall


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one forward runs; no session has two chunks or rounds, a recall may go beside them."""

    works: tuple[Work, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the forward."""
        return sum(work.num_rows for work in self.works)

    @property
    def num_sessions(self) -> int:
        """Sessions that have a part in it."""
        return len({work.session.session_id for work in self.works})


@dataclass(frozen=True, slots=True)
class Captured:
    """Rows of hidden states as they are sent, of positions from `start` on.

    payload is None when a state was not a finite number, which no codec writes.
    """

    spec: FeatureSpec
    start: int
    payload: bytes | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a work came to: the target's tokens along the accepted path, its own token last.

    tokens is empty for a chunk that is not the last, and for a recall. logprobs has one entry a
    token when asked for. nodes: of a round, the nodes of the accepted path, root first.
    """

    tokens: tuple[int, ...] = ()
    accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: GraftError | None = None
    nodes: tuple[int, ...] = ()
    features: tuple[Captured, ...] = ()
    trace: TreeTrace | None = None


@dataclass(frozen=True, slots=True)
class StepTiming:
    """When a step began and what its parts took, in seconds."""

    started: float
    forward_s: float
    choice_s: float
