"""Who runs and who waits: admission by free pages, growth on demand, preemption of the youngest.

Knows sessions and pages; knows no tree, no step and no stream.
"""

from __future__ import annotations

from collections import deque

from graft.verify.pages import OutOfPages, PagePool, PageTable
from graft.verify.session import Phase, Session
from graft.verify.tally import Tally


class Places:
    """Waiting and running sessions, both in order of arrival."""

    def __init__(self, pool: PagePool, max_running: int, tally: Tally) -> None:
        self.pool = pool
        self.waiting: deque[Session] = deque()
        self.running: list[Session] = []
        self._max_running = max_running
        self._tally = tally

    @property
    def num_free(self) -> int:
        """Sessions that could still run at once."""
        return self._max_running - len(self.running)

    def admit(self) -> list[Session]:
        """Gives places to waiting sessions in order, as long as their pages fit; returns them.

        A page for each running session is left over, so that admission does not lead straight
        to preemption. A session alone always fits: the context is no longer than the pool.
        """
        admitted = []
        while self.waiting and self.num_free > 0:
            session = self.waiting[0]
            table = PageTable(self.pool, session.request.cache_salt)
            try:
                session.kv_length = table.attach(
                    session.prefix.tokens,
                    session.length,
                    headroom=len(self.running),
                    reuse=not session.prompt_logprobs_due,
                )
            except OutOfPages:
                break
            session.table = table
            session.phase = Phase.PREFILL
            session.prompt_logprobs.clear()
            self._tally.reused += session.kv_length
            self.waiting.popleft()
            self.running.append(session)
            admitted.append(session)
        return admitted

    def grow(self, session: Session, length: int) -> bool:
        """Makes room for `length` tokens at the expense of the youngest; False when it is that."""
        while True:
            try:
                session.pages().reserve(length)
                return True
            except OutOfPages:
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is session:
                    return False

    def remove(self, session: Session) -> None:
        """Takes a session out for good; its pages go back."""
        if session in self.running:
            self.running.remove(session)
        elif session in self.waiting:
            self.waiting.remove(session)
        _release(session)
        session.phase = Phase.FINISHED

    def check(self) -> None:
        """Asserts that places, phases, pages and prefixes agree; linear in the state."""
        self.pool.check()
        held: set[int] = set()
        for session in self.running:
            assert session.phase in (Phase.PREFILL, Phase.DECODING), "a running session waits"
            held.update(session.pages().pages)
            assert session.pages().capacity >= session.kv_length, "KV outgrew its pages"
            if session.phase is Phase.DECODING:
                assert session.kv_length == session.length - 1, "KV and prefix disagree"
                spare = session.pages().capacity - session.kv_length
                assert spare < self.pool.page_tokens, "rejected slots are not free"
        for session in self.waiting:
            assert session.phase is Phase.WAITING and session.table is None
        assert len(held) == self.pool.num_used, "a page is held by no session"
        arrivals = [session.arrived for session in (*self.running, *self.waiting)]
        assert arrivals == sorted(arrivals), "a younger session overtook an older one"

    def _preempt(self, session: Session) -> None:
        """Takes a session's pages; it waits in front and is prefilled again from its prefix."""
        self.running.remove(session)
        _release(session)
        if session.feed is not None:
            session.feed.forget()
        session.phase = Phase.WAITING
        self.waiting.appendleft(session)
        self._tally.preemptions += 1


def _release(session: Session) -> None:
    if session.table is not None:
        session.table.release()
        session.table = None
    session.kv_length = 0
