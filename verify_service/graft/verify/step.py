"""One step of the target, as planned and as it came out. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from graft.common.errors import GraftError
from graft.common.tree import Tree
from graft.verify.events import TokenLogprob
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


Work = Chunk | Round


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one forward runs; no session appears twice."""

    works: tuple[Work, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the forward."""
        return sum(work.num_rows for work in self.works)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a work came to: the target's tokens along the accepted path, its own token last.

    tokens is empty for a chunk that is not the last. logprobs has one entry a token when asked for.
    """

    tokens: tuple[int, ...] = ()
    accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: GraftError | None = None


@dataclass(frozen=True, slots=True)
class StepTiming:
    """When a step began and what its parts took, in seconds."""

    started: float
    forward_s: float
    choice_s: float
