"""A verify replica without sockets: scheduler, pages and a real target, stepped by hand.

Drafters are functions of a session's committed tokens. Every step checks the scheduler's
invariants. Knows no service; time stands still.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from graft.common.sampling import Sampling, StopRule
from graft.common.tree import Tree
from graft.testing.plain import Plain
from graft.verify.ending import Ending
from graft.verify.events import Committed, Failed, Finished
from graft.verify.pages import PagePool
from graft.verify.runner import Runner
from graft.verify.scheduler import Scheduler, SchedulerLimits
from graft.verify.session import Phase, Session, SessionRequest
from graft.verify.shelf import Proposal

Drafter = Callable[[list[int]], Tree | Proposal | None]
"""What to propose after the committed tokens; None has nothing to propose."""

STREAM = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """How a replica batches, chunks and pages; `num_pages` 0 has room for all that run."""

    max_running: int = 8
    chunk_tokens: int = 32
    max_step_rows: int = 512
    page_tokens: int = 16
    num_pages: int = 0
    context: int = 192


@dataclass(slots=True, eq=False)
class Written:
    """One session: what was committed, and how much of it was drafted."""

    session: Session
    drafter: Drafter | None
    tokens: list[int] = field(default_factory=list)
    num_accepted: int = 0
    num_rounds: int = 0


class Replica:
    """Sessions of one target, all at once."""

    def __init__(self, plain: Plain, shape: Shape) -> None:
        per_session = -(-shape.context // shape.page_tokens)
        num_pages = shape.num_pages or shape.max_running * per_session * 2
        limits = SchedulerLimits(
            shape.max_running, 1 << 20, shape.max_step_rows, shape.chunk_tokens
        )
        self.scheduler = Scheduler(limits, PagePool(num_pages, shape.page_tokens))
        kv = plain.new_kv(num_pages * shape.page_tokens, shape.page_tokens)
        self._runner = Runner(plain.target.decoder, plain.ops, kv)
        self._context = shape.context
        self._ids = itertools.count(1)
        self._open: dict[int, Written] = {}

    def open(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        drafter: Drafter | None = None,
        committed: Sequence[int] = (),
    ) -> Written:
        """Queues a session; with a drafter, one that waits for nobody."""
        stop = StopRule(max_tokens)
        request = SessionRequest(
            prompt=np.asarray(prompt, np.int32),
            committed=np.asarray(committed, np.int32),
            sampling=sampling,
            stop=stop,
            speculate=drafter is not None,
        )
        ending = Ending.of(stop, frozenset(), self._context - len(prompt))
        session = Session(next(self._ids), b"", request, ending, 4)
        written = self._open[session.session_id] = Written(session, drafter)
        self.scheduler.open(session, 0.0)
        if drafter is not None:
            self.scheduler.join(STREAM, session.session_id, b"")
        return written

    def lose_drafters(self) -> None:
        """All drafters are gone from one moment to the next."""
        self.scheduler.stream_gone(STREAM)
        for written in self._open.values():
            written.drafter = None

    def step(self) -> bool:
        """Runs one step; False when no session is left."""
        if not self.scheduler.num_sessions:
            return False
        self._draft()
        plan = self.scheduler.plan(1.0)
        assert plan.step is not None, "sessions are open and nothing is ready"
        outcomes, timing = self._runner.run(plan.step)
        self.scheduler.complete(plan.step, outcomes, timing, 1.0)
        self.scheduler.check()
        for event in self.scheduler.take_events():
            if isinstance(event, Committed):
                written = self._open[event.session_id]
                written.tokens += event.tokens
                written.num_accepted += event.accepted
                written.num_rounds += 1
            elif isinstance(event, Finished):
                del self._open[event.session_id]
            elif isinstance(event, Failed):
                raise event.error
        return True

    def run(self) -> None:
        """Steps until every session has ended; all pages are back then."""
        while self.step():
            pass
        assert self.scheduler.places.pool.num_used == 0

    def _draft(self) -> None:
        for session in self.scheduler.places.running:
            drafter = self._open[session.session_id].drafter
            if drafter is None or session.phase is not Phase.DECODING:
                continue
            made = drafter(session.prefix.tokens.tolist())
            proposal = made if isinstance(made, Proposal) else Proposal(made)
            proposal = replace(proposal, stream=STREAM)
            self.scheduler.offer(session.session_id, session.name, proposal, 0.0)
